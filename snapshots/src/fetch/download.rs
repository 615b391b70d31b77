//! Chunks out of the store into a staging folder: several at once, each verified before it is written.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::names::ModelName;

use super::plan::Piece;
use super::{Limits, Progress};
use crate::chunk;
use crate::error::{Class, Result, StoreError};
use crate::root::Root;

/// Fetches the pieces and syncs the files that they are in.
pub(super) async fn download(
    root: &Root,
    model: &ModelName,
    staging: &Path,
    pieces: Vec<Piece>,
    limits: Limits,
    progress: &dyn Progress,
) -> Result<()> {
    tracing::debug!(pieces = pieces.len(), staging = %staging.display(), "fetching");
    let files: BTreeSet<PathBuf> = pieces.iter().map(|piece| piece.file.clone()).collect();
    let fetches = futures::stream::iter(pieces).map(|piece| async move {
        let size = piece.chunk.size;
        let bytes = get(root, model, &piece).await?;
        apart(move || write(&piece, &bytes)).await?;
        progress.advance(size);
        Ok(())
    });
    fetches.buffer_unordered(limits.chunks.max(1)).try_collect::<()>().await?;
    apart(move || files.iter().try_for_each(|file| sync(file))).await
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
    let write = || File::options().write(true).open(&piece.file)?.write_all_at(bytes, piece.offset);
    write().map_err(|error| StoreError::io(piece.file.display(), &error))
}

fn sync(file: &Path) -> Result<()> {
    let synced = File::open(file).and_then(|file| file.sync_all());
    synced.map_err(|error| StoreError::io(file.display(), &error))
}

async fn apart(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| StoreError::new(Class::Unreachable, "writing", error.to_string()))?
}
