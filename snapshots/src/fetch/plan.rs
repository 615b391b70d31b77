//! Which chunks a fetch still needs: what a folder holds already is hashed, and used where it is right.

use std::collections::HashSet;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotManifest};

use super::folder::{folders_of, make_folder, remove};
use super::{Folder, Limits, Progress, held};
use crate::chunk;
use crate::disk::open_regular;
use crate::error::{Result, StoreError};
use crate::root::apart;

/// A chunk's place in a file.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) file: PathBuf,
    pub(super) offset: u64,
    pub(super) chunk: Chunk,
}

/// Whether the version is there, whole, and right to the last byte.
pub(super) async fn is_complete(
    folder: &Folder,
    id: &SnapshotId,
    manifest: &SnapshotManifest,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<bool> {
    let version = folder.version(id);
    if !version.is_dir() {
        return Ok(false);
    }
    let sizes_are_right = manifest.files.iter().all(|file| has_its_place(&version, file));
    if held::described(&version, id).is_ok()
        && sizes_are_right
        && missing_in(&version, manifest, None, limits, progress).await?.is_empty()
    {
        return Ok(true);
    }
    tracing::warn!(version = %version.display(), "the fetched version is damaged; fetching it again");
    Ok(false)
}

/// Whether a regular file of the right size is there, in folders that are none of them links.
fn has_its_place(version: &Path, file: &SnapshotFile) -> bool {
    let found = |name: &str| std::fs::symlink_metadata(version.join(name));
    folders_of(&file.name).all(|folder| found(folder).is_ok_and(|folder| folder.is_dir()))
        && found(&file.name).is_ok_and(|found| found.is_file() && found.len() == file.size)
}

/// What is known to be right in a staging folder, from one attempt of a process to the next: so that an attempt that
/// fails again and again does not read again all that came before.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// The folder, held open: no other one can have its number meanwhile.
    folder: Option<File>,
    right: HashSet<(PathBuf, u64)>,
    /// The version that is to be replaced, since it is not right, held open too.
    damaged: Option<File>,
    room: Room,
}

/// What the staging folder takes of the disk.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Room {
    /// What has been written into it.
    #[default]
    Taken,
    /// That too, and there is not enough for the rest.
    Lacking,
    /// None: it was removed, and nothing has been written since but what other versions hold anyway.
    Given,
}

impl Staged {
    /// Goes on with the staging folder at `path`. What is known counts where it is the same one still, and of a file
    /// that is there whole; the others' pieces may be right.
    fn go_on(&mut self, path: &Path, manifest: &SnapshotManifest) -> io::Result<()> {
        if !is_at(self.folder.as_ref(), path)? {
            self.right.clear();
            self.folder = Some(File::open(path)?);
        }
        let there = manifest.files.iter().filter(|file| has_its_place(path, file));
        let there: HashSet<_> = there.map(|file| path.join(&file.name)).collect();
        self.right.retain(|(file, _)| there.contains(file));
        Ok(())
    }

    fn holds(&self, piece: &Piece) -> bool {
        self.right.contains(&(piece.file.clone(), piece.offset))
    }

    /// Notes that a piece is there.
    pub(super) fn note(&mut self, piece: Piece) {
        self.right.insert((piece.file, piece.offset));
    }

    /// Nothing is known any more of what is staged.
    pub(super) fn forget(&mut self) {
        (self.folder, self.right) = (None, HashSet::new());
    }

    /// Whether what is staged had better go, since others may wait for the room that it takes, as this does for theirs.
    pub(crate) fn is_in_the_way(&self) -> bool {
        self.room == Room::Lacking
    }

    /// The staging folder was removed, to make room.
    pub(crate) fn made_room(&mut self) {
        self.forget();
        self.room = Room::Given;
    }

    /// There is no room for what is missing.
    pub(super) fn lacks_room(&mut self) {
        if self.room == Room::Taken {
            self.room = Room::Lacking;
        }
    }

    /// What is missing is about to be written.
    pub(super) fn takes_room(&mut self) {
        self.room = Room::Taken;
    }

    /// Whether the version at this path was found not to be right, and is the same one still: it need not be read
    /// again to know that.
    pub(super) fn is_damaged(&self, version: &Path) -> bool {
        is_at(self.damaged.as_ref(), version).unwrap_or(false)
    }

    /// Notes that the version at this path, if there is one, is not right.
    pub(super) fn note_damaged(&mut self, version: &Path) {
        self.damaged = File::open(version).ok();
    }
}

/// Whether this folder, held open, is what lies at `path`.
fn is_at(folder: Option<&File>, path: &Path) -> io::Result<bool> {
    let Some(folder) = folder else { return Ok(false) };
    let (known, found) = (folder.metadata()?, std::fs::symlink_metadata(path)?);
    Ok((known.dev(), known.ino()) == (found.dev(), found.ino()))
}

