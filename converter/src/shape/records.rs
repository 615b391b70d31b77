//! The checksums of the zip records that hold tensors. Gathering checks a record when it reads its last byte; what is
//! left then (records with gaps between the elements that were wanted) is read and checked here.

use std::collections::BTreeSet;
use std::sync::Arc;

use weighbridge_schemas::dtype::Dtype;

use crate::checkpoint::{Checkable, Item, Location, Slice, Tensor};
use crate::error::Result;
use crate::shape::gather::Place;
use crate::source::digest::on_threads;

/// Checks the record of every slice of `tensors`, on up to `threads` threads: what nobody has read of it (gaps between
/// elements, rows that were not wanted) is read now. Records that gathering has read whole, here or in a source whose
/// digests were adopted, were checked then, and are not looked at again.
///
/// # Errors
/// [`crate::error::Class::ZipCrc`], the tensor and the file named; else as looking up a slice and reading fail.
pub fn check_records<'c>(tensors: impl Iterator<Item = &'c Tensor> + Send, threads: usize) -> Result<()> {
    let slices = tensors.flat_map(|tensor| tensor.slices.iter().map(move |slice| (tensor, slice)));
    // Tensors share storages, and two threads at one record would each take the other's part for done.
    let mut seen = BTreeSet::new();
    let mut unchecked = slices.filter(|(_, slice)| {
        let Some(what) = checkable(slice) else { return false };
        let file = slice.location.file();
        !file.has_checked(what) && seen.insert((Arc::as_ptr(file).addr(), what))
    });
    on_threads(
        threads,
        || unchecked.next(),
        |(tensor, slice), buffer| {
            check(slice, tensor.dtype, buffer).map_err(|error| error.of_tensor(tensor.name.as_str()))
        },
    )
}

/// What is checked of a slice, if anything is.
fn checkable(slice: &Slice) -> Option<Checkable> {
    match &slice.location {
        _ if slice.elements() == 0 => None,
        // Whether it has a checksum is known once its archive has been looked into.
        &Location::TorchItem { offset, length, .. } => Some(Checkable::Item(Item { offset, length })),
        Location::Strided { storage, .. } => storage.record.map(Checkable::Record),
        // What a zstd item holds is checked when it is unpacked.
        Location::Dense { .. } | Location::ZstdItem { .. } => None,
    }
}

fn check(slice: &Slice, dtype: Dtype, buffer: &mut Vec<u8>) -> Result<()> {
    match Place::of(slice, dtype)?.record {
        Some(record) => slice.location.file().check_record(record, buffer),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::{Checkpoint, Record, Strided};
    use crate::error::Class;
    use crate::read;
    use crate::shape::gather::{Scratch, read_elements};
    use crate::source::Source;

    /// A checkpoint of many items in a folder of its own; without checksums, if so wanted.
    fn checkpoint(has_checksums: bool) -> tempfile::TempDir {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/checkpoints/dcp_torchrec_2rank");
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            for (signature, at) in [(b"PK\x01\x02", 16), (b"PK\x03\x04", 14), (b"PK\x07\x08", 4)] {
                for start in 0..bytes.len().saturating_sub(30) {
                    if !has_checksums && bytes[start..].starts_with(signature) {
                        bytes[start + at..start + at + 4].fill(0);
                    }
                }
            }
            std::fs::write(folder.path().join(path.file_name().unwrap()), bytes).unwrap();
        }
        folder
    }

    fn list(folder: &Path) -> Checkpoint {
        read::list(Source::open(folder).unwrap(), None).unwrap()
    }

    fn read_whole(tensor: &Tensor) {
        let mut out = vec![0; usize::try_from(tensor.bytes()).unwrap()];
        read_elements(tensor, 0, &mut out, &mut Scratch::default()).unwrap();
    }

    /// Whether somebody has looked into the archive of any slice.
    fn is_looked_up(tensor: &Tensor) -> bool {
        tensor.slices.iter().any(
            |slice| matches!(&slice.location, Location::TorchItem { storage, .. } if storage.get().is_some()),
        )
    }

    /// Changes a byte in the middle of a tensor's first storage.
    fn flip(folder: &Path, tensor: &Tensor) {
        let record = Place::of(&tensor.slices[0], tensor.dtype).unwrap().record.unwrap().record;
        let path = folder.join(tensor.slices[0].location.file().name());
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[usize::try_from(record.offset + record.length / 2).unwrap()] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn what_other_sources_have_checked_is_not_looked_up_and_all_else_is() {
        for has_checksums in [true, false] {
            let folder = checkpoint(has_checksums);
            let workers = [list(folder.path()), list(folder.path())];
            let count = workers[0].tensors.len();
            assert!(count > 6);
            for (at, tensor) in workers[0].tensors.iter().enumerate().skip(1) {
                read_whole(if at % 2 == 0 { tensor } else { &workers[1].tensors[at] });
            }
            let told = workers.each_ref().map(|worker| worker.source.partial_digests());
            let (known, unknown) = (&workers[0].tensors[2], &workers[0].tensors[0]);
            let last = list(folder.path());
            told.iter().for_each(|told| last.source.adopt(told).unwrap());
            check_records(last.tensors.iter(), 2).unwrap();
            let looked_up: Vec<_> = last.tensors.iter().map(is_looked_up).collect();
            assert_eq!(looked_up.iter().filter(|&&found| found).count(), 1);
            assert!(looked_up[0] && unknown.name == last.tensors[0].name);
            if !has_checksums {
                continue;
            }
            // What was checked is not read again; what nobody has read is.
            for (tensor, found) in [(known, None), (unknown, Some(Class::ZipCrc))] {
                flip(folder.path(), list(folder.path()).tensor(&tensor.name).unwrap());
                let last = list(folder.path());
                told.iter().for_each(|told| last.source.adopt(told).unwrap());
                let checked = check_records(last.tensors.iter(), 2);
                assert_eq!(checked.err().map(|error| error.class()), found);
            }
        }
    }

    fn tensors(path: &Path, record: Record, count: usize) -> Vec<Tensor> {
        let file = Source::open(path).unwrap().file("records").unwrap();
        let sizes = vec![record.length / 4];
        let tensor = |at: usize| Tensor {
            name: format!("t{at}").parse().unwrap(),
            dtype: Dtype::F32,
            shape: sizes.clone(),
            slices: vec![Slice {
                offsets: vec![0],
                sizes: sizes.clone(),
                location: Location::Strided {
                    file: Arc::clone(&file),
                    storage: Strided { offset: record.offset, strides: vec![1], record: Some(record) },
                },
            }],
        };
        (0..count).map(tensor).collect()
    }

    #[test]
    fn a_record_that_tensors_share_is_checked_once_whatever_the_threads() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..250).cycle().take(3 << 20).collect();
        std::fs::write(folder.path().join("records"), &bytes).unwrap();
        let right =
            Record { offset: 64, length: 2 << 20, crc32: crc32fast::hash(&bytes[64..64 + (2 << 20)]) };
        for _ in 0..20 {
            check_records(tensors(folder.path(), right, 16).iter(), 8).unwrap();
        }
        let wrong = Record { crc32: !right.crc32, ..right };
        let refused = check_records(tensors(folder.path(), wrong, 16).iter(), 8).unwrap_err();
        assert_eq!(refused.class(), Class::ZipCrc);
    }
}
