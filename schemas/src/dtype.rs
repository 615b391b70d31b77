//! Element types, by the names that safetensors gives them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $size:literal;)*) => {
        /// An element type. Multi-byte elements are little-endian; `BOOL` is one byte, 0 or 1.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum Dtype {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)*
        }

        impl Dtype {
            /// Every element type.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in a safetensors header.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The size of one element, in bytes.
            #[must_use]
            pub const fn size(self) -> u64 {
                match self { $(Self::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    /// IEEE 754 binary64.
    F64 = "F64", 8;
    /// IEEE 754 binary32.
    F32 = "F32", 4;
    /// IEEE 754 binary16.
    F16 = "F16", 2;
    /// bfloat16: the upper half of a binary32.
    Bf16 = "BF16", 2;
    /// 8-bit float with 4 exponent bits, no infinity, NaN 0x7F and 0xFF.
    F8E4m3 = "F8_E4M3", 1;
    /// 8-bit float with 5 exponent bits, with infinities.
    F8E5m2 = "F8_E5M2", 1;
    /// Signed 64-bit integer.
    I64 = "I64", 8;
    /// Signed 32-bit integer.
    I32 = "I32", 4;
    /// Signed 16-bit integer.
    I16 = "I16", 2;
    /// Signed 8-bit integer.
    I8 = "I8", 1;
    /// Unsigned 64-bit integer.
    U64 = "U64", 8;
    /// Unsigned 32-bit integer.
    U32 = "U32", 4;
    /// Unsigned 16-bit integer.
    U16 = "U16", 2;
    /// Unsigned 8-bit integer.
    U8 = "U8", 1;
    /// One byte, 0 or 1.
    Bool = "BOOL", 1;
}

impl Dtype {
    /// The type with this safetensors name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.as_str() == name)
    }

    /// Whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16 | Self::F8E4m3 | Self::F8E5m2)
    }
}

/// The number of elements of a tensor with this `shape`, or `None` where it (times `dtype`'s size) does not fit
/// 64 bits.
#[must_use]
pub fn element_count(shape: &[u64], dtype: Dtype) -> Option<u64> {
    // A zero anywhere makes the tensor empty, but the other dimensions must still be sane on their own.
    let of_nonzero =
        shape.iter().filter(|&&size| size != 0).try_fold(1u64, |n, &size| n.checked_mul(size))?;
    of_nonzero.checked_mul(dtype.size())?;
    Some(if shape.contains(&0) { 0 } else { of_nonzero })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_count_never_wraps() {
        assert_eq!(element_count(&[], Dtype::F32), Some(1));
        assert_eq!(element_count(&[3, 0, 5], Dtype::F32), Some(0));
        assert_eq!(element_count(&[1 << 32, 1 << 32], Dtype::U8), None);
        assert_eq!(element_count(&[1 << 32, 1 << 32, 0], Dtype::U8), None);
        assert_eq!(element_count(&[1 << 62], Dtype::F32), None);
        assert_eq!(element_count(&[7, 9], Dtype::F64), Some(63));
    }

    #[test]
    fn names_round_trip() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.as_str()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("C64"), None);
    }
}
