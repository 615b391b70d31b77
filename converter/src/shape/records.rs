//! The checksums of the zip records that hold tensors. Gathering checks a record when it reads its last byte; what is
//! left then (records with gaps between the elements that were wanted) is read and checked here.

use crate::checkpoint::{Location, Tensor};
use crate::error::Result;
use crate::source::digest::on_threads;

/// Checks the record of every slice of `tensors` that has been read, on up to `threads` threads: what gathering did
/// not read of it (gaps between elements) is read now. Records that gathering has read whole were checked then.
///
/// # Errors
/// [`crate::error::Class::ZipCrc`], the tensor and the file named; else as reading fails.
pub fn check_records<'c>(tensors: impl Iterator<Item = &'c Tensor> + Send, threads: usize) -> Result<()> {
    let mut slices = tensors.flat_map(|tensor| tensor.slices.iter().map(move |slice| (tensor, slice)));
    on_threads(
        threads,
        || slices.next(),
        |(tensor, slice), buffer| {
            let (file, storage) = match &slice.location {
                Location::TorchItem { file, storage, .. } => (file, storage.get()),
                Location::Strided { file, storage } => (file, Some(storage)),
                // What a zstd item holds is checked when it is unpacked.
                Location::Dense { .. } | Location::ZstdItem { .. } => return Ok(()),
            };
            let record = storage.and_then(|storage| storage.record).filter(|_| slice.elements() > 0);
            let Some(record) = record else { return Ok(()) };
            file.check_record(record, buffer).map_err(|error| error.of_tensor(tensor.name.as_str()))
        },
    )
}
