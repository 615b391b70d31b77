//! Rows in, encoded rows and statistics out: one file an encoding.
//!
//! | file | encoding |
//! |---|---|
//! | `keep` | the source's bytes, unchanged |
//! | `cast` | binary16 and bfloat16 |
//! | `int8_rowwise` | 8-bit codes with a scale and bias a row |
//! | `widen` | what they share: source bytes to binary32 |
//!
//! What the encoded bytes mean, and how they are decoded, stands in [`weighbridge_schemas::encoding`]. An encoder's
//! bytes are part of that contract: any change for any input has to raise
//! [`ENCODING_VERSION`](weighbridge_schemas::encoding::ENCODING_VERSION).

mod cast;
mod int8_rowwise;
mod keep;
mod widen;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::Encoding;

use crate::statistics::BlockStatistics;

/// Encodes rows of one tensor. One encoder may serve several workers at once.
pub trait Encoder: Send + Sync {
    /// Appends the encoded `rows` to `out`, and takes them up in `statistics`.
    ///
    /// `rows` is n times [`source_row_bytes`](Self::source_row_bytes), little-endian and of any alignment; `out`
    /// grows by n times [`encoded_row_bytes`](Self::encoded_row_bytes). Where an encoding works element by element,
    /// the last row may be shorter; row-wise ones pass over a row that is not whole.
    fn encode(&self, rows: &[u8], out: &mut Vec<u8>, statistics: &mut BlockStatistics);

    /// The size of a row before encoding, in bytes.
    fn source_row_bytes(&self) -> usize;

    /// The size of an encoded row, in bytes.
    fn encoded_row_bytes(&self) -> usize;
}

/// The encoder to `encoding` of rows of `row_elements` elements of `source`. Encodings that work element by element
/// take any grouping into rows: it matters only for the statistics (the order of summing, and the row numbers).
///
/// `None` where the encoding does not apply to `source`, or where a row's size does not fit the address space.
#[must_use]
pub fn encoder(encoding: Encoding, source: Dtype, row_elements: usize) -> Option<Box<dyn Encoder>> {
    let source_row_bytes = row_elements.checked_mul(usize::try_from(source.size()).ok()?)?;
    let elements = u64::try_from(row_elements).ok()?;
    let encoded_row_bytes = usize::try_from(encoding.row_bytes(elements, source)?).ok()?;
    let size =
        RowSize { elements: row_elements, source_bytes: source_row_bytes, encoded_bytes: encoded_row_bytes };
    Some(match encoding {
        Encoding::Keep => Box::new(keep::Keep::new(source, size)),
        Encoding::F16 => Box::new(cast::Cast::to_f16(source, size)?),
        Encoding::Bf16 => Box::new(cast::Cast::to_bf16(source, size)?),
        Encoding::Int8Sbf32 => Box::new(int8_rowwise::Int8Rowwise::new(source, size)?),
    })
}

/// The size of a row before and after encoding.
#[derive(Debug, Clone, Copy)]
struct RowSize {
    elements: usize,
    source_bytes: usize,
    encoded_bytes: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::SafeTensors;
    use weighbridge_schemas::encoding::decode_int8_sbf32;

    use super::*;
    use crate::statistics::Statistics;

    /// Rows that fbgemm and torch encoded; `tests/data/quantization/README.md` says how they were made.
    const GOLDEN: [&[u8]; 2] = [
        include_bytes!("../../../tests/data/quantization/edge.safetensors"),
        include_bytes!("../../../tests/data/quantization/random.safetensors"),
    ];

