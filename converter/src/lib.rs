//! How it is reshaped: checkpoint bytes in, encoded rows and statistics out.
//!
//! ```text
//! source -> read (parsers) -> Checkpoint -> shape::select (policy) -> shape::gather (slices to rows) -> encode
//! ```
//!
//! | room | holds |
//! |---|---|
//! | [`source`] | positioned reads of one checkpoint's files, in folders and in object stores, with their digests |
//! | [`checkpoint`] | what every format's reader produces: logical tensors and where their slices lie |
//! | [`read`] | one reader a format; `detect` finds out which |
//! | [`shape`] | which tensors go where, slices checked and put together |
//! | [`encode`] | one file an encoding |
//! | [`statistics`] | what the gates judge, summed in a fixed order |
//! | [`error`] | what is wrong with a checkpoint, by stable class names |
//!
//! Checkpoints are hostile input: lengths are checked before they are allocated, pickles go through an allow-list
//! machine, and no code in a checkpoint is ever run. The crate reads no environment and no clock.

pub mod checkpoint;
pub mod encode;
pub mod error;
pub mod read;
pub mod shape;
pub mod source;
pub mod statistics;
