//! The quantizer. A row is looked at twice while it is in the first cache: once for its minimum, its maximum and its
//! squares, once for its codes and their errors. Between the two there is much to do once a row; so eight rows are
//! looked at, then all their scales and factors are computed at once, then all are encoded.

use std::arch::x86_64::*;

use safe_unaligned_simd::x86_64 as memory;

use super::codes::{Line, most, write_codes};
use super::lanes::{four_sums, largest, smallest, to_array, utmost_of_each};
use super::rows::{Found, Look, measure};
use crate::encode::row_wise::PlainRows;
use crate::statistics::{BlockStatistics, Errors, GROUP, LANES, PLAIN, PlainGroup, RUN};

/// The widest rows of which eight stay in the first cache, with their codes.
const GROUP_WIDTH: usize = 512;
/// Up to this magnitude a scale and a bias in binary16 are finite, whatever the row.
const LARGEST_HALF_ROW: f32 = 16_384.0;

/// Rows that are to be encoded.
pub(super) struct Rows<'s, 'e> {
    pub(super) width: usize,
    pub(super) encoded_bytes: usize,
    pub(super) statistics: &'s mut BlockStatistics,
    pub(super) plain: &'s mut PlainRows<'e>,
}

/// What eight rows hold; a lane, or an index, is a row.
struct Looks {
    min: __m256,
    max: __m256,
    squares: [__m128; GROUP],
}

/// The scales and the like of eight rows, and the two as they are stored.
struct Lines {
    bias: [f32; GROUP],
    factor: [f32; GROUP],
    scale: [f32; GROUP],
    stored_scale: [u32; GROUP],
    stored_bias: [u32; GROUP],
}

impl Rows<'_, '_> {
    /// Codes of `BITS` bits, scale and bias in binary16 if `HALF`, else in binary32.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn quantize<const BITS: u32, const HALF: bool>(&mut self, values: &[f32], encoded: &mut [u8]) {
        let rows = if self.width <= GROUP_WIDTH { GROUP } else { 1 };
        let mut rest = values;
        for encoded in encoded.chunks_mut(rows * self.encoded_bytes) {
            let (values, behind) = rest.split_at(rest.len().min(rows * self.width));
            rest = behind;
            if values.len() == GROUP * self.width && self.group::<BITS, HALF>(values, behind, encoded) {
                continue;
            }
            let rows = values.chunks_exact(self.width).zip(encoded.chunks_exact_mut(self.encoded_bytes));
            for (row, encoded) in rows {
                self.row::<BITS, HALF>(row, encoded);
            }
        }
    }

    /// Encodes eight rows, and has those `behind` them brought into the cache meanwhile. False, and nothing is done,
    /// where any of the eight is not plain.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn group<const BITS: u32, const HALF: bool>(
        &mut self,
        values: &[f32],
        behind: &[f32],
        encoded: &mut [u8],
    ) -> bool {
        let mut looks = look(values, self.width);
        let Some(lines) = looks.lines::<BITS, HALF>(values, self.width) else { return false };
        let mut group = Group::new();
        let rows = values.chunks_exact(self.width).zip(encoded.chunks_exact_mut(self.encoded_bytes));
        let mut next = behind.chunks(self.width);
        for (at, (row, encoded)) in rows.enumerate().take(GROUP) {
            prefetch(next.next().unwrap_or_default());
            let Some((codes, parameters)) = self.split(encoded) else { continue };
            let mut found = Found::new();
            write_codes::<BITS, HALF>(row, lines.line(at), codes, &mut found);
            lines.store::<HALF>(at, parameters);
            group.take(at, found.largest(), four_sums(found.squares));
        }
        self.statistics.plain_group(self.width, &group.finish(&looks));
        true
    }

    /// A row's codes, and its scale and bias; zeros behind them.
    fn split<'r>(&self, encoded: &'r mut [u8]) -> Option<(&'r mut [u8], &'r mut [u8])> {
        let padding = self.plain.encoder().padding();
        if padding > 0 {
            let codes = encoded.len().checked_sub(padding)?;
            encoded.get_mut(codes..)?.fill(0);
        }
        self.plain.encoder().split(encoded)
    }

    /// Encodes one row.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn row<const BITS: u32, const HALF: bool>(&mut self, row: &[f32], encoded: &mut [u8]) {
        let sums = measure(row);
        let representable = !HALF || (sums.max <= LARGEST_HALF_ROW && sums.min >= -LARGEST_HALF_ROW);
        if !(sums.are_plain() && representable) {
            self.plain.encode(row, 0, encoded, self.statistics);
            return;
        }
        let (min, max) = (_mm256_set1_ps(sums.min), _mm256_set1_ps(sums.max));
        let mut looks = Looks { min, max, squares: [_mm_setzero_ps(); GROUP] };
        let Some(lines) = looks.lines::<BITS, HALF>(row, row.len()) else { return };
        let Some((codes, parameters)) = self.split(encoded) else { return };
        lines.store::<HALF>(0, parameters);
        let errors = row_codes::<BITS, HALF>(row, lines.line(0), codes);
        self.statistics.plain_row(row.len(), &sums, &errors);
    }
}

