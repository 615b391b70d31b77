//! Folders of `torch.distributed.checkpoint` (DCP).
//!
//! A folder holds `.metadata`, one pickle, and data files of any names, which `.metadata` gives. It is written last,
//! by rename: without it the save has not finished. It says (as torch 2.2 to 2.14 write it)
//!
//! ```text
//! Metadata.state_dict_metadata   name -> TensorStorageMetadata(properties: dtype..., size, chunks: [(offsets, sizes)])
//!                                      | BytesStorageMetadata       anything else, as a pickle; passed over here
//! Metadata.storage_data          MetadataIndex(name, offset) -> _StorageInfo(relative_path, offset, length)
//! ```
//!
//! so each chunk of a tensor is looked up by its name and offsets; the bytes there are a `torch.save` archive, read
//! by [`super::torch_item`]. torch's own reader runs whatever the pickle names, does not notice chunks that are
//! missing or overlap, and follows any path; this one refuses all three. Stale data files of an earlier save are
//! not looked at.
//!
//! An item may have gone through one transform, `stream.zstd/1` ([`super::unpack`]); others are refused by name. In
//! the rank-local layout (`use_collectives=False`) there is no `.metadata` but one `__RANK.metadata` a rank, each with
//! that rank's items alone; they are put together here, and what a rank that is missing held shows as a gap.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use self::metadata::{Chunk, Entry, Items, Listing, Stored, Transform, shown};
use super::pickle::{self, Pickle, Place};
use super::room::Room;
use super::unpack::{self, Unpacker};
use crate::checkpoint::{Checkpoint, Location, Others, Slice, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::shape::tiling;
use crate::source::{Source, SourceFile};

pub(super) mod metadata;

/// The file that says where everything lies.
const METADATA: &str = ".metadata";
/// Longest path of a data file, in bytes.
const PATH_BYTES: usize = 4096;
/// What the fingerprint's digest begins with.
const FINGERPRINT_DOMAIN: &[u8] = b"weighbridge dcp fingerprint v1";

/// What an entry is that lies in an item of its own: any object of Python.
const OTHER_KIND: &str = "object";

/// Lists the tensors of the distributed checkpoint in a folder (or of the folder whose `.metadata` was named).
///
/// # Errors
/// [`Class::DcpNoMetadata`] where the save has not finished, [`Class::UnsupportedFormat`] for layouts of other
/// kinds, and a class that says what is wrong with the metadata, the data files or the chunks.
pub fn open(source: Source) -> Result<Checkpoint> {
    let budget = source.metadata_left();
    let metadata = read_metadata(&source)?;
    let metadata_bytes =
        metadata.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(bytes.len() as u64));
    let mut room = Room::new(budget, metadata_bytes);
    let mut pickles = Vec::with_capacity(metadata.len());
    for (name, bytes) in &metadata {
        pickles.push((name, pickle::parse(bytes, Place::Metadata).map_err(|error| error.in_file(name))?));
    }
    let mut listing = Listing::default();
    for (name, pickle) in &pickles {
        add(&mut listing, pickle, &mut room).map_err(|error| error.in_file(*name))?;
    }
    listing.check_count().map_err(in_metadata)?;
    let files = Files::open(&source, &listing)?;
    let fingerprint = fingerprint(&metadata, &files.by_path);
    let tensors = listing
        .entries
        .iter()
        .map(|entry| files.tensor(entry, &listing.items).map_err(|error| error.of_tensor(shown(entry.name))));
    let tensors = tensors.collect::<Result<_>>()?;
    let mut unreadable = Vec::new();
    for (name, error) in &listing.unreadable {
        unreadable.push((tensor_name(name)?, error.clone().in_file(METADATA)));
    }
    unreadable.sort_by(|(first, _), (second, _)| first.cmp(second));
    let mut others = Others::default();
    listing.others.iter().for_each(|name| others.add(name, OTHER_KIND));
    let notes = others.notes();
    drop(pickles);
    Ok(Checkpoint { source, format: Format::Dcp, fingerprint, tensors, unreadable, others, notes })
}

