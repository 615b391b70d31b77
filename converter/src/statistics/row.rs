//! What one row of binary32 comes to: its smallest and largest element, its squares, and its errors, summed in the
//! order that the parent module says.

use std::array;

use super::{LANES, PLAIN, RUN, SUMS};

/// Minimum, maximum and sums of squares of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sums {
    /// The smallest element. A NaN in front makes it NaN, other NaNs are passed over; of two zeros either.
    pub(crate) min: f32,
    /// The largest element, likewise.
    pub(crate) max: f32,
    /// The sums of all squares, in the fixed order. A NaN or an infinity in the row is one in a sum.
    pub(crate) squares: [f64; SUMS],
}

impl Sums {
    /// Of `row`; `None` of an empty one.
    #[inline(always)]
    pub(crate) fn of(row: &[f32]) -> Option<Self> {
        let &first = row.first()?;
        let (mut min, mut max) = ([first; LANES], [first; LANES]);
        let mut squares = [0.0; SUMS];
        for run in row.chunks(RUN) {
            let mut lanes = [0.0; LANES];
            let (chunks, rest) = run.as_chunks();
            for chunk in chunks {
                min = each(min, chunk, |min, value| smaller(value, min));
                max = each(max, chunk, |max, value| larger(value, max));
                lanes = each(lanes, chunk, |sum, value| sum + value * value);
            }
            if !rest.is_empty() {
                let chunk = &filled_up(rest, first);
                min = each(min, chunk, |min, value| smaller(value, min));
                max = each(max, chunk, |max, value| larger(value, max));
                lanes = each(lanes, &filled_up(rest, 0.0), |sum, value| sum + value * value);
            }
            add_run(&mut squares, &lanes);
        }
        Some(Self { min: reduce(min, smaller), max: reduce(max, larger), squares })
    }

    /// Whether a row of these sums is plain, as far as it does not depend on what it decodes to.
    #[inline(always)]
    pub(crate) fn are_plain(&self) -> bool {
        let magnitude = larger(-self.min, self.max);
        are_finite(&self.squares) && (magnitude == 0.0 || PLAIN.contains(&magnitude))
    }
}

/// The largest absolute error and the sums of squared errors of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Errors {
    pub(crate) largest_square: f32,
    pub(crate) squares: [f64; SUMS],
}

impl Errors {
    /// Those of a row that is stored as it is.
    pub(super) const NONE: Self = Self { largest_square: 0.0, squares: [0.0; SUMS] };

    #[inline(always)]
    pub(super) fn of(row: &[f32], decoded: &[f32]) -> Self {
        let mut largest = [0.0; LANES];
        let mut squares = [0.0; SUMS];
        for (row, decoded) in row.chunks(RUN).zip(decoded.chunks(RUN)) {
            let mut lanes = [0.0; LANES];
            let (chunks, rest) = row.as_chunks();
            let (decoded_chunks, decoded_rest) = decoded.as_chunks();
            let mut take = |chunk: &[f32; LANES], decoded: &[f32; LANES]| {
                let errors = each(*chunk, decoded, |value, decoded| (value - decoded) * (value - decoded));
                largest = each(largest, &errors, |largest, square| larger(square, largest));
                lanes = each(lanes, &errors, |sum, square| sum + square);
            };
            for (chunk, decoded) in chunks.iter().zip(decoded_chunks) {
                take(chunk, decoded);
            }
            if !rest.is_empty() {
                take(&filled_up(rest, 0.0), &filled_up(decoded_rest, 0.0));
            }
            add_run(&mut squares, &lanes);
        }
        Self { largest_square: reduce(largest, larger), squares }
    }

    /// Whether every element of the row, if it is finite, decodes to something finite.
    #[inline(always)]
    pub(crate) fn are_finite(&self) -> bool {
        are_finite(&self.squares)
    }
}

/// Adds the sums of a run to those of its row.
#[inline(always)]
fn add_run(sums: &mut [f64; SUMS], lanes: &[f32; LANES]) {
    let run: [f32; SUMS] = array::from_fn(|k| (lanes[k] + lanes[k + 8]) + (lanes[k + 4] + lanes[k + 12]));
    *sums = each(*sums, &run, |sum, run| sum + f64::from(run));
}

/// Whether all sums are finite. They are not negative, so that none cancels another.
#[inline(always)]
fn are_finite(sums: &[f64; SUMS]) -> bool {
    fold(*sums).is_finite()
}

/// `step` in every lane. Whole arrays in and out, so that the compiler keeps them in vector registers.
#[inline(always)]
pub(super) fn each<S: Copy, T: Copy, const N: usize>(
    lanes: [S; N],
    values: &[T; N],
    step: impl Fn(S, T) -> S,
) -> [S; N] {
    array::from_fn(|lane| step(lanes[lane], values[lane]))
}

/// The end of a row as a chunk, with `filling` behind it.
#[inline(always)]
fn filled_up(rest: &[f32], filling: f32) -> [f32; LANES] {
    array::from_fn(|lane| rest.get(lane).copied().unwrap_or(filling))
}

/// One value of all lanes; `choose` is indifferent to order.
#[inline(always)]
fn reduce(lanes: [f32; LANES], choose: impl Fn(f32, f32) -> f32) -> f32 {
    let halves: [f32; 8] = array::from_fn(|lane| choose(lanes[lane], lanes[lane + 8]));
    let quarters: [f32; 4] = array::from_fn(|lane| choose(halves[lane], halves[lane + 4]));
    choose(choose(quarters[0], quarters[2]), choose(quarters[1], quarters[3]))
}

#[inline(always)]
pub(super) fn fold(sums: [f64; SUMS]) -> f64 {
    (sums[0] + sums[2]) + (sums[1] + sums[3])
}

/// The smaller one; `min` where they compare equal or not at all. One instruction, other than `f32::min`.
#[inline(always)]
pub(super) fn smaller<T: PartialOrd>(value: T, min: T) -> T {
    if value < min { value } else { min }
}

/// The larger one; `max` where they compare equal or not at all.
#[inline(always)]
pub(super) fn larger<T: PartialOrd>(value: T, max: T) -> T {
    if value > max { value } else { max }
}
