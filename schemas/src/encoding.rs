//! How a tensor's bytes are laid out for serving, and how one encoded row is decoded.
//!
//! The formats and their formulas are those of PyTorch's and FBGEMM's fused row-wise quantization (torch 2.14.0,
//! fbgemm-gpu-cpu 1.9.0), established against golden files made by those libraries. Everything stored is
//! little-endian. Row layouts, for a row of `D` elements:
//!
//! | encoding | bytes a row | layout `trailing` | safetensors dtype, shape |
//! |---|---|---|---|
//! | `keep` | as the source | as the source | the source's |
//! | `f16` | 2 D | IEEE binary16, round to nearest even | `F16`, the source's |
//! | `bf16` | 2 D | bfloat16, round to nearest even | `BF16`, the source's |
//! | `int8_sbf32` | D + 8 | D codes (u8), scale (f32), bias (f32) | `U8`, `[rows, D + 8]` |
//!
//! A row-wise quantized row decodes to `f32(f64(code) * f64(scale) + f64(bias))`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// The version of all encoders' output. It goes into every snapshot manifest, and grows when any encoder's bytes
/// change for any input.
pub const ENCODING_VERSION: u32 = 1;

/// How a tensor's bytes are stored for serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    /// The source's bytes, unchanged.
    Keep,
    /// Cast to IEEE binary16; values of 65520 and more become infinite.
    F16,
    /// Cast to bfloat16.
    Bf16,
    /// Row-wise 8-bit codes with a binary32 scale and bias behind them.
    Int8Sbf32,
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
}

impl Encoding {
    /// Every encoding that this version writes.
    pub const ALL: &[Self] = &[Self::Keep, Self::F16, Self::Bf16, Self::Int8Sbf32];

    /// The canonical name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8Sbf32 => "int8_sbf32",
        }
    }

    /// The encoding of this name, canonical or alias (`int8` for `int8_sbf32`).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = if name == "int8" { "int8_sbf32" } else { name };
        Self::ALL.iter().copied().find(|encoding| encoding.as_str() == name)
    }

    /// Whether the encoding works on whole rows of a table (two dimensions), not element by element.
    #[must_use]
    pub const fn is_row_wise(self) -> bool {
        matches!(self, Self::Int8Sbf32)
    }

    /// The encoded size of a row of `elements` elements of `source`, in bytes; `None` where it overflows.
    #[must_use]
    pub fn row_bytes(self, elements: u64, source: Dtype) -> Option<u64> {
        match self {
            Self::Keep => elements.checked_mul(source.size()),
            Self::F16 | Self::Bf16 => elements.checked_mul(2),
            Self::Int8Sbf32 => elements.checked_add(8),
        }
    }

    /// The dtype of the stored tensor in a safetensors header.
    #[must_use]
    pub const fn stored_dtype(self, source: Dtype) -> Dtype {
        match self {
            Self::Keep => source,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
            Self::Int8Sbf32 => Dtype::U8,
        }
    }

    /// The shape of the stored tensor in a safetensors header, for a tensor of logical `shape`.
    #[must_use]
    pub fn stored_shape(self, shape: &[u64]) -> Vec<u64> {
        match (self, shape) {
            (Self::Int8Sbf32, &[rows, width]) => vec![rows, width.saturating_add(8)],
            _ => shape.to_vec(),
        }
    }
}

/// Decodes one row of `int8_sbf32` in layout [`Layout::Trailing`]: `row` is `D` codes, the scale and the bias;
/// `decoded` takes `D` values. A shorter `decoded` takes the first ones.
pub fn decode_int8_sbf32(row: &[u8], decoded: &mut [f32]) {
    let Some((codes, trailer)) = row.split_last_chunk::<8>() else { return };
    let [s0, s1, s2, s3, b0, b1, b2, b3] = *trailer;
    let scale = f64::from(f32::from_le_bytes([s0, s1, s2, s3]));
    let bias = f64::from(f32::from_le_bytes([b0, b1, b2, b3]));
    for (value, &code) in decoded.iter_mut().zip(codes) {
        *value = narrow(f64::from(code) * scale + bias);
    }
}

/// Decodes binary16: two bytes an element.
pub fn decode_f16(row: &[u8], decoded: &mut [f32]) {
    for (value, &pair) in decoded.iter_mut().zip(row.as_chunks::<2>().0) {
        *value = half::f16::from_le_bytes(pair).to_f32();
    }
}

/// Decodes bfloat16: two bytes an element.
pub fn decode_bf16(row: &[u8], decoded: &mut [f32]) {
    for (value, &pair) in decoded.iter_mut().zip(row.as_chunks::<2>().0) {
        *value = half::bf16::from_le_bytes(pair).to_f32();
    }
}

/// Rounds to the nearest binary32, ties to even.
#[expect(clippy::cast_possible_truncation, reason = "rounding to binary32 is the point")]
const fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases() {
        for &encoding in Encoding::ALL {
            assert_eq!(Encoding::from_name(encoding.as_str()), Some(encoding));
            assert_eq!(serde_json::to_value(encoding).unwrap(), encoding.as_str());
        }
        assert_eq!(Encoding::from_name("int8"), Some(Encoding::Int8Sbf32));
        assert_eq!(Encoding::from_name("int9"), None);
    }

    #[test]
    fn a_row_decodes_with_its_scale_and_bias() {
        let mut row = vec![0, 1, 255];
        row.extend(0.5f32.to_le_bytes());
        row.extend((-1.0f32).to_le_bytes());
        let mut decoded = [0.0; 3];
        decode_int8_sbf32(&row, &mut decoded);
        assert_eq!(decoded, [-1.0, -0.5, 126.5]);
    }
}
