//! Rows in, encoded rows and statistics out: one file an encoding.
//!
//! | file | encoding |
//! |---|---|
//! | `keep` | the source's bytes, unchanged |
//! | `cast` | binary32, binary16, bfloat16, and the 8-bit floats of `float8` |
//! | `int8_rowwise` | 8-bit codes with a binary32 scale and bias a row |
//! | `nbit_rowwise` | 8-, 4- and 2-bit codes with a binary16 scale and bias a row |
//! | `avx2` | the same bits for the hot ones, by AVX2 |
//! | `row_wise` | what row-wise encodings share: padding and layout |
//! | `widen` | what all share: source bytes to binary32 |
//!
//! What the encoded bytes mean, and how they are decoded, stands in [`weighbridge_schemas::encoding`]. An encoder's
//! bytes are part of that contract: any change for any input has to raise
//! [`ENCODING_VERSION`](weighbridge_schemas::encoding::ENCODING_VERSION).

#[cfg(target_arch = "x86_64")]
mod avx2;
mod cast;
mod float8;
mod int8_rowwise;
mod keep;
mod nbit_rowwise;
mod row_wise;
mod widen;

#[cfg(test)]
mod any_rows;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};

use crate::statistics::BlockStatistics;

/// Encodes rows of one tensor. One encoder may serve several workers at once.
pub trait Encoder: Send + Sync {
    /// Writes the encoded `rows` to `out`, and takes them up in `statistics`.
    ///
    /// `rows` is n times [`source_row_bytes`](Self::source_row_bytes), little-endian and of any alignment; `out` has
    /// room for [`encoded_bytes`](Self::encoded_bytes) of so many, and every byte of it is written, whatever it held.
    /// Where an encoding works element by element, the last row may be shorter; row-wise ones pass over a row that is
    /// not whole, or for which there is no room.
    fn encode(&self, rows: &[u8], out: &mut [u8], statistics: &mut BlockStatistics);

    /// The size of a row before encoding, in bytes.
    fn source_row_bytes(&self) -> usize;

    /// The size of so many bytes of rows when they are encoded.
    fn encoded_bytes(&self, source_bytes: usize) -> usize;
}

/// The encoder to `form` of rows of `row_elements` elements of `source`. Encodings that work element by element
/// take any grouping into rows: it matters only for the statistics (the order of summing, and the row numbers).
///
/// `None` where the form does not apply to `source`, or where a row's size does not fit the address space.
#[must_use]
pub fn encoder(form: Form, source: Dtype, row_elements: usize) -> Option<Box<dyn Encoder>> {
    make(form, source, row_elements, Code::Fastest)
}

/// Which code encodes. The bits are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Code {
    /// The fastest that the processor has.
    Fastest,
    /// Plain code; tests compare the other with it.
    #[cfg(any(test, feature = "fuzzing"))]
    Plain,
}

impl Code {
    const fn may_be_avx2(self) -> bool {
        #[cfg(any(test, feature = "fuzzing"))]
        if matches!(self, Self::Plain) {
            return false;
        }
        true
    }
}

