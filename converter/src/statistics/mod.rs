//! What the gates judge about a tensor, summed in one fixed order.
//!
//! A tensor is encoded in blocks of whole rows, by any number of workers and by scalar, SIMD or GPU code. All of
//! them have to come to the same bits, and floating-point addition is not associative, so the order is part of the
//! contract. It is the same for the squares of the elements and the squares of the errors:
//!
//! 1. **In a plain row** (below) all is binary32. Every run of 1024 columns has sixteen sums, beginning at 0; the
//!    element at column `c` goes to sum `c mod 16`, in the order of the columns. The run's four sums are
//!    `(s[k] + s[k+8]) + (s[k+4] + s[k+12])` for `k` from 0 to 3, widened to binary64. The row's four sums are those of
//!    its runs, added in order, beginning at 0.
//! 2. **In any other row** all is binary64. There are four sums; the element at column `c` goes to sum `c mod 4`; one
//!    that does not count adds 0.
//! 3. **In a block** there are four sums in binary64, beginning at 0, to which those of the rows are added in the order
//!    of the rows. The block's sum is `(s0 + s2) + (s1 + s3)`.
//! 4. **In a tensor** the blocks' sums are added one by one, in the order of the blocks ([`Statistics::merge`]).
//!
//! A row is *plain* if its elements are binary32 (those kept in binary64 are not), all finite and decode to something
//! finite, if the largest magnitude is 0 or from 2^-40 to 2^50, and if the sums so made are finite. So binary32 holds
//! the squares of the elements that count, and a sum of 64 of them is right to six digits. An error is the element
//! minus what it decodes to; one below 2^-63, which is nothing beside such a row, may be lost. Every operation is
//! rounded once, with no fused multiply-add. The largest error of a plain row is the root of its largest square,
//! which is the error itself unless that is below 2^-63.
//!
//! So the sums depend on where blocks begin, but not on how a block's rows are handed over. Minimum, maximum and the
//! largest error depend on no order; of equally large errors the first row is named.
//!
//! **What counts.** Minimum, maximum and squares are those of the finite elements. Errors are taken over the
//! elements that are finite in the source and decode to something finite. A row with a NaN or an infinity is a
//! *non-finite row*; a finite row of which any element decodes to something non-finite (a scale or a cast that
//! overflowed) is an *overflow row*. A finite binary64 element
//! beyond binary32, which every encoding takes its elements through, overflows likewise; it is no part of minimum,
//! maximum and squares.

mod row;

pub(crate) use row::{Errors, Sums};
use row::{each, fold, larger, smaller};

/// How many row numbers are remembered of each kind of bad row.
pub const ROWS_NAMED: usize = 8;

/// Running sums in a run of a plain row; see the module's documentation.
pub(crate) const LANES: usize = 16;
/// Running sums in any other row, and in a block.
pub(crate) const SUMS: usize = 4;
/// Columns that are summed in binary32 before they are widened.
pub(crate) const RUN: usize = 1024;
/// The smallest and the largest magnitude of a plain row that is not zero: 2^-40 and 2^50.
pub(crate) const PLAIN: std::ops::RangeInclusive<f32> = 9.094_947e-13..=1.125_899_9e15;

/// The statistics of a block of rows, or of a whole tensor.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Statistics {
    /// Rows seen.
    pub rows: u64,
    /// Elements seen, of whatever value.
    pub elements: u64,
    /// The smallest finite element; a zero is always a positive one. `None` for integers, or where nothing is finite.
    pub min: Option<f64>,
    /// The largest finite element; a zero is always a positive one.
    pub max: Option<f64>,
    /// The sum of the squares of the finite elements. Infinite only where binary64 elements make it so.
    pub sum_squares: f64,
    /// Finite binary64 elements beyond binary32, which the sum leaves out.
    pub beyond_elements: u64,
    /// Elements that are NaN or infinite.
    pub non_finite_elements: u64,
    /// Rows that hold a NaN or an infinity.
    pub non_finite_rows: u64,
    /// The numbers of the first [`ROWS_NAMED`] of them, counted from 0 in the tensor.
    pub first_non_finite_rows: Vec<u64>,
    /// Elements of finite rows that decode to something non-finite.
    pub overflow_elements: u64,
    /// Finite rows that decode to something non-finite.
    pub overflow_rows: u64,
    /// The numbers of the first [`ROWS_NAMED`] of them.
    pub first_overflow_rows: Vec<u64>,
    /// Finite elements beyond the largest number of a cast that saturates: they are stored as that number.
    pub saturated_elements: u64,
    /// Rows that hold one.
    pub saturated_rows: u64,
    /// Elements over which errors were taken: finite before encoding, and finite after decoding.
    pub compared_elements: u64,
    /// The largest absolute difference between an element and what it decodes to.
    pub max_error: f64,
    /// The first row with that error; `None` where there is no error.
    pub max_error_row: Option<u64>,
    /// The sum of the squared differences.
    pub error_squares: f64,
}

