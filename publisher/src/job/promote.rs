//! The channel moves to the snapshot, if it may.

use weighbridge_schemas::channel::{Candidate, Decision, Reason, decide};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Channel, Move};
use weighbridge_snapshots::root::Root;

use super::plan::Plan;
use super::{Outcome, Request};
use crate::error::Result;

/// Appends a channel entry, unless the channel is held, newer, or there already.
///
/// # Errors
/// As the store fails.
pub async fn promote(root: &Root, request: &Request, plan: &Plan, snapshot: SnapshotId) -> Result<Outcome> {
    let channel = Channel::new(root, &request.model, &request.channel);
    let candidate = Candidate { snapshot, run: &request.run, step: request.step };
    let other_run = request.policy.channel.other_run;
    let appended = channel
        .append(&request.operation, |latest| match decide(latest, candidate, other_run) {
            Decision::Move => Ok(Move {
                snapshot,
                run: request.run.clone(),
                step: request.step,
                created_at: Timestamp::from_nanoseconds(plan.checkpoint.source.modified_at()),
                reason: Reason::Publish,
            }),
            Decision::Unchanged => Err(Outcome::Unchanged),
            Decision::Superseded => Err(Outcome::Superseded),
            Decision::Held => Err(Outcome::Held),
        })
        .await?;
    Ok(appended.map_or_else(|outcome| outcome, |_| Outcome::Published))
}
