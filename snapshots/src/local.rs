//! A store in a folder of this machine: how objects get there, whole and for good.
//!
//! An object is written as `NAME#1`, large ones past the page cache, its bytes are synced to disk, and then it is
//! given its name: so a name never stands for torn bytes. That the name itself is on the disk takes a sync of its
//! folder; [`Local::put`] only notes the folder, and [`Local::settle`] syncs all that were noted at once, since the
//! disk flushes many in hardly more time than one.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use object_store::path::Path as Key;
use rustix::fs::{CWD, RenameFlags, renameat_with, syncfs};
use rustix::io::Errno;

use crate::disk::{self, Durability, open_regular};
use crate::error::{Class, Result, StoreError};
use crate::root::Put;

/// Bytes that are written between two bids to start writing to disk, and compared at a time.
const STEP_BYTES: usize = 256 << 10;

/// A store's folder.
#[derive(Debug)]
pub(crate) struct Local {
    folder: PathBuf,
    /// The folder's device and number, when it was opened.
    identity: Option<(u64, u64)>,
    durability: Durability,
    /// Folders of names that may not be on the disk yet.
    unsettled: Mutex<BTreeSet<PathBuf>>,
    /// Held while folders are synced: whoever comes meanwhile waits until they are.
    settling: Mutex<()>,
}

/// The file in the store's folder that tells of objects which may not be on the disk.
const UNSYNCED: &str = ".unsynced";

impl Local {
    pub(crate) fn new(folder: PathBuf, durability: Durability) -> Self {
        let identity = identity(&folder);
        Self { folder, identity, durability, unsettled: Mutex::default(), settling: Mutex::default() }
    }

    /// Refuses to go on where another folder stands in the store's place: that of a disk which is not mounted any more
    /// would look like an empty store.
    pub(crate) fn check(&self) -> Result<()> {
        if identity(&self.folder) == self.identity {
            return Ok(());
        }
        let why = "the store's folder is gone, or another one is in its place; is its disk mounted?";
        Err(StoreError::new(Class::Unreachable, self.folder.display(), why))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where `key` lies. A key whose path has a link in it is refused: a link below the root may lead out of the store,
    /// and a store is nobody's to redirect.
    pub(crate) fn path(&self, key: &Key) -> Result<PathBuf> {
        self.check()?;
        let mut path = self.folder.clone();
        let mut there = true;
        for part in key.parts() {
            path.push(part.as_ref());
            if !there {
                continue;
            }
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_symlink() => {
                    let why = "it is a link, which a store does not follow; put what it points at in its place, \
                               or link the store's root as a whole";
                    return Err(StoreError::new(Class::Refused, path.display(), why));
                }
                Ok(_) => {}
                // What is not there, or cannot be looked at, is the operation's own to tell.
                Err(_) => there = false,
            }
        }
        Ok(path)
    }

