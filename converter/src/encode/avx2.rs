//! What encoding does most of its time, by AVX2, FMA and F16C, where the processor has them: the same bits as the plain
//! code, for the rows that are plain. All other rows are left to the plain code.
//!
//! A row is looked at twice while it is in the first cache: once for its minimum, its maximum and its squares, once for
//! its codes and their errors. 32 elements are taken at a time, and their codes packed into bytes together.
//!
//! Minimum and maximum are found in any order, which for a plain row leaves one question: which of two zeros. It is
//! answered by a look for the first one, where the minimum is zero.

#![expect(unsafe_code, reason = "what is compiled for a processor that has been asked is called so")]
#![expect(clippy::wildcard_imports, reason = "intrinsics have long names of their own")]

use std::arch::x86_64::*;

use safe_unaligned_simd::x86_64 as memory;
use weighbridge_schemas::encoding::Encoding;

use super::row_wise::{PlainRows, ROUNDER};
use crate::statistics::{BlockStatistics, Errors, LANES, RUN, SUMS, Sums};

/// Elements whose codes are packed together; [`RUN`] is a multiple of it, so that only the end of a row is less.
const STEP: usize = 2 * LANES;

/// Up to this magnitude a scale and a bias in binary16 are finite, whatever the row.
const LARGEST_HALF_ROW: f32 = 16_384.0;

/// Two registers: sixteen elements.
type Lanes = [__m256; 2];

/// Whether this processor has what is needed.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Encodes rows of `width` elements, to rows of `encoded_bytes` that are 0 so far; `plain` is for those that are not
/// plain. Only where [`is_here`]; elsewhere nothing is done.
pub(super) fn quantize(
    encoding: Encoding,
    values: &[f32],
    width: usize,
    encoded: &mut [u8],
    encoded_bytes: usize,
    statistics: &mut BlockStatistics,
    plain: &mut PlainRows<'_>,
) {
    if !is_here() {
        return;
    }
    let rows = values.chunks_exact(width).zip(encoded.chunks_exact_mut(encoded_bytes));
    // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
    unsafe {
        match encoding {
            Encoding::Int8Sbf32 => quantize_rows::<8, false>(rows, statistics, plain),
            Encoding::Int8Sbf16 => quantize_rows::<8, true>(rows, statistics, plain),
            Encoding::Int4Sbf16 => quantize_rows::<4, true>(rows, statistics, plain),
            Encoding::Int2Sbf16 => quantize_rows::<2, true>(rows, statistics, plain),
            _ => {}
        }
    }
}

/// Takes up rows of `width` elements, the last of which may be shorter, and what they decode to. False, and nothing is
/// done, where not [`is_here`].
pub(super) fn take_encoded_rows(
    values: &[f32],
    decoded: &[f32],
    width: usize,
    statistics: &mut BlockStatistics,
) -> bool {
    if is_here() {
        // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
        unsafe { encoded_rows(values, decoded, width, statistics) };
        return true;
    }
    false
}

/// Takes up rows of `width` elements that are stored as they are; else as [`take_encoded_rows`].
pub(super) fn take_kept_rows(values: &[f32], width: usize, statistics: &mut BlockStatistics) -> bool {
    if is_here() {
        // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
        unsafe { kept_rows(values, width, statistics) };
        return true;
    }
    false
}

