//! Every chunk of the plan, made and stored: read, encode and hash on worker threads, write beside it.
//!
//! Three bounds hold whatever the checkpoint's size: how many chunks are being made (threads), how many are on the way
//! from there to the store (each in a buffer that is used again), and what memory their makers need beside them. More
//! are on the way than are made: a disk writes and syncs several in hardly more time than one.

mod buffers;
mod make;

use std::ops::Range;
use std::sync::Arc;

use futures::future::try_join_all;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::Chunk;
use weighbridge_snapshots::chunk::{self, Builder, Pool};
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::root::{Put, Root};

use super::Budget;
use super::plan::{Piece, Plan};
use crate::error::{Failure, Result};
use buffers::Spare;

/// What the process needs beside its workers: code, listings, the store's own buffers.
const PROCESS_BYTES: u64 = 80 << 20;
/// What is left for chunks at the least: one of the widest rows, and its encoded form.
const LEAST_BYTES: u64 = 48 << 20;
/// Chunks on their way to the store beside those that are being made, where memory allows.
const WRITES: u64 = 8;
/// Headers and the index are cut into chunks of this size.
const DESCRIPTION_BYTES: usize = 8 << 20;

/// Chunks of a plan, made and stored.
#[derive(Debug, Default)]
pub struct Converted {
    /// For every piece in order: its chunk, and the statistics of each of its parts.
    pub pieces: Vec<(Chunk, Vec<Statistics>)>,
    /// How many bytes of chunks were written, and how many were there.
    pub bytes: Bytes,
}

/// The chunks that describe a plan's tensors.
#[derive(Debug, Default)]
pub struct Described {
    /// For every file of the plan, in order: its header's chunk.
    pub headers: Vec<Chunk>,
    /// The index's chunks, where there is an index.
    pub index: Vec<Chunk>,
    /// How many bytes of chunks were written, and how many were there.
    pub bytes: Bytes,
}

/// Bytes of chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Written to the store.
    pub stored: u64,
    /// There already.
    pub reused: u64,
}

impl Bytes {
    fn count(&mut self, chunk: Chunk, put: Put) -> Chunk {
        match put {
            Put::Written => self.stored += chunk.size,
            Put::Present => self.reused += chunk.size,
        }
        chunk
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, more: Self) {
        self.stored = self.stored.saturating_add(more.stored);
        self.reused = self.reused.saturating_add(more.reused);
    }
}

/// Makes and stores the chunks of `pieces` of `plan`.
///
/// # Errors
/// As reading or the store fails; what was stored until then does no harm, and is found again by the next run.
pub async fn convert(
    root: &Root,
    model: &ModelName,
    plan: &Arc<Plan>,
    pieces: Range<usize>,
    budget: Budget,
    progress: &Arc<dyn Progress>,
) -> Result<Converted> {
    let first = pieces.start;
    let made = Stage::new(root, model, plan, budget).make_pieces(pieces, progress).await?;
    let mut converted = Converted { pieces: Vec::with_capacity(made.len()), bytes: Bytes::default() };
    for (number, made) in made.into_iter().enumerate() {
        let missing = || Failure::internal("converting", format!("piece {} is missing", first + number));
        let (chunk, statistics, put) = made.ok_or_else(missing)?;
        let chunk = converted.bytes.count(chunk, put);
        converted.pieces.push((chunk, statistics));
    }
    Ok(converted)
}

/// Stores the headers of the plan's files, and the index. A checkpoint that cannot be read leaves nothing behind that
/// it need not: so this comes when all has been read.
///
/// # Errors
/// As the store fails.
pub async fn describe(root: &Root, model: &ModelName, plan: &Arc<Plan>, budget: Budget) -> Result<Described> {
    let stage = Stage::new(root, model, plan, budget);
    let (headers, index) = tokio::try_join!(stage.store_headers(), stage.store_index())?;
    let mut described = Described::default();
    for (chunk, put) in headers {
        let chunk = described.bytes.count(chunk, put);
        described.headers.push(chunk);
    }
    for (chunk, put) in index {
        let chunk = described.bytes.count(chunk, put);
        described.index.push(chunk);
    }
    Ok(described)
}

type Made = (Chunk, Vec<Statistics>, Put);

/// Where chunks go, and what bounds them.
struct Stage {
    root: Root,
    model: ModelName,
    plan: Arc<Plan>,
    /// Buffers for chunks.
    pool: Pool,
    /// Buffers for what makers read.
    buffers: Spare,
    /// One permit a chunk that is being made, or on its way: so many buffers are there at most.
    chunks: Arc<Semaphore>,
    /// One permit a chunk that is being made.
    makers: Arc<Semaphore>,
    /// One permit a KiB of what makers need beside their chunks.
    working: Arc<Semaphore>,
    /// How many of these there are.
    working_kibibytes: u32,
}

