//! `jobs show`: all that is known of one job.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use weighbridge_schemas::job::{Came, Decision, Event, JobId, JobPlan, JobRecord, Outcome, StepKind};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::{Absent, Root};

use super::find::Which;
use super::standing::Standing;
use crate::cli::Context;
use crate::cli::channels::seconds;
use crate::cli::output::{ago, between, bytes, error_cell, lines, plain, table};
use crate::clock;
use crate::error::Result;

/// Most events that are read, the newest.
const EVENTS: usize = 10_000;
/// Most events that are shown to people, the newest.
const EVENTS_SHOWN: usize = 40;

/// Show all that is known of a job: manifest, policy, plan, parts, decision, outcome, and what workers did.
///
/// Times are by the clocks of those who noted them.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge jobs show 0f8fad")]
pub(super) struct Show {
    #[command(flatten)]
    which: Which,
}

impl Show {
    pub(super) async fn run(&self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let record = self.which.get(&root).await?;
        let known = Known::read(&root, record).await?;
        context.output.listing(&known.document(), || known.text());
        Ok(ExitCode::SUCCESS)
    }
}

/// All that is known of a job.
struct Known {
    record: JobRecord,
    standing: Standing,
    plan: Option<JobPlan>,
    parts_done: BTreeSet<u64>,
    decision: Option<Decision>,
    gave_way: Vec<(u64, JobId)>,
    events: Vec<Event>,
}

impl Known {
    async fn read(root: &Root, record: JobRecord) -> Result<Self> {
        let id = record.job();
        let job = Job::new(root, &record.manifest.model, &id);
        let standing = Standing::of(&job).await?;
        let (plan, parts_done) = (job.plan().await?, job.parts_done().await?);
        let (decision, gave_way) = (job.decision().await?, job.gave_way().await?);
        let events = job.events(EVENTS).await?;
        Ok(Self { record, standing, plan, parts_done, decision, gave_way, events })
    }

    fn outcome(&self) -> Option<&Outcome> {
        self.standing.outcome.as_ref()
    }

    /// Bytes of the checkpoint in parts that are done, and in all.
    fn converted(&self, plan: &JobPlan) -> (u64, u64) {
        let done = (0u64..).zip(&plan.parts).filter(|(part, _)| self.parts_done.contains(part));
        let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
        (sum(&mut done.map(|(_, range)| range.bytes)), sum(&mut plan.parts.iter().map(|range| range.bytes)))
    }

    fn document(&self) -> Value {
        let manifest = &self.record.manifest;
        let plan = self.plan.as_ref().map(|plan| {
            let (done, all) = self.converted(plan);
            let parts = (0u64..).zip(&plan.parts).map(|(part, range)| {
                json!({
                    "part": part, "first": range.first, "count": range.count, "bytes": range.bytes,
                    "done": self.parts_done.contains(&part),
                })
            });
            json!({
                "fingerprint": plan.fingerprint, "rules": plan.rules, "format": plan.format,
                "encoding_version": plan.encoding_version, "bytes": plan.bytes,
                "parts_done": self.parts_done.len(), "bytes_of_parts": all, "bytes_done": done,
                "percent_done": percent(done, all), "parts": parts.collect::<Vec<_>>(),
            })
        });
        let timings: serde_json::Map<_, _> = self
            .timings()
            .into_iter()
            .map(|(stage, time)| (format!("{stage}_seconds"), json!(time.as_secs_f64())))
            .collect();
        let gave_way: Vec<_> =
            self.gave_way.iter().map(|(step, job)| json!({ "job": job, "step": step })).collect();
        json!({
            "job": self.record.job(),
            "model": manifest.model,
            "run": manifest.run,
            "step": manifest.step,
            "channel": self.record.channel,
            "state": self.standing.name(),
            "error": self.standing.error,
            "record": self.record,
            "plan": plan,
            "decision": self.decision,
            "outcome": self.outcome(),
            "gave_way": gave_way,
            "events": self.events,
            "timings": timings,
        })
    }

