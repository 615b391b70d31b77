//! What every format's reader produces: logical tensors, and where their slices lie. Made from metadata alone.

use std::sync::{Arc, OnceLock};

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::names::TensorName;

use crate::source::{Source, SourceFile};

/// A checkpoint, listed: its tensors tile exactly, and no tensor byte has been read yet.
#[derive(Debug)]
pub struct Checkpoint {
    /// Where the bytes lie.
    pub source: Source,
    /// The format that was found.
    pub format: Format,
    /// The digest of the metadata bytes and file sizes. It depends on no path and no time.
    pub fingerprint: Fingerprint,
    /// The tensors, sorted by name, each name once.
    pub tensors: Vec<Tensor>,
    /// What was passed over, and why: one line each, for people.
    pub notes: Vec<String>,
}

/// A logical tensor, whole, whatever files it lies in.
#[derive(Debug)]
pub struct Tensor {
    /// The name.
    pub name: TensorName,
    /// The element type.
    pub dtype: Dtype,
    /// The shape; empty for a 0-dimensional tensor of one element.
    pub shape: Vec<u64>,
    /// The slices, which tile the tensor exactly. A tensor without elements may have none.
    pub slices: Vec<Slice>,
}

impl Tensor {
    /// The number of elements. Readers refuse shapes for which it does not fit 64 bits.
    #[must_use]
    pub fn elements(&self) -> u64 {
        element_count(&self.shape, self.dtype).unwrap_or(0)
    }

    /// The size in bytes, dense.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size())
    }
}

/// The part of one tensor that one file holds: `sizes` elements from `offsets` on, in each dimension.
#[derive(Debug)]
pub struct Slice {
    /// Where the slice starts in the tensor, a number a dimension.
    pub offsets: Vec<u64>,
    /// How far it goes, a number a dimension.
    pub sizes: Vec<u64>,
    /// Where its bytes lie.
    pub location: Location,
}

impl Slice {
    /// The number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.sizes.iter().product()
    }
}

/// Where a slice's bytes lie.
#[derive(Debug)]
pub enum Location {
    /// Dense, row-major elements from byte `offset` of `file` on.
    Dense {
        /// The file.
        file: Arc<SourceFile>,
        /// The first byte.
        offset: u64,
    },
    /// A torch.save archive of one tensor in `offset..offset + length` of `file`; where its storage lies, and with
    /// what strides, is read from the archive when first needed.
    TorchItem {
        /// The file.
        file: Arc<SourceFile>,
        /// The archive's first byte.
        offset: u64,
        /// The archive's length in bytes.
        length: u64,
        /// The storage, once the archive's records have been read.
        storage: OnceLock<Strided>,
    },
}

/// Elements in a file, in an order of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strided {
    /// The byte of `file` at which the slice's first element (all indices zero) lies.
    pub offset: u64,
    /// How many elements lie between neighbours, a number a dimension.
    pub strides: Vec<u64>,
    /// The archive's record that holds them, where it carries a checksum.
    pub record: Option<Record>,
}

/// A record of a zip archive, and the checksum of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
    /// Their CRC-32 (the one of zip and zlib).
    pub crc32: u32,
}