impl Statistics {
    /// Adds the statistics of the rows that follow.
    pub fn merge(&mut self, next: &Self) {
        self.rows += next.rows;
        self.elements += next.elements;
        self.min = [self.min, next.min].into_iter().flatten().reduce(f64::min);
        self.max = [self.max, next.max].into_iter().flatten().reduce(f64::max);
        self.sum_squares += next.sum_squares;
        self.beyond_elements += next.beyond_elements;
        self.non_finite_elements += next.non_finite_elements;
        self.non_finite_rows += next.non_finite_rows;
        name_rows(&mut self.first_non_finite_rows, &next.first_non_finite_rows);
        self.overflow_elements += next.overflow_elements;
        self.overflow_rows += next.overflow_rows;
        name_rows(&mut self.first_overflow_rows, &next.first_overflow_rows);
        self.saturated_elements += next.saturated_elements;
        self.saturated_rows += next.saturated_rows;
        self.compared_elements += next.compared_elements;
        if next.max_error > self.max_error {
            self.max_error = next.max_error;
            self.max_error_row = next.max_error_row;
        }
        self.error_squares += next.error_squares;
    }

    /// Gives every row that is named another number. The order of the rows has to stay as it is.
    pub fn renumber_rows(&mut self, number: impl Fn(u64) -> u64) {
        let named = self.first_non_finite_rows.iter_mut().chain(&mut self.first_overflow_rows);
        named.chain(&mut self.max_error_row).for_each(|row| *row = number(*row));
    }

    /// The Euclidean norm of the finite elements.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.sum_squares.sqrt()
    }

    /// The root of the mean square of the elements that are summed; 0 where there are none.
    #[must_use]
    pub fn rms(&self) -> f64 {
        let left_out = self.non_finite_elements.saturating_add(self.beyond_elements);
        root_mean(self.sum_squares, self.elements.saturating_sub(left_out))
    }

    /// The root of the mean squared error, in the elements' own unit; 0 where nothing was compared.
    #[must_use]
    pub fn rms_error(&self) -> f64 {
        root_mean(self.error_squares, self.compared_elements)
    }

    /// [`Self::rms_error`] over [`Self::rms`]: 0 where there is no error, infinite for an error in a tensor of zeros.
    #[must_use]
    pub fn relative_rms_error(&self) -> f64 {
        let error = self.rms_error();
        if error == 0.0 { 0.0 } else { error / self.rms() }
    }
}

fn name_rows(named: &mut Vec<u64>, more: &[u64]) {
    let free = ROWS_NAMED.saturating_sub(named.len());
    named.extend(more.iter().take(free));
}

#[expect(clippy::cast_precision_loss, reason = "a count of 2^53 and more is exact enough for a mean")]
fn root_mean(squares: f64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { (squares / count as f64).sqrt() }
}

/// Takes up the statistics of one block, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockStatistics {
    next_row: u64,
    block: Statistics,
    min: f64,
    max: f64,
    squares: [f64; SUMS],
    error_squares: [f64; SUMS],
    /// Of the plain rows.
    largest_square: f32,
}

impl BlockStatistics {
    /// Of a block that begins at the tensor's row `first_row`.
    #[must_use]
    pub fn new(first_row: u64) -> Self {
        Self {
            next_row: first_row,
            block: Statistics::default(),
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            squares: [0.0; SUMS],
            error_squares: [0.0; SUMS],
            largest_square: 0.0,
        }
    }

    /// The block's statistics.
    #[must_use]
    pub fn finish(self) -> Statistics {
        // Adding 0 makes a negative zero positive, whichever zero was found first.
        let found = |value: f64| value.is_finite().then_some(value + 0.0);
        Statistics {
            min: found(self.min),
            max: found(self.max),
            sum_squares: fold(self.squares),
            error_squares: fold(self.error_squares),
            ..self.block
        }
    }

    /// Takes a row of `elements` of which nothing but the number is of interest: integers.
    pub(crate) fn count_row(&mut self, elements: usize) {
        self.next_row += 1;
        self.block.rows += 1;
        self.block.elements += elements as u64;
    }

