//! `jobs wait`: until a job has ended.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tokio::time::sleep;

use weighbridge_queue::url;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::{Ended, JobId, JobRecord, Outcome, Why};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::{Absent, Root};

use super::Which;
use crate::cli::Context;
use crate::cli::output::short;
use crate::error::{Exit, Failure, Result, is_of_checkpoint};
use crate::operations::jobs::{self, Standing, State};

/// How long to wait before the store is asked again: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// After which it is said that no worker has accepted the job; and how long finding out more about that may take.
const QUIET: Duration = Duration::from_secs(10);

/// Wait until a job has ended, and tell how.
///
/// A job that no worker has accepted yet is waited for too, since `drop` prints its id before. Exit codes: 0 for
/// published, unchanged, superseded, coalesced and held; 3 for quarantined; 4 for one that is dead because of its
/// checkpoint; 1 for others that are dead, for cancelled, and where the time is over (`timeout`).
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  weighbridge jobs wait 0f8fad5b-d9cb-469f-a165-70867728950e --timeout 600"
)]
pub(super) struct Wait {
    #[command(flatten)]
    which: Which,
    /// How long to wait at most, in seconds [default: as long as it takes].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
}

impl Wait {
    pub(super) async fn run(&self, context: &Context) -> Result<ExitCode> {
        wait(context, &self.which, self.timeout.map(Duration::from_secs)).await
    }
}

/// Waits for a job, at most for `timeout`, and tells how it ended.
pub(in crate::cli) async fn wait(
    context: &Context,
    which: &Which,
    timeout: Option<Duration>,
) -> Result<ExitCode> {
    jobs::check(&which.job)?;
    let started = Instant::now();
    let (mut root, mut found, mut said) = (None, None, false);
    let mut pause = PAUSES.0;
    loop {
        if root.is_none() {
            root = there(context)?;
        }
        if let Some(root) = &root {
            if found.is_none() {
                found = jobs::find(root, &which.job, which.model.as_ref()).await?;
            }
            if let Some((model, id)) = &found
                && let Some(outcome) = Job::new(root, model, id).outcome().await?
            {
                return tell(context, root, model, id, &outcome).await;
            }
        }
        if found.is_none() && !said && started.elapsed() >= QUIET {
            said = true;
            context.output.tell(&unaccepted(ready(context).await));
        }
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(over(root.as_ref(), found.as_ref(), timeout.unwrap_or_default()).await?);
        }
        sleep(left.map_or(pause, |left| left.min(pause))).await;
        pause = pause.mul_f64(1.5).min(PAUSES.1);
    }
}

