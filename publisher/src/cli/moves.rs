//! `promote`, `rollback`, `hold`, `release`: an operator moves a channel, or keeps it.

use std::convert::Infallible;

use clap::Args;

use weighbridge_schemas::channel::{ChannelEntry, Reason};
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::report::Outcome;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Appended, Channel, Move};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::layout;
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::reference::{Located, PREFIX_DIGITS, Reference};
use weighbridge_snapshots::retain::claims::{self, Claim};
use weighbridge_snapshots::root::{Absent, Root};

use super::output::short;
use super::signing::{SigningOptions, TrustOptions};
use super::{Context, channels, default_channel};
use crate::clock;
use crate::error::{Exit, Failure, Result};
use crate::gates::REJECTED;

/// The channel that is meant.
#[derive(Debug, Args)]
pub(super) struct Target {
    /// The model, and the channel behind an @.
    #[arg(value_name = "MODEL[@CHANNEL]")]
    reference: Reference,
    /// The channel, where none stands behind an @ [default: prod].
    #[arg(long, value_name = "NAME")]
    channel: Option<ChannelName>,
}

impl Target {
    pub(super) fn parse(&self) -> Result<(ModelName, ChannelName)> {
        let named = match &self.reference.at {
            Some(at) => Some(at.parse::<ChannelName>()?),
            None => None,
        };
        let channel = match (named, &self.channel) {
            (Some(named), Some(other)) if named != *other => {
                return Err(Failure::usage(format!("two channels are named: {named} and {other}")));
            }
            (Some(named), _) => named,
            (None, other) => other.clone().unwrap_or_else(default_channel),
        };
        Ok((self.reference.model.clone(), channel))
    }

    /// The entry that rules; that there is none is an error.
    pub(super) async fn latest(
        &self,
        root: &Root,
        model: &ModelName,
        name: &ChannelName,
    ) -> Result<ChannelEntry> {
        let latest = Channel::new(root, model, name).latest().await?;
        latest.ok_or_else(|| {
            let why = "there is no such channel; `weighbridge channels` lists them";
            StoreError::new(Class::NotFound, format!("{model}@{name}"), why).into()
        })
    }
}

/// Who signs the entry that is written, and whose signature is demanded of what it is made of.
#[derive(Debug, Args)]
pub(super) struct Signatures {
    #[command(flatten)]
    signing: SigningOptions,
    #[command(flatten)]
    trust: TrustOptions,
}

/// The store, twice; what is written through either is signed.
struct Roots {
    /// It refuses what is not signed as demanded.
    demanding: Root,
    /// It demands nothing.
    appending: Root,
}

impl Signatures {
    fn roots(&self, context: &Context) -> Result<Roots> {
        let appending = self.signing.on(context, context.root(Absent::Refuse)?)?;
        Ok(Roots { demanding: self.trust.on(context, appending.clone())?, appending })
    }
}

/// Move a channel to a snapshot; a hold ends.
///
/// With --require-signed-by, what it is moved to has to be signed: the snapshot, its ruling report, and the entry of
/// the channel that is named for it. What the channel to move points at so far need not be: so a channel that is older
/// than its signatures gets a signed entry.
#[derive(Debug, Args)]
pub(super) struct Promote {
    /// What to move it to: MODEL@SNAPSHOT, or MODEL@CHANNEL for what another channel points at (`promote dlrm@canary
    /// --channel prod`), or a snapshot's id.
    #[arg(value_name = "MODEL@SNAPSHOT")]
    reference: String,
    /// The channel to move.
    #[arg(long, value_name = "NAME", default_value = "prod")]
    channel: ChannelName,
    /// Promote it even if a gate rejected it.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    signatures: Signatures,
}

impl Promote {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let text = &self.reference;
        let is_id = text.len() >= PREFIX_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_id && !text.contains('@') {
            let model = &self.reference;
            return Err(Failure::usage(format!(
                "promote what? Name the snapshot: {model}@SNAPSHOT or {model}@CHANNEL"
            )));
        }
        let Roots { demanding, appending } = self.signatures.roots(context)?;
        let Located { model, snapshot: id, .. } =
            Reference::locate(&self.reference, &demanding, &self.channel).await?;
        let wanted = wanted(&demanding, &model, id, Reason::Promote, self.force).await?;
        append(context, &appending, &model, &self.channel, wanted).await
    }
}

/// Move a channel back, and hold it there: publishes do not move it until `release` or `promote`.
#[derive(Debug, Args)]
pub(super) struct Rollback {
    #[command(flatten)]
    target: Target,
    /// The snapshot to go back to [default: the one before].
    #[arg(long, value_name = "SNAPSHOT")]
    to: Option<String>,
    #[command(flatten)]
    signatures: Signatures,
}

impl Rollback {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let root = self.signatures.roots(context)?.demanding;
        let (model, name) = self.target.parse()?;
        let latest = self.target.latest(&root, &model, &name).await?;
        let id = match &self.to {
            Some(text) => {
                let reference = Reference { model: model.clone(), at: Some(text.clone()) };
                reference.resolve(&root, &name).await?.snapshot
            }
            None => before(&root, &model, &name, &latest).await?,
        };
        let wanted = wanted(&root, &model, id, Reason::Rollback, false).await?;
        append(context, &root, &model, &name, wanted).await
    }
}

