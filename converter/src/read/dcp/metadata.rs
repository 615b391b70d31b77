//! What the `.metadata` of a distributed checkpoint says: tensors, their chunks, and the places of items.
//!
//! Parsers only: values of the pickle in, plain tables out. The layout is told in [`super`].

use std::collections::{BTreeMap, HashMap, HashSet, btree_map};

use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};
use crate::read::pickle::{Global, Pickle, Tuple, Value};
use crate::read::room::Room;
use crate::read::saved_tensor::unsupported_dtype;

/// Most attributes of one object; torch's have fewer than ten.
const ATTRIBUTES: usize = 64;

/// What `.metadata`, or all that ranks have of it, says.
#[derive(Default)]
pub(in crate::read) struct Listing<'a> {
    /// The tensors, sorted by name.
    pub(in crate::read) entries: Vec<Entry<'a>>,
    /// The tensors of types that cannot be read.
    pub(super) unreadable: Vec<(&'a str, ReadError)>,
    /// The names of what are no tensors, in the order of writing.
    pub(super) others: Vec<&'a str>,
    pub(super) items: Items<'a>,
}

/// Where everything lies.
#[derive(Default)]
pub(super) struct Items<'a> {
    /// The items of tensors: those that have offsets.
    pub(super) of_tensors: HashMap<Key<'a>, Stored<'a>>,
    /// The data files, each with the first name of what lies there.
    pub(super) files: BTreeMap<&'a str, &'a str>,
}

/// A tensor.
pub(in crate::read) struct Entry<'a> {
    pub(in crate::read) name: &'a str,
    pub(in crate::read) dtype: Dtype,
    pub(in crate::read) shape: Vec<u64>,
    pub(in crate::read) chunks: Vec<Chunk>,
}

/// The part of a tensor that lies in one item.
pub(in crate::read) struct Chunk {
    pub(in crate::read) offsets: Vec<u64>,
    pub(in crate::read) sizes: Vec<u64>,
}

/// What items are looked up by: the tensor's name and the chunk's offsets.
type Key<'a> = (&'a str, Vec<u64>);

/// Where an item lies.
pub(super) struct Stored<'a> {
    pub(super) path: &'a str,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) transform: Transform<'a>,
}

/// What an item's bytes went through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transform<'a> {
    /// Nothing: it is a torch.save archive.
    None,
    /// Something of this name.
    One(&'a str),
    /// So many of them.
    Several(usize),
}

impl<'a> Listing<'a> {
    /// What one file of metadata says, if there is room for it.
    pub(in crate::read) fn of(pickle: &Pickle<'a>, room: &mut Room) -> Result<Self> {
        let metadata = Fields::of(pickle, pickle.root(), Global::Metadata)?;
        let items = Items::of(pickle, metadata.dict("storage_data")?)?;
        let mut listing = Self { items, ..Self::default() };
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
                room.tensor(name.len())?;
                let entry =
                    Entry::of(pickle, name, value, room).map_err(|error| error.of_tensor(shown(name)));
                let entry = match entry {
                    Err(error) if error.class() == Class::BadDtype => {
                        listing.unreadable.push((name, error));
                        continue;
                    }
                    entry => entry?,
                };
                // Chunks may be shared between tensors: a few bytes of pickle for a copy each.
                slices += entry.chunks.len();
                check_slices(slices)?;
                listing.entries.push(entry);
            }
        }
        listing.entries.sort_unstable_by_key(|entry| entry.name);
        Ok(listing)
    }

    /// Adds what another rank says of the same save. What both have (replicated tensors, each whole) is taken from the
    /// first.
    pub(super) fn add(&mut self, later: Self) -> Result<()> {
        let mut names: HashSet<&str> = self.others.iter().copied().collect();
        self.others.extend(later.others.into_iter().filter(|name| names.insert(name)));
        let mut names: HashSet<&str> = self.unreadable.iter().map(|(name, _)| *name).collect();
        self.unreadable.extend(later.unreadable.into_iter().filter(|(name, _)| names.insert(name)));
        self.items.add_all(later.items);
        let mut entries = BTreeMap::new();
        for entry in std::mem::take(&mut self.entries) {
            entries.insert(entry.name, entry);
        }
        for entry in later.entries {
            match entries.entry(entry.name) {
                btree_map::Entry::Vacant(place) => {
                    place.insert(entry);
                }
                btree_map::Entry::Occupied(mut first) => {
                    let name = entry.name;
                    first.get_mut().add(entry).map_err(|error| error.of_tensor(shown(name)))?;
                }
            }
        }
        self.entries = entries.into_values().collect();
        check_slices(self.entries.iter().map(|entry| entry.chunks.len()).sum())
    }

    /// Checks that there are tensors, and not too many.
    pub(super) fn check_count(&self) -> Result<()> {
        let count = self.entries.len() + self.unreadable.len();
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
}

