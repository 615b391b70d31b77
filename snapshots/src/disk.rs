//! Files opened with care; and when their bytes reach the disk: begun early, and waited for many files at a time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;

/// Whether what is written is on the disk before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// It is.
    Synced,
    /// The system writes it when it likes: a crash of the machine may lose or damage what was written last.
    Unsynced,
}

/// What is written past the page cache lies in memory, and in the file, on multiples of this.
pub(crate) const BLOCK: usize = 4096;
/// Less than this is written through the page cache.
const LEAST_PAST_CACHE: usize = 1 << 20;

/// Files and folders that are synced at once: a disk flushes many in hardly more time than one.
const SYNCS: usize = 16;

/// Opens a file that is one: never a link, never a pipe that would be waited for.
pub(crate) fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Bids the system start writing these bytes of `file` to disk, and waits for nothing. Where it cannot, they are
/// written at the next sync.
pub(crate) fn start_writing(file: &File, offset: u64, bytes: usize) {
    let (Ok(offset), Ok(bytes)) = (offset.try_into(), bytes.try_into()) else { return };
    // SAFETY: the call is given a descriptor, which `file` keeps open, and numbers; it touches no memory of ours.
    #[expect(unsafe_code, reason = "no library in use wraps this call")]
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE);
    }
}

/// Writes the front of `bytes` to the front of `file` past the page cache, as far as that goes, and tells how many
/// bytes that is: none where they do not lie on a [`BLOCK`], are few, or the file system cannot do it. For what is to
/// be on the disk at once, copying it into the page cache would cost far more of the processor's time, and push out
/// what others have there.
///
/// # Errors
/// As writing fails.
pub(crate) fn write_past_cache(file: &File, bytes: &[u8]) -> io::Result<usize> {
    let length = bytes.len() & !(BLOCK - 1);
    let lies_well = bytes.as_ptr().addr().is_multiple_of(BLOCK);
    if length < LEAST_PAST_CACHE || !lies_well || fcntl_setfl(file, OFlags::DIRECT).is_err() {
        return Ok(0);
    }
    let mut done = 0;
    while let Some(rest) = bytes.get(done..length).filter(|rest| !rest.is_empty()) {
        match rustix::io::pwrite(file, rest, done as u64) {
            Ok(written) if written > 0 && written.is_multiple_of(BLOCK) => done += written,
            // A part of a block cannot be followed by more of this kind.
            Ok(written) => {
                done += written;
                break;
            }
            Err(Errno::INTR) => {}
            Err(Errno::INVAL | Errno::NOTSUP) => break,
            Err(error) => return Err(error.into()),
        }
    }
    fcntl_setfl(file, OFlags::empty())?;
    Ok(done)
}

/// Syncs files and folders to disk, many at once. Links among them are not followed.
pub(crate) fn sync_all(paths: &[PathBuf]) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            sync(path)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        // A machine that gives no more threads has them synced by fewer.
        let helpers = (1..SYNCS.min(paths.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect::<Vec<_>>();
        let own = work();
        helpers.into_iter().fold(own, |done, helper| {
            done.and(helper.join().unwrap_or_else(|_| Err(io::Error::other("syncing ended early"))))
        })
    })
}

fn sync(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    losing::look(path)?;
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?.sync_all()
}

/// A disk that loses what was written to it, as tests want it.
#[cfg(test)]
pub(crate) mod losing {
    use std::collections::BTreeSet;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, PoisonError};

    use rustix::io::Errno;

    static LOST: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

    /// The next sync of something in `folder` fails; and only the next, as Linux tells of a loss.
    pub(crate) fn once(folder: &Path) {
        LOST.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.to_path_buf());
    }

    pub(super) fn look(path: &Path) -> io::Result<()> {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        let is_told = path.ancestors().any(|above| lost.remove(above));
        if is_told { Err(Errno::IO.into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, symlink};

    #[test]
    fn writing_is_begun_and_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..40).map(|n| folder.path().join(n.to_string())).collect();
        for path in &paths {
            std::fs::write(path, "bytes").unwrap();
            let file = File::open(path).unwrap();
            start_writing(&file, 0, 5);
            start_writing(&file, u64::MAX, usize::MAX);
            start_writing(&file, 1 << 40, 1);
        }
        sync_all(&paths).unwrap();
        sync_all(&[folder.path().to_path_buf()]).unwrap();
        sync_all(&[]).unwrap();
        assert!(paths.iter().all(|path| std::fs::read(path).unwrap() == b"bytes"));
        let absent = [paths, vec![folder.path().join("absent")]].concat();
        assert_eq!(sync_all(&absent).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_is_written_past_the_cache_is_the_front() {
        let folder = tempfile::tempdir().unwrap();
        let length = 3 * LEAST_PAST_CACHE + 5;
        let room: Vec<u8> = (0..251).cycle().take(length + 2 * BLOCK).collect();
        let start = room.as_ptr().align_offset(BLOCK);
        for (start, length, most) in [(start, length, length - 5), (start + 1, length, 0), (start, 5000, 0)] {
            let bytes = &room[start..start + length];
            let path = folder.path().join(start.to_string() + &length.to_string());
            let file = File::create(&path).unwrap();
            let written = write_past_cache(&file, bytes).unwrap();
            // Nothing, where the folder lies in a file system that cannot do it.
            assert!(written == most || written == 0);
            file.write_all_at(&bytes[written..], written as u64).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes);
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "x").unwrap();
        symlink(&file, &link).unwrap();
        assert!(open_regular(&file, File::options().read(true)).is_ok());
        assert!(open_regular(&link, File::options().read(true)).is_err());
        assert!(open_regular(folder.path(), File::options().read(true)).is_err());
    }
}
