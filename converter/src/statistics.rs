//! What the gates judge about a tensor, summed in one fixed order.
//!
//! A tensor is encoded in blocks of whole rows, by any number of workers and by scalar, SIMD or GPU code. All of
//! them have to come to the same bits, and floating-point addition is not associative, so the order is part of the
//! contract. For the squares of the elements and the squares of the errors alike:
//!
//! 1. **In a row** there are eight sums in f64. The element at column `c` goes to sum `c mod 8`, in the order of the
//!    columns; an element that does not count (see below) adds 0. The row's sum is
//!    `((s0+s4) + (s2+s6)) + ((s1+s5) + (s3+s7))`.
//! 2. **In a block** the rows' sums are added one by one, in the order of the rows, beginning at 0.
//! 3. **In a tensor** the blocks' sums are added one by one, in the order of the blocks ([`Statistics::merge`]).
//!
//! Each element is widened to f64 before anything is done with it; squares and differences are rounded to f64, with
//! no fused multiply-add. So the sums depend on where blocks begin, but not on how a block's rows are handed over.
//! Minimum, maximum and the largest error depend on no order; of equally large errors the first row is named.
//!
//! **What counts.** Minimum, maximum and squares are those of the finite elements. Errors are taken over the
//! elements that are finite in the source and decode to something finite. A row with a NaN or an infinity is a
//! *non-finite row*; a finite row of which any element decodes to something non-finite (a scale or a cast that
//! overflowed) is an *overflow row*. A finite binary64 element
//! beyond binary32, which every encoding takes its elements through, overflows likewise; it is no part of minimum,
//! maximum and squares.

use std::array;

/// How many row numbers are remembered of each kind of bad row.
pub const ROWS_NAMED: usize = 8;

/// Running sums in a row; see the module's documentation.
const LANES: usize = 8;

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

    /// The root of the mean square of the finite elements; 0 where there are none.
    #[must_use]
    pub fn rms(&self) -> f64 {
        root_mean(self.sum_squares, self.elements - self.non_finite_elements)
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
}

impl BlockStatistics {
    /// Of a block that begins at the tensor's row `first_row`.
    #[must_use]
    pub fn new(first_row: u64) -> Self {
        Self { next_row: first_row, block: Statistics::default() }
    }

    /// The block's statistics.
    #[must_use]
    pub fn finish(self) -> Statistics {
        self.block
    }

    /// Takes a row of `elements` of which nothing but the number is of interest: integers.
    pub(crate) fn count_row(&mut self, elements: usize) {
        self.take(elements, &Row::default());
    }

    /// Takes a row that is stored as it is. `sums` is that of the row.
    pub(crate) fn kept_row<T: Element>(&mut self, row: &[T], sums: &Sums<T>) {
        let counted = if sums.squares.is_finite() {
            Row { compared: row.len(), ..Row::finite(row.len(), sums) }
        } else {
            Row::element_by_element(row.iter().map(|&value| (value.into(), value.into())))
        };
        self.take(row.len(), &counted);
    }

    /// Takes a row and what it decodes to; the two are of one length. `sums` is that of the row; `beyond` is how many
    /// of its elements are infinite only because they were rounded to binary32.
    pub(crate) fn encoded_row(&mut self, row: &[f32], sums: &Sums<f32>, decoded: &[f32], beyond: usize) {
        let errors = Errors::of(row, decoded);
        // Squares of finite binary32 numbers cannot overflow f64, so a finite sum proves every term finite.
        let counted = if sums.squares.is_finite() && errors.squares.is_finite() {
            Row {
                compared: row.len(),
                max_error: errors.max,
                error_squares: errors.squares,
                ..Row::finite(row.len(), sums)
            }
        } else {
            let pairs = row.iter().zip(decoded).map(|(&value, &decoded)| (value.into(), decoded.into()));
            let counted = Row::element_by_element(pairs);
            Row {
                non_finite: counted.non_finite.saturating_sub(beyond),
                overflowing: counted.overflowing.saturating_add(beyond),
                ..counted
            }
        };
        self.take(row.len(), &counted);
    }

