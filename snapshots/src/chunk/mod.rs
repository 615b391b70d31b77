//! Chunks: runs of output bytes, named by their BLAKE3 hash.
//!
//! [`cut`] says where tables are cut; [`Builder`] collects and hashes a chunk while it is made, in a buffer of
//! [`Pool`]; [`put`] and [`check`] store it and look whether it is right. A chunk is never overwritten, and nothing of
//! it counts before its hash has been checked.

pub mod cut;
mod pool;

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::ids::ChunkId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::Chunk;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::pace::Pace;
use crate::root::{Put, Root, apart};

use pool::Lent;
pub use pool::Pool;

/// Bytes that are hashed at a time: a power of two, which BLAKE3 hashes fastest; and few enough to be in cache still
/// when they are used again.
const STEP_BYTES: usize = 256 << 10;
/// A chunk in the making is hashed up to the last multiple of this; the rest follows.
const HASHED_BYTES: usize = 64 << 10;

/// A chunk in the making: its bytes, and their hash so far.
#[derive(Debug)]
pub struct Builder {
    bytes: Lent,
    hashed: usize,
    hasher: blake3::Hasher,
}

impl Builder {
    /// An empty chunk, for which `pool` lends the buffer.
    #[must_use]
    pub fn new(pool: &Pool) -> Self {
        Self { bytes: pool.lend(), hashed: 0, hasher: blake3::Hasher::new() }
    }

    /// Appends the `length` bytes that `write` writes, and hashes them while they are still in cache. `write` is given
    /// room that may hold anything, and has to write all of it.
    pub fn append<T>(&mut self, length: usize, write: impl FnOnce(&mut [u8]) -> T) -> T {
        let written = write(self.bytes.room(length));
        self.hash_to(self.bytes.as_ref().len() & !(HASHED_BYTES - 1));
        written
    }

    /// The chunk's entry for a manifest, and its bytes, whose buffer goes back to its pool when they are dropped.
    #[must_use]
    pub fn finish(mut self) -> (Chunk, Bytes) {
        let length = self.bytes.as_ref().len();
        self.hash_to(length);
        let id = ChunkId::from_bytes(*self.hasher.finalize().as_bytes());
        (Chunk { id, size: length as u64 }, Bytes::from_owner(self.bytes))
    }

    fn hash_to(&mut self, end: usize) {
        self.hasher.update(self.bytes.as_ref().get(self.hashed..end).unwrap_or_default());
        self.hashed = end.max(self.hashed);
    }
}

/// Stores a chunk, unless it is there already; then what is there is compared: byte by byte in a folder, by its size in
/// a bucket. In a folder its bytes are on the disk when this returns; its name is before [`Root::put_if_absent`] puts
/// anything.
///
/// # Errors
/// [`Class::Integrity`] where an object of that name and other content is there; else as the store fails.
pub async fn put(root: &Root, model: &ModelName, chunk: Chunk, bytes: Bytes) -> Result<Put> {
    root.put_content(&layout::chunk(model, &chunk.id), bytes).await
}

/// Looks whether a chunk is there; it is not read.
///
/// # Errors
/// [`Class::Integrity`] where it has another size; else as the store fails.
pub async fn is_there(root: &Root, model: &ModelName, chunk: Chunk) -> Result<bool> {
    let key = layout::chunk(model, &chunk.id);
    match root.size(&key).await? {
        Some(size) if size != chunk.size => {
            let why = format!("the stored chunk has {size} bytes, where {} were written", chunk.size);
            Err(StoreError::new(Class::Integrity, key, format!("{why}; move it away and publish again")))
        }
        found => Ok(found.is_some()),
    }
}

/// Reads a chunk and checks its hash.
///
/// # Errors
/// [`Class::Integrity`] where it is absent, or is not what its name says; else as the store fails.
pub async fn check(root: &Root, model: &ModelName, chunk: Chunk) -> Result<()> {
    read(root, model, chunk, &Pace::default(), |_, _| Ok(())).await
}

/// Reads a chunk, hands each of its runs and where it begins to `take`, and checks the hash of all. What `take` was
/// given is right only if this succeeds. A chunk of a folder is read in runs as it is hashed; one of a bucket comes
/// into memory whole, and is hashed before `take` is given any of it.
///
/// # Errors
/// [`Class::Integrity`] where it is absent, or is not what its name says; else as the store or `take` fails.
pub(crate) async fn read(
    root: &Root,
    model: &ModelName,
    chunk: Chunk,
    pace: &Pace,
    take: impl FnMut(u64, &[u8]) -> Result<()> + Send + 'static,
) -> Result<()> {
    let key = layout::chunk(model, &chunk.id);
    if !root.is_bucket() {
        pace.take(chunk.size).await;
        let root = root.clone();
        return apart("reading", move || read_file(&root, &key, chunk, take)).await;
    }
    let limit = usize::try_from(chunk.size).unwrap_or(usize::MAX);
    let Some(bytes) = root.get_paced(&key, limit, pace).await? else { return Err(missing(&key)) };
    apart("checking", move || check_bytes(&key, chunk, &bytes, take)).await
}

fn missing(key: &Key) -> StoreError {
    StoreError::new(Class::Integrity, key, "the chunk is missing from the store")
}

fn wrong_size(key: &Key, size: u64, chunk: Chunk) -> StoreError {
    StoreError::new(Class::Integrity, key, format!("it has {size} bytes, where {} are right", chunk.size))
}

