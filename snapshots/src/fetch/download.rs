//! Chunks out of the store into a staging folder: several at once, each verified before it is written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::names::ModelName;

use super::folder::open_regular;
use super::plan::Piece;
use super::{Limits, Progress};
use crate::chunk;
use crate::error::{Class, Result, StoreError};
use crate::root::Root;

/// Fetches the pieces into their files, which have their full sizes.
pub(super) async fn download(
    root: &Root,
    model: &ModelName,
    staging: &Path,
    pieces: Vec<Piece>,
    limits: Limits,
    progress: &dyn Progress,
) -> Result<()> {
    tracing::debug!(pieces = pieces.len(), staging = %staging.display(), "fetching");
    let fetches = futures::stream::iter(pieces).map(|piece| async move {
        let size = piece.chunk.size;
        let bytes = get(root, model, &piece).await?;
        apart(move || write(&piece, &bytes)).await?;
        progress.advance(size);
        Ok(())
    });
    fetches.buffer_unordered(limits.chunks.max(1)).try_collect().await
}

/// A chunk that comes out wrong is read once more: it may have been the way, not the store.
async fn get(root: &Root, model: &ModelName, piece: &Piece) -> Result<Bytes> {
    match chunk::get(root, model, piece.chunk).await {
        Err(error) if error.class() == Class::Integrity => {
            tracing::info!(%error, "reading a chunk once more");
            chunk::get(root, model, piece.chunk).await
        }
        got => got,
    }
}

fn write(piece: &Piece, bytes: &Bytes) -> Result<()> {
    let write = || open_regular(&piece.file, File::options().write(true))?.write_all_at(bytes, piece.offset);
    write().map_err(|error| StoreError::io(piece.file.display(), &error))
}

async fn apart(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| StoreError::new(Class::Unreachable, "writing", error.to_string()))?
}
