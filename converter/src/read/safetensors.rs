//! safetensors checkpoints: one file, a folder of files, or a Hugging Face index and its shards.
//!
//! What is read together: the one file that was named; or the files of an index; or, in a folder without an index,
//! every `.safetensors` file directly in it (never in sub-folders: `PyTorch`'s consolidating writer leaves each
//! tensor there a second time, in parts).
//!
//! A tensor lies whole in one file, unless the files say where their slices belong (see [`super::header`]). Then
//! the tensor's shape is nowhere written down: it is, in each dimension, as far as any slice reaches. So a slice
//! that is lost at the end cannot be seen, but one lost elsewhere leaves a hole, which is refused. That happens:
//! where one rank holds two slices of a tensor, `PyTorch`'s writer keeps only the last.

use std::collections::BTreeMap;
use std::sync::Arc;

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use crate::checkpoint::{Checkpoint, Location, Slice, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::read::header::{self, Entry, Header};
use crate::read::{detect, index};
use crate::shape::tiling;
use crate::source::{Source, SourceFile};

/// What the fingerprint's digest begins with: another way of digesting gets another one.
const FINGERPRINT_DOMAIN: &[u8] = b"weighbridge safetensors fingerprint 1\n";
/// How much of a file is read to learn its header's length, and what else it may be.
const FIRST_BYTES: u64 = 64;

/// Lists the tensors of the safetensors checkpoint at `source`.
///
/// # Errors
/// A class of [`Class`] for each thing that can be wrong, naming the file, and the tensor where there is one.
pub fn open(source: Source) -> Result<Checkpoint> {
    let mut listing = Listing::new();
    match source.entry() {
        Some(name) => {
            let file = source.file(name)?;
            if is_index(&file)? {
                listing.read_indexed(&source, &file)?
            } else {
                listing.read_file(&file, "")?
            }
        }
        None => listing.read_folder(&source)?,
    }
    listing.finish(source)
}

fn is_index(file: &SourceFile) -> Result<bool> {
    let first = file.read_vec_at(0, file.len().min(FIRST_BYTES))?;
    Ok(file.name().ends_with(".json") || index::is_json(&first))
}

/// One tensor's part in one file.
#[derive(Debug)]
struct Part {
    file: Arc<SourceFile>,
    /// The first byte in the file.
    offset: u64,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Where the part starts in the tensor; `None` for a whole tensor.
    start: Option<Vec<u64>>,
}

/// What has been read so far.
struct Listing {
    parts: BTreeMap<TensorName, Vec<Part>>,
    count: usize,
    digest: blake3::Hasher,
    notes: Vec<String>,
}

impl Listing {
    fn new() -> Self {
        let mut digest = blake3::Hasher::new();
        digest.update(FINGERPRINT_DOMAIN);
        Self { parts: BTreeMap::new(), count: 0, digest, notes: Vec::new() }
    }

    fn read_folder(&mut self, source: &Source) -> Result<()> {
        let names = source.names()?;
        let indexes: Vec<&String> = names.iter().filter(|name| index::is_index_name(name)).collect();
        match indexes.as_slice() {
            [] => self.read_all(source, &names),
            [name] => self.read_indexed(source, source.file(name)?.as_ref()),
            several => {
                let detail =
                    format!("the folder holds several indexes, {}; name one of them", index::list(several));
                Err(ReadError::new(Class::IndexBad, detail))
            }
        }
    }

    /// Reads every `.safetensors` file among `names`.
    fn read_all(&mut self, source: &Source, names: &[String]) -> Result<()> {
        let mut found = false;
        for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
            found = true;
            let file = source.file(name).map_err(|error| match error.class() {
                Class::NotFound => ReadError::new(Class::IndexMissingShard, error.to_string()),
                _ => error,
            })?;
            self.read_file(&file, name)?;
        }
        if found { Ok(()) } else { Err(detect::no_checkpoint(names)) }
    }

    /// Reads `file`, which the fingerprint knows by `label`.
    fn read_file(&mut self, file: &Arc<SourceFile>, label: &str) -> Result<()> {
        let (header, data) = self.read_header(file, label)?;
        let sharding = header.sharding;
        header.entries.into_iter().try_for_each(|entry| {
            let start = start(&entry, sharding.as_ref()).map_err(|error| error.in_file(file.name()))?;
            self.add(file, data, entry, start)
        })
    }

    /// Reads the shards that the index `file` names.
    fn read_indexed(&mut self, source: &Source, file: &SourceFile) -> Result<()> {
        let bytes = index::read(file)?;
        self.digest_field(&bytes);
        self.read_shards(source, &bytes).map_err(|error| error.in_file(file.name()))
    }

    fn read_shards(&mut self, source: &Source, index: &[u8]) -> Result<()> {
        let index = index::parse(index)?;
        let shards = index.shards(source)?;
        self.pass_over(source, &index)?;
        let mut elsewhere = BTreeMap::new();
        for shard in shards {
            let (header, data) = self.read_header(&shard, shard.name())?;
            for entry in header.entries {
                let start =
                    start(&entry, header.sharding.as_ref()).map_err(|error| error.in_file(shard.name()))?;
                match index.weight_map.get(entry.name.as_str()) {
                    Some(file) if file == shard.name() => self.add(&shard, data, entry, start)?,
                    Some(file) => {
                        check_copy(&entry, start.as_deref(), file)
                            .map_err(|error| error.in_file(shard.name()))?;
                        elsewhere.insert(entry.name, Arc::clone(&shard));
                    }
                    None => {
                        let detail = "the shard holds the tensor, but the index does not name it";
                        let error = ReadError::new(Class::IndexExtraTensor, detail);
                        return Err(error.in_file(shard.name()).of_tensor(entry.name.as_str()));
                    }
                }
            }
        }
        self.check_all_found(&index, &elsewhere)
    }

    /// Refuses, or notes, the folder's files that the index does not name.
    fn pass_over(&mut self, source: &Source, index: &index::Index) -> Result<()> {
        let unnamed = index.unnamed(source)?;
        let entry_named = source.entry().is_some();
        let alike = index.numbered_alike(&unnamed);
        if !entry_named && !unnamed.is_empty() {
            let detail = format!(
                "the index does not name these files beside it: {}; take them away, or name the index file itself \
                 to read only what it names",
                index::list(&unnamed)
            );
            return Err(ReadError::new(Class::IndexExtraTensor, detail));
        }
        if !alike.is_empty() {
            let detail = format!("the index does not name these shards beside it: {}", index::list(&alike));
            return Err(ReadError::new(Class::IndexExtraTensor, detail));
        }
        if !unnamed.is_empty() {
            self.notes.push(format!("not in the index, so not read: {}", index::list(&unnamed)));
        }
        Ok(())
    }

    /// Checks that each tensor of the index was where it should be; `elsewhere` is where else tensors were.
    fn check_all_found(
        &mut self,
        index: &index::Index,
        elsewhere: &BTreeMap<TensorName, Arc<SourceFile>>,
    ) -> Result<()> {
        for (name, file) in &index.weight_map {
            if self.parts.contains_key(name.as_str()) {
                continue;
            }
            let other = elsewhere
                .get(name.as_str())
                .map_or_else(String::new, |file| format!("; it is in {}", file.name()));
            let detail = format!("the index puts the tensor in this file, which lacks it{other}");
            return Err(ReadError::new(Class::IndexTensorMissing, detail).in_file(file).of_tensor(name));
        }
        if let Some((name, file)) = elsewhere.first_key_value() {
            self.notes.push(format!(
                "{} tensors are in a second shard too, the first of them {name:?} in {}; read where the index says",
                elsewhere.len(),
                file.name()
            ));
        }
        Ok(())
    }

    /// The header of `file`, and where its data begins.
    fn read_header(&mut self, file: &SourceFile, label: &str) -> Result<(Header, u64)> {
        let first = file.read_vec_at(0, file.len().min(FIRST_BYTES))?;
        let length = header::length(&first, file.len()).map_err(|error| error.in_file(file.name()))?;
        let bytes = file.read_vec_at(header::LENGTH_BYTES, length)?;
        self.digest_field(label.as_bytes());
        self.digest_field(&bytes);
        self.digest_field(&file.len().to_le_bytes());
        let header = header::parse(&bytes, file.len()).map_err(|error| error.in_file(file.name()))?;
        Ok((header, header::LENGTH_BYTES.saturating_add(length)))
    }

    fn digest_field(&mut self, field: &[u8]) {
        self.digest.update(&u64::try_from(field.len()).unwrap_or(u64::MAX).to_le_bytes());
        self.digest.update(field);
    }

    fn add(
        &mut self,
        file: &Arc<SourceFile>,
        data: u64,
        entry: Entry,
        start: Option<Vec<u64>>,
    ) -> Result<()> {
        if self.count == limits::TENSORS {
            let detail = format!("the checkpoint has more than {} tensors and slices", limits::TENSORS);
            return Err(ReadError::new(Class::LimitExceeded, detail).in_file(file.name()));
        }
        self.count = self.count.saturating_add(1);
        let part = Part {
            file: Arc::clone(file),
            offset: data.saturating_add(entry.begin),
            dtype: entry.dtype,
            shape: entry.shape,
            start,
        };
        self.parts.entry(entry.name).or_default().push(part);
        Ok(())
    }

    fn finish(self, source: Source) -> Result<Checkpoint> {
        if self.parts.is_empty() {
            let error = ReadError::new(Class::NoTensors, "the checkpoint holds no tensor");
            return Err(match source.entry() {
                Some(name) => error.in_file(name),
                None => error,
            });
        }
        let tensors = self.parts.into_iter().map(|(name, parts)| join(name, parts)).collect::<Result<_>>()?;
        Ok(Checkpoint {
            source,
            format: Format::Safetensors,
            fingerprint: Fingerprint::from_bytes(*self.digest.finalize().as_bytes()),
            tensors,
            notes: self.notes,
        })
    }
}

