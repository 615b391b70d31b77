//! What the row-wise encodings share: a row is widened, padded, quantized, laid out and decoded again.
//!
//! Padding follows `torch.nn.functional.pad(table, (0, k))` before a prepack: the zeros take part in the row's minimum
//! and maximum, but are no part of the table's statistics.
//!
//! This is the plain code, which is right on every processor and for every row. Where the processor has AVX2, `avx2`
//! takes the rows that are plain ([`crate::statistics`]), and gives the same bits.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form, Layout};

use super::widen::{Widening, beyond_f32};
use super::{Code, Encoder, RowSize, int8_rowwise, nbit_rowwise};
use crate::statistics::{BlockStatistics, Sums};

/// 1.5 * 2^23: adding it to a number between 0 and 255 rounds to nearest even, and leaves the integer in the low bits.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// Writes a row's codes, which are 0 so far, and its scale and bias. `sums` is that of `values`.
type Quantize = fn(values: &[f32], sums: &Sums, codes: &mut [u8], parameters: &mut [u8]);

/// Quantizes rows.
pub(super) struct RowWise {
    form: Form,
    source: Dtype,
    widening: Widening,
    quantize: Quantize,
    size: RowSize,
    stored_width: usize,
    codes: usize,
    parameters: usize,
    code: Code,
}

impl RowWise {
    /// Of rows of `source`; `None` where that is not a type to be quantized, or `form` has no rows.
    pub(super) fn new(form: Form, source: Dtype, size: RowSize, code: Code) -> Option<Self> {
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
        let widening = Widening::to_encode(source)?;
        Some(Self { form, source, widening, quantize, size, stored_width, codes, parameters, code })
    }

    /// Encodes a number of rows, widened already; `rows` are their bytes.
    fn encode_rows(&self, values: &[f32], rows: &[u8], encoded: &mut [u8], statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, encoded_bytes } = self.size;
        let mut plain = PlainRows::new(self);
        #[cfg(target_arch = "x86_64")]
        if self.code.may_be_avx2() && self.source != Dtype::F64 && self.stored_width == elements {
            let (values, encoded) = ((values, elements), (&mut *encoded, encoded_bytes));
            if super::avx2::quantize(self.form.encoding, values, encoded, statistics, &mut plain) {
                return;
            }
        }
        let rows = rows.chunks_exact(source_bytes.max(1));
        let values = values.chunks_exact(elements.max(1));
        for ((row, values), encoded) in rows.zip(values).zip(encoded.chunks_exact_mut(encoded_bytes.max(1))) {
            plain.encode(values, beyond_f32(self.source, row), encoded, statistics);
        }
    }

    /// How many zeros stand behind a row's codes, scale and bias.
    pub(super) const fn padding(&self) -> usize {
        self.size.encoded_bytes.saturating_sub(self.codes + self.parameters)
    }

    /// A row's codes, and its scale and bias.
    pub(super) fn split<'e>(&self, encoded: &'e mut [u8]) -> Option<(&'e mut [u8], &'e mut [u8])> {
        match self.form.layout {
            Layout::Trailing => encoded.split_at_mut_checked(self.codes),
            Layout::Leading => {
                let (parameters, codes) = encoded.split_at_mut_checked(self.parameters)?;
                Some((codes.get_mut(..self.codes)?, parameters))
            }
        }
    }
}

impl Encoder for RowWise {
    fn encode(&self, rows: &[u8], out: &mut [u8], statistics: &mut BlockStatistics) {
        let RowSize { elements, source_bytes, encoded_bytes } = self.size;
        let mut values = Vec::new();
        let at_once = self.widening.rows_at_once(elements);
        let (rows_at_once, out_at_once) =
            (at_once.saturating_mul(source_bytes).max(1), at_once.saturating_mul(encoded_bytes).max(1));
        for (rows, encoded) in rows.chunks(rows_at_once).zip(out.chunks_mut(out_at_once)) {
            let values = self.widening.widen(rows, &mut values);
            self.encode_rows(values, rows, encoded, statistics);
        }
    }

    fn source_row_bytes(&self) -> usize {
        self.size.source_bytes
    }

    fn encoded_bytes(&self, source_bytes: usize) -> usize {
        let rows = source_bytes.checked_div(self.size.source_bytes).unwrap_or(0);
        rows.saturating_mul(self.size.encoded_bytes)
    }
}

/// Encodes rows one by one in plain code, and keeps the memory that this takes.
pub(super) struct PlainRows<'e> {
    encoder: &'e RowWise,
    padded: Vec<f32>,
    decoded: Vec<f32>,
}

impl<'e> PlainRows<'e> {
    fn new(encoder: &'e RowWise) -> Self {
        Self { encoder, padded: Vec::new(), decoded: Vec::new() }
    }

    /// The encoder.
    pub(super) fn encoder(&self) -> &'e RowWise {
        self.encoder
    }

    /// Encodes a row of which `beyond` elements are infinite only because they were rounded to binary32.
    pub(super) fn encode(
        &mut self,
        values: &[f32],
        beyond: usize,
        encoded: &mut [u8],
        statistics: &mut BlockStatistics,
    ) {
        let encoder = self.encoder;
        let Some(sums) = Sums::of(values) else { return };
        encoded.fill(0);
        let Some((codes, parameters)) = encoder.split(encoded) else { return };
        if encoder.stored_width > values.len() {
            self.padded.clear();
            self.padded.extend_from_slice(values);
            self.padded.resize(encoder.stored_width, 0.0);
            let Some(sums) = Sums::of(&self.padded) else { return };
            (encoder.quantize)(&self.padded, &sums, codes, parameters);
        } else {
            (encoder.quantize)(values, &sums, codes, parameters);
        }
        self.decoded.resize(values.len(), 0.0);
        // The size is right: the form says it.
        let _ = encoder.form.decode_row(encoder.source, encoded, &mut self.decoded);
        statistics.encoded_row(values, &sums, &self.decoded, beyond);
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