    fn encode(encoding: Encoding, source: Dtype, elements: usize, rows: &[u8]) -> (Vec<u8>, Statistics) {
        let mut statistics = BlockStatistics::new(0);
        let mut out = Vec::new();
        encoder(encoding, source, elements).unwrap().encode(rows, &mut out, &mut statistics);
        (out, statistics.finish())
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn check_golden_rows(format: &str, encoding: Encoding) -> usize {
        let mut rows = 0;
        for file in GOLDEN.map(|file| SafeTensors::deserialize(file).unwrap()) {
            for name in file.names() {
                let Some(group) = name.strip_suffix("/input") else { continue };
                let (input, golden) =
                    (file.tensor(name).unwrap(), file.tensor(&format!("{group}/{format}")).unwrap());
                let width = input.shape()[1];
                let (encoded, statistics) = encode(encoding, Dtype::F32, width, input.data());
                let row_bytes = encoded.len() / input.shape()[0];
                assert_eq!(encoded.len(), golden.data().len(), "{group}");
                for (row, (encoded, golden)) in
                    encoded.chunks(row_bytes).zip(golden.data().chunks(row_bytes)).enumerate()
                {
                    assert_eq!(encoded, golden, "{group} row {row}");
                }
                assert_eq!(statistics.rows, input.shape()[0] as u64);
                rows += input.shape()[0];
            }
        }
        rows
    }

    #[test]
    fn int8_gives_the_bits_of_fbgemm() {
        assert_eq!(check_golden_rows("int8_sbf32", Encoding::Int8Sbf32), 860);
    }

    #[test]
    fn f16_gives_the_bits_of_torch() {
        assert_eq!(check_golden_rows("f16", Encoding::F16), 860);
    }

    #[test]
    fn bf16_gives_the_bits_of_torch() {
        assert_eq!(check_golden_rows("bf16", Encoding::Bf16), 860);
    }

    #[test]
    fn int8_decodes_to_the_values_of_fbgemm() {
        let file = SafeTensors::deserialize(GOLDEN[0]).unwrap();
        let names: Vec<_> = file.names().into_iter().filter(|name| name.ends_with(".dequant")).collect();
        assert_eq!(names.len(), 1);
        for name in names {
            let (golden, encoded) =
                (file.tensor(name).unwrap(), file.tensor(name.strip_suffix(".dequant").unwrap()).unwrap());
            let width = golden.shape()[1];
            let mut decoded = vec![0.0; width];
            for (row, golden) in encoded.data().chunks(width + 8).zip(golden.data().chunks(width * 4)) {
                decode_int8_sbf32(row, &mut decoded);
                for (value, golden) in decoded.iter().zip(golden.as_chunks::<4>().0) {
                    let golden = f32::from_le_bytes(*golden);
                    assert!(value.to_bits() == golden.to_bits() || (value.is_nan() && golden.is_nan()));
                }
            }
        }
    }

    #[test]
    fn an_encoding_is_offered_where_it_applies() {
        for &source in Dtype::ALL {
            let castable = matches!(source, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            for &encoding in Encoding::ALL {
                let offered = encoder(encoding, source, 5);
                assert_eq!(
                    offered.is_some(),
                    castable || encoding == Encoding::Keep,
                    "{encoding:?} {source:?}"
                );
                let Some(offered) = offered else { continue };
                assert_eq!(offered.source_row_bytes() as u64, 5 * source.size());
                assert_eq!(Some(offered.encoded_row_bytes() as u64), encoding.row_bytes(5, source));
            }
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused_and_empty_ones_encode_nothing() {
        for &encoding in Encoding::ALL {
            assert!(encoder(encoding, Dtype::F32, usize::MAX / 2).is_none());
            assert_eq!(encode(encoding, Dtype::F32, 4, &[]), (vec![], Statistics::default()));
            assert_eq!(encode(encoding, Dtype::F32, 0, &[]), (vec![], Statistics::default()));
        }
    }

    #[test]
    fn the_last_row_of_an_element_wise_encoding_may_be_shorter() {
        let rows = bytes(&[1.0, 2.0, 3.0]);
        for (encoding, size) in [(Encoding::Keep, 4), (Encoding::F16, 2), (Encoding::Bf16, 2)] {
            let (encoded, statistics) = encode(encoding, Dtype::F32, 2, &rows);
            assert_eq!(encoded.len(), 3 * size);
            assert_eq!((statistics.rows, statistics.elements, statistics.max), (2, 3, Some(3.0)));
        }
        assert_eq!(encode(Encoding::Int8Sbf32, Dtype::F32, 2, &rows).0.len(), 10);
    }

    #[test]
    fn a_narrow_source_is_encoded_as_its_widened_values() {
        let every_pattern: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (source, widen) in [(Dtype::F16, widen::f16 as widen::Widen), (Dtype::Bf16, widen::bf16)] {
            let mut values = vec![0.0; 1 << 16];
            widen(&every_pattern, &mut values);
            let wide = bytes(&values);
            for encoding in [Encoding::F16, Encoding::Bf16, Encoding::Int8Sbf32] {
                assert_eq!(
                    encode(encoding, source, 16, &every_pattern),
                    encode(encoding, Dtype::F32, 16, &wide)
                );
            }
        }
    }

    #[test]
    fn casting_to_its_own_type_keeps_every_number() {
        let every_pattern: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (encoding, source, exponent) in
            [(Encoding::F16, Dtype::F16, 0x7C00u16), (Encoding::Bf16, Dtype::Bf16, 0x7F80)]
        {
            let (cast, statistics) = encode(encoding, source, 8, &every_pattern);
            for (before, after) in every_pattern.as_chunks::<2>().0.iter().zip(cast.as_chunks::<2>().0) {
                assert!(before == after || u16::from_le_bytes(*before) & 0x7FFF > exponent);
            }
            assert_eq!((statistics.max_error, statistics.overflow_rows), (0.0, 0));
        }
    }

    #[test]
    fn a_cast_that_overflows_is_an_overflow_row() {
        let rows = bytes(&[1.0, 65519.0, 65520.0, 1.0, f32::INFINITY, 7e4]);
        let statistics = encode(Encoding::F16, Dtype::F32, 2, &rows).1;
        assert_eq!((statistics.overflow_rows, statistics.first_overflow_rows), (1, vec![1]));
        assert_eq!((statistics.non_finite_rows, statistics.first_non_finite_rows), (1, vec![2]));
        assert_eq!((statistics.compared_elements, statistics.max_error), (3, 15.0));
        assert_eq!(statistics.max_error_row, Some(0));
    }

    fn any_rows() -> impl Strategy<Value = (usize, Vec<f32>)> {
        let value = prop_oneof![
            8 => -1.0f32..1.0,
            2 => any::<u32>().prop_map(f32::from_bits),
            1 => prop_oneof![Just(0.0f32), Just(-0.0), Just(f32::NAN), Just(f32::INFINITY)],
        ];
        (1..20usize).prop_flat_map(move |width| {
            (0..8usize).prop_flat_map({
                let value = value.clone();
                move |rows| (Just(width), proptest::collection::vec(value.clone(), width * rows))
            })
        })
    }

    proptest! {
        #[test]
        fn a_block_may_be_handed_over_in_parts((width, values) in any_rows(), cut in 0..8usize) {
            let rows = bytes(&values);
            let (head, tail) = rows.split_at((cut * width * 4).min(rows.len()));
            for &encoding in Encoding::ALL {
                let encoder = encoder(encoding, Dtype::F32, width).unwrap();
                let (mut out, mut statistics) = (Vec::new(), BlockStatistics::new(0));
                encoder.encode(head, &mut out, &mut statistics);
                encoder.encode(tail, &mut out, &mut statistics);
                prop_assert_eq!((out, statistics.finish()), encode(encoding, Dtype::F32, width, &rows));
            }
        }
    }
}
