//! How a tensor's bytes are laid out for serving, and how one encoded row is decoded.
//!
//! The formats and their formulas are those of PyTorch's and FBGEMM's casts and fused row-wise quantization (torch
//! 2.14.0, fbgemm-gpu-cpu 1.9.0), established against golden files made by those libraries. Everything stored is
//! little-endian. For a row of `D` elements:
//!
//! | encoding | bytes a row | a row, in layout `trailing` | safetensors dtype, shape |
//! |---|---|---|---|
//! | `keep` | as the source | as the source | the source's |
//! | `f32` | 4 D | IEEE binary32 | `F32`, the source's |
//! | `f16` | 2 D | IEEE binary16, round to nearest even | `F16`, the source's |
//! | `bf16` | 2 D | bfloat16, round to nearest even | `BF16`, the source's |
//! | `f8_e4m3fn` | D | 4 exponent bits, saturates at 448 | `F8_E4M3`, the source's |
//! | `f8_e5m2` | D | 5 exponent bits, from 61440 infinite | `F8_E5M2`, the source's |
//! | `hfp8_e4b7_max240` | D | 4 exponent bits, saturates at 240 | `U8`, the source's |
//! | `int8_sbf32` | D + 8 | D codes (u8), scale (f32), bias (f32) | `U8`, `[rows, row bytes]` |
//! | `int8_sbf16` | D + 4 | D codes (u8), scale (f16), bias (f16) | `U8`, `[rows, row bytes]` |
//! | `int4_sbf16` | ceil(D/2) + 4 | codes of 4 bits, scale (f16), bias (f16) | `U8`, `[rows, row bytes]` |
//! | `int2_sbf16` | ceil(D/4) + 4 | codes of 2 bits, scale (f16), bias (f16) | `U8`, `[rows, row bytes]` |
//!
//! Codes of 4 and 2 bits fill a byte from its low bits up; the bits that a last byte has left are 0. In layout
//! `leading` the same scale and bias stand in front of the same codes, and zero bytes may follow, so that a row's size
//! is a multiple of an alignment. Scale and bias are aligned to nothing. A row-wise quantized row decodes to
//! `f32(f64(code) * f64(scale) + f64(bias))`; the scale may be negative.

mod decode;
mod halves;

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::{Dtype, element_count};
use crate::limits;

pub use decode::{decode_bf16, decode_f8_e4m3, decode_f8_e5m2, decode_f16, decode_f32, decode_f64};

/// The version of all encoders' output. It goes into every snapshot manifest, and grows when any encoder's bytes
/// change for any input.
pub const ENCODING_VERSION: u32 = 2;

/// How a tensor's elements are stored for serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    /// The source's bytes, unchanged.
    Keep,
    /// Cast to IEEE binary32.
    F32,
    /// Cast to IEEE binary16; values of 65520 and more become infinite.
    F16,
    /// Cast to bfloat16.
    Bf16,
    /// Cast to 8 bits with 4 of exponent, as torch's `float8_e4m3fn`; values over 448 become 448.
    F8E4m3fn,
    /// Cast to 8 bits with 5 of exponent, as torch's `float8_e5m2`; values of 61440 and more become infinite.
    F8E5m2,
    /// Cast to 8 bits with 4 of exponent, as FBGEMM's `SparseType.FP8`; values over 240 become 240.
    Hfp8E4b7Max240,
    /// Row-wise 8-bit codes with a binary32 scale and bias.
    Int8Sbf32,
    /// Row-wise 8-bit codes with a binary16 scale and bias.
    Int8Sbf16,
    /// Row-wise 4-bit codes with a binary16 scale and bias.
    Int4Sbf16,
    /// Row-wise 2-bit codes with a binary16 scale and bias.
    Int2Sbf16,
}

/// Where a row-wise quantized row keeps its scale and bias.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Behind the codes, as PyTorch's `embedding_bag_*` operators read them.
    #[default]
    Trailing,
    /// In front of the codes, as FBGEMM's table-batched inference reads them.
    Leading,
}

