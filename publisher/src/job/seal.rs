//! The report, then the manifest. With the manifest there is a snapshot, and everything that it names is there.

use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::root::Root;

use crate::error::Result;

/// Stores the report and the manifest.
///
/// # Errors
/// As the store fails.
pub async fn seal(root: &Root, sealed: &SnapshotManifest, report: &Report) -> Result<()> {
    manifest::put_report(root, report).await?;
    manifest::put(root, sealed).await?;
    Ok(())
}
