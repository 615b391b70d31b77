//! `channels`: where channels point, and how they got there.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::root::Absent;

use super::Context;
use super::moves::Target;
use super::output::{error_object, plain, short, table};
use super::snapshots::models;
use crate::error::{Failure, Result};
use crate::operations::channels::{self, Standing};

/// List channels, or show a channel's log.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Channels {
    /// The model; without one, all.
    model: Option<String>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show a channel's log, the newest entry first.
    Log {
        #[command(flatten)]
        target: Target,
        /// The most entries to show.
        #[arg(long, default_value_t = 50, value_name = "N")]
        most: usize,
    },
}

impl Channels {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        match self.command {
            Some(Command::Log { target, most }) => log(context, &target, most).await,
            None => list(context, self.model.as_deref()).await,
        }
    }
}

async fn list(context: &Context, model: Option<&str>) -> Result<ExitCode> {
    let root = context.root(Absent::Refuse)?;
    let mut damage = None;
    let standing = channels::list(&root, &models(&root, model).await?, &mut damage).await?;
    let latest: Vec<_> =
        standing.into_iter().map(|Standing { model, channel, entry }| (model, channel, entry)).collect();
    let failure = damage.map(Failure::from);
    show(context, "channels", &latest, failure.as_ref());
    let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
    context.output.failure_line(&failure);
    Ok(ExitCode::from(failure.exit as u8))
}

async fn log(context: &Context, target: &Target, most: usize) -> Result<ExitCode> {
    let root = context.root(Absent::Refuse)?;
    let (model, name) = target.parse()?;
    let entries = channels::log(&root, &model, &name, u64::MAX, most).await?.entries;
    let entries: Vec<_> =
        entries.into_iter().map(|(entry, _)| (model.clone(), name.clone(), entry)).collect();
    show(context, "entries", &entries, None);
    Ok(ExitCode::SUCCESS)
}

fn show(
    context: &Context,
    what: &str,
    entries: &[(ModelName, ChannelName, ChannelEntry)],
    failure: Option<&Failure>,
) {
    let documents: Vec<Value> =
        entries.iter().map(|(model, name, entry)| document(model, name, entry)).collect();
    let mut listing = json!({ what: documents });
    if let Some(failure) = failure {
        listing["error"] = error_object(failure);
    }
    context.output.listing(&listing, || {
        let rows: Vec<_> = entries
            .iter()
            .map(|(model, name, entry)| {
                vec![
                    format!("{model}@{name}"),
                    entry.sequence.to_string(),
                    short(&entry.snapshot),
                    entry.run.to_string(),
                    entry.step.to_string(),
                    entry.reason.as_str().to_owned(),
                    if entry.reason.holds() { "held" } else { "" }.to_owned(),
                    plain(&entry.who),
                    seconds(&entry.when.to_string()),
                ]
            })
            .collect();
        table(&["channel", "sequence", "snapshot", "run", "step", "reason", "hold", "who", "when"], &rows)
    });
}

/// A time stamp without its fraction of a second.
pub(super) fn seconds(time: &str) -> String {
    time.split_once('.').map_or_else(|| time.to_owned(), |(whole, _)| format!("{whole}Z"))
}

/// An entry with its model, its channel, and whether the channel is held by it.
pub(super) fn document(model: &ModelName, name: &ChannelName, entry: &ChannelEntry) -> Value {
    let mut document = json!(entry);
    document["model"] = json!(model);
    document["channel"] = json!(name);
    document["held"] = json!(entry.reason.holds());
    document
}
