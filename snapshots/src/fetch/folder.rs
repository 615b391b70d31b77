//! The folder that snapshots are fetched into: its lock, its versions, and the flip of `current`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock, statvfs};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::SnapshotManifest;

use crate::error::{Class, Result, StoreError};

/// Room that a fetch leaves free beyond its own bytes: folders, the manifest, the file system's own needs.
const SPARE_BYTES: u64 = 1 << 20;

/// A folder that holds fetched versions.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder at `path`, made if absent.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn open(path: &Path) -> Result<Self> {
        for made in [path.to_path_buf(), path.join("versions")] {
            fs::create_dir_all(&made).map_err(|error| StoreError::io(made.display(), &error))?;
        }
        Ok(Self { path: path.to_path_buf() })
    }

    /// Where a version lies, or will lie.
    #[must_use]
    pub fn version(&self, id: &SnapshotId) -> PathBuf {
        self.path.join("versions").join(id.to_string())
    }

    /// The link that serving hosts open.
    #[must_use]
    pub fn current(&self) -> PathBuf {
        self.path.join("current")
    }

    /// Waits until no other fetch works here.
    pub(super) fn lock(&self) -> Result<File> {
        let path = self.path.join(".lock");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|error| StoreError::io(path.display(), &error))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            tracing::info!(folder = %self.path.display(), "waiting for another fetch into this folder");
            flock(&file, FlockOperation::LockExclusive)
                .map_err(|error| StoreError::io(path.display(), &error.into()))?;
        }
        Ok(file)
    }

    /// The folder in which `id` is put together. Left-overs of other snapshots' fetches are removed: the lock is ours.
    pub(super) fn stage(&self, id: &SnapshotId) -> Result<PathBuf> {
        let all = self.path.join(".staging");
        let own = all.join(id.to_string());
        let stage = || {
            fs::create_dir_all(&own)?;
            for entry in fs::read_dir(&all)? {
                let other = entry?.path();
                if other != own {
                    fs::remove_dir_all(other)?;
                }
            }
            Ok(())
        };
        stage().map_err(|error: io::Error| StoreError::io(all.display(), &error))?;
        Ok(own)
    }

    /// Refuses a fetch for which the disk has no room, before its first byte.
    pub(super) fn check_room(&self, needed: u64) -> Result<()> {
        let Ok(volume) = statvfs(&self.path) else { return Ok(()) };
        let free = volume.f_bavail.saturating_mul(volume.f_frsize);
        if needed == 0 || free >= needed.saturating_add(SPARE_BYTES) {
            return Ok(());
        }
        let why = format!("{needed} bytes are needed and {free} are free; free some space and run it again");
        Err(StoreError::new(Class::DiskFull, self.path.display(), why))
    }

    /// Turns a complete staging folder into a version.
    pub(super) fn materialise(
        &self,
        staging: &Path,
        id: &SnapshotId,
        manifest: &SnapshotManifest,
    ) -> Result<()> {
        let version = self.version(id);
        let materialise = || {
            let mut file = File::create(staging.join("snapshot.json"))?;
            file.write_all(&manifest.to_bytes())?;
            file.sync_all()?;
            File::open(staging)?.sync_all()?;
            if fs::symlink_metadata(&version).is_ok() {
                // A damaged version of this very snapshot: it makes way, under a name that the next fetch removes.
                fs::rename(&version, staging.with_extension("damaged"))?;
            }
            fs::rename(staging, &version)?;
            sync_parent(&version)
        };
        materialise().map_err(|error: io::Error| StoreError::io(version.display(), &error))
    }

    /// Points `current` at a version, atomically.
    pub(super) fn flip(&self, id: &SnapshotId) -> Result<()> {
        let current = self.current();
        let target = Path::new("versions").join(id.to_string());
        let flip = || {
            if fs::read_link(&current).is_ok_and(|now| now == target) {
                return Ok(());
            }
            let next = self.path.join(".current.next");
            match fs::remove_file(&next) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => symlink(&target, &next)?,
            }
            fs::rename(&next, &current)?;
            sync_parent(&current)
        };
        flip().map_err(|error: io::Error| StoreError::io(current.display(), &error))?;
        // Nothing is fetched any more; what is left in the staging folder is of no use.
        match fs::remove_dir_all(self.path.join(".staging")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "the staging folder could not be removed");
            }
            _ => {}
        }
        Ok(())
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}
