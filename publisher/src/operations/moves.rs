//! An operator moves a channel, or keeps it: promote, rollback, hold, release.

use std::collections::HashSet;
use std::convert::Infallible;

use weighbridge_schemas::channel::{ChannelEntry, Reason};
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::report::Outcome;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::{Appended, Channel, Move, Operation};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::layout;
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::reference::Reference;
use weighbridge_snapshots::retain::claims::{self, Claim};
use weighbridge_snapshots::root::Root;

use super::channels::latest;
use crate::clock;
use crate::error::{Exit, Failure, Result};
use crate::gates::REJECTED;

/// How many entries of a channel's log are in memory at once.
const LOG_PART: usize = 100;

/// The store, twice; what is written through either is signed.
#[derive(Debug, Clone)]
pub struct Roots {
    /// It refuses what is not signed as demanded.
    pub demanding: Root,
    /// It demands nothing.
    pub appending: Root,
}

impl Roots {
    /// From a root that may demand signatures.
    #[must_use]
    pub fn of(root: &Root) -> Self {
        Self { demanding: root.clone(), appending: root.clone().trusting_nobody() }
    }
}

/// What came of an operation on a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The entry that the operation wrote, or the one that rules where nothing had to be written.
    pub entry: ChannelEntry,
    /// Whether the operation wrote it.
    pub changed: bool,
}

/// Moves a channel to a snapshot; a hold ends. A snapshot that a gate rejected is refused, unless `force` says so.
///
/// What the channel points at so far need not be signed as demanded: so a channel that is older than its signatures
/// gets a signed entry.
///
/// # Errors
/// [`REJECTED`]; [`Class::NotFound`]; else as the store fails.
pub async fn promote(
    roots: &Roots,
    model: &ModelName,
    id: SnapshotId,
    channel: &ChannelName,
    force: bool,
    operation: &Operation,
) -> Result<Moved> {
    let wanted = wanted(&roots.demanding, model, id, Reason::Promote, force).await?;
    append(&roots.appending, model, channel, wanted, operation).await
}

/// Moves a channel back, to the snapshot `to` or to the good one before, and holds it there.
///
/// # Errors
/// As [`promote`].
pub async fn rollback(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    to: Option<&str>,
    operation: &Operation,
) -> Result<Moved> {
    let latest = latest(root, model, channel).await?;
    let id = match to {
        Some(text) => {
            let reference = Reference { model: model.clone(), at: Some(text.to_owned()) };
            reference.resolve(root, channel).await?.snapshot
        }
        None => before(root, model, channel, &latest).await?,
    };
    let wanted = wanted(root, model, id, Reason::Rollback, false).await?;
    append(root, model, channel, wanted, operation).await
}

/// Keeps a channel where it is, whatever is published.
///
/// # Errors
/// [`Class::NotFound`] where there is no such channel; else as the store fails.
pub async fn hold(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    operation: &Operation,
) -> Result<Moved> {
    stay(root, model, channel, Reason::Hold, operation).await
}

/// Ends a hold: the next publish moves the channel again.
///
/// # Errors
/// As [`hold`].
pub async fn release(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    operation: &Operation,
) -> Result<Moved> {
    stay(root, model, channel, Reason::Release, operation).await
}

/// An entry that changes whether the channel is held, and nothing else; none where it is so already.
async fn stay(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    reason: Reason,
    operation: &Operation,
) -> Result<Moved> {
    // What rules is written again with this process's signature: it has to be signed as demanded itself.
    let first = latest(root, model, channel).await?;
    let decide = |latest: Option<&ChannelEntry>| {
        let latest = latest.unwrap_or(&first);
        if latest.reason.holds() == reason.holds() {
            return Err(());
        }
        Ok(Move {
            snapshot: latest.snapshot,
            run: latest.run.clone(),
            step: latest.step,
            created_at: latest.created_at,
            reason,
        })
    };
    Ok(match Channel::new(root, model, channel).append(operation, decide).await? {
        Appended::Stands(entry) => Moved { entry, changed: true },
        Appended::Declined { latest, .. } => Moved { entry: latest.unwrap_or(first), changed: false },
    })
}

