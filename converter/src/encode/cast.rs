//! Element-wise casts, to the bits that torch's and FBGEMM's casts give on x86-64.
//!
//! Values are rounded to binary32 first, where they are wider, and then to nearest even; subnormal numbers are kept.
//! What is too large becomes infinite, or the largest number where the type saturates. A NaN cast to binary16 keeps
//! its sign and the ten upper bits of its payload and becomes quiet; cast to bfloat16 it is always 0xFFFF.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};

use super::widen::{Widen, beyond_f32, encodable};
use super::{Encoder, RowSize, float8};
use crate::statistics::{BlockStatistics, Sums};

/// How many binary16 elements are converted at once: enough for the processor's conversion instructions, few enough
/// for the stack.
const HALVES: usize = 64;

/// Casts to another floating-point type.
pub(super) struct Cast {
    form: Form,
    source: Dtype,
    widen: Widen,
    narrow: fn(values: &[f32], out: &mut Vec<u8>),
    size: RowSize,
}

impl Cast {
    /// To the type of `encoding`; `None` for a `source` that is not cast, and for what is no cast.
    pub(super) fn new(encoding: Encoding, source: Dtype, size: RowSize) -> Option<Self> {
        let narrow = match encoding {
            Encoding::F32 => keep_f32,
            Encoding::F16 => narrow_to_f16,
            Encoding::Bf16 => narrow_to_bf16,
            Encoding::F8E4m3fn => float8::narrow_to_e4m3fn,
            Encoding::F8E5m2 => float8::narrow_to_e5m2,
            Encoding::Hfp8E4b7Max240 => float8::narrow_to_hfp8,
            _ => return None,
        };
        Some(Self { form: Form::plain(encoding), source, widen: encodable(source)?, narrow, size })
    }
}

impl Encoder for Cast {
    fn encode(&self, rows: &[u8], out: &mut Vec<u8>, statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, encoded_bytes } = self.size;
        let Some(item_bytes) = source_bytes.checked_div(elements) else { return };
        out.reserve((rows.len() / source_bytes + 1).saturating_mul(encoded_bytes));
        let mut values = vec![0.0; elements];
        let mut decoded = vec![0.0; elements];
        for row in rows.chunks(source_bytes) {
            let count = row.len() / item_bytes;
            let (Some(values), Some(decoded)) = (values.get_mut(..count), decoded.get_mut(..count)) else {
                continue;
            };
            (self.widen)(row, values);
            let Some(sums) = Sums::of(values) else { continue };
            let start = out.len();
            (self.narrow)(values, out);
            // The size is right: it was just written.
            let _ = self.form.decode_row(self.source, out.get(start..).unwrap_or_default(), decoded);
            statistics.encoded_row(values, &sums, decoded, beyond_f32(self.source, row));
            if let Some(limit) = self.form.encoding.saturates_at() {
                statistics.saturated(beyond(values, &sums, limit));
            }
        }
    }

    fn source_row_bytes(&self) -> usize {
        self.size.source_bytes
    }

    fn encoded_row_bytes(&self) -> usize {
        self.size.encoded_bytes
    }
}

/// How many finite elements are larger than `limit`, of either sign.
fn beyond(values: &[f32], sums: &Sums<f32>, limit: f32) -> usize {
    if sums.max <= limit && sums.min >= -limit {
        return 0;
    }
    values.iter().filter(|value| value.is_finite() && value.abs() > limit).count()
}

fn keep_f32(values: &[f32], out: &mut Vec<u8>) {
    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

fn narrow_to_f16(values: &[f32], out: &mut Vec<u8>) {
    let mut halves = [f16::ZERO; HALVES];
    for values in values.chunks(HALVES) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        out.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    }
}

fn narrow_to_bf16(values: &[f32], out: &mut Vec<u8>) {
    out.extend(values.iter().flat_map(|&value| bf16_bits(value).to_le_bytes()));
}

fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    // Just under half a unit, and one more where the unit is odd: ties go to even. Only a NaN can wrap.
    let [.., low, high] = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)).to_le_bytes();
    if value.is_nan() { 0xFFFF } else { u16::from_le_bytes([low, high]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(narrow: fn(&[f32], &mut Vec<u8>), bits: u32) -> u16 {
        let mut out = Vec::new();
        narrow(&[f32::from_bits(bits)], &mut out);
        u16::from_le_bytes(*out.first_chunk().unwrap())
    }

    #[test]
    fn ties_go_to_even_and_carry_into_the_exponent() {
        let to_bf16 = |bits| cast(narrow_to_bf16, bits);
        assert_eq!(to_bf16(0x3F80_8000), 0x3F80);
        assert_eq!(to_bf16(0x3F81_8000), 0x3F82);
        assert_eq!(to_bf16(0x3F80_8001), 0x3F81);
        assert_eq!(to_bf16(0x3FFF_FFFF), 0x4000);
        assert_eq!(to_bf16(0x7F7F_FFFF), 0x7F80);
        assert_eq!(to_bf16(0x8000_0001), 0x8000);
        let to_f16 = |value: f32| cast(narrow_to_f16, value.to_bits());
        assert_eq!(to_f16(1.0 + 1.0 / 2048.0), 0x3C00);
        assert_eq!(to_f16(1.0 + 3.0 / 2048.0), 0x3C02);
        assert_eq!((to_f16(65519.0), to_f16(65520.0), to_f16(-1e9)), (0x7BFF, 0x7C00, 0xFC00));
        assert_eq!((to_f16(2f32.powi(-25)), to_f16(1.5 * 2f32.powi(-25))), (0, 1));
    }

    #[test]
    fn a_nan_stays_one() {
        for bits in [0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF, 0xFFC0_2000, 0x7FA0_1234] {
            assert_eq!(cast(narrow_to_bf16, bits), 0xFFFF);
            let expected = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF);
            assert_eq!(u32::from(cast(narrow_to_f16, bits)), expected);
        }
    }
}