impl Layout {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Trailing => "trailing",
            Self::Leading => "leading",
        }
    }
}

impl Encoding {
    /// Every encoding that this version writes.
    pub const ALL: &[Self] = &[
        Self::Keep,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::F8E4m3fn,
        Self::F8E5m2,
        Self::Hfp8E4b7Max240,
        Self::Int8Sbf32,
        Self::Int8Sbf16,
        Self::Int4Sbf16,
        Self::Int2Sbf16,
    ];

    /// Shorter names, and what they stand for.
    pub const ALIASES: &[(&str, Self)] =
        &[("int8", Self::Int8Sbf32), ("int4", Self::Int4Sbf16), ("int2", Self::Int2Sbf16)];

    /// The canonical name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3fn => "f8_e4m3fn",
            Self::F8E5m2 => "f8_e5m2",
            Self::Hfp8E4b7Max240 => "hfp8_e4b7_max240",
            Self::Int8Sbf32 => "int8_sbf32",
            Self::Int8Sbf16 => "int8_sbf16",
            Self::Int4Sbf16 => "int4_sbf16",
            Self::Int2Sbf16 => "int2_sbf16",
        }
    }

    /// The encoding of this name, canonical or one of [`Self::ALIASES`].
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let alias = Self::ALIASES.iter().find(|(alias, _)| *alias == name).map(|&(_, encoding)| encoding);
        alias.or_else(|| Self::ALL.iter().copied().find(|encoding| encoding.as_str() == name))
    }

    /// Whether the encoding works on whole rows of a table (two dimensions), not element by element.
    #[must_use]
    pub const fn is_row_wise(self) -> bool {
        self.code_bits().is_some()
    }

    /// The bits of a code, of a row-wise encoding: 8, 4 or 2.
    #[must_use]
    pub const fn code_bits(self) -> Option<u64> {
        match self {
            Self::Int8Sbf32 | Self::Int8Sbf16 => Some(8),
            Self::Int4Sbf16 => Some(4),
            Self::Int2Sbf16 => Some(2),
            _ => None,
        }
    }

    /// Widths that the field's operators read are multiples of this: the codes in a byte.
    #[must_use]
    pub const fn width_multiple(self) -> u64 {
        match self {
            Self::Int4Sbf16 => 2,
            Self::Int2Sbf16 => 4,
            _ => 1,
        }
    }

    /// The largest finite number of a cast that saturates: what is beyond it is stored as it.
    #[must_use]
    pub const fn saturates_at(self) -> Option<f32> {
        match self {
            Self::F8E4m3fn => Some(448.0),
            Self::Hfp8E4b7Max240 => Some(240.0),
            _ => None,
        }
    }

    /// The dtype of the stored tensor in a safetensors header. `hfp8_e4b7_max240` has none there, and is bytes.
    #[must_use]
    pub const fn stored_dtype(self, source: Dtype) -> Dtype {
        match self {
            Self::Keep => source,
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
            Self::F8E4m3fn => Dtype::F8E4m3,
            Self::F8E5m2 => Dtype::F8E5m2,
            Self::Hfp8E4b7Max240 | Self::Int8Sbf32 | Self::Int8Sbf16 | Self::Int4Sbf16 | Self::Int2Sbf16 => {
                Dtype::U8
            }
        }
    }

    /// The bytes of scale and bias together, of a row-wise encoding.
    const fn parameter_bytes(self) -> u64 {
        match self {
            Self::Int8Sbf32 => 8,
            Self::Int8Sbf16 | Self::Int4Sbf16 | Self::Int2Sbf16 => 4,
            _ => 0,
        }
    }
}

