//! Types of which a tensor's values can be read where they lie.

use bytemuck::Pod;
use half::{bf16, f16};

use weighbridge_schemas::dtype::Dtype;

/// A type that stored elements can be read as, in place. There are no others than these.
pub trait Element: Pod + private::Sealed {
    /// The dtype whose elements these are. Floats of 8 bits, and booleans, have no type of Rust: they are bytes.
    const DTYPE: Dtype;
}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty = $dtype:ident;)*) => {
        $(
            impl private::Sealed for $element {}

            impl Element for $element {
                const DTYPE: Dtype = Dtype::$dtype;
            }
        )*
    };
}

elements! {
    f64 = F64;
    f32 = F32;
    f16 = F16;
    bf16 = Bf16;
    i64 = I64;
    i32 = I32;
    i16 = I16;
    i8 = I8;
    u64 = U64;
    u32 = U32;
    u16 = U16;
    u8 = U8;
}