fn wrong_hash(key: &Key, found: ChunkId) -> StoreError {
    let why = format!("the chunk's bytes do not have the hash that is its name, but {found}");
    StoreError::new(Class::Integrity, key, why)
}

fn check_bytes(
    key: &Key,
    chunk: Chunk,
    bytes: &Bytes,
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    if bytes.len() as u64 != chunk.size {
        return Err(wrong_size(key, bytes.len() as u64, chunk));
    }
    let found = ChunkId::of(bytes);
    if found != chunk.id {
        return Err(wrong_hash(key, found));
    }
    let mut done = 0;
    for run in bytes.chunks(STEP_BYTES) {
        take(done, run)?;
        done += run.len() as u64;
    }
    Ok(())
}

fn read_file(root: &Root, key: &Key, chunk: Chunk, take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
    let Some(file) = root.open_object(key)? else { return Err(missing(key)) };
    let size = file.metadata().map_err(|error| StoreError::io(key, &error))?.len();
    if size != chunk.size {
        return Err(wrong_size(key, size, chunk));
    }
    let found = walk(&file, 0, chunk, key, take)?;
    if found == chunk.id { Ok(()) } else { Err(wrong_hash(key, found)) }
}

/// Whether `file` holds the chunk at `offset`; read on this thread.
pub(crate) fn is_at(file: &File, offset: u64, chunk: Chunk) -> Result<bool> {
    copy_at(file, offset, chunk, |_, _| Ok(()))
}

/// Hands what `file` has at `offset` in the chunk's place to `take`, run by run, and tells whether it is the chunk;
/// read on this thread.
pub(crate) fn copy_at(
    file: &File,
    offset: u64,
    chunk: Chunk,
    take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    Ok(walk(file, offset, chunk, &chunk.id, take)? == chunk.id)
}

/// Hands the chunk's place in `file` to `take`, run by run, and gives the hash of what is there.
fn walk(
    file: &File,
    offset: u64,
    chunk: Chunk,
    object: &impl Display,
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<ChunkId> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; usize::try_from(chunk.size).map_or(STEP_BYTES, |size| size.min(STEP_BYTES))];
    let mut done = 0;
    while done < chunk.size {
        let left = usize::try_from(chunk.size - done).unwrap_or(usize::MAX);
        buffer.truncate(left);
        let read = file.read_exact_at(&mut buffer, offset.saturating_add(done));
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                StoreError::new(Class::Integrity, object, "it became shorter while it was read")
            }
            _ => StoreError::io(object, &error),
        })?;
        hasher.update(&buffer);
        take(done, &buffer)?;
        done += buffer.len() as u64;
    }
    Ok(ChunkId::from_bytes(*hasher.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::Absent;

    #[tokio::test]
    async fn chunks_are_stored_once_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let model = "m".parse().unwrap();
        let (chunk, bytes) = built(&[b"ro", b"ws"]);
        assert_eq!(chunk, Chunk { id: ChunkId::of(b"rows"), size: 4 });
        assert_eq!(put(&root, &model, chunk, bytes.clone()).await.unwrap(), Put::Written);
        assert_eq!(put(&root, &model, chunk, bytes.clone()).await.unwrap(), Put::Present);
        check(&root, &model, chunk).await.unwrap();

        let path = folder.path().join(layout::chunk(&model, &chunk.id).as_ref());
        for wrong in ["rowz", "row", "rows "] {
            std::fs::write(&path, wrong).unwrap();
            assert_eq!(check(&root, &model, chunk).await.unwrap_err().class(), Class::Integrity);
            let again = put(&root, &model, chunk, bytes.clone()).await;
            assert_eq!(again.unwrap_err().class(), Class::Integrity);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(check(&root, &model, chunk).await.unwrap_err().class(), Class::Integrity);
    }

    #[tokio::test]
    async fn a_large_chunk_is_hashed_and_read_in_steps() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let model = "m".parse().unwrap();
        let rows: Vec<Vec<u8>> = (0..40u8).map(|n| vec![n; 20_011]).collect();
        let (chunk, bytes) = built(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert_eq!(chunk, Chunk { id: ChunkId::of(&rows.concat()), size: 40 * 20_011 });
        put(&root, &model, chunk, bytes).await.unwrap();
        let taken = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let takes = std::sync::Arc::clone(&taken);
        let take = move |offset, run: &[u8]| {
            let mut taken = takes.lock().unwrap();
            assert_eq!(offset, taken.len() as u64);
            taken.extend_from_slice(run);
            Ok(())
        };
        read(&root, &model, chunk, &Pace::default(), take).await.unwrap();
        let taken = taken.lock().unwrap().clone();
        assert_eq!(taken, rows.concat());

        let path = folder.path().join("beside");
        std::fs::write(&path, [b"abc", taken.as_slice()].concat()).unwrap();
        let file = File::open(&path).unwrap();
        assert!(is_at(&file, 3, chunk).unwrap() && !is_at(&file, 2, chunk).unwrap());
        assert!(is_at(&file, 4, chunk).is_err() && is_at(&file, u64::MAX, chunk).is_err());
    }

    fn built(runs: &[&[u8]]) -> (Chunk, Bytes) {
        let mut builder = Builder::new(&Pool::new(16));
        for run in runs {
            builder.append(run.len(), |room| room.copy_from_slice(run));
        }
        builder.finish()
    }
}
