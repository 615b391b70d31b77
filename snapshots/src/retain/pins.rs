//! Snapshots that are kept whatever the policy says: a dense log for each, of which the newest entry rules.

use std::collections::BTreeSet;

use bytes::Bytes;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::Document;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::retention::{Pin, PinSchema};

use super::claims;
use crate::catalog;
use crate::channel::Operation;
use crate::error::{Class, Result, StoreError};
use crate::jobs;
use crate::layout;
use crate::manifest;
use crate::root::{Put, Root};

/// How often a pin starts anew after losing a race.
const ATTEMPTS: usize = 100;

/// What rules of a snapshot; `None` where nothing was ever said of it.
///
/// # Errors
/// [`Class::Integrity`] where it cannot be read; else as the store fails.
pub async fn get(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<Option<Pin>> {
    Ok(latest(root, model, id).await?.1)
}

async fn latest(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<(u64, Option<Pin>)> {
    for _ in 0..ATTEMPTS {
        let keys = root.keys(&layout::pin(model, id), None).await?;
        let Some(newest) = keys.iter().filter_map(layout::number).max() else { return Ok((0, None)) };
        let pin = jobs::get(root, &layout::pin_entry(model, id, newest)).await?;
        if pin.is_some() {
            return Ok((newest, pin));
        }
        // A run of gc has deleted it meanwhile, with the snapshot.
    }
    let why = "what was said of it is listed, and is not there";
    Err(StoreError::new(Class::Integrity, layout::pin(model, id), why))
}

/// The snapshots of a model that were ever pinned, and of which that is still written, sorted.
///
/// # Errors
/// As the store fails.
pub async fn spoken_of(root: &Root, model: &ModelName) -> Result<Vec<SnapshotId>> {
    catalog::folders(root, &layout::pins(model)).await
}

/// The pinned snapshots of a model.
///
/// # Errors
/// As [`get`].
pub async fn list(root: &Root, model: &ModelName) -> Result<BTreeSet<SnapshotId>> {
    let mut pinned = BTreeSet::new();
    for id in spoken_of(root, model).await? {
        if get(root, model, &id).await?.is_some_and(|pin| pin.pinned) {
            pinned.insert(id);
        }
    }
    Ok(pinned)
}

/// Pins a snapshot, or ends that. Says whether anything changed. The snapshot is there, and stays.
///
/// # Errors
/// [`Class::NotFound`] where it is not there, or a run of gc has just deleted it; else as the store fails.
pub async fn set(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    pinned: bool,
    why: &str,
    operation: &Operation,
) -> Result<bool> {
    let mut claim = None;
    for _ in 0..ATTEMPTS {
        let (newest, ruling) = latest(root, model, id).await?;
        if ruling.as_ref().is_some_and(|pin| pin.pinned) == pinned {
            if pinned {
                manifest::get(root, model, id).await?;
            }
            return Ok(false);
        }
        if pinned && claim.is_none() {
            // The claim keeps it until the pin does.
            claim = Some(claims::claim(root, model, id, &operation.id).await?);
            manifest::get(root, model, id).await?;
        }
        let pin = Pin {
            schema: PinSchema::V1,
            pinned,
            why: why.to_owned(),
            who: operation.who.clone(),
            when: operation.when,
        };
        let key = layout::pin_entry(model, id, newest.saturating_add(1));
        claim.map_or(Ok(()), |claim: claims::Claim| claim.check(root))?;
        if root.put_if_absent(&key, Bytes::from(pin.to_bytes())).await? == Put::Written {
            return Ok(true);
        }
    }
    let why = format!("others pinned it or ended that {ATTEMPTS} times meanwhile; run it again");
    Err(StoreError::new(Class::Conflict, id, why))
}
