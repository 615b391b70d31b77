//! The allow list: every global that a pickle of a checkpoint may name, and where.
//!
//! Taken from what torch 2.2 and 2.14 write: one `.metadata` file names some fifteen, a saved tensor three. A global
//! is a token here. Which are functions, classes or constants only says which opcodes may meet them.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::error::shorten;

use crate::error::{Class, ReadError, Result};

/// What a pickle is, and so which globals may stand in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The `.metadata` of a distributed checkpoint.
    Metadata,
    /// The `data.pkl` of a `torch.save` archive of tensors.
    Tensors,
}

/// A global of the allow list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Global {
    /// `collections.OrderedDict`
    OrderedDict,
    /// `collections.Counter`
    Counter,
    /// `collections.defaultdict`
    DefaultDict,
    /// `collections.deque`
    Deque,
    /// `torch.Size`
    Size,
    /// `torch.device`
    Device,
    /// `_codecs.encode`: how `bytes` are written before protocol 3.
    Encode,
    /// `torch._utils._rebuild_tensor_v2`
    RebuildTensorV2,
    /// `torch._utils._rebuild_tensor_v3`
    RebuildTensorV3,
    /// `torch._utils._rebuild_parameter`
    RebuildParameter,
    /// `torch._utils._rebuild_parameter_with_state`
    RebuildParameterWithState,
    /// `torch._tensor._rebuild_from_type_v2`: a tensor with attributes of Python, or of a class of its own.
    RebuildFromType,
    /// `torch.Tensor`, `torch.nn.parameter.Parameter` or `torch.nn.parameter.Buffer`
    TensorClass,
    /// A function of torch that makes a kind of tensor which is not supported, such as `_rebuild_sparse_tensor`.
    OtherTensor(&'static str),
    /// A constant of torch that says nothing of elements, such as `torch.per_tensor_affine` or `torch.channels_last`.
    Constant,
    /// A plain class of Python that makes values of a `defaultdict`, such as `list`; it is not called.
    Builtin,
    /// `set` and `frozenset`, of one list.
    Set,
    /// `bytearray`
    ByteArray,
    /// `complex`
    Complex,
    /// `torch.storage.UntypedStorage`
    UntypedStorage,
    /// A storage class that names its element type, such as `torch.FloatStorage`.
    Storage(Dtype),
    /// The storage class of an element type that is not supported.
    OtherStorage(&'static str),
    /// An element type, such as `torch.float32`.
    Dtype(Dtype),
    /// An element type that is not supported.
    OtherDtype(&'static str),
    /// `torch.distributed.checkpoint.metadata.Metadata`
    Metadata,
    /// `torch.distributed.checkpoint.metadata.TensorStorageMetadata`
    TensorStorageMetadata,
    /// `torch.distributed.checkpoint.metadata.BytesStorageMetadata`
    BytesStorageMetadata,
    /// `torch.distributed.checkpoint.metadata.ChunkStorageMetadata`
    ChunkStorageMetadata,
    /// `TensorProperties`, which has lived in two modules.
    TensorProperties,
    /// The enum of memory formats, which has lived in two modules.
    MemoryFormat,
    /// `torch.distributed.checkpoint.metadata.MetadataIndex`
    MetadataIndex,
    /// `torch.distributed.checkpoint.metadata.StorageMeta`
    StorageMeta,
    /// `torch.distributed.checkpoint.filesystem._StorageInfo`
    StorageInfo,
    /// `torch.serialization._get_layout`
    GetLayout,
    /// A path class of `pathlib`.
    Path,
}

impl Global {
    /// The global `module.name`, where a pickle of `place` may hold it.
    ///
    /// # Errors
    /// [`Class::ForbiddenGlobal`]
    pub(super) fn find(module: &str, name: &str, place: Place) -> Result<Self> {
        let found = match place {
            Place::Metadata => in_both(module, name).or_else(|| in_metadata(module, name)),
            Place::Tensors => in_both(module, name).or_else(|| in_tensors(module, name)),
        };
        found.ok_or_else(|| refused(module, name))
    }

    /// Whether REDUCE may meet it.
    pub(super) const fn is_function(self) -> bool {
        matches!(
            self,
            Self::Device
                | Self::Encode
                | Self::RebuildTensorV2
                | Self::RebuildTensorV3
                | Self::RebuildParameter
                | Self::RebuildParameterWithState
                | Self::RebuildFromType
                | Self::OtherTensor(_)
                | Self::Set
                | Self::ByteArray
                | Self::Complex
                | Self::MemoryFormat
                | Self::GetLayout
                | Self::Path
        )
    }

    /// Whether NEWOBJ and BUILD may meet it.
    pub(super) const fn is_class(self) -> bool {
        matches!(
            self,
            Self::Metadata
                | Self::TensorStorageMetadata
                | Self::BytesStorageMetadata
                | Self::ChunkStorageMetadata
                | Self::TensorProperties
                | Self::MetadataIndex
                | Self::StorageMeta
                | Self::StorageInfo
        )
    }
}

fn in_both(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch", "Size") => Global::Size,
        ("torch.serialization", "_get_layout") => Global::GetLayout,
        ("pathlib" | "pathlib._local", "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath") => {
            Global::Path
        }
        ("torch", _) => return dtype(name),
        _ => return None,
    })
}

