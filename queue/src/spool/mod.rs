//! The spool: a folder on the trainer's machine where checkpoint manifests wait until they are on the queue.
//!
//! | room | holds |
//! |---|---|
//! | `names` | what its files are called |
//! | `drain` | sending what waits |
//!
//! | in the folder | is |
//! |---|---|
//! | `TIME-ID.json` | a manifest that waits: when it was dropped, in nanoseconds since 1970, and its id |
//! | `.tmp-...` | one that is being written; left over by a crash, it is removed after an hour |
//! | `.lock` | held by the one who drains |
//! | `refused/TIME-ID.json` | a manifest that no queue took, and beside it, with `.reason` behind its name, why |
//!
//! Any program may put a manifest here: written under a name that begins with `.tmp-`, synced, renamed.
//!
//! Nothing here waits but for the disk. A disk that hangs, as a network's file system may for minutes, holds up whoever
//! hands over durably: keep the spool on a disk of the machine.

mod drain;
mod names;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, openat, renameat_with, unlinkat};
use rustix::io::Errno;
use weighbridge_schemas::limits::CHECKPOINT_MANIFEST_BYTES;

use crate::clock::Clock;
use crate::error::Error;
use names::Name;

pub use drain::{Drained, Sent};

/// The folder within the spool of what was refused.
const REFUSED: &str = "refused";
/// What stands behind the name of a refused manifest in the name of its reason.
const REASON: &str = ".reason";
/// Most of a reason that is read back, in bytes.
const REASON_BYTES: u64 = 4096;

/// How much a spool may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpoolLimits {
    /// Most manifests that wait.
    pub items: u64,
    /// Most bytes of them together.
    pub bytes: u64,
}

impl Default for SpoolLimits {
    fn default() -> Self {
        Self { items: 10_000, bytes: 1 << 30 }
    }
}

/// A manifest in the spool, as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The manifest's id.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// Since it was dropped, by the wall clock.
    pub age: Duration,
    /// Why no queue took it; `None`: it waits.
    pub refused: Option<String>,
}

/// A spool.
pub struct Spool {
    folder: PathBuf,
    limits: SpoolLimits,
    clock: Arc<dyn Clock>,
    /// Between two tries to send.
    longest_pause: Duration,
    counts: Mutex<Counts>,
    memory: Mutex<Memory>,
}

/// What waits, as far as known here: counted anew when a limit seems to be reached, and when it is drained.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    items: u64,
    bytes: u64,
    /// Files that are being put or removed, and how many ever were: while some are, a listing counts for nothing.
    under_way: u64,
    changes: u64,
}

/// What a spool remembers.
#[derive(Default)]
struct Memory {
    /// The last time in a name: times in names rise, so that their order is that of dropping.
    last: u64,
    /// The file of each id that was put or seen; it may be gone by now.
    names: HashMap<String, Name>,
    /// How often an item could not be sent for other reasons than that the queue was unreachable.
    failures: HashMap<Name, u32>,
    /// Items that this user cannot read, move or remove.
    closed: HashSet<Name>,
    /// Foreign files that were named in a warning.
    foreign: HashSet<OsString>,
}