/// Where the slice `entry` starts, if its file says that it holds slices. One that is not spoken of is whole.
fn start(entry: &Entry, sharding: Option<&BTreeMap<String, Vec<u64>>>) -> Result<Option<Vec<u64>>> {
    let Some(sharding) = sharding else { return Ok(None) };
    let start = sharding.get(entry.name.as_str()).cloned().unwrap_or_else(|| vec![0; entry.shape.len()]);
    if start.len() == entry.shape.len() {
        return Ok(Some(start));
    }
    let detail =
        format!("its saved_offsets {start:?} have not the dimensions of its shape {:?}", entry.shape);
    Err(ReadError::new(Class::BadMetadata, detail).of_tensor(entry.name.as_str()))
}

/// A second copy of a tensor that the index puts in `mapped` may be passed over; another slice of it may not.
fn check_copy(entry: &Entry, start: Option<&[u64]>, mapped: &str) -> Result<()> {
    if start.is_none_or(|start| start.iter().all(|&offset| offset == 0)) {
        return Ok(());
    }
    let detail = format!(
        "the file holds a slice of the tensor, but the index puts all of it in {mapped}; an index cannot name slices: \
         take it away to read the files together"
    );
    Err(ReadError::new(Class::IndexDuplicateTensor, detail).of_tensor(entry.name.as_str()))
}

