//! What must hold of every input, one function a parser.
//!
//! The fuzz targets in `fuzz/` call these functions with bytes of the fuzzer's making, and a test replays the
//! corpora there through the same ones. A function panics where its parser accepted something that it must not
//! accept, or read one input in two ways; the parser's own panics count too. So wrong acceptance is found, and not
//! only a crash.
//!
//! The module exists in tests and under the feature `fuzzing` alone. [`documents`] has the parsers of the documents.

use std::fmt::Debug;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use weighbridge_schemas::dtype::element_count;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use super::dcp::metadata::{Entry, Listing};
use super::pickle::{Pickle, Place};
use super::room::Room;
use super::{header, index, pickle, torch_save as reader, zip};
use crate::checkpoint::{Location, Slice, Tensor};
use crate::error::Result;
use crate::shape::gather::{self, Scratch};
use crate::shape::tiling;
use crate::source::{Source, SourceFile};

pub mod documents;

/// A fuzz target: its name, which its corpus has too, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets: the parsers, and the encoders.
pub const TARGETS: &[Target] = &[
    ("header", header),
    ("index", index),
    ("pickle_metadata", pickle_metadata),
    ("pickle_tensors", pickle_tensors),
    ("zip", zip),
    ("torch_save", torch_save),
    ("dcp_metadata", dcp_metadata),
    ("policy", documents::policy),
    ("checkpoint_manifest", documents::checkpoint_manifest),
    ("snapshot_manifest", documents::snapshot_manifest),
    ("channel_entry", documents::channel_entry),
    ("envelope", documents::envelope),
    ("report", documents::report),
    ("queued", documents::queued),
    ("encoders", crate::encode::fuzzing::encoders),
];

/// Largest tensor whose elements are counted one by one, to check its tiling against the sweep.
const PAINTED_ELEMENTS: u64 = 4096;
/// Largest tensor that is read, in bytes.
const READ_BYTES: u64 = 1 << 20;
/// Most values a pickle may hold beyond one for every two bytes.
const SPARE_VALUES: usize = 1024;

/// A safetensors header. The input is the length of the data behind it (8 bytes, little-endian) and its JSON, so that
/// neither gigabytes of data nor a length in front have to be right for the rest to be reached.
///
/// # Panics
/// Where a header is accepted whose tensors do not tile the data, or have names that tensors may not have.
pub fn header(input: &[u8]) {
    let Some((data_bytes, json)) = input.split_first_chunk::<8>() else {
        return;
    };
    let data_bytes = u64::from_le_bytes(*data_bytes);
    let file_bytes = data_bytes.saturating_add(json.len() as u64).saturating_add(header::LENGTH_BYTES);
    if let Ok(length) = header::length(input, file_bytes) {
        assert!(
            length <= limits::SAFETENSORS_HEADER_BYTES && length < file_bytes,
            "{length} of {file_bytes}"
        );
    }
    let Some(header) = same_twice(|| header::parse(json, file_bytes)) else { return };
    assert!(header.entries.is_sorted_by(|a, b| a.name < b.name), "names are sorted, each once");
    let mut ranges: Vec<_> = header.entries.iter().map(|entry| (entry.begin, entry.end)).collect();
    ranges.sort_unstable();
    let reached = ranges.iter().try_fold(0, |reached, &(begin, end)| (begin == reached).then_some(end));
    assert_eq!(
        reached,
        Some(file_bytes - header::LENGTH_BYTES - json.len() as u64),
        "the ranges tile the data"
    );
    for entry in &header.entries {
        let bytes = element_count(&entry.shape, entry.dtype).map(|count| count * entry.dtype.size());
        assert_eq!(bytes, entry.end.checked_sub(entry.begin), "{:?}", entry.name);
        assert_valid(entry.name.as_str());
    }
}

/// A Hugging Face index.
///
/// # Panics
/// Where the map that is read cannot be written and read again.
pub fn index(input: &[u8]) {
    let _ = index::is_json(input);
    let Some(index) = same_twice(|| index::parse(input)) else { return };
    let names: Vec<String> = index.weight_map.values().cloned().collect();
    for name in &names {
        assert!(index::total_of(name) < u64::MAX || name.contains(&u64::MAX.to_string()), "{name:?}");
    }
    assert!(index.numbered_alike(&names).len() <= names.len());
    if let Some(missing) = index::missing_number(&names) {
        assert!(!names.contains(&missing), "{missing:?} is not missing");
    }
    let json = serde_json::json!({ "weight_map": index.weight_map }).to_string();
    let again = index::parse(json.as_bytes()).map(|again| again.weight_map);
    assert_eq!(again.as_ref(), Ok(&index.weight_map));
}