impl Stage {
    fn new(root: &Root, model: &ModelName, plan: &Arc<Plan>, budget: Budget) -> Self {
        let threads = budget.threads.max(1);
        let taken = PROCESS_BYTES
            + limits::DIGEST_BYTES.unsigned_abs()
            + plan.listing_bytes()
            + plan.checkpoint.source.cache_bytes();
        let memory = budget.memory.saturating_sub(taken).max(LEAST_BYTES);
        let largest = largest_chunk(plan);
        let chunks = (memory / 2 / largest).clamp(1, WRITES + threads as u64);
        let working_kibibytes = permits(memory.saturating_sub(chunks * largest));
        Self {
            root: root.clone(),
            model: model.clone(),
            plan: Arc::clone(plan),
            buffers: Spare::default(),
            pool: Pool::new(usize::try_from(largest).unwrap_or(0)),
            chunks: Arc::new(Semaphore::new(usize::try_from(chunks).unwrap_or(1))),
            makers: Arc::new(Semaphore::new(threads)),
            working: Arc::new(Semaphore::new(working_kibibytes as usize)),
            working_kibibytes,
        }
    }

    async fn make_pieces(
        &self,
        pieces: Range<usize>,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<Option<Made>>> {
        let mut made: Vec<Option<Made>> = pieces.clone().map(|_| None).collect();
        let first = pieces.start;
        let mut tasks = JoinSet::new();
        for (index, piece) in self.plan.pieces.iter().enumerate().take(pieces.end).skip(first) {
            let place = acquire(&self.chunks, 1).await?;
            let maker = self.maker(piece).await?;
            while let Some(done) = tasks.try_join_next() {
                keep(&mut made, done)?;
            }
            let (root, model) = (self.root.clone(), self.model.clone());
            let (pool, buffers) = (self.pool.clone(), self.buffers.clone());
            let (plan, progress) = (Arc::clone(&self.plan), Arc::clone(progress));
            tasks.spawn(async move {
                let making = tokio::task::spawn_blocking(move || {
                    let made = buffers
                        .with(|buffers| make::make(&plan, &plan.pieces[index], &pool, buffers, &*progress));
                    drop(maker);
                    made
                });
                let (chunk, bytes, statistics) =
                    making.await.map_err(|error| Failure::internal("converting", error))??;
                let put = chunk::put(&root, &model, chunk, bytes).await?;
                drop(place);
                Ok((index - first, (chunk, statistics, put)))
            });
        }
        while let Some(done) = tasks.join_next().await {
            keep(&mut made, done)?;
        }
        Ok(made)
    }

    /// Waits for a thread, and for the memory that making `piece` takes.
    async fn maker(&self, piece: &Piece) -> Result<[OwnedSemaphorePermit; 2]> {
        let kibibytes = permits(make::cost(&self.plan, piece)).min(self.working_kibibytes);
        Ok([acquire(&self.working, kibibytes).await?, acquire(&self.makers, 1).await?])
    }

    async fn store_headers(&self) -> Result<Vec<(Chunk, Put)>> {
        let headers = self.plan.files.iter().map(|file| self.store(&file.header));
        Ok(try_join_all(headers).await?.concat())
    }

    async fn store_index(&self) -> Result<Vec<(Chunk, Put)>> {
        let index = self.plan.index.as_ref().map(|(_, bytes)| bytes.as_slice());
        self.store(index.unwrap_or_default()).await
    }

    /// Stores bytes that are at hand, cut into chunks of at most 8 MiB.
    async fn store(&self, bytes: &[u8]) -> Result<Vec<(Chunk, Put)>> {
        let mut chunks = Vec::new();
        for run in bytes.chunks(DESCRIPTION_BYTES) {
            let _place = acquire(&self.chunks, 1).await?;
            let mut builder = Builder::new(&self.pool);
            builder.append(run.len(), |room| room.copy_from_slice(run));
            let (chunk, bytes) = builder.finish();
            chunks.push((chunk, chunk::put(&self.root, &self.model, chunk, bytes).await?));
        }
        Ok(chunks)
    }
}

/// The size of the plan's largest chunk: a piece, or a run of a header or of the index.
fn largest_chunk(plan: &Plan) -> u64 {
    let headers = plan.files.iter().map(|file| file.header.len());
    let described = headers.chain(plan.index.iter().map(|(_, bytes)| bytes.len()));
    let described = described.map(|bytes| bytes.min(DESCRIPTION_BYTES) as u64);
    plan.pieces.iter().map(|piece| piece.bytes).chain(described).max().unwrap_or(0).max(1)
}

fn keep(
    made: &mut [Option<Made>],
    done: std::result::Result<Result<(usize, Made)>, tokio::task::JoinError>,
) -> Result<()> {
    let (index, piece) = done.map_err(|error| Failure::internal("converting", error))??;
    made[index] = Some(piece);
    Ok(())
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> Result<OwnedSemaphorePermit> {
    let acquired = Arc::clone(semaphore).acquire_many_owned(permits).await;
    acquired.map_err(|error| Failure::internal("converting", error))
}

/// Bytes as permits: one a KiB, so that a semaphore can count terabytes.
fn permits(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(1 << 28)
}
