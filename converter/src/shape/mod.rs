//! Which tensors go where, and how slices become whole rows.

pub mod gather;
pub mod records;
pub mod select;
pub mod tiling;
