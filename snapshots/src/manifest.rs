//! Snapshot manifests and validation reports in the store.
//!
//! Order of writing: all chunks, the report, the manifest, and only then a channel entry. A crash before the manifest
//! leaves chunks and a report that nothing names; a manifest that can be read names only chunks that are there.

use bytes::Bytes;
use futures::TryStreamExt;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::SnapshotManifest;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// Stores a manifest under its id.
///
/// # Errors
/// [`Class::Refused`] where the manifest contradicts itself; else as the store fails.
pub async fn put(root: &Root, manifest: &SnapshotManifest) -> Result<(SnapshotId, Put)> {
    let bytes = manifest.to_bytes();
    let id = SnapshotId::of(&bytes);
    let key = layout::snapshot(&manifest.model, &id);
    manifest.check().map_err(|error| StoreError::new(Class::Refused, &key, error.to_string()))?;
    let put = root.put_if_absent(&key, Bytes::from(bytes)).await?;
    Ok((id, put))
}

/// Reads a manifest and checks that its bytes have the hash that is its id.
///
/// # Errors
/// [`Class::NotFound`], [`Class::Integrity`]; else as the store fails.
pub async fn get(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<SnapshotManifest> {
    let key = layout::snapshot(model, id);
    let Some(bytes) = root.get(&key, limits::SNAPSHOT_MANIFEST_BYTES).await? else {
        let why = format!("model {model} has no such snapshot; `weighbridge snapshots {model}` lists them");
        return Err(StoreError::new(Class::NotFound, id, why));
    };
    if SnapshotId::of(&bytes) != *id {
        let why = "the manifest's bytes do not have the hash that is the snapshot's id";
        return Err(StoreError::new(Class::Integrity, key, why));
    }
    let manifest = SnapshotManifest::parse(&bytes)
        .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
    if manifest.model == *model {
        return Ok(manifest);
    }
    let why = format!("the manifest is of model {}, not {model}", manifest.model);
    Err(StoreError::new(Class::Integrity, key, why))
}

/// Stores a report beside its snapshot's manifest. The first one is kept as it is; a later one that differs (other
/// gates) gets a name of its own.
///
/// # Errors
/// As the store fails.
pub async fn put_report(root: &Root, report: &Report) -> Result<()> {
    let bytes = Bytes::from(report.to_bytes());
    let first = layout::report(&report.model, &report.snapshot);
    if root.put_if_absent(&first, bytes.clone()).await? == Put::Written
        || root.get(&first, limits::REPORT_BYTES).await?.is_some_and(|kept| kept == bytes)
    {
        return Ok(());
    }
    let content = blake3::hash(&bytes).to_hex();
    let later = layout::later_report(&report.model, &report.snapshot, &content);
    root.put_if_absent(&later, bytes).await.map(drop)
}

/// A snapshot's reports, the newest first.
///
/// # Errors
/// [`Class::Integrity`] where a stored report cannot be read; else as the store fails.
pub async fn reports(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<Vec<Report>> {
    let folder = layout::snapshots(model);
    let first = layout::report(model, id);
    let listed = root.store().list_with_offset(Some(&folder), &layout::snapshot(model, id));
    let mut found: Vec<_> = listed
        .try_filter(|meta| futures::future::ready(meta.location.as_ref().starts_with(first.as_ref())))
        .try_collect()
        .await
        .map_err(|error| StoreError::store(&folder, &error))?;
    found.sort_by_key(|meta| std::cmp::Reverse(meta.last_modified));
    let mut reports = Vec::new();
    for meta in found {
        let bytes = root.get(&meta.location, limits::REPORT_BYTES).await?.unwrap_or_default();
        let report = Report::parse(&bytes)
            .map_err(|error| StoreError::new(Class::Integrity, &meta.location, error.to_string()))?;
        reports.push(report);
    }
    Ok(reports)
}