/// A pickle where the metadata of a distributed checkpoint lies.
///
/// # Panics
/// Where one input gives two results, or a pickle holds more values than its length allows.
pub fn pickle_metadata(input: &[u8]) {
    parsed_pickle(input, Place::Metadata);
}

/// A pickle where tensors lie.
///
/// # Panics
/// As [`pickle_metadata`].
pub fn pickle_tensors(input: &[u8]) {
    parsed_pickle(input, Place::Tensors);
}

fn parsed_pickle(input: &[u8], place: Place) -> Option<Pickle<'_>> {
    let pickle = same_twice(|| pickle::parse(input, place))?;
    let (values, most) = (pickle.values(), input.len() / 2 + SPARE_VALUES);
    assert!(values <= most, "{values} values of {} bytes", input.len());
    Some(pickle)
}

/// A zip archive, whole.
///
/// # Panics
/// Where entries are accepted that overlap each other or the directory, or lie outside the archive.
pub fn zip(input: &[u8]) {
    let length = input.len() as u64;
    let tail = input.get(input.len().saturating_sub(bytes(zip::TAIL))..).unwrap_or_default();
    let Ok(place) = zip::find_directory(tail, length, limits::TORCH_SAVE_ENTRIES) else { return };
    assert!(place.bytes.start <= place.bytes.end && place.bytes.end <= length, "{place:?} of {length}");
    let directory = input.get(bytes(place.bytes.start)..bytes(place.bytes.end)).unwrap_or_default();
    let Ok(directory) = zip::Directory::parse(directory, &place) else { return };
    if let Ok(prefix) = directory.prefix() {
        assert!(directory.find(&format!("{prefix}data.pkl")).is_some(), "{prefix:?}");
    }
    let mut ranges = Vec::new();
    for (name, entry) in &directory.by_name {
        assert_eq!((*name, directory.get(name)), (entry.name, Ok(*entry)));
        let local = input.get(bytes(entry.header)..).unwrap_or_default();
        let local = local.get(..zip::LOCAL + name.len()).unwrap_or(local);
        // Where a local header makes no sense, the bytes that the directory gives the entry are its least.
        let start = zip::data_start(entry, local).unwrap_or(entry.header + zip::LOCAL as u64);
        assert!(start > entry.header, "{name:?}");
        ranges.push((entry.header, start + entry.length));
    }
    ranges.sort_unstable();
    ranges.push((place.bytes.start, length));
    for pair in ranges.array_windows::<2>() {
        let [(_, end), (next, _)] = pair;
        assert!(end <= next, "an entry ends at {end}, behind the next one's start at {next}");
    }
}

/// A torch.save file, listed, and every small tensor of it read. Checksums are set to "not recorded" first, or no
/// changed pickle would get past them.
///
/// # Panics
/// Where names are not sorted, each once and valid, or a tensor is listed that cannot be read.
pub fn torch_save(input: &[u8]) {
    let mut input = input.to_vec();
    let (length, tail) = (input.len() as u64, input.len().saturating_sub(bytes(zip::TAIL)));
    let place =
        zip::find_directory(input.get(tail..).unwrap_or_default(), length, limits::TORCH_SAVE_ENTRIES);
    let Ok(place) = place else { return };
    let directory = input.get_mut(bytes(place.bytes.start)..).unwrap_or_default();
    let signatures = directory.windows(4).enumerate().filter(|(_, bytes)| bytes == b"PK\x01\x02");
    for at in signatures.map(|(at, _)| at).collect::<Vec<_>>() {
        directory.iter_mut().skip(at + 16).take(4).for_each(|byte| *byte = 0);
    }
    let Some((_file, source)) = saved(&input) else { return };
    let Ok(checkpoint) = reader::open(source) else { return };
    assert!(checkpoint.tensors.is_sorted_by(|a, b| a.name < b.name), "names are sorted, each once");
    for tensor in &checkpoint.tensors {
        assert_valid(tensor.name.as_str());
        if tensor.bytes() <= READ_BYTES {
            let mut read = vec![0; bytes(tensor.bytes())];
            let found = gather::read_elements(tensor, 0, &mut read, &mut Scratch::default());
            assert!(found.is_ok(), "{:?} was listed, but {found:?}", tensor.name);
        }
    }
}

