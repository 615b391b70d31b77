//! NaN and infinity in a tensor, and finite values that overflow when they are encoded.

use weighbridge_schemas::policy::Verdict;
use weighbridge_schemas::report::{Finding, GateResult, Outcome};

use super::{Judged, result};

/// Rejects, or counts and allows, tensors with such values.
pub(super) fn judge(verdict: Verdict, tensors: &[Judged<'_>]) -> GateResult {
    let findings = tensors.iter().filter_map(finding).collect();
    let otherwise = match verdict {
        Verdict::Reject => Outcome::Rejected,
        Verdict::Allow => Outcome::Allowed,
    };
    result("non_finite", findings, otherwise)
}

fn finding(tensor: &Judged<'_>) -> Option<Finding> {
    let statistics = tensor.statistics;
    let (bad, overflowing) = (statistics.non_finite_elements, statistics.overflow_elements);
    if bad == 0 && overflowing == 0 {
        return None;
    }
    let mut parts = Vec::new();
    let mut rows = Vec::new();
    let places = |first: &[u64]| {
        let listed: Vec<_> = first.iter().map(ToString::to_string).collect();
        if tensor.has_rows && !listed.is_empty() {
            format!(" (first: {})", listed.join(", "))
        } else {
            String::new()
        }
    };
    let in_rows = |count: u64| match count {
        count if tensor.has_rows && count > 0 => format!(" in {count} rows"),
        _ => String::new(),
    };
    let elements = statistics.elements;
    if bad > 0 {
        let first = &statistics.first_non_finite_rows;
        let in_rows = in_rows(statistics.non_finite_rows);
        parts.push(format!("{bad} of {elements} values are NaN or infinite{in_rows}{}", places(first)));
        rows.extend(first);
    }
    if overflowing > 0 {
        let first = &statistics.first_overflow_rows;
        let in_rows = in_rows(statistics.overflow_rows);
        parts.push(format!(
            "{overflowing} of {elements} values are finite and overflow when encoded{in_rows}{}: keep the tensor, or \
             encode it more widely",
            places(first)
        ));
        rows.extend(first);
    }
    if !tensor.has_rows {
        rows.clear();
    }
    rows.sort_unstable();
    Some(Finding {
        tensor: tensor.name.clone(),
        rows,
        #[expect(clippy::cast_precision_loss, reason = "a count for people; exact to 2^53")]
        figure: Some(bad.max(overflowing) as f64),
        bound: Some(0.0),
        message: parts.join("; "),
    })
}

#[cfg(test)]
mod tests {
    use weighbridge_converter::statistics::Statistics;

    use super::*;

    #[test]
    fn rows_are_spoken_of_only_where_there_are_any() {
        let statistics = Statistics {
            elements: 9000,
            non_finite_elements: 1,
            non_finite_rows: 1,
            first_non_finite_rows: vec![2],
            overflow_elements: 3,
            overflow_rows: 2,
            first_overflow_rows: vec![0, 1],
            ..Statistics::default()
        };
        let name = "t".parse().unwrap();
        let found = |has_rows| finding(&Judged { name: &name, statistics: &statistics, has_rows }).unwrap();
        let with = found(true);
        assert_eq!(with.rows, [0, 1, 2]);
        assert_eq!(
            with.message,
            "1 of 9000 values are NaN or infinite in 1 rows (first: 2); 3 of 9000 values are finite and overflow when \
             encoded in 2 rows (first: 0, 1): keep the tensor, or encode it more widely"
        );
        let without = found(false);
        assert!(without.rows.is_empty() && !without.message.contains("row"), "{}", without.message);
        assert_eq!(without.figure, Some(3.0));
    }
}