/// Adds what one file of metadata says.
fn add<'a>(listing: &mut Listing<'a>, pickle: &Pickle<'a>, room: &mut Room) -> Result<()> {
    let later = Listing::of(pickle, room)?;
    if listing.items.files.is_empty() && listing.entries.is_empty() {
        *listing = later;
        return Ok(());
    }
    listing.add(later)
}

fn in_metadata(error: ReadError) -> ReadError {
    error.in_file(METADATA)
}

/// The files of metadata: `.metadata`, or those of all ranks in their order.
fn read_metadata(source: &Source) -> Result<Vec<(String, Vec<u8>)>> {
    if let Some(entry) = source.entry().filter(|&entry| entry != METADATA) {
        let why = "it is one file of a distributed checkpoint; name its folder";
        return Err(ReadError::new(Class::UnsupportedFormat, why).in_file(entry));
    }
    let names = match source.file(METADATA) {
        Ok(_) => vec![METADATA.to_owned()],
        Err(error) if error.class() == Class::NotFound => rank_local(source)?,
        Err(error) => return Err(error),
    };
    let mut left = limits::DCP_METADATA_BYTES;
    let read = |name: String| {
        let file = source.file(&name)?;
        left = left.checked_sub(file.len()).ok_or_else(|| {
            let why = format!("with it, metadata has more than {} bytes", limits::DCP_METADATA_BYTES);
            ReadError::new(Class::LimitExceeded, why).in_file(&name)
        })?;
        let bytes = file.read_metadata_at(0, file.len())?;
        Ok((name, bytes))
    };
    names.into_iter().map(read).collect()
}

/// The names of the metadata of all ranks, by rank. Ranks count from 0 on, so a number that is left out is a rank
/// whose file is missing.
fn rank_local(source: &Source) -> Result<Vec<String>> {
    let names = source.names()?;
    let mut ranks: Vec<_> = names.into_iter().filter_map(|name| Some((rank_of(&name)?, name))).collect();
    ranks.sort_unstable();
    if ranks.is_empty() {
        let why = "it is absent, and it is written last: the save has not finished, or failed";
        return Err(in_metadata(ReadError::new(Class::DcpNoMetadata, why)));
    }
    for (expected, (rank, _)) in ranks.iter().enumerate() {
        if u64::try_from(expected).ok() != Some(*rank) {
            let why = "it is absent, but metadata of later ranks is there: the save has not finished, or a file \
                       was not copied";
            let name = format!("__{expected}{METADATA}");
            return Err(ReadError::new(Class::DcpNoMetadata, why).in_file(name));
        }
    }
    Ok(ranks.into_iter().map(|(_, name)| name).collect())
}

/// The rank whose metadata the file `__RANK.metadata` is.
fn rank_of(name: &str) -> Option<u64> {
    let rank = name.strip_prefix("__").and_then(|rest| rest.strip_suffix(METADATA))?;
    rank.parse().ok().filter(|number: &u64| number.to_string() == rank)
}

/// The data files, and who unpacks what lies in them.
struct Files<'a> {
    by_path: BTreeMap<&'a str, Arc<SourceFile>>,
    unpacker: Arc<Unpacker>,
}

impl<'a> Files<'a> {
    /// Every file that metadata names, whatever lies there.
    fn open(source: &Source, listing: &Listing<'a>) -> Result<Self> {
        let items = &listing.items;
        if items.files.len() > limits::FILES {
            let why = format!("it names {} data files; the most are {}", items.files.len(), limits::FILES);
            return Err(in_metadata(ReadError::new(Class::LimitExceeded, why)));
        }
        let open = |(&path, name): (&&'a str, &&'a str)| {
            let file = open_file(source, path).map_err(|error| error.of_tensor(shown(name)))?;
            Ok((path, file))
        };
        let by_path = items.files.iter().map(open).collect::<Result<_>>()?;
        let largest = listing.entries.iter().map(Entry::bytes).max().unwrap_or(0);
        Ok(Self { by_path, unpacker: Arc::new(Unpacker::new(source.scratch(), largest)) })
    }

