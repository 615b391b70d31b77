//! One item of a distributed checkpoint: a `torch.save` archive of one tensor, somewhere in a `.distcp` file.
//!
//! Only the archive's framing is read: the end records and the central directory, `data.pkl` (which says type,
//! shape, strides and storage), `byteorder`, and the local header of the storage's entry, which says where its bytes
//! start. The bytes themselves, perhaps gigabytes, are left to whoever needs them. An item starts at any byte of its
//! file, so the storage is not aligned there. Layout and rules are those of torch 2.2 to 2.14.

use std::sync::Arc;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::limits;

use super::archive::{Archive, wrong_checksum};
use super::detect;
use super::pickle::{self, Place};
use super::saved_tensor::SavedTensor;
use super::unpack::{Readable, Unpacked};
use super::zip;
use crate::checkpoint::{Record, Strided};
use crate::error::{Class, ReadError, Result};
use crate::source::SourceFile;

/// Largest `data.pkl` of one tensor, in bytes; torch writes some 160.
const PICKLE_BYTES: u64 = 64 << 10;
/// Items of at most so many bytes are read at once to find their records, which is six reads else.
const SMALL_BYTES: u64 = 16 << 10;
/// How much of an unpacked item is read at a time to check it, in bytes.
const STEP_BYTES: u64 = 128 << 10;

/// Finds the elements of the tensor that the archive in `offset..offset + length` of `file` holds, which has to be of
/// `dtype` and of shape `sizes`.
///
/// # Errors
/// [`Class::Truncated`] where the file ends before the item does, [`Class::DcpChunkMismatch`] for another dtype or
/// shape, and a class that says what is wrong with the archive, its pickle or its storage.
pub fn locate(file: &SourceFile, offset: u64, length: u64, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
    let in_file = offset.checked_add(length).is_some_and(|end| end <= file.len());
    if length > SMALL_BYTES || !in_file {
        return locate_in(&Readable::File(file), offset, length, dtype, sizes);
    }
    let item = Readable::Unpacked(Arc::new(Unpacked::read(file, offset, length)?));
    let found = locate_in(&item, 0, length, dtype, sizes)?;
    let in_file = |at: u64| at.saturating_add(offset);
    let record = found.record.map(|record| Record { offset: in_file(record.offset), ..record });
    Ok(Strided { offset: in_file(found.offset), record, ..found })
}

/// The same in an item that was unpacked. Its bytes have just been written, and are checked at once: what is said of
/// the place of the checksum's record would lead readers of the file astray.
///
/// # Errors
/// As [`locate`], and [`Class::ZipCrc`].
pub fn locate_unpacked(item: &Readable<'_>, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
    let mut found = locate_in(item, 0, item.len(), dtype, sizes)?;
    let Some(record) = found.record.take() else { return Ok(found) };
    let mut hasher = crc32fast::Hasher::new();
    let mut done = 0;
    while done < record.length {
        let step = STEP_BYTES.min(record.length.saturating_sub(done));
        hasher.update(&item.read_vec_at(record.offset.saturating_add(done), step)?);
        done = done.saturating_add(step);
    }
    let crc32 = hasher.finalize();
    if crc32 == record.crc32 {
        return Ok(found);
    }
    Err(wrong_checksum("the storage", record.crc32, crc32).in_file(item.name()))
}

fn locate_in(bytes: &Readable<'_>, offset: u64, length: u64, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
    let archive = Archive { bytes, offset, length, entries: limits::ZIP_ENTRIES, is_metadata: false };
    tensor_in(&archive, dtype, sizes).map_err(|error| error.in_file(bytes.name()))
}

