//! `republish`: a checkpoint that was published by workers is published by them again.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::checkpoint::PolicyChoice;
use weighbridge_schemas::names::{ChannelName, ModelName, PolicyName, RunName};

use super::Context;
use super::jobs::{Which, wait};
use super::publish::read_policy_text;
use crate::clock;
use crate::error::{Failure, Result};
use crate::operations::jobs::Ages;
use crate::operations::republish::{self, Wanted, What};

/// Publish a checkpoint again that workers have published, or tried to: by another policy, onto another channel.
///
/// The newest job that fits is repeated under a new id, which is printed. The checkpoint has to lie where it lay.
/// Without --policy the policy is found as for any other manifest: what the manifest carries or names, else the
/// model's own in the store as it is now, else the default. The channel moves to an older step only with --promote.
///
/// What was published in the foreground has left no job: `publish` it again.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  weighbridge republish dlrm --step 100 --policy int4.toml --channel canary --wait\n  \
    weighbridge jobs wait $(weighbridge republish dlrm --job 0f8fad)"
)]
pub(super) struct Republish {
    /// The model's name.
    model: ModelName,
    #[command(flatten)]
    what: Repeated,
    /// The run of the step, where several have it.
    #[arg(long, value_name = "RUN", requires = "step", conflicts_with_all = ["job", "snapshot"])]
    run: Option<RunName>,
    /// The policy: a TOML file.
    #[arg(long, value_name = "FILE", conflicts_with = "policy_name")]
    policy: Option<PathBuf>,
    /// The policy: one that is kept in the store.
    #[arg(long, value_name = "NAME")]
    policy_name: Option<PolicyName>,
    /// The channel to move [default: the manifest's, else the policy's].
    #[arg(long, value_name = "NAME")]
    channel: Option<ChannelName>,
    /// Move the channel to an older step too, or to another run's, and end a hold.
    #[arg(long)]
    promote: bool,
    /// Wait until it has ended, as `jobs wait` does.
    #[arg(long)]
    wait: bool,
    /// How long to wait at most, in seconds [default: as long as it takes].
    #[arg(long, value_name = "SECONDS", requires = "wait")]
    timeout: Option<u64>,
}

/// What is to be published again.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Repeated {
    /// The checkpoint of this step.
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// The checkpoint of this job: its id, or the first 6 or more characters of it.
    #[arg(long, value_name = "JOB")]
    job: Option<String>,
    /// The checkpoint that this snapshot was made of: its id, or the first 6 or more digits of it.
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
}

impl Republish {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let given = self.policy.as_deref().map(read_policy_text).transpose()?;
        let root = context.root_of_jobs()?;
        let what = match (self.what.step, self.what.job, self.what.snapshot) {
            (Some(step), ..) => What::Step(step, self.run),
            (_, Some(job), _) => What::Job(job),
            (.., Some(snapshot)) => What::Snapshot(snapshot),
            (None, None, None) => return Err(Failure::usage("name --step, --job or --snapshot")),
        };
        let given = given.map(|(text, _)| PolicyChoice::Toml(text));
        let policy = given.or(self.policy_name.map(PolicyChoice::Name));
        let (model, channel) = (self.model.clone(), self.channel);
        let wanted = Wanted { model, what, channel, policy, promote: self.promote };
        let who = context.operation()?.who;
        let ages = Ages::default();
        let request = republish::request(&root, &ages, wanted, clock::operation_id(), who).await?;
        republish::send(&*context.queue().await?, &request).await?;
        let job = request.manifest.id;
        if self.wait {
            let which = Which { job, model: Some(self.model) };
            return wait(context, &which, self.timeout.map(Duration::from_secs)).await;
        }
        let document = json!({
            "job": job,
            "model": self.model,
            "run": request.manifest.run,
            "step": request.manifest.step,
            "channel": request.manifest.channel,
            "repeats": request.repeats,
            "promote": request.promote,
        });
        context.output.listing(&document, || format!("{job}\n"));
        Ok(ExitCode::SUCCESS)
    }
}
