//! `promote`, `rollback`, `hold`, `release`: an operator moves a channel, or keeps it.

use clap::Args;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::reference::{Located, PREFIX_DIGITS, Reference};
use weighbridge_snapshots::root::Absent;

use super::signing::{SigningOptions, TrustOptions};
use super::{Context, channels, default_channel};
use crate::error::{Failure, Result};
use crate::operations::moves::{self, Moved, Roots};

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
}

/// Who signs the entry that is written, and whose signature is demanded of what it is made of.
#[derive(Debug, Args)]
pub(super) struct Signatures {
    #[command(flatten)]
    signing: SigningOptions,
    #[command(flatten)]
    trust: TrustOptions,
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
        let roots = self.signatures.roots(context)?;
        let Located { model, snapshot: id, .. } =
            Reference::locate(&self.reference, &roots.demanding, &self.channel).await?;
        let operation = context.operation()?;
        let moved = moves::promote(&roots, &model, id, &self.channel, self.force, &operation).await?;
        tell(context, &model, &self.channel, &moved.entry);
        Ok(())
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
        let moved = moves::rollback(&root, &model, &name, self.to.as_deref(), &context.operation()?).await?;
        tell(context, &model, &name, &moved.entry);
        Ok(())
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
        let root = self.signatures.roots(context)?.demanding;
        let (model, name) = self.target.parse()?;
        let moved = moves::hold(&root, &model, &name, &context.operation()?).await?;
        tell_stay(context, &model, &name, &moved, "hold", "held already");
        Ok(())
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
        let root = self.signatures.roots(context)?.demanding;
        let (model, name) = self.target.parse()?;
        let moved = moves::release(&root, &model, &name, &context.operation()?).await?;
        tell_stay(context, &model, &name, &moved, "release", "not held");
        Ok(())
    }
}

fn tell_stay(
    context: &Context,
    model: &ModelName,
    name: &ChannelName,
    moved: &Moved,
    operation: &str,
    already: &str,
) {
    if moved.changed {
        return tell(context, model, name, &moved.entry);
    }
    context.output.done(&channels::document(model, name, &moved.entry), || {
        format!("{operation}: {model}@{name} was {already}; nothing is changed\n")
    });
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
