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
    let keys = root.keys(&layout::pin(model, id), None).await?;
    let Some(newest) = keys.iter().filter_map(layout::number).max() else { return Ok((0, None)) };
    let key = layout::pin_entry(model, id, newest);
    let gone = || StoreError::new(Class::Integrity, &key, "it was there, and is gone");
    Ok((newest, Some(jobs::get(root, &key).await?.ok_or_else(gone)?)))
}

/// The pinned snapshots of a model.
///
/// # Errors
/// As [`get`].
pub async fn list(root: &Root, model: &ModelName) -> Result<BTreeSet<SnapshotId>> {
    let mut pinned = BTreeSet::new();
    for id in catalog::folders::<SnapshotId>(root, &layout::pins(model)).await? {
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
    for _ in 0..ATTEMPTS {
        let (newest, ruling) = latest(root, model, id).await?;
        if ruling.as_ref().is_some_and(|pin| pin.pinned) == pinned {
            if pinned {
                manifest::get(root, model, id).await?;
            }
            return Ok(false);
        }
        if pinned {
            // The claim keeps it until the pin does.
            claims::claim(root, model, id, &operation.id).await?;
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
        if root.put_if_absent(&key, Bytes::from(pin.to_bytes())).await? == Put::Written {
            return Ok(true);
        }
    }
    let why = format!("others pinned it or ended that {ATTEMPTS} times meanwhile; run it again");
    Err(StoreError::new(Class::Conflict, id, why))
}
