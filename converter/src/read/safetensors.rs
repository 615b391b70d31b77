//! safetensors checkpoints: one file, a folder of files, or a Hugging Face index and its shards.
//!
//! What is read together: the one file that was named; or the files of an index; or, in a folder without an index,
//! every `.safetensors` file directly in it (never in sub-folders: PyTorch's consolidating writer leaves each
//! tensor there a second time, in parts).
//!
//! A tensor lies whole in one file, unless the files say where their slices belong (see `header.rs`). Then
//! the tensor's shape is nowhere written down: it is, in each dimension, as far as any slice reaches. So a slice
//! that is lost at the end cannot be seen, but one lost elsewhere leaves a hole, which is refused. That happens:
//! where one rank holds two slices of a tensor, PyTorch's writer keeps only the last.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::{Occupied, Vacant};
use std::sync::Arc;

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use crate::checkpoint::{Checkpoint, Location, Others, Slice, Tensor};
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
        Some(name) => listing.read_named(&source, name)?,
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

    fn read_named(&mut self, source: &Source, name: &str) -> Result<()> {
        let file = source.file(name)?;
        // The name of a single file is not part of what it says: renamed, it is the same checkpoint.
        if is_index(&file)? { self.read_indexed(source, &file) } else { self.read_file(&file, "") }
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
        if let Some(missing) = index::missing_number(names) {
            let detail = format!(
                "the files beside it are numbered, and {missing} is not there; the copy is incomplete"
            );
            return Err(ReadError::new(Class::IndexMissingShard, detail).in_file(missing));
        }
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
        if label.is_empty() && sharding.is_some() && file.name().starts_with("shard-") {
            // How PyTorch's writer names one rank's file. Nothing in it tells what the other ranks hold.
            let detail = "it is one rank's part of a sharded save; name its folder to read the whole";
            return Err(ReadError::new(Class::UnsupportedFormat, detail).in_file(file.name()));
        }
        let total = index::total_of(file.name());
        if label.is_empty() && total > 1 {
            self.notes.push(format!(
                "the file is one of {total}; name its folder, or its index, to read all of them"
            ));
        }
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
        let bytes = file.read_metadata_at(header::LENGTH_BYTES, length)?;
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
        match self.parts.entry(entry.name) {
            // Room for one: nearly every tensor lies in one file, and there may be millions.
            Vacant(place) => {
                place.insert(vec![part]);
            }
            Occupied(mut place) => place.get_mut().push(part),
        }
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
            unreadable: Vec::new(),
            others: Others::default(),
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
    let files: Vec<_> = parts.iter().map(|part| Arc::clone(&part.file)).collect();
    try_join(&name, parts).map_err(|error| {
        let files: Vec<&str> = files.iter().map(|file| file.name()).collect();
        error.in_file(index::list(&files)).of_tensor(name.as_str())
    })
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;
    use safetensors::tensor::{TensorView, serialize};

    use super::*;
    use crate::read::header::tests::file;

    /// A folder of these files.
    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    fn open_at(path: &Path) -> Result<Checkpoint> {
        open(Source::open(path).unwrap())
    }

    fn open_folder(files: &[(&str, &[u8])]) -> Result<Checkpoint> {
        open_at(folder(files).path())
    }

    fn refused(files: &[(&str, &[u8])]) -> (Class, String) {
        let error = open_folder(files).unwrap_err();
        (error.class(), error.to_string())
    }

    /// A file of U8 tensors of two dimensions, every byte the file's `fill`; `info` is its sharding information.
    fn shard(fill: u8, tensors: &[(&str, [u64; 2])], info: Option<&str>) -> Vec<u8> {
        let mut end = 0;
        let mut members = Vec::new();
        if let Some(info) = info {
            members.push(serde_json::json!({ "DCP_SHARDING_INFO": info }).to_string());
            members[0] = format!("\"__metadata__\":{}", members[0]);
        }
        for (name, [rows, columns]) in tensors {
            let begin = end;
            end += rows * columns;
            members.push(format!(
                "{name:?}:{{\"dtype\":\"U8\",\"shape\":[{rows},{columns}],\"data_offsets\":[{begin},{end}]}}"
            ));
        }
        file(&format!("{{{}}}", members.join(",")), &vec![fill; usize::try_from(end).unwrap()])
    }

    fn at(tensor: &str, offsets: [u64; 2]) -> String {
        format!("{{\"{tensor}\":{{\"saved_offsets\":{offsets:?}}}}}")
    }

    fn index(weight_map: &[(&str, &str)]) -> Vec<u8> {
        let weight_map: BTreeMap<_, _> = weight_map.iter().copied().collect();
        serde_json::json!({ "metadata": { "total_size": 1.5 }, "weight_map": weight_map })
            .to_string()
            .into_bytes()
    }

    fn names(checkpoint: &Checkpoint) -> Vec<&str> {
        checkpoint.tensors.iter().map(|tensor| tensor.name.as_str()).collect()
    }

    /// The one byte value that all bytes of a tensor's first slice have.
    fn fill(tensor: &Tensor) -> u8 {
        let Location::Dense { file, offset } = &tensor.slices[0].location else { panic!("not dense") };
        let bytes = file.read_vec_at(*offset, tensor.slices[0].elements()).unwrap();
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        bytes[0]
    }

    const ONE: &str = "m-00001-of-00002.safetensors";
    const TWO: &str = "m-00002-of-00002.safetensors";
    const INDEX: &str = "m.safetensors.index.json";

    #[test]
    fn one_file_by_the_library_reads_back() {
        let data: Vec<u8> = (0..24).collect();
        let views = [
            ("table", TensorView::new(safetensors::Dtype::F32, vec![3, 2], &data).unwrap()),
            ("scalar", TensorView::new(safetensors::Dtype::I64, vec![], &data[..8]).unwrap()),
            ("empty", TensorView::new(safetensors::Dtype::BF16, vec![0, 4], &[]).unwrap()),
        ];
        let bytes = serialize(views, None).unwrap();
        let checkpoint = open_folder(&[("model.safetensors", &bytes)]).unwrap();
        assert_eq!(names(&checkpoint), ["empty", "scalar", "table"]);
        let [empty, _, table] = &checkpoint.tensors[..] else { panic!("three tensors") };
        assert_eq!((empty.shape.as_slice(), empty.dtype, empty.elements()), (&[0, 4][..], Dtype::Bf16, 0));
        assert_eq!(table.shape, [3, 2]);
    }

    #[test]
    fn a_header_without_padding_gives_unaligned_offsets() {
        let bytes = shard(7, &[("t", [2, 3])], None);
        let folder = folder(&[("a", &bytes)]);
        let checkpoint = open_at(&folder.path().join("a")).unwrap();
        let Location::Dense { offset, .. } = checkpoint.tensors[0].slices[0].location else {
            panic!("not dense")
        };
        assert_eq!(offset, u64::try_from(bytes.len()).unwrap() - 6);
        assert_eq!(fill(&checkpoint.tensors[0]), 7);
    }

    #[test]
    fn a_folder_without_index_is_read_whole_but_not_its_sub_folders() {
        let one = shard(1, &[("a", [1, 1])], None);
        let two = shard(2, &[("b", [1, 1])], None);
        let checkpoint =
            open_folder(&[("x.safetensors", &one), ("y.safetensors", &two), ("sharded/x.safetensors", &one)])
                .unwrap();
        assert_eq!(names(&checkpoint), ["a", "b"]);
    }

    #[test]
    fn a_tensor_in_two_files_is_refused_naming_both() {
        let (class, message) = refused(&[
            ("x.safetensors", &shard(1, &[("a", [1, 1])], None)),
            ("y.safetensors", &shard(2, &[("a", [1, 1])], None)),
        ]);
        assert_eq!(class, Class::IndexDuplicateTensor);
        assert!(
            message.contains("x.safetensors")
                && message.contains("y.safetensors")
                && message.contains("\"a\"")
        );
    }

    #[test]
    fn slices_are_put_where_their_files_say() {
        let one = shard(1, &[("t", [2, 3]), ("whole", [1, 1])], Some(&at("t", [0, 0])));
        let two = shard(2, &[("t", [1, 3])], Some(&at("t", [2, 0])));
        let checkpoint = open_folder(&[("x.safetensors", &two), ("y.safetensors", &one)]).unwrap();
        let [tensor, _] = &checkpoint.tensors[..] else { panic!("two tensors") };
        assert_eq!(tensor.shape, [3, 3]);
        let offsets: Vec<_> = tensor.slices.iter().map(|slice| slice.offsets.as_slice()).collect();
        assert_eq!(offsets, [[0, 0], [2, 0]]);
        assert_eq!(fill(tensor), 1);
    }

    #[test]
    fn slices_that_do_not_fit_together_are_refused() {
        let slice = |shape, offsets| shard(1, &[("t", shape)], Some(&at("t", offsets)));
        let class = |one: &[u8], two: &[u8]| refused(&[("x.safetensors", one), ("y.safetensors", two)]).0;
        let first = slice([2, 2], [0, 0]);
        assert_eq!(class(&first, &first), Class::IndexDuplicateTensor);
        assert_eq!(class(&first, &slice([2, 2], [0, 3])), Class::DcpChunkGap);
        assert_eq!(class(&first, &slice([2, 2], [1, 0])), Class::DcpChunkOverlap);
        assert_eq!(class(&first, &slice([2, 2], [u64::MAX, 0])), Class::ShapeOverflow);
        assert_eq!(class(&first, &slice([2, 2], [1 << 63, 1 << 63])), Class::ShapeOverflow);
        assert_eq!(class(&first, &shard(1, &[("t", [2, 2])], None)), Class::IndexDuplicateTensor);
        let other = file(
            "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{\\\"saved_offsets\\\":[2,0]}}\"},\
             \"t\":{\"dtype\":\"I8\",\"shape\":[2,2],\"data_offsets\":[0,4]}}",
            &[0; 4],
        );
        assert_eq!(class(&first, &other), Class::DcpChunkMismatch);
    }

    #[test]
    fn a_number_that_is_missing_is_missed() {
        let file = |fill: u8, name: &str| shard(fill, &[(name, [2, 2])], None);
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| fs::write(folder.path().join(name), bytes).unwrap();
        write("m-00001-of-00003.safetensors", file(1, "a"));
        write("m-00003-of-00003.safetensors", file(3, "c"));
        let error = open(Source::open(folder.path()).unwrap()).unwrap_err();
        assert_eq!(error.class(), Class::IndexMissingShard);
        assert_eq!(error.file(), Some("m-00002-of-00003.safetensors"));
        let alone = open(Source::open(&folder.path().join("m-00003-of-00003.safetensors")).unwrap()).unwrap();
        assert!(alone.notes[0].contains("one of 3"), "{:?}", alone.notes);
        write("m-00002-of-00003.safetensors", file(2, "b"));
        assert_eq!(open(Source::open(folder.path()).unwrap()).unwrap().tensors.len(), 3);
        write("zero-0-of-2.safetensors", file(2, "e"));
        let error = open(Source::open(folder.path()).unwrap()).unwrap_err();
        assert_eq!(error.file(), Some("zero-1-of-2.safetensors"));
        fs::remove_file(folder.path().join("zero-0-of-2.safetensors")).unwrap();
        write("x-1-of-99999999999999999999.safetensors", file(2, "d"));
        assert_eq!(open(Source::open(folder.path()).unwrap()).unwrap().tensors.len(), 4);
    }

    #[test]
    fn one_ranks_file_alone_is_refused() {
        let info = "{\"t\":{\"saved_offsets\":[0,0]}}";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard-00001-model-00001-of-00001.safetensors");
        fs::write(&path, shard(1, &[("t", [2, 2])], Some(info))).unwrap();
        let error = open(Source::open(&path).unwrap()).unwrap_err();
        assert_eq!(error.class(), Class::UnsupportedFormat);
        assert_eq!(open(Source::open(folder.path()).unwrap()).unwrap().tensors.len(), 1);
    }

    #[test]
    fn malformed_sharding_information_is_refused() {
        for (info, class) in [
            ("", Class::BadMetadata),
            ("[]", Class::BadMetadata),
            ("{\"t\":[0,0]}", Class::BadMetadata),
            ("{\"t\":{}}", Class::BadMetadata),
            ("{\"t\":{\"saved_offsets\":[0]}}", Class::BadMetadata),
            ("{\"t\":{\"saved_offsets\":[0,-1]}}", Class::BadMetadata),
            ("{\"t\":{\"saved_offsets\":[0,0.5]}}", Class::BadMetadata),
            ("{\"t\":{\"saved_offsets\":[0,0]},\"t\":{\"saved_offsets\":[0,0]}}", Class::DuplicateKey),
            ("{\"t\":{\"saved_offsets\":[0,0],\"saved_offsets\":[0,0]}}", Class::DuplicateKey),
            ("{\"t\":{\"saved_offsets\":[0,0],\"x\":{\"y\":1,\"y\":1}}}", Class::DuplicateKey),
        ] {
            assert_eq!(
                refused(&[("x.safetensors", &shard(1, &[("t", [1, 1])], Some(info)))]).0,
                class,
                "{info}"
            );
        }
    }

    #[test]
    fn an_index_decides_which_file_counts() {
        let one = shard(1, &[("a", [1, 1]), ("b", [1, 1])], None);
        let two = shard(2, &[("b", [1, 1])], None);
        let checkpoint =
            open_folder(&[(INDEX, &index(&[("a", ONE), ("b", TWO)])), (ONE, &one), (TWO, &two)]).unwrap();
        assert_eq!(names(&checkpoint), ["a", "b"]);
        assert_eq!(fill(&checkpoint.tensors[1]), 2);
        assert!(checkpoint.notes[0].contains("\"b\""), "{:?}", checkpoint.notes);
    }

    #[test]
    fn an_index_and_its_folder_must_agree() {
        let one = shard(1, &[("a", [1, 1])], None);
        let two = shard(2, &[("b", [1, 1])], None);
        let with = |index: &[u8]| refused(&[(INDEX, index), (ONE, &one), (TWO, &two)]);
        let (class, message) = with(&index(&[("a", ONE), ("b", ONE)]));
        assert_eq!(class, Class::IndexExtraTensor, "{message}");
        assert!(message.contains(TWO) && message.contains("name the index"), "{message}");
        let (class, message) = with(&index(&[("a", TWO), ("b", TWO)]));
        assert_eq!(class, Class::IndexExtraTensor, "{message}");
        let (class, message) = with(&index(&[("a", ONE), ("b", TWO), ("c", TWO)]));
        assert_eq!(class, Class::IndexTensorMissing);
        assert!(message.contains(TWO) && message.contains("\"c\""), "{message}");
        let (class, message) = with(&index(&[("a", ONE), ("c", TWO)]));
        assert_eq!(class, Class::IndexExtraTensor);
        assert!(message.contains(TWO) && message.contains("\"b\""), "{message}");
        let (class, message) = with(&index(&[("a", "gone-1.safetensors"), ("b", "gone-2.safetensors")]));
        assert_eq!(class, Class::IndexMissingShard);
        for part in ["gone-1", "gone-2", "2 safetensors files here are not in the index", ONE, TWO] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_tensor_in_another_shard_than_the_index_says_is_missing_there() {
        let both = shard(1, &[("a", [1, 1]), ("b", [1, 1])], None);
        let two = shard(2, &[("c", [1, 1])], None);
        let (class, message) =
            refused(&[(INDEX, &index(&[("a", ONE), ("b", TWO), ("c", TWO)])), (ONE, &both), (TWO, &two)]);
        assert_eq!(class, Class::IndexTensorMissing);
        assert!(message.contains(TWO) && message.contains(ONE), "{message}");
    }

    #[test]
    fn a_named_index_passes_over_other_models_but_not_its_own_shards() {
        let one = shard(1, &[("a", [1, 1])], None);
        let files = folder(&[(INDEX, &index(&[("a", ONE)])), (ONE, &one), ("model.safetensors", &one)]);
        let checkpoint = open_at(&files.path().join(INDEX)).unwrap();
        assert!(checkpoint.notes[0].contains("model.safetensors"), "{:?}", checkpoint.notes);
        assert_eq!(open_at(files.path()).unwrap_err().class(), Class::IndexExtraTensor);
        fs::write(files.path().join(TWO), &one).unwrap();
        assert_eq!(open_at(&files.path().join(INDEX)).unwrap_err().class(), Class::IndexExtraTensor);
    }

    #[test]
    fn an_index_cannot_hide_slices() {
        let one = shard(1, &[("t", [1, 2])], Some(&at("t", [0, 0])));
        let two = shard(2, &[("t", [1, 2]), ("u", [1, 1])], Some(&at("t", [1, 0])));
        let (class, _) = refused(&[(INDEX, &index(&[("t", ONE), ("u", TWO)])), (ONE, &one), (TWO, &two)]);
        assert_eq!(class, Class::IndexDuplicateTensor);
        let (class, _) = refused(&[(INDEX, &index(&[("t", TWO), ("u", TWO)])), (TWO, &two)]);
        assert_eq!(class, Class::DcpChunkGap);
    }

    #[test]
    fn an_index_never_leads_out_of_its_folder() {
        let outside = folder(&[("x.safetensors", &shard(1, &[("a", [1, 1])], None))]);
        let outside = outside.path().join("x.safetensors");
        for name in ["../x.safetensors", outside.to_str().unwrap(), "link.safetensors"] {
            let files = folder(&[(INDEX, &index(&[("a", name)]))]);
            std::os::unix::fs::symlink(&outside, files.path().join("link.safetensors")).unwrap();
            let error = open_at(&files.path().join(INDEX)).unwrap_err();
            assert_eq!(error.class(), Class::IndexPathEscape, "{name}");
            assert_eq!(error.file(), Some(INDEX));
        }
    }

    #[test]
    fn dangling_links_are_missing_shards() {
        let files = folder(&[(INDEX, &index(&[("a", ONE), (&"x".repeat(300), &"y".repeat(300))]))]);
        std::os::unix::fs::symlink("../blobs/gone", files.path().join(ONE)).unwrap();
        let error = open_at(files.path()).unwrap_err();
        assert_eq!(error.class(), Class::IndexMissingShard);
        assert!(error.to_string().contains("blobs/gone"), "{error}");
        fs::remove_file(files.path().join(INDEX)).unwrap();
        assert_eq!(open_at(files.path()).unwrap_err().class(), Class::IndexMissingShard);
    }

    #[test]
    fn nothing_to_read_says_what_is_there() {
        let class = |files: &[(&str, &[u8])]| refused(files).0;
        assert_eq!(class(&[("a.safetensors", &file("{}", &[]))]), Class::NoTensors);
        assert_eq!(class(&[(INDEX, &index(&[]))]), Class::NoTensors);
        assert_eq!(class(&[(INDEX, &index(&[])), ("b.safetensors.index.json", b"")]), Class::IndexBad);
        let (class, message) = refused(&[("model.pt", b"x")]);
        assert_eq!(class, Class::UnsupportedFormat);
        assert!(message.contains("model.pt"), "{message}");
    }

    #[test]
    fn the_fingerprint_is_of_content() {
        let fingerprint = |path: &Path| open_at(path).unwrap().fingerprint;
        let one = shard(1, &[("a", [1, 1])], None);
        let files = folder(&[("a", &one), ("b", &one), ("c", &shard(1, &[("a", [2, 1])], None))]);
        let of = |name: &str| fingerprint(&files.path().join(name));
        assert_eq!(of("a"), of("b"));
        assert_ne!(of("a"), of("c"));
        let named = |name: &str| fingerprint(folder(&[(name, &one)]).path());
        assert_eq!(named("a.safetensors"), named("a.safetensors"));
        assert_ne!(named("a.safetensors"), named("b.safetensors"));
    }

    proptest! {
        #[test]
        fn any_file_is_read_or_refused(
            header in "[{}\\[\\]:,\"a-c0-9 -]{0,80}",
            cut in 0usize..100,
            data in proptest::collection::vec(any::<u8>(), 0..16),
        ) {
            let mut bytes = file(&header, &data);
            bytes.truncate(bytes.len().saturating_sub(cut.saturating_sub(50)));
            let files = folder(&[("x.safetensors", &bytes), (INDEX, header.as_bytes())]);
            let _ = open_at(files.path());
            let _ = open_at(&files.path().join("x.safetensors"));
            let _ = detect::format(&Source::open(&files.path().join(INDEX)).unwrap());
        }

        #[test]
        fn slices_of_any_cut_join_to_the_whole(
            cuts in proptest::collection::btree_set(1u64..40, 0..6),
            width in 1u64..5,
        ) {
            let bounds: Vec<u64> = std::iter::once(0).chain(cuts).chain([40]).collect();
            let files: Vec<(String, Vec<u8>)> = bounds
                .array_windows()
                .map(|[begin, end]| {
                    let bytes = shard(1, &[("t", [end - begin, width])], Some(&at("t", [*begin, 0])));
                    (format!("{}.safetensors", 99 - begin), bytes)
                })
                .collect();
            let files: Vec<(&str, &[u8])> =
                files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
            let checkpoint = open_folder(&files).unwrap();
            prop_assert_eq!(&checkpoint.tensors[0].shape, &[40, width]);
            prop_assert_eq!(checkpoint.tensors[0].slices.len(), files.len());
        }
    }
}
