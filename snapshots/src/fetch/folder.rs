//! The folder that snapshots are fetched into: its lock, its versions, and the flip of `current`.
//!
//! Whatever else lies in it (left-overs, files of other programs, links, pipes) is neither followed nor waited for.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with, statvfs};
use rustix::io::Errno;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::{MANIFEST_FILE, SnapshotManifest};

use crate::disk::{self, Durability, open_regular};
use crate::error::{Class, Result, StoreError};

/// Room that a fetch leaves free beyond its own bytes: folders, the manifest, the file system's own needs.
const SPARE_BYTES: u64 = 256 << 10;
/// The bits of a file's mode that let somebody write to it.
const WRITABLE: u32 = 0o222;
/// What the one follower of a folder holds.
pub(crate) const FOLLOW: &str = ".follow";
/// How often a fetch looks whether the folder's lock is free.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// A folder that holds fetched versions.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
    durability: Durability,
}

/// That whoever has it works alone in a folder. What is done on other threads has a clone of it: so the folder is not
/// free before that has come to its end too, whoever waits for it.
#[derive(Debug, Clone)]
pub(crate) struct Lock(Arc<File>);

impl Lock {
    /// Whether what is locked is the file at `path`, still.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let (Ok(own), Ok(found)) = (self.0.metadata(), fs::symlink_metadata(path)) else { return false };
        (own.dev(), own.ino()) == (found.dev(), found.ino())
    }
}