#[target_feature(enable = "avx2,fma,f16c")]
fn encoded_rows(values: &[f32], decoded: &[f32], width: usize, statistics: &mut BlockStatistics) {
    for (row, decoded) in values.chunks(width.max(1)).zip(decoded.chunks(width.max(1))) {
        let sums = measure(row);
        let errors = compare(row, decoded);
        if sums.are_plain() && errors.are_finite() {
            statistics.plain_row(row.len(), &sums, &errors);
        } else {
            statistics.encoded_row(row, &sums, decoded, 0);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn kept_rows(values: &[f32], width: usize, statistics: &mut BlockStatistics) {
    for row in values.chunks(width.max(1)) {
        statistics.kept_row(row, &measure(row));
    }
}

/// Codes of `BITS` bits, scale and bias in binary16 if `HALF`, else in binary32.
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_rows<'r, const BITS: u32, const HALF: bool>(
    rows: impl Iterator<Item = (&'r [f32], &'r mut [u8])>,
    statistics: &mut BlockStatistics,
    plain: &mut PlainRows<'_>,
) {
    for (row, encoded) in rows {
        let sums = measure(row);
        let representable = !HALF || (sums.max <= LARGEST_HALF_ROW && sums.min >= -LARGEST_HALF_ROW);
        if !(sums.are_plain() && representable) {
            plain.encode(row, 0, encoded, statistics);
            continue;
        }
        let Some((codes, parameters)) = plain.encoder().split(encoded) else { continue };
        let line = if HALF { Line::in_half::<BITS>(row, &sums, parameters) } else { Line::of(row, &sums, parameters) };
        let errors = write_codes::<BITS, HALF>(row, &line, codes);
        statistics.plain_row(row.len(), &sums, &errors);
    }
}

/// How a row's elements become codes, and codes become elements.
struct Line {
    bias: f32,
    factor: f32,
    scale: f32,
}

impl Line {
    /// As `int8_rowwise` says.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of(row: &[f32], sums: &Sums, parameters: &mut [u8]) -> Self {
        let bias = if sums.min == 0.0 { first_zero(row) } else { sums.min };
        // In a row of zeros the maximum may be a zero of the other sign; the range is +0 all the same.
        let range = if sums.max == bias { 0.0 } else { sums.max - bias };
        let scale = range / 255.0;
        if let Some((front, back)) = parameters.split_first_chunk_mut::<4>() {
            *front = scale.to_le_bytes();
            back.copy_from_slice(&bias.to_le_bytes());
        }
        Self { bias, factor: 255.0 / (range + 1e-8), scale }
    }

    /// As `nbit_rowwise` says.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn in_half<const BITS: u32>(row: &[f32], sums: &Sums, parameters: &mut [u8]) -> Self {
        let (bias_bits, bias) = half(if sums.min == 0.0 { first_zero(row) } else { sums.min });
        let range = sums.max - bias;
        let (mut scale_bits, mut scale) = half(if range == 0.0 { 1.0 } else { range / most(BITS) });
        if scale == 0.0 {
            (scale_bits, scale) = half(1.0);
        }
        if let Some((front, back)) = parameters.split_first_chunk_mut::<2>() {
            *front = scale_bits.to_le_bytes();
            back.copy_from_slice(&bias_bits.to_le_bytes());
        }
        Self { bias, factor: 1.0 / scale, scale }
    }
}

/// The largest code.
#[inline]
const fn most(bits: u32) -> f32 {
    match bits {
        8 => 255.0,
        4 => 15.0,
        _ => 3.0,
    }
}

/// The nearest binary16, and what it stands for. `value` is a number.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half(value: f32) -> (u16, f32) {
    let halves = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(value));
    let [low, high, ..] = _mm_cvtsi128_si32(halves).to_le_bytes();
    (u16::from_le_bytes([low, high]), _mm_cvtss_f32(_mm_cvtph_ps(halves)))
}

/// The first zero of a row, which has one and nothing below it.
#[inline(never)]
fn first_zero(row: &[f32]) -> f32 {
    row.iter().copied().find(|&value| value == 0.0).unwrap_or(0.0)
}

