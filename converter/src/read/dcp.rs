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
//! not looked at. Items under a transform (`stream.zstd/1`), and the rank-local layout with one `__RANK.metadata` a
//! rank, are refused by name.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use super::pickle::{self, Global, Pickle, Place, Tuple, Value};
use crate::checkpoint::{Checkpoint, Location, Slice, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::shape::tiling;
use crate::source::{Source, SourceFile};

/// The file that says where everything lies.
const METADATA: &str = ".metadata";
/// Most notes about single entries; the rest is counted.
const NOTES: usize = 50;
/// Most attributes of one object; torch's have fewer than ten.
const ATTRIBUTES: usize = 64;
/// Longest path of a data file, in bytes.
const PATH_BYTES: usize = 4096;
/// What the fingerprint's digest begins with.
const FINGERPRINT_DOMAIN: &[u8] = b"weighbridge dcp fingerprint v1";

/// Lists the tensors of the distributed checkpoint in a folder (or of the folder whose `.metadata` was named).
///
/// # Errors
/// [`Class::DcpNoMetadata`] where the save has not finished, [`Class::UnsupportedFormat`] for layouts of other
/// kinds, and a class that says what is wrong with the metadata, the data files or the chunks.
pub fn open(source: Source) -> Result<Checkpoint> {
    let bytes = read_metadata(&source)?;
    let pickle = pickle::parse(&bytes, Place::Metadata).map_err(in_metadata)?;
    let listing = Listing::of(&pickle).map_err(in_metadata)?;
    let files = open_files(&source, &listing.items)?;
    let fingerprint = fingerprint(&bytes, &files);
    let tensors = listing.entries.iter().map(|entry| {
        tensor(entry, &listing.items, &files).map_err(|error| error.of_tensor(shown(entry.name)))
    });
    let tensors = tensors.collect::<Result<_>>()?;
    let notes = listing.notes();
    Ok(Checkpoint { source, format: Format::Dcp, fingerprint, tensors, notes })
}

fn in_metadata(error: ReadError) -> ReadError {
    error.in_file(METADATA)
}

fn read_metadata(source: &Source) -> Result<Vec<u8>> {
    if let Some(entry) = source.entry().filter(|&entry| entry != METADATA) {
        let why = "it is one file of a distributed checkpoint; name its folder";
        return Err(ReadError::new(Class::UnsupportedFormat, why).in_file(entry));
    }
    let file = source.file(METADATA).map_err(|error| match error.class() {
        Class::NotFound => no_metadata(source),
        _ => error,
    })?;
    if file.len() > limits::DCP_METADATA_BYTES {
        let why = format!("it has {} bytes; the most are {}", file.len(), limits::DCP_METADATA_BYTES);
        return Err(in_metadata(ReadError::new(Class::LimitExceeded, why)));
    }
    file.read_metadata_at(0, file.len())
}

fn no_metadata(source: &Source) -> ReadError {
    let names = match source.names() {
        Ok(names) => names,
        Err(error) => return error,
    };
    if let Some(name) = names.iter().find(|name| is_rank_local(name)) {
        let why = "the checkpoint has the rank-local layout (one metadata file a rank, written with \
                   use_collectives=False), which is not supported; save with use_collectives=True";
        return ReadError::new(Class::UnsupportedFormat, why).in_file(name);
    }
    let why = "it is absent, and it is written last: the save has not finished, or failed";
    in_metadata(ReadError::new(Class::DcpNoMetadata, why))
}

/// Whether `name` is `__RANK.metadata`.
fn is_rank_local(name: &str) -> bool {
    let rank = name.strip_prefix("__").and_then(|rest| rest.strip_suffix(METADATA));
    rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What `.metadata` says.
struct Listing<'a> {
    /// The tensors, sorted by name.
    entries: Vec<Entry<'a>>,
    /// The names of what are no tensors, in the order of writing.
    others: Vec<&'a str>,
    items: Items<'a>,
}

/// Where everything lies.
struct Items<'a> {
    /// The items of tensors: those that have offsets.
    of_tensors: HashMap<Key<'a>, Stored<'a>>,
    /// The data files, each with the first name of what lies there.
    files: BTreeMap<&'a str, &'a str>,
}