    /// Says of the row taken last how many of its elements saturated.
    pub(crate) fn saturated(&mut self, elements: usize) {
        self.block.saturated_elements += elements as u64;
        self.block.saturated_rows += u64::from(elements > 0);
    }

    fn take(&mut self, elements: usize, row: &Row) {
        let number = self.next_row;
        let block = &mut self.block;
        self.next_row += 1;
        block.rows += 1;
        block.elements += elements as u64;
        if row.finite > 0 {
            // Adding 0 makes a negative zero positive, whichever zero was found first.
            block.min = Some(block.min.unwrap_or(f64::INFINITY).min(row.min) + 0.0);
            block.max = Some(block.max.unwrap_or(f64::NEG_INFINITY).max(row.max) + 0.0);
        }
        block.sum_squares += row.squares;
        block.compared_elements += row.compared as u64;
        block.error_squares += row.error_squares;
        if row.max_error > block.max_error {
            block.max_error = row.max_error;
            block.max_error_row = Some(number);
        }
        if row.non_finite > 0 {
            block.non_finite_elements += row.non_finite as u64;
            block.non_finite_rows += 1;
            name_rows(&mut block.first_non_finite_rows, &[number]);
        } else if row.overflowing > 0 {
            block.overflow_elements += row.overflowing as u64;
            block.overflow_rows += 1;
            name_rows(&mut block.first_overflow_rows, &[number]);
        }
    }
}

/// What one row adds to a block.
#[derive(Default)]
struct Row {
    finite: usize,
    non_finite: usize,
    min: f64,
    max: f64,
    squares: f64,
    compared: usize,
    max_error: f64,
    error_squares: f64,
    overflowing: usize,
}

impl Row {
    /// A row of finite elements, with nothing said of errors.
    fn finite<T: Element>(elements: usize, sums: &Sums<T>) -> Self {
        Self {
            finite: elements,
            min: sums.min.into(),
            max: sums.max.into(),
            squares: sums.squares,
            ..Self::default()
        }
    }

    /// A row in which something is not finite, from pairs of an element and what it decodes to.
    fn element_by_element(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut row = Self { min: f64::INFINITY, max: f64::NEG_INFINITY, ..Self::default() };
        let mut squares = [0.0; LANES];
        let mut errors = [0.0; LANES];
        for (column, (value, decoded)) in pairs.enumerate() {
            if !value.is_finite() {
                row.non_finite += 1;
                continue;
            }
            row.finite += 1;
            row.min = row.min.min(value);
            row.max = row.max.max(value);
            squares[column % LANES] += value * value;
            if decoded.is_finite() {
                let error = value - decoded;
                row.compared += 1;
                row.max_error = row.max_error.max(error.abs());
                errors[column % LANES] += error * error;
            }
        }
        row.squares = fold(&squares);
        row.error_squares = fold(&errors);
        row.overflowing = row.finite - row.compared;
        row
    }
}

/// A type that rows of statistics are made of.
pub(crate) trait Element: Copy + PartialOrd + Into<f64> {}

impl Element for f32 {}
impl Element for f64 {}

/// Minimum, maximum and sum of squares of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums<T> {
    /// The smallest element. A NaN in front makes it NaN, other NaNs are passed over; of two zeros either.
    pub(crate) min: T,
    /// The largest element, likewise.
    pub(crate) max: T,
    /// The sum of all squares, in the fixed order. Finite binary32 elements give a finite sum, others do not.
    pub(crate) squares: f64,
}

impl<T: Element> Sums<T> {
    /// Of `row`; `None` of an empty one.
    pub(crate) fn of(row: &[T]) -> Option<Self> {
        let &first = row.first()?;
        let (chunks, rest) = row.as_chunks();
        let mut min = [first; LANES];
        let mut max = [first; LANES];
        let mut squares = [0.0; LANES];
        for chunk in chunks {
            min = each(min, chunk, |min, value| smaller(value, min));
            max = each(max, chunk, |max, value| larger(value, max));
            squares = each(squares, chunk, |sum, value| sum + square(value.into()));
        }
        let chunk = &filled_up(rest, first);
        min = each(min, chunk, |min, value| smaller(value, min));
        max = each(max, chunk, |max, value| larger(value, max));
        let rest: [f64; LANES] = array::from_fn(|lane| rest.get(lane).map_or(0.0, |&value| value.into()));
        squares = each(squares, &rest, |sum, value| sum + square(value));
        Some(Self { min: reduce(min, smaller), max: reduce(max, larger), squares: fold(&squares) })
    }
}

