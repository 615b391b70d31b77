//! The job is let in, its checkpoint listed from its metadata alone, and cut into parts; or it gives way to a newer
//! step of its run that is queued behind it.

use std::sync::Arc;

use weighbridge_queue::message::Device;
use weighbridge_schemas::encoding::ENCODING_VERSION;
use weighbridge_schemas::job::{
    Came, Decided, Decision, JobId, JobPlan, JobRecord, PartRange, PlanSchema, StepKind,
};
use weighbridge_schemas::limits;
use weighbridge_schemas::policy::Policy;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::{Admission, Job, admit, has_room};

use super::{Stepped, Steps, Trouble, end, messages};
use crate::error::{Failure, Result};
use crate::job::plan::Plan;

/// Most later jobs that are looked at.
const LATER: usize = 100;

/// Plans a job, and asks for its parts.
pub(super) async fn plan(
    steps: &Steps,
    record: &JobRecord,
    policy: &Policy,
) -> std::result::Result<Stepped, Trouble> {
    let (model, id) = (&record.manifest.model, record.job());
    let job = Job::new(&steps.root, model, &id);
    if let Some(planned) = job.plan().await? {
        send_parts(steps, record, policy, &planned).await?;
        return Ok(Stepped::Done(0));
    }
    if policy.channel.latest_wins
        && record.requested_by.is_none()
        && let Some(newer) = newer(&job, steps, record).await?
    {
        give_way(steps, record, &newer).await?;
        return Ok(Stepped::Done(0));
    }
    let cap = steps.options.jobs_per_model;
    // Before the checkpoint is listed: many may wait for their turn, again and again.
    if has_room(&steps.root, model, &id, cap).await? == Admission::Full {
        return Ok(Stepped::Waits);
    }
    let plan = steps.plans.make(&steps.root, record, policy, steps.options.budget).await;
    let plan = plan.map_err(Trouble::Checkpoint)?;
    if admit(&steps.root, model, &id, cap).await? == Admission::Full {
        return Ok(Stepped::Waits);
    }
    let document = JobPlan {
        schema: PlanSchema::V1,
        fingerprint: plan.checkpoint.fingerprint,
        rules: plan.rules,
        encoding_version: ENCODING_VERSION,
        format: plan.checkpoint.format,
        bytes: plan.source_bytes(),
        parts: parts(&plan, steps.options.part_bytes.min(steps.most_part_bytes()))?,
    };
    tracing::info!(
        tensors = plan.tensors.len(),
        chunks = plan.pieces.len(),
        parts = document.parts.len(),
        bytes = document.bytes,
        "planned"
    );
    let planned = job.put_plan(&document).await?.ruling;
    send_parts(steps, record, policy, &planned).await?;
    Ok(Stepped::Done(0))
}

/// Runs of chunks, each of about `most` bytes of the checkpoint, and of a bounded number of runs of rows.
fn parts(plan: &Arc<Plan>, most: u64) -> Result<Vec<PartRange>> {
    let mut parts: Vec<PartRange> = Vec::new();
    let (mut count, mut bytes, mut runs) = (0, 0u64, 0u64);
    let mut first = 0;
    for (at, piece) in plan.pieces.iter().enumerate() {
        let (size, piece_runs) = (plan.piece_source_bytes(piece), piece.parts.len() as u64);
        let full = bytes.saturating_add(size) > most || runs + piece_runs > limits::PART_RUNS;
        if count > 0 && full {
            parts.push(PartRange { first, count, bytes });
            (first, count, bytes, runs) = (at as u64, 0, 0, 0);
        }
        (count, bytes, runs) = (count + 1, bytes.saturating_add(size), runs + piece_runs);
    }
    if count > 0 {
        parts.push(PartRange { first, count, bytes });
    }
    if parts.len() as u64 > limits::PARTS {
        let why = format!(
            "the checkpoint would be cut into {} parts; at most {}; raise part_size",
            parts.len(),
            limits::PARTS
        );
        return Err(Failure::usage(why));
    }
    Ok(parts)
}

/// Asks for the parts that have no result yet; where there are none, for the end.
async fn send_parts(steps: &Steps, record: &JobRecord, policy: &Policy, planned: &JobPlan) -> Result<()> {
    let id = record.job();
    let done = Job::new(&steps.root, &record.manifest.model, &id).parts_done().await?;
    let parts = planned.parts.len() as u64;
    let mut missing = (0..parts).filter(|part| !done.contains(part)).peekable();
    if missing.peek().is_none() {
        steps.queue.send(&messages::step(record, StepKind::Finish, None, Device::Any)).await?;
        return Ok(());
    }
    let device = messages::device(&policy.job);
    for part in missing {
        steps.queue.send(&messages::step(record, StepKind::Part, Some(part), device)).await?;
    }
    Ok(())
}

/// The newest job of a later step that is on its way, if there is one. One that waits for its checkpoint is not, nor is
/// one of which that cannot be told.
async fn newer(job: &Job<'_>, steps: &Steps, record: &JobRecord) -> Result<Option<JobId>> {
    for (_, id) in job.later(record, LATER).await? {
        match is_on_its_way(&Job::new(&steps.root, &record.manifest.model, &id)).await {
            Ok(true) => return Ok(Some(id)),
            Ok(false) => {}
            Err(error) if error.class() == Class::Integrity => tracing::warn!(%error, "a job is passed over"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

async fn is_on_its_way(job: &Job<'_>) -> std::result::Result<bool, StoreError> {
    Ok(!job.has_ended().await?
        && job.decision().await?.is_none_or(|decision| decision.decision == Decided::Proceed)
        && job.events(1).await?.last().is_none_or(|event| event.came != Came::NotReady))
}

/// Ends the job in favour of `newer`. The note that it gave way comes first: should `newer` end unpublished at this
/// very moment, either it finds the note, or this finds its outcome.
async fn give_way(steps: &Steps, record: &JobRecord, newer: &JobId) -> Result<()> {
    let (model, id) = (&record.manifest.model, record.job());
    let job = Job::new(&steps.root, model, &id);
    job.give_way(newer, record.manifest.step).await?;
    let decision = Decision { by: Some(newer.clone()), ..end::decision(steps, Decided::Coalesced) };
    let ruling = job.put_decision(&decision).await?.ruling;
    if ruling.decision == Decided::Proceed {
        return Ok(());
    }
    end::carry_out(steps, record, &ruling).await
}
