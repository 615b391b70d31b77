//! Source bytes to binary32. Every type but binary64 widens exactly, except that a signalling NaN may come out quiet.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{
    decode_bf16, decode_f8_e4m3, decode_f8_e5m2, decode_f16, decode_f32, decode_f64,
};

/// Widens little-endian elements of some type, as many as there are of both.
pub(super) type Widen = fn(bytes: &[u8], values: &mut [f32]);

/// The widening of a floating-point type that binary32 holds exactly; `None` for every other type.
pub(super) fn widening(dtype: Dtype) -> Option<Widen> {
    match dtype {
        Dtype::F32 => Some(decode_f32),
        Dtype::F16 => Some(decode_f16),
        Dtype::Bf16 => Some(decode_bf16),
        Dtype::F8E4m3 => Some(decode_f8_e4m3),
        Dtype::F8E5m2 => Some(decode_f8_e5m2),
        _ => None,
    }
}

/// How a type that is cast and quantized becomes binary32; `None` for every other type. binary64 is rounded: what is
/// too large for binary32 becomes infinite; [`beyond_f32`] tells how much that is.
pub(super) fn encodable(source: Dtype) -> Option<Widen> {
    match source {
        Dtype::F64 => Some(decode_f64),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => widening(source),
        _ => None,
    }
}

/// How many elements of `row` are finite and become infinite in binary32.
pub(super) fn beyond_f32(source: Dtype, row: &[u8]) -> usize {
    if source != Dtype::F64 {
        return 0;
    }
    let values = row.as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes));
    #[expect(clippy::cast_possible_truncation, reason = "whether it is too large is the question")]
    values.filter(|&value| value.is_finite() && (value as f32).is_infinite()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_binary64_holds_is_counted() {
        let values = [1e300, f64::from(f32::MAX), f64::INFINITY, f64::NAN, -1e39, 3.402_823_6e38];
        let row: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(beyond_f32(Dtype::F64, &row), 3);
        assert_eq!(beyond_f32(Dtype::F32, &row), 0);
    }

    #[test]
    fn other_types_are_not_widened() {
        for &dtype in Dtype::ALL {
            assert_eq!(widening(dtype).is_some(), dtype.is_float() && dtype != Dtype::F64);
            let encoded = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            assert_eq!(encodable(dtype).is_some(), encoded);
        }
    }
}