    /// The tensor of `entry`, its chunks found and checked.
    fn tensor(&self, entry: &Entry<'_>, items: &Items<'_>) -> Result<Tensor> {
        let name = tensor_name(entry.name)?;
        let slices = entry.chunks.iter().map(|chunk| self.slice(entry.name, chunk, items));
        let slices = slices.collect::<Result<_>>()?;
        let tensor = Tensor { name, dtype: entry.dtype, shape: entry.shape.clone(), slices };
        tiling::check(&tensor).map_err(in_metadata)?;
        Ok(tensor)
    }

    /// Where `chunk` of the tensor `name` lies.
    fn slice(&self, name: &str, chunk: &Chunk, items: &Items<'_>) -> Result<Slice> {
        let place = items.of_tensors.get(&(name, chunk.offsets.clone()));
        let place = place.and_then(|stored| self.by_path.get(stored.path).map(|file| (stored, file)));
        let (stored, file) = place.ok_or_else(|| {
            let why = format!("nothing says where its chunk at {:?} lies", chunk.offsets);
            in_metadata(ReadError::new(Class::DcpChunkBounds, why))
        })?;
        let location = self.location(stored, file).map_err(|error| error.in_file(stored.path))?;
        Ok(Slice { offsets: chunk.offsets.clone(), sizes: chunk.sizes.clone(), location })
    }

    fn location(&self, stored: &Stored<'_>, file: &Arc<SourceFile>) -> Result<Location> {
        let &Stored { offset, length, transform, .. } = stored;
        if offset.checked_add(length).is_none_or(|end| end > file.len()) {
            let end = file.len();
            let why = format!("an item of {length} bytes at byte {offset}, but the file ends at byte {end}");
            return Err(ReadError::new(Class::Truncated, why));
        }
        let (file, storage) = (Arc::clone(file), OnceLock::new());
        let what = match transform {
            Transform::None => return Ok(Location::TorchItem { file, offset, length, storage }),
            Transform::One(unpack::ZSTD) => {
                let unpacker = Arc::clone(&self.unpacker);
                return Ok(Location::ZstdItem { file, offset, length, storage, unpacker });
            }
            Transform::One(name) => format!("the transform {:?}", shorten(name)),
            Transform::Several(count) => format!("{count} transforms, one after the other"),
        };
        let why = format!(
            "its bytes went through {what}, which is not supported; save without extensions, or with {} alone",
            unpack::ZSTD
        );
        Err(ReadError::new(Class::UnsupportedFormat, why))
    }
}

fn tensor_name(name: &str) -> Result<TensorName> {
    name.parse().map_err(|error: weighbridge_schemas::error::DocumentError| {
        in_metadata(ReadError::new(Class::UnsafeName, error.to_string()).of_tensor(shown(name)))
    })
}

fn open_file(source: &Source, path: &str) -> Result<Arc<SourceFile>> {
    if path.len() > PATH_BYTES {
        let why = format!("a data file's path has {} bytes; the most are {PATH_BYTES}", path.len());
        return Err(in_metadata(ReadError::new(Class::LimitExceeded, why)));
    }
    source.file(path).map_err(|error| match error.class() {
        Class::NotFound => {
            let why = "the file is absent, but .metadata says that data lies there; copy the whole folder";
            ReadError::new(Class::DcpMissingFile, why).in_file(path)
        }
        _ => error,
    })
}

/// The digest of the metadata and of every data file's name and size, each behind its length.
fn fingerprint(metadata: &[(String, Vec<u8>)], files: &BTreeMap<&str, Arc<SourceFile>>) -> Fingerprint {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    };
    add(FINGERPRINT_DOMAIN);
    for (name, bytes) in metadata {
        // `.metadata` stands alone; the files of ranks are told apart by their names.
        if name != METADATA {
            add(name.as_bytes());
        }
        add(bytes);
    }
    for (name, file) in files {
        add(name.as_bytes());
        add(&file.len().to_le_bytes());
    }
    Fingerprint::from_bytes(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests;
