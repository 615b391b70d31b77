//! The snapshot manifest `weighbridge.snapshot/v1`: what an immutable snapshot consists of.
//!
//! A snapshot's id is the BLAKE3 of its manifest's canonical bytes ([`SnapshotManifest::to_bytes`]). Nothing in a
//! manifest depends on when, where, how often or by whom it was published: the same checkpoint under the same
//! rules gives the same id.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::canonical;
use crate::checkpoint::Format;
use crate::dtype::Dtype;
use crate::encoding::{Encoding, Form, Layout};
use crate::error::{DocumentError, shorten};
use crate::ids::{ChunkId, Fingerprint, RulesDigest, SnapshotId};
use crate::json;
use crate::limits;
use crate::names::{ModelName, RunName, TensorName};

const DOCUMENT: &str = "snapshot manifest";

/// The name of the manifest's copy beside the files, wherever a snapshot is fetched to.
pub const MANIFEST_FILE: &str = "snapshot.json";

/// The `schema` field of a snapshot manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum SnapshotSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.snapshot/v1")]
    V1,
}

/// What a snapshot consists of. Unknown fields are ignored when read: a newer version may add some.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotManifest {
    /// Always `weighbridge.snapshot/v1`.
    pub schema: SnapshotSchema,
    /// The model.
    pub model: ModelName,
    /// The training run.
    pub run: RunName,
    /// The training step.
    pub step: u64,
    /// The checkpoint's format.
    pub format: Format,
    /// The checkpoint's fingerprint.
    pub checkpoint: Fingerprint,
    /// The digest of the policy's rules.
    pub rules: RulesDigest,
    /// The version of the encoders ([`crate::encoding::ENCODING_VERSION`]).
    pub encoding_version: u32,
    /// The files, in order of their names.
    pub files: Vec<SnapshotFile>,
    /// The tensors, in order of their names.
    pub tensors: Vec<SnapshotTensor>,
}

/// A file: the concatenation of its chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotFile {
    /// A plain file name; of an artifact, its path in parts of `/`.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// Whether it is a file that lay beside the checkpoint, published as it is. Absent where it is not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub artifact: bool,
    /// In order.
    pub chunks: Vec<Chunk>,
}

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Chunk {
    /// The BLAKE3 of the bytes.
    pub id: ChunkId,
    /// How many bytes.
    pub size: u64,
}

/// A tensor, and where its bytes lie.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotTensor {
    /// The name.
    pub name: TensorName,
    /// The logical shape, as in the checkpoint; of a pruned table, with the rows that were kept.
    pub shape: Vec<u64>,
    /// The element type in the checkpoint.
    pub source_dtype: Dtype,
    /// How the bytes are stored.
    pub encoding: Encoding,
    /// Where scale and bias stand, for row-wise encodings.
    pub layout: Layout,
    /// A stored row's size is a multiple of this, in bytes; absent for 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub row_alignment: u64,
    /// The elements of a stored row, where rows were padded with zeros to have more than `shape` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_width: Option<u64>,
    /// Of a pruned table, what became of its rows. Absent where all were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pruned: Option<Pruned>,
    /// The file's name.
    pub file: String,
    /// The first byte in the file.
    pub begin: u64,
    /// The byte behind the last one.
    pub end: u64,
}

/// What became of the rows of a pruned table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Pruned {
    /// How many rows the table has in the checkpoint.
    pub source_rows: u64,
    /// The tensor that says where they went: I32 of shape `[source_rows]`, for every row of the source its number in
    /// the table, or -1 where it was pruned. It is what FBGEMM's lookups in pruned tables take as `index_remapping`.
    pub index_remapping: TensorName,
}

/// What a published safetensors file says about one tensor, under the key `weighbridge` of its `__metadata__`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TensorMetadata {
    /// How the bytes are stored.
    pub encoding: Encoding,
    /// Where scale and bias stand.
    pub layout: Layout,
    /// A stored row's size is a multiple of this, in bytes; absent for 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub row_alignment: u64,
    /// The elements of a stored row, where rows were padded with zeros to have more than `shape` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_width: Option<u64>,
    /// The logical shape.
    pub shape: Vec<u64>,
    /// The element type in the checkpoint.
    pub source_dtype: Dtype,
    /// Of a pruned table, what became of its rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pruned: Option<Pruned>,
}

