//! One chunk of the plan: its rows read, encoded and hashed, a few hundred KiB at a time, so that a row is still in
//! cache when it is hashed.

use bytes::Bytes;

use weighbridge_converter::checkpoint::Tensor;
use weighbridge_converter::encode::{self, Encoder};
use weighbridge_converter::error::{Class, ReadError, Result};
use weighbridge_converter::shape::gather::read_elements;
use weighbridge_converter::shape::prune;
use weighbridge_converter::statistics::{BlockStatistics, Statistics};
use weighbridge_schemas::snapshot::Chunk;
use weighbridge_snapshots::chunk::{Builder, Pool};
use weighbridge_snapshots::fetch::Progress;

use super::buffers::Buffers;
use crate::job::plan::{ArtifactPart, Content, Part, Piece, Plan, Planned};

/// Source bytes that are read, encoded and hashed at a time.
const STEP_BYTES: u64 = 256 << 10;
/// Elements that tensors without rows are encoded in at a time; it fixes the order of their statistics' sums.
const RUN_ELEMENTS: u64 = 4096;
/// What a worker needs beside its chunk and its rows: scratch for slices that are not whole rows.
const WORKER_BYTES: u64 = 3 << 20;
/// What an encoder needs for each element of a row: the value widened, and decoded again, both in F32.
const ENCODER_BYTES: u64 = 8;

/// The memory that making a piece takes beside the chunk: its rows, and what encoders and gathering need.
pub(super) fn cost(plan: &Plan, piece: &Piece) -> u64 {
    let working = |part: &Part| {
        let rows = plan.tensors[part.tensor].rows;
        rows.source_bytes.max(STEP_BYTES) + ENCODER_BYTES * rows.elements
    };
    piece.parts.iter().map(working).max().unwrap_or(0) + WORKER_BYTES
}

/// Makes one chunk, in a buffer of `pool`.
pub(super) fn make(
    plan: &Plan,
    piece: &Piece,
    pool: &Pool,
    buffers: &mut Buffers,
    progress: &dyn Progress,
) -> Result<(Chunk, Bytes, Vec<Statistics>)> {
    let mut builder = Builder::new(pool);
    let mut statistics = Vec::with_capacity(piece.parts.len());
    if let Some(part) = piece.artifact {
        copy_artifact(plan, part, piece.bytes, &mut builder, progress)?;
    }
    for part in &piece.parts {
        let planned = &plan.tensors[part.tensor];
        statistics.push(encode_part(plan.source(planned), planned, part, &mut builder, buffers, progress)?);
    }
    let (chunk, bytes) = builder.finish();
    Ok((chunk, bytes, statistics))
}

/// Copies `bytes` of an artifact.
fn copy_artifact(
    plan: &Plan,
    part: ArtifactPart,
    bytes: u64,
    builder: &mut Builder,
    progress: &dyn Progress,
) -> Result<()> {
    let file = &plan.artifacts[part.artifact];
    let mut done = 0;
    while done < bytes {
        let count = STEP_BYTES.min(bytes - done);
        let length = usize::try_from(count).unwrap_or(0);
        builder.append(length, |room| file.read_exact_at(room, part.offset + done))?;
        progress.advance(count);
        done += count;
    }
    Ok(())
}

fn encode_part(
    tensor: &Tensor,
    planned: &Planned,
    part: &Part,
    builder: &mut Builder,
    buffers: &mut Buffers,
    progress: &dyn Progress,
) -> Result<Statistics> {
    let rows = planned.rows;
    let runs = Runs::of(tensor, planned)?;
    let step = (STEP_BYTES / rows.source_bytes.max(1)).max(1).next_multiple_of(runs.rows);
    let mut statistics = BlockStatistics::new(part.first);
    let (mut row, end) = (part.first, part.first + part.count);
    while row < end {
        let count = step.min(end - row);
        let bytes = usize::try_from(count * rows.source_bytes).map_err(|_| too_large(tensor))?;
        let (bytes, sources) = buffers.rows(bytes);
        read(tensor, planned, row * rows.elements, bytes, sources)?;
        runs.encode(bytes, builder, &mut statistics)?;
        if !matches!(planned.content, Content::Remapping(_)) {
            progress.advance(count * rows.source_bytes);
        }
        row += count;
    }
    let mut statistics = statistics.finish();
    if let Content::Rows(kept) = &planned.content
        && rows.own
    {
        statistics.renumber_rows(|row| kept.source_row(row).unwrap_or(row));
    }
    Ok(statistics)
}

/// Fills `rows` with what is published, from its element `first` on.
fn read(
    tensor: &Tensor,
    planned: &Planned,
    first: u64,
    rows: &mut [u8],
    sources: &mut prune::Buffers,
) -> Result<()> {
    match &planned.content {
        Content::Whole => read_elements(tensor, first, rows, &mut sources.scratch),
        Content::Rows(kept) => kept.read(tensor, first, rows, sources),
        Content::Remapping(kept) => {
            kept.remapping(first, rows);
            Ok(())
        }
    }
}

/// How a tensor's bytes are handed to its encoder: row by row; or, where the rows are not the tensor's own but single
/// elements, in runs of [`RUN_ELEMENTS`] and what is left over.
struct Runs<'t> {
    tensor: &'t Tensor,
    planned: &'t Planned,
    encoder: Box<dyn Encoder>,
    /// Rows in a run.
    rows: u64,
}

impl<'t> Runs<'t> {
    fn of(tensor: &'t Tensor, planned: &'t Planned) -> Result<Self> {
        let rows = if planned.rows.own { 1 } else { RUN_ELEMENTS };
        let encoder = encoder(tensor, planned, rows * planned.rows.elements)?;
        Ok(Self { tensor, planned, encoder, rows })
    }

    fn encode(&self, bytes: &[u8], builder: &mut Builder, statistics: &mut BlockStatistics) -> Result<()> {
        let run = self.encoder.source_row_bytes().max(1);
        let (runs, rest) = bytes.split_at(bytes.len() - bytes.len() % run);
        append(&*self.encoder, runs, builder, statistics);
        if !rest.is_empty() {
            let elements = rest.len() as u64 / self.planned.dtype.size();
            append(&*encoder(self.tensor, self.planned, elements)?, rest, builder, statistics);
        }
        Ok(())
    }
}

fn append(encoder: &dyn Encoder, rows: &[u8], builder: &mut Builder, statistics: &mut BlockStatistics) {
    builder.append(encoder.encoded_bytes(rows.len()), |room| encoder.encode(rows, room, statistics));
}

fn encoder(tensor: &Tensor, planned: &Planned, elements: u64) -> Result<Box<dyn Encoder>> {
    usize::try_from(elements)
        .ok()
        .and_then(|elements| encode::encoder(planned.form, planned.dtype, elements))
        .ok_or_else(|| too_large(tensor))
}

fn too_large(tensor: &Tensor) -> ReadError {
    ReadError::new(Class::LimitExceeded, "a row is too large to encode").of_tensor(tensor.name.as_str())
}
