//! From the elements of a row to its codes, and from codes to packed bytes.

use std::arch::x86_64::*;

use safe_unaligned_simd::x86_64 as memory;

use super::lanes::{Lanes, load, load_rest};
use super::rows::Found;
use crate::statistics::LANES;

/// Elements whose codes are packed together.
const STEP: usize = 2 * LANES;

/// How a row's elements become codes, and codes become elements.
#[derive(Clone, Copy)]
pub(super) struct Line {
    pub(super) bias: f32,
    pub(super) factor: f32,
    pub(super) scale: f32,
}

/// The largest code.
#[inline]
pub(super) const fn most(bits: u32) -> i32 {
    (1 << bits) - 1
}

/// Writes the packed codes of up to a run of elements, and takes up how far they are off.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn write_codes<const BITS: u32, const HALF: bool>(
    run: &[f32],
    line: Line,
    codes: &mut [u8],
    found: &mut Found,
) {
    let step_bytes = STEP * BITS as usize / 8;
    let (steps, rest) = run.as_chunks::<STEP>();
    let Some((whole, end)) = codes.split_at_mut_checked(steps.len() * step_bytes) else { return };
    for (step, codes) in steps.iter().zip(whole.chunks_exact_mut(step_bytes)) {
        let (halves, _) = step.as_chunks();
        let front = code::<BITS, HALF>(load(&halves[0]), line, found);
        let back = code::<BITS, HALF>(load(&halves[1]), line, found);
        store::<BITS>(front, back, codes);
    }
    if !rest.is_empty() {
        // The bias itself has code 0 and no error.
        let bias = _mm256_set1_ps(line.bias);
        let (front, back) = rest.split_at(rest.len().min(LANES));
        let front = code::<BITS, HALF>(load_rest(front, bias), line, found);
        let back = code::<BITS, HALF>(load_rest(back, bias), line, found);
        let mut bytes = [0; STEP];
        store::<BITS>(front, back, &mut bytes);
        let count = end.len().min(step_bytes);
        end[..count].copy_from_slice(&bytes[..count]);
    }
}

/// The codes of sixteen elements in sixteen bits each: elements 0 to 3, 8 to 11, 4 to 7, 12 to 15.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn code<const BITS: u32, const HALF: bool>(values: Lanes, line: Line, found: &mut Found) -> __m256i {
    let (bias, factor, scale) =
        (_mm256_set1_ps(line.bias), _mm256_set1_ps(line.factor), _mm256_set1_ps(line.scale));
    let mut decoded = values;
    let mut codes = [_mm256_setzero_si256(); 2];
    for lane in 0..2 {
        let scaled = _mm256_mul_ps(_mm256_sub_ps(values[lane], bias), factor);
        // To nearest even, as adding ROUNDER does: between 0 and 255 the two are the same. Nothing is out of range:
        // see `nbit_rowwise`.
        codes[lane] = _mm256_cvtps_epi32(scaled);
        if HALF {
            codes[lane] = _mm256_max_epi32(codes[lane], _mm256_setzero_si256());
            codes[lane] = _mm256_min_epi32(codes[lane], _mm256_set1_epi32(most(BITS)));
        }
        decoded[lane] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[lane]), scale, bias);
    }
    found.take(values, decoded);
    _mm256_packus_epi32(codes[0], codes[1])
}

/// Packs the codes of 32 elements into `BITS` bits each, and writes them in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store<const BITS: u32>(front: __m256i, back: __m256i, packed: &mut [u8]) {
    let codes = _mm256_packus_epi16(front, back);
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

/// Casts to binary16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn narrow_to_f16(values: &[f32], out: &mut [u8]) {
    let (chunks, rest) = values.as_chunks::<8>();
    let (places, places_rest) = out.as_chunks_mut::<16>();
    for (chunk, place) in chunks.iter().zip(&mut *places) {
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(memory::_mm256_loadu_ps(chunk));
        memory::_mm_storeu_si128(place, halves);
    }
    if chunks.len() == places.len() && !rest.is_empty() {
        let [few, _] = load_rest(rest, _mm256_setzero_ps());
        let mut bytes = [0; 16];
        memory::_mm_storeu_si128(&mut bytes, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(few));
        let count = places_rest.len().min(2 * rest.len());
        places_rest[..count].copy_from_slice(&bytes[..count]);
    }
}
