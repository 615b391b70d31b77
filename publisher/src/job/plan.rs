//! Which tensors go into which files, and where those files are cut into chunks. A pure function of the checkpoint's
//! listing and the policy's rules: the same in every run, on every machine, with any number of threads.

use weighbridge_converter::checkpoint::{Checkpoint, Tensor};
use weighbridge_converter::error::{Class, ReadError};
use weighbridge_converter::shape::select::{Selected, select};
use weighbridge_schemas::encoding::Form;
use weighbridge_schemas::ids::RulesDigest;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::snapshot::TensorMetadata;
use weighbridge_snapshots::chunk::cut;
use weighbridge_snapshots::files::{self, FilePlan, Stored};

use crate::error::{Failure, Result};

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
    /// The chunks to make: for every file in order, those of its data in order.
    pub pieces: Vec<Piece>,
    /// The names of the tensors that the policy drops.
    pub dropped: Vec<TensorName>,
    /// What was passed over or done otherwise.
    pub notes: Vec<String>,
}

/// A tensor that is published.
#[derive(Debug)]
pub struct Planned {
    /// Its place in the checkpoint's list.
    pub source: usize,
    /// Its name in the snapshot.
    pub name: TensorName,
    /// How it is stored.
    pub form: Form,
    /// How it is cut.
    pub rows: Rows,
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
}

/// A chunk to make: rows of one tensor, or several small tensors whole.
#[derive(Debug, Default)]
pub struct Piece {
    /// The file's place in [`Plan::files`].
    pub file: usize,
    /// What it consists of, in order.
    pub parts: Vec<Part>,
    /// Its size, in bytes.
    pub bytes: u64,
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

    /// The tensor bytes that a publish reads.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, planned| sum.saturating_add(self.source(planned).bytes()))
    }

    /// The memory that listing, plan, manifest and report take, in bytes, at most; measured, and rounded up.
    #[must_use]
    pub fn listing_bytes(&self) -> u64 {
        listing_bytes(&self.checkpoint).saturating_add(PIECE_BYTES.saturating_mul(self.pieces.len() as u64))
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

fn listing_bytes(checkpoint: &Checkpoint) -> u64 {
    let bytes = |tensor: &Tensor| {
        TENSOR_BYTES
            + NAME_BYTE_BYTES * tensor.name.as_str().len() as u64
            + DIMENSION_BYTES * tensor.shape.len() as u64
            + SLICE_BYTES * tensor.slices.len() as u64
    };
    checkpoint.tensors.iter().map(bytes).sum()
}

/// Refuses a checkpoint whose names, shapes, slices and chunks alone would not fit the budget: before any of them is
/// copied.
fn check_listing(checkpoint: &Checkpoint, stored: &[Stored], memory: u64) -> Result<()> {
    // A chunk that is not the last of its tensor has more than half of the largest size.
    let bytes = stored.iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes));
    let pieces = (bytes / (limits::CHUNK_BYTES / 2)).saturating_mul(PIECE_BYTES);
    let needed = listing_bytes(checkpoint).saturating_add(pieces);
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
/// # Errors
/// Where the policy does not fit the checkpoint, or the listing not the budget.
pub fn plan(checkpoint: Checkpoint, policy: &Policy, memory: u64) -> Result<Plan> {
    check_listing(&checkpoint, &[], memory)?;
    let selection = select(&checkpoint, policy)?;
    let tensors = selection.published.iter().map(|selected| planned(&checkpoint, selected));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let stored = selection.published.iter().zip(&tensors).map(stored).collect::<Result<Vec<_>>>()?;
    check_listing(&checkpoint, &stored, memory)?;
    let mut notes = selection.notes;
    let dropped = selection.dropped;
    notes.extend(checkpoint.notes.iter().cloned());
    if policy.retention.keep_last.is_some() {
        notes.push("retention.keep_last is not applied in this version: nothing is ever deleted".to_owned());
    }
    let files = files::plan(&stored);
    let index = files::index(&stored, &files);
    let pieces = pieces(&files, &tensors);
    let rules = policy.rules_digest();
    Ok(Plan { checkpoint, rules, tensors, stored, files, index, pieces, dropped, notes })
}

fn planned(checkpoint: &Checkpoint, selected: &Selected<'_>) -> Result<Planned> {
    let tensor = selected.tensor;
    let source = checkpoint.tensors.binary_search_by(|other| other.name.cmp(&tensor.name));
    let source = source.map_err(|_| Failure::internal("planning", "the checkpoint's list is not sorted"))?;
    let rows = Rows::of(tensor, &selected.form).ok_or_else(|| too_large(tensor))?;
    Ok(Planned { source, name: selected.name.clone(), form: selected.form, rows })
}

fn stored((selected, planned): (&Selected<'_>, &Planned)) -> Result<Stored> {
    let (tensor, form) = (selected.tensor, selected.form);
    let shape = form.stored_shape(&tensor.shape, tensor.dtype).ok_or_else(|| too_large(tensor))?;
    Ok(Stored {
        name: selected.name.clone(),
        dtype: form.stored_dtype(tensor.dtype),
        shape,
        bytes: planned.rows.count * planned.rows.encoded_bytes,
        metadata: TensorMetadata::new(form, tensor.shape.clone(), tensor.dtype),
    })
}

fn too_large(tensor: &Tensor) -> Failure {
    Failure::internal("planning", format!("tensor {:?} is too large", tensor.name))
}

impl Rows {
    /// `None` where a size does not fit 64 bits.
    fn of(tensor: &Tensor, form: &Form) -> Option<Self> {
        let row_wise = form.encoding.is_row_wise();
        let of = |count: u64, elements: u64| {
            let encoded_bytes = form.row_bytes(elements, tensor.dtype)?;
            count.checked_mul(encoded_bytes)?;
            let source_bytes = elements.checked_mul(tensor.dtype.size())?;
            Some(Self { count, elements, encoded_bytes, source_bytes })
        };
        let total = tensor.elements();
        if let [rows, inner @ ..] = tensor.shape.as_slice()
            && !inner.is_empty()
            && (total > 0 || row_wise)
        {
            let rows = of(*rows, inner.iter().product())?;
            let fits = rows.encoded_bytes <= limits::CHUNK_BYTES && rows.elements <= WIDEST_ROW;
            if row_wise || fits {
                return Some(rows);
            }
        }
        of(total, 1)
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

/// A group that holds anything becomes a piece.
fn flush(pieces: &mut Vec<Piece>, group: &mut Piece) {
    let empty = Piece { file: group.file, ..Piece::default() };
    let full = std::mem::replace(group, empty);
    if full.bytes > 0 {
        pieces.push(full);
    }
}
