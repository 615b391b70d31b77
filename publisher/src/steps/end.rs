//! How jobs end: outcomes, dead letters, and those that gave way to a job which ended unpublished.
//!
//! Before an outcome there is a decision, put only if absent: so a job that was cancelled is not published, one that
//! is being published is not cancelled, and no worker that comes late revives anything.

use std::cmp::Reverse;

use weighbridge_queue::message::{Device, Kind};
use weighbridge_queue::{Lease, Queue};
use weighbridge_schemas::canonical;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::dead::{Body, DeadLetter, DeadSchema};
use weighbridge_schemas::error::Kind as ErrorKind;
use weighbridge_schemas::job::{
    Came, Decided, Decision, DecisionSchema, Document, Ended, JobId, JobRecord, Outcome, OutcomeSchema,
    Republish, RepublishSchema, Step, StepKind, Why,
};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::dead;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::{Put, Root};

use super::{Steps, Verdict, messages, why};
use crate::clock;
use crate::error::{Failure, Result};

/// How many jobs that stood behind a job are followed back.
const REPEATS: usize = 16;

/// A dead letter of no job, by this worker.
fn letter(steps: &Steps, body: Body, error: Why, model: Option<ModelName>) -> DeadLetter {
    DeadLetter {
        schema: DeadSchema::V1,
        body,
        error,
        model,
        job: None,
        history: Vec::new(),
        who: steps.options.who.clone(),
        when: clock::now(),
    }
}

/// Puts a dead letter, unless it is there, and counts it.
async fn post(steps: &Steps, id: &str, letter: &DeadLetter) -> Result<()> {
    if dead::put(&steps.root, id, letter).await? == Put::Written {
        steps.metrics.dead_letter();
    }
    Ok(())
}

/// A message that is no job becomes a dead letter, named after what it holds.
pub(super) async fn bury(
    steps: &Steps,
    lease: &Lease,
    record: Option<&JobRecord>,
    failure: &Failure,
) -> Result<Verdict> {
    let id = dead::id_of(&lease.message.body);
    let model = record.map(|record| record.manifest.model.clone());
    post(steps, &id, &letter(steps, Body(lease.message.body.clone()), why(failure), model)).await?;
    tracing::error!(message = %lease.message.id, letter = %id, error = %failure, "a message is dead");
    Ok(Verdict::Done)
}

/// A message that cannot be handled, since what lies in the store about it is damaged, becomes a dead letter; its job
/// ends, as far as that can still be said.
pub(super) async fn give_up(steps: &Steps, lease: &Lease, failure: &Failure) -> Result<Verdict> {
    let step = match lease.message.kind {
        Kind::Step => Step::parse(&lease.message.body).ok(),
        Kind::Checkpoint | Kind::Republish => None,
    };
    let Some(step) = step else { return bury(steps, lease, None, failure).await };
    let job = Job::new(&steps.root, &step.model, &step.job);
    let body = Body(lease.message.body.clone());
    let letter = DeadLetter {
        job: Some(step.job.clone()),
        history: job.events(limits::DEAD_HISTORY).await?,
        ..letter(steps, body, why(failure), Some(step.model.clone()))
    };
    post(steps, step.job.as_str(), &letter).await?;
    tracing::error!(job = %step.job, class = failure.class, error = %failure, "a job is given up");
    let decided = match job.put_decision(&decision(steps, Decided::Dead)).await {
        Ok(settled) => settled.ruling,
        // Nobody can read it, and so nobody goes by it.
        Err(error) if error.kind() == ErrorKind::Permanent => decision(steps, Decided::Dead),
        Err(error) => return Err(error.into()),
    };
    let outcome = match decided.decision {
        Decided::Cancelled => outcome(&decided.who, Ended::Cancelled),
        Decided::Coalesced => Outcome { by: decided.by, ..outcome(&decided.who, Ended::Coalesced) },
        // Somebody else takes it to its end.
        Decided::Proceed if step.step != StepKind::Finish => return Ok(Verdict::Done),
        Decided::Proceed | Decided::Dead => dead_outcome(steps, letter.error),
    };
    match job.put_outcome(&outcome).await {
        Ok(settled) if settled.put == Put::Written => steps.metrics.job_ended(settled.ruling.outcome),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Permanent => {
            tracing::error!(job = %step.job, %error, "its end cannot be written");
        }
        Err(error) => return Err(error.into()),
    }
    steps.plans.forget(&step.job);
    Ok(Verdict::Done)
}