    /// Refuses a folder that has a link in it, or that is one: what it leads to is not ours, and where it leads to
    /// nothing, what lay there would be taken for gone.
    pub(crate) fn refuse_links(&self, folder: &Key) -> Result<()> {
        let path = self.path(folder)?;
        let Ok(entries) = fs::read_dir(&path) else { return Ok(()) };
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_symlink()) {
                let why = "it is a link, which a store does not follow; put what it points at in its place, or link \
                           the store's root as a whole";
                return Err(StoreError::new(Class::Refused, entry.path().display(), why));
            }
        }
        Ok(())
    }

    /// Opens the file under `key`, or `None` where nothing is there.
    pub(crate) fn open(&self, key: &Key) -> Result<Option<File>> {
        match open_regular(&self.path(key)?, File::options().read(true)) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io(key, &error)),
        }
    }

    /// The bytes under `key`, at most `limit` of them; `None` where nothing is there. Never those of a link, nor of a
    /// pipe, which would be waited for.
    pub(crate) fn read(&self, key: &Key, limit: usize) -> Result<Option<Bytes>> {
        let other = |found: fs::Metadata| !found.is_file() && !found.is_symlink();
        if fs::symlink_metadata(self.path(key)?).is_ok_and(other) {
            let why = "something that is no file is in its place; move it away";
            return Err(StoreError::new(Class::Integrity, key, why));
        }
        let Some(file) = self.open(key)? else { return Ok(None) };
        let failed = |error| StoreError::io(key, &error);
        let size = file.metadata().map_err(failed)?.len();
        let size = usize::try_from(size).ok().filter(|&size| size <= limit).ok_or_else(|| {
            let why = format!("it has {size} bytes, where at most {limit} can be right");
            StoreError::new(Class::Integrity, key, why)
        })?;
        let mut bytes = vec![0; size];
        file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                StoreError::new(Class::Integrity, key, "it became shorter while it was read")
            }
            _ => StoreError::io(key, &error),
        })?;
        Ok(Some(Bytes::from(bytes)))
    }

    /// The bytes from `from` on under `key`, at most `most` of them, and the size of the whole.
    pub(crate) fn read_range(&self, key: &Key, from: u64, most: usize) -> Result<Option<(Bytes, u64)>> {
        let Some(file) = self.open(key)? else { return Ok(None) };
        let size = file.metadata().map_err(|error| StoreError::io(key, &error))?.len();
        let left = size.checked_sub(from).ok_or_else(|| {
            StoreError::new(Class::Refused, key, format!("it has {size} bytes, and {from} are to be skipped"))
        })?;
        let mut bytes = vec![0; usize::try_from(left).map_or(most, |left| left.min(most))];
        file.read_exact_at(&mut bytes, from).map_err(|error| StoreError::io(key, &error))?;
        Ok(Some((Bytes::from(bytes), size)))
    }

    /// Writes `bytes` under `key` if nothing is there yet. Its name is on the disk after [`Self::settle`].
    pub(crate) fn put(&self, key: &Key, bytes: &[u8]) -> Result<Put> {
        let path = self.path(key)?;
        if self.durability == Durability::Unsynced {
            self.mark_unsynced()?;
        }
        let put = match fs::symlink_metadata(&path) {
            Ok(_) => Put::Present,
            Err(_) => self.write(&path, bytes).map_err(|error| StoreError::io(key, &error))?,
        };
        // Not before: somebody else who settles meanwhile would look for folders that are yet to be made.
        self.note(&path);
        Ok(put)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<Put> {
        let (file, staged) = stage(path)?;
        let put = self.fill(file, bytes).and_then(|()| name(&staged, path));
        if !matches!(put, Ok(Put::Written)) {
            // What cannot be removed is seen by no reader.
            let _ = fs::remove_file(&staged);
        }
        put
    }

    fn fill(&self, file: File, bytes: &[u8]) -> io::Result<()> {
        let synced = self.durability == Durability::Synced;
        let mut offset = if synced { disk::write_past_cache(&file, bytes)? } else { 0 };
        // In steps without a sync too: the page cache finds room for small writes more cheaply than for large ones.
        for step in bytes.get(offset..).unwrap_or_default().chunks(STEP_BYTES) {
            file.write_all_at(step, offset as u64)?;
            if synced {
                disk::start_writing(&file, offset as u64, step.len());
            }
            offset += step.len();
        }
        if synced { file.sync_data() } else { Ok(()) }
    }

    /// Whether the object under `key` is `bytes`; `None` where nothing is there. If so it is synced to disk: whoever
    /// wrote it may not have done that.
    pub(crate) fn holds(&self, key: &Key, bytes: &[u8]) -> Result<Option<bool>> {
        let Some(file) = self.open(key)? else { return Ok(None) };
        let held = is(&file, bytes).and_then(|same| {
            if same && self.durability == Durability::Synced {
                file.sync_data()?;
            }
            Ok(Some(same))
        });
        held.map_err(|error| StoreError::io(key, &error))
    }

    /// Removes the object under `key`; that nothing is there is right too. It is gone from the disk after
    /// [`Self::settle`]: a manifest must not come back with the machine when its chunks do not.
    pub(crate) fn delete(&self, key: &Key) -> Result<()> {
        let path = self.path(key)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io(key, &error)),
            _ => {
                self.note(&path);
                Ok(())
            }
        }
    }

    /// Notes the folders that the object at `path` is found by: another process may have made them and not synced them.
    fn note(&self, path: &Path) {
        if self.durability == Durability::Unsynced {
            return;
        }
        let mut unsettled = self.unsettled.lock().unwrap_or_else(PoisonError::into_inner);
        let folders = path.ancestors().skip(1).take_while(|folder| folder.starts_with(&self.folder));
        for folder in folders {
            if !unsettled.contains(folder) {
                unsettled.insert(folder.to_path_buf());
            }
        }
    }

    /// Comes back when every name that was put before is on the disk; and everything else in the store, where a process
    /// that does not sync has been at work.
    pub(crate) fn settle(&self) -> Result<()> {
        if self.durability == Durability::Unsynced {
            return Ok(());
        }
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        let unsettled = std::mem::take(&mut *self.unsettled.lock().unwrap_or_else(PoisonError::into_inner));
        let mut folders: Vec<_> = unsettled.into_iter().collect();
        self.sync_marked().and_then(|()| sync_those_there(&mut folders)).map_err(|error| {
            self.unsettled.lock().unwrap_or_else(PoisonError::into_inner).extend(folders);
            StoreError::io(self.folder.display(), &error)
        })
    }

    /// Sees to it that an object which is there already is on the disk: whoever put it may have been killed before it
    /// was, or may not sync.
    pub(crate) fn secure(&self, key: &Key) -> Result<()> {
        if self.durability == Durability::Unsynced {
            return Ok(());
        }
        if let Some(file) = self.open(key)? {
            self.note(&self.path(key)?);
            file.sync_data().map_err(|error| StoreError::io(key, &error))?;
        }
        self.settle()
    }

    fn mark_unsynced(&self) -> Result<()> {
        let marker = self.folder.join(UNSYNCED);
        match File::create_new(&marker) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(StoreError::io(marker.display(), &error))
            }
            _ => Ok(()),
        }
    }

    /// Syncs the whole file system where objects may lie in the store that nobody synced.
    fn sync_marked(&self) -> io::Result<()> {
        let marker = self.folder.join(UNSYNCED);
        if fs::symlink_metadata(&marker).is_err() {
            return Ok(());
        }
        // The marker goes first: one that a process leaves meanwhile is for the next.
        fs::remove_file(&marker)?;
        let synced = File::open(&self.folder).and_then(|folder| Ok(syncfs(&folder)?));
        synced.inspect_err(|_| drop(File::create_new(&marker)))
    }
}