/// A tensor.
struct Entry<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: Vec<u64>,
    chunks: Vec<Chunk>,
}

/// The part of a tensor that lies in one item.
struct Chunk {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}

/// What items are looked up by: the tensor's name and the chunk's offsets.
type Key<'a> = (&'a str, Vec<u64>);

/// Where an item lies.
struct Stored<'a> {
    path: &'a str,
    offset: u64,
    length: u64,
    /// The first transform that its bytes went through, if one did.
    transform: Option<&'a str>,
}

impl<'a> Listing<'a> {
    fn of(pickle: &Pickle<'a>) -> Result<Self> {
        let metadata = Fields::of(pickle, pickle.root(), Global::Metadata)?;
        let items = Items::of(pickle, metadata.dict("storage_data")?)?;
        let mut listing = Self { entries: Vec::new(), others: Vec::new(), items };
        let mut names = HashSet::new();
        let mut slices = 0;
        for &(name, value) in metadata.dict("state_dict_metadata")? {
            let Value::Text(name) = name else { return Err(unsupported("a tensor's name is not a text")) };
            if !names.insert(name) {
                let why = "two entries of .metadata have this name";
                return Err(ReadError::new(Class::DuplicateKey, why).of_tensor(shown(name)));
            }
            if pickle.made(value, Global::BytesStorageMetadata).is_some() {
                listing.others.push(name);
            } else {
                let entry = Entry::of(pickle, name, value);
                let entry = entry.map_err(|error| error.of_tensor(shown(name)))?;
                // Chunks may be shared between tensors: a few bytes of pickle for a copy each.
                slices += entry.chunks.len();
                if slices > limits::SLICES {
                    let why = format!("its tensors have more than {} chunks in all", limits::SLICES);
                    return Err(ReadError::new(Class::LimitExceeded, why));
                }
                listing.entries.push(entry);
            }
        }
        listing.check_count()?;
        listing.entries.sort_unstable_by_key(|entry| entry.name);
        Ok(listing)
    }

    fn check_count(&self) -> Result<()> {
        let count = self.entries.len();
        if count > limits::TENSORS {
            let why = format!("it lists {count} tensors; the most are {}", limits::TENSORS);
            return Err(ReadError::new(Class::LimitExceeded, why));
        }
        if count == 0 {
            let why = format!("it lists no tensor, and {} entries of other kinds", self.others.len());
            return Err(ReadError::new(Class::NoTensors, why));
        }
        Ok(())
    }

    /// What was passed over, for people.
    fn notes(&self) -> Vec<String> {
        let note = |name: &&str| format!("{}: not a tensor, passed over", shown(name).escape_debug());
        let mut notes: Vec<_> = self.others.iter().take(NOTES).map(note).collect();
        let more = self.others.len().saturating_sub(NOTES);
        if more > 0 {
            notes.push(format!("and {more} more entries that are no tensors were passed over"));
        }
        notes
    }
}

impl<'a> Entry<'a> {
    fn of(pickle: &Pickle<'a>, name: &'a str, value: Value<'a>) -> Result<Self> {
        let fields = Fields::of(pickle, value, Global::TensorStorageMetadata)?;
        let dtype = dtype_of(pickle, fields.need("properties")?)?;
        let shape = numbers(pickle, fields.tuple("size")?)?;
        if element_count(&shape, dtype).is_none() {
            let why = format!("the size of {} {shape:?} does not fit 64 bits", dtype.as_str());
            return Err(ReadError::new(Class::ShapeOverflow, why));
        }
        let Value::List(chunks) = fields.need("chunks")? else {
            return Err(unsupported("the chunks are not a list"));
        };
        let chunks = pickle.list(chunks);
        if chunks.len() > limits::SLICES_A_TENSOR {
            let why = format!("it has {} chunks; the most are {}", chunks.len(), limits::SLICES_A_TENSOR);
            return Err(ReadError::new(Class::LimitExceeded, why));
        }
        let chunks = chunks.iter().map(|&chunk| Chunk::of(pickle, chunk)).collect::<Result<_>>()?;
        Ok(Self { name, dtype, shape, chunks })
    }
}

