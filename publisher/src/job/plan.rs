//! Which tensors go into which files, and where those files are cut into chunks. A pure function of the checkpoint's
//! listing and the policy's rules: the same in every run, on every machine, with any number of threads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use weighbridge_converter::checkpoint::{Checkpoint, Tensor};
use weighbridge_converter::error::{Class, ReadError};
use weighbridge_converter::shape::artifacts;
use weighbridge_converter::shape::prune::{self, KeptRows};
use weighbridge_converter::shape::select::{self, Selected, Selection, remapping_name, select};
use weighbridge_converter::source::SourceFile;
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::encoding::Form;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::RulesDigest;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::snapshot::{Pruned, TensorMetadata, check_file_names};
use weighbridge_snapshots::chunk::cut;
use weighbridge_snapshots::files::{self, FilePlan, Stored};

use crate::error::{Exit, Failure, Result};

/// Tensors that encode to less than this are put into one chunk with their neighbours; in bytes.
const GROUPED_BYTES: u64 = 1 << 20;

/// The widest row that is encoded as one where that is not needed, in elements.
const WIDEST_ROW: u64 = 1 << 20;

/// Everything that is decided before the first tensor byte is read.
#[derive(Debug)]
pub struct Plan {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The digest of the rules that were applied.
    pub rules: RulesDigest,
    /// The published tensors, sorted by their names in the snapshot.
    pub tensors: Vec<Planned>,
    /// How they are stored, in the same order.
    pub stored: Vec<Stored>,
    /// The safetensors files.
    pub files: Vec<FilePlan>,
    /// The index beside several files: its name and bytes.
    pub index: Option<(String, Vec<u8>)>,
    /// The files beside the checkpoint that are published as they are.
    pub artifacts: Vec<Arc<SourceFile>>,
    /// The chunks to make: for every file in order, those of its data in order; then for every artifact.
    pub pieces: Vec<Piece>,
    /// The names of the tensors that the policy drops.
    pub dropped: Vec<TensorName>,
    /// What was passed over or done otherwise.
    pub notes: Vec<String>,
    /// What lists of rows to keep, and artifacts, take in memory beside the listing; in bytes.
    extra_bytes: u64,
}

/// A tensor that is published.
#[derive(Debug)]
pub struct Planned {
    /// Its place in the checkpoint's list.
    pub source: usize,
    /// What of that tensor is published.
    pub content: Content,
    /// The type of its elements before they are encoded.
    pub dtype: Dtype,
    /// Its name in the snapshot.
    pub name: TensorName,
    /// How it is stored.
    pub form: Form,
    /// How it is cut.
    pub rows: Rows,
}

/// What of a checkpoint's tensor is published under a name.
#[derive(Debug, Clone)]
pub enum Content {
    /// All of it.
    Whole,
    /// Of a table, these rows.
    Rows(Arc<KeptRows>),
    /// Where each row of the table went when it was pruned to these.
    Remapping(Arc<KeptRows>),
}

/// A tensor as rows of equal size. Tensors with fewer than two dimensions, and those whose rows are too large for a
/// chunk (where the encoding works element by element), have rows of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// How many rows.
    pub count: u64,
    /// Elements a row.
    pub elements: u64,
    /// Bytes of an encoded row.
    pub encoded_bytes: u64,
    /// Bytes of a row in the checkpoint.
    pub source_bytes: u64,
    /// Whether they are what the tensor's first dimension counts. Only then do their numbers mean anything to people.
    pub own: bool,
}

/// A chunk to make: rows of one tensor, or several small tensors whole; or a part of an artifact.
#[derive(Debug, Default)]
pub struct Piece {
    /// The file's place in [`Plan::files`], with [`Plan::artifacts`] behind them.
    pub file: usize,
    /// What it consists of, in order.
    pub parts: Vec<Part>,
    /// Of a piece of an artifact, its place there; such a piece has no parts.
    pub artifact: Option<ArtifactPart>,
    /// Its size, in bytes.
    pub bytes: u64,
}

/// Bytes of one artifact.
#[derive(Debug, Clone, Copy)]
pub struct ArtifactPart {
    /// The artifact's place in [`Plan::artifacts`].
    pub artifact: usize,
    /// The first byte.
    pub offset: u64,
}

/// Rows of one tensor.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The tensor's place in [`Plan::tensors`].
    pub tensor: usize,
    /// The first row.
    pub first: u64,
    /// How many rows.
    pub count: u64,
}

impl Plan {
    /// A published tensor's entry in the checkpoint.
    #[must_use]
    pub fn source(&self, planned: &Planned) -> &Tensor {
        &self.checkpoint.tensors[planned.source]
    }

