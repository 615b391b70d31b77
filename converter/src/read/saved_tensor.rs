//! How `data.pkl` describes a tensor: type, shape, strides, and the storage that it views.
//!
//! Torch pickles a tensor as a call, whose arguments say everything (torch 2.2 to 2.14, `torch/_utils.py`):
//!
//! ```text
//! _rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks[, metadata])         typed storage
//! _rebuild_tensor_v3(storage, offset, sizes, strides, requires_grad, hooks, dtype[, metadata])  untyped storage
//! _rebuild_parameter(tensor, requires_grad, hooks)
//! _rebuild_from_type_v2(one of the first two, torch.Tensor, (its arguments), attributes)     attributes are dropped
//! storage = ('storage', class, key, location, number of elements; of bytes where it is untyped)
//! ```
//!
//! Offset, sizes and strides count elements. Several tensors may view one storage, whose bytes lie in the archive's
//! entry `data/KEY`.

use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::limits;

use super::pickle::{Global, Pickle, Tuple, Value};
use crate::checkpoint::{Record, Strided};
use crate::error::{Class, ReadError, Result};

/// What every refusal of a kind of tensor ends with.
const OR_DROP: &str = "before it is saved, or drop it by a rule of the policy";

/// What is left to do where a file does not fit what it says of itself.
const COPY_AGAIN: &str = "the file is damaged; copy it again, or save it anew";

/// A tensor, as its pickle has it. All counts are in elements.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SavedTensor<'p> {
    pub(super) dtype: Dtype,
    pub(super) sizes: Vec<u64>,
    strides: Vec<u64>,
    /// Where in the storage the first element lies.
    offset: u64,
    /// The storage's entry, below `data/`.
    pub(super) key: &'p str,
    /// The number of elements of the storage.
    pub(super) capacity: u64,
}

impl<'p> SavedTensor<'p> {
    /// The tensor that `value` is, or that the parameter wraps.
    ///
    /// # Errors
    /// [`Class::BadDtype`] and [`Class::UnsupportedObject`] for tensors that are no plain dense ones of a supported
    /// type; other classes where it makes no sense.
    pub(super) fn of(pickle: &'p Pickle<'p>, value: Value<'p>) -> Result<Self> {
        let parameter = pickle
            .made(value, Global::RebuildParameter)
            .or_else(|| pickle.made(value, Global::RebuildParameterWithState));
        let value = match parameter.map(|parameter| pickle.tuple(parameter.arguments)) {
            Some([tensor, Value::Bool(_), ..]) => *tensor,
            Some(_) => return Err(not_plain("a parameter without a tensor", "make it a plain tensor")),
            None => value,
        };
        let (function, arguments) = function_of(pickle, value)?;
        match function {
            Some(Global::RebuildTensorV2) => Self::version_2(pickle, arguments),
            Some(Global::RebuildTensorV3) => Self::version_3(pickle, arguments),
            Some(Global::OtherTensor(name)) => Err(other_tensor(name)),
            Some(Global::Set) => Err(not_plain("a set with tensors, which has no order", "save a list")),
            _ => Err(not_plain("something that is not one tensor", "save a tensor there")),
        }
    }

