//! The report, the signatures where somebody signs, then the manifest. With the manifest there is a snapshot, and
//! everything that it names is there.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt};

use weighbridge_schemas::ids::ReportDigest;
use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{chunk, manifest, sign};

use crate::error::Result;

/// Chunks that are looked for at once.
const CONCURRENCY: usize = 16;

/// Stores the report, signatures and the manifest, once every chunk that the manifest names has been found in the
/// store, of the right size: a store that lost one and said nothing must not get as far as a channel.
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
    if let Some(signers) = root.signers() {
        let digest = ReportDigest::of(&report.to_bytes());
        sign::put(root, sealed, report, digest, signers).await?;
    }
    manifest::put(root, sealed).await?;
    Ok(())
}
