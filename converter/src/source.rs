//! Positioned reads of one checkpoint's files.
//!
//! A [`Source`] is a folder, or one file of it. It hands out [`SourceFile`]s by relative name, never follows a
//! link out of the folder (or out of a hub cache's `models--*` folder, where `snapshots/` links into `blobs/`), and
//! pins every file's identity (device, inode, length, change time) at first sight, so that a checkpoint which
//! changes while it is read is an error and never a mixture.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};
use crate::tree::{self, Tree};

/// The memory that a source assumes without [`Source::with_memory`], in bytes.
const MEMORY: u64 = 512 << 20;
/// Most files kept open at once by one source.
const OPEN_FILES: usize = 128;

/// One checkpoint's files: a folder, and the file of it that was named, if one was.
#[derive(Debug)]
pub struct Source {
    folder: PathBuf,
    /// Where links may lead: the folder itself, or the hub cache's model folder.
    reachable: PathBuf,
    entry: Option<String>,
    files: Mutex<BTreeMap<String, Arc<SourceFile>>>,
    open: Arc<OpenFiles>,
    /// How many more bytes of metadata may be read.
    metadata_left: Arc<AtomicU64>,
    /// Where items go that have to be unpacked as a whole.
    scratch: Option<PathBuf>,
}

/// A file of a checkpoint, pinned as it was when first seen.
#[derive(Debug)]
pub struct SourceFile {
    name: String,
    path: PathBuf,
    identity: Identity,
    open: Arc<OpenFiles>,
    metadata_left: Arc<AtomicU64>,
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

impl Source {
    /// Opens the checkpoint at `path`: a folder, or one file.
    ///
    /// # Errors
    /// [`Class::NotFound`] where it is absent, [`Class::Unreadable`] where it cannot be looked at.
    pub fn open(path: &Path) -> Result<Self> {
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
        Ok(Self {
            reachable: hub_model_folder(&folder).unwrap_or_else(|| folder.clone()),
            folder,
            entry,
            files: Mutex::default(),
            open: Arc::default(),
            metadata_left: Arc::new(AtomicU64::new(MEMORY / limits::METADATA_SHARE)),
            scratch: None,
        })
    }

    /// Bounds what the checkpoint's metadata may take, once it is parsed, by a memory budget in bytes.
    #[must_use]
    pub fn with_memory(mut self, memory: u64) -> Self {
        self.metadata_left = Arc::new(AtomicU64::new(memory / limits::METADATA_SHARE));
        self
    }

    /// Gives a folder for items that have to be unpacked as a whole. What is put there has no name, and is gone when
    /// the process ends.
    #[must_use]
    pub fn with_scratch(mut self, folder: &Path) -> Self {
        self.scratch = Some(folder.to_path_buf());
        self
    }

    /// The folder for items that have to be unpacked as a whole.
    #[must_use]
    pub fn scratch(&self) -> Option<&Path> {
        self.scratch.as_deref()
    }

    /// The name of the one file that was named; `None` for a folder.
    #[must_use]
    pub fn entry(&self) -> Option<&str> {
        self.entry.as_deref()
    }