    fn version_2(pickle: &'p Pickle<'p>, arguments: &'p [Value<'p>]) -> Result<Self> {
        let Some(([storage, offset, sizes, strides, _, _], rest)) = arguments.split_first_chunk() else {
            return Err(too_few());
        };
        check_plain(pickle, rest)?;
        let (class, key, capacity) = storage_of(pickle, *storage)?;
        let dtype = match class {
            Global::Storage(dtype) => dtype,
            other => return Err(unsupported_dtype(other)),
        };
        Self::new(pickle, dtype, [*offset, *sizes, *strides], key, capacity)
    }

    fn version_3(pickle: &'p Pickle<'p>, arguments: &'p [Value<'p>]) -> Result<Self> {
        let Some(([storage, offset, sizes, strides, _, _, dtype], rest)) = arguments.split_first_chunk()
        else {
            return Err(too_few());
        };
        check_plain(pickle, rest)?;
        let (class, key, bytes) = storage_of(pickle, *storage)?;
        let dtype = match (class, *dtype) {
            (Global::UntypedStorage, Value::Global(Global::Dtype(dtype))) => dtype,
            (_, Value::Global(other @ Global::OtherDtype(_))) => return Err(unsupported_dtype(other)),
            _ => return Err(not_plain("a tensor whose type makes no sense", "save it anew")),
        };
        if !bytes.is_multiple_of(dtype.size()) {
            let why = format!("a storage of {bytes} bytes is no whole number of {}", dtype.as_str());
            return Err(ReadError::new(Class::StorageSizeMismatch, why));
        }
        Self::new(pickle, dtype, [*offset, *sizes, *strides], key, bytes / dtype.size())
    }

    fn new(
        pickle: &Pickle<'_>,
        dtype: Dtype,
        [offset, sizes, strides]: [Value<'_>; 3],
        key: &'p str,
        capacity: u64,
    ) -> Result<Self> {
        let (Value::Int(offset), Value::Tuple(sizes), Value::Tuple(strides)) = (offset, sizes, strides)
        else {
            return Err(not_plain("a tensor without offset, sizes or strides", "save it anew"));
        };
        let offset = u64::try_from(offset).map_err(|_| out_of_bounds("it starts before its storage"))?;
        let (sizes, strides) = (counts(pickle, sizes)?, counts(pickle, strides)?);
        if sizes.len() != strides.len() {
            let what = format!("a tensor of {} dimensions with {} strides", sizes.len(), strides.len());
            return Err(not_plain(&what, "save it anew"));
        }
        if element_count(&sizes, dtype).is_none() {
            let why = format!("the size of {} {sizes:?} does not fit 64 bits", dtype.as_str());
            return Err(ReadError::new(Class::ShapeOverflow, why));
        }
        Ok(Self { dtype, sizes, strides, offset, key, capacity })
    }

    /// The number of elements; it fits 64 bits, and so do their bytes.
    fn elements(&self) -> u64 {
        element_count(&self.sizes, self.dtype).unwrap_or(0)
    }

    /// How many bytes the tensor has, dense.
    pub(super) fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// Whether it has more elements than its storage: some of them are the same ones.
    pub(super) fn is_expanded(&self) -> bool {
        self.elements() > self.capacity
    }

    /// Checks that the storage has the `stored` bytes that the archive has of it, and that the tensor stays in it.
    ///
    /// # Errors
    /// [`Class::StorageSizeMismatch`], [`Class::StorageOutOfBounds`].
    pub(super) fn check_storage(&self, stored: u64) -> Result<()> {
        if self.capacity.checked_mul(self.dtype.size()) != Some(stored) {
            let (capacity, dtype) = (self.capacity, self.dtype.as_str());
            let why = format!("a storage of {capacity} {dtype} lies in {stored} bytes: {COPY_AGAIN}");
            return Err(ReadError::new(Class::StorageSizeMismatch, why));
        }
        // An empty tensor touches nothing, wherever it says it starts.
        if self.sizes.contains(&0) {
            return Ok(());
        }
        let reach = self.sizes.iter().zip(&self.strides).try_fold(self.offset, |reach, (size, stride)| {
            reach.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)
        });
        if reach.is_some_and(|last| last < self.capacity) {
            return Ok(());
        }
        let why = format!(
            "{:?} elements with strides {:?} from element {} on reach outside a storage of {}: {COPY_AGAIN}",
            self.sizes, self.strides, self.offset, self.capacity
        );
        Err(out_of_bounds(why))
    }

    /// Where the elements lie, the storage being `record` of the file. [`SavedTensor::check_storage`] comes first.
    ///
    /// # Errors
    /// [`Class::StorageOutOfBounds`] where a byte's place does not fit 64 bits.
    pub(super) fn within(&self, record: Record, has_checksums: bool) -> Result<Strided> {
        let offset = if self.sizes.contains(&0) { 0 } else { self.offset };
        let first = offset.checked_mul(self.dtype.size()).and_then(|first| record.offset.checked_add(first));
        let offset = first.ok_or_else(|| out_of_bounds("its first byte does not fit 64 bits"))?;
        let record = (has_checksums && record.length > 0).then_some(record);
        Ok(Strided { offset, strides: self.strides.clone(), record })
    }
}

