//! Which tensors and files go where, how slices become whole rows, and which rows are kept.

pub mod artifacts;
pub mod gather;
pub mod prune;
pub mod records;
mod scatter;
pub mod select;
pub mod tiling;
mod transfer;
