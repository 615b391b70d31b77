//! Readers, one a format. A reader takes a [`Source`] and gives a [`Checkpoint`]: it lists logical tensors from
//! metadata alone, and checks that their slices tile each of them exactly. Parsers take bytes and do no IO.

use std::path::Path;

use weighbridge_schemas::checkpoint::Format;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::source::{Location, Source};

mod archive;
pub mod dcp;
pub mod detect;
mod flatten;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod header;
mod index;
mod json;
pub mod pickle;
mod room;
pub mod safetensors;
mod saved_tensor;
pub mod torch_item;
pub mod torch_save;
pub mod unpack;
mod zip;

/// Opens the checkpoint at `location` (a folder, or one file) and lists its tensors, within a `memory` budget in bytes.
/// Without a `format` it is found out by content. Items that have to be unpacked as a whole go to the folder `scratch`.
///
/// # Errors
/// A [`crate::error::ReadError`] that names the file, and the tensor where there is one.
pub fn open(location: &Location, format: Option<Format>, memory: u64, scratch: &Path) -> Result<Checkpoint> {
    list(Source::open_location(location)?.with_memory(memory).with_scratch(scratch), format)
}

/// Lists the tensors of the checkpoint at `source`. Without a `format` it is found out by content.
///
/// # Errors
/// A [`crate::error::ReadError`] that names the file, and the tensor where there is one.
pub fn list(source: Source, format: Option<Format>) -> Result<Checkpoint> {
    match format.map_or_else(|| detect::format(&source), Ok)? {
        Format::Safetensors => safetensors::open(source),
        Format::Dcp => dcp::open(source),
        Format::TorchSave => torch_save::open(source),
    }
}