impl fmt::Debug for Spool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spool")
            .field("folder", &self.folder)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Spool {
    /// Opens the spool in `folder`, which is made, for its owner alone, where it is absent.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where it cannot be made, read or written.
    pub fn open(folder: &Path, limits: SpoolLimits, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let (counts, memory, longest_pause) = (Mutex::default(), Mutex::default(), drain::LONGEST_PAUSE);
        let spool = Self { folder, limits, clock, longest_pause, counts, memory };
        crate::embedded::make_durably(&spool.folder)
            .map_err(|error| spool.io("cannot make the folder", &error))?;
        let waiting = spool.count()?;
        let mut memory = spool.memory();
        memory.names.extend(waiting.into_iter().map(|name| (name.id.clone(), name)));
        drop(memory);
        Ok(spool)
    }

    /// Puts a manifest into the spool; it is on the disk when this returns. An id that waits here already is no second
    /// item.
    ///
    /// # Errors
    /// [`Error::Refused`] where the id could not be a file's name, or the manifest is over 1 MiB;
    /// [`Error::Unreachable`] where the spool is full or cannot be written. Then it is not handed over.
    pub fn put(&self, id: &str, manifest: &[u8]) -> Result<(), Error> {
        check(id, manifest)?;
        let mut memory = self.memory();
        if memory.names.get(id).is_some_and(|name| self.is_there(name)) {
            return Ok(());
        }
        let now = u64::try_from(self.clock.now().wall.as_nanos()).unwrap_or(u64::MAX - 1);
        memory.last = now.max(memory.last.saturating_add(1));
        let name = Name { time: memory.last, id: id.to_owned() };
        drop(memory);
        let bytes = manifest.len() as u64;
        self.reserve(bytes)?;
        let written = self.write(&name, manifest);
        self.end(if written.is_ok() { None } else { Some(bytes) });
        written.map_err(|error| self.io("cannot write", &error))?;
        self.remember(name);
        Ok(())
    }

    /// What waits and what was refused, in the order of dropping, the former first.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Item>, Error> {
        let refused = self.folder.join(REFUSED);
        let mut items = Vec::new();
        for (folder, is_refused) in [(self.folder.as_path(), false), (refused.as_path(), true)] {
            for name in self.names(folder)? {
                let path = folder.join(name.file());
                // It may have been sent since.
                let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
                let age = self.clock.now().wall.saturating_sub(Duration::from_nanos(name.time));
                let refused = is_refused.then(|| read_reason(&folder.join(name.file() + REASON)));
                items.push(Item { id: name.id, bytes: metadata.len(), age, refused });
            }
        }
        Ok(items)
    }

    /// Puts back what was refused, to be sent again; gives how many there were.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the folder cannot be read or written.
    pub fn put_back(&self) -> Result<u64, Error> {
        let refused = self.folder.join(REFUSED);
        let mut count = 0;
        for name in self.names(&refused)? {
            let (from, to) = (refused.join(name.file()), self.folder.join(name.file()));
            fs::rename(&from, &to).map_err(|error| self.io("cannot put back what was refused", &error))?;
            let _ = fs::remove_file(refused.join(name.file() + REASON));
            self.memory().failures.remove(&name);
            count += 1;
        }
        Ok(count)
    }

    /// How many manifests wait, as far as known here.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.counts().items
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_there(&self, name: &Name) -> bool {
        fs::symlink_metadata(self.folder.join(name.file())).is_ok()
    }

    fn remember(&self, name: Name) {
        let mut memory = self.memory();
        // Ids are remembered to save a listing, so forgetting some costs little: a manifest is sent twice at most.
        if memory.names.len() as u64 > self.limits.items.saturating_mul(2) {
            memory.names.retain(|_, name| self.is_there(name));
        }
        memory.names.insert(name.id.clone(), name);
    }

    /// Counts an item of so many bytes in, where there is room, and begins to put it.
    fn reserve(&self, bytes: u64) -> Result<(), Error> {
        let limits = self.limits;
        let is_full = |counts: &Counts| {
            counts.items >= limits.items || counts.bytes.saturating_add(bytes) > limits.bytes
        };
        // Others may have drained it since it was counted.
        let seems_full = is_full(&self.counts());
        if seems_full {
            self.count()?;
        }
        let mut counts = self.counts();
        if is_full(&counts) {
            return Err(self.unreachable(format!(
                "it is full ({} manifests, {} bytes; at most {} and {}): see why the queue does not take them, or \
                 drain it",
                counts.items, counts.bytes, limits.items, limits.bytes
            )));
        }
        counts.items += 1;
        counts.bytes += bytes;
        counts.under_way += 1;
        counts.changes += 1;
        Ok(())
    }

    /// Begins to change what waits.
    fn begin(&self) {
        let mut counts = self.counts();
        counts.under_way += 1;
        counts.changes += 1;
    }

    /// Ends a change; an item of so many bytes is gone.
    fn end(&self, gone: Option<u64>) {
        let mut counts = self.counts();
        counts.under_way = counts.under_way.saturating_sub(1);
        if let Some(bytes) = gone {
            counts.items = counts.items.saturating_sub(1);
            counts.bytes = counts.bytes.saturating_sub(bytes);
        }
    }

    /// Counts what waits, by reading the whole folder.
    fn count(&self) -> Result<Vec<Name>, Error> {
        let before = *self.counts();
        let names = self.names(&self.folder)?;
        let size =
            |name: &Name| fs::symlink_metadata(self.folder.join(name.file())).map_or(0, |there| there.len());
        let bytes = names.iter().map(size).sum();
        let mut counts = self.counts();
        if before.under_way == 0 && counts.changes == before.changes {
            (counts.items, counts.bytes) = (names.len() as u64, bytes);
        }
        Ok(names)
    }

    /// The manifests in `folder`, in the order of dropping; what is no manifest's name is left out.
    fn names(&self, folder: &Path) -> Result<Vec<Name>, Error> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound && folder != self.folder => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(self.io("cannot read the folder", &error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| self.io("cannot read the folder", &error))?;
            names.extend(entry.file_name().to_str().and_then(Name::parse));
        }
        names.sort();
        Ok(names)
    }

    /// Writes a manifest so that it is there whole or not at all, whatever happens.
    fn write(&self, name: &Name, manifest: &[u8]) -> io::Result<()> {
        let folder = File::open(&self.folder)?;
        let temporary = names::temporary(name);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file = File::from(openat(
            &folder,
            temporary.as_str(),
            flags,
            Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP,
        )?);
        let written = file.write_all(manifest).and_then(|()| file.sync_data());
        let named = written.and_then(|()| publish(&folder, &temporary, &name.file()));
        if named.is_err() {
            let _ = unlinkat(&folder, temporary.as_str(), AtFlags::empty());
            return named;
        }
        let synced = folder.sync_all();
        if synced.is_err() {
            // What is not handed over for certain must not be sent.
            let _ = unlinkat(&folder, name.file().as_str(), AtFlags::empty());
        }
        synced
    }

    /// The bytes of a manifest that waits; `None` where it is gone.
    fn read(&self, name: &Name) -> Result<Option<Vec<u8>>, Unreadable> {
        let mut options = File::options();
        options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        let file = match options.open(self.folder.join(name.file())) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                return Err(Unreadable::Never("it is a link".to_owned()));
            }
            Err(error) => return Err(Unreadable::Now(error)),
        };
        let metadata = file.metadata().map_err(Unreadable::Now)?;
        if !metadata.is_file() {
            return Err(Unreadable::Never("it is no file".to_owned()));
        }
        let most = CHECKPOINT_MANIFEST_BYTES as u64;
        let mut manifest = Vec::new();
        file.take(most + 1).read_to_end(&mut manifest).map_err(Unreadable::Now)?;
        if manifest.len() as u64 > most {
            return Err(Unreadable::Never(format!("it has more than {most} bytes, the most of a manifest")));
        }
        Ok(Some(manifest))
    }

    /// Takes a manifest that was sent out of the spool. It need not be synced: sent again, it is the same message.
    fn remove(&self, name: &Name, bytes: u64) -> Result<(), Error> {
        self.begin();
        let removed = fs::remove_file(self.folder.join(name.file()));
        self.end(removed.is_ok().then_some(bytes));
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(self.io("cannot remove what was sent", &error));
            }
            _ => {}
        }
        let mut memory = self.memory();
        memory.names.remove(&name.id);
        memory.failures.remove(name);
        Ok(())
    }

    /// Puts a manifest aside, with the reason.
    fn refuse(&self, name: &Name, why: &str) -> Result<(), Error> {
        let folder = self.folder.join(REFUSED);
        let aside = || {
            crate::embedded::make_durably(&folder)?;
            fs::write(folder.join(name.file() + REASON), format!("{why}\n"))?;
            let bytes = fs::symlink_metadata(self.folder.join(name.file()))?.len();
            fs::rename(self.folder.join(name.file()), folder.join(name.file())).map(|()| bytes)
        };
        self.begin();
        let moved = aside();
        self.end(moved.as_ref().ok().copied());
        moved.map_err(|error| self.io("cannot put aside what was refused", &error))?;
        tracing::error!(spool = %self.folder.display(), id = name.id, why, "a manifest was refused, and put aside");
        let mut memory = self.memory();
        memory.names.remove(&name.id);
        memory.failures.remove(name);
        Ok(())
    }

    fn unreachable(&self, why: String) -> Error {
        Error::Unreachable { what: format!("spool {}", self.folder.display()), why }
    }

    fn io(&self, what: &str, error: &io::Error) -> Error {
        let way_out = match error.kind() {
            io::ErrorKind::NotFound => "; is its disk mounted?",
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "; may this user write there?"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; make room",
            _ => "",
        };
        self.unreachable(format!("{what}: {error}{way_out}"))
    }
}

