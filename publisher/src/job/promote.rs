//! The channel moves to the snapshot, if it may.

use weighbridge_schemas::channel::{Candidate, ChannelEntry, Decision, Reason, decide};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Appended, Channel, Move};
use weighbridge_snapshots::root::Root;

use super::plan::Plan;
use super::{Outcome, Request};
use crate::error::Result;

/// Appends a channel entry, unless the channel is held, newer, or there already; gives the outcome, and the entry that
/// rules afterwards.
///
/// # Errors
/// As the store fails.
pub async fn promote(
    root: &Root,
    request: &Request,
    plan: &Plan,
    snapshot: SnapshotId,
) -> Result<(Outcome, Option<ChannelEntry>)> {
    let channel = Channel::new(root, &request.model, &request.channel);
    let candidate = Candidate { snapshot, run: &request.run, step: request.step };
    let other_run = request.policy.channel.other_run;
    let appended = channel
        .append(&request.operation, |latest| match decide(latest, candidate, other_run) {
            Decision::Move => Ok(Move {
                snapshot,
                run: request.run.clone(),
                step: request.step,
                created_at: created_at(request, plan),
                reason: Reason::Publish,
            }),
            Decision::Unchanged => Err(Outcome::Unchanged),
            Decision::Superseded => Err(Outcome::Superseded),
            Decision::Held => Err(Outcome::Held),
        })
        .await?;
    Ok(match appended {
        Appended::Stands(entry) => (Outcome::Published, Some(entry)),
        Appended::Declined { why, latest } => (why, latest),
    })
}

/// When the checkpoint was written: its manifest knows best.
fn created_at(request: &Request, plan: &Plan) -> Timestamp {
    let by_files = || Timestamp::from_nanoseconds(plan.checkpoint.source.modified_at());
    request.created_at.unwrap_or_else(by_files)
}

/// The channel is left where it is: a gate rejected the snapshot. Gives the entry that rules.
///
/// # Errors
/// As the store fails.
pub async fn leave(root: &Root, request: &Request) -> Result<(Outcome, Option<ChannelEntry>)> {
    let latest = Channel::new(root, &request.model, &request.channel).latest().await?;
    Ok((Outcome::Quarantined, latest))
}
