//! Which chunks a fetch still needs: what a folder holds already is hashed, and used where it is right.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::{Chunk, MANIFEST_FILE, SnapshotFile, SnapshotManifest};

use super::folder::{folders_of, make_folder, remove};
use super::{Folder, Limits, Progress};
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
    let manifest_is_right = described(&version.join(MANIFEST_FILE), manifest).unwrap_or(false);
    let sizes_are_right = manifest.files.iter().all(|file| has_its_place(&version, file));
    if manifest_is_right
        && sizes_are_right
        && missing_in(&version, manifest, limits, progress).await?.is_empty()
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

/// The pieces that the staging folder does not hold yet. Its files have their full sizes afterwards.
pub(super) async fn missing(
    staging: &Path,
    manifest: &SnapshotManifest,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    // Before anything is looked at: what lies behind a link in a folder's place is not ours.
    for folder in manifest.files.iter().flat_map(|file| folders_of(&file.name)) {
        let path = staging.join(folder);
        make_folder(&path).map_err(|error| StoreError::io(path.display(), &error))?;
    }
    let missing = missing_in(staging, manifest, limits, progress).await?;
    for file in &manifest.files {
        let path = staging.join(&file.name);
        let size = || {
            if !std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                remove(&path)?;
            }
            let mut options = File::options();
            open_regular(&path, options.create(true).truncate(false).write(true))?.set_len(file.size)
        };
        size().map_err(|error: io::Error| StoreError::io(path.display(), &error))?;
    }
    Ok(missing)
}

async fn missing_in(
    folder: &Path,
    manifest: &SnapshotManifest,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    let mut looks = futures::stream::iter(pieces(folder, manifest))
        .map(|piece| {
            apart("reading", move || {
                let there = holds(&piece).unwrap_or(false);
                Ok((piece, there))
            })
        })
        .buffered(limits.chunks.max(1));
    let mut missing = Vec::new();
    while let Some((piece, there)) = looks.try_next().await? {
        if there {
            progress.advance(piece.chunk.size);
        } else {
            missing.push(piece);
        }
    }
    Ok(missing)
}

/// Every chunk's place in a folder that holds the manifest's files.
pub(super) fn pieces<'m>(
    folder: &'m Path,
    manifest: &'m SnapshotManifest,
) -> impl Iterator<Item = Piece> + 'm {
    manifest.files.iter().flat_map(move |file| {
        let path = folder.join(&file.name);
        file.chunks.iter().scan(0, move |end, &chunk| {
            let offset = *end;
            *end += chunk.size;
            Some(Piece { file: path.clone(), offset, chunk })
        })
    })
}

/// Whether the file at `path` holds the manifest, and nothing else.
fn described(path: &Path, manifest: &SnapshotManifest) -> io::Result<bool> {
    let wanted = manifest.to_bytes();
    let file = open_regular(path, File::options().read(true))?;
    if file.metadata()?.len() != wanted.len() as u64 {
        return Ok(false);
    }
    let mut found = vec![0; wanted.len()];
    file.read_exact_at(&mut found, 0)?;
    Ok(found == wanted)
}

fn holds(piece: &Piece) -> Result<bool> {
    let failed = |error| StoreError::io(piece.file.display(), &error);
    let file = open_regular(&piece.file, File::options().read(true)).map_err(failed)?;
    chunk::is_at(&file, piece.offset, piece.chunk)
}
