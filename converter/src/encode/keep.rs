//! The source's bytes, unchanged. Floating-point types have statistics; of other types rows and elements are counted.

use weighbridge_schemas::dtype::Dtype;

use super::widen::Widening;
use super::{Code, Encoder, RowSize};
use crate::statistics::{BlockStatistics, Sums};

/// Copies rows.
pub(super) struct Keep {
    source: Dtype,
    item_bytes: usize,
    size: RowSize,
    code: Code,
}

impl Keep {
    /// Of rows of `source`.
    pub(super) fn new(source: Dtype, size: RowSize, code: Code) -> Self {
        Self {
            source,
            item_bytes: size.source_bytes.checked_div(size.elements).unwrap_or(1).max(1),
            size,
            code,
        }
    }

    fn rows<'a>(&self, rows: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        rows.chunks(self.size.source_bytes.max(1))
    }

    fn look_at(&self, rows: &[u8], widening: Widening, statistics: &mut BlockStatistics) {
        let (elements, mut room) = (self.size.elements, Vec::new());
        for rows in rows.chunks(widening.rows_at_once(elements).saturating_mul(self.size.source_bytes).max(1))
        {
            let values = widening.widen(rows, &mut room);
            #[cfg(target_arch = "x86_64")]
            if self.code.may_be_avx2() && super::avx2::take_kept_rows(values, elements, statistics) {
                continue;
            }
            for row in values.chunks(elements.max(1)) {
                if let Some(sums) = Sums::of(row) {
                    statistics.kept_row(row, &sums);
                }
            }
        }
    }

    fn look_at_f64(&self, rows: &[u8], statistics: &mut BlockStatistics) {
        for row in self.rows(rows) {
            statistics.kept_wide_row(row.as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes)));
        }
    }
}

impl Encoder for Keep {
    fn encode(&self, rows: &[u8], out: &mut [u8], statistics: &mut BlockStatistics) {
        let count = rows.len().min(out.len());
        out[..count].copy_from_slice(&rows[..count]);
        match Widening::exact(self.source) {
            Some(widening) => self.look_at(rows, widening, statistics),
            None if self.source == Dtype::F64 => self.look_at_f64(rows, statistics),
            None => self.rows(rows).for_each(|row| statistics.count_row(row.len() / self.item_bytes)),
        }
    }

    fn source_row_bytes(&self) -> usize {
        self.size.source_bytes
    }

    fn encoded_bytes(&self, source_bytes: usize) -> usize {
        source_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::encoder;
    use crate::statistics::Statistics;
    use weighbridge_schemas::encoding::{Encoding, Form};

    fn keep(source: Dtype, width: usize, rows: &[u8]) -> Statistics {
        let (mut out, mut statistics) = (vec![7; rows.len()], BlockStatistics::new(0));
        encoder(Form::plain(Encoding::Keep), source, width).unwrap().encode(rows, &mut out, &mut statistics);
        assert_eq!(out, rows);
        statistics.finish()
    }

    #[test]
    fn every_type_is_copied_and_only_floats_are_looked_at() {
        for &source in Dtype::ALL {
            let rows: Vec<u8> = (1..=96u8).cycle().take(96).collect();
            let statistics = keep(source, 3, &rows);
            assert_eq!((statistics.rows, statistics.elements), (32 / source.size(), 96 / source.size()));
            assert_eq!(statistics.min.is_some(), source.is_float(), "{source:?}");
            assert_eq!((statistics.max_error, statistics.overflow_rows), (0.0, 0));
        }
    }

    #[test]
    fn binary64_keeps_its_range() {
        let values = [1e300, -2e300, f64::NAN, 1e-300];
        let rows: Vec<u8> = values.iter().flat_map(|value: &f64| value.to_le_bytes()).collect();
        let statistics = keep(Dtype::F64, 2, &rows);
        assert_eq!((statistics.min, statistics.max), (Some(-2e300), Some(1e300)));
        assert_eq!(
            (statistics.non_finite_elements, statistics.first_non_finite_rows.as_slice()),
            (1, &[1][..])
        );
        assert_eq!((statistics.norm(), statistics.compared_elements), (f64::INFINITY, 3));
        assert_eq!(statistics.relative_rms_error(), 0.0);
    }
}
