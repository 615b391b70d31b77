//! Snapshot manifests and validation reports in the store.
//!
//! Order of writing: all chunks, the report, the signatures (where somebody signs), the manifest, and only then a
//! channel entry. A crash before the manifest leaves chunks and a report that nothing names; a manifest that can be
//! read names only chunks that are there.

use bytes::Bytes;

use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::ids::{ReportDigest, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::report::Report;
use weighbridge_schemas::snapshot::SnapshotManifest;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root, apart};
use crate::sign;

/// Manifests of more bytes are read off the I/O threads: that takes some hundredths of a second.
const LARGE: usize = 1 << 20;

/// Stores a manifest under its id.
///
/// # Errors
/// [`Class::Refused`] where the manifest contradicts itself, [`Class::Integrity`] where something else lies under its
/// id; else as the store fails.
pub async fn put(root: &Root, manifest: &SnapshotManifest) -> Result<(SnapshotId, Put)> {
    let bytes = manifest.to_bytes();
    let id = SnapshotId::of(&bytes);
    let key = layout::snapshot(&manifest.model, &id);
    manifest.check().map_err(|error| StoreError::new(Class::Refused, &key, error.to_string()))?;
    let put = root.put_if_absent(&key, Bytes::from(bytes)).await?;
    if put == Put::Present {
        // What stands there has to be this manifest; a damaged one must not end as published.
        read(root, &manifest.model, &id).await?;
    }
    Ok((id, put))
}

/// Reads a manifest, checks that its bytes have the hash that is its id, and, where `root` trusts somebody, that they
/// have signed the snapshot.
///
/// # Errors
/// [`Class::NotFound`], [`Class::Integrity`]; else as the store fails.
pub async fn get(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<SnapshotManifest> {
    let manifest = read(root, model, id).await?;
    if let Some(trust) = root.trust() {
        sign::check(root, id, &manifest, trust).await?;
    }
    Ok(manifest)
}

/// The bytes that a manifest is written with, whose hash is its id. One of a newer version may say more than this one
/// reads: its bytes are asked for again.
///
/// # Errors
/// As [`get`].
pub(crate) async fn written(root: &Root, id: &SnapshotId, manifest: &SnapshotManifest) -> Result<Bytes> {
    let bytes = manifest.to_bytes();
    if SnapshotId::of(&bytes) == *id { Ok(bytes.into()) } else { stored(root, &manifest.model, id).await }
}

async fn stored(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<Bytes> {
    let key = layout::snapshot(model, id);
    let Some(bytes) = root.get(&key, limits::SNAPSHOT_MANIFEST_BYTES).await? else {
        let why = format!("model {model} has no such snapshot; `weighbridge snapshots {model}` lists them");
        return Err(StoreError::new(Class::NotFound, id, why));
    };
    if SnapshotId::of(&bytes) != *id {
        let why = "the manifest's bytes do not have the hash that is the snapshot's id; move it away and publish the \
                   checkpoint again";
        return Err(StoreError::new(Class::Integrity, key, why));
    }
    Ok(bytes)
}

async fn read(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<SnapshotManifest> {
    let bytes = stored(root, model, id).await?;
    let is_large = bytes.len() > LARGE;
    let key = layout::snapshot(model, id);
    let at = key.clone();
    let parse = move || {
        let bad = |error: DocumentError| StoreError::new(Class::Integrity, &at, error.to_string());
        SnapshotManifest::parse(&bytes).map_err(bad)
    };
    let manifest = if is_large { apart("reading a manifest", parse).await? } else { parse()? };
    if manifest.model == *model {
        return Ok(manifest);
    }
    let why = format!("the manifest is of model {}, not {model}", manifest.model);
    Err(StoreError::new(Class::Integrity, key, why))
}

/// Stores a report beside its snapshot's manifest, as the one that rules: a publish under other gates judges the same
/// snapshot anew. A report that is the same as the ruling one is not stored again.
///
/// # Errors
/// As the store fails.
pub async fn put_report(root: &Root, report: &Report) -> Result<()> {
    let bytes = Bytes::from(report.to_bytes());
    loop {
        let (number, latest) = latest_report(root, &report.model, &report.snapshot).await?;
        if latest.is_some_and(|latest| latest == bytes) {
            return root.secure(&layout::report(&report.model, &report.snapshot, number)).await;
        }
        let key = layout::report(&report.model, &report.snapshot, number + 1);
        if root.put_if_absent(&key, bytes.clone()).await? == Put::Written {
            return Ok(());
        }
    }
}

/// A snapshot's ruling report, and how many there are.
///
/// # Errors
/// As [`judged`].
pub async fn report(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<(Report, u64)> {
    let judged = judged(root, model, id).await?;
    Ok((judged.report, judged.number))
}

/// A report that rules.
#[derive(Debug, Clone)]
pub struct Judged {
    /// The report.
    pub report: Report,
    /// Its number, from 1 on.
    pub number: u64,
    /// The digest of its stored bytes. Figures may lose their last bit when they are read, so it cannot be told from
    /// the report.
    pub digest: ReportDigest,
}

/// A snapshot's ruling report with its digest. Where `root` trusts somebody, they have to have signed that the snapshot
/// was judged so.
///
/// # Errors
/// [`Class::Integrity`] where there is none, since a report is written before its manifest, or where it cannot be read
/// or is not signed; else as the store fails.
pub async fn judged(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<Judged> {
    let (number, bytes) = latest_report(root, model, id).await?;
    let key = layout::report(model, id, number);
    let Some(bytes) = bytes else {
        return Err(StoreError::new(Class::Integrity, key, "the snapshot's validation report is missing"));
    };
    let report = Report::parse(&bytes)
        .ok()
        .filter(|report| report.snapshot == *id && report.model == *model)
        .ok_or_else(|| {
            StoreError::new(Class::Integrity, key, "it is not this snapshot's validation report")
        })?;
    let digest = ReportDigest::of(&bytes);
    if let Some(trust) = root.trust() {
        sign::snapshot::check_report(root, model, id, digest, trust).await?;
    }
    Ok(Judged { report, number, digest })
}

/// The number and bytes of the report that rules; 0 where there is none. There are seldom more than two.
async fn latest_report(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<(u64, Option<Bytes>)> {
    let mut latest = (0, None);
    loop {
        let next = latest.0 + 1;
        match root.get(&layout::report(model, id, next), limits::REPORT_BYTES).await? {
            Some(bytes) => latest = (next, Some(bytes)),
            None => return Ok(latest),
        }
    }
}
