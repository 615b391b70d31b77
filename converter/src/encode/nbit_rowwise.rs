//! Row-wise quantization with a binary16 scale and bias: `int8_sbf16`, `int4_sbf16`, `int2_sbf16`.
//!
//! Bit for bit the scalar path of fbgemm's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` (fbgemm-gpu-cpu 1.9.0), for
//! every row whatever. With `most` = 255, 15 or 3, all arithmetic in binary32, each operation rounded to nearest even:
//!
//! ```text
//! bias  = f16(min)                                           stored
//! range = max - bias
//! scale = f16(range == 0 ? 1 : range / most), 1 where that is 0   stored
//! code  = clamp(rint((x - bias) * (1 / scale)), 0, most)
//! ```
//!
//! The minimum is rounded before anything is taken from it, so values below 0 and above `most` do occur, and where it
//! was rounded past the maximum the scale is negative. Minimum and maximum are found as for `int8_sbf32`. Where scale
//! or bias overflow binary16, or the row holds a NaN, the scalar loop converts NaNs to integers, which gives 0 on x86;
//! a number it never has to convert out of range: a finite bias is at most 16 away from the minimum, the smallest
//! scale is 2^-24. So clamping first, with 0 for a NaN, gives the same codes.

use half::f16;

use super::row_wise::{ROUNDER, first_smallest};
use crate::statistics::Sums;

/// Elements that are quantized before their codes are packed.
const RUN: usize = 64;

/// The binary16 NaN that is stored for a scale that is none.
const NO_SCALE: u16 = 0x7FFF;

/// `int8_sbf16`: a code is a byte.
pub(super) fn quantize_to_8_bits(values: &[f32], sums: &Sums, codes: &mut [u8], parameters: &mut [u8]) {
    quantize(values, sums, codes, parameters, 255.0, |[code]| code);
}

/// `int4_sbf16`: two codes a byte, from the low bits up.
pub(super) fn quantize_to_4_bits(values: &[f32], sums: &Sums, codes: &mut [u8], parameters: &mut [u8]) {
    quantize(values, sums, codes, parameters, 15.0, |codes| {
        let codes = u16::from_le_bytes(codes);
        low_byte(u32::from(codes | codes >> 4))
    });
}

/// `int2_sbf16`: four codes a byte, from the low bits up.
pub(super) fn quantize_to_2_bits(values: &[f32], sums: &Sums, codes: &mut [u8], parameters: &mut [u8]) {
    quantize(values, sums, codes, parameters, 3.0, |codes| {
        let codes = u32::from_le_bytes(codes);
        low_byte(codes | codes >> 6 | codes >> 12 | codes >> 18)
    });
}

/// Writes the packed codes, and scale and bias in four bytes. `pack` makes a byte of `N` codes.
fn quantize<const N: usize>(
    values: &[f32],
    sums: &Sums,
    packed: &mut [u8],
    parameters: &mut [u8],
    most: f32,
    pack: impl Fn([u8; N]) -> u8,
) {
    let bias = half_bits(first_smallest(values, sums.min));
    let min = f16::from_bits(bias).to_f32();
    let scale = scale(sums.max - min, most);
    let factor = 1.0 / scale;
    for (values, packed) in values.chunks(RUN).zip(packed.chunks_mut(RUN / N)) {
        let mut codes = [0; RUN];
        for (code, &value) in codes.iter_mut().zip(values) {
            let scaled = (value - min) * factor;
            // NaN is not greater than 0.
            let scaled = if scaled > 0.0 { scaled } else { 0.0 };
            let scaled = if scaled < most { scaled } else { most };
            *code = low_byte((scaled + ROUNDER).to_bits());
        }
        for (byte, &codes) in packed.iter_mut().zip(codes.as_chunks().0) {
            *byte = pack(codes);
        }
    }
    let scale = if scale.is_nan() { NO_SCALE } else { f16::from_f32(scale).to_bits() };
    let ([s0, s1], [b0, b1]) = (scale.to_le_bytes(), bias.to_le_bytes());
    parameters.copy_from_slice(&[s0, s1, b0, b1]);
}

/// The scale that is stored: a binary16 number other than 0.
fn scale(range: f32, most: f32) -> f32 {
    let exact = if range == 0.0 { 1.0 } else { range / most };
    let rounded = f16::from_f32(exact).to_f32();
    if rounded == 0.0 { 1.0 } else { rounded }
}

/// The nearest binary16. A NaN keeps its sign and the upper bits of its payload, and becomes quiet.
fn half_bits(value: f32) -> u16 {
    if !value.is_nan() {
        return f16::from_f32(value).to_bits();
    }
    let bits = value.to_bits();
    let [b0, b1, ..] = (bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF).to_le_bytes();
    u16::from_le_bytes([b0, b1])
}