    /// The bytes of tensors and artifacts that a publish reads.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        let tensors = self.tensors.iter().map(|planned| match &planned.content {
            Content::Whole | Content::Rows(_) => planned.rows.count.saturating_mul(planned.rows.source_bytes),
            Content::Remapping(_) => 0,
        });
        tensors.fold(self.artifact_bytes(), u64::saturating_add)
    }

    /// The bytes that are read for one of [`Plan::pieces`].
    #[must_use]
    pub fn piece_source_bytes(&self, piece: &Piece) -> u64 {
        let part = |part: &Part| match &self.tensors[part.tensor].content {
            Content::Whole | Content::Rows(_) => {
                part.count.saturating_mul(self.tensors[part.tensor].rows.source_bytes)
            }
            Content::Remapping(_) => 0,
        };
        let artifact = if piece.artifact.is_some() { piece.bytes } else { 0 };
        piece.parts.iter().map(part).fold(artifact, u64::saturating_add)
    }

    /// The size of all artifacts, in bytes.
    #[must_use]
    pub fn artifact_bytes(&self) -> u64 {
        self.artifacts.iter().fold(0, |sum, file| sum.saturating_add(file.len()))
    }

    /// The memory that listing, plan, manifest and report take, in bytes, at most; measured, and rounded up.
    #[must_use]
    pub fn listing_bytes(&self) -> u64 {
        let pieces = PIECE_BYTES.saturating_mul(self.pieces.len() as u64);
        listing_bytes(&self.checkpoint).saturating_add(pieces).saturating_add(self.extra_bytes)
    }
}

/// What a tensor takes in listing, plan, manifest and report together, its name and shape aside.
const TENSOR_BYTES: u64 = 2800;
/// What each byte of its name, and each dimension, takes there.
const NAME_BYTE_BYTES: u64 = 9;
const DIMENSION_BYTES: u64 = 90;
/// What a slice takes in the listing.
const SLICE_BYTES: u64 = 300;
/// What a chunk takes in plan, results and manifest.
const PIECE_BYTES: u64 = 600;
/// What an artifact takes in plan, manifest and source: its path several times.
const ARTIFACT_BYTES: u64 = 4800;

fn listing_bytes(checkpoint: &Checkpoint) -> u64 {
    let bytes = |tensor: &Tensor| {
        TENSOR_BYTES
            + NAME_BYTE_BYTES * tensor.name.as_str().len() as u64
            + DIMENSION_BYTES * tensor.shape.len() as u64
            + SLICE_BYTES * tensor.slices.len() as u64
    };
    let unreadable = |(name, error): &(TensorName, ReadError)| {
        TENSOR_BYTES + NAME_BYTE_BYTES * (name.as_str().len() + error.to_string().len()) as u64
    };
    let tensors: u64 = checkpoint.tensors.iter().map(bytes).sum();
    tensors.saturating_add(checkpoint.unreadable.iter().map(unreadable).sum())
}

/// Refuses a checkpoint whose listing, told in full, would not fit a budget of `memory` bytes.
///
/// # Errors
/// [`Class::LimitExceeded`]
pub fn check_told(checkpoint: &Checkpoint, memory: u64) -> Result<()> {
    check_listing(checkpoint, &[], 0, memory)
}

/// Refuses a checkpoint whose names, shapes, slices and chunks alone would not fit the budget: before any of them is
/// copied.
fn check_listing(checkpoint: &Checkpoint, stored: &[Stored], extra: u64, memory: u64) -> Result<()> {
    // A chunk that is not the last of its tensor has more than half of the largest size.
    let bytes = stored.iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes));
    let pieces = (bytes / (limits::CHUNK_BYTES / 2)).saturating_mul(PIECE_BYTES);
    let needed = listing_bytes(checkpoint).saturating_add(pieces).saturating_add(extra);
    if needed <= memory {
        return Ok(());
    }
    let detail = format!(
        "its listing ({} tensors, {bytes} bytes to store) takes about {} MiB, over the budget of {} MiB; \
         raise --memory",
        checkpoint.tensors.len(),
        needed >> 20,
        memory >> 20
    );
    Err(ReadError::new(Class::LimitExceeded, detail).into())
}

