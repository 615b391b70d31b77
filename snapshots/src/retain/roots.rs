//! Everything that keeps a snapshot or a chunk beside the policy: channels, pins, claims, running jobs. A root that
//! cannot be read keeps everything: the collection ends with that failure.

use std::collections::BTreeSet;

use object_store::path::Path as Key;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::job::{JobId, PartResult};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::SnapshotManifest;

use super::keep::age;
use super::{Options, pins};
use crate::catalog;
use crate::channel::Channel;
use crate::error::{Class, Result, StoreError};
use crate::jobs::{self, Job};
use crate::layout;
use crate::root::Root;

/// Entries of a channel that are looked at for each snapshot of it that is kept.
const LOOKED: usize = 8;

/// What keeps snapshots and chunks of a model.
#[derive(Debug, Default)]
pub(super) struct Roots {
    /// Snapshots on channels, in their kept history, pinned, or claimed.
    pub(super) snapshots: BTreeSet<SnapshotId>,
    /// Claims that are manifests of snapshots about to be sealed.
    sealing: Vec<Key>,
    /// Jobs that have not ended.
    pub(super) running: Vec<JobId>,
}

/// Reads the roots of `model`.
pub(super) async fn read(root: &Root, model: &ModelName, options: &Options) -> Result<Roots> {
    let mut roots = Roots::default();
    // Claims come first: what is claimed no more when they are read is on a channel, or pinned, by then.
    let now = root.now();
    root.walk(&layout::claims(model), None, |listed| {
        let Some((id, is_manifest)) = layout::claimed(&listed.key) else { return Ok(()) };
        if age(listed.modified, now) < options.claims {
            roots.snapshots.insert(id);
            if is_manifest {
                roots.sealing.push(listed.key);
            }
        }
        Ok(())
    })
    .await?;
    roots.snapshots.extend(pins::list(root, model).await?);
    for name in catalog::channels(root, model).await? {
        let most = usize::try_from(options.retention.keep_history.max(1)).unwrap_or(usize::MAX);
        let channel = Channel::new(root, model, &name);
        let hint = channel.hint().await;
        let log = channel.log(most.saturating_mul(LOOKED)).await?;
        let newest = log.first().map_or(0, |entry| entry.sequence);
        if hint.is_some_and(|hint| hint > newest) {
            let why = format!(
                "its hint is ahead of its log, which ends at {newest}: the newest entries are missing, and what they \
                 point at is not known; restore them, or move the channel, until its log is as long again"
            );
            return Err(StoreError::new(Class::Integrity, layout::channel(model, &name), why));
        }
        let mut kept = BTreeSet::new();
        let mut newest = log.into_iter().map(|entry| entry.snapshot);
        // Holds and releases push nothing out.
        while kept.len() < most
            && let Some(snapshot) = newest.next()
        {
            kept.insert(snapshot);
        }
        roots.snapshots.append(&mut kept);
    }
    for id in jobs::list(root, model).await? {
        if !Job::new(root, model, &id).has_ended().await? {
            roots.running.push(id);
        }
    }
    Ok(roots)
}

impl Roots {
    /// Hands every chunk to `take` that a claim or a running job names.
    pub(super) async fn chunks(
        &self,
        root: &Root,
        model: &ModelName,
        take: &mut (dyn FnMut(&ChunkId) + Send),
    ) -> Result<()> {
        for key in &self.sealing {
            // One that is gone was deleted as too old by another collection.
            let Some(bytes) = root.get(key, limits::SNAPSHOT_MANIFEST_BYTES).await? else { continue };
            let manifest = SnapshotManifest::parse(&bytes)
                .map_err(|error| StoreError::new(Class::Integrity, key, error.to_string()))?;
            manifest.chunks().keys().for_each(&mut *take);
        }
        for id in &self.running {
            for key in root.keys(&layout::parts(model, id), None).await? {
                let Some(result) = jobs::get::<PartResult>(root, &key).await? else { continue };
                result.chunks.iter().for_each(|part| take(&part.chunk.id));
            }
        }
        Ok(())
    }
}