/// Puts the parts of the tensor `name` together.
fn join(name: TensorName, parts: Vec<Part>) -> Result<Tensor> {
    let files: Vec<String> = parts.iter().map(|part| part.file.name().to_owned()).collect();
    try_join(&name, parts).map_err(|error| error.in_file(index::list(&files)).of_tensor(name.as_str()))
}

fn try_join(name: &TensorName, mut parts: Vec<Part>) -> Result<Tensor> {
    check_agreement(&parts)?;
    let Some(dtype) = parts.first().map(|part| part.dtype) else {
        return Err(ReadError::new(Class::NoTensors, "the tensor has no part"));
    };
    parts.sort_by(|a, b| a.start.cmp(&b.start));
    check_no_copies(&parts)?;
    let shape = whole_shape(&parts)?;
    if element_count(&shape, dtype).is_none() {
        let detail =
            format!("its slices reach to {shape:?} of {}, which does not fit 64 bits", dtype.as_str());
        return Err(ReadError::new(Class::ShapeOverflow, detail));
    }
    let slices = parts.into_iter().filter(|part| !is_empty(part)).map(slice).collect();
    let tensor = Tensor { name: name.clone(), dtype, shape, slices };
    tiling::check(&tensor)?;
    Ok(tensor)
}

/// Checks that `parts` can be of one tensor: either one that is whole, or slices of the same type at places of
/// their own.
fn check_agreement(parts: &[Part]) -> Result<()> {
    if parts.len() > limits::SLICES_A_TENSOR {
        let detail =
            format!("it lies in {} slices; at most {} are taken", parts.len(), limits::SLICES_A_TENSOR);
        return Err(ReadError::new(Class::LimitExceeded, detail));
    }
    let Some((first, rest)) = parts.split_first() else { return Ok(()) };
    for part in rest {
        let both = format!("{} and {}", first.file.name(), part.file.name());
        if first.start.is_none() || part.start.is_none() {
            let detail = format!("both {both} hold the tensor; take one away, or name the file to read");
            return Err(ReadError::new(Class::IndexDuplicateTensor, detail));
        }
        if (part.dtype, part.shape.len()) != (first.dtype, first.shape.len()) {
            let detail = format!(
                "its slices disagree: {} of shape {:?} in {}, {} of shape {:?} in {}",
                first.dtype.as_str(),
                first.shape,
                first.file.name(),
                part.dtype.as_str(),
                part.shape,
                part.file.name()
            );
            return Err(ReadError::new(Class::DcpChunkMismatch, detail));
        }
    }
    Ok(())
}