/// Where the channel pointed before it was first moved to where it points now: so that a second rollback goes a step
/// further back, and not forward again to what the first one left; nor does any to what an earlier one has left, and
/// nobody put there again. Snapshots that a gate has rejected, or gc has
/// deleted, are passed over, and so are those that are not signed as demanded.
async fn before(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    latest: &ChannelEntry,
) -> Result<SnapshotId> {
    let forward = |entry: &ChannelEntry| matches!(entry.reason, Reason::Publish | Reason::Promote);
    let (name, mut is_older, mut rest) = (Channel::new(root, model, channel), false, Some(u64::MAX));
    // What somebody has gone back from since, and what nobody put there again.
    let mut left = HashSet::new();
    while let Some(before) = rest {
        let part = name.log_before(before, LOG_PART).await?;
        for (entry, _) in &part.entries {
            if entry.reason == Reason::Rollback {
                left.extend(entry.previous.filter(|previous| *previous != entry.snapshot));
            }
            if !forward(entry) {
                continue;
            }
            if entry.snapshot == latest.snapshot {
                is_older = true;
                continue;
            }
            if left.contains(&entry.snapshot) {
                continue;
            }
            // What was collected is no good any more.
            let stands = is_older && root.size(&layout::snapshot(model, &entry.snapshot)).await?.is_some();
            if stands && is_good(root, model, &entry.snapshot).await? {
                return Ok(entry.snapshot);
            }
        }
        rest = part.rest;
    }
    let signed = if root.trust().is_some() { ", signed as demanded," } else { "" };
    let why = format!(
        "the channel's log knows no good snapshot{signed} before the present one; name the one to go back to: --to of \
         the command, `to` of the request"
    );
    Err(StoreError::new(Class::NotFound, format!("{model}@{channel}"), why).into())
}

/// Whether a channel may go back to a snapshot by itself: no gate has rejected it, and it is signed as demanded.
async fn is_good(root: &Root, model: &ModelName, id: &SnapshotId) -> Result<bool> {
    let signed = match root.trust() {
        Some(_) => manifest::get(root, model, id).await.map(drop),
        None => Ok(()),
    };
    let report = match signed {
        Ok(()) => manifest::report(root, model, id).await,
        Err(error) => Err(error),
    };
    match report {
        Ok((report, _)) => Ok(report.outcome != Outcome::Rejected),
        Err(error) if root.trust().is_some() && error.class() == Class::Integrity => {
            tracing::warn!(%error, "a snapshot is passed over");
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// What a move to snapshot `id` puts on the channel. The snapshot has to be there, and not quarantined. It is claimed.
async fn wanted(
    root: &Root,
    model: &ModelName,
    id: SnapshotId,
    reason: Reason,
    force: bool,
) -> Result<(Move, Claim)> {
    // Claimed first: gc leaves what is found then to the channel.
    let claim = claims::claim(root, model, &id, &clock::operation_id()).await?;
    let found = manifest::get(root, model, &id).await?;
    let (report, _) = manifest::report(root, model, &id).await?;
    if report.outcome == Outcome::Rejected && !force {
        let gates = report.gates.iter().filter(|gate| gate.outcome == Outcome::Rejected);
        let gates: Vec<_> = gates.map(|gate| gate.gate.as_str()).collect();
        let message = format!(
            "gate {} rejected snapshot {}; `weighbridge report {model}@{id}` tells why; \
             `weighbridge promote {model}@{id} --force` moves the channel all the same",
            gates.join(", "),
            id.to_string().chars().take(12).collect::<String>(),
        );
        return Err(Failure { kind: Kind::Permanent, class: REJECTED, message, exit: Exit::Rejected });
    }
    let created_at = written_at(root, model, id).await?;
    Ok((Move { snapshot: id, run: found.run, step: found.step, created_at, reason }, claim))
}

/// When the snapshot's checkpoint was written, as far as any channel's log tells.
async fn written_at(root: &Root, model: &ModelName, id: SnapshotId) -> Result<Timestamp> {
    for name in catalog::channels(root, model).await? {
        match entry_of(&Channel::new(root, model, &name), id).await {
            Ok(Some(entry)) => return Ok(entry.created_at),
            Ok(None) => {}
            // Damage elsewhere must not keep anybody from going back.
            Err(error) if error.class() == Class::Integrity => {
                tracing::warn!(%error, "a channel's log is passed over");
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(clock::now())
}

/// The newest entry of a channel that points at a snapshot.
async fn entry_of(
    channel: &Channel<'_>,
    id: SnapshotId,
) -> weighbridge_snapshots::error::Result<Option<ChannelEntry>> {
    let mut rest = Some(u64::MAX);
    while let Some(before) = rest {
        let part = channel.log_before(before, LOG_PART).await?;
        if let Some((entry, _)) = part.entries.into_iter().find(|(entry, _)| entry.snapshot == id) {
            return Ok(Some(entry));
        }
        rest = part.rest;
    }
    Ok(None)
}

async fn append(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    (wanted, claim): (Move, Claim),
    operation: &Operation,
) -> Result<Moved> {
    claim.check(root)?;
    let channel = Channel::new(root, model, channel);
    match channel.append(operation, |_| Ok::<_, Infallible>(wanted.clone())).await? {
        Appended::Stands(entry) => Ok(Moved { entry, changed: true }),
        Appended::Declined { why, .. } => match why {},
    }
}