fn tensor_in(archive: &Archive<'_, '_>, dtype: Dtype, sizes: &[u64]) -> Result<Strided> {
    let (offset, length, end) = (archive.offset, archive.length, archive.bytes.len());
    if offset.checked_add(length).is_none_or(|item_end| item_end > end) {
        let why = format!("an item of {length} bytes at byte {offset}, but the file ends at byte {end}");
        return Err(ReadError::new(Class::Truncated, why));
    }
    let (place, directory) =
        archive.directory().map_err(|error| safetensors_item(archive).unwrap_or(error))?;
    let directory = zip::Directory::parse(&directory, &place)?;
    let prefix = directory.prefix()?;
    archive.check_byteorder(&directory, prefix)?;
    let pickle = directory.get(&format!("{prefix}data.pkl"))?;
    let pickle = archive.data(&directory, &pickle, PICKLE_BYTES)?;
    let pickle = pickle::parse(&pickle, Place::Tensors)?;
    let saved = SavedTensor::of(&pickle, pickle.root())?;
    check_declared(&saved, dtype, sizes)?;
    let entry = directory.get(&format!("{prefix}data/{}", saved.key))?;
    saved.check_storage(entry.length)?;
    // Tensors are saved with storages of their own size. One that is larger than what is stored (expanded from a few
    // elements) would let a small file stand for any amount of data.
    if saved.is_expanded() {
        let why = format!("{sizes:?} elements are declared, but {} are stored", saved.capacity);
        return Err(ReadError::new(Class::StorageSizeMismatch, why));
    }
    let record = archive.record(&entry, archive.data_start(&entry)?)?;
    saved.within(record, directory.has_checksums)
}

/// The refusal of an item that is a safetensors file, where it is one.
fn safetensors_item(archive: &Archive<'_, '_>) -> Option<ReadError> {
    let first = archive.bytes.read_vec_at(archive.offset, archive.length.min(9)).ok()?;
    if !detect::is_safetensors(&first) {
        return None;
    }
    let why = "an item is a safetensors file (FileSystemWriter with SerializationFormat.SAFETENSORS), which is not \
               read within a distributed checkpoint; save with the default serialization_format, or with \
               HuggingFaceStorageWriter";
    Some(ReadError::new(Class::UnsupportedFormat, why))
}

/// Checks that the tensor is the one that `.metadata` declares here.
fn check_declared(saved: &SavedTensor<'_>, dtype: Dtype, sizes: &[u64]) -> Result<()> {
    if (saved.dtype, saved.sizes.as_slice()) == (dtype, sizes) {
        return Ok(());
    }
    let why = format!(
        ".metadata declares a slice of {} {sizes:?}, but {} {:?} is stored; the files are not of one save",
        dtype.as_str(),
        saved.dtype.as_str(),
        saved.sizes
    );
    Err(ReadError::new(Class::DcpChunkMismatch, why))
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
        let record = found.record.unwrap();
        assert_eq!((record.length, record.crc32), (48, crc32fast::hash(&storage)));
        let start = usize::try_from(record.offset).unwrap() - 3;
        assert_eq!(item[start..start + 48], storage);
        let first = usize::try_from(found.offset).unwrap() - 3;
        assert_eq!(item[first..first + 4], [108, 109, 110, 111]);
    }

    #[test]
    fn small_items_and_large_ones_are_found_alike() {
        for elements in [1u64, 100, SMALL_BYTES / 4 - 300, SMALL_BYTES / 4, SMALL_BYTES] {
            let signed = elements.cast_signed();
            let pickle = pickled("FloatStorage", signed, 0, &[signed], &[1]);
            let storage: Vec<u8> =
                (0..elements).flat_map(|index| u32::try_from(index).unwrap().to_le_bytes()).collect();
            let item = item(&pickle, &storage);
            let found = locate_in(&item, item.len() as u64, Dtype::F32, &[elements]).unwrap();
            let record = found.record.unwrap();
            assert_eq!((found.offset, record.length), (record.offset, elements * 4));
            let start = usize::try_from(record.offset).unwrap() - 3;
            assert_eq!(item[start..start + storage.len()], storage);
        }
    }

    #[test]
    fn an_item_of_safetensors_is_told_by_name() {
        let file = [&2u64.to_le_bytes()[..], b"{}", &[0; 200]].concat();
        let error = locate_in(&file, file.len() as u64, Dtype::F32, &[4]).unwrap_err();
        assert_eq!(error.class(), Class::UnsupportedFormat);
        assert!(error.to_string().contains("HuggingFaceStorageWriter"), "{error}");
    }

    #[test]
    fn scalars_and_empty_tensors_are_found() {
        let scalar = located(&pickled("LongStorage", 1, 0, &[], &[]), 8, Dtype::I64, &[]).unwrap();
        assert!(scalar.strides.is_empty());
        let empty = pickled("FloatStorage", 0, 9, &[0, 1 << 40], &[i64::MAX, i64::MAX]);
        assert!(located(&empty, 0, Dtype::F32, &[0, 1 << 40]).is_ok());
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
            (0, [1 << 40, 2], [i64::MAX, 1]),
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
