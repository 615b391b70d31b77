//! What every format's reader produces: logical tensors, and where their slices lie. Made from metadata alone.

use std::sync::{Arc, OnceLock};

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use crate::error::ReadError;
use crate::read::unpack::Unpacker;
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
    /// Tensors that cannot be read (sparse, quantized, complex...), each with the reason, sorted by name. Whoever
    /// wants one of them gets the error.
    pub unreadable: Vec<(TensorName, ReadError)>,
    /// What is no tensor, and was passed over.
    pub others: Others,
    /// What was passed over, and why: one line each, for people.
    pub notes: Vec<String>,
}

/// The entries of a checkpoint that are no tensors: step counters, texts, settings.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// The first [`limits::OTHERS`] of them, in the order of writing.
    pub listed: Vec<Other>,
    /// How many there are in all.
    pub count: u64,
}

/// An entry that is no tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other {
    /// Its name, shortened where no tensor may have it.
    pub name: String,
    /// What it is, by Python's name: `int`, `str`, `list`...; `object` where only its bytes' place is known.
    pub kind: &'static str,
}

impl Others {
    /// Most notes about single entries; the rest is counted.
    const NOTES: usize = 50;

    /// Takes up an entry.
    pub fn add(&mut self, name: &str, kind: &'static str) {
        self.count += 1;
        if self.listed.len() < limits::OTHERS {
            let fits = name.len() <= limits::TENSOR_NAME_BYTES;
            self.listed.push(Other { name: if fits { name.to_owned() } else { shorten(name) }, kind });
        }
    }

    /// What was passed over, for people.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let note = |other: &Other| format!("{}: not a tensor, passed over", other.name.escape_debug());
        let mut notes: Vec<_> = self.listed.iter().take(Self::NOTES).map(note).collect();
        let more = self.count.saturating_sub(notes.len() as u64);
        if more > 0 {
            notes.push(format!("and {more} more entries that are no tensors were passed over"));
        }
        notes
    }
}

impl Checkpoint {
    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &TensorName) -> Option<&Tensor> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name.cmp(name)).ok()?;
        self.tensors.get(at)
    }
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
    /// The same, as one zstd frame: it is unpacked as a whole, and read from there.
    ZstdItem {
        /// The file.
        file: Arc<SourceFile>,
        /// The frame's first byte.
        offset: u64,
        /// The frame's length in bytes.
        length: u64,
        /// The storage within the unpacked archive, once that has been read.
        storage: OnceLock<Strided>,
        /// Who unpacks it.
        unpacker: Arc<Unpacker>,
    },
    /// Elements of a torch.save file, which may share their storage with other tensors.
    Strided {
        /// The file.
        file: Arc<SourceFile>,
        /// Where in it they lie.
        storage: Strided,
    },
}

impl Location {
    /// The file that holds the bytes.
    #[must_use]
    pub const fn file(&self) -> &Arc<SourceFile> {
        match self {
            Self::Dense { file, .. }
            | Self::TorchItem { file, .. }
            | Self::ZstdItem { file, .. }
            | Self::Strided { file, .. } => file,
        }
    }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
    /// Their CRC-32 (the one of zip and zlib).
    pub crc32: u32,
}

/// A torch.save archive of one tensor within a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
}

/// The record that holds a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SliceRecord {
    /// The record.
    pub record: Record,
    /// The item whose storage it is; `None` where the whole file is one archive.
    pub item: Option<Item>,
}

/// What is checked as one, by a name that the listing knows: of an item, nobody has to look into its archive to learn
/// whether others have checked its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Checkable {
    /// The storage of an item.
    Item(Item),
    /// A record of a file that is one archive.
    Record(Record),
}

impl SliceRecord {
    /// What is checked with it.
    #[must_use]
    pub fn checkable(&self) -> Checkable {
        self.item.map_or(Checkable::Record(self.record), Checkable::Item)
    }
}

impl Record {
    /// The first byte behind it.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}