/// A checkpoint of one file, whose content is `input`.
fn saved(input: &[u8]) -> Option<(tempfile::NamedTempFile, Source)> {
    let file = tempfile::NamedTempFile::new().ok()?;
    std::fs::write(file.path(), input).ok()?;
    let source = Source::open(file.path()).ok()?;
    Some((file, source))
}

/// The `.metadata` of a distributed checkpoint, as far as its tensors and their slices.
///
/// # Panics
/// Where slices are accepted that leave an element out or hold it twice.
pub fn dcp_metadata(input: &[u8]) {
    let Some(pickle) = parsed_pickle(input, Place::Metadata) else { return };
    let Ok(listing) = Listing::of(&pickle, &mut Room::new(u64::MAX, 0)) else { return };
    assert!(listing.entries.is_sorted_by(|a, b| a.name < b.name), "names are sorted, each once");
    let mut slices = 0;
    for entry in &listing.entries {
        slices += entry.chunks.len();
        if let Some(tensor) = tensor(entry)
            && tiling::check(&tensor).is_ok()
        {
            assert_valid(tensor.name.as_str());
            assert_painted_once(&tensor);
        }
    }
    assert!(slices <= limits::SLICES, "{slices} slices");
}

/// The tensor of `entry`, its slices all in one file that is not looked at.
fn tensor(entry: &Entry<'_>) -> Option<Tensor> {
    let location = || Some(Location::Dense { file: any_file()?, offset: 0 });
    let slices = entry.chunks.iter().map(|chunk| {
        let (offsets, sizes) = (chunk.offsets.clone(), chunk.sizes.clone());
        Some(Slice { offsets, sizes, location: location()? })
    });
    let slices = slices.collect::<Option<_>>()?;
    Some(Tensor { name: entry.name.parse().ok()?, dtype: entry.dtype, shape: entry.shape.clone(), slices })
}

/// A file that is there: this crate's manifest.
fn any_file() -> Option<Arc<SourceFile>> {
    static FILE: OnceLock<Option<Arc<SourceFile>>> = OnceLock::new();
    let open = || Source::open(Path::new(env!("CARGO_MANIFEST_DIR"))).and_then(|it| it.file("Cargo.toml"));
    let file = FILE.get_or_init(|| open().ok());
    file.clone()
}

/// Counts how often each element of a small `tensor` lies in a slice: once.
fn assert_painted_once(tensor: &Tensor) {
    if tensor.elements() > PAINTED_ELEMENTS {
        return;
    }
    let mut painted = vec![0u8; bytes(tensor.elements())];
    for slice in &tensor.slices {
        for element in 0..slice.elements() {
            let place = place_of(element, slice, &tensor.shape);
            let count = painted.get_mut(bytes(place));
            assert!(count.is_some(), "{:?}: a slice reaches outside", tensor.name);
            count.into_iter().for_each(|count| *count = count.saturating_add(1));
        }
    }
    assert!(painted.iter().all(|&count| count == 1), "{:?}: {painted:?}", tensor.name);
}

/// Where the `element`th element of `slice` lies in its tensor of `shape`, both in row-major order.
fn place_of(mut element: u64, slice: &Slice, shape: &[u64]) -> u64 {
    let (mut place, mut stride) = (0, 1);
    for ((&extent, &size), &offset) in shape.iter().zip(&slice.sizes).zip(&slice.offsets).rev() {
        place += (element % size + offset) * stride;
        element /= size;
        stride *= extent;
    }
    place
}

/// What `parse` gives, which has to be the same when it is called again.
fn same_twice<T: Debug>(parse: impl Fn() -> Result<T>) -> Option<T> {
    let (first, second) = (parse(), parse());
    assert_eq!(format!("{first:?}"), format!("{second:?}"), "one input gives two results");
    first.ok()
}

fn assert_valid(name: &str) {
    let again = name.parse::<TensorName>();
    assert!(again.is_ok(), "{again:?}");
}

fn bytes(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
