//! A manifest becomes a job, once for each id; and what is no manifest becomes a dead letter.

use weighbridge_queue::Lease;
use weighbridge_queue::message::Device;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::dead::Body;
use weighbridge_schemas::job::{Document, JobId, JobRecord, RecordSchema, Republish, StepKind};
use weighbridge_schemas::policy::{DEFAULT_POLICY, Policy};
use weighbridge_snapshots::jobs::Job;

use super::{MOST_ABANDONED, Stepped, Steps, Trouble, Verdict, abandoned, end, messages, why};
use crate::clock;
use crate::error::{Failure, Result};
use crate::policies::{self, Resolved};

/// Takes what a trainer dropped.
pub(super) async fn checkpoint(steps: &Steps, lease: &Lease) -> Result<Verdict> {
    match CheckpointManifest::parse(&lease.message.body) {
        Ok(manifest) => {
            let dropped = Some(Body(lease.message.body.clone()));
            accept(steps, lease, Wanted { manifest, dropped, repeats: None, promote: false, who: None }).await
        }
        Err(error) => end::bury(steps, lease, None, &error.into()).await,
    }
}

/// Takes an operator's request to publish again.
pub(super) async fn republish(steps: &Steps, lease: &Lease) -> Result<Verdict> {
    match Republish::parse(&lease.message.body) {
        Ok(request) => {
            let Republish { manifest, repeats, promote, requested_by, .. } = request;
            let wanted = Wanted { manifest, dropped: None, repeats, promote, who: requested_by };
            accept(steps, lease, wanted).await
        }
        Err(error) => end::bury(steps, lease, None, &error.into()).await,
    }
}

/// What is to be published.
struct Wanted {
    manifest: CheckpointManifest,
    /// Its bytes, as they were dropped.
    dropped: Option<Body>,
    repeats: Option<JobId>,
    promote: bool,
    who: Option<String>,
}

async fn accept(steps: &Steps, lease: &Lease, wanted: Wanted) -> Result<Verdict> {
    let manifest = wanted.manifest;
    let (model, id) = (manifest.model.clone(), manifest.id.parse::<JobId>()?);
    let resolved = policies::resolve(Some(&steps.root), &model, manifest.policy.as_ref()).await?;
    let refused = resolved.as_ref().err().cloned();
    let unresolved = || Resolved { text: DEFAULT_POLICY.to_owned(), from: "unresolved".to_owned() };
    let Resolved { text, from } = resolved.unwrap_or_else(|_| unresolved());
    let channel = match &manifest.channel {
        Some(name) => name.clone(),
        None => Policy::parse(&text)?.channel.name,
    };
    let record = JobRecord {
        schema: RecordSchema::V1,
        manifest,
        dropped: wanted.dropped,
        policy: text,
        policy_from: from,
        channel,
        promote: wanted.promote,
        repeats: wanted.repeats,
        requested_by: wanted.who,
        accepted_at: clock::now(),
    };
    let job = Job::new(&steps.root, &model, &id);
    let ruling = job.put_record(&record).await?.ruling;
    if ruling.manifest != record.manifest {
        let why =
            format!("the id {id} was used before, for another manifest of model {model}; give it its own");
        return end::bury(steps, lease, Some(&record), &Failure::usage(why)).await;
    }
    if job.has_ended().await? {
        tracing::info!(job = %id, "dropped again: it has ended already");
        return Ok(Verdict::Done);
    }
    if lease.abandoned >= MOST_ABANDONED {
        let why = why(&abandoned());
        return end::die(steps, &ruling, StepKind::Accept, why).await;
    }
    let allowed = steps.options.sources.checked(&ruling.manifest.location).await;
    if let Err(failure) = refused.map_or(Ok(()), Err).and(allowed) {
        return end::die(steps, &ruling, StepKind::Accept, why(&failure)).await;
    }
    tracing::info!(
        job = %id, %model, run = %ruling.manifest.run, step = ruling.manifest.step,
        traceparent = ruling.manifest.traceparent, "accepted"
    );
    again(steps, &ruling).await.map_err(|trouble| match trouble {
        Trouble::Checkpoint(failure) | Trouble::Other(failure) => failure,
    })?;
    Ok(Verdict::Done)
}

/// What follows a record: it is noted beside the others of its run, and is to be planned.
pub(super) async fn again(steps: &Steps, record: &JobRecord) -> std::result::Result<Stepped, Trouble> {
    let id = record.job();
    if record.requested_by.is_none() {
        Job::new(&steps.root, &record.manifest.model, &id).note_order(record).await?;
    }
    steps.queue.send(&messages::step(record, StepKind::Plan, None, Device::Any)).await?;
    Ok(Stepped::Done(0))
}
