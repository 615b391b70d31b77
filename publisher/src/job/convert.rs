//! Every chunk of the plan, made and stored: read, encode and hash on worker threads, write beside it.
//!
//! A chunk is made a few hundred KiB of rows at a time, so that a row is still in cache when it is hashed. Two bounds
//! hold whatever the checkpoint's size: how many chunks are being made (threads), and how many bytes all chunks in
//! the making and on their way to the store take (memory).

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use weighbridge_converter::checkpoint::Tensor;
use weighbridge_converter::encode::{self, Encoder};
use weighbridge_converter::error::{Class, ReadError};
use weighbridge_converter::shape::gather::read_elements;
use weighbridge_converter::shape::prune;
use weighbridge_converter::statistics::{BlockStatistics, Statistics};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::Chunk;
use weighbridge_snapshots::chunk::{self, Builder};
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::root::{Put, Root};

use super::Budget;
use super::plan::{ArtifactPart, Content, Part, Piece, Plan, Planned};
use crate::error::{Failure, Result};

/// Source bytes that are read, encoded and hashed at a time.
const STEP_BYTES: u64 = 256 << 10;
/// Elements that tensors without rows are encoded in at a time; it fixes the order of their statistics' sums.
const RUN_ELEMENTS: u64 = 4096;
/// What a worker needs beside its chunk and its rows: scratch for slices that are not whole rows.
const WORKER_BYTES: u64 = 3 << 20;
/// What the process needs beside its workers: code, listings, the store's own buffers.
const PROCESS_BYTES: u64 = 80 << 20;
/// What an encoder needs for each element of a row: the value widened, and decoded again, both in F32.
const ENCODER_BYTES: u64 = 8;
/// What is left for chunks at the least: one of the widest rows, and its encoded form.
const LEAST_BYTES: u64 = 48 << 20;
/// Chunks on their way to the store, for every one that is being made.
const WRITES_A_THREAD: usize = 2;

/// All chunks of a plan.
#[derive(Debug)]
pub struct Converted {
    /// For every piece of the plan, in order: its chunk, and the statistics of each of its parts.
    pub pieces: Vec<(Chunk, Vec<Statistics>)>,
    /// For every file of the plan, in order: its header's chunk.
    pub headers: Vec<Chunk>,
    /// The index's chunks, where there is an index.
    pub index: Vec<Chunk>,
    /// Chunk bytes written.
    pub bytes_stored: u64,
    /// Chunk bytes that were there already.
    pub bytes_reused: u64,
}

/// Makes and stores every chunk of `plan`.
///
/// # Errors
/// As reading or the store fails; what was stored until then does no harm, and is found again by the next run.
pub async fn convert(
    root: &Root,
    model: &ModelName,
    plan: &Arc<Plan>,
    budget: Budget,
    progress: &Arc<dyn Progress>,
) -> Result<Converted> {
    let mut converted = Converted {
        pieces: Vec::with_capacity(plan.pieces.len()),
        headers: Vec::new(),
        index: Vec::new(),
        bytes_stored: 0,
        bytes_reused: 0,
    };
    progress.start(plan.source_bytes());
    for (index, made) in make_pieces(root, model, plan, budget, progress).await?.into_iter().enumerate() {
        let (chunk, statistics, put) =
            made.ok_or_else(|| Failure::internal("converting", format!("piece {index} is missing")))?;
        converted.count(chunk, put);
        converted.pieces.push((chunk, statistics));
    }
    for file in &plan.files {
        let chunks = converted.store(root, model, &file.header).await?;
        converted.headers.extend(chunks);
    }
    if let Some((_, index)) = &plan.index {
        converted.index = converted.store(root, model, index).await?;
    }
    Ok(converted)
}

impl Converted {
    fn count(&mut self, chunk: Chunk, put: Put) {
        match put {
            Put::Written => self.bytes_stored += chunk.size,
            Put::Present => self.bytes_reused += chunk.size,
        }
    }