/// Plans the publish of `checkpoint` under `policy`, within a budget of `memory` bytes.
///
/// `store` is the folder that the store lies in, if it is one: should that be below the checkpoint's, it holds no
/// artifacts.
///
/// # Errors
/// Where the policy does not fit the checkpoint, or the listing not the budget.
pub fn plan(checkpoint: Checkpoint, policy: &Policy, store: Option<&Path>, memory: u64) -> Result<Plan> {
    check_listing(&checkpoint, &[], 0, memory)?;
    let selection = select(&checkpoint, policy)?;
    // Before lists of rows are looked up: one that is to be published too is no part of the checkpoint.
    let artifacts = artifacts::select(&checkpoint.source, &policy.artifacts, store)?;
    let lists = Lists::read(&checkpoint, &selection, policy, memory)?;
    let tensors = selection.published.iter().map(|selected| planned(&checkpoint, &lists, selected));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let stored = selection.published.iter().zip(&tensors).map(stored).collect::<Result<Vec<_>>>()?;
    let artifact_count = artifacts.files.len() as u64;
    let extra_bytes = lists.memory().saturating_add(ARTIFACT_BYTES.saturating_mul(artifact_count));
    check_listing(&checkpoint, &stored, extra_bytes, memory)?;
    let mut notes = selection.notes;
    notes.extend(lists.notes);
    notes.extend(artifacts.notes);
    let (dropped, artifacts) = (selection.dropped, artifacts.files);
    notes.extend(checkpoint.notes.iter().cloned());
    if policy.retention.keep_last.is_some() {
        notes.push("retention.keep_last is not applied in this version: nothing is ever deleted".to_owned());
    }
    let files = files::plan(&stored);
    let index = files::index(&stored, &files);
    check_names(&files, index.as_ref(), &artifacts)?;
    let mut pieces = pieces(&files, &tensors);
    pieces.extend(artifact_pieces(files.len(), &artifacts));
    let rules = policy.rules_digest();
    Ok(Plan {
        checkpoint,
        rules,
        tensors,
        stored,
        files,
        index,
        artifacts,
        pieces,
        dropped,
        notes,
        extra_bytes,
    })
}

/// Refuses artifacts whose paths are those of the snapshot's own files, or in the way of each other.
fn check_names(
    files: &[FilePlan],
    index: Option<&(String, Vec<u8>)>,
    artifacts: &[Arc<SourceFile>],
) -> Result<()> {
    let own = files.iter().map(|file| &file.name).chain(index.map(|(name, _)| name));
    let own = own.map(|name| (name.as_str(), false));
    check_file_names(own.chain(artifacts.iter().map(|file| (file.name(), true)))).map_err(|error| Failure {
        kind: Kind::Permanent,
        class: "policy_mismatch",
        message: format!(
            "{error}; exclude the artifact in the policy, since the snapshot has such a file itself"
        ),
        exit: Exit::Usage,
    })
}

/// The lists of rows to keep, by the names of their tables in the checkpoint.
struct Lists<'c> {
    kept: BTreeMap<&'c TensorName, Arc<KeptRows>>,
    notes: Vec<String>,
}

impl<'c> Lists<'c> {
    /// Reads the lists, which may take their share of `memory` in all.
    fn read(
        checkpoint: &Checkpoint,
        selection: &Selection<'c>,
        policy: &Policy,
        memory: u64,
    ) -> Result<Self> {
        let mut left = memory / limits::KEEP_ROWS_SHARE;
        let mut lists = Self { kept: BTreeMap::new(), notes: Vec::new() };
        for selected in &selection.published {
            if let select::Content::Rows(list) = &selected.content {
                let name = &selected.tensor.name;
                let read = prune::read_list(checkpoint, selected.tensor, list, &mut left);
                let (kept, note) = read.map_err(|error| by_rule(error.into(), policy, name))?;
                lists.kept.insert(name, Arc::new(kept));
                lists.notes.extend(note);
            }
        }
        Ok(lists)
    }

    fn of(&self, tensor: &Tensor) -> Result<Arc<KeptRows>> {
        let kept = self.kept.get(&tensor.name).cloned();
        kept.ok_or_else(|| Failure::internal("planning", format!("no rows of {:?}", tensor.name)))
    }

    /// What the lists and the remappings' entries take, in bytes.
    fn memory(&self) -> u64 {
        self.kept.iter().fold(0, |sum, (name, kept)| {
            let entry = TENSOR_BYTES + NAME_BYTE_BYTES * name.as_str().len() as u64;
            sum.saturating_add(entry).saturating_add(kept.memory())
        })
    }
}

/// Says which rule it was that asked for a list of rows.
fn by_rule(mut failure: Failure, policy: &Policy, table: &TensorName) -> Failure {
    if let Some(rule) = policy.place_of_rule(table) {
        failure.message.push_str(&format!("; keep_rows of {rule} names this list"));
    }
    failure
}

fn planned(checkpoint: &Checkpoint, lists: &Lists<'_>, selected: &Selected<'_>) -> Result<Planned> {
    let tensor = selected.tensor;
    let source = checkpoint.tensors.binary_search_by(|other| other.name.cmp(&tensor.name));
    let source = source.map_err(|_| Failure::internal("planning", "the checkpoint's list is not sorted"))?;
    let content = match selected.content {
        select::Content::Whole => Content::Whole,
        select::Content::Rows(_) => Content::Rows(lists.of(tensor)?),
        select::Content::Remapping(_) => Content::Remapping(lists.of(tensor)?),
    };
    let dtype = if matches!(content, Content::Remapping(_)) { Dtype::I32 } else { tensor.dtype };
    let rows = Rows::of(&shape(tensor, &content), dtype, &selected.form).ok_or_else(|| too_large(tensor))?;
    Ok(Planned { source, content, dtype, name: selected.name.clone(), form: selected.form, rows })
}

