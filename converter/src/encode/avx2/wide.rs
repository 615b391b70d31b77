//! The two looks at a row by AVX-512: sixteen elements in one register, so half as many instructions. The lanes are
//! those of two registers of AVX2, and so are the bits.

use std::arch::x86_64::*;

use safe_unaligned_simd::x86_64 as memory;

use super::codes::{Line, most};
use super::groups::Looks;
use super::lanes::{Lanes, four_sums, largest_of_each, smallest_of_each};
use crate::statistics::{GROUP, LANES};

/// Whether this processor has what is needed, beside AVX2.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// Looks at eight rows, of a run at most.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn look(values: &[f32], width: usize) -> Looks {
    let (mut min, mut max) = ([_mm256_setzero_ps(); GROUP], [_mm256_setzero_ps(); GROUP]);
    let mut sums = [_mm_setzero_ps(); GROUP];
    for (at, row) in values.chunks_exact(width).enumerate().take(GROUP) {
        let mut low = _mm512_set1_ps(f32::INFINITY);
        let mut high = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut squares = _mm512_setzero_ps();
        let (chunks, rest) = row.as_chunks::<LANES>();
        for chunk in chunks {
            let values = memory::_mm512_loadu_ps(chunk);
            low = _mm512_min_ps(values, low);
            high = _mm512_max_ps(values, high);
            squares = _mm512_add_ps(squares, _mm512_mul_ps(values, values));
        }
        if !rest.is_empty() {
            let (values, mask) = load_rest(rest, _mm512_setzero_ps());
            low = _mm512_mask_min_ps(low, mask, values, low);
            high = _mm512_mask_max_ps(high, mask, values, high);
            squares = _mm512_add_ps(squares, _mm512_mul_ps(values, values));
        }
        let (low, high) = (halves(low), halves(high));
        min[at] = _mm256_min_ps(low[0], low[1]);
        max[at] = _mm256_max_ps(high[0], high[1]);
        sums[at] = four_sums(halves(squares));
    }
    Looks { min: smallest_of_each(&min), max: largest_of_each(&max), squares: sums }
}

/// The errors of a row.
pub(super) struct Found {
    /// The largest squares: for numbers that are not negative, the order of their bits is theirs.
    largest: __m512i,
    squares: __m512,
}

impl Found {
    /// The largest squares in eight lanes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) fn largest(&self) -> __m256 {
        let [front, back] = halves(_mm512_castsi512_ps(self.largest));
        _mm256_max_ps(front, back)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) fn squares(&self) -> Lanes {
        halves(self.squares)
    }
}

/// Writes the packed codes of up to a run of elements, and tells how far they are off.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn write_codes<const BITS: u32, const HALF: bool>(
    row: &[f32],
    line: Line,
    codes: &mut [u8],
) -> Found {
    let mut found = Found { largest: _mm512_setzero_si512(), squares: _mm512_setzero_ps() };
    let step_bytes = LANES * BITS as usize / 8;
    let (chunks, rest) = row.as_chunks::<LANES>();
    let Some((whole, end)) = codes.split_at_mut_checked(chunks.len() * step_bytes) else { return found };
    for (chunk, codes) in chunks.iter().zip(whole.chunks_exact_mut(step_bytes)) {
        let coded = code::<BITS, HALF>(memory::_mm512_loadu_ps(chunk), line, &mut found);
        store::<BITS>(coded, codes);
    }
    if !rest.is_empty() {
        // The bias itself has code 0 and no error.
        let (values, _) = load_rest(rest, _mm512_set1_ps(line.bias));
        let mut bytes = [0; LANES];
        store::<BITS>(code::<BITS, HALF>(values, line, &mut found), &mut bytes);
        let count = end.len().min(step_bytes);
        end[..count].copy_from_slice(&bytes[..count]);
    }
    found
}

/// The codes of sixteen elements in 32 bits each, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn code<const BITS: u32, const HALF: bool>(values: __m512, line: Line, found: &mut Found) -> __m512i {
    let bias = _mm512_set1_ps(line.bias);
    let scaled = _mm512_mul_ps(_mm512_sub_ps(values, bias), _mm512_set1_ps(line.factor));
    let mut codes = _mm512_cvtps_epi32(scaled);
    if HALF {
        codes = _mm512_max_epi32(codes, _mm512_setzero_si512());
        codes = _mm512_min_epi32(codes, _mm512_set1_epi32(most(BITS)));
    }
    let decoded = _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(line.scale), bias);
    let error = _mm512_sub_ps(values, decoded);
    let square = _mm512_mul_ps(error, error);
    found.largest = _mm512_max_epi32(_mm512_castps_si512(square), found.largest);
    found.squares = _mm512_add_ps(found.squares, square);
    codes
}

/// Packs sixteen codes into `BITS` bits each, and writes them in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn store<const BITS: u32>(codes: __m512i, packed: &mut [u8]) {
    match BITS {
        8 => {
            if let Some(packed) = packed.first_chunk_mut::<16>() {
                memory::_mm_storeu_si128(packed, _mm512_cvtepi32_epi8(codes));
            }
        }
        4 => {
            // In 64 bits, each even code and sixteen times the next one.
            let pairs = _mm512_or_si512(codes, _mm512_srli_epi64::<28>(codes));
            if let Some(packed) = packed.first_chunk_mut::<8>() {
                *packed = _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(pairs)).to_le_bytes();
            }
        }
        _ => {
            // As above with four times the next one; then, in sixteen bits, sixteen times the next pair.
            let pairs = _mm512_or_si512(codes, _mm512_srli_epi64::<30>(codes));
            let fours = _mm_maddubs_epi16(_mm512_cvtepi64_epi8(pairs), _mm_set1_epi16(0x1001));
            if let Some(packed) = packed.first_chunk_mut::<4>() {
                *packed = _mm_cvtsi128_si32(_mm_packus_epi16(fours, fours)).to_le_bytes();
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn halves(lanes: __m512) -> Lanes {
    [_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes)]
}

/// The end of a row, fewer than sixteen elements, with `filling` behind it; and a mask of the elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn load_rest(rest: &[f32], filling: __m512) -> (__m512, __mmask16) {
    let count = rest.len().min(LANES - 1);
    let mask: __mmask16 = (1 << count) - 1;
    // SAFETY: the mask lets no element be read but the first `count`, which `rest` has.
    (unsafe { _mm512_mask_loadu_ps(filling, mask, rest.as_ptr()) }, mask)
}
