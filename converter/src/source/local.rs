//! Folders of this machine.
//!
//! No link leads out of the folder (or out of a hub cache's `models--*` folder, where `snapshots/` links into
//! `blobs/`). Bytes come by positioned reads: a memory map would save one copy, a small part of what encoding takes,
//! but a file that is cut short under a map kills the process.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use weighbridge_schemas::limits;

use super::tree::{self, Tree};
use super::{changed, lock, too_many_files};
use crate::error::{Class, ReadError, Result};

/// Most files kept open at once by one source.
const OPEN_FILES: usize = 128;

/// A folder with a checkpoint in it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Where links may lead: the folder itself, or the hub cache's model folder.
    reachable: PathBuf,
    open_files: Arc<OpenFiles>,
}

/// A file as it was when first seen.
#[derive(Debug)]
pub(super) struct PinnedFile {
    path: PathBuf,
    identity: Identity,
    open_files: Arc<OpenFiles>,
    slot: Arc<Slot>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Folder {
    /// The folder at `path`; or the one that the file at `path` lies in, and the file's name.
    pub(super) fn open(path: &Path) -> Result<(Self, Option<String>)> {
        let shown = path.display().to_string();
        let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                ReadError::new(Class::NotFound, "there is no such file or folder").in_file(shown.clone())
            }
            _ => unreadable(&error).in_file(shown.clone()),
        })?;
        let (folder, entry) = if metadata.is_dir() {
            (path.to_path_buf(), None)
        } else {
            let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
                ReadError::new(Class::UnsafeName, "the file's name is not UTF-8").in_file(shown.clone())
            })?;
            let parent = match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            (parent.to_path_buf(), Some(name.to_owned()))
        };
        let folder = folder.canonicalize().map_err(|error| unreadable(&error).in_file(shown))?;
        let reachable = hub_model_folder(&folder).unwrap_or_else(|| folder.clone());
        Ok((Self { reachable, path: folder, open_files: Arc::default() }, entry))
    }

    pub(super) fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(|error| unreadable(&error))? {
            let entry = entry.map_err(|error| unreadable(&error))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if let Ok(name) = entry.file_name().into_string() {
                names.push(name);
            }
            if names.len() > limits::FILES {
                return Err(too_many_files());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    pub(super) fn tree(&self, wanted: &mut dyn FnMut(&str) -> bool) -> Result<Tree> {
        tree::list(&self.path, wanted)
    }

    /// The path of `folder` relative to this one, where it lies below it.
    pub(super) fn relative(&self, folder: &Path) -> Option<String> {
        let folder = folder.canonicalize().ok()?;
        let relative = folder.strip_prefix(&self.path).ok()?.to_str()?;
        (!relative.is_empty()).then(|| relative.to_owned())
    }

    /// The file at `name`, a relative path. One that a person named may be a link to anywhere.
    pub(super) fn file(&self, name: &str, named: bool) -> Result<PinnedFile> {
        let path = self.path.join(name);
        let resolved = path.canonicalize().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => not_there(&path),
            _ => unreadable(&error),
        })?;
        if !named && !resolved.starts_with(&self.reachable) {
            return Err(ReadError::new(
                Class::IndexPathEscape,
                "it is a link that leads out of the checkpoint's folder",
            ));
        }
        let metadata = std::fs::metadata(&resolved).map_err(|error| unreadable(&error))?;
        if !metadata.is_file() {
            return Err(ReadError::new(Class::Unreadable, "it is not a regular file"));
        }
        Ok(PinnedFile {
            path: resolved,
            identity: Identity::of(&metadata),
            open_files: Arc::clone(&self.open_files),
            slot: Arc::default(),
        })
    }

    pub(super) fn is_unchanged(&self, name: &str, file: &PinnedFile) -> bool {
        let now = std::fs::metadata(self.path.join(name)).map(|metadata| Identity::of(&metadata));
        now.ok() == Some(file.identity)
    }
}

impl PinnedFile {
    pub(super) fn len(&self) -> u64 {
        self.identity.length
    }

    /// In nanoseconds since 1970.
    pub(super) fn modified_at(&self) -> i128 {
        let (seconds, nanoseconds) = self.identity.modified;
        i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
    }

