//! `jobs cancel`: a job is ended before it gets onto its channel.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::job::Decided;

use super::Which;
use crate::cli::Context;
use crate::cli::output::error_object;
use crate::error::Result;
use crate::operations::jobs;

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
        let root = context.root_of_jobs()?;
        let record = jobs::get(&root, &self.which.job, self.which.model.as_ref()).await?;
        let who = context.operation()?.who;
        let cancelled = jobs::cancel(&root, &*context.queue().await?, &record, &who).await?;
        let (model, id) = (&record.manifest.model, record.job());
        let mut document = json!({
            "job": id, "model": model, "decision": cancelled.ruling,
            "outcome": cancelled.outcome.map(|outcome| outcome.outcome),
        });
        if let Some(failure) = &cancelled.too_late {
            document["error"] = error_object(failure);
        }
        context.output.done(&document, || match cancelled.ruling {
            Decided::Cancelled => format!("cancelled: job {id} of model {model} is not published\n"),
            _ => String::new(),
        });
        let Some(failure) = cancelled.too_late else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}
