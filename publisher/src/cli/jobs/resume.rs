//! `jobs resume`: jobs whose messages were lost go on.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::root::Absent;

use crate::cli::Context;
use crate::cli::output::count;
use crate::error::Result;
use crate::operations::{jobs, models};

/// Ask for the next step of every job that has not ended: for when a queue was lost, with all that was on it.
///
/// Jobs live in the store; the queue only says what is next. What is on the queue still is not added again, and a step
/// that is done twice changes nothing. Manifests that no worker had accepted yet are not jobs: drop them again.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge jobs resume dlrm")]
pub(super) struct Resume {
    /// The model; without one, all.
    model: Option<ModelName>,
}

impl Resume {
    pub(super) async fn run(&self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let queue = context.queue().await?;
        let models = models(&root, self.model.as_ref().map(ModelName::as_str)).await?;
        let resumed = jobs::resume(&root, &*queue, &models).await?;
        context.output.done(&json!({ "resumed": resumed }), || {
            format!("{} asked to go on\n", count(resumed.len() as u64, "job"))
        });
        Ok(ExitCode::SUCCESS)
    }
}