impl SnapshotManifest {
    /// The canonical bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut object = canonical::Object::default();
        object.field("checkpoint", &self.checkpoint);
        object.field("encoding_version", &self.encoding_version);
        object.array("files", &self.files);
        object.field("format", &self.format);
        object.field("model", &self.model);
        object.field("rules", &self.rules);
        object.field("run", &self.run);
        object.field("schema", &self.schema);
        object.field("step", &self.step);
        object.array("tensors", &self.tensors);
        object.finish()
    }

    /// The snapshot's id.
    #[must_use]
    pub fn id(&self) -> SnapshotId {
        SnapshotId::of(&self.to_bytes())
    }

    /// The size of all files, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }

    /// Each chunk of the snapshot once, with its size.
    #[must_use]
    pub fn chunks(&self) -> BTreeMap<ChunkId, u64> {
        self.files.iter().flat_map(|file| &file.chunks).map(|chunk| (chunk.id, chunk.size)).collect()
    }

    /// Reads a manifest. The caller has checked that `json` hashes to the snapshot's id.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no manifest, or contradict themselves: a file name that leads
    /// elsewhere, sizes that don't add up, a tensor outside its file, a pruned table without its remapping.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        if json.len() > limits::SNAPSHOT_MANIFEST_BYTES {
            let why = format!("{} bytes; at most {}", json.len(), limits::SNAPSHOT_MANIFEST_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        let manifest: Self = json::object(DOCUMENT, json)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The invariants, checked before a manifest is written and after it is read.
    ///
    /// # Errors
    /// [`DocumentError::Malformed`] naming what contradicts what.
    pub fn check(&self) -> Result<(), DocumentError> {
        check_file_names(self.files.iter().map(|file| (file.name.as_str(), file.artifact)))?;
        self.files.iter().try_for_each(SnapshotFile::check)?;
        let tensor_files = self.files.iter().filter(|file| !file.artifact);
        let sizes: BTreeMap<_, _> = tensor_files.map(|file| (file.name.as_str(), file.size)).collect();
        let mut tensors = HashMap::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let place = tensor.name.as_str();
            if tensors.insert(place, tensor).is_some() {
                return Err(malformed(format!("tensor {place:?} stands twice")));
            }
            let size = sizes.get(tensor.file.as_str());
            let inside = size.is_some_and(|&size| tensor.begin <= tensor.end && tensor.end <= size);
            if !inside || tensor.stored_bytes() != Some(tensor.end - tensor.begin) {
                return Err(malformed(format!(
                    "tensor {place:?} does not fit its place in {:?}",
                    tensor.file
                )));
            }
        }
        match self.tensors.iter().find(|tensor| !tensor.has_its_remapping(&tensors)) {
            Some(tensor) => Err(malformed(format!(
                "pruned table {:?} has no remapping of its rows that fits it",
                tensor.name.as_str()
            ))),
            None => Ok(()),
        }
    }
}

impl SnapshotFile {
    fn check(&self) -> Result<(), DocumentError> {
        let good = |chunk: &Chunk| (1..=limits::LARGEST_CHUNK_BYTES).contains(&chunk.size);
        let sum = self.chunks.iter().try_fold(0u64, |sum, chunk| sum.checked_add(chunk.size));
        if sum != Some(self.size) || !self.chunks.iter().all(good) {
            return Err(malformed(format!("the chunks of file {:?} do not add up to its size", self.name)));
        }
        Ok(())
    }
}

impl SnapshotTensor {
    /// How its rows are laid out and decoded.
    #[must_use]
    pub const fn form(&self) -> Form {
        let Self { encoding, layout, row_alignment, stored_width, .. } = *self;
        Form { encoding, layout, row_alignment, stored_width }
    }

    /// The stored size by shape and encoding, in bytes; `None` where it overflows, or where the row's layout
    /// contradicts itself.
    #[must_use]
    pub fn stored_bytes(&self) -> Option<u64> {
        self.form().stored_bytes(&self.shape, self.source_dtype)
    }

    /// Whether it is whole; or pruned, with the tensor among `tensors` that says where its rows went.
    fn has_its_remapping(&self, tensors: &HashMap<&str, &Self>) -> bool {
        let Some(Pruned { source_rows, index_remapping }) = &self.pruned else { return true };
        let kept = self.shape.first().is_some_and(|kept| kept <= source_rows);
        let remapping = tensors.get(index_remapping.as_str());
        kept && remapping.is_some_and(|remapping| {
            remapping.shape == [*source_rows]
                && remapping.source_dtype == Dtype::I32
                && remapping.encoding == Encoding::Keep
        })
    }
}

