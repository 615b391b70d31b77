//! What the row-wise encodings share: a row is widened, padded, quantized, laid out and decoded again.
//!
//! Padding follows `torch.nn.functional.pad(table, (0, k))` before a prepack: the zeros take part in the row's minimum
//! and maximum, but are no part of the table's statistics.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form, Layout};

use super::widen::{Widen, beyond_f32, encodable};
use super::{Encoder, RowSize, int8_rowwise, nbit_rowwise};
use crate::statistics::{BlockStatistics, Sums};

/// 1.5 * 2^23: adding it to a number between 0 and 255 rounds to nearest even, and leaves the integer in the low bits.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// Writes a row's codes, which are 0 so far, and its scale and bias. `sums` is that of `values`.
type Quantize = fn(values: &[f32], sums: &Sums<f32>, codes: &mut [u8], parameters: &mut [u8]);

/// Quantizes rows.
pub(super) struct RowWise {
    form: Form,
    source: Dtype,
    widen: Widen,
    quantize: Quantize,
    size: RowSize,
    stored_width: usize,
    codes: usize,
    parameters: usize,
}

impl RowWise {
    /// Of rows of `source`; `None` where that is not a type to be quantized, or `form` has no rows.
    pub(super) fn new(form: Form, source: Dtype, size: RowSize) -> Option<Self> {
        let quantize: Quantize = match form.encoding {
            Encoding::Int8Sbf32 => int8_rowwise::quantize,
            Encoding::Int8Sbf16 => nbit_rowwise::quantize_to_8_bits,
            Encoding::Int4Sbf16 => nbit_rowwise::quantize_to_4_bits,
            Encoding::Int2Sbf16 => nbit_rowwise::quantize_to_2_bits,
            _ => return None,
        };
        let sizes = form.row_sizes(u64::try_from(size.elements).ok()?, source)?;
        let stored_width = form.stored_width.map_or(Some(size.elements), |width| width.try_into().ok())?;
        let (codes, parameters) = (sizes.codes.try_into().ok()?, sizes.parameters.try_into().ok()?);
        let widen = encodable(source)?;
        Some(Self { form, source, widen, quantize, size, stored_width, codes, parameters })
    }

    fn encode_row(&self, values: &[f32], sums: &Sums<f32>, encoded: &mut [u8]) {
        let front = match self.form.layout {
            Layout::Trailing => self.codes,
            Layout::Leading => self.parameters,
        };
        let Some((front, back)) = encoded.split_at_mut_checked(front) else { return };
        let (codes, parameters) = match self.form.layout {
            Layout::Trailing => (front, back),
            Layout::Leading => (back.get_mut(..self.codes).unwrap_or_default(), front),
        };
        (self.quantize)(values, sums, codes, parameters);
    }
}

impl Encoder for RowWise {
    fn encode(&self, rows: &[u8], out: &mut Vec<u8>, statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, encoded_bytes } = self.size;
        let Some(count) = rows.len().checked_div(source_bytes) else { return };
        let start = out.len();
        out.resize(start.saturating_add(count.saturating_mul(encoded_bytes)), 0);
        let encoded = out.get_mut(start..).unwrap_or_default();
        // Behind the row's own elements there are zeros, where the row is padded.
        let mut values = vec![0.0; self.stored_width];
        let mut decoded = vec![0.0; elements];
        for (row, encoded) in rows.chunks_exact(source_bytes).zip(encoded.chunks_exact_mut(encoded_bytes)) {
            (self.widen)(row, &mut values);
            let logical = values.get(..elements).unwrap_or_default();
            let Some(sums) = Sums::of(logical) else { continue };
            let padded = if self.stored_width > elements { Sums::of(&values) } else { None };
            self.encode_row(&values, padded.as_ref().unwrap_or(&sums), encoded);
            // The size is right: the form says it.
            let _ = self.form.decode_row(self.source, encoded, &mut decoded);
            statistics.encoded_row(logical, &sums, &decoded, beyond_f32(self.source, row));
        }
    }

    fn source_row_bytes(&self) -> usize {
        self.size.source_bytes
    }

    fn encoded_row_bytes(&self) -> usize {
        self.size.encoded_bytes
    }
}

/// The smallest element itself: the first zero where the minimum is zero, the very bits of a NaN in front.
pub(super) fn first_smallest(values: &[f32], min: f32) -> f32 {
    match values.first() {
        Some(&first) if first.is_nan() => first,
        _ if min == 0.0 => values.iter().copied().find(|&value| value == 0.0).unwrap_or(min),
        _ => min,
    }
}
