//! The checkpoint, opened and listed from its metadata alone; and, at the end, whether it is still the same.

use std::sync::Arc;

use weighbridge_converter::checkpoint::Checkpoint;
use weighbridge_converter::read;

use super::plan::Plan;
use super::{Budget, Request};
use crate::error::{Failure, Result};

/// Lists the checkpoint's tensors.
///
/// # Errors
/// As its reader fails.
pub async fn accept(request: &Request, budget: Budget) -> Result<Checkpoint> {
    let (location, format) = (request.checkpoint.clone(), request.format);
    let opened = move || read::open(&location, format, budget.memory, &std::env::temp_dir());
    let opened = tokio::task::spawn_blocking(opened);
    Ok(opened.await.map_err(|error| Failure::internal("listing the checkpoint", error))??)
}

/// Refuses a checkpoint whose files are not what they were when it was listed: what was read may be a mixture.
///
/// # Errors
/// [`weighbridge_converter::error::Class::CheckpointChanged`].
pub async fn check_unchanged(plan: &Arc<Plan>) -> Result<()> {
    let plan = Arc::clone(plan);
    let checked = tokio::task::spawn_blocking(move || plan.checkpoint.source.check_unchanged());
    Ok(checked.await.map_err(|error| Failure::internal("checking the checkpoint", error))??)
}
