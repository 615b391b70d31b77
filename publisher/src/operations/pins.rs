//! Snapshots that are kept from gc, whatever the policy says.

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::retention::Pin;
use weighbridge_snapshots::channel::Operation;
use weighbridge_snapshots::retain::pins;
use weighbridge_snapshots::root::Root;

use super::Page;
use crate::error::{Failure, Result};

/// Longest reason of a pin, in bytes.
pub const WHY_BYTES: usize = 1024;

/// A page of a model's pins, by snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The pins.
    pub pins: Vec<(SnapshotId, Pin)>,
    /// Where the next page begins: behind this one. `None` where there is none.
    pub next: Option<SnapshotId>,
}

/// The snapshots of a model that are pinned now.
///
/// # Errors
/// As the store fails.
pub async fn list(root: &Root, model: &ModelName, page: Page<'_, SnapshotId>) -> Result<Listed> {
    let mut listed = Listed { pins: Vec::new(), next: None };
    let spoken_of = pins::spoken_of(root, model).await?.into_iter();
    let mut behind = spoken_of.filter(|id| page.after.is_none_or(|after| id > after)).peekable();
    let mut reads = 0;
    while let Some(id) = behind.next() {
        reads += 1;
        let pin = pins::get(root, model, &id).await?.filter(|pin| pin.pinned);
        listed.pins.extend(pin.map(|pin| (id, pin)));
        if listed.pins.len() >= page.most || reads >= page.reads {
            listed.next = behind.peek().is_some().then_some(id);
            break;
        }
    }
    Ok(listed)
}

/// Pins a snapshot, or ends that. Says whether anything changed.
///
/// # Errors
/// A usage failure for a reason that is too long; as [`pins::set`].
pub async fn set(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    pinned: bool,
    why: &str,
    operation: &Operation,
) -> Result<bool> {
    if why.len() > WHY_BYTES {
        return Err(Failure::usage(format!("--why: at most {WHY_BYTES} bytes")));
    }
    Ok(pins::set(root, model, id, pinned, why, operation).await?)
}
