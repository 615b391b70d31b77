//! The store's immutable objects, read for many at once: a folder's in pieces, as they are asked for; a bucket's whole
//! into a cache that all share, so that a chunk that a thousand hosts want is read once.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path as Key;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use tokio::sync::{Semaphore, SemaphorePermit};

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::{Chunk, SnapshotManifest};
use weighbridge_snapshots::error::{Class, Result, StoreError};
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{layout, manifest};

/// Bytes that are sent at a time.
pub const PIECE: usize = 64 << 10;
/// Chunks that are loaded into the cache at once.
const LOADS: usize = 8;
/// Pieces of a folder's objects that are read at once: each takes a thread, and a thread takes memory.
const READS: usize = 32;
/// Look-ups of rows at once; fewer than loads, so that hosts that fetch are not kept waiting by them.
const LOOK_UPS: usize = 6;
/// About how many bytes of memory a tensor, and a chunk, take in a manifest that was read.
const TENSOR_BYTES: u64 = 512;
const CHUNK_BYTES: u64 = 64;

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<Key, Bytes> for ByBytes {
    fn weight(&self, key: &Key, bytes: &Bytes) -> u64 {
        (key.as_ref().len() + bytes.len()) as u64
    }
}

impl Weighter<(ModelName, SnapshotId), Arc<SnapshotManifest>> for ByBytes {
    fn weight(&self, _: &(ModelName, SnapshotId), manifest: &Arc<SnapshotManifest>) -> u64 {
        let chunks: usize = manifest.files.iter().map(|file| file.chunks.len()).sum();
        manifest.tensors.len() as u64 * TENSOR_BYTES + chunks as u64 * CHUNK_BYTES + TENSOR_BYTES
    }
}

type ByWeight<K, V> = Cache<K, V, ByBytes, DefaultHashBuilder>;

/// A store's objects.
#[derive(Debug)]
pub struct Objects {
    root: Root,
    chunks: ByWeight<Key, Bytes>,
    manifests: ByWeight<(ModelName, SnapshotId), Arc<SnapshotManifest>>,
    loads: Semaphore,
    reads: Semaphore,
    /// Look-ups of rows: each keeps a chunk or two while it goes on.
    look_ups: Semaphore,
}

/// A cache of one shard: of several, each would have room for a part alone, and none for a large chunk.
fn cache<K: std::hash::Hash + Eq + Clone, V: Clone>(memory: u64, items: usize) -> ByWeight<K, V>
where
    ByBytes: Weighter<K, V>,
{
    let options = OptionsBuilder::new()
        .shards(1)
        .estimated_items_capacity(items)
        .weight_capacity(memory)
        .build()
        .unwrap_or_else(|_| unreachable!("both capacities are there"));
    Cache::with_options(options, ByBytes, DefaultHashBuilder::default(), DefaultLifecycle::default())
}

impl Objects {
    /// Objects of `root`, of which at most `memory` bytes are kept.
    #[must_use]
    pub fn new(root: Root, memory: u64) -> Self {
        Self {
            root,
            chunks: cache(memory / 4 * 3, 1024),
            manifests: cache(memory / 4, 64),
            loads: Semaphore::new(LOADS),
            reads: Semaphore::new(READS),
            look_ups: Semaphore::new(LOOK_UPS),
        }
    }

    /// The store.
    #[must_use]
    pub fn root(&self) -> &Root {
        &self.root
    }

    /// A place for a look-up of rows: they take turns.
    pub async fn look_up(&self) -> Option<SemaphorePermit<'_>> {
        self.look_ups.acquire().await.ok()
    }

    /// A snapshot's manifest.
    ///
    /// # Errors
    /// As [`manifest::get`].
    pub async fn manifest(&self, model: &ModelName, id: &SnapshotId) -> Result<Arc<SnapshotManifest>> {
        let read = async {
            let _load = self.loads.acquire().await;
            manifest::get(&self.root, model, id).await.map(Arc::new)
        };
        self.manifests.get_or_insert_async(&(model.clone(), *id), read).await
    }

    /// A chunk, whole and checked.
    ///
    /// # Errors
    /// [`Class::Integrity`] where it is missing or wrong; else as the store fails.
    pub async fn chunk(&self, model: &ModelName, chunk: Chunk) -> Result<Bytes> {
        let key = layout::chunk(model, &chunk.id);
        let missing = || StoreError::new(Class::Integrity, &key, "the chunk is missing from the store");
        let load = async { self.load(&key, chunk.id).await?.ok_or_else(missing) };
        let bytes = self.chunks.get_or_insert_async(&key, load).await?;
        if bytes.len() as u64 == chunk.size {
            return Ok(bytes);
        }
        let why = format!("the chunk has {} bytes, and a manifest says {}", bytes.len(), chunk.size);
        Err(StoreError::new(Class::Integrity, &key, why))
    }

    async fn load(&self, key: &Key, id: ChunkId) -> Result<Option<Bytes>> {
        let _load = self.loads.acquire().await;
        let most = usize::try_from(limits::LARGEST_CHUNK_BYTES).unwrap_or(usize::MAX);
        let Some(bytes) = self.root.get(key, most).await? else { return Ok(None) };
        let hashed = bytes.clone();
        let found = tokio::task::spawn_blocking(move || ChunkId::of(&hashed)).await;
        if found.ok() == Some(id) {
            return Ok(Some(bytes));
        }
        let why = "the chunk's bytes do not have the hash that is its name";
        Err(StoreError::new(Class::Integrity, key, why))
    }

    /// The size of an object that is no chunk; `None` where it is not there.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.root.size(key).await
    }

    /// The size of a chunk; `None` where it is not there. One of a bucket comes into the cache on the way.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn chunk_size(&self, key: &Key, id: ChunkId) -> Result<Option<u64>> {
        if !self.root.is_bucket() {
            return self.root.size(key).await;
        }
        Ok(self.through_cache(key, id).await?.map(|bytes| bytes.len() as u64))
    }

    /// The next bytes of an object from `from` on, at most `most` and [`PIECE`]; none where it is not there any more.
    /// A chunk of a bucket that is read from its beginning comes into the cache on the way.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn piece(
        &self,
        key: &Key,
        chunk: Option<ChunkId>,
        from: u64,
        most: u64,
    ) -> Result<Option<Bytes>> {
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(PIECE);
        if self.root.is_bucket() {
            let cached = match (self.chunks.get(key), chunk) {
                (Some(bytes), _) => Some(bytes),
                (None, Some(id)) if from == 0 => self.through_cache(key, id).await?,
                _ => None,
            };
            if let Some(bytes) = cached {
                let begin = usize::try_from(from).unwrap_or(usize::MAX).min(bytes.len());
                let end = begin.saturating_add(most).min(bytes.len());
                // A copy: a slow reader must not keep the whole chunk.
                return Ok(Some(Bytes::copy_from_slice(&bytes[begin..end])));
            }
        }
        let _read = self.reads.acquire().await;
        Ok(self.root.get_range(key, from, most).await?.map(|(bytes, _)| bytes))
    }

    /// A chunk out of the cache, where it is put first; `None` where it is not in the store.
    async fn through_cache(&self, key: &Key, id: ChunkId) -> Result<Option<Bytes>> {
        let absent = || StoreError::new(Class::NotFound, key, "no such chunk");
        let load = async { self.load(key, id).await?.ok_or_else(absent) };
        match self.chunks.get_or_insert_async(key, load).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.class() == Class::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