impl Chunk {
    fn of(pickle: &Pickle<'_>, value: Value<'_>) -> Result<Self> {
        let fields = Fields::of(pickle, value, Global::ChunkStorageMetadata)?;
        Ok(Self {
            offsets: numbers(pickle, fields.tuple("offsets")?)?,
            sizes: numbers(pickle, fields.tuple("sizes")?)?,
        })
    }
}

/// The element type by `TensorProperties`, whose state is `(dtype, layout, requires_grad, memory format, pinned)`.
fn dtype_of(pickle: &Pickle<'_>, properties: Value<'_>) -> Result<Dtype> {
    let made = pickle.made(properties, Global::TensorProperties);
    let Some(Value::Tuple(state)) = made.map(|made| made.state) else {
        return Err(unsupported("its properties are of an unknown kind"));
    };
    let &[dtype, layout, _, _, _] = pickle.tuple(state) else {
        return Err(unsupported("its properties are of an unknown kind"));
    };
    let layout = pickle.made(layout, Global::GetLayout).map(|made| pickle.tuple(made.arguments));
    match layout {
        Some([Value::Text("torch.strided")]) => {}
        Some([Value::Text(other)]) => {
            let why =
                format!("its layout is {}; only dense tensors (torch.strided) are supported", shorten(other));
            return Err(unsupported(why));
        }
        _ => return Err(unsupported("its layout is of an unknown kind")),
    }
    match dtype {
        Value::Global(Global::Dtype(dtype)) => Ok(dtype),
        Value::Global(Global::OtherDtype(name)) => {
            Err(ReadError::new(Class::BadDtype, format!("its element type torch.{name} is not supported")))
        }
        _ => Err(unsupported("its element type is of an unknown kind")),
    }
}

impl<'a> Items<'a> {
    fn of(pickle: &Pickle<'a>, pairs: &[(Value<'a>, Value<'a>)]) -> Result<Self> {
        let mut items = Self { of_tensors: HashMap::with_capacity(pairs.len()), files: BTreeMap::new() };
        for &(index, info) in pairs {
            let index = Fields::of(pickle, index, Global::MetadataIndex)?;
            let Value::Text(name) = index.need("fqn")? else {
                return Err(unsupported("an item's name is not a text"));
            };
            items
                .add(pickle, name, index.get("offset")?, info)
                .map_err(|error| error.of_tensor(shown(name)))?;
        }
        Ok(items)
    }

    fn add(
        &mut self,
        pickle: &Pickle<'a>,
        name: &'a str,
        offset: Option<Value<'a>>,
        info: Value<'a>,
    ) -> Result<()> {
        let stored = Stored::of(pickle, info)?;
        self.files.entry(stored.path).and_modify(|first| *first = name.min(*first)).or_insert(name);
        let offsets = match offset {
            None | Some(Value::None) => return Ok(()),
            Some(Value::Tuple(offsets)) => numbers(pickle, offsets)?,
            Some(_) => return Err(unsupported("an item's offset is not a tuple")),
        };
        match self.of_tensors.insert((name, offsets), stored) {
            None => Ok(()),
            Some(_) => {
                let why = "two items of .metadata hold the chunk at the same offsets";
                Err(ReadError::new(Class::DuplicateKey, why))
            }
        }
    }
}

