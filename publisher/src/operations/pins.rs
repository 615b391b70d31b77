//! Snapshots that are kept from gc, whatever the policy says.

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::channel::Operation;
use weighbridge_snapshots::retain::pins;
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};

/// Longest reason of a pin, in bytes.
pub const WHY_BYTES: usize = 1024;

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