    /// The names of everything directly in the folder but its sub-folders, sorted. Names that are not UTF-8 are
    /// left out.
    ///
    /// # Errors
    /// [`Class::Unreadable`], or [`Class::LimitExceeded`] for a folder of more than [`limits::FILES`].
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(|error| unreadable(&error))? {
            let entry = entry.map_err(|error| unreadable(&error))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if let Ok(name) = entry.file_name().into_string() {
                names.push(name);
            }
            if names.len() > limits::FILES {
                return Err(ReadError::new(
                    Class::LimitExceeded,
                    format!("the folder holds more than {} files", limits::FILES),
                ));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The files below the folder that `wanted` picks by their paths, sub-folders included.
    ///
    /// # Errors
    /// [`Class::Unreadable`], or [`Class::LimitExceeded`] for too many files.
    pub fn tree(&self, wanted: &mut dyn FnMut(&str) -> bool) -> Result<Tree> {
        tree::list(&self.folder, wanted)
    }

    /// Whether the file at `name` was looked up before.
    #[must_use]
    pub fn has_looked_up(&self, name: &str) -> bool {
        lock(&self.files).contains_key(name)
    }

    /// The file at `name`, relative to the folder (`/` between parts). The file that was named on opening may be
    /// a link to anywhere, since a person named it; every other one has to stay where links may lead.
    ///
    /// # Errors
    /// [`Class::IndexPathEscape`] for a name or link that leads out, [`Class::NotFound`], [`Class::Unreadable`].
    pub fn file(&self, name: &str) -> Result<Arc<SourceFile>> {
        if let Some(file) = lock(&self.files).get(name) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.look_up(name).map_err(|error| error.in_file(name))?);
        Ok(Arc::clone(lock(&self.files).entry(name.to_owned()).or_insert(file)))
    }

    fn look_up(&self, name: &str) -> Result<SourceFile> {
        check_relative(name)?;
        let path = self.folder.join(name);
        let resolved = path.canonicalize().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => not_there(&path),
            _ => unreadable(&error),
        })?;
        if self.entry.as_deref() != Some(name) && !resolved.starts_with(&self.reachable) {
            return Err(ReadError::new(
                Class::IndexPathEscape,
                "it is a link that leads out of the checkpoint's folder",
            ));
        }
        let metadata = std::fs::metadata(&resolved).map_err(|error| unreadable(&error))?;
        if !metadata.is_file() {
            return Err(ReadError::new(Class::Unreadable, "it is not a regular file"));
        }
        Ok(SourceFile {
            name: name.to_owned(),
            path: resolved,
            identity: Identity::of(&metadata),
            open: Arc::clone(&self.open),
            metadata_left: Arc::clone(&self.metadata_left),
        })
    }

    /// Checks that every file seen so far is still what it was.
    ///
    /// # Errors
    /// [`Class::CheckpointChanged`] naming the file.
    pub fn check_unchanged(&self) -> Result<()> {
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        for file in files {
            let now = std::fs::metadata(self.folder.join(&file.name)).map(|metadata| Identity::of(&metadata));
            if now.ok() != Some(file.identity) {
                return Err(file.changed());
            }
        }
        Ok(())
    }

    /// The newest modification time of the files seen so far, in nanoseconds since 1970.
    #[must_use]
    pub fn modified_at(&self) -> i128 {
        let files = lock(&self.files);
        let times = files.values().map(|file| file.identity.modified);
        times
            .max()
            .map_or(0, |(seconds, nanoseconds)| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds))
    }
}

impl SourceFile {
    /// The name relative to the checkpoint's folder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.identity.length
    }

    /// Whether the file is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// [`Class::Truncated`] where the file is too short, [`Class::CheckpointChanged`] where it is not the file that
    /// was first seen, [`Class::Unreadable`] where the device fails.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let end = u64::try_from(buffer.len()).ok().and_then(|length| offset.checked_add(length));
        if end.is_none_or(|end| end > self.len()) {
            return Err(self.truncated(offset, buffer.len()));
        }
        let file = self.open.get(self)?;
        file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => unreadable(&error).in_file(&self.name),
        })
    }

    /// The `length` bytes from `offset` on. The caller checks `length` against its limit first.
    ///
    /// # Errors
    /// As [`SourceFile::read_exact_at`].
    pub fn read_vec_at(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let in_file = offset.checked_add(length).is_some_and(|end| end <= self.len());
        let size = usize::try_from(length).ok().filter(|_| in_file);
        let size = size.ok_or_else(|| self.truncated(offset, length))?;
        let mut bytes = vec![0; size];
        self.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// The `length` bytes of metadata from `offset` on. What a checkpoint's files hold of it is bounded in all, since
    /// parsed metadata stays in memory.
    ///
    /// # Errors
    /// [`Class::LimitExceeded`] where more than the budget allows is read; else as [`SourceFile::read_exact_at`].
    pub fn read_metadata_at(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let order = Ordering::Relaxed;
        let taken = self.metadata_left.fetch_update(order, order, |left| left.checked_sub(length));
        if let Err(left) = taken {
            let detail = format!(
                "its {length} bytes of metadata may take more memory than the budget has left, which is enough for \
                 {left}; raise --memory"
            );
            return Err(ReadError::new(Class::LimitExceeded, detail).in_file(&self.name));
        }
        self.read_vec_at(offset, length)
    }

    fn truncated(&self, offset: u64, length: impl std::fmt::Display) -> ReadError {
        ReadError::new(
            Class::Truncated,
            format!("the file ends at byte {}, but {length} bytes at {offset} are declared", self.len()),
        )
        .in_file(&self.name)
    }

    fn changed(&self) -> ReadError {
        ReadError::new(
            Class::CheckpointChanged,
            "the file changed while it was read; publish again once nobody writes to it",
        )
        .in_file(&self.name)
    }
}

