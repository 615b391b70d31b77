//! Row-wise 8-bit quantization with a binary32 scale and bias: `int8_sbf32`.
//!
//! Bit for bit the scalar path of fbgemm's `FloatOrHalfToFused8BitRowwiseQuantized` (fbgemm-gpu-cpu 1.9.0), for every
//! row whatever. All arithmetic is binary32, each operation rounded to nearest even:
//!
//! ```text
//! range = max - min
//! scale = range / 255                                        stored
//! bias  = min                                                stored
//! code  = low byte of rint((x - min) * (255 / (range + 1e-8)))
//! ```
//!
//! Minimum and maximum are found by walking the row with `<`: of equal elements the first one wins, which for zeros
//! decides the sign of the bias; a NaN in front stays, a NaN elsewhere is passed over. Rounding to an integer gives
//! 0 in the low byte for NaN and for anything out of range (x86's `cvtss2si` to 64 bits). So it follows:
//! * where the range is finite, the row holds finite elements and perhaps NaNs (code 0), and all scaled values lie
//!   between 0 and 255;
//! * where it is not, every code is 0: the factor is NaN, or it is 0 and the product 0 or NaN.
//!
//! Writing `x * factor - min * factor`, or fusing the product into an addition, would change codes.

use super::row_wise::{ROUNDER, first_smallest};
use crate::statistics::Sums;

/// Added to the range before dividing by it, so that a constant row is no division by zero.
const EPSILON: f32 = 1e-8;

/// The bit that makes a NaN a quiet one.
const QUIET: u32 = 0x0040_0000;

/// The NaN that x86 makes of infinity minus infinity.
const INVALID: u32 = 0xFFC0_0000;

/// Writes the codes, which are 0 so far, and scale and bias in eight bytes.
pub(super) fn quantize(values: &[f32], sums: &Sums, codes: &mut [u8], parameters: &mut [u8]) {
    let bias = first_smallest(values, sums.min);
    let range = range(sums.max, bias);
    if range.is_finite() {
        write_codes(values, bias, 255.0 / (range + EPSILON), codes);
    }
    let [s0, s1, s2, s3] = scale(range).to_le_bytes();
    let [b0, b1, b2, b3] = bias.to_le_bytes();
    parameters.copy_from_slice(&[s0, s1, s2, s3, b0, b1, b2, b3]);
}

/// The range, with the NaNs that x86 makes: languages do not promise their bits.
fn range(max: f32, min: f32) -> f32 {
    // In a row of zeros the maximum may be a zero of the other sign; the range is +0 all the same.
    let range = if max == min && max.is_finite() { 0.0 } else { max - min };
    match range.is_nan() {
        true if min.is_nan() => f32::from_bits(min.to_bits() | QUIET),
        true => f32::from_bits(INVALID),
        false => range,
    }
}

/// The stored scale; a NaN stays what it is.
fn scale(range: f32) -> f32 {
    if range.is_nan() { range } else { range / 255.0 }
}

