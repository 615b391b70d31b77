//! Fetching a snapshot into a folder: plan, download, materialise, swap.
//!
//! ```text
//! DIR/versions/SNAPSHOT/      complete and verified, or absent: snapshot.json and the files
//! DIR/current                 a link to versions/SNAPSHOT, flipped atomically
//! DIR/.staging/SNAPSHOT/      a fetch in progress; what is right in it is used again after a crash
//! DIR/.lock                   held by the one fetch that works here; gone with its process
//! DIR/.seen.json              the newest entry that was seen of each channel
//! ```
//!
//! A file that another version in the folder holds is taken over, and a chunk that one holds is copied from there. So
//! two versions may have a file in common: none is ever written to. A channel that goes back behind what was seen of it
//! is refused.
//!
//! Order: every chunk is verified as it is written, every file is synced, the staging folder is renamed to its version,
//! and only then `current` flips. A chunk that is not right ends the fetch, and what lies in the staging folder is
//! verified before it is used. A crash anywhere leaves the old version serving.

mod download;
mod folder;
mod held;
mod plan;
mod seen;
mod shared;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::SnapshotManifest;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::manifest;
use crate::pace::Pace;
use crate::reference::{Located, follow};
use crate::root::{self, Root};

use download::Writing;
pub use folder::Folder;
pub(crate) use folder::{FOLLOW, Lock, make_folder, remove};
use held::Others;
pub(crate) use held::described;
pub(crate) use plan::Staged;
pub(crate) use seen::Seen;

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
    /// It will handle so many bytes; several times where it comes to know of more.
    fn start(&self, bytes: u64);
    /// It has handled so many more.
    fn advance(&self, bytes: u64);
}

/// Nobody is told.
impl Progress for () {
    fn start(&self, _: u64) {}

    fn advance(&self, _: u64) {}
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
    pub(crate) async fn memory_for(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let kibibytes = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.memory_kibibytes);
        Arc::clone(self.memory.as_ref()?).acquire_many_owned(kibibytes).await.ok()
    }
}

