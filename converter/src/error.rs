//! What is wrong with a checkpoint: a stable class, the file, the tensor, and the detail.

use std::fmt;

use weighbridge_schemas::error::Kind;

macro_rules! classes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// A stable class of checkpoint error; the names are part of the command line's contract.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Class {
            $($(#[$doc])* $variant,)*
        }

        impl Class {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

classes! {
    /// The checkpoint's path is absent.
    NotFound = "not_found";
    /// A file cannot be read: permissions, or the device failed.
    Unreadable = "unreadable";
    /// An object store does not answer, or breaks its answers off, again and again.
    Unreachable = "unreachable";
    /// An object store does not let the reader in: credentials, a region, or a connection that cannot be trusted.
    AccessDenied = "access_denied";
    /// A file changed while it was read.
    CheckpointChanged = "checkpoint_changed";
    /// A file that the checkpoint manifest declares is absent.
    FileMissing = "file_missing";
    /// A file has another size than the checkpoint manifest declares.
    FileSizeMismatch = "file_size_mismatch";
    /// A file has another BLAKE3 than the checkpoint manifest declares.
    FileDigestMismatch = "file_digest_mismatch";
    /// What another reader of the checkpoint tells of its digests makes no sense.
    DigestsBad = "digests_bad";
    /// The checkpoint holds no tensor.
    NoTensors = "no_tensors";
    /// None of the supported formats.
    UnsupportedFormat = "unsupported_format";
    /// A file ends before something it declares.
    Truncated = "truncated";
    /// The declared safetensors header is over the cap.
    HeaderTooLarge = "header_too_large";
    /// The safetensors header is not UTF-8.
    HeaderNotUtf8 = "header_not_utf8";
    /// The safetensors header is not one JSON object padded with spaces.
    HeaderNotJson = "header_not_json";
    /// One JSON key or tensor name twice.
    DuplicateKey = "duplicate_key";
    /// `__metadata__` is not a map of strings.
    BadMetadata = "bad_metadata";
    /// A tensor's entry lacks a field, or a field has the wrong type.
    BadEntry = "bad_entry";
    /// The dtype is unknown or not supported.
    BadDtype = "bad_dtype";
    /// A negative, fractional or absurd dimension.
    BadShape = "bad_shape";
    /// The product of dimensions does not fit 64 bits.
    ShapeOverflow = "shape_overflow";
    /// Offsets that overlap, leave holes, or run backwards.
    BadOffsets = "bad_offsets";
    /// A byte range that does not equal shape times item size.
    SizeMismatch = "size_mismatch";
    /// Bytes after the last tensor.
    TrailingBytes = "trailing_bytes";
    /// A name that could mislead or escape.
    UnsafeName = "unsafe_name";
    /// Beyond a documented limit.
    LimitExceeded = "limit_exceeded";
    /// The index is malformed.
    IndexBad = "index_bad";
    /// The index, or a link, leads out of the checkpoint's folder.
    IndexPathEscape = "index_path_escape";
    /// A shard that the index names is absent.
    IndexMissingShard = "index_missing_shard";
    /// A shard lacks a tensor that the index puts there.
    IndexTensorMissing = "index_tensor_missing";
    /// A shard, or tensor, that the index does not name.
    IndexExtraTensor = "index_extra_tensor";
    /// One tensor in two shards.
    IndexDuplicateTensor = "index_duplicate_tensor";
    /// Zip records that disagree or make no sense.
    ZipMalformed = "zip_malformed";
    /// The archive lacks `data.pkl` or a storage.
    ZipMissingEntry = "zip_missing_entry";
    /// Two zip records of one name.
    ZipDuplicateEntry = "zip_duplicate_entry";
    /// A compressed zip record.
    ZipCompressed = "zip_compressed";
    /// A zip record whose bytes do not have the CRC-32 that the archive records.
    ZipCrc = "zip_crc";
    /// A zstd frame that is broken, or followed by something.
    ZstdMalformed = "zstd_malformed";
    /// The scratch folder cannot hold an item that has to be unpacked: absent, full, or not writable.
    Scratch = "scratch";
    /// A storage whose length is not elements times item size.
    StorageSizeMismatch = "storage_size_mismatch";
    /// A view that reaches outside its storage.
    StorageOutOfBounds = "storage_out_of_bounds";
    /// A byte order that is neither little nor supported.
    BadByteorder = "bad_byteorder";
    /// A pickle names something that is not on the allow list.
    ForbiddenGlobal = "forbidden_global";
    /// A broken stream of pickle opcodes.
    PickleMalformed = "pickle_malformed";
    /// Well-formed, but not what this place may hold.
    UnsupportedObject = "unsupported_object";
    /// `.metadata` is absent: the save has not finished.
    DcpNoMetadata = "dcp_no_metadata";
    /// A file that `.metadata` names is absent.
    DcpMissingFile = "dcp_missing_file";
    /// Slices that do not cover their tensor.
    DcpChunkGap = "dcp_chunk_gap";
    /// Slices that overlap.
    DcpChunkOverlap = "dcp_chunk_overlap";
    /// A slice outside its tensor, or without a place where it lies.
    DcpChunkBounds = "dcp_chunk_bounds";
    /// A stored slice with another shape or dtype than the metadata says.
    DcpChunkMismatch = "dcp_chunk_mismatch";
    /// A list of rows to keep is absent.
    RowListMissing = "row_list_missing";
    /// A list of rows to keep holds something that is no row of its table, or nothing at all.
    RowListBad = "row_list_bad";
}

/// A checkpoint that cannot be read, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadError {
    class: Class,
    file: Option<String>,
    tensor: Option<String>,
    detail: String,
}

impl ReadError {
    /// An error of `class` with its `detail`: what is wrong, with figures, and the way out where there is one.
    #[must_use]
    pub fn new(class: Class, detail: impl Into<String>) -> Self {
        Self { class, file: None, tensor: None, detail: detail.into() }
    }

    /// Names the file, unless one is named already.
    #[must_use]
    pub fn in_file(mut self, file: impl Into<String>) -> Self {
        self.file.get_or_insert_with(|| file.into());
        self
    }

    /// Names the tensor, unless one is named already.
    #[must_use]
    pub fn of_tensor(mut self, tensor: impl Into<String>) -> Self {
        self.tensor.get_or_insert_with(|| tensor.into());
        self
    }

    /// The stable class.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.class
    }

    /// The file at fault, relative to the checkpoint.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The tensor at fault.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref()
    }

    /// What the failure asks for. A checkpoint that changes, or whose save has not finished, may be right later;
    /// so may a store that does not answer, and a full disk.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self.class {
            Class::CheckpointChanged | Class::DcpNoMetadata | Class::Scratch | Class::Unreachable => {
                Kind::Transient
            }
            _ => Kind::Permanent,
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}: ")?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor {tensor:?}: ")?;
        }
        f.write_str(&self.detail)
    }
}

impl std::error::Error for ReadError {}

/// The result of reading.
pub type Result<T, E = ReadError> = std::result::Result<T, E>;