/// Has a row brought into the cache, where it is not there yet: while codes are computed, memory has nothing to do.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn prefetch(row: &[f32]) {
    for line in row.chunks(LANES) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
    }
}

/// Writes the codes of a row of any length.
#[target_feature(enable = "avx2,fma,f16c")]
fn row_codes<const BITS: u32, const HALF: bool>(row: &[f32], line: Line, codes: &mut [u8]) -> Errors {
    let mut found = Found::new();
    let mut squares = _mm256_setzero_pd();
    for (run, codes) in row.chunks(RUN).zip(codes.chunks_mut(RUN * BITS as usize / 8)) {
        write_codes::<BITS, HALF>(run, line, codes, &mut found);
        squares = _mm256_add_pd(squares, _mm256_cvtps_pd(four_sums(found.squares)));
        found.squares = [_mm256_setzero_ps(); 2];
    }
    Errors { largest_square: largest(found.largest()), squares: to_array(squares) }
}

/// Looks at eight rows, of a run at most.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn look(values: &[f32], width: usize) -> Looks {
    let (mut low, mut high) = ([_mm256_setzero_ps(); GROUP], [_mm256_setzero_ps(); GROUP]);
    let mut squares = [_mm_setzero_ps(); GROUP];
    for (at, row) in values.chunks_exact(width).enumerate().take(GROUP) {
        let mut look = Look::new();
        look.take(row);
        low[at] = _mm256_min_ps(look.low[0], look.low[1]);
        high[at] = _mm256_max_ps(look.high[0], look.high[1]);
        squares[at] = four_sums(look.squares);
    }
    Looks { min: utmost_of_each::<false>(&low), max: utmost_of_each::<true>(&high), squares }
}

/// What a group's rows add to the statistics, so far.
struct Group {
    group: PlainGroup,
    largest: __m256,
}

impl Group {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Self {
        Self { group: PlainGroup::default(), largest: _mm256_setzero_ps() }
    }

    /// Takes up the errors of row `at`: their largest squares, and the four sums of all.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn take(&mut self, at: usize, largest: __m256, squares: __m128) {
        self.largest = _mm256_max_ps(self.largest, largest);
        memory::_mm256_storeu_ps(&mut self.group.largest_squares[at], largest);
        memory::_mm_storeu_ps(&mut self.group.error_squares[at], squares);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn finish(mut self, looks: &Looks) -> PlainGroup {
        for (place, &squares) in self.group.squares.iter_mut().zip(&looks.squares) {
            memory::_mm_storeu_ps(place, squares);
        }
        self.group.min = smallest(looks.min);
        self.group.max = largest(looks.max);
        self.group.largest_square = largest(self.largest);
        self.group
    }
}