/// Syncs folders. One that was empty, and that gc has removed, has nothing that could be synced.
fn sync_those_there(folders: &mut Vec<PathBuf>) -> io::Result<()> {
    loop {
        let synced = disk::sync_all(folders);
        let before = folders.len();
        match synced {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                folders.retain(|folder| fs::symlink_metadata(folder).is_ok());
                if folders.len() == before {
                    return Err(error);
                }
            }
            synced => return synced,
        }
    }
}

/// A folder's device and number.
fn identity(folder: &Path) -> Option<(u64, u64)> {
    fs::metadata(folder).ok().map(|found| (found.dev(), found.ino()))
}

/// Makes a file beside `path` that no reader sees; and the folders that it lies in.
fn stage(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut number = 1u64;
    loop {
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!("#{number}"));
        let staged = PathBuf::from(staged);
        match (File::create_new(&staged), path.parent()) {
            (Ok(file), _) => return Ok((file, staged)),
            (Err(error), _) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            (Err(error), Some(folder)) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(folder)?;
            }
            (Err(error), _) => return Err(error),
        }
    }
}

/// Gives a written file its name, in one step, unless something has that name.
fn name(staged: &Path, path: &Path) -> io::Result<Put> {
    let named = match renameat_with(CWD, staged, CWD, path, RenameFlags::NOREPLACE) {
        // The file system cannot do it; a second name, and the first one away, comes to the same.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            fs::hard_link(staged, path).and_then(|()| fs::remove_file(staged))
        }
        renamed => renamed.map_err(io::Error::from),
    };
    match named {
        Ok(()) => Ok(Put::Written),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Put::Present),
        Err(error) => Err(error),
    }
}