/// The function that was to make `value`, and its arguments: behind `_rebuild_from_type_v2` those of the tensor itself.
fn function_of<'p>(pickle: &'p Pickle<'p>, value: Value<'p>) -> Result<(Option<Global>, &'p [Value<'p>])> {
    let Some(made) = pickle.object(value) else { return Ok((None, &[])) };
    let arguments = pickle.tuple(made.arguments);
    match (made.by, arguments) {
        (
            Global::RebuildFromType,
            &[Value::Global(function), Value::Global(Global::TensorClass), Value::Tuple(arguments), _],
        ) => Ok((Some(function), pickle.tuple(arguments))),
        (Global::RebuildFromType, _) => Err(other_tensor("_rebuild_from_type_v2")),
        (by, _) => Ok((Some(by), arguments)),
    }
}

/// The class, key and size of the storage that a persistent id `('storage', class, key, location, size)` names.
fn storage_of<'p>(pickle: &'p Pickle<'p>, value: Value<'p>) -> Result<(Global, &'p str, u64)> {
    let Value::PersistentId(id) = value else {
        return Err(not_plain("a tensor without a storage", "save it anew"));
    };
    let &[
        Value::Text("storage"),
        Value::Global(class),
        Value::Text(key),
        Value::Text(location),
        Value::Int(size),
    ] = pickle.tuple(id)
    else {
        return Err(not_plain("a storage that is named in an unknown way", "save it anew"));
    };
    if location == "meta" {
        return Err(other_tensor("_rebuild_meta_tensor_no_storage"));
    }
    let size = u64::try_from(size).map_err(|_| {
        ReadError::new(Class::StorageSizeMismatch, format!("a storage has a negative size, {size}"))
    })?;
    Ok((class, key, size))
}

/// Refuses tensors whose metadata changes what their bytes mean (conjugated, negated).
fn check_plain(pickle: &Pickle<'_>, rest: &[Value<'_>]) -> Result<()> {
    match rest {
        [] | [Value::None] => Ok(()),
        [Value::Dict(dict)] if pickle.dict(*dict).is_empty() => Ok(()),
        _ => {
            let what = "a tensor with metadata of its own (conjugated or negated lazily?)";
            Err(not_plain(what, "call .resolve_conj() and .resolve_neg()"))
        }
    }
}

fn counts(pickle: &Pickle<'_>, tuple: Tuple) -> Result<Vec<u64>> {
    let values = pickle.tuple(tuple);
    if values.len() > limits::DIMENSIONS {
        let why = format!("a tensor of {} dimensions; the most are {}", values.len(), limits::DIMENSIONS);
        return Err(ReadError::new(Class::LimitExceeded, why));
    }
    let counts = values.iter().map(|value| match value {
        Value::Int(count) => u64::try_from(*count).map_err(|_| out_of_bounds("a size or stride is negative")),
        _ => Err(not_plain("a tensor whose sizes or strides are no integers", "save it anew")),
    });
    counts.collect()
}

pub(super) fn unsupported_dtype(global: Global) -> ReadError {
    let (Global::OtherDtype(name) | Global::OtherStorage(name)) = global else {
        return ReadError::new(Class::BadDtype, "its storage has no supported element type");
    };
    let way_out = if name.to_ascii_lowercase().contains("complex") {
        "call torch.view_as_real(...)"
    } else if name.to_ascii_lowercase().starts_with('q') {
        "call .dequantize()"
    } else {
        "cast it"
    };
    ReadError::new(Class::BadDtype, format!("{name} is not a supported element type; {way_out} {OR_DROP}"))
}

/// A kind of tensor that torch writes by a function of its own.
fn other_tensor(name: &str) -> ReadError {
    let (what, way_out) = match name {
        "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor" => ("a sparse tensor", "call .to_dense()"),
        "_rebuild_qtensor" => ("a quantized tensor", "call .dequantize()"),
        "_rebuild_meta_tensor_no_storage" => {
            ("a tensor on the meta device, which has no elements", "give it elements")
        }
        "_rebuild_nested_tensor" => ("a nested tensor", "call .unbind() or .to_padded_tensor(...)"),
        _ => ("a tensor of another device or of a class of its own", "make it a plain tensor on the CPU"),
    };
    not_plain(&format!("{what} ({name})"), way_out)
}

fn too_few() -> ReadError {
    not_plain("a tensor with too few arguments", "save it anew")
}

fn not_plain(what: &str, way_out: &str) -> ReadError {
    let why = format!("it is {what}; a plain dense tensor was expected: {way_out} {OR_DROP}");
    ReadError::new(Class::UnsupportedObject, why)
}

fn out_of_bounds(why: impl Into<String>) -> ReadError {
    ReadError::new(Class::StorageOutOfBounds, why)
}