/// Checks the names of a snapshot's files (each with whether it is an artifact): artifacts have paths that stay within
/// the snapshot's folder, other files plain names; no name stands twice, is a folder of another's path, or is that of
/// the manifest's own copy.
///
/// # Errors
/// [`DocumentError::Malformed`] naming the file.
pub fn check_file_names<'n>(files: impl Iterator<Item = (&'n str, bool)>) -> Result<(), DocumentError> {
    // The manifest itself lies beside the files wherever they are fetched.
    let mut names = BTreeSet::from([MANIFEST_FILE]);
    for (name, artifact) in files {
        if !artifact && !is_plain_file_name(name) {
            return Err(malformed(format!("{:?} is not a plain file name", shorten(name))));
        }
        if artifact && let Some(why) = path_fault(name) {
            return Err(malformed(format!("artifact {:?}: {why}", shorten(name))));
        }
        if !names.insert(name) {
            return Err(malformed(format!("file {:?} stands twice", shorten(name))));
        }
    }
    // A file's folders sort before it, though not right before: each is looked up.
    for name in &names {
        let folders = name.match_indices('/').filter_map(|(at, _)| name.get(..at));
        if let Some(folder) = folders.into_iter().find(|&folder| names.contains(folder)) {
            return Err(malformed(format!(
                "{folder:?} is a file, and the folder of {:?} too",
                shorten(name)
            )));
        }
    }
    Ok(())
}

/// What is wrong with `path` as an artifact's, if anything is.
#[must_use]
pub fn path_fault(path: &str) -> Option<&'static str> {
    if path.len() > limits::ARTIFACT_PATH_BYTES || path.split('/').count() > limits::ARTIFACT_PATH_PARTS {
        return Some("the path is too long, or has too many parts");
    }
    if path.contains(|c: char| c.is_control() || c == '\\') {
        return Some("the path holds a control character or a backslash");
    }
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Some("the path leads elsewhere: no part of it may be empty, `.` or `..`");
    }
    if path.split('/').any(|part| part.len() > limits::PATH_PART_BYTES) {
        return Some("a part of the path is longer than file systems take");
    }
    None
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands the field over by reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

impl TensorMetadata {
    /// Of a tensor of logical `shape` that is stored as `form` says.
    #[must_use]
    pub const fn new(form: Form, shape: Vec<u64>, source_dtype: Dtype) -> Self {
        let Form { encoding, layout, row_alignment, stored_width } = form;
        Self { encoding, layout, row_alignment, stored_width, shape, source_dtype, pruned: None }
    }

    /// How its rows are laid out and decoded.
    #[must_use]
    pub const fn form(&self) -> Form {
        let Self { encoding, layout, row_alignment, stored_width, .. } = *self;
        Form { encoding, layout, row_alignment, stored_width }
    }
}

const fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
const fn is_one(value: &u64) -> bool {
    *value == 1
}

/// `A-Z a-z 0-9 . _ -`, 1 to 128 characters, not starting with a dot.
fn is_plain_file_name(name: &str) -> bool {
    name.parse::<ModelName>().is_ok()
}