fn write_codes(values: &[f32], min: f32, factor: f32, codes: &mut [u8]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        let scaled = (value - min) * factor;
        // NaN is not greater than 0.
        let scaled = if scaled > 0.0 { scaled } else { 0.0 };
        let [low, ..] = (scaled + ROUNDER).to_bits().to_le_bytes();
        *code = low;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use weighbridge_schemas::dtype::Dtype;
    use weighbridge_schemas::encoding::{Encoding, Form};

    use crate::encode::{any_rows, encoder};
    use crate::statistics::{BlockStatistics, Statistics};

    /// fbgemm's scalar loop, written down plainly. NaNs have the bits that x86 gives them.
    fn reference(values: &[f32]) -> Vec<u8> {
        let (mut min, mut max) = (values[0], values[0]);
        for &value in values {
            min = if value < min { value } else { min };
            max = if max < value { value } else { max };
        }
        let range = max - min;
        let inverse = 255.0 / (range + 1e-8);
        let scale = match (range.is_nan(), min.is_nan()) {
            (false, _) => (range / 255.0).to_bits(),
            (true, true) => min.to_bits() | 0x0040_0000,
            (true, false) => 0xFFC0_0000,
        };
        let mut row: Vec<u8> = values.iter().map(|&value| low_byte((value - min) * inverse)).collect();
        row.extend(scale.to_le_bytes());
        row.extend(min.to_bits().to_le_bytes());
        row
    }

    /// The low byte of what `cvtss2si` makes of `value`: out of range and NaN give the smallest integer.
    fn low_byte(value: f32) -> u8 {
        let rounded = f64::from(value.round_ties_even());
        let limit = 9_223_372_036_854_775_808.0;
        #[expect(clippy::cast_possible_truncation, reason = "checked to be in range")]
        let integer = if rounded >= -limit && rounded < limit { rounded as i64 } else { i64::MIN };
        integer.to_le_bytes()[0]
    }

    fn encode(values: &[f32], width: usize) -> (Vec<u8>, Statistics) {
        let rows: Vec<u8> = values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        let encoder = encoder(Form::plain(Encoding::Int8Sbf32), Dtype::F32, width).unwrap();
        let (mut out, mut statistics) =
            (vec![7; encoder.encoded_bytes(rows.len())], BlockStatistics::new(100));
        encoder.encode(&rows, &mut out, &mut statistics);
        (out, statistics.finish())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn every_row_has_the_bits_of_the_plain_loop(values in any_rows::row()) {
            prop_assert_eq!(encode(&values, values.len()).0, reference(&values));
        }

        #[test]
        fn no_element_is_off_by_more_than_half_a_step(values in proptest::collection::vec(-1e3f32..1e3, 1..70)) {
            let (row, statistics) = encode(&values, values.len());
            let (_, trailer) = row.split_last_chunk::<8>().unwrap();
            let scale = f64::from(f32::from_le_bytes(*trailer.first_chunk().unwrap()));
            // Three roundings to 24 bits before the code, on a value of up to 255 steps, and one after it.
            let rounding = scale * 255.0 * 3.0 * 2f64.powi(-24) + 2e3 * 2f64.powi(-24);
            prop_assert!(statistics.max_error <= scale * 0.5 + rounding, "{}", statistics.max_error / scale);
            prop_assert_eq!(statistics.compared_elements, values.len() as u64);
        }
    }

    #[test]
    fn the_first_zero_gives_the_bias_its_sign() {
        for (values, bias) in [([-0.0, 0.0, 1.0], -0.0f32), ([0.0, -0.0, 1.0], 0.0), ([1.0, -0.0, 0.0], -0.0)]
        {
            assert_eq!(encode(&values, 3).0[7..], bias.to_le_bytes());
        }
    }

    #[test]
    fn a_signalling_nan_in_front_keeps_its_bits_in_the_bias() {
        let (row, _) = encode(&[f32::from_bits(0xFF80_0001), 1.0], 2);
        assert_eq!(row[..2], [0, 0]);
        assert_eq!(row[2..6], 0xFFC0_0001u32.to_le_bytes());
        assert_eq!(row[6..], 0xFF80_0001u32.to_le_bytes());
    }

    #[test]
    fn rows_that_decode_to_nothing_finite_are_named() {
        let values = [f32::MAX, f32::MIN, 1.0, 2.0, f32::NAN, 1.0, f32::INFINITY, 1.0, -3e38, 3e38];
        let statistics = encode(&values, 2).1;
        assert_eq!((statistics.overflow_rows, statistics.first_overflow_rows), (2, vec![100, 104]));
        assert_eq!((statistics.non_finite_rows, statistics.first_non_finite_rows), (2, vec![102, 103]));
        assert_eq!((statistics.non_finite_elements, statistics.compared_elements), (2, 2));
        assert_eq!((statistics.min, statistics.max), (Some(f64::from(f32::MIN)), Some(f64::from(f32::MAX))));
    }

    #[test]
    fn a_scale_rounded_up_at_the_end_of_the_range_is_an_overflow() {
        // Every stored number is finite, but 255 steps lead beyond the largest binary32 number.
        let (row, statistics) = encode(&[f32::from_bits(0x7EE3_7BFF), f32::MAX], 2);
        let [scale, bias] = [2..6, 6..10].map(|range| f32::from_le_bytes(row[range].try_into().unwrap()));
        assert!(scale.is_finite() && bias.is_finite());
        assert_eq!((statistics.non_finite_rows, statistics.first_overflow_rows), (0, vec![100]));
        assert_eq!((statistics.compared_elements, statistics.max_error), (1, 0.0));
    }
}
