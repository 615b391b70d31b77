//! Element-wise casts, to the bits that torch's and FBGEMM's casts give on x86-64.
//!
//! Values are rounded to binary32 first, where they are wider, and then to nearest even; subnormal numbers are kept.
//! What is too large becomes infinite, or the largest number where the type saturates. A NaN cast to binary16 keeps
//! its sign and the ten upper bits of its payload and becomes quiet; cast to bfloat16 it is always 0xFFFF.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};

use super::widen::{Widening, beyond_f32};
use super::{Code, Encoder, RowSize, float8};
use crate::statistics::{BlockStatistics, Sums};

/// How many binary16 elements are converted at once: enough for the processor's conversion instructions, few enough
/// for the stack.
const HALVES: usize = 64;

/// Casts as many elements as there is room for.
type Narrow = fn(values: &[f32], out: &mut [u8]);

/// Casts to another floating-point type.
pub(super) struct Cast {
    form: Form,
    source: Dtype,
    widening: Widening,
    narrow: Narrow,
    size: RowSize,
    item_bytes: usize,
    code: Code,
}

impl Cast {
    /// To the type of `encoding`; `None` for a `source` that is not cast, and for what is no cast.
    pub(super) fn new(encoding: Encoding, source: Dtype, size: RowSize, code: Code) -> Option<Self> {
        let (narrow, item_bytes): (Narrow, _) = match encoding {
            Encoding::F32 => (keep_f32, 4),
            Encoding::F16 => (narrow_to_f16, 2),
            Encoding::Bf16 => (narrow_to_bf16, 2),
            Encoding::F8E4m3fn => (float8::narrow_to_e4m3fn, 1),
            Encoding::F8E5m2 => (float8::narrow_to_e5m2, 1),
            Encoding::Hfp8E4b7Max240 => (float8::narrow_to_hfp8, 1),
            _ => return None,
        };
        let widening = Widening::to_encode(source)?;
        Some(Self { form: Form::plain(encoding), source, widening, narrow, size, item_bytes, code })
    }

    /// Narrows elements, and decodes what came out.
    fn narrow(&self, values: &[f32], encoded: &mut [u8], decoded: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        let done = self.code.may_be_avx2() && super::avx2::narrow(self.form.encoding, values, encoded);
        #[cfg(not(target_arch = "x86_64"))]
        let done = false;
        if !done {
            (self.narrow)(values, encoded);
        }
        // The size is right: it was just written.
        let _ = self.form.decode_row(self.source, encoded, decoded);
    }

    /// Takes up rows, the last of which may be shorter, and what they decode to.
    fn take(&self, rows: &[u8], values: &[f32], decoded: &[f32], statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, .. } = self.size;
        let limit = self.form.encoding.saturates_at();
        #[cfg(target_arch = "x86_64")]
        if self.code.may_be_avx2()
            && self.source != Dtype::F64
            && super::avx2::take_encoded_rows((values, decoded), elements, limit, statistics)
        {
            return;
        }
        let decoded = decoded.chunks(elements);
        for ((row, values), decoded) in rows.chunks(source_bytes).zip(values.chunks(elements)).zip(decoded) {
            let Some(sums) = Sums::of(values) else { continue };
            statistics.encoded_row(values, &sums, decoded, beyond_f32(self.source, row));
            if let Some(limit) = limit {
                statistics.saturated(beyond(values, &sums, limit));
            }
        }
    }
}

impl Encoder for Cast {
    fn encode(&self, rows: &[u8], out: &mut [u8], statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, .. } = self.size;
        if elements == 0 {
            return;
        }
        let at_once = self.widening.rows_at_once(elements);
        let rows = rows.chunks(at_once.saturating_mul(source_bytes));
        let out = out.chunks_mut(at_once.saturating_mul(elements).saturating_mul(self.item_bytes));
        let (mut room, mut decoded) = (Vec::new(), Vec::new());
        for (rows, encoded) in rows.zip(out) {
            let values = self.widening.widen(rows, &mut room);
            decoded.resize(values.len(), 0.0);
            self.narrow(values, encoded, &mut decoded);
            self.take(rows, values, &decoded, statistics);
        }
    }

    fn source_row_bytes(&self) -> usize {
        self.size.source_bytes
    }

    fn encoded_bytes(&self, source_bytes: usize) -> usize {
        let item_bytes = self.size.source_bytes.checked_div(self.size.elements).unwrap_or(1).max(1);
        (source_bytes / item_bytes).saturating_mul(self.item_bytes)
    }
}

/// How many finite elements are larger than `limit`, of either sign; `sums` are those of `values`.
fn beyond(values: &[f32], sums: &Sums, limit: f32) -> usize {
    if sums.max <= limit && sums.min >= -limit { 0 } else { count_beyond(values, limit) }
}

/// How many finite elements are larger than `limit`, of either sign.
pub(super) fn count_beyond(values: &[f32], limit: f32) -> usize {
    values.iter().filter(|value| value.is_finite() && value.abs() > limit).count()
}

#[inline(always)]
fn keep_f32(values: &[f32], out: &mut [u8]) {
    for (place, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *place = value.to_le_bytes();
    }
}

fn narrow_to_f16(values: &[f32], out: &mut [u8]) {
    let mut halves = [f16::ZERO; HALVES];
    for (values, out) in values.chunks(HALVES).zip(out.chunks_mut(2 * HALVES)) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        for (place, half) in out.as_chunks_mut().0.iter_mut().zip(halves) {
            *place = half.to_le_bytes();
        }
    }
}

#[inline(always)]
pub(super) fn narrow_to_bf16(values: &[f32], out: &mut [u8]) {
    for (place, &value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *place = bf16_bits(value).to_le_bytes();
    }
}

#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    // Just under half a unit, and one more where the unit is odd: ties go to even. Only a NaN can wrap.
    let [.., low, high] = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)).to_le_bytes();
    if value.is_nan() { 0xFFFF } else { u16::from_le_bytes([low, high]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(narrow: fn(&[f32], &mut [u8]), bits: u32) -> u16 {
        let mut out = [0; 2];
        narrow(&[f32::from_bits(bits)], &mut out);
        u16::from_le_bytes(out)
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