fn malformed(why: String) -> DocumentError {
    DocumentError::Malformed { document: DOCUMENT, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> SnapshotManifest {
        SnapshotManifest {
            schema: SnapshotSchema::V1,
            model: "dlrm".parse().unwrap(),
            run: "r1".parse().unwrap(),
            step: 7,
            format: Format::Dcp,
            checkpoint: Fingerprint::of(b"checkpoint"),
            rules: RulesDigest::of(b"rules"),
            encoding_version: 1,
            files: vec![SnapshotFile {
                name: "model.safetensors".into(),
                size: 4096 + 30,
                artifact: false,
                chunks: vec![
                    Chunk { id: ChunkId::of(b"header"), size: 4096 },
                    Chunk { id: ChunkId::of(b"rows"), size: 30 },
                ],
            }],
            tensors: vec![SnapshotTensor {
                name: "t".parse().unwrap(),
                shape: vec![3, 2],
                source_dtype: Dtype::F32,
                encoding: Encoding::Int8Sbf32,
                layout: Layout::Trailing,
                row_alignment: 1,
                stored_width: None,
                pruned: None,
                file: "model.safetensors".into(),
                begin: 4096,
                end: 4126,
            }],
        }
    }

    #[test]
    fn the_id_is_that_of_the_canonical_bytes() {
        let manifest = example();
        let bytes = manifest.to_bytes();
        assert_eq!(bytes, canonical::bytes(&manifest), "every field, in order");
        assert_eq!(SnapshotManifest::parse(&bytes).unwrap(), manifest);
        assert_eq!(manifest.id(), SnapshotId::of(&bytes));
        // Pinned: a change here changes every snapshot's id.
        assert_eq!(
            manifest.id().to_string(),
            "bd509bedfacda895f10e38cccce09009ff4ada25b77be1e19562729bdc13f197"
        );
    }

    #[test]
    fn contradictions_are_refused() {
        type Spoil = fn(&mut SnapshotManifest);
        let cases: [(&str, Spoil); 13] = [
            ("the manifest's own name", |m| m.files[0].name = MANIFEST_FILE.into()),
            ("a tensor in an artifact", |m| m.files[0].artifact = true),
            ("a path for a file name", |m| m.files[0].name = "../model".into()),
            ("sizes that do not add up", |m| m.files[0].size += 1),
            ("an empty chunk", |m| m.files[0].chunks.push(Chunk { id: ChunkId::of(b""), size: 0 })),
            ("two files of one name", |m| m.files.push(m.files[0].clone())),
            ("a tensor past its file", |m| (m.tensors[0].begin, m.tensors[0].end) = (4097, 4127)),
            ("a tensor of another size", |m| m.tensors[0].shape = vec![4, 2]),
            ("rows of another alignment", |m| m.tensors[0].row_alignment = 2),
            ("an alignment that is none", |m| m.tensors[0].row_alignment = 0),
            ("rows of another width", |m| m.tensors[0].stored_width = Some(3)),
            ("a tensor in no file", |m| m.tensors[0].file = "other".into()),
            ("two tensors of one name", |m| m.tensors.push(m.tensors[0].clone())),
        ];
        for (what, spoil) in cases {
            let mut manifest = example();
            spoil(&mut manifest);
            assert!(SnapshotManifest::parse(&manifest.to_bytes()).is_err(), "{what}");
        }
    }

    fn artifact(name: &str) -> SnapshotFile {
        SnapshotFile { name: name.into(), size: 0, artifact: true, chunks: vec![] }
    }

    #[test]
    fn artifacts_have_paths_that_stay_inside() {
        let parse = |names: &[&str]| {
            let mut manifest = example();
            manifest.files.extend(names.iter().map(|name| artifact(name)));
            SnapshotManifest::parse(&manifest.to_bytes())
        };
        let good = parse(&["a", "b/c", "b/d/.e", "b.c", "模型/graph.pb"]).unwrap();
        assert!(good.files[1].artifact && !good.files[0].artifact);
        let long = "x".repeat(limits::PATH_PART_BYTES + 1);
        let deep = vec!["x"; limits::ARTIFACT_PATH_PARTS + 1].join("/");
        for name in ["", "/a", "a/", "a//b", "./a", "../a", "a/../b", "a\\b", "a\nb", "a\u{9b}", &long, &deep]
        {
            assert!(parse(&[name]).is_err(), "{name:?}");
        }
        for collision in [
            &["a", "a"][..],
            &["a", "a/b"],
            &["a/b/c", "a.b", "a"],
            &["a/b/c", "a/b"],
            &["model.safetensors"],
            &["model.safetensors/x"],
            &["snapshot.json"],
            &["snapshot.json/x"],
        ] {
            assert!(parse(collision).is_err(), "{collision:?}");
        }
    }

    #[test]
    fn a_pruned_table_has_its_remapping() {
        let mut manifest = example();
        let name: TensorName = "t.index_remapping".parse().unwrap();
        manifest.tensors[0].pruned = Some(Pruned { source_rows: 5, index_remapping: name.clone() });
        assert!(manifest.check().is_err(), "none");
        manifest.files[0].chunks.push(Chunk { id: ChunkId::of(b"numbers"), size: 20 });
        manifest.files[0].size += 20;
        manifest.tensors.push(SnapshotTensor {
            name,
            shape: vec![5],
            source_dtype: Dtype::I32,
            encoding: Encoding::Keep,
            pruned: None,
            begin: 4126,
            end: 4146,
            ..manifest.tensors[0].clone()
        });
        manifest.check().unwrap();
        assert_eq!(SnapshotManifest::parse(&manifest.to_bytes()).unwrap(), manifest);
        for (source_rows, why) in [(2, "fewer rows than were kept"), (6, "another number of rows")] {
            manifest.tensors[0].pruned.as_mut().unwrap().source_rows = source_rows;
            assert!(manifest.check().is_err(), "{why}");
        }
    }
}
