//! Files opened with care; and when their bytes reach the disk: begun early, and waited for many files at a time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::fs::OFlags;

/// Whether what is written is on the disk before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// It is.
    Synced,
    /// The system writes it when it likes: a crash of the machine may lose or damage what was written last.
    Unsynced,
}

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
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

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
