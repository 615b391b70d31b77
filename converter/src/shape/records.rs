//! The checksums of the zip records that hold tensors. Gathering checks a record when it reads its last byte; what is
//! left then (records with gaps between the elements that were wanted) is read and checked here.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::checkpoint::{Location, Record, Slice, Tensor};
use crate::error::Result;
use crate::source::SourceFile;
use crate::source::digest::on_threads;

/// Checks the record of every slice of `tensors` that has been read, on up to `threads` threads: what gathering did
/// not read of it (gaps between elements) is read now. Records that gathering has read whole were checked then.
///
/// # Errors
/// [`crate::error::Class::ZipCrc`], the tensor and the file named; else as reading fails.
pub fn check_records<'c>(tensors: impl Iterator<Item = &'c Tensor> + Send, threads: usize) -> Result<()> {
    let slices = tensors.flat_map(|tensor| tensor.slices.iter().map(move |slice| (tensor, slice)));
    let mut records = slices.filter_map(|(tensor, slice)| Some((tensor, checked_record(slice)?)));
    // Tensors share storages, and two threads at one record would each take the other's part for done.
    let mut seen = BTreeSet::new();
    on_threads(
        threads,
        || records.find(|(_, (file, record))| seen.insert((Arc::as_ptr(file).addr(), *record))),
        |(tensor, (file, record)), buffer| {
            file.check_record(record, buffer).map_err(|error| error.of_tensor(tensor.name.as_str()))
        },
    )
}

/// The record that a slice was read from, where it has a checksum.
fn checked_record(slice: &Slice) -> Option<(&Arc<SourceFile>, Record)> {
    let (file, storage) = match &slice.location {
        Location::TorchItem { file, storage, .. } => (file, storage.get()),
        Location::Strided { file, storage } => (file, Some(storage)),
        // What a zstd item holds is checked when it is unpacked.
        Location::Dense { .. } | Location::ZstdItem { .. } => return None,
    };
    let record = storage?.record.filter(|_| slice.elements() > 0)?;
    Some((file, record))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weighbridge_schemas::dtype::Dtype;

    use super::*;
    use crate::checkpoint::Strided;
    use crate::source::Source;

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
        assert_eq!(refused.class(), crate::error::Class::ZipCrc);
    }
}