fn in_metadata(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("torch.distributed.checkpoint.metadata", _) => return metadata_class(name),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties") => Global::TensorProperties,
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING") => Global::MemoryFormat,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo") => Global::StorageInfo,
        _ => return None,
    })
}

fn metadata_class(name: &str) -> Option<Global> {
    Some(match name {
        "Metadata" => Global::Metadata,
        "TensorStorageMetadata" => Global::TensorStorageMetadata,
        "BytesStorageMetadata" => Global::BytesStorageMetadata,
        "ChunkStorageMetadata" => Global::ChunkStorageMetadata,
        "TensorProperties" => Global::TensorProperties,
        "_MEM_FORMAT_ENCODING" => Global::MemoryFormat,
        "MetadataIndex" => Global::MetadataIndex,
        "StorageMeta" => Global::StorageMeta,
        _ => return None,
    })
}

fn in_tensors(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensorV2,
        ("torch._utils", "_rebuild_tensor_v3") => Global::RebuildTensorV3,
        ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
        ("torch._utils", "_rebuild_parameter_with_state") => Global::RebuildParameterWithState,
        ("torch._tensor", "_rebuild_from_type_v2") => Global::RebuildFromType,
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer") => Global::TensorClass,
        ("torch._utils" | "torch._tensor", _) => return other_tensor(name),
        ("torch.storage", "UntypedStorage") => Global::UntypedStorage,
        ("torch", "device") => Global::Device,
        (
            "torch",
            "per_tensor_affine"
            | "per_channel_affine"
            | "per_tensor_symmetric"
            | "per_channel_symmetric"
            | "per_channel_affine_float_qparams"
            | "strided"
            | "contiguous_format"
            | "channels_last"
            | "channels_last_3d"
            | "preserve_format",
        ) => Global::Constant,
        ("torch", _) => return storage(name),
        // Python 3 writes its builtins for Python 2 before protocol 3.
        ("builtins" | "__builtin__", "set" | "frozenset") => Global::Set,
        ("builtins" | "__builtin__", "complex") => Global::Complex,
        ("builtins" | "__builtin__", "bytearray") => Global::ByteArray,
        ("builtins" | "__builtin__", "dict" | "list" | "int" | "float" | "str") => Global::Builtin,
        ("_codecs", "encode") => Global::Encode,
        ("collections", "Counter") => Global::Counter,
        ("collections", "defaultdict") => Global::DefaultDict,
        ("collections", "deque") => Global::Deque,
        _ => return None,
    })
}

fn other_tensor(name: &str) -> Option<Global> {
    const OTHERS: &[&str] = &[
        "_rebuild_sparse_tensor",
        "_rebuild_sparse_csr_tensor",
        "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_nested_tensor",
        "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_xla_tensor",
        "_rebuild_wrapper_subclass",
        "_rebuild_from_type",
    ];
    OTHERS.iter().find(|&&other| other == name).map(|other| Global::OtherTensor(other))
}

fn dtype(name: &str) -> Option<Global> {
    const OTHERS: &[&str] = &[
        "complex32",
        "complex64",
        "complex128",
        "qint8",
        "qint32",
        "quint8",
        "quint4x2",
        "quint2x4",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ];
    Some(Global::Dtype(match name {
        "float64" => Dtype::F64,
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        "float8_e4m3fn" => Dtype::F8E4m3,
        "float8_e5m2" => Dtype::F8E5m2,
        "int64" => Dtype::I64,
        "int32" => Dtype::I32,
        "int16" => Dtype::I16,
        "int8" => Dtype::I8,
        "uint64" => Dtype::U64,
        "uint32" => Dtype::U32,
        "uint16" => Dtype::U16,
        "uint8" => Dtype::U8,
        "bool" => Dtype::Bool,
        _ => return OTHERS.iter().find(|&&other| other == name).map(|other| Global::OtherDtype(other)),
    }))
}

fn storage(name: &str) -> Option<Global> {
    const OTHERS: &[&str] = &[
        "ComplexFloatStorage",
        "ComplexDoubleStorage",
        "QInt8Storage",
        "QInt32Storage",
        "QUInt8Storage",
        "QUInt4x2Storage",
        "QUInt2x4Storage",
    ];
    Some(Global::Storage(match name {
        "DoubleStorage" => Dtype::F64,
        "FloatStorage" => Dtype::F32,
        "HalfStorage" => Dtype::F16,
        "BFloat16Storage" => Dtype::Bf16,
        "LongStorage" => Dtype::I64,
        "IntStorage" => Dtype::I32,
        "ShortStorage" => Dtype::I16,
        "CharStorage" => Dtype::I8,
        "ByteStorage" => Dtype::U8,
        "BoolStorage" => Dtype::Bool,
        _ => return OTHERS.iter().find(|&&other| other == name).map(|other| Global::OtherStorage(other)),
    }))
}

/// Why `module.name` is refused.
fn refused(module: &str, name: &str) -> ReadError {
    let full = shorten(&format!("{module}.{name}"));
    let why = format!(
        "the pickle names {full:?}, which is not on the allow list, so it was refused and nothing of it was run; \
         save the weights alone: torch.save(model.state_dict(), ...), or a dict of tensors, numbers and texts"
    );
    ReadError::new(Class::ForbiddenGlobal, why)
}
