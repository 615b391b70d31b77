//! Folders of this machine.
//!
//! No link leads out of the folder (or out of a hub cache's `models--*` folder, where `snapshots/` links into
//! `blobs/`). Bytes come by positioned reads: a memory map would save one copy, a small part of what encoding takes,
//! but a file that is cut short under a map kills the process.

use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
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
    open: Arc<OpenFiles>,
}

/// A file as it was when first seen.
#[derive(Debug)]
pub(super) struct PinnedFile {
    path: PathBuf,
    identity: Identity,
    open: Arc<OpenFiles>,
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
        Ok((Self { reachable, path: folder, open: Arc::default() }, entry))
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
        Ok(PinnedFile { path: resolved, identity: Identity::of(&metadata), open: Arc::clone(&self.open) })
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

    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let file = self.open.get(self)?;
        file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => changed(),
            _ => unreadable(&error),
        })
    }
}

/// The least recently used file is closed first.
#[derive(Debug, Default)]
struct OpenFiles(Mutex<VecDeque<(Identity, Arc<File>)>>);

impl OpenFiles {
    fn get(&self, wanted: &PinnedFile) -> Result<Arc<File>> {
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
            io::ErrorKind::NotFound => changed(),
            _ => unreadable(&error),
        })?;
        if Identity::of(&metadata) != wanted.identity {
            return Err(changed());
        }
        let file = Arc::new(file);
        if open.len() >= OPEN_FILES {
            open.pop_front();
        }
        open.push_back((wanted.identity, Arc::clone(&file)));
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
