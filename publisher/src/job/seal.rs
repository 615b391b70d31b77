//! The report, then the manifest. With the manifest there is a snapshot, and everything that it names is there.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{chunk, manifest};

use crate::error::Result;

/// Chunks that are looked for at once.
const CONCURRENCY: usize = 16;

/// Stores the report and the manifest, once every chunk that the manifest names has been found in the store, of the
/// right size: a store that lost one and said nothing must not get as far as a channel.
///
/// # Errors
/// As the store fails; an integrity failure for a chunk that is not there.
pub async fn seal(root: &Root, sealed: &SnapshotManifest, report: &Report) -> Result<()> {
    let chunks = sealed.files.iter().flat_map(|file| &file.chunks).map(|chunk| (chunk.id, *chunk));
    let chunks: BTreeMap<_, _> = chunks.collect();
    futures::stream::iter(chunks.into_values())
        .map(|chunk| chunk::find(root, &sealed.model, chunk))
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    manifest::put_report(root, report).await?;
    manifest::put(root, sealed).await?;
    Ok(())
}
