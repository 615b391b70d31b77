//! One item of a distributed checkpoint: a `torch.save` archive of one tensor, somewhere in a `.distcp` file.
//!
//! Only the archive's framing is read: the end records and the central directory, `data.pkl` (which says type,
//! shape, strides and storage), `byteorder`, and the local header of the storage's entry, which says where its bytes
//! start. The bytes themselves, perhaps gigabytes, are left to whoever needs them. An item starts at any byte of its
//! file, so the storage is not aligned there. Layout and rules are those of torch 2.2 to 2.14.

use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::error::shorten;

use super::pickle::{self, Global, Pickle, Place, Tuple, Value};
use super::zip;
use crate::checkpoint::Strided;
use crate::error::{Class, ReadError, Result};
use crate::source::SourceFile;

/// Largest `data.pkl` of one tensor, in bytes; torch writes some 160.
const PICKLE_BYTES: u64 = 64 << 10;
/// Longest `byteorder` entry, in bytes.
const BYTEORDER_BYTES: u64 = 16;

/// Finds the elements of the tensor that the archive in `offset..offset + length` of `file` holds, which has to be of
/// `dtype` and of shape `sizes`.
///
/// # Errors
/// [`Class::Truncated`] where the file ends before the item does, [`Class::DcpChunkMismatch`] for another dtype or
/// shape, and a class that says what is wrong with the archive, its pickle or its storage.
pub fn locate(file: &SourceFile, offset: u64, length: u64, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
    let item = Item { file, offset, length };
    item.locate(dtype, sizes).map_err(|error| error.in_file(file.name()))
}

/// An archive within a file.
struct Item<'f> {
    file: &'f SourceFile,
    offset: u64,
    length: u64,
}

impl Item<'_> {
    fn locate(&self, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
        if self.offset.checked_add(self.length).is_none_or(|end| end > self.file.len()) {
            let (offset, length, end) = (self.offset, self.length, self.file.len());
            let why = format!("an item of {length} bytes at byte {offset}, but the file ends at byte {end}");
            return Err(ReadError::new(Class::Truncated, why));
        }
        let tail_length = self.length.min(zip::TAIL);
        let tail = self.read(self.length.saturating_sub(tail_length), tail_length)?;
        let place = zip::find_directory(&tail, self.length)?;
        let directory = self.read(place.bytes.start, place.bytes.end.saturating_sub(place.bytes.start))?;
        let directory = zip::Directory::parse(&directory, &place)?;

        let prefix = directory.prefix()?;
        if let Some(entry) = directory.find(&format!("{prefix}byteorder")) {
            check_byteorder(&self.data(&entry, BYTEORDER_BYTES)?)?;
        }
        let pickle = self.data(&directory.get(&format!("{prefix}data.pkl"))?, PICKLE_BYTES)?;
        let saved = SavedTensor::parse(&pickle)?;
        saved.check_declared(dtype, sizes)?;
        let storage = directory.get(&format!("{prefix}data/{}", saved.key))?;
        let first = saved.first_byte(dtype, sizes, storage.length)?;
        let offset = self.data_start(&storage)?.checked_add(first).and_then(|at| at.checked_add(self.offset));
        let offset = offset.ok_or_else(|| out_of_bounds("its first byte does not fit 64 bits"))?;
        Ok(Strided { offset, strides: saved.strides })
    }

    /// The `length` bytes from byte `at` of the archive on.
    fn read(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        let start = self.offset.checked_add(at);
        let within = at.checked_add(length).is_some_and(|end| end <= self.length);
        let start = start.filter(|_| within).ok_or_else(|| {
            let why = format!("{length} bytes at byte {at} of an archive of {} bytes", self.length);
            ReadError::new(Class::ZipMalformed, why)
        })?;
        self.file.read_vec_at(start, length)
    }

    fn data_start(&self, entry: &zip::Entry<'_>) -> Result<u64> {
        let local = (zip::LOCAL as u64).saturating_add(entry.name.len() as u64);
        zip::data_start(entry, &self.read(entry.header, local)?)
    }

    /// An entry's data, of at most `most` bytes.
    fn data(&self, entry: &zip::Entry<'_>, most: u64) -> Result<Vec<u8>> {
        if entry.length > most {
            let why = format!("{:?} has {} bytes; {most} are the most", shorten(entry.name), entry.length);
            return Err(ReadError::new(Class::LimitExceeded, why));
        }
        self.read(self.data_start(entry)?, entry.length)
    }
}

