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
    let mut roots = Roots { snapshots: pins::list(root, model).await?, ..Roots::default() };
    for name in catalog::channels(root, model).await? {
        let most = usize::try_from(options.retention.keep_history.max(1)).unwrap_or(usize::MAX);
        let log = Channel::new(root, model, &name).log(most).await?;
        roots.snapshots.extend(log.into_iter().map(|entry| entry.snapshot));
    }
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