    /// Whether the file is still what it was.
    pub(super) fn is_same(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|metadata| Identity::of(&metadata) == self.identity)
    }

    /// Opens it, if it is still the file that was seen.
    fn open(&self) -> Result<File> {
        // O_NONBLOCK: a pipe that took the file's place must not hang the reader.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path);
        let file = file.and_then(|file| file.metadata().map(|metadata| (file, metadata)));
        let (file, metadata) = file.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => changed(),
            _ => unreadable(&error),
        })?;
        if Identity::of(&metadata) != self.identity {
            return Err(changed());
        }
        Ok(file)
    }

    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let file = self.open_files.get(self)?;
        file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => changed(),
            _ => unreadable(&error),
        })
    }
}

/// The open files of a source, of which the least recently used is closed first.
#[derive(Debug, Default)]
struct OpenFiles {
    slots: Mutex<Vec<Arc<Slot>>>,
    /// How many reads there have been.
    reads: AtomicU64,
}

/// Where a file is kept while it is open, so that a read finds it without a search.
#[derive(Debug, Default)]
struct Slot {
    file: Mutex<Option<Arc<File>>>,
    /// The number of the last read.
    used: AtomicU64,
}

impl OpenFiles {
    fn get(&self, wanted: &PinnedFile) -> Result<Arc<File>> {
        let slot = &wanted.slot;
        slot.used.store(self.reads.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        if let Some(file) = &*lock(&slot.file) {
            return Ok(Arc::clone(file));
        }
        // One thread at a time from here on; another may have opened it meanwhile.
        let mut slots = lock(&self.slots);
        if let Some(file) = &*lock(&slot.file) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(wanted.open()?);
        if slots.len() >= OPEN_FILES {
            let oldest = slots.iter().enumerate().min_by_key(|(_, slot)| slot.used.load(Ordering::Relaxed));
            if let Some(place) = oldest.map(|(place, _)| place) {
                *lock(&slots.swap_remove(place).file) = None;
            }
        }
        *lock(&slot.file) = Some(Arc::clone(&file));
        slots.push(Arc::clone(slot));
        Ok(file)
    }
}

/// The `models--*` folder that `folder` lies in as `models--*/snapshots/REVISION`, the layout of a hub cache.
fn hub_model_folder(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.parent()?;
    let model = snapshots.parent()?;
    let is_hub =
        snapshots.file_name()? == "snapshots" && model.file_name()?.to_str()?.starts_with("models--");
    is_hub.then(|| model.to_path_buf())
}

fn not_there(path: &Path) -> ReadError {
    match std::fs::read_link(path) {
        Ok(target) => {
            ReadError::new(Class::NotFound, format!("it is a link to {}, which is absent", target.display()))
        }
        Err(_) => ReadError::new(Class::NotFound, "the file is absent"),
    }
}

fn unreadable(error: &io::Error) -> ReadError {
    ReadError::new(Class::Unreadable, format!("it cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_number_of_files_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let (opened, _) = Folder::open(folder.path()).unwrap();
        let files = (0..=u8::try_from(OPEN_FILES + 3).unwrap()).map(|number| {
            let name = number.to_string();
            std::fs::write(folder.path().join(&name), [number]).unwrap();
            (number, opened.file(&name, false).unwrap())
        });
        let files: Vec<_> = files.collect();
        let read = |file: &PinnedFile| {
            let mut byte = [0];
            file.read(&mut byte, 0).map(|()| byte[0]).map_err(|error| error.class())
        };
        let is_open = |file: &PinnedFile| lock(&file.slot.file).is_some();
        for _ in 0..2 {
            for (number, file) in &files {
                assert_eq!(read(file), Ok(*number));
                // The first one is used all the time, so others make room.
                assert_eq!(read(&files[0].1), Ok(0));
                assert!(is_open(&files[0].1));
            }
            assert_eq!(files.iter().filter(|(_, file)| is_open(file)).count(), OPEN_FILES);
        }
        // What was closed is checked when it is opened again.
        let (number, closed) = files.iter().find(|(_, file)| !is_open(file)).unwrap();
        std::fs::write(folder.path().join(number.to_string()), "another").unwrap();
        assert_eq!(read(closed), Err(Class::CheckpointChanged));
    }

    #[test]
    fn threads_share_an_open_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), vec![7; 4096]).unwrap();
        let (opened, _) = Folder::open(folder.path()).unwrap();
        let file = opened.file("f", false).unwrap();
        std::thread::scope(|scope| {
            for offset in 0..8 {
                let file = &file;
                scope.spawn(move || {
                    let mut buffer = [0; 16];
                    file.read(&mut buffer, offset).unwrap();
                    assert_eq!(buffer, [7; 16]);
                });
            }
        });
        assert_eq!(lock(&opened.open_files.slots).len(), 1);
    }
}