/// Why a manifest cannot be read.
enum Unreadable {
    Now(io::Error),
    Never(String),
}

/// Whether a manifest can be put into a spool.
///
/// # Errors
/// As [`Spool::put`].
pub(crate) fn check(id: &str, manifest: &[u8]) -> Result<(), Error> {
    let refused = |why| {
        let what = format!("manifest {:?}", weighbridge_schemas::error::shorten(id));
        Err(Error::Refused { what, why })
    };
    if !names::is_id(id) {
        return refused("its id is not 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot".to_owned());
    }
    if manifest.len() > CHECKPOINT_MANIFEST_BYTES {
        return refused(format!("{} bytes; at most {CHECKPOINT_MANIFEST_BYTES}", manifest.len()));
    }
    Ok(())
}

/// Gives a file its name, where nothing has it.
fn publish(folder: &File, temporary: &str, name: &str) -> io::Result<()> {
    match renameat_with(folder, temporary, folder, name, RenameFlags::NOREPLACE) {
        // Some file systems cannot refuse to replace; a time and an id are nobody else's name.
        Err(Errno::INVAL | Errno::NOSYS) => Ok(rustix::fs::renameat(folder, temporary, folder, name)?),
        result => Ok(result?),
    }
}

fn read_reason(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(REASON_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => String::from_utf8_lossy(&bytes).trim_end().to_owned(),
        Err(_) => "no reason was written down".to_owned(),
    }
}

#[cfg(test)]
mod tests;
