//! Chunks: runs of output bytes, named by their BLAKE3 hash.
//!
//! [`cut`] says where tables are cut; [`Builder`] collects and hashes a chunk while it is made; [`put`] and [`get`]
//! move it to and from the store. A chunk is never overwritten, and never used before its hash has been checked.

pub mod cut;

use bytes::Bytes;

use weighbridge_schemas::ids::ChunkId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::Chunk;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// A chunk in the making: its bytes, and their hash so far.
#[derive(Debug, Default)]
pub struct Builder {
    bytes: Vec<u8>,
    hashed: usize,
    hasher: blake3::Hasher,
}

impl Builder {
    /// An empty chunk with room for `capacity` bytes.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { bytes: Vec::with_capacity(capacity), ..Self::default() }
    }

    /// Appends by `write`, and hashes what it appended while that is still in cache. `write` must only append.
    pub fn append<T>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let written = write(&mut self.bytes);
        self.hasher.update(self.bytes.get(self.hashed..).unwrap_or_default());
        self.hashed = self.bytes.len();
        written
    }

    /// The chunk's entry for a manifest, and its bytes.
    #[must_use]
    pub fn finish(self) -> (Chunk, Bytes) {
        let id = ChunkId::from_bytes(*self.hasher.finalize().as_bytes());
        (Chunk { id, size: self.bytes.len() as u64 }, Bytes::from(self.bytes))
    }
}

/// Stores a chunk, unless it is there already; then what is there is read and compared.
///
/// # Errors
/// [`Class::Integrity`] where an object of that name and other content is there; else as the store fails.
pub async fn put(root: &Root, model: &ModelName, chunk: Chunk, bytes: Bytes) -> Result<Put> {
    let key = layout::chunk(model, &chunk.id);
    if root.size(&key).await?.is_none() && root.put_if_absent(&key, bytes.clone()).await? == Put::Written {
        return Ok(Put::Written);
    }
    let limit = usize::try_from(chunk.size).unwrap_or(usize::MAX);
    if root.get(&key, limit).await?.is_some_and(|there| there == bytes) {
        return Ok(Put::Present);
    }
    let why = "the stored chunk does not hold what its name says; move it away and publish again";
    Err(StoreError::new(Class::Integrity, key, why))
}

/// Reads a chunk and checks its hash.
///
/// # Errors
/// [`Class::Integrity`] where it is absent, or is not what its name says; else as the store fails.
pub async fn get(root: &Root, model: &ModelName, chunk: Chunk) -> Result<Bytes> {
    let key = layout::chunk(model, &chunk.id);
    let limit = usize::try_from(chunk.size).unwrap_or(usize::MAX);
    let Some(bytes) = root.get(&key, limit).await? else {
        return Err(StoreError::new(Class::Integrity, key, "the chunk is missing from the store"));
    };
    let (bytes, right) = hash_apart(bytes, chunk).await?;
    if right {
        return Ok(bytes);
    }
    Err(StoreError::new(Class::Integrity, key, "the chunk's bytes do not have the hash that is its name"))
}

/// Whether `bytes` are the chunk's.
#[must_use]
pub fn is_chunk(bytes: &[u8], chunk: Chunk) -> bool {
    bytes.len() as u64 == chunk.size && ChunkId::of(bytes) == chunk.id
}

/// Hashes off the I/O threads: 8 MiB take milliseconds.
async fn hash_apart(bytes: Bytes, chunk: Chunk) -> Result<(Bytes, bool)> {
    let hashed = tokio::task::spawn_blocking(move || {
        let right = is_chunk(&bytes, chunk);
        (bytes, right)
    });
    hashed.await.map_err(|error| StoreError::new(Class::Unreachable, "hashing", error.to_string()))
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
        let mut builder = Builder::with_capacity(4);
        builder.append(|bytes| bytes.extend(b"ro"));
        builder.append(|bytes| bytes.extend(b"ws"));
        let (chunk, bytes) = builder.finish();
        assert_eq!(chunk, Chunk { id: ChunkId::of(b"rows"), size: 4 });
        assert_eq!(put(&root, &model, chunk, bytes.clone()).await.unwrap(), Put::Written);
        assert_eq!(put(&root, &model, chunk, bytes.clone()).await.unwrap(), Put::Present);
        assert_eq!(get(&root, &model, chunk).await.unwrap(), bytes);

        let path = folder.path().join(layout::chunk(&model, &chunk.id).as_ref());
        std::fs::write(&path, b"rowz").unwrap();
        assert_eq!(get(&root, &model, chunk).await.unwrap_err().class(), Class::Integrity);
        std::fs::write(&path, b"row").unwrap();
        assert_eq!(get(&root, &model, chunk).await.unwrap_err().class(), Class::Integrity);
        assert_eq!(put(&root, &model, chunk, bytes).await.unwrap_err().class(), Class::Integrity);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(get(&root, &model, chunk).await.unwrap_err().class(), Class::Integrity);
    }
}