impl Folder {
    /// The folder at `path`, made if absent; and whether what is fetched into it is synced to disk.
    ///
    /// # Errors
    /// Where it cannot be made, or something else is in the way.
    pub fn open(path: &Path, durability: Durability) -> Result<Self> {
        let folder = Self { path: path.to_path_buf(), durability };
        for made in [path.to_path_buf(), folder.versions()] {
            fs::create_dir_all(&made).map_err(|error| match StoreError::own(made.display(), &error) {
                failed if failed.class() == Class::NotFound => {
                    StoreError::new(Class::Refused, made.display(), format!("it cannot be made: {error}"))
                }
                failed => failed,
            })?;
        }
        let current = folder.current();
        if fs::symlink_metadata(&current).is_ok_and(|metadata| !metadata.is_symlink()) {
            let why = "something that is no link is in the way; move it away, or name another folder";
            return Err(StoreError::new(Class::Refused, current.display(), why));
        }
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn durability(&self) -> Durability {
        self.durability
    }

    pub(crate) fn versions(&self) -> PathBuf {
        self.path.join("versions")
    }

    fn staging(&self) -> PathBuf {
        self.path.join(".staging")
    }

    /// Where a version lies, or will lie.
    #[must_use]
    pub fn version(&self, id: &SnapshotId) -> PathBuf {
        self.versions().join(id.to_string())
    }

    /// The link that serving hosts open.
    #[must_use]
    pub fn current(&self) -> PathBuf {
        self.path.join("current")
    }

    /// Waits until no other fetch works here.
    pub(crate) async fn lock(&self) -> Result<Lock> {
        self.lock_named(".lock", "another fetch into this folder").await
    }

    /// The lock of those who follow a channel into this folder, where nobody has it: it is not waited for.
    ///
    /// # Errors
    /// [`Class::Conflict`] where a follower is at work here; else as the folder fails.
    pub(crate) fn lock_following(&self) -> Result<Lock> {
        let (path, file) = self.lock_file(FOLLOW)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Lock(Arc::new(file))),
            Err(Errno::WOULDBLOCK) => {
                let why = "a follower works in this folder, which would undo this: it keeps what it has seen of the \
                           channel; stop it, run this again, and start it";
                Err(StoreError::new(Class::Conflict, self.path.display(), why))
            }
            Err(error) => Err(no_lock(&path, error)),
        }
    }

    /// Waits until nobody else has the lock `name` of this folder, which `who` may have now.
    pub(crate) async fn lock_named(&self, name: &str, who: &str) -> Result<Lock> {
        let (path, file) = self.lock_file(name)?;
        let mut waiting = false;
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if !matches!(error, Errno::WOULDBLOCK | Errno::INTR) {
                return Err(no_lock(&path, error));
            }
            if !waiting {
                tracing::info!(folder = %self.path.display(), "waiting for {who}");
                waiting = true;
            }
            tokio::time::sleep(LOCK_INTERVAL).await;
        }
        Ok(Lock(Arc::new(file)))
    }

    /// The file that is locked, made if absent.
    fn lock_file(&self, name: &str) -> Result<(PathBuf, File)> {
        let path = self.path.join(name);
        let mut options = File::options();
        options.create(true).truncate(false).write(true);
        let file = open_regular(&path, &mut options).map_err(|error| {
            match StoreError::own(path.display(), &error) {
                // Nothing is there, or a link, or a socket.
                odd if odd.class() == Class::NotFound || error.raw_os_error().is_some_and(is_odd) => {
                    let why = format!("{error}; something that is no file is in the way there");
                    StoreError::new(Class::Refused, path.display(), why)
                }
                failed => failed,
            }
        })?;
        Ok((path, file))
    }

    /// The folder in which `id` is put together. Left-overs of other snapshots' fetches are removed: the lock is ours.
    pub(super) fn stage(&self, id: &SnapshotId) -> Result<PathBuf> {
        let all = self.staging();
        let own = all.join(id.to_string());
        let stage = || {
            make_folder(&all)?;
            make_folder(&own)?;
            // Somebody may have made room by removing all of them.
            fs::create_dir_all(self.versions())?;
            for entry in fs::read_dir(&all)? {
                let other = entry?.path();
                if other != own {
                    remove(&other)?;
                }
            }
            Ok((fs::metadata(&all)?, fs::metadata(self.versions())?))
        };
        let (staging, versions): (Metadata, Metadata) =
            stage().map_err(|error: io::Error| StoreError::own(all.display(), &error))?;
        if staging.dev() == versions.dev() {
            return Ok(own);
        }
        let why = "it lies on another volume than its parent, so that versions cannot be moved into it whole";
        Err(StoreError::new(Class::Refused, self.versions().display(), why))
    }

    /// Refuses a fetch for which the disk has no room, before its first byte.
    pub(super) fn check_room(&self, needed: u64) -> Result<()> {
        let Ok(volume) = statvfs(&self.path) else { return Ok(()) };
        let free = volume.f_bavail.saturating_mul(volume.f_frsize);
        let needed_in_all = needed.saturating_add(SPARE_BYTES);
        if needed == 0 || free >= needed_in_all {
            return Ok(());
        }
        let why =
            format!("{needed_in_all} bytes are needed and {free} are free; free some space and run it again");
        Err(StoreError::new(Class::DiskFull, self.path.display(), why))
    }

    /// Turns a complete staging folder into a version: exactly the manifest's files and their folders, synced to disk.
    pub(super) fn materialise(
        &self,
        staging: &Path,
        id: &SnapshotId,
        (manifest, written): (&SnapshotManifest, &[u8]),
    ) -> Result<()> {
        let version = self.version(id);
        let materialise = || {
            let described = staging.join(MANIFEST_FILE);
            remove(&described)?;
            File::create_new(&described)?.write_all(written)?;
            let mut kept = Kept::default();
            keep_only(staging, &Wanted::of(manifest), "", &mut kept)?;
            // Files of a fetch that was killed may not have reached the disk: all are synced.
            let synced = self.sync(&kept.files).and_then(|()| self.sync(&kept.folders));
            // What the disk lost is told once, and reads as if it were there until memory runs short: a second try
            // would succeed. So nothing of it is used again.
            synced.inspect_err(|_| self.clear_staging())?;
            swap_in(staging, &version)?;
            self.sync(&[self.versions(), self.path.clone()])
        };
        materialise().map_err(|error: io::Error| StoreError::own(version.display(), &error))
    }

    /// Syncs a version that is there already: whoever fetched it may have been killed before it was synced, or may not
    /// sync. Where that fails, the version is damaged, whatever reading it says.
    pub(super) fn secure(&self, id: &SnapshotId, manifest: &SnapshotManifest) -> Result<()> {
        let version = self.version(id);
        let wanted = Wanted::of(manifest);
        let files: Vec<_> = wanted.files.iter().map(|name| version.join(name)).collect();
        let folders = wanted.folders.iter().map(|name| version.join(name));
        let folders: Vec<_> = folders.chain([version.clone(), self.versions(), self.path.clone()]).collect();
        let synced = self.sync(&files).and_then(|()| self.sync(&folders));
        synced.map_err(|error| StoreError::own(version.display(), &error))
    }

    /// Points `current` at a version, atomically. Nothing is fetched any more: what is left in the staging folder goes.
    pub(crate) fn flip(&self, id: &SnapshotId) -> Result<()> {
        self.point_at(id)?;
        self.clear_staging();
        Ok(())
    }

    /// Points `current` at a version, atomically; what is being fetched stays as it is.
    pub(crate) fn point_at(&self, id: &SnapshotId) -> Result<()> {
        let current = self.current();
        let target = Path::new("versions").join(id.to_string());
        let flip = || {
            if fs::read_link(&current).is_ok_and(|now| now == target) {
                return self.sync(std::slice::from_ref(&self.path));
            }
            let next = self.path.join(".current.next");
            remove(&next)?;
            symlink(&target, &next)?;
            fs::rename(&next, &current)?;
            self.sync(std::slice::from_ref(&self.path))
        };
        flip().map_err(|error: io::Error| StoreError::own(current.display(), &error))
    }

    /// Removes `current`: nothing is served.
    pub(crate) fn unlink_current(&self) -> Result<()> {
        let current = self.current();
        let removed = remove(&current).and_then(|()| self.sync(std::slice::from_ref(&self.path)));
        removed.map_err(|error| StoreError::own(current.display(), &error))
    }

    /// What `current` points at, where that is one of the versions.
    pub(crate) fn points_at(&self) -> Option<SnapshotId> {
        let target = fs::read_link(self.current()).ok()?;
        let id = target.file_name()?.to_str()?.parse().ok()?;
        (target.parent() == Some(Path::new("versions")) && self.version(&id).is_dir()).then_some(id)
    }

    /// Puts a small file in the place of the one of this name, in one step.
    pub(crate) fn replace(&self, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
        let (path, next) = (self.path.join(name), self.path.join(format!("{name}.next")));
        remove(&next)?;
        let mut file = File::create_new(&next)?;
        file.write_all(bytes)?;
        if durability == Durability::Synced {
            file.sync_data()?;
        }
        // A folder in its place makes way; anything else is replaced in one step.
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
            remove(&path)?;
        }
        fs::rename(&next, &path)?;
        match durability {
            Durability::Synced => disk::sync_all(std::slice::from_ref(&self.path)),
            Durability::Unsynced => Ok(()),
        }
    }

    pub(crate) fn sync(&self, paths: &[PathBuf]) -> io::Result<()> {
        match self.durability {
            Durability::Synced => disk::sync_all(paths),
            Durability::Unsynced => Ok(()),
        }
    }

    /// Removes the staging folder. What cannot be removed is in the way of nobody.
    pub(super) fn clear_staging(&self) {
        if let Err(error) = remove(&self.staging()) {
            tracing::warn!(%error, "the staging folder could not be removed");
        }
    }
}