/// Checks that no two of `parts`, sorted by where they start, are the same slice.
fn check_no_copies(parts: &[Part]) -> Result<()> {
    let copies =
        parts.array_windows().find(|[a, b]| a.start == b.start && a.shape == b.shape && !is_empty(a));
    let Some([a, b]) = copies else { return Ok(()) };
    let start = a.start.as_deref().unwrap_or_default();
    let detail =
        format!("both {} and {} hold its slice at {start:?}; take one away", a.file.name(), b.file.name());
    Err(ReadError::new(Class::IndexDuplicateTensor, detail))
}

fn is_empty(part: &Part) -> bool {
    part.shape.contains(&0)
}

/// The shape of the tensor of `parts`: in each dimension, as far as one of them reaches.
fn whole_shape(parts: &[Part]) -> Result<Vec<u64>> {
    let mut whole = Vec::new();
    for part in parts {
        whole.resize(part.shape.len(), 0);
        for (dimension, (reach, &size)) in whole.iter_mut().zip(&part.shape).enumerate() {
            let start = part.start.as_ref().and_then(|start| start.get(dimension)).copied().unwrap_or(0);
            let end = start.checked_add(size).ok_or_else(|| {
                let detail =
                    format!("its slice of {size} at {start} in dimension {dimension} does not fit 64 bits");
                ReadError::new(Class::ShapeOverflow, detail)
            })?;
            *reach = end.max(*reach);
        }
    }
    Ok(whole)
}

fn slice(part: Part) -> Slice {
    let offsets = part.start.unwrap_or_else(|| vec![0; part.shape.len()]);
    Slice { offsets, sizes: part.shape, location: Location::Dense { file: part.file, offset: part.offset } }
}
