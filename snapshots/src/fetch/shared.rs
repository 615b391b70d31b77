//! Files that another version holds whole: they are taken over without a copy. Where the file system can let two files
//! have their bytes in common until one of them is written to, it does; else the file gets a second name. So what did
//! not change needs no room a second time, and is read once, to be checked.

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::ioctl_ficlone;

use weighbridge_schemas::snapshot::{SnapshotFile, SnapshotManifest};

use super::folder::{Lock, remove};
use super::held::Others;
use super::plan::{Piece, files_of, whole};
use super::{Limits, Progress};
use crate::disk::open_regular;
use crate::error::Result;
use crate::root::apart;

/// A file of another version that may be what is wanted.
struct Candidate<'m> {
    source: PathBuf,
    /// What it was before its bytes were checked.
    before: Identity,
    wanted: &'m SnapshotFile,
}

/// Tells a file from others, and from what it is once it has been written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            size: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
        }
    }
}

/// Takes over files of which pieces are missing and which another version holds, and gives the pieces that are missing
/// still.
pub(super) async fn take_over(
    (staging, lock): (&Path, &Lock),
    manifest: &SnapshotManifest,
    mut missing: Vec<Piece>,
    others: &Others,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    let incomplete = files_of(&missing);
    let wanted = manifest.files.iter().filter(|file| incomplete.contains(&staging.join(&file.name)));
    let mut sources: Vec<_> = wanted.map(|file| candidates(others, file)).collect();
    let mut taken = HashSet::new();
    loop {
        // Of each file one candidate at a time: most are right.
        sources.retain(|left: &Vec<Candidate<'_>>| {
            left.first().is_some_and(|one| !taken.contains(&staging.join(&one.wanted.name)))
        });
        let round: Vec<_> = sources.iter_mut().filter_map(Vec::pop).collect();
        if round.is_empty() {
            break;
        }
        let places = round.iter().map(|candidate| (candidate.source.clone(), candidate.wanted)).collect();
        for (candidate, is_whole) in round.iter().zip(whole(places, limits).await?) {
            if is_whole && take(candidate, staging, lock.clone()).await? {
                taken.insert(staging.join(&candidate.wanted.name));
            }
        }
    }
    let pieces = missing.extract_if(.., |piece| taken.contains(&piece.file));
    progress.advance(pieces.map(|piece| piece.chunk.size).sum());
    Ok(missing)
}

/// Files of other versions that may be `wanted`: each once, by however many names.
fn candidates<'m>(others: &Others, wanted: &'m SnapshotFile) -> Vec<Candidate<'m>> {
    let mut candidates: Vec<Candidate<'m>> = Vec::new();
    for source in others.files(wanted) {
        let Ok(found) = fs::symlink_metadata(&source) else { continue };
        let before = Identity::of(&found);
        let is_new = candidates.iter().all(|candidate| candidate.before != before);
        if found.is_file() && found.len() == wanted.size && is_new {
            candidates.push(Candidate { source, before, wanted });
        }
    }
    candidates
}

/// Takes a file over whose bytes were checked; whether that could be done.
async fn take(candidate: &Candidate<'_>, staging: &Path, lock: Lock) -> Result<bool> {
    let (source, before) = (candidate.source.clone(), candidate.before);
    let (target, aside) = (staging.join(&candidate.wanted.name), staging.with_extension("shared"));
    apart("taking a file over", move || {
        let _lock = lock;
        let shared = share(&source, before, &aside).and_then(|()| fs::rename(&aside, &target));
        // Where the two were one file already, both names are left.
        let shared = shared.and_then(|()| remove(&aside));
        // What cannot be shared is copied.
        let told = |error: &io::Error| {
            tracing::debug!(%error, file = %source.display(), "it is not taken over");
            drop(remove(&aside));
        };
        Ok(shared.inspect_err(told).is_ok())
    })
    .await
}

/// Makes `target` a file with the bytes of `source`, which has to be what it was before they were checked.
fn share(source: &Path, before: Identity, target: &Path) -> io::Result<()> {
    remove(target)?;
    let file = open_regular(source, File::options().read(true))?;
    clone(&file, target).or_else(|_| {
        remove(target)?;
        fs::hard_link(source, target)
    })?;
    // What was checked is what is there now, by this name too where it is one more name.
    let now = fs::symlink_metadata(target)?;
    if Identity::of(&file.metadata()?) == before && (now.nlink() == 1 || Identity::of(&now) == before) {
        return Ok(());
    }
    Err(io::Error::other("it was written to meanwhile"))
}

/// A file of its own that has its bytes in common with `source` until one of them is written to.
fn clone(source: &File, target: &Path) -> io::Result<()> {
    let target = File::create_new(target)?;
    Ok(ioctl_ficlone(&target, source)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_over_as_it_was_checked_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let identity = |path: &Path| Identity::of(&fs::symlink_metadata(path).unwrap());
        fs::write(at("source"), "bytes").unwrap();
        fs::write(at("target"), "left over").unwrap();
        let before = identity(&at("source"));
        share(&at("source"), before, &at("target")).unwrap();
        assert_eq!(fs::read(at("target")).unwrap(), b"bytes");

        // Whether bytes are shared until somebody writes depends on the file system.
        fs::remove_file(at("target")).unwrap();
        fs::write(at("source"), "other").unwrap();
        let later = std::time::SystemTime::UNIX_EPOCH;
        File::options().write(true).open(at("source")).unwrap().set_modified(later).unwrap();
        assert!(share(&at("source"), before, &at("target")).is_err());
        assert!(share(&at("absent"), before, &at("target")).is_err());
    }
}