/// A decision by this worker.
pub(super) fn decision(steps: &Steps, decided: Decided) -> Decision {
    Decision {
        schema: DecisionSchema::V1,
        decision: decided,
        by: None,
        who: steps.options.who.clone(),
        when: clock::now(),
    }
}

/// A job that cannot be published becomes a dead letter, and ends; unless it was decided otherwise meanwhile.
pub(super) async fn die(steps: &Steps, record: &JobRecord, step: StepKind, error: Why) -> Result<Verdict> {
    let (model, id) = (&record.manifest.model, record.job());
    let job = Job::new(&steps.root, model, &id);
    let body = record.dropped.clone().unwrap_or_else(|| Body(canonical::bytes(&record.manifest)));
    let letter = DeadLetter {
        job: Some(id.clone()),
        history: job.events(limits::DEAD_HISTORY).await?,
        ..letter(steps, body, error, Some(model.clone()))
    };
    post(steps, id.as_str(), &letter).await?;
    let ruling = job.put_decision(&decision(steps, Decided::Dead)).await?.ruling;
    if ruling.decision != Decided::Proceed {
        carry_out(steps, record, &ruling).await?;
    } else if step == StepKind::Finish {
        // It was to be published, and cannot be.
        end(steps, record, &dead_outcome(steps, letter.error)).await?;
    }
    steps.plans.forget(&id);
    Ok(Verdict::Done)
}

fn dead_outcome(steps: &Steps, error: Why) -> Outcome {
    Outcome { error: Some(error), ..outcome(&steps.options.who, Ended::Dead) }
}

fn outcome(who: &str, outcome: Ended) -> Outcome {
    Outcome {
        schema: OutcomeSchema::V1,
        outcome,
        snapshot: None,
        sequence: None,
        by: None,
        error: None,
        bytes_stored: 0,
        bytes_reused: 0,
        who: who.to_owned(),
        when: clock::now(),
    }
}

/// Writes the outcome that a decision against publishing leads to.
pub(super) async fn carry_out(steps: &Steps, record: &JobRecord, decision: &Decision) -> Result<()> {
    let outcome = match decision.decision {
        Decided::Proceed => return Ok(()),
        Decided::Cancelled => outcome(&decision.who, Ended::Cancelled),
        Decided::Coalesced => Outcome { by: decision.by.clone(), ..outcome(&decision.who, Ended::Coalesced) },
        Decided::Dead => {
            let letter = dead::get(&steps.root, record.job().as_str()).await?;
            dead_outcome(steps, letter.error)
        }
    };
    end(steps, record, &outcome).await
}

/// Writes a job's outcome, unless it has one; then sees to those that gave way to it.
pub(super) async fn end(steps: &Steps, record: &JobRecord, outcome: &Outcome) -> Result<()> {
    let id = record.job();
    let settled = Job::new(&steps.root, &record.manifest.model, &id).put_outcome(outcome).await?;
    let ruling = settled.ruling;
    if settled.put == Put::Written {
        steps.metrics.job_ended(ruling.outcome);
        tracing::info!(
            job = %id, model = %record.manifest.model, step = record.manifest.step,
            outcome = ruling.outcome.as_str(), snapshot = ruling.snapshot.map(tracing::field::display),
            traceparent = record.manifest.traceparent, "ended"
        );
    }
    follow(&steps.root, &*steps.queue, record, &ruling).await
}

/// What an outcome means for other jobs.
async fn follow(root: &Root, queue: &dyn Queue, record: &JobRecord, outcome: &Outcome) -> Result<()> {
    if outcome.outcome.leaves_a_gap() {
        return queue_again(root, queue, record).await;
    }
    let Some(other) = &outcome.by else { return Ok(()) };
    // The job that this one gave way to may have ended before it could know of this one.
    let other = Job::new(root, &record.manifest.model, other);
    let ended = other.outcome().await?;
    match (ended, other.record().await?) {
        (Some(ended), Some(other)) if ended.outcome.leaves_a_gap() => queue_again(root, queue, &other).await,
        _ => Ok(()),
    }
}

/// Those that gave way to a job which waits for its checkpoint need not wait with it.
pub(super) async fn let_go_again(steps: &Steps, record: &JobRecord) -> Result<()> {
    queue_again(&steps.root, &*steps.queue, record).await
}

