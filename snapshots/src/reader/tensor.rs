//! A tensor's bytes where they lie.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::snapshot::SnapshotTensor;

use super::element::Element;
use super::error::LookupError;

/// A tensor of a version that is open. Nothing is copied.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'v> {
    described: &'v SnapshotTensor,
    bytes: &'v [u8],
}

impl<'v> Tensor<'v> {
    pub(super) const fn new(described: &'v SnapshotTensor, bytes: &'v [u8]) -> Self {
        Self { described, bytes }
    }

    /// What the manifest says of it: name, logical shape, source dtype, encoding, layout, pruning.
    #[must_use]
    pub const fn described(&self) -> &'v SnapshotTensor {
        self.described
    }

    /// The dtype of what is stored; of row-wise encodings and `hfp8_e4b7_max240` bytes.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.described.encoding.stored_dtype(self.described.source_dtype)
    }

    /// The bytes as they are stored, in order.
    #[must_use]
    pub const fn bytes(&self) -> &'v [u8] {
        self.bytes
    }

    /// The stored values, read in place. What was published lies aligned.
    ///
    /// # Errors
    /// [`LookupError::WrongType`] where the stored dtype is another one, [`LookupError::NotInPlace`] where the values
    /// lie so that they cannot be read in place, or the machine is not little-endian.
    pub fn values<T: Element>(&self) -> Result<&'v [T], LookupError> {
        let (stored, asked, name) = (self.dtype(), T::DTYPE, || self.described.name.to_string());
        if stored != asked {
            return Err(LookupError::WrongType { name: name(), stored, asked });
        }
        let values = bytemuck::try_cast_slice(self.bytes).ok().filter(|_| cfg!(target_endian = "little"));
        values.ok_or_else(|| LookupError::NotInPlace { name: name(), asked })
    }
}
