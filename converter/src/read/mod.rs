//! Readers, one a format. A reader takes a [`Source`] and gives a [`Checkpoint`]: it lists logical tensors from
//! metadata alone, and checks that their slices tile each of them exactly. Parsers take bytes and do no IO.

use weighbridge_schemas::checkpoint::Format;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::source::{Location, Source};

pub mod dcp;
pub mod detect;
mod header;
mod index;
mod json;
pub mod pickle;
pub mod safetensors;
pub mod torch_item;
mod zip;

/// Opens the checkpoint at `location` (a folder, or one file) and lists its tensors, within a `memory` budget in bytes.
/// Without a `format` it is found out by content.
///
/// # Errors
/// A [`crate::error::ReadError`] that names the file, and the tensor where there is one.
pub fn open(location: &Location, format: Option<Format>, memory: u64) -> Result<Checkpoint> {
    let source = Source::open_location(location)?.with_memory(memory);
    match format.map_or_else(|| detect::format(&source), Ok)? {
        Format::Safetensors => safetensors::open(source),
        Format::Dcp => dcp::open(source),
    }
}