impl<'a> Stored<'a> {
    fn of(pickle: &Pickle<'a>, value: Value<'a>) -> Result<Self> {
        let fields = Fields::of(pickle, value, Global::StorageInfo)?;
        let Value::Text(path) = fields.need("relative_path")? else {
            return Err(unsupported("an item's relative_path is not a text"));
        };
        let place = |name| match fields.need(name)? {
            Value::Int(place) => u64::try_from(place).map_err(|_| {
                let why = format!("an item's {name} is negative: {place}");
                ReadError::new(Class::DcpChunkBounds, why)
            }),
            _ => Err(unsupported(format!("an item's {name} is not an integer"))),
        };
        let (offset, length) = (place("offset")?, place("length")?);
        let transform = match fields.get("transform_descriptors")? {
            None | Some(Value::None) => None,
            Some(Value::List(descriptors)) => match pickle.list(descriptors) {
                [] => None,
                [Value::Text(first), ..] => Some(*first),
                _ => return Err(unsupported("an item's transform has no name")),
            },
            Some(_) => return Err(unsupported("an item's transforms are not a list")),
        };
        Ok(Self { path, offset, length, transform })
    }
}

/// The attributes of an object.
struct Fields<'p, 'a> {
    pickle: &'p Pickle<'a>,
    class: Global,
    pairs: &'p [(Value<'a>, Value<'a>)],
}

impl<'p, 'a> Fields<'p, 'a> {
    /// The attributes of `value`, which has to be an object of `class`.
    fn of(pickle: &'p Pickle<'a>, value: Value<'a>, class: Global) -> Result<Self> {
        match pickle.made(value, class).map(|made| made.state) {
            Some(Value::Dict(state)) => {
                let pairs = pickle.dict(state);
                if pairs.len() > ATTRIBUTES {
                    let why =
                        format!("a {class:?} has {} attributes; the most are {ATTRIBUTES}", pairs.len());
                    return Err(ReadError::new(Class::LimitExceeded, why));
                }
                Ok(Self { pickle, class, pairs })
            }
            Some(_) => Err(unsupported(format!("a {class:?} has no attributes"))),
            None => Err(unsupported(format!("something else stands where a {class:?} is expected"))),
        }
    }

    fn get(&self, name: &str) -> Result<Option<Value<'a>>> {
        let mut found = self.pairs.iter().filter(|(key, _)| *key == Value::Text(name));
        let value = found.next().map(|&(_, value)| value);
        if found.next().is_some() {
            let why = format!("a {:?} has {name:?} twice", self.class);
            return Err(ReadError::new(Class::DuplicateKey, why));
        }
        Ok(value)
    }

    fn need(&self, name: &str) -> Result<Value<'a>> {
        self.get(name)?.ok_or_else(|| unsupported(format!("a {:?} has no {name:?}", self.class)))
    }

    fn tuple(&self, name: &str) -> Result<Tuple> {
        match self.need(name)? {
            Value::Tuple(tuple) => Ok(tuple),
            _ => Err(unsupported(format!("{name:?} of a {:?} is not a tuple", self.class))),
        }
    }

    fn dict(&self, name: &str) -> Result<&'p [(Value<'a>, Value<'a>)]> {
        match self.need(name)? {
            Value::Dict(dict) => Ok(self.pickle.dict(dict)),
            _ => Err(unsupported(format!("{name:?} of the {:?} is not a dict", self.class))),
        }
    }
}

/// A number a dimension.
fn numbers(pickle: &Pickle<'_>, tuple: Tuple) -> Result<Vec<u64>> {
    let values = pickle.tuple(tuple);
    if values.len() > limits::DIMENSIONS {
        let why = format!("{} dimensions; the most are {}", values.len(), limits::DIMENSIONS);
        return Err(ReadError::new(Class::LimitExceeded, why));
    }
    let number = |value: &Value<'_>| match value {
        Value::Int(number) => u64::try_from(*number)
            .map_err(|_| ReadError::new(Class::BadShape, format!("a size or offset is negative: {number}"))),
        _ => Err(ReadError::new(Class::BadShape, "a size or offset is not an integer")),
    };
    values.iter().map(number).collect()
}

