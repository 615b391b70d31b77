//! Source bytes to binary32. Every type but binary64 widens exactly, except that a signalling NaN may come out quiet.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{
    decode_bf16, decode_f8_e4m3, decode_f8_e5m2, decode_f16, decode_f32, decode_f64,
};

/// Widens little-endian elements of some type, as many as there are of both.
type Widen = fn(bytes: &[u8], values: &mut [f32]);

/// How many elements are widened at a time, unless a row has more: they stay in the first cache.
const AT_ONCE: usize = 4096;

/// How elements of one type become binary32.
#[derive(Clone, Copy)]
pub(super) struct Widening {
    source: Dtype,
    widen: Widen,
}

impl Widening {
    /// The widening of a floating-point type that binary32 holds exactly; `None` for every other type.
    pub(super) fn exact(source: Dtype) -> Option<Self> {
        let widen = match source {
            Dtype::F32 => decode_f32,
            Dtype::F16 => decode_f16,
            Dtype::Bf16 => decode_bf16,
            Dtype::F8E4m3 => decode_f8_e4m3,
            Dtype::F8E5m2 => decode_f8_e5m2,
            _ => return None,
        };
        Some(Self { source, widen })
    }

    /// How a type that is cast and quantized becomes binary32; `None` for every other type. binary64 is rounded: what
    /// is too large for binary32 becomes infinite; [`beyond_f32`] tells how much that is.
    pub(super) fn to_encode(source: Dtype) -> Option<Self> {
        match source {
            Dtype::F64 => Some(Self { source, widen: decode_f64 }),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Self::exact(source),
            _ => None,
        }
    }

    /// How many rows of so many elements are widened at a time.
    pub(super) fn rows_at_once(self, elements: usize) -> usize {
        AT_ONCE.checked_div(elements).unwrap_or(1).max(1)
    }

    /// The elements of `bytes`. Those that are binary32 already and lie where binary32 may lie are not copied to
    /// `room`.
    pub(super) fn widen<'v>(self, bytes: &'v [u8], room: &'v mut Vec<f32>) -> &'v [f32] {
        if self.source == Dtype::F32
            && cfg!(target_endian = "little")
            && let Ok(values) = bytemuck::try_cast_slice(bytes)
        {
            return values;
        }
        let size = usize::try_from(self.source.size()).unwrap_or(1).max(1);
        room.resize(bytes.len() / size, 0.0);
        (self.widen)(bytes, room);
        room
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
    fn binary32_is_widened_wherever_it_lies() {
        let bytes: Vec<u8> = (0..44).collect();
        let widening = Widening::exact(Dtype::F32).unwrap();
        for start in 0..4 {
            let bytes = &bytes[start..start + 40];
            let expected: Vec<_> =
                bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            assert_eq!(widening.widen(bytes, &mut Vec::new()), expected);
        }
    }

    #[test]
    fn other_types_are_not_widened() {
        for &dtype in Dtype::ALL {
            assert_eq!(Widening::exact(dtype).is_some(), dtype.is_float() && dtype != Dtype::F64);
            let encoded = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            assert_eq!(Widening::to_encode(dtype).is_some(), encoded);
        }
    }
}