/// The store, once somebody has made it.
fn there(context: &Context) -> Result<Option<Root>> {
    match context.root(Absent::Refuse) {
        Ok(root) => Ok(Some(root)),
        Err(failure) if failure.exit == Exit::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// How many messages can be taken from the queue; `None` where there is none, or it does not tell.
async fn ready(context: &Context) -> Option<u64> {
    let asked = async {
        if !context.open_queue(url::is_there).await.ok()? {
            return None;
        }
        let depth = context.queue_within(QUIET).await.ok()?.depth().await.ok()?;
        Some(depth.iter().map(|class| class.ready).sum())
    };
    tokio::time::timeout(QUIET, asked).await.ok().flatten()
}

/// What is said to somebody who may wait in vain.
fn unaccepted(ready: Option<u64>) -> String {
    let queue = match ready {
        Some(1) => "1 message is ready on the queue".to_owned(),
        Some(ready) => format!("{ready} messages are ready on the queue"),
        None => "there is no queue, or it does not answer".to_owned(),
    };
    format!("no worker has accepted it yet, {queue}: does `weighbridge serve` or a worker run on it?\n")
}

/// The time is over: what the job is waiting for.
async fn over(root: Option<&Root>, found: Option<&(ModelName, JobId)>, timeout: Duration) -> Result<Failure> {
    let (what, why) = match (root, found) {
        (Some(root), Some((model, id))) => {
            let standing = Standing::of(&Job::new(root, model, id)).await?;
            (format!("job {id} of model {model}"), waits_for(&standing, id))
        }
        (None, _) => (
            "the job".to_owned(),
            "there is no store yet: no worker has started, or --store names \
             another one than theirs"
                .to_owned(),
        ),
        _ => (
            "the job".to_owned(),
            "no worker has accepted it: see that one runs on its queue (`weighbridge queue \
             status`), and that the id is right; `weighbridge dead` lists what could not be read"
                .to_owned(),
        ),
    };
    let message = format!("{what} has not ended after {} s: {why}", timeout.as_secs());
    Ok(Failure { kind: Kind::Transient, class: "timeout", message, exit: Exit::Failed })
}

fn waits_for(standing: &Standing, id: &JobId) -> String {
    let state = match standing.state {
        State::Accepted => {
            "it waits to be planned by a worker, or for its turn among the jobs of its model".to_owned()
        }
        State::Waiting => "it waits for its checkpoint to be complete".to_owned(),
        State::Planned => "its parts wait for workers".to_owned(),
        State::Converting | State::Finishing | State::Ending | State::Ended(_) => standing.text(),
    };
    match &standing.error {
        Some(error) => format!("{state}; what went wrong last: {}", error.message),
        None => format!("{state}; `weighbridge jobs show {}` tells all", short(id)),
    }
}

async fn tell(
    context: &Context,
    root: &Root,
    model: &ModelName,
    id: &JobId,
    outcome: &Outcome,
) -> Result<ExitCode> {
    let record = Job::new(root, model, id).record().await?;
    let mut document = document(model, id, record.as_ref(), outcome);
    let failed = failed(id, outcome);
    if let Some((_, why)) = &failed {
        document["error"] = json!(why);
    }
    context.output.listing(&document, || text(outcome));
    let Some((exit, why)) = failed else { return Ok(ExitCode::SUCCESS) };
    let line = Failure { kind: Kind::Permanent, class: outcome.outcome.as_str(), message: why.message, exit };
    context.output.failure_line(&line);
    Ok(ExitCode::from(exit as u8))
}

fn document(model: &ModelName, id: &JobId, record: Option<&JobRecord>, outcome: &Outcome) -> Value {
    json!({
        "job": id,
        "model": model,
        "run": record.map(|record| &record.manifest.run),
        "step": record.map(|record| record.manifest.step),
        "channel": record.map(|record| &record.channel),
        "repeats": record.and_then(|record| record.repeats.as_ref()),
        "outcome": outcome.outcome,
        "snapshot": outcome.snapshot,
        "sequence": outcome.sequence,
        "by": outcome.by,
        "bytes_stored": outcome.bytes_stored,
        "bytes_reused": outcome.bytes_reused,
        "who": outcome.who,
        "when": outcome.when,
    })
}

fn text(outcome: &Outcome) -> String {
    let more = match (&outcome.snapshot, &outcome.by) {
        (Some(snapshot), _) => format!("  {snapshot}"),
        (None, Some(by)) => format!("  by {by}"),
        (None, None) => String::new(),
    };
    format!("{}{more}\n", outcome.outcome.as_str())
}

/// The exit code and the error of a job that did not end well.
fn failed(id: &JobId, outcome: &Outcome) -> Option<(Exit, Why)> {
    let given =
        |class: &str, message: String| Why { kind: "permanent".to_owned(), class: class.to_owned(), message };
    let name = outcome.outcome.as_str();
    let why = || match &outcome.error {
        Some(why) => Why { message: format!("job {id} is {name}: {}", why.message), ..why.clone() },
        None => given(name, format!("job {id} is {name}; `weighbridge jobs show {id}` tells all")),
    };
    match outcome.outcome {
        Ended::Published | Ended::Unchanged | Ended::Superseded | Ended::Coalesced | Ended::Held => None,
        Ended::Quarantined => Some((Exit::Rejected, why())),
        Ended::Cancelled => {
            Some((Exit::Failed, given(name, format!("job {id} was cancelled by {}", outcome.who))))
        }
        Ended::Dead => {
            let why = why();
            let exit = if is_of_checkpoint(&why.class) { Exit::BadCheckpoint } else { Exit::Failed };
            Some((exit, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::job::Document;

    use super::*;

    #[test]
    fn the_exit_code_says_how_a_job_ended() {
        let id: JobId = "0f8fad5b-d9cb-469f-a165-70867728950e".parse().unwrap();
        let exit = |ended: &str, class: &str| {
            let outcome = json!({
                "schema": "weighbridge.outcome/v1", "outcome": ended, "who": "w", "when": "2026-01-01T00:00:00Z",
                "error": { "kind": "permanent", "class": class, "message": "no" },
            });
            failed(&id, &Outcome::parse(outcome.to_string().as_bytes()).unwrap()).map(|(exit, _)| exit)
        };
        for ended in ["published", "unchanged", "superseded", "coalesced", "held"] {
            assert_eq!(exit(ended, "usage"), None);
        }
        assert_eq!(exit("quarantined", "rejected"), Some(Exit::Rejected));
        assert_eq!(exit("cancelled", "usage"), Some(Exit::Failed));
        assert_eq!(exit("dead", "truncated"), Some(Exit::BadCheckpoint));
        assert_eq!(exit("dead", "not_found"), Some(Exit::BadCheckpoint));
        for class in ["source_not_allowed", "scratch", "access_denied", "from_the_future"] {
            assert_eq!(exit("dead", class), Some(Exit::Failed), "{class}");
        }
    }
}
