//! Positioned reads of one checkpoint's files, wherever they lie.
//!
//! A [`Source`] is a folder of this machine or a prefix in an object store, or one file of it. It hands out
//! [`SourceFile`]s by relative name and pins every file's identity at first sight, so that a checkpoint which changes
//! while it is read is an error and never a mixture. Readers do not learn which of the two it is. Sizes and digests
//! that are declared for its files ([`Source::declare`]) are checked against the bytes as they are read.
//!
//! | room | holds |
//! |---|---|
//! | `declared`, `digest` | what is declared, and the hashes of what is read, in any order |
//! | `local` | folders: links that stay inside, identity by device, inode, length and times |
//! | `remote` | object stores: ranged reads, resumed where they break; identity by length, tag and version |

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weighbridge_schemas::checkpoint::ManifestFile;
use weighbridge_schemas::ids::ObservationId;
use weighbridge_schemas::limits;

use crate::checkpoint::{Checkable, Item, SliceRecord};
use crate::error::{Class, ReadError, Result};
use digest::FileDigests;

mod declared;
pub(crate) mod digest;
mod local;
mod remote;
mod tree;

pub use remote::RemoteLocation;
pub use tree::Tree;

/// The memory that a source assumes without [`Source::with_memory`], in bytes.
const MEMORY: u64 = 512 << 20;

/// Where a checkpoint lies.
#[derive(Debug, Clone)]
pub enum Location {
    /// A folder or a file of this machine.
    Local(PathBuf),
    /// An object, or all objects below a prefix.
    Remote(RemoteLocation),
}

impl<P: Into<PathBuf>> From<P> for Location {
    fn from(path: P) -> Self {
        Self::Local(path.into())
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(path) => path.display().fmt(f),
            Self::Remote(location) => location.fmt(f),
        }
    }
}

/// One checkpoint's files: a folder, and the file of it that was named, if one was.
#[derive(Debug)]
pub struct Source {
    place: Place,
    entry: Option<String>,
    files: Mutex<BTreeMap<String, Arc<SourceFile>>>,
    /// How many more bytes of metadata may be read.
    metadata_left: Arc<AtomicU64>,
    /// Where items go that have to be unpacked as a whole.
    scratch: Option<PathBuf>,
    /// The files that a checkpoint manifest declares, by name.
    declared: BTreeMap<String, ManifestFile>,
    digest_budget: Arc<digest::Budget>,
}

#[derive(Debug)]
enum Place {
    Local(local::Folder),
    Remote(remote::Prefix),
}

/// A file of a checkpoint, pinned as it was when first seen.
#[derive(Debug)]
pub struct SourceFile {
    name: String,
    place: FilePlace,
    metadata_left: Arc<AtomicU64>,
    digests: FileDigests,
}

#[derive(Debug)]
enum FilePlace {
    Local(local::PinnedFile),
    Remote(remote::Object),
}

impl FilePlace {
    fn len(&self) -> u64 {
        match self {
            Self::Local(file) => file.len(),
            Self::Remote(object) => object.len(),
        }
    }
}

impl Source {
    /// Opens the checkpoint at `path`: a folder, or one file.
    ///
    /// # Errors
    /// [`Class::NotFound`] where it is absent, [`Class::Unreadable`] where it cannot be looked at.
    pub fn open(path: &Path) -> Result<Self> {
        let (folder, entry) = local::Folder::open(path)?;
        Ok(Self::at(Place::Local(folder), entry))
    }

    /// Opens the checkpoint at `location`. One in an object store is looked up there, so this may take a while; it
    /// belongs onto a thread that may wait, as do all reads.
    ///
    /// # Errors
    /// As [`Source::open`]; [`Class::Unreachable`] where a store does not answer.
    pub fn open_location(location: &Location) -> Result<Self> {
        match location {
            Location::Local(path) => Self::open(path),
            Location::Remote(location) => {
                let (prefix, entry) = remote::Prefix::open(location)?;
                Ok(Self::at(Place::Remote(prefix), entry))
            }
        }
    }

    fn at(place: Place, entry: Option<String>) -> Self {
        let metadata_left = Arc::new(AtomicU64::new(MEMORY / limits::METADATA_SHARE));
        let source = Self {
            place,
            entry,
            files: Mutex::default(),
            metadata_left,
            scratch: None,
            declared: BTreeMap::new(),
            digest_budget: Arc::default(),
        };
        source.with_memory(MEMORY)
    }

