//! Statistics as they travel from the worker that measured them to the one that assembles: bit for bit.

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::job::{Bits, PartStatistics};

/// As they stand in a part's result.
pub(super) fn to_document(measured: &Statistics) -> PartStatistics {
    PartStatistics {
        rows: measured.rows,
        elements: measured.elements,
        min: measured.min.map(Bits),
        max: measured.max.map(Bits),
        sum_squares: Bits(measured.sum_squares),
        beyond_elements: measured.beyond_elements,
        non_finite_elements: measured.non_finite_elements,
        non_finite_rows: measured.non_finite_rows,
        first_non_finite_rows: measured.first_non_finite_rows.clone(),
        overflow_elements: measured.overflow_elements,
        overflow_rows: measured.overflow_rows,
        first_overflow_rows: measured.first_overflow_rows.clone(),
        saturated_elements: measured.saturated_elements,
        saturated_rows: measured.saturated_rows,
        compared_elements: measured.compared_elements,
        max_error: Bits(measured.max_error),
        max_error_row: measured.max_error_row,
        error_squares: Bits(measured.error_squares),
    }
}

/// As they were measured.
pub(super) fn from_document(document: &PartStatistics) -> Statistics {
    Statistics {
        rows: document.rows,
        elements: document.elements,
        min: document.min.map(|Bits(number)| number),
        max: document.max.map(|Bits(number)| number),
        sum_squares: document.sum_squares.0,
        beyond_elements: document.beyond_elements,
        non_finite_elements: document.non_finite_elements,
        non_finite_rows: document.non_finite_rows,
        first_non_finite_rows: document.first_non_finite_rows.clone(),
        overflow_elements: document.overflow_elements,
        overflow_rows: document.overflow_rows,
        first_overflow_rows: document.first_overflow_rows.clone(),
        saturated_elements: document.saturated_elements,
        saturated_rows: document.saturated_rows,
        compared_elements: document.compared_elements,
        max_error: document.max_error.0,
        max_error_row: document.max_error_row,
        error_squares: document.error_squares.0,
    }
}
