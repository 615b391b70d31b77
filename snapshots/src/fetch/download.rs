//! Chunks out of the store into a staging folder: several at once, each read, hashed and written in one pass.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::names::ModelName;

use super::plan::Piece;
use super::{Limits, Progress};
use crate::chunk;
use crate::disk::{self, Durability, open_regular};
use crate::error::{Class, Result, StoreError};
use crate::root::Root;

/// Fetches the pieces into their files, which have their full sizes. If it fails, a file may hold bytes that are not
/// right: [`super::plan::missing`] finds them, and nothing is taken from a staging folder unchecked.
pub(super) async fn download(
    root: &Root,
    model: &ModelName,
    staging: &Path,
    pieces: Vec<Piece>,
    durability: Durability,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<()> {
    tracing::debug!(pieces = pieces.len(), staging = %staging.display(), "fetching");
    let fetches = futures::stream::iter(pieces).map(|piece| async move {
        let _memory = limits.memory_for(piece.chunk.size).await;
        fetch(root, model, &piece, durability, limits).await?;
        progress.advance(piece.chunk.size);
        Ok(())
    });
    fetches.buffer_unordered(limits.chunks.max(1)).try_collect().await
}

/// A chunk that comes out wrong is read once more: it may have been the way, not the store.
async fn fetch(
    root: &Root,
    model: &ModelName,
    piece: &Piece,
    durability: Durability,
    limits: &Limits,
) -> Result<()> {
    match copy(root, model, piece, durability, limits).await {
        Err(error) if error.class() == Class::Integrity => {
            tracing::info!(%error, "reading a chunk once more");
            copy(root, model, piece, durability, limits).await
        }
        copied => copied,
    }
}

async fn copy(
    root: &Root,
    model: &ModelName,
    piece: &Piece,
    durability: Durability,
    limits: &Limits,
) -> Result<()> {
    let path = piece.file.clone();
    let opened = open_regular(&path, File::options().write(true));
    let file = opened.map_err(|error| StoreError::io(path.display(), &error))?;
    let at = piece.offset;
    let take = move |offset: u64, bytes: &[u8]| {
        let offset = at + offset;
        file.write_all_at(bytes, offset).map_err(|error| StoreError::io(path.display(), &error))?;
        if durability == Durability::Synced {
            disk::start_writing(&file, offset, bytes.len());
        }
        Ok(())
    };
    chunk::read(root, model, piece.chunk, &limits.pace, take).await
}