fn low_byte(bits: u32) -> u8 {
    let [low, ..] = bits.to_le_bytes();
    low
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use weighbridge_schemas::dtype::Dtype;
    use weighbridge_schemas::encoding::{Encoding, Form};

    use super::*;
    use crate::encode::{any_rows, encoder};
    use crate::statistics::{BlockStatistics, Statistics};

    const ENCODINGS: [(Encoding, u32); 3] =
        [(Encoding::Int8Sbf16, 8), (Encoding::Int4Sbf16, 4), (Encoding::Int2Sbf16, 2)];

    /// fbgemm's scalar loop, written down plainly.
    fn reference(values: &[f32], bits: u32) -> Vec<u8> {
        let most = (1i32 << bits) - 1;
        let (mut min, mut max) = (values[0], values[0]);
        for &value in values {
            min = if value < min { value } else { min };
            max = if max < value { value } else { max };
        }
        let bias = half_bits(min);
        let min = f16::from_bits(bias).to_f32();
        let range = max - min;
        let mut scale = if range == 0.0 { 1.0 } else { range / most as f32 };
        scale = f16::from_f32(scale).to_f32();
        if scale == 0.0 {
            scale = 1.0;
        }
        let mut inverse = 1.0 / scale;
        if inverse.is_infinite() {
            (scale, inverse) = (1.0, 1.0);
        }
        let per_byte = 8 / bits as usize;
        let mut row = vec![0u8; values.len().div_ceil(per_byte)];
        for (at, value) in values.iter().enumerate() {
            let code = to_i32((value - min) * inverse).clamp(0, most);
            row[at / per_byte] |= u8::try_from(code).unwrap() << (at % per_byte * bits as usize);
        }
        let scale = if scale.is_nan() { 0x7FFF } else { f16::from_f32(scale).to_bits() };
        row.extend([scale.to_le_bytes(), bias.to_le_bytes()].as_flattened());
        row
    }

    /// What `cvtss2si` makes of `value` in 64 bits, cut to 32: out of range and NaN give the smallest integer first.
    #[expect(clippy::cast_possible_truncation, reason = "it is what the scalar loop does")]
    fn to_i32(value: f32) -> i32 {
        let rounded = f64::from(value.round_ties_even());
        let limit = 9_223_372_036_854_775_808.0;
        let integer = if rounded >= -limit && rounded < limit { rounded as i64 } else { i64::MIN };
        integer as i32
    }

    fn encode(encoding: Encoding, values: &[f32], width: usize) -> (Vec<u8>, Statistics) {
        let rows: Vec<u8> = values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        let encoder = encoder(Form::plain(encoding), Dtype::F32, width).unwrap();
        let (mut out, mut statistics) =
            (vec![7; encoder.encoded_bytes(rows.len())], BlockStatistics::new(100));
        encoder.encode(&rows, &mut out, &mut statistics);
        (out, statistics.finish())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn every_row_has_the_bits_of_the_plain_loop(values in any_rows::row()) {
            for (encoding, bits) in ENCODINGS {
                prop_assert_eq!(encode(encoding, &values, values.len()).0, reference(&values, bits), "{:?}", encoding);
            }
        }

        #[test]
        fn no_element_is_off_by_more_than_half_a_step_and_the_rounding_of_scale_and_bias(
            values in proptest::collection::vec(-1e3f32..1e3, 1..70),
        ) {
            for (encoding, bits) in ENCODINGS {
                let (row, statistics) = encode(encoding, &values, values.len());
                let [s0, s1, b0, b1] = *row.last_chunk().unwrap();
                let scale = f16::from_le_bytes([s0, s1]).to_f64().abs();
                let bias = f16::from_le_bytes([b0, b1]).to_f64().abs();
                // A value may lie outside of what the codes reach: by the bias' rounding below, by the scale's above.
                let reach = bias * 2f64.powi(-11) + 2f64.powi(-25);
                let stretch = scale * f64::from((1 << bits) - 1) * 2f64.powi(-11);
                let bound = scale * 0.5001 + reach + stretch + 1e-3;
                prop_assert!(statistics.max_error <= bound, "{encoding:?} {} {bound}", statistics.max_error);
                prop_assert_eq!(statistics.compared_elements, values.len() as u64);
            }
        }
    }

    #[test]
    fn a_constant_row_decodes_right_whichever_way_its_minimum_was_rounded() {
        for (encoding, _) in ENCODINGS {
            for constant in [0.1f32, -0.1, 1.0, -0.0, 1000.3] {
                let (row, statistics) = encode(encoding, &[constant; 8], 8);
                let [s0, s1, ..]: [u8; 4] = *row.last_chunk().unwrap();
                let scale = f16::from_le_bytes([s0, s1]).to_f32();
                assert!(statistics.max_error <= f64::from(constant.abs()) * 1e-4, "{encoding:?} {constant}");
                assert_eq!(scale == 1.0, f16::from_f32(constant).to_f32() == constant);
            }
            let (row, _) = encode(encoding, &[-0.1; 8], 8);
            assert!(row[row.len() - 3] >= 0x80, "the scale is negative");
        }
    }

    #[test]
    fn rows_whose_scale_or_bias_overflow_are_named() {
        for (encoding, bits) in ENCODINGS {
            let outlier = 65520.0 * ((1 << bits) - 1) as f32;
            let values = [1.0, 2.0, -65520.0, 1.0, outlier * 1.01, 1.0, f32::NAN, 1.0, 1.0, f32::INFINITY];
            let statistics = encode(encoding, &values, 2).1;
            assert_eq!(statistics.first_overflow_rows, [101, 102], "{encoding:?}");
            assert_eq!(statistics.first_non_finite_rows, [103, 104]);
        }
    }
}