fn make(form: Form, source: Dtype, row_elements: usize, code: Code) -> Option<Box<dyn Encoder>> {
    let source_row_bytes = row_elements.checked_mul(usize::try_from(source.size()).ok()?)?;
    let elements = u64::try_from(row_elements).ok()?;
    let encoded_row_bytes = usize::try_from(form.row_bytes(elements, source)?).ok()?;
    let size =
        RowSize { elements: row_elements, source_bytes: source_row_bytes, encoded_bytes: encoded_row_bytes };
    Some(match form.encoding {
        Encoding::Keep => Box::new(keep::Keep::new(source, size, code)),
        encoding if encoding.is_row_wise() => Box::new(row_wise::RowWise::new(form, source, size, code)?),
        encoding => Box::new(cast::Cast::new(encoding, source, size, code)?),
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
    use weighbridge_schemas::encoding::Layout;

    use super::*;
    use crate::statistics::Statistics;

    /// Rows that fbgemm and torch encoded; `tests/data/quantization/README.md` says how they were made.
    const GOLDEN: [&[u8]; 2] = [
        include_bytes!("../../../tests/data/quantization/edge.safetensors"),
        include_bytes!("../../../tests/data/quantization/random.safetensors"),
    ];

    fn encode(encoding: Encoding, source: Dtype, elements: usize, rows: &[u8]) -> (Vec<u8>, Statistics) {
        encode_as(Form::plain(encoding), source, elements, rows)
    }

    fn encode_as(form: Form, source: Dtype, elements: usize, rows: &[u8]) -> (Vec<u8>, Statistics) {
        let mut statistics = BlockStatistics::new(0);
        let encoder = encoder(form, source, elements).unwrap();
        let mut out = vec![7; encoder.encoded_bytes(rows.len())];
        encoder.encode(rows, &mut out, &mut statistics);
        (out, statistics.finish())
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn every_encoding_gives_the_bits_of_fbgemm_and_torch() {
        for &encoding in Encoding::ALL {
            if !matches!(encoding, Encoding::Keep | Encoding::F32) {
                assert_eq!(check_golden_rows(encoding), 860, "{encoding:?}");
            }
        }
    }

    fn check_golden_rows(encoding: Encoding) -> usize {
        let mut rows = 0;
        for file in GOLDEN.map(|file| SafeTensors::deserialize(file).unwrap()) {
            for name in file.names() {
                let Some(group) = name.strip_suffix("/input") else { continue };
                let (input, golden) = (
                    file.tensor(name).unwrap(),
                    file.tensor(&format!("{group}/{}", encoding.as_str())).unwrap(),
                );
                let width = input.shape()[1];
                let (encoded, statistics) = encode(encoding, Dtype::F32, width, input.data());
                let row_bytes = encoded.len() / input.shape()[0];
                assert_eq!(encoded.len(), golden.data().len(), "{group}");
                for (row, (encoded, golden)) in
                    encoded.chunks(row_bytes).zip(golden.data().chunks(row_bytes)).enumerate()
                {
                    assert_eq!(encoded, golden, "{encoding:?} {group} row {row}");
                }
                assert_eq!(statistics.rows, input.shape()[0] as u64);
                rows += input.shape()[0];
            }
        }
        rows
    }

    #[test]
    fn rows_decode_to_the_values_of_fbgemm() {
        let file = SafeTensors::deserialize(GOLDEN[0]).unwrap();
        let names: Vec<_> = file.names().into_iter().filter(|name| name.ends_with(".dequant")).collect();
        assert_eq!(names.len(), 3);
        for name in names {
            let encoded = name.strip_suffix(".dequant").unwrap();
            let form = Form::plain(Encoding::from_name(encoded.rsplit_once('/').unwrap().1).unwrap());
            let (golden, encoded) = (file.tensor(name).unwrap(), file.tensor(encoded).unwrap());
            let width = golden.shape()[1];
            let mut decoded = vec![0.0; width];
            let rows = encoded.data().chunks(encoded.shape()[1]);
            for (row, golden) in rows.zip(golden.data().chunks(width * 4)) {
                assert!(form.decode_row(Dtype::F32, row, &mut decoded));
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
            let castable = matches!(source, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16);
            for &encoding in Encoding::ALL {
                let form = Form::plain(encoding);
                let offered = encoder(form, source, 5);
                assert_eq!(
                    offered.is_some(),
                    castable || encoding == Encoding::Keep,
                    "{encoding:?} {source:?}"
                );
                let Some(offered) = offered else { continue };
                assert_eq!(offered.source_row_bytes() as u64, 5 * source.size());
                let size = offered.encoded_bytes(offered.source_row_bytes());
                assert_eq!(Some(size as u64), form.row_bytes(5, source));
            }
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused_and_empty_ones_encode_nothing() {
        for &encoding in Encoding::ALL {
            assert!(encoder(Form::plain(encoding), Dtype::F32, usize::MAX / 2).is_none());
            assert_eq!(encode(encoding, Dtype::F32, 4, &[]), (vec![], Statistics::default()));
            assert_eq!(encode(encoding, Dtype::F32, 0, &[]), (vec![], Statistics::default()));
        }
    }

    #[test]
    fn the_last_row_of_an_element_wise_encoding_may_be_shorter() {
        let rows = bytes(&[1.0, 2.0, 3.0]);
        for (encoding, size) in
            [(Encoding::Keep, 4), (Encoding::F32, 4), (Encoding::Bf16, 2), (Encoding::F8E5m2, 1)]
        {
            let (encoded, statistics) = encode(encoding, Dtype::F32, 2, &rows);
            assert_eq!(encoded.len(), 3 * size);
            assert_eq!((statistics.rows, statistics.elements, statistics.max), (2, 3, Some(3.0)));
        }
        assert_eq!(encode(Encoding::Int8Sbf32, Dtype::F32, 2, &rows).0.len(), 10);
    }

    #[test]
    fn a_narrow_source_is_encoded_as_its_widened_values() {
        let every_pattern: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for source in [Dtype::F16, Dtype::Bf16] {
            let wide = bytes(widen::Widening::exact(source).unwrap().widen(&every_pattern, &mut Vec::new()));
            for &encoding in Encoding::ALL {
                if encoding == Encoding::Keep {
                    continue;
                }
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
    fn finite_doubles_beyond_binary32_overflow_and_are_not_called_infinite() {
        let values = [1.0, 2.0, 1e300, 1.0, -1e300, f64::NAN, 3.0, 4.0];
        let rows: Vec<u8> = values.iter().flat_map(|value: &f64| value.to_le_bytes()).collect();
        for encoding in [Encoding::F32, Encoding::Bf16, Encoding::F8E4m3fn, Encoding::Int8Sbf32] {
            let statistics = encode(encoding, Dtype::F64, 2, &rows).1;
            assert_eq!(
                (statistics.overflow_rows, statistics.first_overflow_rows.clone()),
                (1, vec![1]),
                "{encoding:?}"
            );
            assert_eq!((statistics.non_finite_rows, statistics.first_non_finite_rows.clone()), (1, vec![2]));
            assert_eq!(statistics.non_finite_elements, 1);
            assert!(statistics.overflow_elements > 0);
            assert_eq!((statistics.min, statistics.max), (Some(1.0), Some(4.0)));
            assert_eq!((statistics.beyond_elements, statistics.rms()), (2, (31f64 / 5.0).sqrt()));
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

    #[test]
    fn a_cast_that_saturates_counts_what_it_cuts_off_and_loses_nothing_else() {
        let rows = bytes(&[1.0, 448.0, 449.0, -1e9, f32::INFINITY, 500.0, 240.0, 241.0]);
        for (encoding, elements, rows_with) in [(Encoding::F8E4m3fn, 3, 2), (Encoding::Hfp8E4b7Max240, 5, 4)]
        {
            let statistics = encode(encoding, Dtype::F32, 2, &rows).1;
            assert_eq!((statistics.saturated_elements, statistics.saturated_rows), (elements, rows_with));
            assert_eq!((statistics.overflow_rows, statistics.non_finite_rows), (0, 1));
        }
        let statistics = encode(Encoding::F8E5m2, Dtype::F32, 2, &rows).1;
        assert_eq!((statistics.saturated_elements, statistics.overflow_rows), (0, 1));
    }

    #[test]
    fn doubles_are_rounded_first_and_too_large_ones_overflow() {
        let doubles = [0.1f64, -1e-50, 1.0 + 2f64.powi(-40), 1e39];
        let wide: Vec<u8> = doubles.iter().flat_map(|value| value.to_le_bytes()).collect();
        let singles = bytes(&[0.1, -0.0, 1.0, f32::INFINITY]);
        for &encoding in Encoding::ALL {
            if encoding != Encoding::Keep {
                let (encoded, statistics) = encode(encoding, Dtype::F64, 2, &wide);
                let (expected, rounded) = encode(encoding, Dtype::F32, 2, &singles);
                assert_eq!(encoded, expected, "{encoding:?}");
                assert_eq!((statistics.overflow_rows, statistics.non_finite_rows), (1, 0));
                assert_eq!((rounded.overflow_rows, rounded.non_finite_rows), (0, 1));
                assert_eq!(statistics.error_squares.to_bits(), rounded.error_squares.to_bits());
            }
        }
    }

    #[test]
    fn binary32_is_cast_to_itself() {
        let rows: Vec<u8> = (0..=255).collect();
        assert_eq!(encode(Encoding::F32, Dtype::F32, 4, &rows).0, rows);
    }

    /// Every row-wise encoding, in every layout and alignment.
    fn forms() -> impl Iterator<Item = Form> {
        let row_wise = Encoding::ALL.iter().copied().filter(|encoding| encoding.is_row_wise());
        row_wise.flat_map(|encoding| {
            let leading = Form { layout: Layout::Leading, ..Form::plain(encoding) };
            let aligned = [1, 4, 16, 64].map(|row_alignment| Form { row_alignment, ..leading });
            std::iter::once(Form::plain(encoding)).chain(aligned)
        })
    }

    proptest! {
        #[test]
        fn layouts_are_the_same_bytes_in_another_order((width, values) in any_rows()) {
            let rows = bytes(&values);
            for form in forms() {
                let (trailing, statistics) = encode(form.encoding, Dtype::F32, width, &rows);
                let (encoded, same) = encode_as(form, Dtype::F32, width, &rows);
                prop_assert_eq!(same, statistics);
                let sizes = form.row_sizes(width as u64, Dtype::F32).unwrap();
                let [codes, parameters, padding] =
                    [sizes.codes, sizes.parameters, sizes.padding].map(|size| usize::try_from(size).unwrap());
                let size = codes + parameters + padding;
                prop_assert_eq!(size as u64 % form.row_alignment, 0);
                for (plain, row) in trailing.chunks(codes + parameters).zip(encoded.chunks(size)) {
                    let (plain_codes, plain_parameters) = plain.split_at(codes);
                    if form.layout == Layout::Leading {
                        prop_assert_eq!(&row[..parameters], plain_parameters);
                        prop_assert_eq!(&row[parameters..parameters + codes], plain_codes);
                        prop_assert!(row[parameters + codes..].iter().all(|&byte| byte == 0));
                    } else {
                        prop_assert_eq!(row, plain);
                    }
                    let (mut decoded, mut expected) = (vec![0.0f32; width], vec![0.0f32; width]);
                    prop_assert!(form.decode_row(Dtype::F32, row, &mut decoded));
                    prop_assert!(Form::plain(form.encoding).decode_row(Dtype::F32, plain, &mut expected));
                    prop_assert!(decoded.iter().map(|v| v.to_bits()).eq(expected.iter().map(|v| v.to_bits())));
                }
            }
        }

        #[test]
        fn a_padded_row_is_the_row_with_zeros_and_is_measured_without_them((width, values) in any_rows()) {
            let rows = bytes(&values);
            for form in forms() {
                let wide = width.next_multiple_of(usize::try_from(form.encoding.width_multiple()).unwrap());
                if wide == width {
                    continue;
                }
                let padded = Form { stored_width: Some(wide as u64), ..form };
                let (encoded, statistics) = encode_as(padded, Dtype::F32, width, &rows);
                let mut zeros = Vec::new();
                for row in values.chunks(width) {
                    zeros.extend_from_slice(row);
                    zeros.resize(zeros.len() + wide - width, 0.0);
                }
                prop_assert_eq!(encoded, encode_as(form, Dtype::F32, wide, &bytes(&zeros)).0);
                let plain = encode_as(form, Dtype::F32, width, &rows).1;
                prop_assert_eq!((statistics.elements, statistics.min), (plain.elements, plain.min));
                // A scale or bias that overflows in the one row and not in the other has it summed in other steps.
                let apart = (statistics.sum_squares - plain.sum_squares).abs();
                prop_assert!(apart <= 1e-6 * plain.sum_squares, "{statistics:?} {plain:?}");
            }
        }
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
                let encoder = encoder(Form::plain(encoding), Dtype::F32, width).unwrap();
                let (mut out, mut statistics) = (vec![7; encoder.encoded_bytes(rows.len())], BlockStatistics::new(0));
                let (front, back) = out.split_at_mut(encoder.encoded_bytes(head.len()));
                encoder.encode(head, front, &mut statistics);
                encoder.encode(tail, back, &mut statistics);
                prop_assert_eq!((out, statistics.finish()), encode(encoding, Dtype::F32, width, &rows));
            }
        }
    }
}
