//! Source bytes to binary32. Every type here widens exactly, except that a signalling NaN may come out quiet.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use weighbridge_schemas::dtype::Dtype;

/// Widens little-endian elements of some type, as many as there are of both.
pub(super) type Widen = fn(bytes: &[u8], values: &mut [f32]);

/// How many binary16 elements are converted at once: enough for the processor's conversion instructions, few enough
/// for the stack.
pub(super) const HALVES: usize = 64;

/// The widening of a floating-point type that binary32 holds exactly; `None` for every other type.
pub(super) fn widening(dtype: Dtype) -> Option<Widen> {
    match dtype {
        Dtype::F32 => Some(f32),
        Dtype::F16 => Some(f16),
        Dtype::Bf16 => Some(bf16),
        Dtype::F8E4m3 => Some(f8_e4m3),
        Dtype::F8E5m2 => Some(f8_e5m2),
        _ => None,
    }
}

fn f32(bytes: &[u8], values: &mut [f32]) {
    for (value, &bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(bytes);
    }
}

/// binary16 to binary32.
pub(super) fn f16(bytes: &[u8], values: &mut [f32]) {
    let mut halves = [f16::ZERO; HALVES];
    for (values, bytes) in values.chunks_mut(HALVES).zip(bytes.as_chunks::<2>().0.chunks(HALVES)) {
        for (half, &bytes) in halves.iter_mut().zip(bytes) {
            *half = f16::from_le_bytes(bytes);
        }
        let count = values.len().min(bytes.len());
        halves[..count].convert_to_f32_slice(&mut values[..count]);
    }
}

/// bfloat16 to binary32: the upper half of the bits.
pub(super) fn bf16(bytes: &[u8], values: &mut [f32]) {
    for (value, &bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16);
    }
}

/// 4 exponent bits with a bias of 7, 3 bits of mantissa, no infinity, one NaN of each sign.
fn f8_e4m3(bytes: &[u8], values: &mut [f32]) {
    for (value, &byte) in values.iter_mut().zip(bytes) {
        let sign = u32::from(byte & 0x80) << 24;
        let magnitude = u32::from(byte & 0x7F);
        let widened = match magnitude {
            0x7F => f32::NAN,
            // Below 2^-6 the unit is 2^-9.
            0..8 => f32::from(byte & 0x7F) * 0.001_953_125,
            // The three bits of mantissa move to the front of 23, the exponent's bias goes from 7 to 127.
            _ => f32::from_bits((magnitude << 20) + (120 << 23)),
        };
        *value = f32::from_bits(widened.to_bits() | sign);
    }
}

/// 5 exponent bits, 2 bits of mantissa: the upper half of a binary16.
fn f8_e5m2(bytes: &[u8], values: &mut [f32]) {
    for (value, &byte) in values.iter_mut().zip(bytes) {
        *value = f16::from_le_bytes([0, byte]).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
        let size = usize::try_from(dtype.size()).unwrap();
        let mut values = vec![0.0; bytes.len() / size];
        widening(dtype).unwrap()(bytes, &mut values);
        values
    }

    #[test]
    fn every_8_bit_float_has_its_value() {
        let every: Vec<u8> = (0..=255).collect();
        for (dtype, mantissa_bits, bias) in [(Dtype::F8E4m3, 3, 7), (Dtype::F8E5m2, 2, 15)] {
            for (byte, value) in every.iter().zip(widened(dtype, &every)) {
                let magnitude = i32::from(byte & 0x7F);
                let (exponent, mantissa) =
                    (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
                let unit = 2f32.powi(exponent.max(1) - bias - mantissa_bits);
                let whole = if exponent == 0 { mantissa } else { mantissa + (1 << mantissa_bits) };
                let expected = whole as f32 * unit;
                match (dtype, magnitude) {
                    (Dtype::F8E4m3, 0x7F) | (Dtype::F8E5m2, 0x7D..) => assert!(value.is_nan()),
                    (Dtype::F8E5m2, 0x7C) => assert_eq!(value.abs(), f32::INFINITY),
                    _ => assert_eq!(value.abs().to_bits(), expected.to_bits(), "{dtype:?} {byte:#x}"),
                }
                assert_eq!(value.is_sign_negative(), *byte >= 0x80);
            }
        }
    }

    #[test]
    fn halves_widen_as_the_schemas_decode_them() {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut decoded = vec![0.0; 1 << 16];
        weighbridge_schemas::encoding::decode_f16(&every, &mut decoded);
        assert!(widened(Dtype::F16, &every).iter().zip(&decoded).all(|(a, b)| a.to_bits() == b.to_bits()));
        weighbridge_schemas::encoding::decode_bf16(&every, &mut decoded);
        assert!(
            widened(Dtype::Bf16, &every)
                .iter()
                .zip(&decoded)
                .all(|(a, b)| a == b || (a.is_nan() && b.is_nan()))
        );
    }

    #[test]
    fn other_types_are_not_widened() {
        for &dtype in Dtype::ALL {
            assert_eq!(widening(dtype).is_some(), dtype.is_float() && dtype != Dtype::F64);
        }
    }
}
