//! `jobs show`: all that is known of one job.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use weighbridge_schemas::job::Event;

use super::Which;
use crate::cli::Context;
use crate::cli::channels::seconds;
use crate::cli::output::{ago, bytes, error_cell, lines, plain, table};
use crate::clock::{self, between};
use crate::error::Result;
use crate::operations::jobs::{self, Known};

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
        let root = context.root_of_jobs()?;
        let record = jobs::get(&root, &self.which.job, self.which.model.as_ref()).await?;
        let job = Known::read(&root, record, EVENTS).await?;
        context.output.listing(&document(&job), || text(&job));
        Ok(ExitCode::SUCCESS)
    }
}

fn document(job: &Known) -> Value {
    let manifest = &job.record.manifest;
    let plan = job.plan.as_ref().map(|plan| {
        let (done, all) = job.converted(plan);
        let parts = (0u64..).zip(&plan.parts).map(|(part, range)| {
            json!({
                "part": part, "first": range.first, "count": range.count, "bytes": range.bytes,
                "done": job.parts_done.contains(&part),
            })
        });
        json!({
            "fingerprint": plan.fingerprint, "rules": plan.rules, "format": plan.format,
            "encoding_version": plan.encoding_version, "bytes": plan.bytes,
            "parts_done": job.parts_done.len(), "bytes_of_parts": all, "bytes_done": done,
            "percent_done": percent(done, all), "parts": parts.collect::<Vec<_>>(),
        })
    });
    let timings: serde_json::Map<_, _> = job
        .timings()
        .into_iter()
        .map(|(stage, time)| (format!("{stage}_seconds"), json!(time.as_secs_f64())))
        .collect();
    let gave_way: Vec<_> =
        job.gave_way.iter().map(|(step, job)| json!({ "job": job, "step": step })).collect();
    json!({
        "job": job.record.job(),
        "model": manifest.model,
        "run": manifest.run,
        "step": manifest.step,
        "channel": job.record.channel,
        "state": job.standing.name(),
        "error": job.standing.error,
        "record": job.record,
        "plan": plan,
        "decision": job.decision,
        "outcome": job.outcome(),
        "gave_way": gave_way,
        "events": job.events,
        "timings": timings,
    })
}

fn text(job: &Known) -> String {
    let mut known = about(job);
    known.extend(course(job));
    let mut text = lines(&known);
    if job.events.is_empty() {
        return text;
    }
    let hidden = job.events.len().saturating_sub(EVENTS_SHOWN);
    let rows: Vec<_> = job.events.iter().skip(hidden).map(event_cells).collect();
    text.push_str(&format!("\n{}", events_table(&rows)));
    if hidden > 0 {
        text.push_str(&format!("{hidden} events before these are shown with --json\n"));
    }
    text
}

/// What is published, and who wants it.
fn about(job: &Known) -> Vec<(&'static str, String)> {
    let (record, manifest) = (&job.record, &job.record.manifest);
    let age = ago(between(record.accepted_at, clock::now()));
    let mut known = vec![
        ("job", record.job().to_string()),
        ("model", format!("{}, run {}, step {}", manifest.model, manifest.run, manifest.step)),
        ("channel", record.channel.to_string()),
        ("state", job.standing.text()),
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
fn course(job: &Known) -> Vec<(&'static str, String)> {
    let mut known = Vec::new();
    if let Some(plan) = &job.plan {
        let (done, all) = job.converted(plan);
        let (parts_done, parts) = (job.parts_done.len(), plan.parts.len());
        known.push(("plan", format!("{} in {parts} parts ({})", bytes(plan.bytes), plan.format.as_str())));
        let percent = percent(done, all);
        known.push(("done", format!("{parts_done}/{parts} parts, {}, {percent} %", bytes(done))));
    }
    if let Some(decision) = &job.decision {
        known.push(("decision", format!("{}, by {}", word(decision.decision), plain(&decision.who))));
    }
    if let Some(outcome) = job.outcome() {
        let when = seconds(&outcome.when.to_string());
        known.push(("outcome", format!("{}, {when}, by {}", outcome.outcome.as_str(), plain(&outcome.who))));
        known.extend(outcome.snapshot.map(|snapshot| ("snapshot", snapshot.to_string())));
        known.extend(outcome.sequence.map(|sequence| ("entry", format!("{sequence} of the channel's log"))));
        known.extend(outcome.by.as_ref().map(|by| ("gave way to", by.to_string())));
        let (stored, reused) = (bytes(outcome.bytes_stored), bytes(outcome.bytes_reused));
        known.push(("store", format!("{stored} new, {reused} there already")));
    }
    if let Some(error) = &job.standing.error {
        known.push(("error", plain(&format!("{}: {}", error.class, error.message))));
    }
    for (step, job) in &job.gave_way {
        known.push(("gave way to it", format!("{job}, step {step}")));
    }
    for (stage, time) in job.timings() {
        known.push(("took", format!("{:.2} s  {}", time.as_secs_f64(), stage.replace('_', " "))));
    }
    known
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