/// The pieces that the staging folder does not hold yet. None of them lies in a file that shares its bytes with another
/// version's: such a file is whole, or removed.
pub(super) async fn missing(
    staging: &Path,
    manifest: &SnapshotManifest,
    staged: &mut Staged,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    // Before anything is looked at: what lies behind a link in a folder's place is not ours.
    for folder in manifest.files.iter().flat_map(|file| folders_of(&file.name)) {
        let path = staging.join(folder);
        make_folder(&path).map_err(|error| StoreError::own(path.display(), &error))?;
    }
    staged.go_on(staging, manifest).map_err(|error| StoreError::own(staging.display(), &error))?;
    let mut missing = missing_in(staging, manifest, Some(staged), limits, progress).await?;
    let incomplete = files_of(&missing);
    let mut removed = HashSet::new();
    for file in &manifest.files {
        let path = staging.join(&file.name);
        let gone = remove_shared(&path, file.size, !incomplete.contains(&path));
        if gone.map_err(|error| StoreError::own(path.display(), &error))? {
            missing.extend(pieces_of(staging, file));
            removed.insert(path);
        }
    }
    if !removed.is_empty() {
        let mut is_new = HashSet::new();
        missing.retain(|piece| is_new.insert((piece.file.clone(), piece.offset)));
        staged.right.retain(|(file, _)| !removed.contains(file));
    }
    Ok(missing)
}

/// The files that these pieces belong to.
pub(super) fn files_of(pieces: &[Piece]) -> HashSet<PathBuf> {
    pieces.iter().map(|piece| piece.file.clone()).collect()
}

/// Removes a file that another version holds too, unless it is what it has to be; whether it did.
fn remove_shared(path: &Path, size: u64, is_whole: bool) -> io::Result<bool> {
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    let is_wrong = found.is_file() && found.nlink() > 1 && !(is_whole && found.len() == size);
    if is_wrong {
        remove(path)?;
    }
    Ok(is_wrong)
}

/// Gives the files of the staging folder their sizes; one that lacks a piece can be written then. What is no file makes
/// way.
pub(super) fn make_files(staging: &Path, manifest: &SnapshotManifest) -> Result<()> {
    for file in &manifest.files {
        let path = staging.join(&file.name);
        let make = || {
            match std::fs::symlink_metadata(&path) {
                // It may be another version's too, and is right.
                Ok(found) if found.is_file() && found.len() == file.size && found.nlink() > 1 => {
                    return Ok(());
                }
                // Whoever was killed behind it may have made it read-only already.
                Ok(found) if found.is_file() && found.mode() & 0o200 == 0 => {
                    std::fs::set_permissions(&path, Permissions::from_mode(found.mode() | 0o200))?;
                }
                Ok(found) if found.is_file() => {}
                _ => remove(&path)?,
            }
            let mut options = File::options();
            open_regular(&path, options.create(true).truncate(false).write(true))?.set_len(file.size)
        };
        make().map_err(|error: io::Error| StoreError::own(path.display(), &error))?;
    }
    Ok(())
}

/// The pieces that `folder` does not hold; those that are known to be right are not looked at.
async fn missing_in(
    folder: &Path,
    manifest: &SnapshotManifest,
    mut staged: Option<&mut Staged>,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    let unknown: Vec<_> = pieces(folder, manifest)
        .filter(|piece| {
            let is_known = staged.as_ref().is_some_and(|staged| staged.holds(piece));
            if is_known {
                progress.advance(piece.chunk.size);
            }
            !is_known
        })
        .collect();
    let mut looks = futures::stream::iter(unknown)
        .map(|piece| {
            apart("reading", move || {
                let there = holds(&piece).unwrap_or(false);
                Ok((piece, there))
            })
        })
        .buffered(limits.chunks.max(1));
    let mut missing = Vec::new();
    while let Some((piece, there)) = looks.try_next().await? {
        if !there {
            missing.push(piece);
            continue;
        }
        progress.advance(piece.chunk.size);
        if let Some(staged) = &mut staged {
            staged.note(piece);
        }
    }
    Ok(missing)
}

/// Which of these files, each of which may hold what is said of it, do so to the last byte.
pub(super) async fn whole(files: Vec<(PathBuf, &SnapshotFile)>, limits: &Limits) -> Result<Vec<bool>> {
    let mut pieces = Vec::new();
    for (at, (path, file)) in files.iter().enumerate() {
        pieces.extend(pieces_at(path.clone(), file).map(|piece| (at, piece)));
    }
    let mut looks = futures::stream::iter(pieces)
        .map(|(at, piece)| apart("reading", move || Ok((at, holds(&piece).unwrap_or(false)))))
        .buffer_unordered(limits.chunks.max(1));
    let mut is_whole = vec![true; files.len()];
    while let Some((at, there)) = looks.try_next().await? {
        if let Some(whole) = is_whole.get_mut(at) {
            *whole &= there;
        }
    }
    Ok(is_whole)
}

/// Every chunk's place in a folder that holds the manifest's files.
pub(super) fn pieces<'m>(
    folder: &'m Path,
    manifest: &'m SnapshotManifest,
) -> impl Iterator<Item = Piece> + 'm {
    manifest.files.iter().flat_map(move |file| pieces_of(folder, file))
}

/// Every chunk's place in a file that lies in `folder`.
pub(super) fn pieces_of<'m>(folder: &Path, file: &'m SnapshotFile) -> impl Iterator<Item = Piece> + use<'m> {
    pieces_at(folder.join(&file.name), file)
}

fn pieces_at(path: PathBuf, file: &SnapshotFile) -> impl Iterator<Item = Piece> + use<'_> {
    file.chunks.iter().scan(0, move |end, &chunk| {
        let offset = *end;
        *end += chunk.size;
        Some(Piece { file: path.clone(), offset, chunk })
    })
}

fn holds(piece: &Piece) -> Result<bool> {
    let failed = |error| StoreError::own(piece.file.display(), &error);
    let file = open_regular(&piece.file, File::options().read(true)).map_err(failed)?;
    chunk::is_at(&file, piece.offset, piece.chunk)
}