fn check_byteorder(order: &[u8]) -> Result<()> {
    let why = match order {
        b"little" => return Ok(()),
        b"big" => {
            "it was saved on a big-endian machine, whose numbers are not swapped; save it on a little-endian one"
        }
        _ => "its byte order is neither little nor big",
    };
    Err(ReadError::new(Class::BadByteorder, why))
}

/// What `data.pkl` says of its one tensor. All counts are in elements.
#[derive(Debug, PartialEq, Eq)]
struct SavedTensor {
    dtype: Dtype,
    sizes: Vec<u64>,
    strides: Vec<u64>,
    /// Where in the storage the first element lies.
    offset: u64,
    /// The storage's entry, below `data/`.
    key: String,
    /// The number of elements of the storage.
    capacity: u64,
}

impl SavedTensor {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let pickle = pickle::parse(bytes, Place::Tensors)?;
        Self::of(&pickle, pickle.root())
    }

    /// A tensor, or the one that a parameter wraps.
    fn of(pickle: &Pickle<'_>, value: Value<'_>) -> Result<Self> {
        let parameter = pickle
            .made(value, Global::RebuildParameter)
            .or_else(|| pickle.made(value, Global::RebuildParameterWithState));
        let value = match parameter.map(|parameter| pickle.tuple(parameter.arguments)) {
            Some([tensor, Value::Bool(_), ..]) => *tensor,
            Some(_) => return Err(not_a_tensor("a parameter without a tensor")),
            None => value,
        };
        if let Some(made) = pickle.made(value, Global::RebuildTensorV2) {
            return Self::version_2(pickle, pickle.tuple(made.arguments));
        }
        if let Some(made) = pickle.made(value, Global::RebuildTensorV3) {
            return Self::version_3(pickle, pickle.tuple(made.arguments));
        }
        Err(not_a_tensor("not one tensor"))
    }

    /// `_rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks[, metadata])`, where the storage's
    /// class says the dtype and its last number counts elements.
    fn version_2(pickle: &Pickle<'_>, arguments: &[Value<'_>]) -> Result<Self> {
        let Some(([storage, offset, sizes, strides, _, _], rest)) = arguments.split_first_chunk() else {
            return Err(not_a_tensor("a tensor with too few arguments"));
        };
        check_plain(pickle, rest)?;
        let (class, key, capacity) = storage_of(pickle, *storage)?;
        let dtype = match class {
            Global::Storage(dtype) => dtype,
            other => return Err(unsupported_dtype(other)),
        };
        Self::new(pickle, dtype, [*offset, *sizes, *strides], key, capacity)
    }

    /// `_rebuild_tensor_v3(storage, offset, sizes, strides, requires_grad, hooks, dtype[, metadata])`, where the
    /// storage is untyped and its last number counts bytes.
    fn version_3(pickle: &Pickle<'_>, arguments: &[Value<'_>]) -> Result<Self> {
        let Some(([storage, offset, sizes, strides, _, _, dtype], rest)) = arguments.split_first_chunk()
        else {
            return Err(not_a_tensor("a tensor with too few arguments"));
        };
        check_plain(pickle, rest)?;
        let (class, key, bytes) = storage_of(pickle, *storage)?;
        let dtype = match (class, *dtype) {
            (Global::UntypedStorage, Value::Global(Global::Dtype(dtype))) => dtype,
            (_, Value::Global(other @ Global::OtherDtype(_))) => return Err(unsupported_dtype(other)),
            _ => return Err(not_a_tensor("a tensor whose type makes no sense")),
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
        key: &str,
        capacity: u64,
    ) -> Result<Self> {
        let (Value::Int(offset), Value::Tuple(sizes), Value::Tuple(strides)) = (offset, sizes, strides)
        else {
            return Err(not_a_tensor("a tensor without offset, sizes or strides"));
        };
        let offset = u64::try_from(offset).map_err(|_| out_of_bounds("it starts before its storage"))?;
        let (sizes, strides) = (counts(pickle, sizes)?, counts(pickle, strides)?);
        if sizes.len() != strides.len() {
            let why = format!("a tensor of {} dimensions with {} strides", sizes.len(), strides.len());
            return Err(not_a_tensor(&why));
        }
        Ok(Self { dtype, sizes, strides, offset, key: key.to_owned(), capacity })
    }

    /// Checks that the tensor is the one that `.metadata` declares here.
    fn check_declared(&self, dtype: Dtype, sizes: &[u64]) -> Result<()> {
        if (self.dtype, self.sizes.as_slice()) == (dtype, sizes) {
            return Ok(());
        }
        let why = format!(
            ".metadata declares a slice of {} {sizes:?}, but {} {:?} is stored; the files are not of one save",
            dtype.as_str(),
            self.dtype.as_str(),
            self.sizes
        );
        Err(ReadError::new(Class::DcpChunkMismatch, why))
    }

    /// The byte of the storage, of `stored` bytes, at which the first element lies, all others lying within it too.
    fn first_byte(&self, dtype: Dtype, sizes: &[u64], stored: u64) -> Result<u64> {
        if self.capacity.checked_mul(dtype.size()) != Some(stored) {
            let why = format!("a storage of {} {} lies in {stored} bytes", self.capacity, dtype.as_str());
            return Err(ReadError::new(Class::StorageSizeMismatch, why));
        }
        // An empty tensor touches nothing, wherever it says it starts.
        if element_count(sizes, dtype) == Some(0) {
            return Ok(0);
        }
        let reach = sizes.iter().zip(&self.strides).try_fold(self.offset, |reach, (size, stride)| {
            reach.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)
        });
        if reach.is_none_or(|last| last >= self.capacity) {
            let why = format!(
                "{sizes:?} elements with strides {:?} from element {} on reach outside a storage of {}",
                self.strides, self.offset, self.capacity
            );
            return Err(out_of_bounds(why));
        }
        self.offset
            .checked_mul(dtype.size())
            .ok_or_else(|| out_of_bounds("its first byte does not fit 64 bits"))
    }
}

