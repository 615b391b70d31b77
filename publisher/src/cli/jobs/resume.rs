//! `jobs resume`: jobs whose messages were lost go on.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::root::Absent;

use crate::cli::Context;
use crate::cli::output::count;
use crate::cli::snapshots::models;
use crate::error::Result;
use crate::steps::end;

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
        let mut resumed = Vec::new();
        for model in models(&root, self.model.as_ref().map(ModelName::as_str)).await? {
            for id in jobs::list(&root, &model).await? {
                let Some(record) = Job::new(&root, &model, &id).record().await? else { continue };
                if end::resume(&root, &*queue, &record).await? {
                    resumed.push(id);
                }
            }
        }
        context.output.done(&json!({ "resumed": resumed }), || {
            format!("{} asked to go on\n", count(resumed.len() as u64, "job"))
        });
        Ok(ExitCode::SUCCESS)
    }
}
