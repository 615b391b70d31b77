//! `republish`: a checkpoint that was published by workers is published by them again.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::checkpoint::PolicyChoice;
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::job::{JobRecord, Republish as Request, RepublishSchema};
use weighbridge_schemas::names::{ChannelName, ModelName, PolicyName, RunName};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::jobs::{Which, newest_first, wait};
use super::publish::read_policy_text;
use crate::clock;
use crate::error::{Failure, Result};
use crate::policies;
use crate::steps::messages;

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
    what: What,
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
struct What {
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
        let root = context.root(Absent::Refuse)?;
        let model = &self.model;
        let repeated = match (&self.what.step, &self.what.job, &self.what.snapshot) {
            (Some(step), ..) => of_step(&root, model, *step, self.run.as_ref()).await?,
            (_, Some(job), _) => Which::new(job.clone(), Some(model.clone())).get(&root).await?,
            (.., Some(snapshot)) => of_snapshot(&root, model, snapshot).await?,
            (None, None, None) => return Err(Failure::usage("name --step, --job or --snapshot")),
        };
        let mut manifest = repeated.manifest.clone();
        manifest.id = clock::operation_id();
        manifest.channel = self.channel.clone().or(manifest.channel);
        if let Some((text, _)) = given {
            manifest.policy = Some(PolicyChoice::Toml(text));
        } else if let Some(name) = &self.policy_name {
            manifest.policy = Some(PolicyChoice::Name(name.clone()));
            // Before it is a job that can only fail.
            policies::resolve(Some(&root), model, manifest.policy.as_ref()).await??;
        }
        let request = Request {
            schema: RepublishSchema::V1,
            manifest,
            repeats: Some(repeated.job()),
            promote: self.promote,
            requested_by: Some(context.operation()?.who),
        };
        context.queue().await?.send(&messages::republish(&request)).await?;
        let job = request.manifest.id;
        if self.wait {
            let which = Which::new(job, Some(self.model));
            return wait(context, &which, self.timeout.map(Duration::from_secs)).await;
        }
        let document = json!({
            "job": job,
            "model": model,
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

/// The newest job of a step. Which one is meant where several runs have it, nobody should have to guess.
async fn of_step(root: &Root, model: &ModelName, step: u64, run: Option<&RunName>) -> Result<JobRecord> {
    let mut fitting: Vec<JobRecord> = Vec::new();
    for id in newest_first(root, model).await? {
        let Some(record) = Job::new(root, model, &id).record().await? else { continue };
        let manifest = &record.manifest;
        let is_new = || fitting.iter().all(|other| other.manifest.run != manifest.run);
        if manifest.step == step && run.is_none_or(|run| *run == manifest.run) && is_new() {
            fitting.push(record);
        }
    }
    if fitting.len() > 1 {
        let runs: Vec<_> = fitting.iter().map(|record| record.manifest.run.as_str()).collect();
        let (runs, first) = (runs.join(", "), runs[0]);
        return Err(Failure::usage(format!(
            "several runs of model {model} have a step {step}: {runs}; name one, as with --run {first}"
        )));
    }
    let what = run.map_or_else(|| format!("step {step}"), |run| format!("step {step} of run {run}"));
    fitting.pop().ok_or_else(|| no_job(model, &what))
}

/// The newest job that made a snapshot.
async fn of_snapshot(root: &Root, model: &ModelName, text: &str) -> Result<JobRecord> {
    if text.len() < PREFIX_DIGITS || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let shown = shorten(text);
        return Err(Failure::usage(format!(
            "--snapshot: {shown:?} is no snapshot: give its id, or the first {PREFIX_DIGITS} or more digits of it"
        )));
    }
    let mut found = None;
    for id in newest_first(root, model).await? {
        let job = Job::new(root, model, &id);
        let made = job.outcome().await?.and_then(|outcome| outcome.snapshot);
        let Some(made) = made.filter(|made| made.to_string().starts_with(text)) else { continue };
        match &found {
            None => found = job.record().await?.map(|record| (made, record)),
            Some((first, _)) if *first != made => {
                let why = "the ids of several snapshots begin so; give more digits";
                return Err(StoreError::new(Class::Refused, shorten(text), why).into());
            }
            Some(_) => {}
        }
    }
    found.map(|(_, record)| record).ok_or_else(|| no_job(model, &format!("snapshot {}", shorten(text))))
}

fn no_job(model: &ModelName, what: &str) -> Failure {
    let why = format!(
        "no job has published it; what was published in the foreground has left none: \
         `weighbridge publish CKPT --model {model}` publishes it again; `weighbridge jobs {model}` lists the jobs"
    );
    StoreError::new(Class::NotFound, format!("{what} of model {model}"), why).into()
}
