//! All that is known of one job.

use std::collections::BTreeSet;
use std::time::Duration;

use weighbridge_schemas::job::{Came, Decision, Event, JobId, JobPlan, JobRecord, Outcome, StepKind};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Root;

use super::Standing;
use crate::clock::between;
use crate::error::Result;

/// All that is known of a job.
#[derive(Debug)]
pub struct Known {
    /// What it publishes.
    pub record: JobRecord,
    /// How far it has got.
    pub standing: Standing,
    /// Its plan.
    pub plan: Option<JobPlan>,
    /// The parts that have results.
    pub parts_done: BTreeSet<u64>,
    /// What was decided of it.
    pub decision: Option<Decision>,
    /// The jobs that gave way to it, with their steps.
    pub gave_way: Vec<(u64, JobId)>,
    /// What workers did, the oldest first.
    pub events: Vec<Event>,
}

impl Known {
    /// Reads it; of events at most the newest `events`.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn read(root: &Root, record: JobRecord, events: usize) -> Result<Self> {
        let id = record.job();
        let job = Job::new(root, &record.manifest.model, &id);
        let standing = Standing::of(&job).await?;
        let (plan, parts_done) = (job.plan().await?, job.parts_done().await?);
        let (decision, gave_way) = (job.decision().await?, job.gave_way().await?);
        let events = job.events(events).await?;
        Ok(Self { record, standing, plan, parts_done, decision, gave_way, events })
    }

    /// How it ended.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.standing.outcome.as_ref()
    }

    /// Bytes of the checkpoint in parts that are done, and in all.
    #[must_use]
    pub fn converted(&self, plan: &JobPlan) -> (u64, u64) {
        let done = (0u64..).zip(&plan.parts).filter(|(part, _)| self.parts_done.contains(part));
        let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
        (sum(&mut done.map(|(_, range)| range.bytes)), sum(&mut plan.parts.iter().map(|range| range.bytes)))
    }

    /// How long the stages took that are over.
    #[must_use]
    pub fn timings(&self) -> Vec<(&'static str, Duration)> {
        let accepted = self.record.accepted_at;
        let ends = |step: StepKind| self.events.iter().filter(move |event| is_end(event, step)).map(ended);
        let began = |step: StepKind| {
            self.events.iter().filter(move |event| event.step == step).map(|event| event.began)
        };
        let mut timings = Vec::new();
        if let Some(planned) = ends(StepKind::Plan).min() {
            timings.push(("accept_to_plan", between(accepted, planned)));
        }
        let all_done = self.plan.as_ref().is_some_and(|plan| plan.parts.len() == self.parts_done.len());
        if let (Some(first), Some(last), true) =
            (began(StepKind::Part).min(), ends(StepKind::Part).max(), all_done)
        {
            timings.push(("conversion", between(first, last)));
        }
        if let (Some(first), Some(last)) = (began(StepKind::Finish).min(), ends(StepKind::Finish).min()) {
            timings.push(("finish", between(first, last)));
        }
        if let Some(outcome) = self.outcome() {
            timings.push(("total", between(accepted, outcome.when)));
        }
        timings
    }
}

fn is_end(event: &Event, step: StepKind) -> bool {
    event.step == step && event.came == Came::Done
}

fn ended(event: &Event) -> Timestamp {
    let took = u64::saturating_mul(event.milliseconds, 1_000_000);
    Timestamp::from_nanoseconds(i128::from(event.began.nanoseconds()) + i128::from(took))
}
