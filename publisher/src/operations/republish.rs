//! A checkpoint that was published by workers is published by them again.

use weighbridge_queue::Queue;
use weighbridge_schemas::checkpoint::PolicyChoice;
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::job::{JobRecord, Republish, RepublishSchema};
use weighbridge_schemas::names::{ChannelName, ModelName, RunName};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::Root;

use super::jobs::{self, Ages};
use crate::error::{Failure, Result};
use crate::policies;
use crate::steps::messages;

/// What is to be published again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// The checkpoint of this step; of this run, where several have it.
    Step(u64, Option<RunName>),
    /// The checkpoint of the job whose id is this, or begins so.
    Job(String),
    /// The checkpoint that the snapshot was made of whose id is this, or begins so.
    Snapshot(String),
}

/// How it is to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The model.
    pub model: ModelName,
    /// The checkpoint.
    pub what: What,
    /// The channel, where it is not the manifest's or the policy's.
    pub channel: Option<ChannelName>,
    /// The policy, where it is not the manifest's or the model's.
    pub policy: Option<PolicyChoice>,
    /// Whether the channel moves to an older step too, or to another run's, and a hold ends.
    pub promote: bool,
}

/// The request that repeats the newest job that fits, under the id `job`.
///
/// # Errors
/// [`Class::NotFound`] where no job fits; a usage failure where several runs do, or there is no such policy; else as
/// the store fails.
pub async fn request(
    root: &Root,
    ages: &Ages,
    wanted: Wanted,
    job: String,
    who: String,
) -> Result<Republish> {
    let model = &wanted.model;
    let repeated = match &wanted.what {
        What::Step(step, run) => of_step(root, ages, model, *step, run.as_ref()).await?,
        What::Job(job) => jobs::get(root, job, Some(model)).await?,
        What::Snapshot(snapshot) => of_snapshot(root, ages, model, snapshot).await?,
    };
    let repeats = Some(repeated.job());
    let mut manifest = repeated.manifest;
    manifest.id = job;
    manifest.channel = wanted.channel.or(manifest.channel);
    if let Some(policy) = wanted.policy {
        if matches!(policy, PolicyChoice::Name(_)) {
            // Before it is a job that can only fail.
            policies::resolve(Some(root), model, Some(&policy)).await??;
        }
        manifest.policy = Some(policy);
    }
    let schema = RepublishSchema::V1;
    Ok(Republish { schema, manifest, repeats, promote: wanted.promote, requested_by: Some(who) })
}

/// Puts a request on the queue.
///
/// # Errors
/// As the queue fails.
pub async fn send(queue: &dyn Queue, request: &Republish) -> Result<()> {
    Ok(queue.send(&messages::republish(request)).await?)
}

/// The newest job of a step. Which one is meant where several runs have it, nobody should have to guess.
async fn of_step(
    root: &Root,
    ages: &Ages,
    model: &ModelName,
    step: u64,
    run: Option<&RunName>,
) -> Result<JobRecord> {
    let (mut newest, mut runs): (_, Vec<RunName>) = (None, Vec::new());
    for id in ages.newest_first(root, model).await? {
        let Some(record) = Job::new(root, model, &id).record().await? else { continue };
        let manifest = &record.manifest;
        let fits = manifest.step == step && run.is_none_or(|run| *run == manifest.run);
        if fits && !runs.contains(&manifest.run) {
            runs.push(manifest.run.clone());
            newest.get_or_insert(record);
        }
    }
    if let [first, _, ..] = runs.as_slice() {
        let listed: Vec<_> = runs.iter().map(RunName::as_str).collect();
        return Err(Failure::usage(format!(
            "several runs of model {model} have a step {step}: {}; name one, as with --run {first}",
            listed.join(", ")
        )));
    }
    let what = run.map_or_else(|| format!("step {step}"), |run| format!("step {step} of run {run}"));
    newest.ok_or_else(|| no_job(model, &what))
}

/// The newest job that made a snapshot.
async fn of_snapshot(root: &Root, ages: &Ages, model: &ModelName, text: &str) -> Result<JobRecord> {
    if text.len() < PREFIX_DIGITS || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let shown = shorten(text);
        return Err(Failure::usage(format!(
            "--snapshot: {shown:?} is no snapshot: give its id, or the first {PREFIX_DIGITS} or more digits of it"
        )));
    }
    let mut found = None;
    for id in ages.newest_first(root, model).await? {
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