/// The least recently used file is closed first.
#[derive(Debug, Default)]
struct OpenFiles(Mutex<VecDeque<(Identity, Arc<File>)>>);

impl OpenFiles {
    fn get(&self, wanted: &SourceFile) -> Result<Arc<File>> {
        let mut open = lock(&self.0);
        let place = open.iter().position(|(identity, _)| *identity == wanted.identity);
        if let Some(found) = place.and_then(|place| open.remove(place)) {
            let file = Arc::clone(&found.1);
            open.push_back(found);
            return Ok(file);
        }
        // O_NONBLOCK: a pipe that took the file's place must not hang the reader.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&wanted.path)
            .and_then(|file| file.metadata().map(|metadata| (file, metadata)));
        let (file, metadata) = file.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => wanted.changed(),
            _ => unreadable(&error).in_file(&wanted.name),
        })?;
        if Identity::of(&metadata) != wanted.identity {
            return Err(wanted.changed());
        }
        let file = Arc::new(file);
        if open.len() >= OPEN_FILES {
            open.pop_front();
        }
        open.push_back((wanted.identity, Arc::clone(&file)));
        Ok(file)
    }
}

/// A relative path of plain parts, and nothing else.
fn check_relative(name: &str) -> Result<()> {
    let path = Path::new(name);
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    let odd = name.is_empty() || name.contains(['\\', '\0']) || name.split('/').any(|part| part == ".");
    if plain && !odd {
        return Ok(());
    }
    Err(ReadError::new(Class::IndexPathEscape, "the name leads out of the checkpoint's folder"))
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

/// A panic elsewhere leaves these maps whole: each is changed by one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class<T: std::fmt::Debug>(result: Result<T>) -> Class {
        result.unwrap_err().class()
    }

    #[test]
    fn names_and_links_stay_inside() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "abc").unwrap();
        std::os::unix::fs::symlink("a", folder.path().join("inside")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), folder.path().join("out")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("dangling")).unwrap();
        let source = Source::open(folder.path()).unwrap();
        assert_eq!(source.file("inside").unwrap().len(), 3);
        for name in ["../a", "/etc/passwd", "", "a/../a", "./a", "a\\b"] {
            assert_eq!(class(source.file(name)), Class::IndexPathEscape, "{name}");
        }
        assert_eq!(class(source.file("out")), Class::IndexPathEscape);
        assert_eq!(class(source.file("dangling")), Class::NotFound);
        assert_eq!(class(source.file("absent")), Class::NotFound);
    }

    #[test]
    fn a_change_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "abcdef").unwrap();
        let source = Source::open(folder.path()).unwrap();
        let file = source.file("a").unwrap();
        source.check_unchanged().unwrap();
        std::fs::write(&path, "abcdefg").unwrap();
        assert_eq!(class(source.check_unchanged()), Class::CheckpointChanged);
        assert_eq!(class(file.read_vec_at(0, 3)), Class::CheckpointChanged);
    }

    #[test]
    fn reads_stay_within_the_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "abcdef").unwrap();
        let source = Source::open(&folder.path().join("a")).unwrap();
        let file = source.file(source.entry().unwrap()).unwrap();
        assert_eq!(file.read_vec_at(2, 3).unwrap(), b"cde");
        assert_eq!(class(file.read_vec_at(2, u64::MAX)), Class::Truncated);
        assert_eq!(class(file.read_vec_at(5, 2)), Class::Truncated);
    }

    #[test]
    fn metadata_is_bounded_by_the_memory_budget() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "abcdef").unwrap();
        let memory = 10 * limits::METADATA_SHARE;
        let file = Source::open(folder.path()).unwrap().with_memory(memory).file("a").unwrap();
        assert_eq!(file.read_metadata_at(0, 6).unwrap(), b"abcdef");
        assert_eq!(class(file.read_metadata_at(0, 6)), Class::LimitExceeded);
        assert_eq!(file.read_metadata_at(0, 4).unwrap(), b"abcd");
    }

    #[test]
    fn an_absent_path_is_not_found() {
        assert_eq!(class(Source::open(Path::new("/nonexistent/checkpoint"))), Class::NotFound);
    }
}
