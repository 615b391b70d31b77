//! What the listing of a checkpoint may take in memory, beside the metadata that it is made from.
//!
//! A byte of metadata may take [`limits::METADATA_SHARE`] bytes of memory once it is parsed and listed. That holds for
//! what trainers write, but not for containers that are shared: a pickle of a few kilobytes can name half a million
//! tensors. So every tensor is charged before its name is made.

use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};

/// What a tensor takes in a listing and on the way to it, its name, shape and slices aside, at most.
const TENSOR_BYTES: u64 = 1000;
/// What a byte of its name takes: it is copied while tensors are looked up.
const NAME_BYTE_BYTES: u64 = 3;
/// What a slice takes, and each of its dimensions.
const SLICE_BYTES: u64 = 300;
const DIMENSION_BYTES: u64 = 48;

/// How much more a listing may take.
#[derive(Debug)]
pub(super) struct Room {
    /// All that it may take, in bytes.
    most: u64,
    left: u64,
    tensors: usize,
}

impl Room {
    /// The room where `budget` bytes of metadata may be read, and `metadata` bytes were. Half of what those stand for
    /// is what they take as a parsed pickle; their listing may take the other half, and whatever was not read.
    pub(super) fn new(budget: u64, metadata: u64) -> Self {
        let most = budget.saturating_sub(metadata / 2).saturating_mul(limits::METADATA_SHARE);
        Self { most, left: most, tensors: 0 }
    }

    /// Charges for a tensor whose name has `name` bytes.
    ///
    /// # Errors
    /// [`Class::LimitExceeded`]
    pub(super) fn tensor(&mut self, name: usize) -> Result<()> {
        self.tensors += 1;
        self.take(NAME_BYTE_BYTES.saturating_mul(name as u64).saturating_add(TENSOR_BYTES))
    }

    /// Charges for `slices` slices of `dimensions` dimensions.
    ///
    /// # Errors
    /// [`Class::LimitExceeded`]
    pub(super) fn slices(&mut self, slices: usize, dimensions: usize) -> Result<()> {
        let each = DIMENSION_BYTES.saturating_mul(dimensions as u64).saturating_add(SLICE_BYTES);
        self.take(each.saturating_mul(slices as u64))
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            let why = format!(
                "the listing of its first {} tensors alone takes more than {} KiB, which is what the memory budget \
                 leaves for it; raise --memory",
                self.tensors,
                self.most >> 10
            );
            ReadError::new(Class::LimitExceeded, why)
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_the_budget_is_refused_with_figures() {
        let mut room = Room::new(1000, 400);
        assert_eq!(room.most, 9600);
        (0..4).for_each(|_| room.tensor(200).unwrap());
        room.slices(5, 2).unwrap();
        let error = room.tensor(200).unwrap_err();
        assert_eq!(error.class(), Class::LimitExceeded);
        for word in ["first 5 tensors", "9 KiB", "--memory"] {
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(Room::new(1000, 0).slices(usize::MAX, usize::MAX).is_err());
    }
}