impl<'a> Entry<'a> {
    fn of(pickle: &Pickle<'a>, name: &'a str, value: Value<'a>, room: &mut Room) -> Result<Self> {
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
        room.slices(chunks.len(), shape.len())?;
        let chunks = chunks.iter().map(|&chunk| Chunk::of(pickle, chunk)).collect::<Result<_>>()?;
        Ok(Self { name, dtype, shape, chunks })
    }

    /// How many bytes the tensor has, dense.
    pub(super) fn bytes(&self) -> u64 {
        element_count(&self.shape, self.dtype).unwrap_or(0).saturating_mul(self.dtype.size())
    }

    /// Adds the chunks that another rank has of the same tensor.
    fn add(&mut self, later: Self) -> Result<()> {
        if (self.dtype, &self.shape) != (later.dtype, &later.shape) {
            let why = format!(
                "it is {} {:?} by one rank's metadata, {} {:?} by another's; the files are not of one save",
                self.dtype.as_str(),
                self.shape,
                later.dtype.as_str(),
                later.shape
            );
            return Err(ReadError::new(Class::DcpChunkMismatch, why));
        }
        let known: HashMap<&[u64], &[u64]> =
            self.chunks.iter().map(|chunk| (chunk.offsets.as_slice(), chunk.sizes.as_slice())).collect();
        let mut new = Vec::new();
        for chunk in later.chunks {
            match known.get(chunk.offsets.as_slice()) {
                None => new.push(chunk),
                Some(&sizes) if sizes == chunk.sizes => {}
                Some(sizes) => {
                    let why = format!(
                        "two ranks have chunks of sizes {sizes:?} and {:?} at {:?}; the files are not of one save",
                        chunk.sizes, chunk.offsets
                    );
                    return Err(ReadError::new(Class::DcpChunkMismatch, why));
                }
            }
        }
        self.chunks.extend(new);
        Ok(())
    }
}

fn check_slices(slices: usize) -> Result<()> {
    if slices <= limits::SLICES {
        return Ok(());
    }
    let why = format!("its tensors have more than {} chunks in all", limits::SLICES);
    Err(ReadError::new(Class::LimitExceeded, why))
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
    // torch 2.15 adds the tensor's strides, which its items have anyway.
    let (&[dtype, layout, _, _, _] | &[dtype, layout, _, _, _, _]) = pickle.tuple(state) else {
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
        Value::Global(other @ Global::OtherDtype(_)) => Err(unsupported_dtype(other)),
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

    /// Adds those of another rank. What both have is taken from the first.
    fn add_all(&mut self, later: Self) {
        for (path, name) in later.files {
            self.files.entry(path).or_insert(name);
        }
        for (key, stored) in later.of_tensors {
            self.of_tensors.entry(key).or_insert(stored);
        }
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
            None | Some(Value::None) => Transform::None,
            Some(Value::List(descriptors)) => match pickle.list(descriptors) {
                [] => Transform::None,
                [Value::Text(name)] => Transform::One(name),
                [_, _, ..] => Transform::Several(pickle.list(descriptors).len()),
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

/// A name for messages, shortened only where no tensor may have it.
pub(super) fn shown(name: &str) -> String {
    if name.len() <= limits::TENSOR_NAME_BYTES { name.to_owned() } else { shorten(name) }
}

fn unsupported(why: impl Into<String>) -> ReadError {
    ReadError::new(Class::UnsupportedObject, why)
}