/// Keep a channel where it is, whatever is published.
#[derive(Debug, Args)]
pub(super) struct Hold {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    signatures: Signatures,
}

impl Hold {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        stay(context, &self.target, &self.signatures, Reason::Hold).await
    }
}

/// End a hold: the next publish moves the channel again.
#[derive(Debug, Args)]
pub(super) struct Release {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    signatures: Signatures,
}

impl Release {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        stay(context, &self.target, &self.signatures, Reason::Release).await
    }
}

/// An entry that changes whether the channel is held, and nothing else; none where it is so already.
async fn stay(context: &Context, target: &Target, signatures: &Signatures, reason: Reason) -> Result<()> {
    // What rules is written again with this process's signature: it has to be signed as demanded itself.
    let root = signatures.roots(context)?.demanding;
    let (model, name) = target.parse()?;
    let first = target.latest(&root, &model, &name).await?;
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
    match Channel::new(&root, &model, &name).append(&context.operation()?, decide).await? {
        Appended::Stands(entry) => tell(context, &model, &name, &entry),
        Appended::Declined { latest, .. } => {
            let latest = latest.unwrap_or(first);
            context.output.done(&channels::document(&model, &name, &latest), || {
                let state = if latest.reason.holds() { "held already" } else { "not held" };
                format!("{}: {model}@{name} was {state}; nothing is changed\n", reason.as_str())
            });
        }
    }
    Ok(())
}

/// Where the channel pointed before it was first moved to where it points now: so that a second rollback goes a step
/// further back, and not forward again to what the first one left. Snapshots that a gate has rejected, or gc has
/// deleted, are passed over, and so are those that are not signed as demanded.
async fn before(
    root: &Root,
    model: &ModelName,
    name: &ChannelName,
    latest: &ChannelEntry,
) -> Result<SnapshotId> {
    let log = Channel::new(root, model, name).log(usize::MAX).await?;
    let forward = |entry: &ChannelEntry| matches!(entry.reason, Reason::Publish | Reason::Promote);
    let older = log.iter().skip_while(|entry| entry.snapshot != latest.snapshot || !forward(entry));
    for entry in older.filter(|entry| entry.snapshot != latest.snapshot && forward(entry)) {
        if root.size(&layout::snapshot(model, &entry.snapshot)).await?.is_none() {
            // Collected: it is no good any more, nor is what was there before it.
            continue;
        }
        if is_good(root, model, &entry.snapshot).await? {
            return Ok(entry.snapshot);
        }
    }
    let signed = if root.trust().is_some() { ", signed as demanded," } else { "" };
    let why = format!(
        "the channel's log knows no good snapshot{signed} before the present one; name one with --to"
    );
    Err(StoreError::new(Class::NotFound, format!("{model}@{name}"), why).into())
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
            short(&id),
        );
        return Err(Failure { kind: Kind::Permanent, class: REJECTED, message, exit: Exit::Rejected });
    }
    let created_at = written_at(root, model, id).await?;
    Ok((Move { snapshot: id, run: found.run, step: found.step, created_at, reason }, claim))
}

/// When the snapshot's checkpoint was written, as far as any channel's log tells.
async fn written_at(root: &Root, model: &ModelName, id: SnapshotId) -> Result<Timestamp> {
    for name in weighbridge_snapshots::catalog::channels(root, model).await? {
        match Channel::new(root, model, &name).log(usize::MAX).await {
            Ok(log) => {
                if let Some(entry) = log.iter().find(|entry| entry.snapshot == id) {
                    return Ok(entry.created_at);
                }
            }
            // Damage elsewhere must not keep anybody from going back.
            Err(error) if error.class() == Class::Integrity => {
                tracing::warn!(%error, "a channel's log is passed over");
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(clock::now())
}

async fn append(
    context: &Context,
    root: &Root,
    model: &ModelName,
    name: &ChannelName,
    (wanted, claim): (Move, Claim),
) -> Result<()> {
    claim.check(root)?;
    let channel = Channel::new(root, model, name);
    let appended = channel.append(&context.operation()?, |_| Ok::<_, Infallible>(wanted.clone())).await?;
    match appended {
        Appended::Stands(entry) => tell(context, model, name, &entry),
        Appended::Declined { why, .. } => match why {},
    }
    Ok(())
}

fn tell(context: &Context, model: &ModelName, name: &ChannelName, entry: &ChannelEntry) {
    context.output.done(&channels::document(model, name, entry), || {
        let held = if entry.reason.holds() {
            ", and is held there: publishes do not move it until `weighbridge release` or `promote`"
        } else {
            ""
        };
        format!(
            "{}: {model}@{name} points at {} (step {}){held}\n",
            entry.reason.as_str(),
            entry.snapshot,
            entry.step
        )
    });
}
