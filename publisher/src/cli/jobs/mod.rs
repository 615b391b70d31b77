//! `jobs`: queued publishes, listed, looked at, waited for, cancelled.

mod cancel;
mod resume;
mod show;
mod wait;

use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use weighbridge_schemas::job::Ended;
use weighbridge_schemas::names::ModelName;

pub(super) use show::{event_cells, events_table};
pub(super) use wait::wait;

use super::Context;
use super::output::{ago, error_cell, error_object, table};
use super::snapshots::models;
use crate::clock::{self, between};
use crate::error::{Failure, Result};
use crate::operations::Page;
use crate::operations::jobs::{self, Ages, Filter, Progress};

/// The job that is meant.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// The job's id, or its first 6 or more characters.
    #[arg(value_name = "JOB")]
    pub(super) job: String,
    /// The job's model [default: it is looked for in all].
    #[arg(long, value_name = "MODEL")]
    pub(super) model: Option<ModelName>,
}

/// List queued publishes, the newest first; or look at one, wait for it, cancel it.
///
/// A job is one publish of one checkpoint, by the id of its manifest, which `drop` prints. Its state is accepted,
/// waiting (for its checkpoint to be complete), planned, converting, finishing, or how it ended.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(
    after_help = "Example:\n  weighbridge jobs dlrm --open\n  weighbridge jobs --outcome dead --most 5\n  \
    weighbridge jobs show 0f8fad\n  weighbridge jobs wait 0f8fad5b-d9cb-469f-a165-70867728950e --timeout 600"
)]
pub(super) struct Jobs {
    /// The model; without one, all.
    model: Option<String>,
    /// The most jobs to show.
    #[arg(long, default_value_t = 20, value_name = "N")]
    most: usize,
    /// Only those that ended so.
    #[arg(long, conflicts_with = "open", value_parser = outcomes())]
    outcome: Option<Ended>,
    /// Only those that have not ended.
    #[arg(long)]
    open: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Show(show::Show),
    Wait(wait::Wait),
    Cancel(cancel::Cancel),
    Resume(resume::Resume),
}

fn outcomes() -> impl TypedValueParser<Value = Ended> {
    PossibleValuesParser::new(Ended::ALL.map(Ended::as_str)).try_map(|name| {
        let ended = Ended::ALL.into_iter().find(|ended| ended.as_str() == name);
        ended.ok_or("no such outcome")
    })
}

impl Jobs {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        match &self.command {
            Some(Command::Show(show)) => show.run(context).await,
            Some(Command::Wait(wait)) => wait.run(context).await,
            Some(Command::Cancel(cancel)) => cancel.run(context).await,
            Some(Command::Resume(resume)) => resume.run(context).await,
            None => self.list(context).await,
        }
    }

    async fn list(&self, context: &Context) -> Result<ExitCode> {
        let root = context.root_of_jobs()?;
        let models = models(&root, self.model.as_deref()).await?;
        let filter = Filter { open: self.open, outcome: self.outcome };
        let listed = jobs::list(&root, &Ages::default(), &models, filter, Page::first(self.most)).await?;
        let rows = listed.jobs;
        let mut listing = json!({ "jobs": rows.iter().map(document).collect::<Vec<_>>() });
        let failure = listed.damage.map(Failure::from);
        if let Some(failure) = &failure {
            listing["error"] = error_object(failure);
        }
        context.output.listing(&listing, || {
            let cells: Vec<_> = rows.iter().map(cells).collect();
            table(&["job", "model", "run", "step", "channel", "state", "age", "error"], &cells)
        });
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}

fn document(progress: &Progress) -> Value {
    let (record, standing) = (&progress.record, &progress.standing);
    let outcome = standing.outcome.as_ref();
    json!({
        "job": record.job(),
        "model": record.manifest.model,
        "run": record.manifest.run,
        "step": record.manifest.step,
        "channel": record.channel,
        "state": standing.name(),
        "parts": standing.parts.map(|(done, all)| json!({ "done": done, "all": all })),
        "outcome": outcome.map(|outcome| outcome.outcome),
        "snapshot": outcome.and_then(|outcome| outcome.snapshot),
        "accepted_at": record.accepted_at,
        "age_seconds": between(record.accepted_at, clock::now()).as_secs_f64(),
        "error": standing.error,
    })
}

fn cells(progress: &Progress) -> Vec<String> {
    let (record, standing) = (&progress.record, &progress.standing);
    vec![
        record.job().to_string(),
        record.manifest.model.to_string(),
        record.manifest.run.to_string(),
        record.manifest.step.to_string(),
        record.channel.to_string(),
        standing.text(),
        ago(between(record.accepted_at, clock::now())),
        standing.error.as_ref().map(error_cell).unwrap_or_default(),
    ]
}