    /// Takes a row that is stored as it is. `sums` is that of the row.
    #[inline(always)]
    pub(crate) fn kept_row(&mut self, row: &[f32], sums: &Sums) {
        if sums.are_plain() {
            self.plain_row(row.len(), sums, &Errors::NONE);
        } else {
            self.odd_row(row.iter().map(|&value| (value.into(), value.into())), 0);
        }
    }

    /// Takes a row of binary64 that is stored as it is.
    pub(crate) fn kept_wide_row(&mut self, row: impl Iterator<Item = f64>) {
        self.odd_row(row.map(|value| (value, value)), 0);
    }

    /// Takes a row and what it decodes to; the two are of one length. `sums` is that of the row; `beyond` is how many
    /// of its elements are infinite only because they were rounded to binary32.
    #[inline(always)]
    pub(crate) fn encoded_row(&mut self, row: &[f32], sums: &Sums, decoded: &[f32], beyond: usize) {
        let errors = Errors::of(row, decoded);
        if sums.are_plain() && errors.are_finite() {
            self.plain_row(row.len(), sums, &errors);
        } else {
            self.odd_encoded_row(row, decoded, beyond);
        }
    }

    /// As [`Self::encoded_row`], of a row that is not plain.
    #[cold]
    pub(crate) fn odd_encoded_row(&mut self, row: &[f32], decoded: &[f32], beyond: usize) {
        self.odd_row(
            row.iter().zip(decoded).map(|(&value, &decoded)| (value.into(), decoded.into())),
            beyond,
        );
    }

    /// Takes a row that is plain, as its sums and errors say.
    #[inline(always)]
    pub(crate) fn plain_row(&mut self, elements: usize, sums: &Sums, errors: &Errors) {
        let number = self.next_row;
        self.count_row(elements);
        self.min = smaller(sums.min.into(), self.min);
        self.max = larger(sums.max.into(), self.max);
        self.squares = each(self.squares, &sums.squares, |sum, square| sum + square);
        self.error_squares = each(self.error_squares, &errors.squares, |sum, square| sum + square);
        self.block.compared_elements += elements as u64;
        self.take_largest(errors.largest_square, number);
    }

    /// Takes rows of `elements` that are plain, and of one run each.
    #[inline(always)]
    pub(crate) fn plain_group(&mut self, elements: usize, group: &PlainGroup) {
        let first = self.next_row;
        self.next_row += GROUP as u64;
        self.block.rows += GROUP as u64;
        self.block.elements += (GROUP * elements) as u64;
        self.block.compared_elements += (GROUP * elements) as u64;
        self.min = smaller(group.min.into(), self.min);
        self.max = larger(group.max.into(), self.max);
        for (squares, errors) in group.squares.iter().zip(&group.error_squares) {
            self.squares = each(self.squares, squares, |sum, square| sum + f64::from(square));
            self.error_squares = each(self.error_squares, errors, |sum, square| sum + f64::from(square));
        }
        if group.largest_square > self.largest_square {
            for (number, squares) in (first..).zip(&group.largest_squares) {
                self.take_largest(squares.iter().copied().fold(0.0, f32::max), number);
            }
        }
    }

    fn take_largest(&mut self, square: f32, row: u64) {
        if square > self.largest_square {
            self.largest_square = square;
            let error = f64::from(square.sqrt());
            if error > self.block.max_error {
                self.block.max_error = error;
                self.block.max_error_row = Some(row);
            }
        }
    }

    /// Says of the row taken last how many of its elements saturated.
    pub(crate) fn saturated(&mut self, elements: usize) {
        self.block.saturated_elements += elements as u64;
        self.block.saturated_rows += u64::from(elements > 0);
    }