/// All that it takes to find a row's size and to decode it: an encoding, and how its rows are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// How elements are stored.
    pub encoding: Encoding,
    /// Where scale and bias stand, for row-wise encodings.
    pub layout: Layout,
    /// A row's size is a multiple of this, in bytes; 1 for no padding.
    pub row_alignment: u64,
    /// The elements of a stored row, where it was padded with zeros to have more than the logical one.
    pub stored_width: Option<u64>,
}

/// The parts of an encoded row, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSizes {
    /// Codes, or elements that are cast or kept.
    pub codes: u64,
    /// Scale and bias.
    pub parameters: u64,
    /// Zeros at the end.
    pub padding: u64,
}

impl Form {
    /// The encoding in its plain form: trailing, nothing padded.
    #[must_use]
    pub const fn plain(encoding: Encoding) -> Self {
        Self { encoding, layout: Layout::Trailing, row_alignment: 1, stored_width: None }
    }

    /// The parts of an encoded row of `elements` elements of `source`; `None` where the form contradicts itself (an
    /// alignment that is no power of two, or stands with layout `trailing`; a stored width below the logical one; any
    /// of it with an encoding that has no rows), or a size overflows.
    #[must_use]
    pub fn row_sizes(&self, elements: u64, source: Dtype) -> Option<RowSizes> {
        let Some(bits) = self.encoding.code_bits() else {
            let codes = elements.checked_mul(self.encoding.stored_dtype(source).size())?;
            let plain = *self == Self::plain(self.encoding);
            return plain.then_some(RowSizes { codes, parameters: 0, padding: 0 });
        };
        let aligned = self.row_alignment > 1;
        if !self.row_alignment.is_power_of_two()
            || self.row_alignment > limits::ROW_ALIGNMENT
            || (aligned && self.layout == Layout::Trailing)
        {
            return None;
        }
        let width = self.stored_width.unwrap_or(elements);
        if width < elements {
            return None;
        }
        let codes = width.div_ceil(8 / bits);
        let parameters = self.encoding.parameter_bytes();
        let bytes = codes.checked_add(parameters)?;
        let padding = bytes.checked_next_multiple_of(self.row_alignment)? - bytes;
        Some(RowSizes { codes, parameters, padding })
    }

    /// The encoded size of a row of `elements` elements of `source`, in bytes; `None` as for
    /// [`row_sizes`](Self::row_sizes).
    #[must_use]
    pub fn row_bytes(&self, elements: u64, source: Dtype) -> Option<u64> {
        let RowSizes { codes, parameters, padding } = self.row_sizes(elements, source)?;
        codes.checked_add(parameters)?.checked_add(padding)
    }

    /// The dtype of the stored tensor in a safetensors header.
    #[must_use]
    pub const fn stored_dtype(&self, source: Dtype) -> Dtype {
        self.encoding.stored_dtype(source)
    }

    /// The shape of the stored tensor in a safetensors header, for a tensor of logical `shape`; `None` as for
    /// [`row_sizes`](Self::row_sizes), and for a row-wise encoding of anything but two dimensions.
    #[must_use]
    pub fn stored_shape(&self, shape: &[u64], source: Dtype) -> Option<Vec<u64>> {
        match shape {
            &[rows, width] if self.encoding.is_row_wise() => Some(vec![rows, self.row_bytes(width, source)?]),
            _ if self.encoding.is_row_wise() => None,
            _ => (*self == Self::plain(self.encoding)).then(|| shape.to_vec()),
        }
    }

    /// The size of the stored tensor, in bytes; `None` as for [`stored_shape`](Self::stored_shape).
    #[must_use]
    pub fn stored_bytes(&self, shape: &[u64], source: Dtype) -> Option<u64> {
        let stored = self.stored_dtype(source);
        element_count(&self.stored_shape(shape, source)?, stored)?.checked_mul(stored.size())
    }
}