/// The data files by name: every one that `.metadata` names, whatever lies there.
fn open_files<'a>(source: &Source, items: &Items<'a>) -> Result<BTreeMap<&'a str, Arc<SourceFile>>> {
    if items.files.len() > limits::FILES {
        let why = format!("it names {} data files; the most are {}", items.files.len(), limits::FILES);
        return Err(in_metadata(ReadError::new(Class::LimitExceeded, why)));
    }
    let open = |(&path, name): (&&'a str, &&'a str)| {
        let file = open_file(source, path).map_err(|error| error.of_tensor(shown(name)))?;
        Ok((path, file))
    };
    items.files.iter().map(open).collect()
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
fn fingerprint(metadata: &[u8], files: &BTreeMap<&str, Arc<SourceFile>>) -> Fingerprint {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    };
    add(FINGERPRINT_DOMAIN);
    add(metadata);
    for (name, file) in files {
        add(name.as_bytes());
        add(&file.len().to_le_bytes());
    }
    Fingerprint::from_bytes(*hasher.finalize().as_bytes())
}

/// The tensor of `entry`, its chunks found and checked.
fn tensor(entry: &Entry<'_>, items: &Items<'_>, files: &BTreeMap<&str, Arc<SourceFile>>) -> Result<Tensor> {
    let name = entry.name.parse::<TensorName>();
    let name = name.map_err(|error| in_metadata(ReadError::new(Class::UnsafeName, error.to_string())))?;
    let slices =
        entry.chunks.iter().map(|chunk| slice(entry.name, chunk, items, files)).collect::<Result<_>>()?;
    let tensor = Tensor { name, dtype: entry.dtype, shape: entry.shape.clone(), slices };
    tiling::check(&tensor).map_err(in_metadata)?;
    Ok(tensor)
}

/// Where `chunk` of the tensor `name` lies.
fn slice(
    name: &str,
    chunk: &Chunk,
    items: &Items<'_>,
    files: &BTreeMap<&str, Arc<SourceFile>>,
) -> Result<Slice> {
    let place = items.of_tensors.get(&(name, chunk.offsets.clone()));
    let place = place.and_then(|stored| files.get(stored.path).map(|file| (stored, file)));
    let (stored, file) = place.ok_or_else(|| {
        let why = format!("nothing says where its chunk at {:?} lies", chunk.offsets);
        in_metadata(ReadError::new(Class::DcpChunkBounds, why))
    })?;
    if let Some(transform) = stored.transform {
        let why = format!(
            "its bytes went through the transform {:?}, which is not supported; save without extensions",
            shorten(transform)
        );
        return Err(ReadError::new(Class::UnsupportedFormat, why).in_file(stored.path));
    }
    if stored.offset.checked_add(stored.length).is_none_or(|end| end > file.len()) {
        let (offset, length) = (stored.offset, stored.length);
        let why =
            format!("an item of {length} bytes at byte {offset}, but the file ends at byte {}", file.len());
        return Err(ReadError::new(Class::Truncated, why).in_file(stored.path));
    }
    Ok(Slice {
        offsets: chunk.offsets.clone(),
        sizes: chunk.sizes.clone(),
        location: Location::TorchItem {
            file: Arc::clone(file),
            offset: stored.offset,
            length: stored.length,
            storage: OnceLock::new(),
        },
    })
}

/// A name for messages, shortened only where no tensor may have it.
fn shown(name: &str) -> String {
    if name.len() <= limits::TENSOR_NAME_BYTES { name.to_owned() } else { shorten(name) }
}

fn unsupported(why: impl Into<String>) -> ReadError {
    ReadError::new(Class::UnsupportedObject, why)
}

#[cfg(test)]
mod tests;
