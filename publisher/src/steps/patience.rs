//! What is tried again, when, and when it is given up.
//!
//! | what went wrong | what follows |
//! |---|---|
//! | the store, the queue or this machine | tried again for as long as it takes: it says nothing about the job |
//! | something of the checkpoint is not there (yet) | waited for, up to the policy's grace |
//! | the checkpoint cannot be read | looked at a few times more, and for as long as its files change, up to the grace |
//! | anything else that may succeed later | tried again, up to the policy's time |
//! | anything else | given up at once |
//!
//! Time is counted in pauses that were made, not by clocks: those of two machines need not agree.

use std::time::Duration;

use weighbridge_converter::source::Source;
use weighbridge_queue::Lease;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::ObservationId;
use weighbridge_schemas::job::{Came, Event, JobRecord, StepKind};
use weighbridge_schemas::policy::Policy;
use weighbridge_snapshots::jobs::Job;

use super::{EVENTS, Pauses, Steps, Trouble, Verdict, why};
use crate::clock;
use crate::error::{Failure, Result};
use crate::sources;

/// Whether a failure says nothing about the message that met it.
pub(super) fn is_outside(failure: &Failure) -> bool {
    OUTSIDE.contains(&failure.class) || failure.kind != Kind::Permanent
}

/// Failures that say nothing about the job: of the store, the queue, or this machine.
const OUTSIDE: [&str; 9] = [
    "store_unreachable",
    "disk_full",
    "read_only",
    "store_access_denied",
    "store_unfit",
    "conflict",
    "queue_unreachable",
    "queue_unknown_outcome",
    "scratch",
];
/// Checkpoints of which something is missing: it may come.
const ABSENT: [&str; 6] =
    ["not_found", "no_tensors", "dcp_no_metadata", "dcp_missing_file", "file_missing", "index_missing_shard"];
/// Checkpoints that no change of their files is waited for.
const HOPELESS: [&str; 3] = ["forbidden_global", "limit_exceeded", "access_denied"];
/// How many looks at a checkpoint that cannot be read, before the last one, have to have seen the same files.
const LOOKS: usize = 3;

/// What is to be judged by.
pub(super) struct Patience<'a> {
    pub(super) steps: &'a Steps,
    pub(super) lease: &'a Lease,
    pub(super) step: StepKind,
    pub(super) record: &'a JobRecord,
    pub(super) policy: &'a Policy,
}

impl Patience<'_> {
    /// What becomes of a message that met `trouble`; the event is told.
    pub(super) async fn judge(&self, trouble: Trouble, event: &mut Event) -> Result<Verdict> {
        let (failure, of_checkpoint) = match trouble {
            Trouble::Checkpoint(failure) => (failure, true),
            Trouble::Other(failure) => (failure, false),
        };
        if OUTSIDE.contains(&failure.class) {
            return Err(failure);
        }
        event.error = Some(why(&failure));
        let pause = pause(self.steps.options.pauses, self.lease.retries);
        let unreadable = failure.kind != Kind::Transient && !HOPELESS.contains(&failure.class);
        let again = if of_checkpoint && (unreadable || ABSENT.contains(&failure.class)) {
            self.may_get_ready(&failure, event).await?
        } else if failure.kind == Kind::Permanent {
            false
        } else {
            event.came = Came::Failed;
            let events = self.events().await?;
            waited(self.alike(&events, event)) < u64::from(self.policy.job.retry_seconds).saturating_mul(1000)
        };
        self.steps.metrics.retried(failure.class);
        if !again {
            event.came = Came::Dead;
            tracing::error!(class = failure.class, error = %failure, "given up");
            return Ok(Verdict::Done);
        }
        tracing::warn!(class = failure.class, error = %failure, again_in = ?pause, "tried again later");
        Ok(Verdict::Again(pause))
    }

    /// Whether the checkpoint may only be incomplete.
    async fn may_get_ready(&self, failure: &Failure, event: &mut Event) -> Result<bool> {
        event.came = Came::NotReady;
        let events = self.events().await?;
        if waited(self.alike(&events, event)) >= u64::from(self.policy.job.grace_seconds).saturating_mul(1000)
        {
            return Ok(false);
        }
        event.observed = self.observe().await;
        // A folder that was just made is empty.
        let empty = event.observed == Some(ObservationId::of(b""));
        if empty || ABSENT.contains(&failure.class) {
            return Ok(true);
        }
        // Looked at again and again, and the same each time: nobody writes to it.
        let before: Vec<_> =
            self.alike(&events, event).rev().take(LOOKS).map(|event| event.observed).collect();
        Ok(before.len() < LOOKS || before.iter().any(|observed| *observed != event.observed))
    }

    async fn events(&self) -> Result<Vec<Event>> {
        let id = self.record.job();
        Ok(Job::new(&self.steps.root, &self.record.manifest.model, &id).events(EVENTS).await?)
    }

    /// The events of this step, of this part, of which came what comes of this one.
    fn alike<'e>(
        &self,
        events: &'e [Event],
        this: &Event,
    ) -> impl DoubleEndedIterator<Item = &'e Event> + use<'e> {
        let (came, step, part) = (this.came, self.step, this.part);
        events.iter().filter(move |event| event.came == came && event.step == step && event.part == part)
    }

    /// What the checkpoint's files look like; `None` where that cannot be told.
    async fn observe(&self) -> Option<ObservationId> {
        let location = sources::locate(self.record.manifest.location.as_ref()).ok()?;
        let memory = self.steps.options.budget.memory;
        let looked = tokio::task::spawn_blocking(move || {
            Source::open_location(&location).and_then(|source| source.with_memory(memory).observe()).ok()
        });
        looked.await.ok()?
    }
}

/// How long events were followed by pauses, in milliseconds.
fn waited<'e>(events: impl Iterator<Item = &'e Event>) -> u64 {
    events.filter_map(|event| event.again_in).fold(0, u64::saturating_add)
}

/// The pause before try number `tries` + 2: doubled from time to time, and spread by a quarter, so that many do not
/// come back at once.
pub(super) fn pause(pauses: Pauses, tries: u32) -> Duration {
    let doubled = pauses.first.saturating_mul(1u32.checked_shl(tries.min(16)).unwrap_or(u32::MAX));
    let pause = doubled.min(pauses.longest);
    pause.mul_f64(0.75 + 0.5 * clock::fraction())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = Pauses { first: Duration::from_secs(1), longest: Duration::from_secs(30) };
        for (tries, seconds) in [(0, 1.0), (1, 2.0), (4, 16.0), (5, 30.0), (31, 30.0), (u32::MAX, 30.0)] {
            let pause = pause(pauses, tries).as_secs_f64();
            assert!((seconds * 0.75..=seconds * 1.25).contains(&pause), "{tries}: {pause}");
        }
    }
}