/// Queues the newest job again that gave way to `record`'s, or to one that stood behind it, and has not been tried
/// again in vain. It gets an id that follows from both, so that it is queued once, whoever does it and how often.
async fn queue_again(root: &Root, queue: &dyn Queue, record: &JobRecord) -> Result<()> {
    let model = &record.manifest.model;
    for (step, other, to) in gave_way(root, record).await? {
        let again = other.again_after(&to);
        let job = Job::new(root, model, &again);
        if job.record().await?.is_some() {
            if is_in_vain(&job).await? {
                continue;
            }
            return Ok(());
        }
        let Some(before) = Job::new(root, model, &other).record().await? else { continue };
        let request = Republish {
            schema: RepublishSchema::V1,
            manifest: CheckpointManifest { id: again.to_string(), ..before.manifest },
            repeats: Some(other.clone()),
            promote: before.promote,
            requested_by: None,
        };
        queue.send(&messages::republish(&request)).await?;
        tracing::info!(job = %other, %model, step, after = %to, %again, "queued again");
        return Ok(());
    }
    Ok(())
}

/// Whether a job that goes again has ended unpublished itself, or waits for its checkpoint.
async fn is_in_vain(job: &Job<'_>) -> Result<bool> {
    if let Some(outcome) = job.outcome().await? {
        return Ok(outcome.outcome.leaves_a_gap());
    }
    Ok(job.events(1).await?.last().is_some_and(|event| event.came == Came::NotReady))
}

/// The jobs that gave way, the newest step first, each with its step and the one that it gave way to: `record`'s, one
/// that it repeats, or one that these gave way to themselves.
async fn gave_way(root: &Root, record: &JobRecord) -> Result<Vec<(u64, JobId, JobId)>> {
    let model = &record.manifest.model;
    let mut behind = vec![(record.job(), record.repeats.clone().filter(|_| record.requested_by.is_none()))];
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((id, repeats)) = behind.get(at).cloned().filter(|_| at < REPEATS) {
        at += 1;
        let job = Job::new(root, model, &id);
        let gave_way_to = job.decision().await?.and_then(|decision| decision.by);
        for (step, other) in job.gave_way().await? {
            let decision = Job::new(root, model, &other).decision().await?;
            let to_this = |decision: Decision| {
                decision.decision == Decided::Coalesced && decision.by.as_ref() == Some(&id)
            };
            if decision.is_some_and(to_this) {
                found.push((step, other, id.clone()));
            }
        }
        for next in [repeats, gave_way_to].into_iter().flatten() {
            if behind.iter().any(|(known, _)| *known == next) {
                continue;
            }
            let record = Job::new(root, model, &next).record().await?;
            // An operator's repetition stands for itself.
            let repeats =
                record.filter(|record| record.requested_by.is_none()).and_then(|record| record.repeats);
            behind.push((next, repeats));
        }
    }
    found.sort_by_key(|(step, ..)| Reverse(*step));
    Ok(found)
}

/// Ends a job, as an operator asks for. A job that has ended, or is going onto its channel, stays as it is; what rules
/// is given.
///
/// # Errors
/// As the store or the queue fails.
pub async fn cancel(root: &Root, queue: &dyn Queue, record: &JobRecord, who: &str) -> Result<Decided> {
    let id: JobId = record.job();
    let job = Job::new(root, &record.manifest.model, &id);
    let decision = Decision {
        schema: DecisionSchema::V1,
        decision: Decided::Cancelled,
        by: None,
        who: who.to_owned(),
        when: clock::now(),
    };
    let ruling = job.put_decision(&decision).await?.ruling;
    if ruling.decision == Decided::Cancelled {
        let ended = job.put_outcome(&outcome(who, Ended::Cancelled)).await?.ruling;
        follow(root, queue, record, &ended).await?;
    }
    Ok(ruling.decision)
}

/// Asks for the next step of a job that has not ended, as if its messages had been lost; says whether there was any. A
/// message that is there still, or a step that is done twice, changes nothing.
///
/// # Errors
/// As the store or the queue fails.
pub async fn resume(root: &Root, queue: &dyn Queue, record: &JobRecord) -> Result<bool> {
    let id = record.job();
    let job = Job::new(root, &record.manifest.model, &id);
    if job.has_ended().await? {
        return Ok(false);
    }
    let decision = job.decision().await?;
    let proceeds = decision.is_some_and(|decision| decision.decision == Decided::Proceed);
    let step = if proceeds { StepKind::Finish } else { StepKind::Plan };
    queue.send(&messages::step(record, step, None, Device::Any)).await?;
    Ok(true)
}
