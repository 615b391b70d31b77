//! The store's immutable objects, read for many at once: a folder's in pieces, as they are asked for; a bucket's whole
//! into a cache that all share, so that a chunk that a thousand hosts want is read once.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path as Key;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use tokio::sync::{Semaphore, SemaphorePermit};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::{Chunk, SnapshotManifest};
use weighbridge_snapshots::error::{Class, Result, StoreError};
use weighbridge_snapshots::layout::Content;
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{layout, manifest};

use super::shares::Shares;

/// Bytes that are sent at a time.
pub const PIECE: usize = 64 << 10;
/// Chunks and manifests that are loaded into the cache at once, and those that one caller waits for.
const LOADS: usize = 8;
const LOADS_OF_ONE: usize = LOADS / 2;
/// Larger manifests are read in pieces by whoever asks, and not kept, in bytes.
const LARGE: u64 = 16 << 20;
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

/// An object of the store that is being read for a caller.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its key.
    pub key: Key,
    /// What its bytes have to hash to, where the key says that.
    pub content: Option<Content>,
    /// Its size in bytes.
    pub size: u64,
    /// Where reading ends.
    pub end: u64,
    /// What its caller may load at once.
    pub share: Arc<Semaphore>,
}

type ByWeight<K, V> = Cache<K, V, ByBytes, DefaultHashBuilder>;

/// A store's objects.
#[derive(Debug)]
pub struct Objects {
    root: Root,
    kept: ByWeight<Key, Bytes>,
    manifests: ByWeight<(ModelName, SnapshotId), Arc<SnapshotManifest>>,
    loads: Semaphore,
    shares: Shares,
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
            kept: cache(memory / 4 * 3, 1024),
            manifests: cache(memory / 4, 64),
            loads: Semaphore::new(LOADS),
            shares: Shares::new(LOADS_OF_ONE),
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
        let load = async { self.load(&key, Content::Chunk(chunk.id)).await?.ok_or_else(missing) };
        let bytes = self.kept.get_or_insert_async(&key, load).await?;
        if bytes.len() as u64 == chunk.size {
            return Ok(bytes);
        }
        let why = format!("the chunk has {} bytes, and a manifest says {}", bytes.len(), chunk.size);
        Err(StoreError::new(Class::Integrity, &key, why))
    }

    async fn load(&self, key: &Key, content: Content) -> Result<Option<Bytes>> {
        let _load = self.loads.acquire().await;
        let most = usize::try_from(limits::LARGEST_CHUNK_BYTES).unwrap_or(usize::MAX);
        let Some(bytes) = self.root.get(key, most).await? else { return Ok(None) };
        let hashed = bytes.clone();
        let is_right = tokio::task::spawn_blocking(move || content.is_of(&hashed)).await;
        if is_right.unwrap_or(false) {
            return Ok(Some(bytes));
        }
        let why = "the object's bytes do not have the hash that is its name";
        Err(StoreError::new(Class::Integrity, key, why))
    }

    /// What a caller of this name may load at once.
    #[must_use]
    pub fn share(&self, caller: &str) -> Arc<Semaphore> {
        self.shares.of(caller)
    }

    /// The size of an object; `None` where it is not there. A chunk of a bucket comes into the cache on the way.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn size(&self, key: &Key, content: Option<Content>, share: &Semaphore) -> Result<Option<u64>> {
        let kept = if !self.root.is_bucket() {
            None
        } else if let Some(chunk @ Content::Chunk(_)) = content {
            return Ok(self.through_cache(key, chunk, share).await?.map(|bytes| bytes.len() as u64));
        } else {
            self.kept.get(key)
        };
        match kept {
            Some(bytes) => Ok(Some(bytes.len() as u64)),
            None => self.root.size(key).await,
        }
    }

    /// The next bytes of an object of `size` bytes from `from` on, up to `end` and at most [`PIECE`]; none where it is
    /// not there any more. A chunk or manifest of a bucket that is read from its beginning comes into the cache on the
    /// way.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn piece(&self, object: &Object, from: u64) -> Result<Option<Bytes>> {
        let Object { key, content, size, end, share } = object;
        let most = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX).min(PIECE);
        if self.root.is_bucket() {
            let is_small = matches!(content, Some(Content::Chunk(_))) || *size <= LARGE;
            let cached = match (self.kept.get(key), content) {
                (Some(bytes), _) => Some(bytes),
                (None, Some(content)) if from == 0 && is_small => {
                    self.through_cache(key, *content, share).await?
                }
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

    /// An object out of the cache, where it is put first; `None` where it is not in the store.
    async fn through_cache(&self, key: &Key, content: Content, share: &Semaphore) -> Result<Option<Bytes>> {
        if let Some(bytes) = self.kept.get(key) {
            return Ok(Some(bytes));
        }
        let _share = share.acquire().await;
        let absent = || StoreError::new(Class::NotFound, key, "no such object");
        let load = async { self.load(key, content).await?.ok_or_else(absent) };
        match self.kept.get_or_insert_async(key, load).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.class() == Class::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