/// Fetches what `located` says into `folder`, and flips `current` to it. Where another fetch saw a newer entry of its
/// channel while the folder's lock was waited for, what the channel says then is fetched. With `forget`, what was seen
/// before counts for nothing.
///
/// # Errors
/// [`Class::Conflict`] where it is to forget what a follower of the folder has seen, too. [`Class::Refused`] where
/// another model's snapshot is served out of the folder. [`Class::Integrity`] where anything in the store is not what
/// its name says, or a channel went back: then `folder` is as it was. [`Class::DiskFull`] before the first byte where
/// the disk has no room. Else as the store or the folder fails.
pub async fn fetch(
    root: &Root,
    located: Located,
    folder: &Folder,
    forget: bool,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Fetched> {
    // Whoever follows a channel has seen it too, and would put back what it has seen.
    let _alone = forget.then(|| folder.lock_following()).transpose()?;
    let lock = folder.lock().await?;
    let model = located.model.clone();
    apart(&located.snapshot, (folder, &lock), move |folder, _| check_model(folder, &model)).await?;
    let (mut located, seen) = checked(root, located, folder, forget).await?;
    let id = located.snapshot;
    let found = match located.manifest.take() {
        Some(found) => found,
        None => Arc::new(manifest::get(root, &located.model, &id).await?),
    };
    let fetched = bring(root, &id, found, (folder, &lock), &mut Staged::default(), limits, progress).await;
    if fetched.as_ref().is_err_and(|error| error.class() == Class::Integrity) {
        // Nobody can finish this fetch; a later one starts from nothing.
        apart(&id, (folder, &lock), clear_staging).await?;
    }
    let fetched = fetched?;
    apart(&id, (folder, &lock), Folder::flip).await?;
    if let Some(followed) = located.followed {
        let model = located.model;
        let note = move |folder: &Folder, _: &SnapshotId| seen.note(folder, &model, &followed);
        apart(&id, (folder, &lock), note).await?;
    }
    Ok(fetched)
}

/// Refuses a folder out of which another model is served: whoever opens `current` there counts on that one.
pub(crate) fn check_model(folder: &Folder, model: &ModelName) -> Result<()> {
    let Some(id) = folder.points_at() else { return Ok(()) };
    // One that cannot be read is damaged, and is put right by a fetch.
    match held::manifest(&folder.version(&id)) {
        Ok(manifest) if manifest.model != *model => Err(taken(folder, &manifest.model, "current")),
        _ => Ok(()),
    }
}

/// The folder is another model's, as the file `by` says.
pub(crate) fn taken(folder: &Folder, model: &ModelName, by: &str) -> StoreError {
    let why = format!(
        "{by} says that model {model} is served out of it; name another folder, or, where nobody needs that one here \
         any more, remove current and .followed.json in it"
    );
    StoreError::new(Class::Refused, folder.path().display(), why)
}

/// What is to be fetched now that nobody else works in the folder; and what was seen before.
async fn checked(root: &Root, located: Located, folder: &Folder, forget: bool) -> Result<(Located, Seen)> {
    let Some(followed) = &located.followed else { return Ok((located, Seen::default())) };
    let seen = Seen::read(folder);
    if forget {
        return Ok((located, seen.unwrap_or_default()));
    }
    let seen = seen?;
    if seen.check(&located.model, followed).is_ok() {
        return Ok((located, seen));
    }
    // Another fetch may have seen a newer entry while the folder's lock was waited for.
    match follow(root, &located.model, &followed.channel).await? {
        Some(now) => {
            now.followed.as_ref().map_or(Ok(()), |followed| seen.check(&now.model, followed))?;
            Ok((now, seen))
        }
        None => seen.check(&located.model, followed).map(|()| (located, seen)),
    }
}

/// Removes what fetches left that were not finished.
pub(crate) fn clear_staging(folder: &Folder, _: &SnapshotId) -> Result<()> {
    folder.clear_staging();
    Ok(())
}

/// Brings the snapshot into the folder, whose lock is held, so that it is a version there. `current` stays as it is.
/// Where it fails, `staged` is for the next attempt.
pub(crate) async fn bring(
    root: &Root,
    id: &SnapshotId,
    manifest: Arc<SnapshotManifest>,
    (folder, lock): (&Folder, &Lock),
    staged: &mut Staged,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Fetched> {
    let bytes = manifest.bytes();
    progress.start(bytes);
    let mut fetched = Fetched { snapshot: *id, bytes, bytes_read: 0, bytes_reused: bytes };
    if is_right(id, &manifest, (folder, lock), staged, limits, progress).await? {
        return Ok(fetched);
    }
    let staging = apart(id, (folder, lock), Folder::stage).await?;
    let missing = plan::missing(&staging, &manifest, staged, limits, progress).await?;
    let known = Arc::clone(&manifest);
    let others = move |folder: &Folder, id: &SnapshotId| Ok(Others::than(id, &known, &folder.versions()));
    let others = apart(id, (folder, lock), others).await?;
    let missing = shared::take_over((&staging, lock), &manifest, missing, &others, limits, progress).await?;
    let room = folder.check_room(missing.iter().map(|piece| piece.chunk.size).sum());
    room.inspect_err(|_| staged.lacks_room())?;
    staged.takes_room();
    let (files, known) = (staging.clone(), Arc::clone(&manifest));
    apart(id, (folder, lock), move |_, _| plan::make_files(&files, &known)).await?;
    let model = &manifest.model;
    let held = others.chunks(&missing);
    let writing = Writing { durability: folder.durability(), lock: lock.clone() };
    let downloaded =
        download::download(root, model, &staging, (missing, held), (&writing, staged), limits, progress)
            .await;
    if downloaded.as_ref().is_err_and(|error| error.class() == Class::Integrity)
        && root.size(&layout::snapshot(model, id)).await?.is_none()
    {
        apart(id, (folder, lock), clear_staging).await?;
        let why = "gc deleted it while it was fetched; fetch what the channel points at now";
        return Err(StoreError::new(Class::NotFound, id, why));
    }
    fetched.bytes_read = downloaded?;
    fetched.bytes_reused = bytes - fetched.bytes_read;
    let written = manifest::written(root, id, &manifest).await?;
    let materialise =
        move |folder: &Folder, id: &SnapshotId| folder.materialise(&staging, id, (&manifest, &written));
    let materialised = apart(id, (folder, lock), materialise).await;
    // What was written may be lost.
    materialised.inspect_err(|_| staged.forget())?;
    Ok(fetched)
}

/// Whether the version is there, right to the last byte, and on the disk. One that is not is read once, and replaced.
async fn is_right(
    id: &SnapshotId,
    manifest: &Arc<SnapshotManifest>,
    (folder, lock): (&Folder, &Lock),
    staged: &mut Staged,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<bool> {
    let version = folder.version(id);
    if staged.is_damaged(&version) {
        return Ok(false);
    }
    if plan::is_complete(folder, id, manifest, limits, progress).await? {
        let known = Arc::clone(manifest);
        match apart(id, (folder, lock), move |folder, id| folder.secure(id, &known)).await {
            Ok(()) => return Ok(true),
            Err(error) => {
                tracing::warn!(%error, "the fetched version is not safe on the disk; fetching it again");
            }
        }
    }
    staged.note_damaged(&version);
    Ok(false)
}

/// Off the I/O threads: syncing takes as long as the disk does.
pub(crate) async fn apart<T: Send + 'static>(
    id: &SnapshotId,
    (folder, lock): (&Folder, &Lock),
    work: impl FnOnce(&Folder, &SnapshotId) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (folder, lock, id) = (folder.clone(), lock.clone(), *id);
    root::apart("fetching", move || {
        let _lock = lock;
        work(&folder, &id)
    })
    .await
}
