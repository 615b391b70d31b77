//! What encoding does most of its time, by AVX2, FMA and F16C, where the processor has them: the same bits as the plain
//! code, for the rows that are plain ([`crate::statistics`]). All other rows are left to the plain code.
//!
//! | file | holds |
//! |---|---|
//! | `lanes` | registers: loading, and making one number of many |
//! | `rows` | one row: minimum, maximum, squares, errors |
//! | `codes` | elements to codes, codes to packed bytes |
//! | `groups` | the quantizer: eight rows at a time, so that what is done once a row is done once a group |
//!
//! Minimum and maximum are found in any order, which for a plain row leaves one question: which of two zeros. It is
//! answered by a look for the first one, where the minimum is zero.

#![expect(unsafe_code, reason = "what is compiled for a processor that has been asked is called so")]
#![cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "intrinsics have long names of their own"))]

mod codes;
mod groups;
mod lanes;
mod rows;

use weighbridge_schemas::encoding::Encoding;

use super::row_wise::PlainRows;
use super::{cast, float8};
use crate::statistics::BlockStatistics;
use groups::Rows;

/// Whether this processor has what is needed.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Encodes rows of `width` elements, to rows of `encoded_bytes`; `plain` is for those that are not plain. False, and
/// nothing is done, where not [`is_here`].
pub(super) fn quantize(
    encoding: Encoding,
    (values, width): (&[f32], usize),
    (encoded, encoded_bytes): (&mut [u8], usize),
    statistics: &mut BlockStatistics,
    plain: &mut PlainRows<'_>,
) -> bool {
    if !is_here() || width == 0 {
        return false;
    }
    let mut rows = Rows { width, encoded_bytes, statistics, plain };
    // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
    unsafe {
        match encoding {
            Encoding::Int8Sbf32 => rows.quantize::<8, false>(values, encoded),
            Encoding::Int8Sbf16 => rows.quantize::<8, true>(values, encoded),
            Encoding::Int4Sbf16 => rows.quantize::<4, true>(values, encoded),
            Encoding::Int2Sbf16 => rows.quantize::<2, true>(values, encoded),
            _ => return false,
        }
    }
    true
}

/// Casts elements. False, and nothing is done, for what is no cast and where not [`is_here`].
pub(super) fn narrow(encoding: Encoding, values: &[f32], out: &mut [u8]) -> bool {
    // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
    is_here() && unsafe { narrow_by_avx2(encoding, values, out) }
}

/// Takes up rows of `width` elements, the last of which may be shorter, and what they decode to; the type saturates at
/// `limit`. False, and nothing is done, where not [`is_here`].
pub(super) fn take_encoded_rows(
    (values, decoded): (&[f32], &[f32]),
    width: usize,
    limit: Option<f32>,
    statistics: &mut BlockStatistics,
) -> bool {
    if !is_here() {
        return false;
    }
    // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
    unsafe { encoded_rows((values, decoded), width, limit, statistics) };
    true
}

/// Takes up rows of `width` elements that are stored as they are; else as [`take_encoded_rows`].
pub(super) fn take_kept_rows(values: &[f32], width: usize, statistics: &mut BlockStatistics) -> bool {
    if !is_here() {
        return false;
    }
    // SAFETY: the processor has been asked whether it has AVX2, FMA and F16C.
    unsafe { kept_rows(values, width, statistics) };
    true
}

#[target_feature(enable = "avx2,fma,f16c")]
fn narrow_by_avx2(encoding: Encoding, values: &[f32], out: &mut [u8]) -> bool {
    match encoding {
        Encoding::F16 => codes::narrow_to_f16(values, out),
        Encoding::Bf16 => cast::narrow_to_bf16(values, out),
        Encoding::F8E4m3fn => float8::narrow_to_e4m3fn(values, out),
        Encoding::F8E5m2 => float8::narrow_to_e5m2(values, out),
        Encoding::Hfp8E4b7Max240 => float8::narrow_to_hfp8(values, out),
        _ => return false,
    }
    true
}

#[target_feature(enable = "avx2,fma,f16c")]
fn encoded_rows(
    (values, decoded): (&[f32], &[f32]),
    width: usize,
    limit: Option<f32>,
    statistics: &mut BlockStatistics,
) {
    for (row, decoded) in values.chunks(width.max(1)).zip(decoded.chunks(width.max(1))) {
        let (sums, errors) = (rows::measure(row), rows::compare(row, decoded));
        let plain = sums.are_plain() && errors.are_finite();
        if plain {
            statistics.plain_row(row.len(), &sums, &errors);
        } else {
            statistics.odd_encoded_row(row, decoded, 0);
        }
        if let Some(limit) = limit {
            let inside = plain && sums.max <= limit && sums.min >= -limit;
            statistics.saturated(if inside { 0 } else { cast::count_beyond(row, limit) });
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn kept_rows(values: &[f32], width: usize, statistics: &mut BlockStatistics) {
    for row in values.chunks(width.max(1)) {
        statistics.kept_row(row, &rows::measure(row));
    }
}

#[cfg(test)]
mod tests;