    /// How long the stages took that are over.
    fn timings(&self) -> Vec<(&'static str, Duration)> {
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

    fn text(&self) -> String {
        let mut known = self.about();
        known.extend(self.course());
        let mut text = lines(&known);
        if self.events.is_empty() {
            return text;
        }
        let hidden = self.events.len().saturating_sub(EVENTS_SHOWN);
        let rows: Vec<_> = self.events.iter().skip(hidden).map(event_cells).collect();
        text.push_str(&format!("\n{}", events_table(&rows)));
        if hidden > 0 {
            text.push_str(&format!("{hidden} events before these are shown with --json\n"));
        }
        text
    }

    /// What is published, and who wants it.
    fn about(&self) -> Vec<(&'static str, String)> {
        let (record, manifest) = (&self.record, &self.record.manifest);
        let age = ago(between(record.accepted_at, clock::now()));
        let mut known = vec![
            ("job", record.job().to_string()),
            ("model", format!("{}, run {}, step {}", manifest.model, manifest.run, manifest.step)),
            ("channel", record.channel.to_string()),
            ("state", self.standing.text()),
            ("checkpoint", plain(&manifest.location)),
            ("written", seconds(&manifest.created_at.to_string())),
            ("accepted", format!("{}, {age} ago", seconds(&record.accepted_at.to_string()))),
            ("policy", plain(&record.policy_from)),
            ("priority", manifest.priority.to_string()),
        ];
        if let Some(who) = &record.requested_by {
            known.push(("asked for by", plain(who)));
        }
        if let Some(repeats) = &record.repeats {
            known.push(("repeats", repeats.to_string()));
        }
        if record.promote {
            known.push(("promotes", "moves its channel to an older step too".to_owned()));
        }
        for (label, value) in &manifest.labels {
            known.push(("label", plain(&format!("{label} = {value}"))));
        }
        if let Some(traceparent) = &manifest.traceparent {
            known.push(("traceparent", plain(traceparent)));
        }
        known
    }

    /// How far it has got, and how it ended.
    fn course(&self) -> Vec<(&'static str, String)> {
        let mut known = Vec::new();
        if let Some(plan) = &self.plan {
            let (done, all) = self.converted(plan);
            let (parts_done, parts) = (self.parts_done.len(), plan.parts.len());
            known
                .push(("plan", format!("{} in {parts} parts ({})", bytes(plan.bytes), plan.format.as_str())));
            let percent = percent(done, all);
            known.push(("done", format!("{parts_done}/{parts} parts, {}, {percent} %", bytes(done))));
        }
        if let Some(decision) = &self.decision {
            known.push(("decision", format!("{}, by {}", word(decision.decision), plain(&decision.who))));
        }
        if let Some(outcome) = self.outcome() {
            let when = seconds(&outcome.when.to_string());
            known.push((
                "outcome",
                format!("{}, {when}, by {}", outcome.outcome.as_str(), plain(&outcome.who)),
            ));
            known.extend(outcome.snapshot.map(|snapshot| ("snapshot", snapshot.to_string())));
            known.extend(
                outcome.sequence.map(|sequence| ("entry", format!("{sequence} of the channel's log"))),
            );
            known.extend(outcome.by.as_ref().map(|by| ("gave way to", by.to_string())));
            let (stored, reused) = (bytes(outcome.bytes_stored), bytes(outcome.bytes_reused));
            known.push(("store", format!("{stored} new, {reused} there already")));
        }
        if let Some(error) = &self.standing.error {
            known.push(("error", plain(&format!("{}: {}", error.class, error.message))));
        }
        for (step, job) in &self.gave_way {
            known.push(("gave way to it", format!("{job}, step {step}")));
        }
        for (stage, time) in self.timings() {
            known.push(("took", format!("{:.2} s  {}", time.as_secs_f64(), stage.replace('_', " "))));
        }
        known
    }
}

/// What workers did, a line each.
pub(in crate::cli) fn events_table(rows: &[Vec<String>]) -> String {
    table(&["began", "step", "part", "came", "took", "error", "who"], rows)
}

/// An event as a line of [`events_table`].
pub(in crate::cli) fn event_cells(event: &Event) -> Vec<String> {
    vec![
        seconds(&event.began.to_string()),
        event.step.as_str().to_owned(),
        event.part.map_or("-".to_owned(), |part| part.to_string()),
        word(event.came),
        format!("{} ms", event.milliseconds),
        event.error.as_ref().map(error_cell).unwrap_or_default(),
        plain(&event.who),
    ]
}

/// The stable name of something, as documents have it.
fn word(value: impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

fn is_end(event: &Event, step: StepKind) -> bool {
    event.step == step && event.came == Came::Done
}

fn ended(event: &Event) -> Timestamp {
    let took = u64::saturating_mul(event.milliseconds, 1_000_000);
    Timestamp::from_nanoseconds(i128::from(event.began.nanoseconds()) + i128::from(took))
}

/// How much is done, in whole percent; all of it only when it is.
fn percent(done: u64, all: u64) -> u64 {
    let percent = (u128::from(done) * 100).checked_div(u128::from(all)).unwrap_or(100);
    u64::try_from(percent.min(100)).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_done_only_when_it_is() {
        assert_eq!((percent(0, 0), percent(0, 7), percent(999, 1000)), (100, 0, 99));
        assert_eq!((percent(u64::MAX, u64::MAX), percent(2, 1)), (100, 100));
    }
}
