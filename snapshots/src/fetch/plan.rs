//! Which chunks a fetch still needs: what a folder holds already is hashed, and used where it is right.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::{Chunk, MANIFEST_FILE, SnapshotFile, SnapshotManifest};

use super::folder::{folders_of, make_folder, open_regular, remove};
use super::{Folder, Progress};
use crate::chunk::is_chunk;
use crate::error::{Class, Result, StoreError};

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
    progress: &dyn Progress,
) -> Result<bool> {
    let version = folder.version(id);
    if !version.is_dir() {
        return Ok(false);
    }
    let manifest_is_right = described(&version.join(MANIFEST_FILE), manifest).unwrap_or(false);
    let sizes_are_right = manifest.files.iter().all(|file| has_its_place(&version, file));
    if manifest_is_right && sizes_are_right && missing_in(&version, manifest, progress).await?.is_empty() {
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
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    // Before anything is looked at: what lies behind a link in a folder's place is not ours.
    for folder in manifest.files.iter().flat_map(|file| folders_of(&file.name)) {
        let path = staging.join(folder);
        make_folder(&path).map_err(|error| StoreError::io(path.display(), &error))?;
    }
    let missing = missing_in(staging, manifest, progress).await?;
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
    progress: &dyn Progress,
) -> Result<Vec<Piece>> {
    let mut missing = Vec::new();
    for file in &manifest.files {
        let path = folder.join(&file.name);
        let mut offset = 0;
        for &chunk in &file.chunks {
            let piece = Piece { file: path.clone(), offset, chunk };
            offset += chunk.size;
            let (piece, there) = apart(piece).await?;
            if there {
                progress.advance(chunk.size);
            } else {
                missing.push(piece);
            }
        }
    }
    Ok(missing)
}

/// Reads and hashes off the I/O threads.
async fn apart(piece: Piece) -> Result<(Piece, bool)> {
    let read = tokio::task::spawn_blocking(move || {
        let there = holds(&piece).unwrap_or(false);
        (piece, there)
    });
    read.await.map_err(|error| StoreError::new(Class::Unreachable, "reading", error.to_string()))
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

fn holds(piece: &Piece) -> io::Result<bool> {
    let file = open_regular(&piece.file, File::options().read(true))?;
    if file.metadata()?.len() < piece.offset.saturating_add(piece.chunk.size) {
        return Ok(false);
    }
    // The manifest's own limit bounds this: see limits::LARGEST_CHUNK_BYTES.
    let mut bytes = vec![0; usize::try_from(piece.chunk.size).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, piece.offset)?;
    Ok(is_chunk(&bytes, piece.chunk))
}