/// Whether `file` has `bytes`, and no more.
fn is(mut file: &File, bytes: &[u8]) -> io::Result<bool> {
    if file.metadata()?.len() != bytes.len() as u64 {
        return Ok(false);
    }
    let mut buffer = vec![0; STEP_BYTES.min(bytes.len())];
    for step in bytes.chunks(STEP_BYTES) {
        let Some(there) = buffer.get_mut(..step.len()) else { return Ok(false) };
        file.read_exact(there)?;
        if there != step {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn an_object_is_put_once_and_nothing_else_is_left() {
        for durability in [Durability::Synced, Durability::Unsynced] {
            let folder = tempfile::tempdir().unwrap();
            let local = Local::new(folder.path().to_path_buf(), durability);
            let key = Key::from("a/b/c");
            let bytes = vec![7; 3 * STEP_BYTES + 1];
            assert!(local.open(&key).unwrap().is_none());
            assert_eq!(local.put(&key, &bytes).unwrap(), Put::Written);
            assert_eq!(local.put(&key, b"other").unwrap(), Put::Present);
            assert_eq!(files(&folder.path().join("a/b")), ["c"]);
            assert_eq!(local.holds(&key, &bytes).unwrap(), Some(true));
            assert_eq!(local.holds(&key, &bytes[1..]).unwrap(), Some(false));
            assert_eq!(local.holds(&key, &[&bytes[1..], b"x"].concat()).unwrap(), Some(false));
            assert_eq!(local.holds(&Key::from("a/b/d"), &bytes).unwrap(), None);
            local.settle().unwrap();
        }
    }

    #[test]
    fn what_a_killed_process_left_is_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for number in 1..4 {
            fs::write(folder.path().join(format!("a#{number}")), "torn").unwrap();
        }
        let (file, staged) = stage(&path).unwrap();
        drop(file);
        assert_eq!(staged, folder.path().join("a#4"));
        assert_eq!(name(&staged, &path).unwrap(), Put::Written);
        fs::write(&staged, "later").unwrap();
        assert_eq!(name(&staged, &path).unwrap(), Put::Present);
        assert_eq!(fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn what_nobody_synced_is_synced_before_anything_else_is_put() {
        let folder = tempfile::tempdir().unwrap();
        let [careless, careful] = [Durability::Unsynced, Durability::Synced]
            .map(|durability| Local::new(folder.path().to_path_buf(), durability));
        let key = Key::from("a/b");
        careless.put(&key, b"b").unwrap();
        careless.settle().unwrap();
        assert_eq!(files(folder.path()), [UNSYNCED, "a"]);
        careful.settle().unwrap();
        assert_eq!(files(folder.path()), ["a"]);
        assert_eq!(careless.put(&key, b"b").unwrap(), Put::Present);
        careful.secure(&key).unwrap();
        careful.secure(&Key::from("absent")).unwrap();
        assert_eq!(files(folder.path()), ["a"]);
    }

    #[test]
    fn the_folders_of_what_was_put_are_noted_until_they_are_synced() {
        let folder = tempfile::tempdir().unwrap();
        let local = Local::new(folder.path().to_path_buf(), Durability::Synced);
        local.put(&Key::from("a/b/c"), b"c").unwrap();
        local.put(&Key::from("a/d"), b"d").unwrap();
        let at = |name: &str| folder.path().join(name);
        let noted = local.unsettled.lock().unwrap().clone();
        assert_eq!(noted, BTreeSet::from([folder.path().to_path_buf(), at("a"), at("a/b")]));
        fs::rename(at("a/b"), at("moved")).unwrap();
        std::os::unix::fs::symlink(at("moved"), at("a/b")).unwrap();
        local.settle().unwrap_err();
        assert_eq!(*local.unsettled.lock().unwrap(), noted, "they are not forgotten");
        fs::remove_file(at("a/b")).unwrap();
        fs::rename(at("moved"), at("a/b")).unwrap();
        local.settle().unwrap();
        assert!(local.unsettled.lock().unwrap().is_empty());
    }
}