/// The largest absolute error and the sum of squared errors of a row.
struct Errors {
    max: f64,
    squares: f64,
}

impl Errors {
    fn of(row: &[f32], decoded: &[f32]) -> Self {
        let (chunks, rest) = row.as_chunks();
        let (decoded_chunks, decoded_rest) = decoded.as_chunks();
        let mut max = [0.0; LANES];
        let mut squares = [0.0; LANES];
        for (chunk, decoded) in chunks.iter().zip(decoded_chunks) {
            let errors = differences(chunk, decoded);
            max = each(max, &errors, |max, error| larger(error.abs(), max));
            squares = each(squares, &errors, |sum, error| sum + square(error));
        }
        let errors = differences(&filled_up(rest, 0.0), &filled_up(decoded_rest, 0.0));
        max = each(max, &errors, |max, error| larger(error.abs(), max));
        squares = each(squares, &errors, |sum, error| sum + square(error));
        Self { max: reduce(max, larger), squares: fold(&squares) }
    }
}

/// `step` in every lane. Whole arrays in and out, so that the compiler keeps them in vector registers.
fn each<S: Copy, T: Copy>(lanes: [S; LANES], values: &[T; LANES], step: impl Fn(S, T) -> S) -> [S; LANES] {
    array::from_fn(|lane| step(lanes[lane], values[lane]))
}

fn differences(row: &[f32; LANES], decoded: &[f32; LANES]) -> [f64; LANES] {
    array::from_fn(|lane| f64::from(row[lane]) - f64::from(decoded[lane]))
}

/// The end of a row as a chunk, with `filling` behind it.
fn filled_up<T: Copy>(rest: &[T], filling: T) -> [T; LANES] {
    array::from_fn(|lane| rest.get(lane).copied().unwrap_or(filling))
}

/// One value of all lanes; `choose` is indifferent to order.
fn reduce<T: Copy>(s: [T; LANES], choose: impl Fn(T, T) -> T) -> T {
    let halves: [T; LANES / 2] = array::from_fn(|lane| choose(s[lane], s[lane + LANES / 2]));
    choose(choose(halves[0], halves[2]), choose(halves[1], halves[3]))
}

fn fold(s: &[f64; LANES]) -> f64 {
    ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}

fn square(value: f64) -> f64 {
    value * value
}

/// The smaller one; `min` where they compare equal or not at all. One instruction, other than `f32::min`.
fn smaller<T: PartialOrd>(value: T, min: T) -> T {
    if value < min { value } else { min }
}

/// The larger one; `max` where they compare equal or not at all.
fn larger<T: PartialOrd>(value: T, max: T) -> T {
    if value > max { value } else { max }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The module's documentation, followed to the letter.
    fn reference(rows: &[(Vec<f32>, Vec<f32>)]) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for (row, decoded) in rows {
            let (mut squares, mut errors) = ([0.0; 8], [0.0; 8]);
            for (column, (&value, &decoded)) in row.iter().zip(decoded).enumerate() {
                let (value, decoded) = (f64::from(value), f64::from(decoded));
                squares[column % 8] += if value.is_finite() { value * value } else { 0.0 };
                let error = value - decoded;
                errors[column % 8] += if error.is_finite() { error * error } else { 0.0 };
            }
            for (sum, s) in [(&mut sums.0, squares), (&mut sums.1, errors)] {
                *sum += ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            }
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
        let value = prop_oneof![20 => -1.0f32..1.0, 1 => any::<u32>().prop_map(f32::from_bits)];
        let row = (1..40usize).prop_flat_map(move |width| {
            let cells = proptest::collection::vec(value.clone(), width);
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
