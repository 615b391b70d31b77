//! Fetching a snapshot into a folder: plan, download, materialise, swap.
//!
//! ```text
//! DIR/versions/SNAPSHOT/      complete and verified, or absent: snapshot.json and the files
//! DIR/current                 a link to versions/SNAPSHOT, flipped atomically
//! DIR/.staging/SNAPSHOT/      a fetch in progress; what is right in it is used again after a crash
//! DIR/.lock                   held by the one fetch that works here; gone with its process
//! ```
//!
//! Order: every chunk is verified as it is written, every file is synced, the staging folder is renamed to its version,
//! and only then `current` flips. A chunk that is not right ends the fetch, and what lies in the staging folder is
//! verified before it is used. A crash anywhere leaves the old version serving.

mod download;
mod folder;
mod plan;

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;

use crate::error::{Class, Result};
use crate::manifest;
use crate::pace::Pace;
use crate::root::{self, Root};

pub use folder::Folder;

/// What a fetch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetched {
    /// The snapshot that `current` points at now.
    pub snapshot: SnapshotId,
    /// The size of its files, in bytes.
    pub bytes: u64,
    /// What came out of the store.
    pub bytes_read: u64,
    /// What was there already, verified.
    pub bytes_reused: u64,
}

/// Told what a fetch does.
pub trait Progress: Send + Sync {
    /// It will handle so many bytes.
    fn start(&self, bytes: u64);
    /// It has handled so many more.
    fn advance(&self, bytes: u64);
}

/// How much a fetch may use.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Chunks that are worked on at once.
    pub chunks: usize,
    /// Memory for chunks on their way from a bucket, in KiB: each is there whole.
    memory: Option<Arc<Semaphore>>,
    memory_kibibytes: u32,
    /// How fast bytes may come in.
    pub pace: Pace,
}

/// The memory that one chunk on its way takes, in bytes: of a folder's a run, and a thread's stack.
const RUN_MEMORY: u64 = 512 << 10;

impl Limits {
    /// So many chunks of the store at once as `memory` bytes have room for, and at most `most`.
    #[must_use]
    pub fn new(root: &Root, memory: u64, most: usize, pace: Pace) -> Self {
        let chunks = usize::try_from(memory / RUN_MEMORY).unwrap_or(usize::MAX).clamp(1, most.max(1));
        // A chunk's bytes lie there twice for a moment: as they come, and as they are written.
        let kibibytes = u32::try_from(memory / 2 / 1024).unwrap_or(u32::MAX >> 3).clamp(1, u32::MAX >> 3);
        let memory = root.is_bucket().then(|| Arc::new(Semaphore::new(kibibytes as usize)));
        Self { chunks, memory, memory_kibibytes: kibibytes, pace }
    }

    /// Waits for the memory that a chunk of this size takes.
    async fn memory_for(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let kibibytes = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.memory_kibibytes);
        Arc::clone(self.memory.as_ref()?).acquire_many_owned(kibibytes).await.ok()
    }
}

/// Fetches snapshot `id` of `model` into `folder`, and flips `current` to it.
///
/// # Errors
/// [`Class::Integrity`] where anything in the store is not what its name says: then
/// `folder` is as it was. [`Class::DiskFull`] before the first byte where the disk has
/// no room. Else as the store or the folder fails.
pub async fn fetch(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    folder: &Folder,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Fetched> {
    let manifest = manifest::get(root, model, id).await?;
    let bytes = manifest.bytes();
    progress.start(bytes);
    let mut fetched = Fetched { snapshot: *id, bytes, bytes_read: 0, bytes_reused: bytes };
    let _lock = folder.lock().await?;
    if plan::is_complete(folder, id, &manifest, limits, progress).await? {
        apart(id, folder, move |folder, id| {
            folder.secure(id, &manifest)?;
            folder.flip(id)
        })
        .await?;
        return Ok(fetched);
    }
    let staging = folder.stage(id)?;
    let missing = plan::missing(&staging, &manifest, limits, progress).await?;
    fetched.bytes_read = missing.iter().map(|piece| piece.chunk.size).sum();
    fetched.bytes_reused = bytes - fetched.bytes_read;
    folder.check_room(fetched.bytes_read)?;
    let downloaded =
        download::download(root, model, &staging, missing, folder.durability(), limits, progress).await;
    if downloaded.as_ref().is_err_and(|error| error.class() == Class::Integrity) {
        // Nobody can finish this fetch; a later one starts from nothing.
        folder.clear_staging();
    }
    downloaded?;
    apart(id, folder, move |folder, id| {
        folder.materialise(&staging, id, &manifest)?;
        folder.flip(id)
    })
    .await?;
    Ok(fetched)
}

/// Off the I/O threads: syncing takes as long as the disk does.
async fn apart(
    id: &SnapshotId,
    folder: &Folder,
    work: impl FnOnce(&Folder, &SnapshotId) -> Result<()> + Send + 'static,
) -> Result<()> {
    let (folder, id) = (folder.clone(), *id);
    root::apart("fetching", move || work(&folder, &id)).await
}
