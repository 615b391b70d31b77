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
/// too large for binary32 becomes infinite, and is counted as such.
pub(super) fn encodable(source: Dtype) -> Option<Widen> {
    match source {
        Dtype::F64 => Some(decode_f64),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => widening(source),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_types_are_not_widened() {
        for &dtype in Dtype::ALL {
            assert_eq!(widening(dtype).is_some(), dtype.is_float() && dtype != Dtype::F64);
            let encoded = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            assert_eq!(encodable(dtype).is_some(), encoded);
        }
    }
}
