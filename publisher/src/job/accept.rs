//! The checkpoint, opened and listed from its metadata alone; and, when all has been read, whether it is still the same
//! and its bytes are those that were declared.

use std::sync::Arc;

use weighbridge_converter::checkpoint::Checkpoint;
use weighbridge_converter::error::ReadError;
use weighbridge_converter::read;
use weighbridge_converter::shape::records;
use weighbridge_converter::source::Source;
use weighbridge_snapshots::fetch::Progress;

use super::plan::Plan;
use super::{Budget, Request};
use crate::error::{Failure, Result};

/// Lists the checkpoint's tensors. Files that its manifest declares have to be there, of the declared sizes.
///
/// # Errors
/// As its reader fails.
pub async fn accept(request: &Request, budget: Budget) -> Result<Checkpoint> {
    let (location, format, files) = (request.checkpoint.clone(), request.format, request.files.clone());
    let opened = tokio::task::spawn_blocking(move || {
        let source =
            Source::open_location(&location)?.with_memory(budget.memory).with_scratch(&std::env::temp_dir());
        read::list(source.declare(&files)?, format)
    });
    Ok(opened.await.map_err(|error| Failure::internal("listing the checkpoint", error))??)
}

/// Refuses a checkpoint whose files are not what they were when it was listed (what was read may be a mixture), or
/// whose bytes are not those that were declared: checksums of published records, digests of declared files. What of
/// them was not read in converting is read now.
///
/// # Errors
/// [`weighbridge_converter::error::Class::CheckpointChanged`], `ZipCrc` or `FileDigestMismatch`.
pub async fn check(plan: &Arc<Plan>, budget: Budget, progress: &Arc<dyn Progress>) -> Result<()> {
    let (plan, progress) = (Arc::clone(plan), Arc::clone(progress));
    let checked = tokio::task::spawn_blocking(move || -> std::result::Result<(), ReadError> {
        let source = &plan.checkpoint.source;
        source.check_unchanged()?;
        records::check_records(plan.tensors.iter().map(|planned| plan.source(planned)), budget.threads)?;
        let rest = source.unhashed_bytes();
        if rest > 0 {
            progress.start(plan.source_bytes().saturating_add(rest));
        }
        source.check_digests(budget.threads, &|bytes| progress.advance(bytes))?;
        source.check_unchanged()
    });
    Ok(checked.await.map_err(|error| Failure::internal("checking the checkpoint", error))??)
}

/// Refuses a checkpoint of which a part was read, if its files are not what they were when it was listed.
///
/// # Errors
/// [`weighbridge_converter::error::Class::CheckpointChanged`].
pub async fn check_part(plan: &Arc<Plan>) -> Result<()> {
    let plan = Arc::clone(plan);
    let checked = tokio::task::spawn_blocking(move || plan.checkpoint.source.check_unchanged());
    Ok(checked.await.map_err(|error| Failure::internal("checking the checkpoint", error))??)
}