    /// Stores bytes that are at hand, cut into chunks of at most 8 MiB.
    async fn store(&mut self, root: &Root, model: &ModelName, bytes: &[u8]) -> Result<Vec<Chunk>> {
        let mut chunks = Vec::new();
        for run in bytes.chunks(8 << 20) {
            let mut builder = Builder::with_capacity(run.len());
            builder.append(|chunk| chunk.extend_from_slice(run));
            let (chunk, bytes) = builder.finish();
            let put = chunk::put(root, model, chunk, bytes).await?;
            self.count(chunk, put);
            chunks.push(chunk);
        }
        Ok(chunks)
    }
}

type Made = (Chunk, Vec<Statistics>, Put);

async fn make_pieces(
    root: &Root,
    model: &ModelName,
    plan: &Arc<Plan>,
    budget: Budget,
    progress: &Arc<dyn Progress>,
) -> Result<Vec<Option<Made>>> {
    let threads = budget.threads.max(1);
    let workers = Arc::new(Semaphore::new(threads));
    let taken = PROCESS_BYTES
        + limits::DIGEST_BYTES.unsigned_abs()
        + plan.listing_bytes()
        + plan.checkpoint.source.cache_bytes();
    let kibibytes = permits(budget.memory.saturating_sub(taken).max(LEAST_BYTES));
    let memory = Arc::new(Semaphore::new(kibibytes as usize));
    let in_flight = Arc::new(Semaphore::new(threads.saturating_mul(1 + WRITES_A_THREAD)));
    let mut made: Vec<Option<Made>> = plan.pieces.iter().map(|_| None).collect();
    let mut tasks = JoinSet::new();
    for (index, piece) in plan.pieces.iter().enumerate() {
        let place = acquire(&in_flight, 1).await?;
        let room = acquire(&memory, permits(cost(plan, piece)).min(kibibytes)).await?;
        while let Some(done) = tasks.try_join_next() {
            keep(&mut made, done)?;
        }
        let worker = acquire(&workers, 1).await?;
        let (root, model, plan, progress) =
            (root.clone(), model.clone(), Arc::clone(plan), Arc::clone(progress));
        tasks.spawn(async move {
            let making = tokio::task::spawn_blocking(move || {
                let made = make(&plan, &plan.pieces[index], &*progress);
                drop(worker);
                made
            });
            let (chunk, bytes, statistics) =
                making.await.map_err(|error| Failure::internal("converting", error))??;
            let put = chunk::put(&root, &model, chunk, bytes).await?;
            drop((room, place));
            Ok((index, (chunk, statistics, put)))
        });
    }
    while let Some(done) = tasks.join_next().await {
        keep(&mut made, done)?;
    }
    Ok(made)
}

