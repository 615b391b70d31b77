//! `jobs cancel`: a job is ended before it gets onto its channel.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::{Decided, JobRecord};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Absent;

use super::find::Which;
use crate::cli::Context;
use crate::cli::output::error_object;
use crate::error::{Exit, Failure, Result};
use crate::steps::end;

/// End a job before it gets onto its channel; the newest job that gave way to it is queued again.
///
/// A job that has ended, or is going onto its channel already, stays as it is: the answer says so, with exit code 1.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge jobs cancel 0f8fad --who alice")]
pub(super) struct Cancel {
    #[command(flatten)]
    which: Which,
}

impl Cancel {
    pub(super) async fn run(&self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let record = self.which.get(&root).await?;
        let who = context.operation()?.who;
        let ruling = end::cancel(&root, &*context.queue().await?, &record, &who).await?;
        let (model, id) = (&record.manifest.model, record.job());
        let outcome = Job::new(&root, model, &id).outcome().await?.map(|outcome| outcome.outcome);
        let mut document = json!({ "job": id, "model": model, "decision": ruling, "outcome": outcome });
        let failure = (ruling != Decided::Cancelled).then(|| too_late(&record, ruling));
        if let Some(failure) = &failure {
            document["error"] = error_object(failure);
        }
        context.output.done(&document, || match ruling {
            Decided::Cancelled => format!("cancelled: job {id} of model {model} is not published\n"),
            _ => String::new(),
        });
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}

fn too_late(record: &JobRecord, ruling: Decided) -> Failure {
    let rules = match ruling {
        Decided::Proceed => format!(
            "it goes onto channel {0}, or has; `weighbridge rollback {1}@{0}` moves that back",
            record.channel, record.manifest.model
        ),
        Decided::Coalesced => "it gave way to a newer step".to_owned(),
        Decided::Dead => "it is dead".to_owned(),
        Decided::Cancelled => "it was cancelled".to_owned(),
    };
    let id = record.job();
    Failure {
        kind: Kind::Conflict,
        class: "already_decided",
        message: format!("job {id} is not cancelled: {rules}; `weighbridge jobs show {id}` tells all"),
        exit: Exit::Failed,
    }
}
