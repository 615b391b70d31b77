//! Claims: who is about to rely on a snapshot that a run of gc may have condemned says so first.
//!
//! A claim is a root for [`VALID`] and a while. Once it stands, the lists of runs that are whole are read: what is
//! condemned there is waited for. After that no run deletes what the claim names: one that began before has ended or
//! does not mean it, and one that begins later reads the claim.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::SnapshotManifest;

use super::run;
use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Moment, Root};

/// For how long a claim is relied on. Gc heeds it for twice as long.
pub const VALID: Duration = Duration::from_secs(3600);
/// For how long gc heeds a claim.
pub const HEEDED: Duration = Duration::from_secs(2 * VALID.as_secs());
/// How long is waited for a run of gc to be done with what is claimed.
const PATIENCE: Duration = Duration::from_secs(600);
/// Pauses between two looks: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// What was claimed.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    since: Moment,
}

impl Claim {
    /// Whether it can still be relied on; else what follows has to be begun anew.
    ///
    /// # Errors
    /// [`Class::Conflict`] where it cannot.
    pub fn check(&self, root: &Root) -> Result<()> {
        if root.passed(self.since) < VALID {
            return Ok(());
        }
        let why =
            format!("this took more than {} s after it was claimed from gc; run it again", VALID.as_secs());
        Err(StoreError::new(Class::Conflict, "the snapshot", why))
    }
}

/// Claims a snapshot that is in the store. That it still is has to be seen afterwards. `operation` is an id without
/// dots that no other claim has.
///
/// # Errors
/// [`Class::Conflict`] where a run of gc does not come to an end; else as the store fails.
pub async fn claim(root: &Root, model: &ModelName, id: &SnapshotId, operation: &str) -> Result<Claim> {
    let since = root.moment();
    root.put_if_absent(&layout::claim(model, id, operation), Bytes::new()).await?;
    wait(root, model, id, &BTreeSet::new()).await?;
    Ok(Claim { since })
}

/// Claims a snapshot that is about to be sealed, and the chunks that its manifest names. That these are there has to be
/// seen afterwards, whoever wrote them and when.
///
/// # Errors
/// As [`claim`].
pub async fn claim_sealing(root: &Root, manifest: &SnapshotManifest, operation: &str) -> Result<Claim> {
    let since = root.moment();
    let (model, id) = (&manifest.model, manifest.id());
    let key = layout::claimed_manifest(model, &id, operation);
    root.put_if_absent(&key, Bytes::from(manifest.to_bytes())).await?;
    let chunks = manifest.chunks().into_keys().collect();
    wait(root, model, &id, &chunks).await?;
    Ok(Claim { since })
}

/// Waits until no list that is whole has the snapshot or one of the chunks.
async fn wait(root: &Root, model: &ModelName, id: &SnapshotId, chunks: &BTreeSet<ChunkId>) -> Result<()> {
    let (began, mut pause) = (root.moment(), PAUSES.0);
    let mut pages = run::pages_that_condemn(root, model, id, chunks).await?;
    if let Some(page) = pages.first() {
        tracing::warn!(
            %model, snapshot = %id, %page,
            "waiting for gc to be done with what it condemned; if it died, `weighbridge gc` of the model ends that"
        );
    }
    while let Some(page) = pages.last() {
        if !run::is_in_force(root, model, page).await? {
            pages.pop();
            continue;
        }
        if root.passed(began) > PATIENCE {
            let why = format!(
                "a run of gc condemned it, and is not done with it after {} s; `weighbridge gc {model}` ends one \
                 that died",
                PATIENCE.as_secs()
            );
            return Err(StoreError::new(Class::Conflict, id, why));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
    Ok(())
}
