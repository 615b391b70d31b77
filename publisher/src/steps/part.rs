//! One part: its chunks are read, encoded and stored; then there is a result that names them.

use std::ops::Range;
use std::sync::Arc;

use weighbridge_queue::message::Device;
use weighbridge_schemas::encoding::ENCODING_VERSION;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::{JobPlan, JobRecord, PartChunk, PartResult, PartSchema, StepKind};
use weighbridge_schemas::policy::Policy;
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::jobs::Job;

use super::{Stepped, Steps, Trouble, messages, statistics};
use crate::error::{Exit, Failure, Result};
use crate::job::plan::Plan;
use crate::job::{accept, convert};

/// Nobody watches: what a part has done shows when it is done.
pub(super) fn unwatched() -> Arc<dyn Progress> {
    Arc::new(())
}

/// Converts part number `part`, unless it has a result already.
pub(super) async fn part(
    steps: &Steps,
    record: &JobRecord,
    policy: &Policy,
    part: u64,
) -> std::result::Result<Stepped, Trouble> {
    let (model, id) = (&record.manifest.model, record.job());
    let job = Job::new(&steps.root, model, &id);
    let planned = job.plan().await?.ok_or_else(|| Failure::internal("converting", "the plan is gone"))?;
    let range = usize::try_from(part).ok().and_then(|part| planned.parts.get(part)).copied();
    let range = range.ok_or_else(|| Failure::usage(format!("job {id} has no part {part}")))?;
    if job.part(&planned, part).await?.is_none() {
        check_length(steps, part, range.bytes)?;
        let plan = plan_of(steps, record, policy, &planned).await?;
        let pieces = range_of(&plan, range.first, range.count)?;
        let budget = steps.options.budget;
        let converted = convert::convert(&steps.root, model, &plan, pieces, budget, &unwatched()).await;
        let converted = converted.map_err(|failure| trouble(steps, record, failure))?;
        accept::check_part(&plan).await.map_err(|failure| trouble(steps, record, failure))?;
        let chunks = converted.pieces.iter().map(|(chunk, measured)| PartChunk {
            chunk: *chunk,
            statistics: measured.iter().map(statistics::to_document).collect(),
        });
        let result = PartResult {
            schema: PartSchema::V1,
            fingerprint: planned.fingerprint,
            chunks: chunks.collect(),
            digests: plan.checkpoint.source.partial_digests(),
            bytes_stored: converted.bytes.stored,
            bytes_reused: converted.bytes.reused,
            signatures: Vec::new(),
        };
        job.put_part(&planned, part, &result).await?;
        steps.metrics.converted(range.bytes, converted.bytes);
    }
    let done = job.parts_done().await?;
    if (0..planned.parts.len() as u64).all(|part| done.contains(&part)) {
        steps.queue.send(&messages::step(record, StepKind::Finish, None, Device::Any)).await?;
    }
    Ok(Stepped::Done(range.bytes))
}

/// Refuses a part that may take longer than half the time for which the queue lets a message be held.
fn check_length(steps: &Steps, part: u64, bytes: u64) -> Result<()> {
    let most = steps.most_part_bytes();
    if bytes <= most {
        return Ok(());
    }
    let hold = steps.queue.longest_hold().unwrap_or_default().as_secs();
    Err(Failure {
        kind: Kind::Permanent,
        class: "part_too_long",
        message: format!(
            "part {part} has {bytes} bytes of the checkpoint; at 16 MiB a second it might take more than half of the \
             {hold} s for which the broker lets a message be held: raise the broker's consumer_timeout, and \
             delivery_timeout in the queue's URL; or publish it again with --part-size {most} or less"
        ),
        exit: Exit::Failed,
    })
}

/// The pieces of a range, which came from the store.
fn range_of(plan: &Plan, first: u64, count: u64) -> Result<Range<usize>> {
    let end = first.checked_add(count).and_then(|end| usize::try_from(end).ok());
    let range = end.zip(usize::try_from(first).ok()).map(|(end, first)| first..end);
    range.filter(|range| range.end <= plan.pieces.len()).ok_or_else(|| {
        Failure::usage("the job's plan names chunks that its checkpoint does not have; publish it again")
    })
}

/// What went wrong in reading, or elsewhere. A plan that reading failed under is made anew the next time.
pub(super) fn trouble(steps: &Steps, record: &JobRecord, failure: Failure) -> Trouble {
    if matches!(failure.exit, Exit::BadCheckpoint | Exit::NotFound) {
        steps.plans.forget(&record.job());
        return Trouble::Checkpoint(failure);
    }
    Trouble::Other(failure)
}

/// The plan that the job was planned with; an error where the checkpoint is no longer what it was then.
pub(super) async fn plan_of(
    steps: &Steps,
    record: &JobRecord,
    policy: &Policy,
    planned: &JobPlan,
) -> std::result::Result<Arc<Plan>, Trouble> {
    if planned.encoding_version != ENCODING_VERSION {
        return Err(Trouble::Other(Failure {
            kind: Kind::Transient,
            class: "encoding_version",
            message: format!(
                "the job was planned with encodings of version {}, and this worker has version {ENCODING_VERSION}; \
                 one of that version has to take it, or the checkpoint be published again",
                planned.encoding_version
            ),
            exit: Exit::Failed,
        }));
    }
    let plan = match steps.plans.of(&record.job()) {
        Some(plan) => {
            accept::check_part(&plan).await.map_err(|failure| trouble(steps, record, failure))?;
            plan
        }
        None => {
            let plan = steps.plans.make(&steps.root, record, policy, steps.options.budget).await;
            plan.map_err(|failure| trouble(steps, record, failure))?
        }
    };
    let chunks = planned.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.count));
    let same = plan.checkpoint.fingerprint == planned.fingerprint
        && plan.rules == planned.rules
        && plan.pieces.len() as u64 == chunks;
    if same {
        return Ok(plan);
    }
    steps.plans.forget(&record.job());
    Err(Trouble::Other(Failure {
        kind: Kind::Permanent,
        class: "checkpoint_changed",
        message: format!(
            "{}: it is not the checkpoint any more that the job was planned for; drop it again once nobody writes \
             to it",
            record.manifest.location
        ),
        exit: Exit::BadCheckpoint,
    }))
}