impl fmt::Display for Form {
    /// For people: `int4_sbf16`, `int4_sbf16 leading/16`, `int4_sbf16 width 8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.encoding.as_str())?;
        if self.layout == Layout::Leading {
            f.write_str(" leading")?;
        }
        if self.row_alignment > 1 {
            write!(f, "/{}", self.row_alignment)?;
        }
        self.stored_width.map_or(Ok(()), |width| write!(f, " width {width}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_and_aliases() {
        for &encoding in Encoding::ALL {
            assert_eq!(Encoding::from_name(encoding.as_str()), Some(encoding));
            assert_eq!(serde_json::to_value(encoding).unwrap(), encoding.as_str());
        }
        for (alias, name) in [("int8", "int8_sbf32"), ("int4", "int4_sbf16"), ("int2", "int2_sbf16")] {
            assert_eq!(Encoding::from_name(alias).map(Encoding::as_str), Some(name));
        }
        assert_eq!(Encoding::from_name("int9"), None);
    }

    #[test]
    fn sizes_are_those_of_the_formats() {
        let bytes = |encoding, width| Form::plain(encoding).row_bytes(width, Dtype::F32);
        for (encoding, width, expected) in [
            (Encoding::Keep, 3, 12),
            (Encoding::F16, 3, 6),
            (Encoding::Hfp8E4b7Max240, 3, 3),
            (Encoding::Int8Sbf32, 3, 11),
            (Encoding::Int8Sbf16, 3, 7),
            (Encoding::Int4Sbf16, 3, 6),
            (Encoding::Int4Sbf16, 4, 6),
            (Encoding::Int2Sbf16, 5, 6),
        ] {
            assert_eq!(bytes(encoding, width), Some(expected), "{encoding:?} {width}");
        }
        assert_eq!(bytes(Encoding::Int8Sbf32, u64::MAX), None);
        assert_eq!(bytes(Encoding::F32, u64::MAX), None);
        let leading = Form { layout: Layout::Leading, row_alignment: 16, ..Form::plain(Encoding::Int4Sbf16) };
        assert_eq!(leading.row_bytes(33, Dtype::F32), Some(32));
        assert_eq!(leading.to_string(), "int4_sbf16 leading/16");
        let padded = Form { stored_width: Some(8), ..Form::plain(Encoding::Int4Sbf16) };
        assert_eq!(padded.stored_shape(&[3, 7], Dtype::F32), Some(vec![3, 8]));
        assert_eq!(padded.stored_bytes(&[3, 7], Dtype::F32), Some(24));
    }

    #[test]
    fn forms_that_contradict_themselves_have_no_size() {
        let int4 = Form::plain(Encoding::Int4Sbf16);
        let leading = Form { layout: Layout::Leading, ..int4 };
        for form in [
            Form { row_alignment: 16, ..int4 },
            Form { row_alignment: 0, ..leading },
            Form { row_alignment: 12, ..leading },
            Form { row_alignment: 8192, ..leading },
            Form { stored_width: Some(6), ..leading },
            Form { layout: Layout::Leading, ..Form::plain(Encoding::F16) },
            Form { row_alignment: 16, ..Form::plain(Encoding::Keep) },
            Form { stored_width: Some(8), ..Form::plain(Encoding::F8E5m2) },
        ] {
            assert_eq!(form.row_bytes(7, Dtype::F32), None, "{form:?}");
            assert_eq!(form.stored_bytes(&[2, 7], Dtype::F32), None, "{form:?}");
        }
        assert_eq!(int4.stored_shape(&[7], Dtype::F32), None);
    }

    proptest! {
        #[test]
        fn no_size_wraps(elements in any::<u64>(), width in any::<Option<u64>>(), shift in 0..64u32) {
            for &encoding in Encoding::ALL {
                for layout in [Layout::Trailing, Layout::Leading] {
                    let form = Form { encoding, layout, row_alignment: 1 << shift, stored_width: width };
                    if let Some(bytes) = form.row_bytes(elements, Dtype::F32) {
                        prop_assert!(u128::from(bytes) * 4 >= u128::from(elements));
                        prop_assert_eq!(bytes % (1 << shift), 0);
                    }
                }
            }
        }
    }
}
