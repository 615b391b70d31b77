//! One row at a time: what is in it, and how far off what it decodes to is.

use std::arch::x86_64::*;

use super::lanes::{Lanes, four_sums, largest, load, load_rest, smallest, to_array};
use crate::statistics::{Errors, LANES, RUN, Sums};

/// Minimum, maximum and squares of a run so far.
pub(super) struct Look {
    pub(super) low: Lanes,
    pub(super) high: Lanes,
    pub(super) squares: Lanes,
}

impl Look {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn new() -> Self {
        Self {
            low: [_mm256_set1_ps(f32::INFINITY); 2],
            high: [_mm256_set1_ps(f32::NEG_INFINITY); 2],
            squares: [_mm256_setzero_ps(); 2],
        }
    }

    /// Takes up to a run of elements.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn take(&mut self, run: &[f32]) {
        let (chunks, rest) = run.as_chunks::<LANES>();
        for chunk in chunks {
            let values = load(chunk);
            self.take_lanes(values, values, values);
        }
        if !rest.is_empty() {
            let low = load_rest(rest, _mm256_set1_ps(f32::INFINITY));
            let high = load_rest(rest, _mm256_set1_ps(f32::NEG_INFINITY));
            self.take_lanes(low, high, load_rest(rest, _mm256_setzero_ps()));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn take_lanes(&mut self, low: Lanes, high: Lanes, values: Lanes) {
        for lane in 0..2 {
            self.low[lane] = _mm256_min_ps(low[lane], self.low[lane]);
            self.high[lane] = _mm256_max_ps(high[lane], self.high[lane]);
            self.squares[lane] = _mm256_add_ps(self.squares[lane], _mm256_mul_ps(values[lane], values[lane]));
        }
    }
}

/// Minimum, maximum and squares of a row. Where [`Sums::are_plain`] says so, they are those of [`Sums::of`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn measure(row: &[f32]) -> Sums {
    let mut look = Look::new();
    let mut squares = _mm256_setzero_pd();
    for run in row.chunks(RUN) {
        look.take(run);
        squares = _mm256_add_pd(squares, _mm256_cvtps_pd(four_sums(look.squares)));
        look.squares = [_mm256_setzero_ps(); 2];
    }
    let (low, high) = (_mm256_min_ps(look.low[0], look.low[1]), _mm256_max_ps(look.high[0], look.high[1]));
    Sums { min: smallest(low), max: largest(high), squares: to_array(squares) }
}

/// The errors of a run so far.
pub(super) struct Found {
    /// The largest squares: for numbers that are not negative, the order of their bits is theirs.
    pub(super) largest: [__m256i; 2],
    pub(super) squares: Lanes,
}

impl Found {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn new() -> Self {
        Self { largest: [_mm256_setzero_si256(); 2], squares: [_mm256_setzero_ps(); 2] }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn take(&mut self, values: Lanes, decoded: Lanes) {
        for lane in 0..2 {
            let error = _mm256_sub_ps(values[lane], decoded[lane]);
            let square = _mm256_mul_ps(error, error);
            self.largest[lane] = _mm256_max_epi32(_mm256_castps_si256(square), self.largest[lane]);
            self.squares[lane] = _mm256_add_ps(self.squares[lane], square);
        }
    }

    /// The largest squares in eight lanes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn largest(&self) -> __m256 {
        _mm256_castsi256_ps(_mm256_max_epi32(self.largest[0], self.largest[1]))
    }
}

/// The errors of a row; where [`Errors::are_finite`] says so, they are those of the plain code.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn compare(row: &[f32], decoded: &[f32]) -> Errors {
    let mut found = Found::new();
    let mut squares = _mm256_setzero_pd();
    for (row, decoded) in row.chunks(RUN).zip(decoded.chunks(RUN)) {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let (decoded_chunks, decoded_rest) = decoded.as_chunks::<LANES>();
        for (chunk, decoded) in chunks.iter().zip(decoded_chunks) {
            found.take(load(chunk), load(decoded));
        }
        if !rest.is_empty() {
            let zeros = _mm256_setzero_ps();
            found.take(load_rest(rest, zeros), load_rest(decoded_rest, zeros));
        }
        squares = _mm256_add_pd(squares, _mm256_cvtps_pd(four_sums(found.squares)));
        found.squares = [_mm256_setzero_ps(); 2];
    }
    Errors { largest_square: largest(found.largest()), squares: to_array(squares) }
}