/// The files and folders that a version consists of, by their paths in it.
struct Wanted<'m> {
    files: BTreeSet<&'m str>,
    folders: BTreeSet<&'m str>,
}

impl<'m> Wanted<'m> {
    fn of(manifest: &'m SnapshotManifest) -> Self {
        let names = || manifest.files.iter().map(|file| file.name.as_str());
        Self {
            files: names().chain([MANIFEST_FILE]).collect(),
            folders: names().flat_map(folders_of).collect(),
        }
    }
}

fn no_lock(path: &Path, error: Errno) -> StoreError {
    let why = format!("it cannot be locked ({error}); fetch into a folder of a file system that has locks");
    StoreError::new(Class::Refused, path.display(), why)
}

/// Whether opening fails so at something that is no file.
fn is_odd(errno: i32) -> bool {
    matches!(Errno::from_raw_os_error(errno), Errno::LOOP | Errno::NXIO)
}

/// What a version consists of, by its paths in the staging folder.
#[derive(Debug, Default)]
struct Kept {
    files: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

/// Removes everything from `folder` that is not wanted in it, and notes the rest. `prefix` is the folder's path in the
/// version, with a `/` behind it. Only folders that are wanted are gone into, which bounds the depth.
fn keep_only(folder: &Path, wanted: &Wanted<'_>, prefix: &str, kept: &mut Kept) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name().to_str().map(|name| format!("{prefix}{name}"));
        match name {
            Some(name) if wanted.files.contains(name.as_str()) => {
                protect(&open_regular(&path, File::options().read(true))?)?;
                kept.files.push(path);
            }
            Some(name) if wanted.folders.contains(name.as_str()) && entry.file_type()?.is_dir() => {
                keep_only(&path, wanted, &format!("{name}/"), kept)?;
            }
            _ => remove(&path)?,
        }
    }
    kept.folders.push(folder.to_path_buf());
    Ok(())
}

