//! Casts to 8 bits: the types of torch (`float8_e4m3fn`, `float8_e5m2`) and of FBGEMM (`hfp8` with 4 exponent bits).
//!
//! A code is a sign, `E` bits of exponent and `7 - E` of mantissa, so that codes without their sign grow with the
//! numbers they stand for. Numbers are rounded to nearest even; too large ones become the largest code:
//!
//! | type | exponent bits, bias | largest code | NaN |
//! |---|---|---|---|
//! | `float8_e4m3fn` | 4, 7 | 0x7E: 448, for infinity too | 0x7F |
//! | `float8_e5m2` | 5, 15 | 0x7C: infinity, from 61440 on | 0x7F |
//! | `hfp8` | 4, 7 | 0x77: 240, for infinity too | has none; 0x77 |

/// To torch's `float8_e4m3fn`.
#[inline(always)]
pub(super) fn narrow_to_e4m3fn(values: &[f32], out: &mut [u8]) {
    narrow::<3, 7, 0x7E, 0x7F>(values, out);
}

/// To torch's `float8_e5m2`.
#[inline(always)]
pub(super) fn narrow_to_e5m2(values: &[f32], out: &mut [u8]) {
    narrow::<2, 15, 0x7C, 0x7F>(values, out);
}

/// To FBGEMM's `hfp8` with 4 exponent bits, a bias of 7, and 240 for the largest number.
#[inline(always)]
pub(super) fn narrow_to_hfp8(values: &[f32], out: &mut [u8]) {
    narrow::<3, 7, 0x77, 0x77>(values, out);
}

#[inline(always)]
fn narrow<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32, const NAN: u32>(
    values: &[f32],
    out: &mut [u8],
) {
    for (place, &value) in out.iter_mut().zip(values) {
        *place = code::<MANTISSA, BIAS, LARGEST, NAN>(value);
    }
}

/// The code of `value`. Both ways to it are taken, and one result chosen, so that the compiler can use vectors.
#[inline(always)]
fn code<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32, const NAN: u32>(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // Just under half a unit, and one more where the unit is odd: ties go to even. Then the exponent's bias changes.
    let shift = 23 - MANTISSA;
    let rounded = (magnitude + ((1 << (shift - 1)) - 1) + (magnitude >> shift & 1)) >> shift;
    let normal = rounded.wrapping_sub((127 - BIAS) << MANTISSA).min(LARGEST);
    // 2^23 units of the smallest numbers: adding it rounds, and leaves the units in the low bits.
    let rounder = (127 + 24 - BIAS - MANTISSA) << 23;
    let small = (f32::from_bits(magnitude) + f32::from_bits(rounder)).to_bits() & 0xFF;
    let code = if magnitude < (128 - BIAS) << 23 { small } else { normal };
    let code = if magnitude > 0x7F80_0000 { NAN } else { code };
    let [low, ..] = (code | bits >> 24 & 0x80).to_le_bytes();
    low
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::dtype::Dtype;
    use weighbridge_schemas::encoding::{Encoding, Form};

    use super::*;

    type Narrow = fn(&[f32], &mut [u8]);

    const TYPES: [(Encoding, Narrow, u8); 3] = [
        (Encoding::F8E4m3fn, narrow_to_e4m3fn, 0x7E),
        (Encoding::F8E5m2, narrow_to_e5m2, 0x7C),
        (Encoding::Hfp8E4b7Max240, narrow_to_hfp8, 0x77),
    ];

    /// The positive numbers that codes stand for, from 0 to the largest one; infinity as the next one would be.
    fn numbers(encoding: Encoding, largest: u8) -> Vec<f64> {
        let codes: Vec<u8> = (0..=largest).collect();
        let mut decoded = vec![0.0; codes.len()];
        assert!(Form::plain(encoding).decode_row(Dtype::F32, &codes, &mut decoded));
        let finite = |value: f32| if value.is_finite() { f64::from(value) } else { 65536.0 };
        decoded.into_iter().map(finite).collect()
    }

    /// The nearest number's code, the even one of two; beyond the last number, the last code.
    fn nearest(numbers: &[f64], magnitude: f64) -> usize {
        let above = numbers.partition_point(|&number| number < magnitude).min(numbers.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - numbers[below], numbers[above] - magnitude);
        if down < up || (down == up && below % 2 == 0) { below } else { above }
    }

    #[test]
    fn every_upper_half_goes_to_the_nearest_code() {
        for (encoding, narrow, largest) in TYPES {
            let numbers = numbers(encoding, largest);
            let lower = [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
            for upper in 0..=0xFFFFu32 {
                let values = lower.map(|lower| f32::from_bits(upper << 16 | lower));
                let mut codes = vec![0; 6];
                narrow(&values, &mut codes);
                for (value, code) in values.into_iter().zip(codes) {
                    assert_eq!(code >= 0x80, value.is_sign_negative());
                    let code = usize::from(code & 0x7F);
                    if value.is_nan() {
                        assert_eq!(code, if largest == 0x77 { 0x77 } else { 0x7F }, "{encoding:?}");
                    } else {
                        let expected = nearest(&numbers, f64::from(value.abs()));
                        assert_eq!(code, expected, "{encoding:?} {value:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates_or_becomes_infinite() {
        let values = [448.0, 464.0, 1e9, -1e9, f32::INFINITY, 61439.0, 61440.0];
        let codes = TYPES.map(|(_, narrow, _)| {
            let mut codes = vec![0; 7];
            narrow(&values, &mut codes);
            codes
        });
        assert_eq!(codes[0], [0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E]);
        assert_eq!(codes[1], [0x5F, 0x5F, 0x7C, 0xFC, 0x7C, 0x7B, 0x7C]);
        assert_eq!(codes[2], [0x77, 0x77, 0x77, 0xF7, 0x77, 0x77, 0x77]);
    }
}
