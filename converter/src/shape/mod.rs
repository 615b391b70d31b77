//! Which tensors go where, and how slices become whole rows.

pub mod gather;
pub mod records;
mod scatter;
pub mod select;
pub mod tiling;