/// Lets nobody write to a file: other versions may share its bytes. A file system without modes is no obstacle.
fn protect(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.mode();
    if mode & WRITABLE != 0
        && let Err(error) = file.set_permissions(Permissions::from_mode(mode & !WRITABLE))
    {
        tracing::debug!(%error, "a fetched file stays writable");
    }
    Ok(())
}

/// The folders that a file of this path lies in, the outermost first.
pub(super) fn folders_of(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('/').filter_map(|(at, _)| name.get(..at))
}

/// Renames `staging` to `version`. Where a damaged version of the same snapshot is, the two change places in one step,
/// so that `current` never points at nothing.
fn swap_in(staging: &Path, version: &Path) -> io::Result<()> {
    if fs::symlink_metadata(version).is_err() {
        return fs::rename(staging, version);
    }
    match renameat_with(CWD, staging, CWD, version, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(()),
        Err(_) => {
            // The file system cannot do it in one step.
            let aside = staging.with_extension("damaged");
            remove(&aside)?;
            fs::rename(version, &aside)?;
            fs::rename(staging, version).inspect_err(|_| drop(fs::rename(&aside, version)))
        }
    }
}

/// Makes a folder; whatever else is there by that name makes way.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    remove(path)?;
    fs::create_dir(path)
}

/// Removes a file, a link or a folder; that nothing is there is right too.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_and_its_replacement_change_places() {
        let folder = tempfile::tempdir().unwrap();
        let (staging, version) = (folder.path().join("staging"), folder.path().join("version"));
        for (path, content) in [(&staging, "new"), (&version, "old")] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("file"), content).unwrap();
        }
        swap_in(&staging, &version).unwrap();
        assert_eq!(fs::read(version.join("file")).unwrap(), b"new");
        assert_eq!(fs::read(staging.join("file")).unwrap(), b"old", "it is removed with the staging folder");
        fs::remove_dir_all(&version).unwrap();
        swap_in(&staging, &version).unwrap();
        assert!(!staging.try_exists().unwrap() && version.is_dir());
    }

    #[test]
    fn a_version_holds_the_manifests_files_and_folders_alone() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("theirs"), "x").unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::create_dir_all(at("left/over")).unwrap();
        for name in ["a/b/c", "a/b/other", "a/stray", "stray", MANIFEST_FILE] {
            fs::write(at(name), name).unwrap();
        }
        symlink(outside.path(), at("linked")).unwrap();
        let wanted = Wanted {
            files: BTreeSet::from(["a/b/c", "linked/theirs", MANIFEST_FILE]),
            folders: BTreeSet::from(["a", "a/b", "linked"]),
        };
        let mut kept = Kept::default();
        keep_only(folder.path(), &wanted, "", &mut kept).unwrap();
        kept.files.sort();
        assert_eq!(kept.files, [at("a/b/c"), at(MANIFEST_FILE)]);
        assert_eq!(kept.folders, [at("a/b"), at("a"), folder.path().to_path_buf()]);
        let names = |path: &Path| {
            let entries = fs::read_dir(path).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.collect::<BTreeSet<_>>()
        };
        assert_eq!(names(folder.path()), BTreeSet::from(["a".into(), MANIFEST_FILE.into()]));
        assert_eq!(names(&at("a")), BTreeSet::from(["b".into()]));
        assert_eq!(names(&at("a/b")), BTreeSet::from(["c".into()]));
        assert!(outside.path().join("theirs").is_file(), "a link is removed, not followed");
    }
}