fn stored((selected, planned): (&Selected<'_>, &Planned)) -> Result<Stored> {
    let form = planned.form;
    let logical = shape(selected.tensor, &planned.content);
    let shape = form.stored_shape(&logical, planned.dtype).ok_or_else(|| too_large(selected.tensor))?;
    let mut metadata = TensorMetadata::new(form, logical, planned.dtype);
    metadata.pruned = planned.content.pruned(&selected.name);
    Ok(Stored {
        name: selected.name.clone(),
        dtype: form.stored_dtype(planned.dtype),
        shape,
        bytes: planned.rows.count * planned.rows.encoded_bytes,
        metadata,
    })
}

fn too_large(tensor: &Tensor) -> Failure {
    Failure::internal("planning", format!("tensor {:?} is too large", tensor.name))
}

/// The logical shape of what is published.
fn shape(tensor: &Tensor, content: &Content) -> Vec<u64> {
    match (content, tensor.shape.as_slice()) {
        (Content::Rows(kept), &[_, width]) => vec![kept.count(), width],
        (Content::Remapping(kept), _) => vec![kept.source_rows()],
        (_, shape) => shape.to_vec(),
    }
}

impl Content {
    /// What a manifest says of a pruned table that is published as `name`.
    fn pruned(&self, name: &TensorName) -> Option<Pruned> {
        let Self::Rows(kept) = self else { return None };
        // Selecting has checked that it is a name.
        let index_remapping = remapping_name(name).ok()?;
        Some(Pruned { source_rows: kept.source_rows(), index_remapping })
    }
}

impl Rows {
    /// `None` where a size does not fit 64 bits.
    fn of(shape: &[u64], dtype: Dtype, form: &Form) -> Option<Self> {
        let row_wise = form.encoding.is_row_wise();
        let of = |count: u64, elements: u64, own: bool| {
            let encoded_bytes = form.row_bytes(elements, dtype)?;
            count.checked_mul(encoded_bytes)?;
            let source_bytes = elements.checked_mul(dtype.size())?;
            Some(Self { count, elements, encoded_bytes, source_bytes, own })
        };
        let total = element_count(shape, dtype)?;
        if let [rows, inner @ ..] = shape
            && !inner.is_empty()
            && (total > 0 || row_wise)
        {
            let rows = of(*rows, inner.iter().product(), true)?;
            let fits = rows.encoded_bytes <= limits::CHUNK_BYTES && rows.elements <= WIDEST_ROW;
            if row_wise || fits {
                return Some(rows);
            }
        }
        of(total, 1, false)
    }
}

fn pieces(files: &[FilePlan], tensors: &[Planned]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (file, plan) in files.iter().enumerate() {
        let mut group = Piece { file, ..Piece::default() };
        for &tensor in &plan.tensors {
            let rows = tensors[tensor].rows;
            let bytes = rows.count * rows.encoded_bytes;
            if bytes >= GROUPED_BYTES || group.bytes + bytes > limits::CHUNK_BYTES {
                flush(&mut pieces, &mut group);
            }
            if bytes >= GROUPED_BYTES {
                pieces.extend(cut::blocks(rows.count, rows.encoded_bytes).map(|(first, count)| Piece {
                    file,
                    parts: vec![Part { tensor, first, count }],
                    bytes: count * rows.encoded_bytes,
                    ..Piece::default()
                }));
            } else if rows.count > 0 {
                group.parts.push(Part { tensor, first: 0, count: rows.count });
                group.bytes += bytes;
            }
        }
        flush(&mut pieces, &mut group);
    }
    pieces
}

/// Artifacts are cut every 8 MiB.
fn artifact_pieces(files: usize, artifacts: &[Arc<SourceFile>]) -> impl Iterator<Item = Piece> {
    artifacts.iter().enumerate().flat_map(move |(artifact, file)| {
        cut::blocks(file.len(), 1).map(move |(offset, bytes)| Piece {
            file: files + artifact,
            artifact: Some(ArtifactPart { artifact, offset }),
            bytes,
            ..Piece::default()
        })
    })
}

/// A group that holds anything becomes a piece.
fn flush(pieces: &mut Vec<Piece>, group: &mut Piece) {
    let empty = Piece { file: group.file, ..Piece::default() };
    let full = std::mem::replace(group, empty);
    if full.bytes > 0 {
        pieces.push(full);
    }
}