impl Looks {
    /// The scales and the like of these rows; `None` where any of them is not plain.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn lines<const BITS: u32, const HALF: bool>(&mut self, values: &[f32], width: usize) -> Option<Lines> {
        if !self.are_plain::<HALF>() {
            return None;
        }
        self.sign_zeros(values, width);
        Some(if HALF { Lines::in_half::<BITS>(self) } else { Lines::of(self) })
    }

    /// Whether all rows are plain, and their scales and biases numbers of their type.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn are_plain<const HALF: bool>(&self) -> bool {
        let zeros = _mm256_setzero_ps();
        let magnitude = _mm256_max_ps(_mm256_sub_ps(zeros, self.min), self.max);
        let most = if HALF { LARGEST_HALF_ROW } else { *PLAIN.end() };
        let small = _mm256_cmp_ps::<_CMP_LE_OQ>(magnitude, _mm256_set1_ps(most));
        let large = _mm256_cmp_ps::<_CMP_GE_OQ>(magnitude, _mm256_set1_ps(*PLAIN.start()));
        let zero = _mm256_cmp_ps::<_CMP_EQ_OQ>(magnitude, zeros);
        let mut sums = self.squares[0];
        for &more in self.squares.iter().skip(1) {
            sums = _mm_add_ps(sums, more);
        }
        // No sum is negative: what is not finite stays so. What is no number compares to nothing.
        let finite = _mm_cmp_ps::<_CMP_LT_OQ>(sums, _mm_set1_ps(f32::INFINITY));
        _mm256_movemask_ps(_mm256_and_ps(small, _mm256_or_ps(large, zero))) == 0xFF
            && _mm_movemask_ps(finite) == 0xF
    }

    /// Gives a minimum of zero the sign of the row's first zero.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sign_zeros(&mut self, values: &[f32], width: usize) {
        let zeros = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(self.min, _mm256_setzero_ps()));
        if zeros != 0 {
            let mut min = [0.0; GROUP];
            memory::_mm256_storeu_ps(&mut min, self.min);
            for (min, row) in min.iter_mut().zip(values.chunks_exact(width)).filter(|(min, _)| **min == 0.0) {
                *min = first_zero(row);
            }
            self.min = memory::_mm256_loadu_ps(&min);
        }
    }
}

/// The first zero of a row, which has one and nothing below it.
#[inline(never)]
fn first_zero(row: &[f32]) -> f32 {
    row.iter().copied().find(|&value| value == 0.0).unwrap_or(0.0)
}

impl Lines {
    /// As `int8_rowwise` says.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of(looks: &Looks) -> Self {
        // In a row of zeros the maximum may be a zero of the other sign; the range is +0 all the same.
        let range = _mm256_max_ps(_mm256_sub_ps(looks.max, looks.min), _mm256_setzero_ps());
        let most = _mm256_set1_ps(255.0);
        let scale = _mm256_div_ps(range, most);
        let factor = _mm256_div_ps(most, _mm256_add_ps(range, _mm256_set1_ps(1e-8)));
        let (scale, bias) = (floats(scale), floats(looks.min));
        let (stored_scale, stored_bias) = (scale.map(f32::to_bits), bias.map(f32::to_bits));
        Self { bias, factor: floats(factor), scale, stored_scale, stored_bias }
    }

    /// As `nbit_rowwise` says.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn in_half<const BITS: u32>(looks: &Looks) -> Self {
        let ones = _mm256_set1_ps(1.0);
        let zeros = _mm256_setzero_ps();
        let (stored_bias, bias) = halves(looks.min);
        let range = _mm256_sub_ps(looks.max, bias);
        let exact = _mm256_div_ps(range, _mm256_cvtepi32_ps(_mm256_set1_epi32(most(BITS))));
        let (_, rounded) = halves(_mm256_blendv_ps(exact, ones, _mm256_cmp_ps::<_CMP_EQ_OQ>(range, zeros)));
        let scale = _mm256_blendv_ps(rounded, ones, _mm256_cmp_ps::<_CMP_EQ_OQ>(rounded, zeros));
        let (stored_scale, scale) = halves(scale);
        let factor = floats(_mm256_div_ps(ones, scale));
        Self { bias: floats(bias), factor, scale: floats(scale), stored_scale, stored_bias }
    }

    /// Those of row `at`.
    #[inline]
    fn line(&self, at: usize) -> Line {
        Line { bias: self.bias[at], factor: self.factor[at], scale: self.scale[at] }
    }

    /// Writes the scale and the bias of row `at`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn store<const HALF: bool>(&self, at: usize, parameters: &mut [u8]) {
        let (scale, bias) = (self.stored_scale[at].to_le_bytes(), self.stored_bias[at].to_le_bytes());
        if HALF {
            if let Some(place) = parameters.first_chunk_mut::<4>() {
                *place = [scale[0], scale[1], bias[0], bias[1]];
            }
        } else if let Some((front, back)) = parameters.split_first_chunk_mut::<4>() {
            *front = scale;
            back.copy_from_slice(&bias);
        }
    }
}

/// The nearest binary16 of eight numbers, and what they stand for.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(values: __m256) -> ([u32; GROUP], __m256) {
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
    let mut wide = [0; GROUP];
    memory::_mm256_storeu_si256(&mut wide, _mm256_cvtepu16_epi32(halves));
    (wide, _mm256_cvtph_ps(halves))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats(values: __m256) -> [f32; GROUP] {
    let mut array = [0.0; GROUP];
    memory::_mm256_storeu_ps(&mut array, values);
    array
}
