//! Sixteen elements in two registers: loading them, and making one number of many.

use std::arch::x86_64::*;

use safe_unaligned_simd::x86_64 as memory;

use crate::statistics::{LANES, SUMS};

/// Two registers: sixteen elements.
pub(super) type Lanes = [__m256; 2];

/// All bits of the first eight, none of the others: from the right place on, a mask of any number of elements.
const MASKS: [i32; 3 * 8] = {
    let mut masks = [0; 3 * 8];
    let mut at = 0;
    while at < 8 {
        masks[at] = -1;
        at += 1;
    }
    masks
};

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load(chunk: &[f32; LANES]) -> Lanes {
    let (halves, _) = chunk.as_chunks::<8>();
    [memory::_mm256_loadu_ps(&halves[0]), memory::_mm256_loadu_ps(&halves[1])]
}

/// The end of a row, at most sixteen elements, with `filling` behind it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_rest(rest: &[f32], filling: __m256) -> Lanes {
    let (front, back) = rest.split_at(rest.len().min(8));
    [load_few(front, filling), load_few(back, filling)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_few(few: &[f32], filling: __m256) -> __m256 {
    let count = few.len().min(8);
    let Some(mask) = MASKS.get(8 - count..).and_then(|masks| masks.first_chunk::<8>()) else {
        return filling;
    };
    let mask = memory::_mm256_loadu_si256(mask);
    // SAFETY: the mask lets no element be read but the first `count`, which `few` has.
    let loaded = unsafe { _mm256_maskload_ps(few.as_ptr(), mask) };
    _mm256_blendv_ps(filling, loaded, _mm256_castsi256_ps(mask))
}

/// The four sums of a run, of its sixteen.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn four_sums(lanes: Lanes) -> __m128 {
    let eight = _mm256_add_ps(lanes[0], lanes[1]);
    _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight))
}

/// The smaller of two in each lane, or the larger one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pick<const LARGER: bool>(a: __m256, b: __m256) -> __m256 {
    if LARGER { _mm256_max_ps(a, b) } else { _mm256_min_ps(a, b) }
}

/// The smallest of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn smallest(eight: __m256) -> f32 {
    utmost::<false>(eight)
}

/// The largest of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn largest(eight: __m256) -> f32 {
    utmost::<true>(eight)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn utmost<const LARGER: bool>(eight: __m256) -> f32 {
    let four = pick::<LARGER>(eight, _mm256_permute2f128_ps::<0x01>(eight, eight));
    let two = pick::<LARGER>(four, _mm256_permute_ps::<0b01_00_11_10>(four));
    _mm256_cvtss_f32(pick::<LARGER>(two, _mm256_movehdup_ps(two)))
}

/// The smallest, or the largest, of each of eight registers, in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn utmost_of_each<const LARGER: bool>(rows: &[__m256; 8]) -> __m256 {
    let mut quarters = [_mm256_setzero_ps(); 4];
    for (at, quarter) in quarters.iter_mut().enumerate() {
        let [even, odd] = interleaved(rows[2 * at], rows[2 * at + 1]);
        *quarter = pick::<LARGER>(even, odd);
    }
    let [a, b] = paired(quarters[0], quarters[1]);
    let [c, d] = paired(quarters[2], quarters[3]);
    let [low, high] = halved(pick::<LARGER>(a, b), pick::<LARGER>(c, d));
    pick::<LARGER>(low, high)
}

/// Elements of two rows in turn: what is combined of the two results belongs to the rows in turn.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn interleaved(a: __m256, b: __m256) -> [__m256; 2] {
    [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)]
}

/// Of two registers that hold pairs of rows: four rows in turn.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn paired(a: __m256, b: __m256) -> [__m256; 2] {
    [_mm256_shuffle_ps::<0b01_00_01_00>(a, b), _mm256_shuffle_ps::<0b11_10_11_10>(a, b)]
}

/// Of two registers that hold four rows twice: all eight rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halved(a: __m256, b: __m256) -> [__m256; 2] {
    [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn to_array(sums: __m256d) -> [f64; SUMS] {
    let mut array = [0.0; SUMS];
    memory::_mm256_storeu_pd(&mut array, sums);
    array
}
