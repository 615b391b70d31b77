//! The snapshot manifest `weighbridge.snapshot/v1`: what an immutable snapshot consists of.
//!
//! A snapshot's id is the BLAKE3 of its manifest's canonical bytes ([`SnapshotManifest::to_bytes`]). Nothing in a
//! manifest depends on when, where, how often or by whom it was published: the same checkpoint under the same
//! rules gives the same id.

use std::collections::{BTreeMap, HashSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::canonical;
use crate::checkpoint::Format;
use crate::dtype::Dtype;
use crate::encoding::{Encoding, Form, Layout};
use crate::error::{DocumentError, shorten};
use crate::ids::{ChunkId, Fingerprint, RulesDigest, SnapshotId};
use crate::limits;
use crate::names::{ModelName, RunName, TensorName};

const DOCUMENT: &str = "snapshot manifest";

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
    /// A plain file name.
    pub name: String,
    /// In bytes.
    pub size: u64,
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
    /// The logical shape, as in the checkpoint.
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
    /// The file's name.
    pub file: String,
    /// The first byte in the file.
    pub begin: u64,
    /// The byte behind the last one.
    pub end: u64,
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
    /// [`DocumentError`] where the bytes are no manifest, or contradict themselves: a file name with a path in it,
    /// sizes that don't add up, a tensor outside its file.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        if json.len() > limits::SNAPSHOT_MANIFEST_BYTES {
            let why = format!("{} bytes; at most {}", json.len(), limits::SNAPSHOT_MANIFEST_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        let manifest: Self =
            serde_json::from_slice(json).map_err(|error| DocumentError::malformed(DOCUMENT, error))?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The invariants, checked before a manifest is written and after it is read.
    ///
    /// # Errors
    /// [`DocumentError::Malformed`] naming what contradicts what.
    pub fn check(&self) -> Result<(), DocumentError> {
        let mut sizes = BTreeMap::new();
        for file in &self.files {
            file.check()?;
            if sizes.insert(file.name.as_str(), file.size).is_some() {
                return Err(malformed(format!("file {:?} stands twice", file.name)));
            }
        }
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            let place = tensor.name.as_str();
            if !names.insert(place) {
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
        Ok(())
    }
}

impl SnapshotFile {
    fn check(&self) -> Result<(), DocumentError> {
        if !is_plain_file_name(&self.name) {
            return Err(malformed(format!("{:?} is not a plain file name", shorten(&self.name))));
        }
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
}

impl TensorMetadata {
    /// Of a tensor of logical `shape` that is stored as `form` says.
    #[must_use]
    pub const fn new(form: Form, shape: Vec<u64>, source_dtype: Dtype) -> Self {
        let Form { encoding, layout, row_alignment, stored_width } = form;
        Self { encoding, layout, row_alignment, stored_width, shape, source_dtype }
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
        let cases: [(&str, Spoil); 11] = [
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
}
