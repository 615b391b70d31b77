//! Chunks into a staging folder, out of another version where one holds them, else out of the store: several at once,
//! each read, hashed and written in one pass.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::names::ModelName;

use super::folder::Lock;
use super::held::{self, Held};
use super::plan::{Piece, Staged};
use super::{Limits, Progress};
use crate::chunk;
use crate::disk::{self, Durability, open_regular};
use crate::error::{Class, Result, StoreError};
use crate::root::{Root, apart};

/// Fetches the pieces into their files, which have their full sizes; how many bytes came out of the store. If it fails,
/// a file may hold bytes that are not right: [`super::plan::missing`] finds them, and nothing is taken from a staging
/// folder unchecked. What came right is noted in `staged`.
pub(super) async fn download(
    root: &Root,
    model: &ModelName,
    staging: &Path,
    (pieces, held): (Vec<Piece>, Held),
    (writing, staged): (&Writing, &mut Staged),
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<u64> {
    tracing::debug!(pieces = pieces.len(), held = held.len(), staging = %staging.display(), "fetching");
    let held = &Arc::new(held);
    let fetches = futures::stream::iter(pieces).map(|piece| async move {
        let mut read = 0;
        if !take_over(held, &piece, writing).await? {
            let _memory = limits.memory_for(piece.chunk.size).await;
            fetch(root, model, &piece, writing, limits).await?;
            read = piece.chunk.size;
        }
        progress.advance(piece.chunk.size);
        Ok((piece, read))
    });
    let mut fetches = pin!(fetches.buffer_unordered(limits.chunks.max(1)));
    let mut sum = 0;
    while let Some((piece, read)) = fetches.try_next().await? {
        staged.note(piece);
        sum += read;
    }
    Ok(sum)
}

/// How pieces are written.
#[derive(Debug, Clone)]
pub(super) struct Writing {
    /// Whether the disk is bidden to start.
    pub(super) durability: Durability,
    /// Kept for as long as anything is written.
    #[expect(dead_code, reason = "it is let go when it is dropped")]
    pub(super) lock: Lock,
}

/// Copies a piece out of another version, and tells whether that went well.
async fn take_over(held: &Arc<Held>, piece: &Piece, writing: &Writing) -> Result<bool> {
    if !held.contains_key(&piece.chunk.id) {
        return Ok(false);
    }
    let (held, piece, writing) = (Arc::clone(held), piece.clone(), writing.clone());
    apart("copying", move || {
        let Some(place) = held.get(&piece.chunk.id) else { return Ok(false) };
        let mut write = writer(&piece, &writing)?;
        let mut failed = None;
        let copied = held::copy(place, &piece, |offset, bytes| {
            write(offset, bytes).inspect_err(|error| failed = Some(error.clone()))
        });
        match (copied, failed) {
            (Ok(right), _) => Ok(right),
            (_, Some(failed)) => Err(failed),
            // It went meanwhile, or is damaged: the store has it.
            (Err(error), None) => {
                tracing::debug!(%error, "a chunk of another version cannot be used");
                Ok(false)
            }
        }
    })
    .await
}

/// What writes a piece's bytes to their place.
fn writer(piece: &Piece, writing: &Writing) -> Result<impl FnMut(u64, &[u8]) -> Result<()> + Send + use<>> {
    let path = piece.file.clone();
    let opened = open_own(&path).map_err(|error| StoreError::own(path.display(), &error));
    let (file, at, writing) = (opened?, piece.offset, writing.clone());
    Ok(move |offset: u64, bytes: &[u8]| {
        let offset = at + offset;
        file.write_all_at(bytes, offset).map_err(|error| StoreError::own(path.display(), &error))?;
        if writing.durability == Durability::Synced {
            disk::start_writing(&file, offset, bytes.len());
        }
        Ok(())
    })
}

/// Opens a file to write into it. One that another version holds too is never written.
fn open_own(path: &Path) -> io::Result<File> {
    let file = open_regular(path, File::options().write(true))?;
    match file.metadata()?.nlink() {
        0 | 1 => Ok(file),
        _ => Err(io::Error::other("it is another version's file too")),
    }
}

/// A chunk that comes out wrong is read once more: it may have been the way, not the store.
async fn fetch(
    root: &Root,
    model: &ModelName,
    piece: &Piece,
    writing: &Writing,
    limits: &Limits,
) -> Result<()> {
    match copy(root, model, piece, writing, limits).await {
        Err(error) if error.class() == Class::Integrity => {
            tracing::info!(%error, "reading a chunk once more");
            copy(root, model, piece, writing, limits).await
        }
        copied => copied,
    }
}

async fn copy(
    root: &Root,
    model: &ModelName,
    piece: &Piece,
    writing: &Writing,
    limits: &Limits,
) -> Result<()> {
    chunk::read(root, model, piece.chunk, &limits.pace, writer(piece, writing)?).await
}