    /// Takes a row that is not plain, as pairs of an element and what it decodes to.
    #[cold]
    #[inline(never)]
    fn odd_row(&mut self, pairs: impl Iterator<Item = (f64, f64)>, beyond: usize) {
        let number = self.next_row;
        let row = Row::element_by_element(pairs);
        self.count_row(row.elements);
        self.min = self.min.min(row.min);
        self.max = self.max.max(row.max);
        self.squares = each(self.squares, &row.squares, |sum, square| sum + square);
        self.error_squares = each(self.error_squares, &row.error_squares, |sum, square| sum + square);
        let block = &mut self.block;
        block.compared_elements += row.compared as u64;
        if row.max_error > block.max_error {
            block.max_error = row.max_error;
            block.max_error_row = Some(number);
        }
        block.beyond_elements += beyond as u64;
        let non_finite = (row.elements - row.finite).saturating_sub(beyond);
        let overflowing = (row.finite - row.compared).saturating_add(beyond);
        if non_finite > 0 {
            block.non_finite_elements += non_finite as u64;
            block.non_finite_rows += 1;
            name_rows(&mut block.first_non_finite_rows, &[number]);
        } else if overflowing > 0 {
            block.overflow_elements += overflowing as u64;
            block.overflow_rows += 1;
            name_rows(&mut block.first_overflow_rows, &[number]);
        }
    }
}

/// Rows in a group.
pub(crate) const GROUP: usize = 8;

/// Plain rows of one length, of a run each: what they add to a block, by row.
#[derive(Default)]
pub(crate) struct PlainGroup {
    pub(crate) min: f32,
    pub(crate) max: f32,
    /// Their sums of squares, not widened yet.
    pub(crate) squares: [[f32; SUMS]; GROUP],
    pub(crate) error_squares: [[f32; SUMS]; GROUP],
    /// The largest squares of errors; of each row, one of eight is the largest.
    pub(crate) largest_squares: [[f32; 8]; GROUP],
    pub(crate) largest_square: f32,
}

/// What a row that is not plain adds to a block.
struct Row {
    elements: usize,
    finite: usize,
    min: f64,
    max: f64,
    squares: [f64; SUMS],
    compared: usize,
    max_error: f64,
    error_squares: [f64; SUMS],
}

