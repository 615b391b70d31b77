//! One item of a distributed checkpoint: a `torch.save` archive of one tensor, somewhere in a `.distcp` file.
//!
//! Only the archive's framing is read: the end records and the central directory, `data.pkl` (which says type,
//! shape, strides and storage), `byteorder`, and the local header of the storage's entry, which says where its bytes
//! start. The bytes themselves, perhaps gigabytes, are left to whoever needs them. An item starts at any byte of its
//! file, so the storage is not aligned there. Layout and rules are those of torch 2.2 to 2.14.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;

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
        Ok(Strided { offset, strides: saved.strides, record: None })
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
        if sizes.contains(&0) {
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
        // Tensors are saved with storages of their own size. One that is larger than what is stored (expanded from a
        // few elements) would let a small file stand for any amount of data.
        let elements = sizes.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        if elements.is_none_or(|elements| elements > self.capacity) {
            let why = format!("{sizes:?} elements are declared, but {} are stored", self.capacity);
            return Err(ReadError::new(Class::StorageSizeMismatch, why));
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
    let values = pickle.tuple(tuple);
    if values.len() > limits::DIMENSIONS {
        let why = format!("a tensor of {} dimensions; the most are {}", values.len(), limits::DIMENSIONS);
        return Err(ReadError::new(Class::LimitExceeded, why));
    }
    let counts = values.iter().map(|value| match value {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::zip::tests::archive;
    use super::*;
    use crate::source::Source;

    /// Writes `item` between other bytes, and locates its tensor.
    fn locate_in(item: &[u8], length: u64, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("__0_0.distcp"), [b"abc", item, b"behind"].concat()).unwrap();
        let source = Source::open(folder.path()).unwrap();
        locate(&source.file("__0_0.distcp").unwrap(), 3, length, dtype, sizes)
    }

    fn int(value: i64) -> Vec<u8> {
        [&b"\x8a\x08"[..], &value.to_le_bytes()].concat()
    }

    fn tuple(values: &[i64]) -> Vec<u8> {
        let values: Vec<u8> = values.iter().flat_map(|&value| int(value)).collect();
        [b"(", &values[..], b"t"].concat()
    }

    /// The pickle of a tensor, version 2: `storage` elements of a class, and offset, sizes and strides.
    fn pickled(class: &str, storage: i64, offset: i64, sizes: &[i64], strides: &[i64]) -> Vec<u8> {
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n",
            class.as_bytes(),
            b"\nX\x01\0\0\x000X\x03\0\0\0cpu",
            &int(storage),
            b"tQ",
            &int(offset),
            &tuple(sizes),
            &tuple(strides),
            b"\x89ccollections\nOrderedDict\n)RtR.",
        ]
        .concat()
    }

    fn item(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
        archive(&[("a/data.pkl", pickle), ("a/byteorder", b"little"), ("a/data/0", storage)])
    }

    fn located(pickle: &[u8], storage: usize, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
        let item = item(pickle, &vec![7; storage]);
        locate_in(&item, item.len() as u64, dtype, sizes)
    }

    fn class(pickle: &[u8], storage: usize, sizes: &[u64]) -> Class {
        located(pickle, storage, Dtype::F32, sizes).unwrap_err().class()
    }

    fn replaced(pickle: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
        let at = pickle.windows(from.len()).position(|window| window == from).unwrap();
        [&pickle[..at], to, &pickle[at + from.len()..]].concat()
    }

    #[test]
    fn a_view_is_found_with_offset_and_strides() {
        let pickle = pickled("FloatStorage", 12, 2, &[2, 3], &[1, 2]);
        let storage: Vec<u8> = (100..148).collect();
        let item = item(&pickle, &storage);
        let found = locate_in(&item, item.len() as u64, Dtype::F32, &[2, 3]).unwrap();
        assert_eq!(found.strides, [1, 2]);
        let first = usize::try_from(found.offset).unwrap() - 3;
        assert_eq!(item[first..first + 4], [108, 109, 110, 111]);
    }

    #[test]
    fn scalars_and_empty_tensors_are_found() {
        let scalar = located(&pickled("LongStorage", 1, 0, &[], &[]), 8, Dtype::I64, &[]).unwrap();
        assert!(scalar.strides.is_empty());
        let empty = pickled("FloatStorage", 0, 9, &[0, i64::MAX], &[i64::MAX, i64::MAX]);
        assert!(located(&empty, 0, Dtype::F32, &[0, i64::MAX.cast_unsigned()]).is_ok());
    }

    #[test]
    fn version_3_names_its_dtype_and_counts_bytes() {
        let version_2 = pickled("X", 6, 0, &[3], &[1]);
        let untyped = replaced(&version_2, b"ctorch\nX\n", b"ctorch.storage\nUntypedStorage\n");
        let untyped = replaced(&untyped, b"_v2", b"_v3");
        let version_3 = |dtype: &str| {
            let end = format!("OrderedDict\n)Rctorch\n{dtype}\nt");
            replaced(&untyped, b"OrderedDict\n)Rt", end.as_bytes())
        };
        assert!(located(&version_3("uint16"), 6, Dtype::U16, &[3]).is_ok());
        let error = located(&version_3("uint32"), 6, Dtype::U32, &[3]).unwrap_err();
        assert_eq!(error.class(), Class::StorageSizeMismatch);
        assert_eq!(class(&version_3("complex64"), 6, &[3]), Class::BadDtype);
        assert_eq!(class(&untyped, 6, &[3]), Class::UnsupportedObject);
    }

    #[test]
    fn a_parameter_is_its_tensor() {
        let tensor = pickled("FloatStorage", 4, 0, &[4], &[1]);
        let inner = tensor[2..].strip_suffix(b".").unwrap();
        let ends = [&b"\x80\x02ctorch._utils\n_rebuild_parameter\n("[..], b"\x88}tR."];
        let parameter = [ends[0], inner, ends[1]].concat();
        assert!(located(&parameter, 16, Dtype::F32, &[4]).is_ok());
    }

    #[test]
    fn what_the_metadata_does_not_declare_is_a_mismatch() {
        let pickle = pickled("FloatStorage", 4, 0, &[2, 2], &[2, 1]);
        for (dtype, sizes) in [(Dtype::I32, &[2, 2][..]), (Dtype::F32, &[4]), (Dtype::F32, &[2, 1])] {
            let error = located(&pickle, 16, dtype, sizes).unwrap_err();
            assert_eq!(error.class(), Class::DcpChunkMismatch);
            assert_eq!(error.file(), Some("__0_0.distcp"));
        }
    }

    #[test]
    fn a_tensor_that_is_larger_than_what_is_stored_is_refused() {
        for (sizes, strides) in [([1 << 40, 1], [0, 1]), ([3, 2], [1, 1])] {
            let pickle = pickled("FloatStorage", 4, 0, &sizes, &strides);
            let sizes = sizes.map(i64::cast_unsigned);
            assert_eq!(class(&pickle, 16, &sizes), Class::StorageSizeMismatch);
        }
    }

    #[test]
    fn views_that_leave_their_storage_are_refused() {
        for (offset, sizes, strides) in [
            (1, [2, 2], [2, 1]),
            (0, [2, 2], [3, 1]),
            (-1, [2, 2], [2, 1]),
            (0, [2, 2], [-2, 1]),
            (i64::MAX, [2, 2], [i64::MAX, i64::MAX]),
            (0, [i64::MAX, 2], [i64::MAX, 1]),
        ] {
            let pickle = pickled("FloatStorage", 4, offset, &sizes, &strides);
            let sizes = sizes.map(i64::cast_unsigned);
            assert_eq!(class(&pickle, 16, &sizes), Class::StorageOutOfBounds, "{offset} {strides:?}");
        }
    }

    #[test]
    fn storages_have_exactly_their_bytes() {
        for (count, bytes) in [(4, 15), (4, 17), (5, 16), (-1, 16), (i64::MAX, 16)] {
            let pickle = pickled("FloatStorage", count, 0, &[4], &[1]);
            assert_eq!(class(&pickle, bytes, &[4]), Class::StorageSizeMismatch, "{count} {bytes}");
        }
    }

    #[test]
    fn other_objects_are_refused() {
        let tensor = pickled("FloatStorage", 4, 0, &[4], &[1]);
        for (from, to) in [
            (&b"X\x03\0\0\0cpu"[..], &b"X\x04\0\0\0meta"[..]),
            (b"OrderedDict\n)Rt", b"OrderedDict\n)R}X\x03\0\0\0neg\x88st"),
            (b"X\x07\0\0\0storage", b"X\x07\0\0\0another"),
            (b"tR.", b"tR\x85."),
        ] {
            assert_eq!(class(&replaced(&tensor, from, to), 16, &[4]), Class::UnsupportedObject, "{to:?}");
        }
        let complex = pickled("ComplexFloatStorage", 4, 0, &[4], &[1]);
        assert_eq!(class(&complex, 32, &[4]), Class::BadDtype);
        let ranks = pickled("FloatStorage", 4, 0, &[4], &[1, 1]);
        assert_eq!(class(&ranks, 16, &[4]), Class::UnsupportedObject);
        assert_eq!(class(b"\x80\x02cos\nsystem\n.", 16, &[4]), Class::ForbiddenGlobal);
    }

    #[test]
    fn big_endian_items_are_refused() {
        let pickle = pickled("FloatStorage", 4, 0, &[4], &[1]);
        for order in [&b"big"[..], b"middle"] {
            let item = archive(&[("a/data.pkl", &pickle), ("a/byteorder", order), ("a/data/0", &[0; 16])]);
            let error = locate_in(&item, item.len() as u64, Dtype::F32, &[4]).unwrap_err();
            assert_eq!(error.class(), Class::BadByteorder);
        }
        let old = archive(&[("a/data.pkl", &pickle), ("a/data/0", &[0; 16])]);
        assert!(locate_in(&old, old.len() as u64, Dtype::F32, &[4]).is_ok());
    }

    #[test]
    fn a_wrong_length_is_seen() {
        let item = item(&pickled("FloatStorage", 4, 0, &[4], &[1]), &[0; 16]);
        let length = item.len() as u64;
        for (length, expected) in [
            (0, Class::ZipMalformed),
            (length - 1, Class::ZipMalformed),
            (length + 1, Class::ZipMalformed),
            (length + 7, Class::Truncated),
            (u64::MAX, Class::Truncated),
        ] {
            let error = locate_in(&item, length, Dtype::F32, &[4]).unwrap_err();
            assert_eq!(error.class(), expected, "{length}");
        }
    }

    proptest! {
        #[test]
        fn altered_items_never_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let real = include_bytes!("../../../tests/data/nasty/cases/dcp_valid_two_ranks/__0_0.distcp");
            let mut item = real[..1002].to_vec();
            for (at, byte) in edits {
                let at = at.index(item.len());
                item[at] = byte;
            }
            if let Ok(found) = locate_in(&item, 1002, Dtype::F32, &[4, 4]) {
                let reach: u64 = found.strides.iter().map(|stride| 3 * stride).sum();
                prop_assert!(found.offset + (reach + 1) * 4 <= 3 + 1002);
            }
        }
    }
}
