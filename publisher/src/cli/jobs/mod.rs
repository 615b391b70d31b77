//! `jobs`: queued publishes, listed, looked at, waited for, cancelled.

mod cancel;
mod find;
mod resume;
mod show;
mod standing;
mod wait;

use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use weighbridge_schemas::job::{Ended, JobId, JobRecord};
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::root::{Absent, Root};

pub(super) use find::{Which, is_prefix};
pub(super) use show::{event_cells, events_table};
use standing::Standing;
pub(super) use wait::wait;

use super::Context;
use super::output::{ago, between, error_cell, error_object, table};
use super::snapshots::{models, whole};
use crate::clock;
use crate::error::{Failure, Result};

/// How many records are read at a time.
const BESIDE: usize = 16;

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
        let root = context.root(Absent::Refuse)?;
        let mut damage = None;
        let mut newest = Vec::new();
        for model in models(&root, self.model.as_deref()).await? {
            newest.extend(accepted(&root, &model, &mut damage).await?);
        }
        newest.sort_unstable_by(|one, other| other.cmp(one));
        let mut rows = Vec::new();
        for (_, model, id) in &newest {
            if rows.len() >= self.most {
                break;
            }
            let row = whole(Row::read(&root, model, id).await, &mut damage)?.flatten();
            rows.extend(row.filter(|row| self.shows(&row.standing)));
        }
        let mut listing = json!({ "jobs": rows.iter().map(Row::document).collect::<Vec<_>>() });
        let failure = damage.map(Failure::from);
        if let Some(failure) = &failure {
            listing["error"] = error_object(failure);
        }
        context.output.listing(&listing, || {
            let cells: Vec<_> = rows.iter().map(Row::cells).collect();
            table(&["job", "model", "run", "step", "channel", "state", "age", "error"], &cells)
        });
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }

    fn shows(&self, standing: &Standing) -> bool {
        let ended = standing.outcome.as_ref().map(|outcome| outcome.outcome);
        (!self.open || ended.is_none()) && self.outcome.is_none_or(|wanted| ended == Some(wanted))
    }
}

/// A model's jobs, and when they were accepted.
async fn accepted(
    root: &Root,
    model: &ModelName,
    damage: &mut Option<StoreError>,
) -> Result<Vec<(Timestamp, ModelName, JobId)>> {
    let ids = jobs::list(root, model).await?;
    let read = |id: JobId| async move {
        let record = Job::new(root, model, &id).record().await;
        (id, record.map(|record| record.map(|record| record.accepted_at)))
    };
    let mut reading = stream::iter(ids).map(read).buffered(BESIDE);
    let mut accepted = Vec::new();
    while let Some((id, record)) = reading.next().await {
        accepted.extend(whole(record, damage)?.flatten().map(|at| (at, model.clone(), id)));
    }
    Ok(accepted)
}

/// A model's jobs, the newest first.
pub(super) async fn newest_first(root: &Root, model: &ModelName) -> Result<Vec<JobId>> {
    let mut damage = None;
    let mut newest = accepted(root, model, &mut damage).await?;
    if let Some(damage) = damage {
        return Err(damage.into());
    }
    newest.sort_unstable_by(|one, other| other.cmp(one));
    Ok(newest.into_iter().map(|(_, _, id)| id).collect())
}

/// A job, and how far it has got.
struct Row {
    record: JobRecord,
    standing: Standing,
}

impl Row {
    /// `None` where there is no such job.
    async fn read(
        root: &Root,
        model: &ModelName,
        id: &JobId,
    ) -> weighbridge_snapshots::error::Result<Option<Self>> {
        let job = Job::new(root, model, id);
        let Some(record) = job.record().await? else { return Ok(None) };
        Ok(Some(Self { record, standing: Standing::of(&job).await? }))
    }

    fn document(&self) -> Value {
        let (record, standing) = (&self.record, &self.standing);
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

    fn cells(&self) -> Vec<String> {
        let (record, standing) = (&self.record, &self.standing);
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
}