fn keep(
    made: &mut [Option<Made>],
    done: std::result::Result<Result<(usize, Made)>, tokio::task::JoinError>,
) -> Result<()> {
    let (index, piece) = done.map_err(|error| Failure::internal("converting", error))??;
    made[index] = Some(piece);
    Ok(())
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> Result<tokio::sync::OwnedSemaphorePermit> {
    let acquired = Arc::clone(semaphore).acquire_many_owned(permits).await;
    acquired.map_err(|error| Failure::internal("converting", error))
}

/// Bytes as permits: one a KiB, so that a semaphore can count terabytes.
fn permits(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(1 << 28)
}

/// The memory that a piece takes while it is made and stored: the chunk (twice: one that is there already is read and
/// compared), its rows, and what encoders and gathering need beside them.
fn cost(plan: &Plan, piece: &Piece) -> u64 {
    let working = |part: &Part| {
        let rows = plan.tensors[part.tensor].rows;
        rows.source_bytes.max(STEP_BYTES) + ENCODER_BYTES * rows.elements
    };
    2 * piece.bytes + piece.parts.iter().map(working).max().unwrap_or(0) + WORKER_BYTES
}

/// Makes one chunk.
fn make(
    plan: &Plan,
    piece: &Piece,
    progress: &dyn Progress,
) -> std::result::Result<(Chunk, Bytes, Vec<Statistics>), ReadError> {
    // Pieces are bounded: see limits::CHUNK_BYTES and limits::ROW_BYTES.
    let mut builder = Builder::with_capacity(usize::try_from(piece.bytes).unwrap_or(0));
    let mut buffers = Buffers::default();
    let mut statistics = Vec::with_capacity(piece.parts.len());
    if let Some(part) = piece.artifact {
        copy_artifact(plan, part, piece.bytes, &mut builder, progress)?;
    }
    for part in &piece.parts {
        let planned = &plan.tensors[part.tensor];
        statistics.push(encode_part(
            plan.source(planned),
            planned,
            part,
            &mut builder,
            &mut buffers,
            progress,
        )?);
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
) -> std::result::Result<(), ReadError> {
    let file = &plan.artifacts[part.artifact];
    let mut buffer = Vec::new();
    let mut done = 0;
    while done < bytes {
        let count = STEP_BYTES.min(bytes - done);
        buffer.resize(usize::try_from(count).unwrap_or(0), 0);
        file.read_exact_at(&mut buffer, part.offset + done)?;
        builder.append(|chunk| chunk.extend_from_slice(&buffer));
        progress.advance(count);
        done += count;
    }
    Ok(())
}

#[derive(Default)]
struct Buffers {
    rows: Vec<u8>,
    sources: prune::Buffers,
}

fn encode_part(
    tensor: &Tensor,
    planned: &Planned,
    part: &Part,
    builder: &mut Builder,
    buffers: &mut Buffers,
    progress: &dyn Progress,
) -> std::result::Result<Statistics, ReadError> {
    let rows = planned.rows;
    let runs = Runs::of(tensor, planned)?;
    let step = (STEP_BYTES / rows.source_bytes.max(1)).max(1).next_multiple_of(runs.rows);
    let mut statistics = BlockStatistics::new(part.first);
    let (mut row, end) = (part.first, part.first + part.count);
    while row < end {
        let count = step.min(end - row);
        let bytes = usize::try_from(count * rows.source_bytes).map_err(|_| too_large(tensor))?;
        buffers.rows.resize(bytes, 0);
        read(tensor, planned, row * rows.elements, buffers)?;
        builder.append(|out| runs.encode(&buffers.rows, out, &mut statistics))?;
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

/// Fills the buffer of rows with what is published, from its element `first` on.
fn read(
    tensor: &Tensor,
    planned: &Planned,
    first: u64,
    buffers: &mut Buffers,
) -> std::result::Result<(), ReadError> {
    let Buffers { rows, sources } = buffers;
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
    fn of(tensor: &'t Tensor, planned: &'t Planned) -> std::result::Result<Self, ReadError> {
        let rows = if planned.rows.own { 1 } else { RUN_ELEMENTS };
        let encoder = encoder(tensor, planned, rows * planned.rows.elements)?;
        Ok(Self { tensor, planned, encoder, rows })
    }

    fn encode(
        &self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        statistics: &mut BlockStatistics,
    ) -> std::result::Result<(), ReadError> {
        let run = self.encoder.source_row_bytes().max(1);
        let (runs, rest) = bytes.split_at(bytes.len() - bytes.len() % run);
        append(&*self.encoder, runs, out, statistics);
        if !rest.is_empty() {
            let elements = rest.len() as u64 / self.planned.dtype.size();
            append(&*encoder(self.tensor, self.planned, elements)?, rest, out, statistics);
        }
        Ok(())
    }
}

fn append(encoder: &dyn Encoder, rows: &[u8], out: &mut Vec<u8>, statistics: &mut BlockStatistics) {
    let start = out.len();
    out.resize(start.saturating_add(encoder.encoded_bytes(rows.len())), 0);
    encoder.encode(rows, out.get_mut(start..).unwrap_or_default(), statistics);
}

fn encoder(
    tensor: &Tensor,
    planned: &Planned,
    elements: u64,
) -> std::result::Result<Box<dyn Encoder>, ReadError> {
    usize::try_from(elements)
        .ok()
        .and_then(|elements| encode::encoder(planned.form, planned.dtype, elements))
        .ok_or_else(|| too_large(tensor))
}

fn too_large(tensor: &Tensor) -> ReadError {
    ReadError::new(Class::LimitExceeded, "a row is too large to encode").of_tensor(tensor.name.as_str())
}
