//! The channel moves to the snapshot, if it may.

use weighbridge_schemas::channel::{Candidate, ChannelEntry, Decision, Reason, decide};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::Ended;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Appended, Channel, Move};
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::retain::claims::Claim;
use weighbridge_snapshots::root::Root;

use super::Request;
use super::plan::Plan;
use crate::error::{Exit, Failure, Result};

/// Whether a publish moves its channel wherever it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force {
    /// It moves it to newer steps alone, and not while an operator holds it.
    No,
    /// An operator wants it there, as by `promote`.
    Promote,
}

/// Appends a channel entry, unless the channel is held, newer, or there already; the snapshot is claimed. Gives the
/// outcome, and the entry that rules afterwards, or is the publish's own.
///
/// # Errors
/// As the store fails.
pub async fn promote(
    root: &Root,
    request: &Request,
    plan: &Plan,
    snapshot: SnapshotId,
    claim: &Claim,
    force: Force,
) -> Result<(Ended, Option<ChannelEntry>)> {
    claim.check(root)?;
    let channel = Channel::new(root, &request.model, &request.channel);
    let candidate = Candidate { snapshot, run: &request.run, step: request.step };
    let other_run = request.policy.channel.other_run;
    let move_for = |reason| Move {
        snapshot,
        run: request.run.clone(),
        step: request.step,
        created_at: created_at(request, plan),
        reason,
    };
    let appended = channel
        .append(&request.operation, |latest| match (decide(latest, candidate, other_run), force) {
            (Decision::Unchanged, _) => Err(Ended::Unchanged),
            (_, Force::Promote) => Ok(move_for(Reason::Promote)),
            (Decision::Move, Force::No) => Ok(move_for(Reason::Publish)),
            (Decision::Superseded, Force::No) => Err(Ended::Superseded),
            (Decision::Held, Force::No) => Err(Ended::Held),
        })
        .await
        .map_err(|error| unsigned(root, error))?;
    Ok(match appended {
        Appended::Stands(entry) => (Ended::Published, Some(entry)),
        Appended::Declined { why, latest } => (why, latest),
    })
}

/// Looks, before anything is read, at whether the entry that is to decide is signed as demanded.
///
/// # Errors
/// As the store fails; an integrity failure where it is not.
pub async fn check(root: &Root, request: &Request) -> Result<()> {
    if root.trust().is_some() {
        let channel = Channel::new(root, &request.model, &request.channel);
        channel.latest().await.map_err(|error| unsigned(root, error))?;
    }
    Ok(())
}

fn unsigned(root: &Root, error: StoreError) -> Failure {
    let mut failure = Failure::from(error);
    if root.trust().is_some() && failure.exit == Exit::Integrity {
        failure
            .message
            .push_str(". What a channel points at decides whether a publish moves it: then publish again");
    }
    failure
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
pub async fn leave(root: &Root, request: &Request) -> Result<(Ended, Option<ChannelEntry>)> {
    let latest = Channel::new(root, &request.model, &request.channel).latest().await?;
    Ok((Ended::Quarantined, latest))
}