/// The class, key and size of the storage that a persistent id `('storage', class, key, location, size)` names.
fn storage_of<'p>(pickle: &'p Pickle<'_>, value: Value<'p>) -> Result<(Global, &'p str, u64)> {
    let Value::PersistentId(id) = value else { return Err(not_a_tensor("a tensor without a storage")) };
    let &[
        Value::Text("storage"),
        Value::Global(class),
        Value::Text(key),
        Value::Text(location),
        Value::Int(size),
    ] = pickle.tuple(id)
    else {
        return Err(not_a_tensor("a storage that is named in an unknown way"));
    };
    if location == "meta" {
        return Err(not_a_tensor("a tensor on the meta device, which has no elements"));
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
        _ => Err(not_a_tensor("a tensor with metadata of its own (conjugated or negated lazily?)")),
    }
}

fn counts(pickle: &Pickle<'_>, tuple: Tuple) -> Result<Vec<u64>> {
    let values = pickle.tuple(tuple).iter();
    let counts = values.map(|value| match value {
        Value::Int(count) => u64::try_from(*count).map_err(|_| out_of_bounds("a size or stride is negative")),
        _ => Err(not_a_tensor("a tensor whose sizes or strides are no integers")),
    });
    counts.collect()
}

fn unsupported_dtype(global: Global) -> ReadError {
    let why = match global {
        Global::OtherDtype(name) | Global::OtherStorage(name) => {
            format!("{name} is not a supported element type")
        }
        _ => "its storage has no supported element type".to_owned(),
    };
    ReadError::new(Class::BadDtype, why)
}

fn not_a_tensor(what: &str) -> ReadError {
    ReadError::new(
        Class::UnsupportedObject,
        format!("the item holds {what}; a plain dense tensor was expected"),
    )
}

fn out_of_bounds(why: impl Into<String>) -> ReadError {
    ReadError::new(Class::StorageOutOfBounds, why)
}