/// Minimum, maximum and squares of a row; see [`Sums::of`]. Of an empty row, zeros.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn measure(row: &[f32]) -> Sums {
    let first = row.first().copied().unwrap_or(0.0);
    let mut low = [_mm256_set1_ps(first); 2];
    let mut high = low;
    let mut squares = _mm256_setzero_pd();
    for run in row.chunks(RUN) {
        let mut lanes = [_mm256_setzero_ps(); 2];
        let (chunks, rest) = run.as_chunks::<LANES>();
        for chunk in chunks {
            let values = load(chunk);
            for lane in 0..2 {
                low[lane] = _mm256_min_ps(values[lane], low[lane]);
                high[lane] = _mm256_max_ps(values[lane], high[lane]);
                lanes[lane] = _mm256_add_ps(lanes[lane], _mm256_mul_ps(values[lane], values[lane]));
            }
        }
        if !rest.is_empty() {
            let (filled, values) = (load(&filled_up(rest, first)), load(&filled_up(rest, 0.0)));
            for lane in 0..2 {
                low[lane] = _mm256_min_ps(filled[lane], low[lane]);
                high[lane] = _mm256_max_ps(filled[lane], high[lane]);
                lanes[lane] = _mm256_add_ps(lanes[lane], _mm256_mul_ps(values[lane], values[lane]));
            }
        }
        squares = add_run(squares, lanes);
    }
    Sums { min: smallest(low), max: largest(high), squares: to_array(squares) }
}

/// The errors of a row; see [`Errors`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn compare(row: &[f32], decoded: &[f32]) -> Errors {
    let mut found = Found::new();
    for (row, decoded) in row.chunks(RUN).zip(decoded.chunks(RUN)) {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let (decoded_chunks, decoded_rest) = decoded.as_chunks::<LANES>();
        for (chunk, decoded) in chunks.iter().zip(decoded_chunks) {
            found.take(load(chunk), load(decoded));
        }
        if !rest.is_empty() {
            found.take(load(&filled_up(rest, 0.0)), load(&filled_up(decoded_rest, 0.0)));
        }
        found.end_run();
    }
    found.errors()
}

/// The errors of a row so far.
struct Found {
    max: Lanes,
    lanes: Lanes,
    squares: __m256d,
}

