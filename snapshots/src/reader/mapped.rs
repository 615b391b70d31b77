//! A version's files, mapped into memory.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use memmap2::{Advice, Mmap, MmapOptions};
use rustix::io::Errno;

use weighbridge_schemas::ids::ChunkId;
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile};

use crate::disk::open_regular;
use crate::error::{Class, Result, StoreError};

/// How a version is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether every chunk is hashed before the version is used. The fetch has done so already; this reads the disk
    /// once more.
    pub verify: bool,
    /// Threads that hash, at most.
    pub threads: usize,
    /// When bytes come into memory.
    pub pages: Pages,
}

impl Default for Options {
    /// Nothing is verified again, and bytes come into memory when they are first looked at.
    fn default() -> Self {
        Self { verify: false, threads: 4, pages: Pages::OnDemand }
    }
}

/// When a version's bytes come into memory. They are the system's page cache in any case: it may drop them again where
/// memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pages {
    /// When they are first looked at. What was fetched a moment ago is there still.
    #[default]
    OnDemand,
    /// The system is bidden to read all of them, and opening does not wait for it.
    Ahead,
    /// Before the version is used: the first look-ups are as fast as all others, and opening takes as long as it takes.
    Present,
}

/// Maps `files`, which lie in `folder`, each of its size.
pub(super) fn map_all(folder: &Path, files: &[SnapshotFile], pages: Pages) -> Result<Vec<Mmap>> {
    files.iter().map(|file| map(folder, file, pages)).collect()
}

fn map(folder: &Path, file: &SnapshotFile, pages: Pages) -> Result<Mmap> {
    let path = folder.join(&file.name);
    let folders = Path::new(&file.name).ancestors().skip(1).filter(|above| *above != Path::new(""));
    for above in folders {
        let found = fs::symlink_metadata(folder.join(above));
        if !found.is_ok_and(|found| found.is_dir()) {
            return Err(damaged(&path, "a folder of its path is missing, or is none"));
        }
    }
    let opened = open(&path)?;
    let found = opened.metadata().map_err(|error| StoreError::own(path.display(), &error))?.len();
    if found != file.size {
        return Err(damaged(&path, &format!("it has {found} bytes, where {} are right", file.size)));
    }
    let unmapped = |why: &str| {
        let why = format!(
            "its {found} bytes cannot be mapped: {why}; see the limits on address space (ulimit -v) and on maps \
             (vm.max_map_count)"
        );
        StoreError::new(Class::Host, path.display(), why)
    };
    let length = usize::try_from(found).map_err(|_| unmapped("this machine's addresses are too short"))?;
    map_file(&opened, length, pages).map_err(|error| unmapped(&error.to_string()))
}

/// Opens a file of a version: a regular one, never what a link leads to.
pub(super) fn open(path: &Path) -> Result<File> {
    open_regular(path, File::options().read(true)).map_err(|error| {
        let is_link = error.raw_os_error() == Some(Errno::LOOP.raw_os_error());
        match error.kind() {
            io::ErrorKind::NotFound => damaged(path, "it is missing"),
            kind if is_link || kind == io::ErrorKind::InvalidInput => damaged(path, "it is no regular file"),
            _ => StoreError::own(path.display(), &error),
        }
    })
}

/// Something in a version is not as its manifest says.
pub(super) fn damaged(path: &Path, why: &str) -> StoreError {
    StoreError::new(
        Class::Integrity,
        path.display(),
        format!("{why}: the version is damaged; fetch it again"),
    )
}

fn map_file(file: &File, length: usize, pages: Pages) -> io::Result<Mmap> {
    let mut options = MmapOptions::new();
    options.len(length);
    if pages == Pages::Present {
        options.populate();
    }
    #[expect(unsafe_code, reason = "there is no other way to map a file")]
    // SAFETY: the map is read-only, of a regular file that has this length now. Its bytes stay as they are: versions
    // are only renamed and deleted as a whole, which touches no map. What breaks that is told in the module's doc.
    let map = unsafe { options.map(file)? };
    if pages == Pages::Ahead && length > 0 {
        map.advise(Advice::WillNeed)?;
    }
    Ok(map)
}

/// Hashes every chunk of the mapped `files`, by `threads` threads at most, until `stop` says that nobody wants to know
/// any more.
pub(super) fn verify(
    folder: &Path,
    files: &[SnapshotFile],
    maps: &[Mmap],
    threads: usize,
    stop: &AtomicBool,
) -> Result<()> {
    let pieces: Vec<_> = files.iter().zip(maps).flat_map(|(file, map)| pieces(file, map)).collect();
    let next = AtomicUsize::new(0);
    let ended = AtomicBool::new(false);
    let work = || {
        while let Some((file, bytes, chunk)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if stop.load(Ordering::Relaxed) || ended.load(Ordering::Relaxed) {
                return Err(stopped(folder));
            }
            if bytes.map(ChunkId::of) != Some(chunk.id) {
                ended.store(true, Ordering::Relaxed);
                return Err(damaged(&folder.join(&file.name), &format!("chunk {} is not right", chunk.id)));
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        // A machine that gives no more threads has them hashed by fewer.
        let helpers: Vec<_> = (1..threads.min(pieces.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mut results = vec![work()];
        results
            .extend(helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|_| Err(stopped(folder)))));
        // What is wrong goes before what was given up because of it.
        results.sort_by_key(|result| match result {
            Err(error) if error.class() == Class::Integrity => 0,
            Err(_) => 1,
            Ok(()) => 2,
        });
        results.into_iter().next().unwrap_or(Ok(()))
    })
}

fn stopped(folder: &Path) -> StoreError {
    StoreError::new(Class::Refused, folder.display(), "opening it was given up")
}

/// A file's chunks and their bytes.
fn pieces<'m>(
    file: &'m SnapshotFile,
    map: &'m Mmap,
) -> impl Iterator<Item = (&'m SnapshotFile, Option<&'m [u8]>, Chunk)> {
    file.chunks.iter().scan(0, move |end, &chunk| {
        let begin: usize = *end;
        *end = begin.checked_add(usize::try_from(chunk.size).ok()?)?;
        Some((file, map.get(begin..*end), chunk))
    })
}