impl Row {
    fn element_by_element(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut row = Self {
            elements: 0,
            finite: 0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            squares: [0.0; SUMS],
            compared: 0,
            max_error: 0.0,
            error_squares: [0.0; SUMS],
        };
        for (column, (value, decoded)) in pairs.enumerate() {
            row.elements += 1;
            if !value.is_finite() {
                continue;
            }
            row.finite += 1;
            row.min = row.min.min(value);
            row.max = row.max.max(value);
            row.squares[column % SUMS] += value * value;
            if decoded.is_finite() {
                let error = value - decoded;
                row.compared += 1;
                row.max_error = row.max_error.max(error.abs());
                row.error_squares[column % SUMS] += error * error;
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The module's documentation, followed to the letter.
    fn reference(rows: &[(Vec<f32>, Vec<f32>)]) -> (f64, f64) {
        let mut block = [[0.0; 4]; 2];
        for (row, decoded) in rows {
            let largest = row.iter().fold(0.0, |largest, value| value.abs().max(largest));
            let finite = row.iter().chain(decoded).all(|value| value.is_finite());
            let plain = finite && (largest == 0.0 || (2f32.powi(-40)..=2f32.powi(50)).contains(&largest));
            let sums = Some(plain_row(row, decoded))
                .filter(|sums| plain && sums.as_flattened().iter().all(|s| s.is_finite()));
            let sums = sums.unwrap_or_else(|| odd_row(row, decoded));
            for (sum, more) in block.iter_mut().flatten().zip(sums.iter().flatten()) {
                *sum += more;
            }
        }
        let [squares, errors] = block.map(|s| (s[0] + s[2]) + (s[1] + s[3]));
        (squares, errors)
    }

    fn plain_row(row: &[f32], decoded: &[f32]) -> [[f64; 4]; 2] {
        let mut sums = [[0.0; 4]; 2];
        for (row, decoded) in row.chunks(1024).zip(decoded.chunks(1024)) {
            let mut lanes = [[0.0f32; 16]; 2];
            for (column, (&value, &decoded)) in row.iter().zip(decoded).enumerate() {
                lanes[0][column % 16] += value * value;
                lanes[1][column % 16] += (value - decoded) * (value - decoded);
            }
            for (sums, s) in sums.iter_mut().zip(lanes) {
                for (k, sum) in sums.iter_mut().enumerate() {
                    *sum += f64::from((s[k] + s[k + 8]) + (s[k + 4] + s[k + 12]));
                }
            }
        }
        sums
    }

    fn odd_row(row: &[f32], decoded: &[f32]) -> [[f64; 4]; 2] {
        let mut sums = [[0.0; 4]; 2];
        for (column, (&value, &decoded)) in row.iter().zip(decoded).enumerate() {
            let (value, decoded) = (f64::from(value), f64::from(decoded));
            sums[0][column % 4] += if value.is_finite() { value * value } else { 0.0 };
            let error = value - decoded;
            sums[1][column % 4] += if error.is_finite() { error * error } else { 0.0 };
        }
        sums
    }

    fn block(first_row: u64, rows: &[(Vec<f32>, Vec<f32>)]) -> Statistics {
        let mut block = BlockStatistics::new(first_row);
        for (row, decoded) in rows {
            block.encoded_row(row, &Sums::of(row).unwrap(), decoded, 0);
        }
        block.finish()
    }

    fn rows() -> impl Strategy<Value = Vec<(Vec<f32>, Vec<f32>)>> {
        let value = prop_oneof![40 => -1.0f32..1.0, 1 => any::<u32>().prop_map(f32::from_bits)];
        let width = prop_oneof![8 => 1..70usize, 1 => 1000..2100usize];
        let row = (width, -60..60i32).prop_flat_map(move |(width, exponent)| {
            let value = value.clone().prop_map(move |value| value * 2f32.powi(exponent));
            let cells = proptest::collection::vec(value, width);
            (cells.clone(), cells)
        });
        proptest::collection::vec(row, 0..20)
    }

    proptest! {
        #[test]
        fn sums_follow_the_documented_order(rows in rows()) {
            let statistics = block(0, &rows);
            let (squares, errors) = reference(&rows);
            prop_assert_eq!(statistics.sum_squares.to_bits(), squares.to_bits());
            prop_assert_eq!(statistics.error_squares.to_bits(), errors.to_bits());
        }

        #[test]
        fn merging_blocks_loses_nothing_but_rounding(rows in rows(), cut in 0..20usize) {
            let cut = cut.min(rows.len());
            let mut merged = block(0, &rows[..cut]);
            merged.merge(&block(cut as u64, &rows[cut..]));
            let whole = block(0, &rows);
            prop_assert!((merged.sum_squares - whole.sum_squares).abs() <= whole.sum_squares * 1e-14);
            prop_assert!((merged.error_squares - whole.error_squares).abs() <= whole.error_squares * 1e-14);
            merged.sum_squares = whole.sum_squares;
            merged.error_squares = whole.error_squares;
            prop_assert_eq!(merged, whole);
        }
    }

    #[test]
    fn only_so_many_rows_are_named() {
        let bad = |first| block(first, &vec![(vec![f32::NAN], vec![0.0]); 5]);
        let mut merged = Statistics::default();
        for first in [0, 5, 10] {
            merged.merge(&bad(first));
        }
        assert_eq!(merged.non_finite_rows, 15);
        assert_eq!(merged.first_non_finite_rows, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn of_equal_errors_the_first_row_is_named() {
        let statistics = block(7, &[(vec![1.0], vec![1.0]), (vec![1.0], vec![3.0]), (vec![3.0], vec![1.0])]);
        assert_eq!((statistics.max_error, statistics.max_error_row), (2.0, Some(8)));
        assert_eq!(block(7, &[(vec![1.0], vec![1.0])]).max_error_row, None);
    }

    #[test]
    fn zeros_are_reported_without_a_sign() {
        let statistics = block(0, &[(vec![-0.0, -0.0], vec![0.0, 0.0])]);
        assert_eq!(statistics.min.map(f64::to_bits), Some(0));
        assert_eq!(statistics.max.map(f64::to_bits), Some(0));
    }

    #[test]
    fn means_are_over_what_was_counted() {
        let statistics = block(0, &[(vec![3.0, f32::NAN, 4.0, 5.0], vec![3.0, 0.0, 4.0, f32::INFINITY])]);
        assert_eq!(statistics.norm(), 50f64.sqrt());
        assert_eq!(statistics.rms(), (50f64 / 3.0).sqrt());
        assert_eq!((statistics.compared_elements, statistics.rms_error()), (2, 0.0));
        // A row with a NaN is a non-finite row, whatever becomes of the rest.
        assert_eq!((statistics.non_finite_rows, statistics.overflow_rows), (1, 0));
    }

    #[test]
    fn relative_errors_have_a_meaning_without_a_norm() {
        assert_eq!(Statistics::default().relative_rms_error(), 0.0);
        assert_eq!(block(0, &[(vec![0.0], vec![0.0])]).relative_rms_error(), 0.0);
        assert_eq!(block(0, &[(vec![0.0], vec![1.0])]).relative_rms_error(), f64::INFINITY);
        assert_eq!(block(0, &[(vec![2.0], vec![1.0])]).relative_rms_error(), 0.5);
    }
}