impl Found {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Self {
        let zeros = [_mm256_setzero_ps(); 2];
        Self { max: zeros, lanes: zeros, squares: _mm256_setzero_pd() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn take(&mut self, values: Lanes, decoded: Lanes) {
        let sign = _mm256_set1_ps(-0.0);
        for lane in 0..2 {
            let error = _mm256_sub_ps(values[lane], decoded[lane]);
            self.max[lane] = _mm256_max_ps(_mm256_andnot_ps(sign, error), self.max[lane]);
            self.lanes[lane] = _mm256_add_ps(self.lanes[lane], _mm256_mul_ps(error, error));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn end_run(&mut self) {
        self.squares = add_run(self.squares, self.lanes);
        self.lanes = [_mm256_setzero_ps(); 2];
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn errors(&self) -> Errors {
        Errors { max: largest(self.max), squares: to_array(self.squares) }
    }
}

/// Writes a row's packed codes, and tells how far they are off.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn write_codes<const BITS: u32, const HALF: bool>(row: &[f32], line: &Line, codes: &mut [u8]) -> Errors {
    let mut found = Found::new();
    let (run_bytes, step_bytes) = (RUN * BITS as usize / 8, STEP * BITS as usize / 8);
    for (run, codes) in row.chunks(RUN).zip(codes.chunks_mut(run_bytes)) {
        let (steps, rest) = run.as_chunks::<STEP>();
        let (whole, codes_rest) = codes.split_at_mut(steps.len() * step_bytes);
        for (step, codes) in steps.iter().zip(whole.chunks_exact_mut(step_bytes)) {
            let (halves, _) = step.as_chunks();
            let packed = code_step::<BITS, HALF>(load(&halves[0]), load(&halves[1]), line, &mut found);
            store::<BITS>(packed, codes);
        }
        if !rest.is_empty() {
            // The bias itself has code 0 and no error.
            let bias = [_mm256_set1_ps(line.bias); 2];
            let (front, back) = match rest.split_first_chunk::<LANES>() {
                Some((front, [])) => (load(front), bias),
                Some((front, back)) => (load(front), load(&filled_up(back, line.bias))),
                None => (load(&filled_up(rest, line.bias)), bias),
            };
            let packed = code_step::<BITS, HALF>(front, back, line, &mut found);
            let mut bytes = [0; STEP];
            store::<BITS>(packed, &mut bytes[..step_bytes]);
            let count = codes_rest.len().min(step_bytes);
            codes_rest[..count].copy_from_slice(&bytes[..count]);
        }
        found.end_run();
    }
    found.errors()
}

/// The codes of 32 elements, in the order that packing leaves them in.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn code_step<const BITS: u32, const HALF: bool>(
    front: Lanes,
    back: Lanes,
    line: &Line,
    found: &mut Found,
) -> __m256i {
    _mm256_packus_epi16(code::<BITS, HALF>(front, line, found), code::<BITS, HALF>(back, line, found))
}

/// The codes of sixteen elements in sixteen bits each: elements 0 to 3, 8 to 11, 4 to 7, 12 to 15.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn code<const BITS: u32, const HALF: bool>(values: Lanes, line: &Line, found: &mut Found) -> __m256i {
    let (bias, factor, scale) =
        (_mm256_set1_ps(line.bias), _mm256_set1_ps(line.factor), _mm256_set1_ps(line.scale));
    let rounder = _mm256_set1_ps(ROUNDER);
    let mut decoded = values;
    let mut codes = [_mm256_setzero_si256(); 2];
    for lane in 0..2 {
        let mut scaled = _mm256_mul_ps(_mm256_sub_ps(values[lane], bias), factor);
        if HALF {
            scaled = _mm256_max_ps(scaled, _mm256_setzero_ps());
            scaled = _mm256_min_ps(scaled, _mm256_set1_ps(most(BITS)));
        }
        let rounded = _mm256_add_ps(scaled, rounder);
        decoded[lane] = _mm256_fmadd_ps(_mm256_sub_ps(rounded, rounder), scale, bias);
        codes[lane] = _mm256_and_si256(_mm256_castps_si256(rounded), _mm256_set1_epi32(0xFF));
    }
    found.take(values, decoded);
    _mm256_packus_epi32(codes[0], codes[1])
}

/// Packs the codes that a step left, each in a byte, into `BITS` bits, and writes them in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store<const BITS: u32>(codes: __m256i, packed: &mut [u8]) {
    let codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    match BITS {
        8 => {
            if let Some(packed) = packed.first_chunk_mut::<32>() {
                memory::_mm256_storeu_si256(packed, codes);
            }
        }
        4 => {
            // Each even code and sixteen times the next one, in sixteen bits.
            let pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
            let bytes = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi16(pairs, pairs));
            if let Some(packed) = packed.first_chunk_mut::<16>() {
                memory::_mm_storeu_si128(packed, _mm256_castsi256_si128(bytes));
            }
        }
        _ => {
            // As above with four times the next one, then sixteen times the next pair, in 32 bits.
            let pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0401));
            let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x0010_0001));
            let bytes = _mm256_packus_epi16(_mm256_packus_epi32(fours, fours), _mm256_setzero_si256());
            let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
            if let Some(packed) = packed.first_chunk_mut::<8>() {
                *packed = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)).to_le_bytes();
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(chunk: &[f32; LANES]) -> Lanes {
    let (halves, _) = chunk.as_chunks::<8>();
    [memory::_mm256_loadu_ps(&halves[0]), memory::_mm256_loadu_ps(&halves[1])]
}

/// The end of a row as a chunk, with `filling` behind it.
#[inline]
fn filled_up(rest: &[f32], filling: f32) -> [f32; LANES] {
    let mut chunk = [filling; LANES];
    let count = rest.len().min(LANES);
    chunk[..count].copy_from_slice(&rest[..count]);
    chunk
}

/// Adds the sums of a run to those of its row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_run(sums: __m256d, lanes: Lanes) -> __m256d {
    let eight = _mm256_add_ps(lanes[0], lanes[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    _mm256_add_pd(sums, _mm256_cvtps_pd(four))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn smallest(lanes: Lanes) -> f32 {
    let eight = _mm256_min_ps(lanes[0], lanes[1]);
    let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(lanes: Lanes) -> f32 {
    let eight = _mm256_max_ps(lanes[0], lanes[1]);
    let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn to_array(sums: __m256d) -> [f64; SUMS] {
    let mut array = [0.0; SUMS];
    memory::_mm256_storeu_pd(&mut array, sums);
    array
}