    /// Bounds what the checkpoint's metadata may take, once it is parsed, and what is held of remote files, by a memory
    /// budget in bytes.
    #[must_use]
    pub fn with_memory(mut self, memory: u64) -> Self {
        self.metadata_left = Arc::new(AtomicU64::new(memory / limits::METADATA_SHARE));
        if let Place::Remote(prefix) = &self.place {
            prefix.set_memory(memory);
        }
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

    /// How many more bytes of metadata may be read.
    pub(crate) fn metadata_left(&self) -> u64 {
        self.metadata_left.load(Ordering::Relaxed)
    }

    /// The memory that this source takes for bytes read ahead, at most; none for local files.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        match &self.place {
            Place::Local(_) => 0,
            Place::Remote(prefix) => prefix.cache_bytes(),
        }
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
        match &self.place {
            Place::Local(folder) => folder.names(),
            Place::Remote(prefix) => prefix.names(),
        }
    }

    /// The files below the folder that `wanted` picks by their paths, sub-folders included.
    ///
    /// # Errors
    /// [`Class::Unreadable`], or [`Class::LimitExceeded`] for too many files.
    pub fn tree(&self, wanted: &mut dyn FnMut(&str) -> bool) -> Result<Tree> {
        match &self.place {
            Place::Local(folder) => folder.tree(wanted),
            Place::Remote(prefix) => tree::of_names(prefix.tree()?, wanted),
        }
    }

    /// The path of `folder` relative to this one, with `/` between parts, where it lies below it; links are followed.
    #[must_use]
    pub fn relative(&self, folder: &Path) -> Option<String> {
        match &self.place {
            Place::Local(own) => own.relative(folder),
            Place::Remote(_) => None,
        }
    }

    /// What the checkpoint's files look like, by names and sizes: of one that is still being written it changes. Files
    /// that cannot be looked at count by their names.
    ///
    /// # Errors
    /// As [`Source::names`].
    pub fn observe(&self) -> Result<ObservationId> {
        let names = match &self.entry {
            Some(entry) => vec![entry.clone()],
            None => self.names()?,
        };
        let sizes = names.iter().map(|name| {
            let size = self.file(name).map_or(0, |file| file.len());
            format!("{size} {name}\n")
        });
        Ok(ObservationId::of(sizes.collect::<String>().as_bytes()))
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
    /// [`Class::IndexPathEscape`] for a name or link that leads out, [`Class::NotFound`], [`Class::Unreadable`];
    /// [`Class::FileSizeMismatch`] where another size is declared.
    pub fn file(&self, name: &str) -> Result<Arc<SourceFile>> {
        if let Some(file) = lock(&self.files).get(name) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.look_up(name).map_err(|error| error.in_file(name))?);
        Ok(Arc::clone(lock(&self.files).entry(name.to_owned()).or_insert(file)))
    }

    fn look_up(&self, name: &str) -> Result<SourceFile> {
        check_relative(name)?;
        let place = match &self.place {
            Place::Local(folder) => FilePlace::Local(folder.file(name, self.entry.as_deref() == Some(name))?),
            Place::Remote(prefix) => FilePlace::Remote(prefix.object(name)?),
        };
        let length = place.len();
        self.check_size(name, length)?;
        Ok(SourceFile {
            name: name.to_owned(),
            place,
            metadata_left: Arc::clone(&self.metadata_left),
            digests: self.digests_of(name, length),
        })
    }

    /// Checks that every file seen so far is still what it was.
    ///
    /// # Errors
    /// [`Class::CheckpointChanged`] naming the file.
    pub fn check_unchanged(&self) -> Result<()> {
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        let mut objects = Vec::new();
        for file in &files {
            match (&self.place, &file.place) {
                (Place::Local(folder), FilePlace::Local(pinned)) => {
                    if !folder.is_unchanged(&file.name, pinned) {
                        return Err(changed().in_file(&file.name));
                    }
                }
                (_, FilePlace::Remote(object)) => objects.push((file.name.as_str(), object)),
                (Place::Remote(_), FilePlace::Local(_)) => {}
            }
        }
        remote::check_unchanged(&objects)
    }

    /// The newest modification time of the files seen so far, in nanoseconds since 1970.
    #[must_use]
    pub fn modified_at(&self) -> i128 {
        let files = lock(&self.files);
        let times = files.values().map(|file| match &file.place {
            FilePlace::Local(file) => file.modified_at(),
            FilePlace::Remote(object) => object.modified_at(),
        });
        times.max().unwrap_or(0)
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
        self.place.len()
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
    /// was first seen, [`Class::Unreadable`] where the device fails, [`Class::Unreachable`] where a store does.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let end = u64::try_from(buffer.len()).ok().and_then(|length| offset.checked_add(length));
        if end.is_none_or(|end| end > self.len()) {
            return Err(self.truncated(offset, buffer.len()));
        }
        let read = match &self.place {
            FilePlace::Local(file) => file.read(buffer, offset),
            FilePlace::Remote(object) => object.read(buffer, offset),
        };
        // Every byte of a tensor comes through here: `buffer` holds what lies at `offset` once this succeeds.
        read.map_err(|error| error.in_file(&self.name))?;
        self.digests.read(offset, buffer);
        Ok(())
    }

    /// Fills `buffer` from byte `offset` on, which lies in `record`, and checks the record once all of it was read.
    ///
    /// # Errors
    /// As [`SourceFile::read_exact_at`]; [`Class::ZipCrc`] where the record is not what its checksum says.
    pub fn read_record_at(&self, record: SliceRecord, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.read_exact_at(buffer, offset)?;
        self.digests.read_of(record, offset, buffer).map_err(|error| self.unless_changed(error))
    }

    /// Reads what has not been read yet of `record` through a `buffer`, and checks it.
    ///
    /// # Errors
    /// As [`SourceFile::read_record_at`].
    pub fn check_record(&self, record: SliceRecord, buffer: &mut Vec<u8>) -> Result<()> {
        let read = |buffer: &mut [u8], offset: u64| self.read_exact_at(buffer, offset);
        self.digests.finish_record(record, buffer, read).map_err(|error| self.unless_changed(error))
    }

    /// Whether the checksum of `what` has been checked, here or by a source whose digests were adopted.
    pub(crate) fn has_checked(&self, what: Checkable) -> bool {
        self.digests.has_checked(what)
    }

    /// Notes that an item has no checksum.
    pub(crate) fn pass_item(&self, item: Item) {
        self.digests.pass_item(item);
    }

    /// What is wrong with the file's bytes; but one that is being written anew is told to be that, since it may be
    /// right later.
    fn unless_changed(&self, error: ReadError) -> ReadError {
        match &self.place {
            FilePlace::Local(file) if !file.is_same() => changed().in_file(&self.name),
            _ => error.in_file(&self.name),
        }
    }

    /// The `length` bytes from `offset` on. The caller checks `length` against its limit first.
    ///
    /// # Errors
    /// As [`SourceFile::read_exact_at`].
    pub fn read_vec_at(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.size(offset, length)?];
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
        match &self.place {
            FilePlace::Local(_) => self.read_vec_at(offset, length),
            FilePlace::Remote(object) => {
                let size = self.size(offset, length)?;
                let bytes = object.read_once(size, offset).map_err(|error| error.in_file(&self.name))?;
                self.digests.read(offset, &bytes);
                Ok(bytes)
            }
        }
    }

    /// `length` as a size in memory, if so many bytes lie behind `offset`.
    fn size(&self, offset: u64, length: u64) -> Result<usize> {
        let in_file = offset.checked_add(length).is_some_and(|end| end <= self.len());
        let size = usize::try_from(length).ok().filter(|_| in_file);
        size.ok_or_else(|| self.truncated(offset, length))
    }

    fn truncated(&self, offset: u64, length: impl std::fmt::Display) -> ReadError {
        ReadError::new(
            Class::Truncated,
            format!("the file ends at byte {}, but {length} bytes at {offset} are declared", self.len()),
        )
        .in_file(&self.name)
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

fn changed() -> ReadError {
    ReadError::new(
        Class::CheckpointChanged,
        "the file changed while it was read; publish again once nobody writes to it",
    )
}

fn too_many_files() -> ReadError {
    ReadError::new(Class::LimitExceeded, format!("the folder holds more than {} files", limits::FILES))
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
