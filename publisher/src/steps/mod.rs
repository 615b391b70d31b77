//! What a worker does with a message: the steps of a queued publish, a file each.
//!
//! | step | does | leaves behind |
//! |---|---|---|
//! | `accept` | a manifest becomes a job, under a policy that is fixed from then on | record |
//! | `plan` | lets it in, lists the checkpoint, cuts it into parts; or gives way to a newer step | plan |
//! | `part` | reads, encodes and stores the chunks of one part | its result |
//! | `finish` | assembles, judges, seals, decides, promotes | manifest, report, decision, channel entry, outcome |
//!
//! A step writes its document, sends the next message, and only then is its own message done with. So a crash in
//! between repeats the step, and a step that is repeated finds what it left: it writes the same bytes under the same
//! names, or reads what rules there. [`end`] writes outcomes and dead letters; `patience` says what is tried again,
//! and when.

pub mod accept;
pub mod end;
mod finish;
pub mod messages;
mod part;
mod patience;
mod plan;
mod plans;
mod statistics;

use std::sync::Arc;
use std::time::{Duration, Instant};

use weighbridge_queue::error::Error as QueueError;
use weighbridge_queue::message::Kind;
use weighbridge_queue::{Lease, Queue};
use weighbridge_schemas::job::{Came, Decided, Document, Event, EventSchema, JobRecord, Step, StepKind, Why};
use weighbridge_schemas::limits;
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::Operation;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Root;

use crate::clock;
use crate::error::{Failure, Result};
use crate::job::{Budget, Request};
use crate::metrics::Metrics;
use crate::policies;
use crate::sources::{self, Allowed};
use crate::worker::Health;
use patience::Patience;
use plans::Plans;

/// How often a message may be taken by workers that die over it, or lose it, before it is given up.
const MOST_ABANDONED: u32 = 5;

/// How slowly a part is taken to be done, in bytes of the checkpoint a second, where it is to be told in advance how
/// long it may take.
const SLOWEST: u64 = 16 << 20;
/// Failures of the queue: a step asks it for nothing but to take messages.
const OF_THE_QUEUE: [&str; 2] = ["queue_unreachable", "queue_unknown_outcome"];
/// The class of the event that a broker took a message back.
const TAKEN_BACK: &str = "taken_back";
/// Most events that are looked at.
const EVENTS: usize = 10_000;

/// For how long a step of a job that the store does not know is kept.
const UNKNOWN: Duration = Duration::from_secs(3600);

/// How steps are done here.
#[derive(Debug, Clone)]
pub struct Options {
    /// What this worker is called in documents and logs.
    pub who: String,
    /// What one message may use of the machine.
    pub budget: Budget,
    /// How many messages are handled at the same time.
    pub concurrency: usize,
    /// How many bytes of a checkpoint make a part, about.
    pub part_bytes: u64,
    /// How many jobs of one model are converted at once, at most.
    pub jobs_per_model: usize,
    /// Where checkpoints may lie.
    pub sources: Allowed,
    /// How long to wait before something is tried again.
    pub pauses: Pauses,
}

/// How long to wait before something is tried again: the first pause, doubled from time to time up to the longest.
#[derive(Debug, Clone, Copy)]
pub struct Pauses {
    /// The first.
    pub first: Duration,
    /// The longest.
    pub longest: Duration,
}

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is done with.
    Done,
    /// It is to be taken again, after a while.
    Again(Duration),
}

/// The steps of queued publishes, on one store and one queue.
#[derive(Debug)]
pub struct Steps {
    root: Root,
    queue: Arc<dyn Queue>,
    options: Options,
    plans: Plans,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
}

/// What came of a step that did not fail.
enum Stepped {
    /// It is done; so many bytes of the checkpoint were read.
    Done(u64),
    /// Other jobs of the model go first.
    Waits,
}

/// What kept a step from being done.
enum Trouble {
    /// The checkpoint cannot be read as it is.
    Checkpoint(Failure),
    /// Anything else.
    Other(Failure),
}

impl<E: Into<Failure>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Other(error.into())
    }
}

impl Steps {
    /// The queue, for others of this process that send.
    #[must_use]
    pub fn shared_queue(&self) -> Arc<dyn Queue> {
        Arc::clone(&self.queue)
    }

    /// The steps of queued publishes, on this store and this queue.
    #[must_use]
    pub fn new(root: Root, queue: Arc<dyn Queue>, options: Options, metrics: Arc<Metrics>) -> Self {
        let plans = Plans::new(options.concurrency);
        Self { root, queue, options, plans, metrics, health: Arc::default() }
    }

    /// The same; `health` is told what the steps find out about the store.
    #[must_use]
    pub fn watched_by(mut self, health: Arc<Health>) -> Self {
        self.health = health;
        self
    }

    /// How steps are done here.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &Arc<dyn Queue> {
        &self.queue
    }

    /// The store.
    #[must_use]
    pub fn root(&self) -> &Root {
        &self.root
    }

    /// Figures of what is done.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Does what a message asks for.
    pub async fn handle(&self, lease: &Lease) -> Verdict {
        match self.attempt(lease).await {
            Ok(verdict) => {
                self.health.store_worked();
                self.health.queue_worked();
                verdict
            }
            Err(failure) if patience::is_outside(&failure) => self.later(lease, &failure),
            // What stands in the store, or on the queue, is not what it should be: trying again changes nothing.
            Err(failure) => match end::give_up(self, lease, &failure).await {
                Ok(verdict) => verdict,
                Err(failure) => self.later(lease, &failure),
            },
        }
    }

    /// Store or queue: they say nothing about the message, which waits until they are back.
    fn later(&self, lease: &Lease, failure: &Failure) -> Verdict {
        let pause = patience::pause(self.options.pauses, lease.retries);
        tracing::warn!(
            message = %lease.message.id, class = failure.class, error = %failure, again_in = ?pause,
            "a step could not be done"
        );
        self.metrics.retried(failure.class);
        self.health.failed(failure);
        if OF_THE_QUEUE.contains(&failure.class) {
            self.health.queue_takes_nothing(&failure.message);
        }
        Verdict::Again(pause)
    }

    async fn attempt(&self, lease: &Lease) -> Result<Verdict> {
        match lease.message.kind {
            Kind::Checkpoint => accept::checkpoint(self, lease).await,
            Kind::Republish => accept::republish(self, lease).await,
            Kind::Step => match Step::parse(&lease.message.body) {
                Ok(step) => self.step(lease, &step).await,
                Err(error) => end::bury(self, lease, None, &error.into()).await,
            },
        }
    }

    async fn step(&self, lease: &Lease, step: &Step) -> Result<Verdict> {
        let job = Job::new(&self.root, &step.model, &step.job);
        let Some(record) = job.record().await? else {
            if job.has_ended().await? {
                // Its documents are being collected: the outcome goes last.
                return Ok(Verdict::Done);
            }
            let failure = unknown_job(step);
            // A record is put before any step is asked for. So it may be another store that is here at the moment.
            let patient = lease.waited < UNKNOWN;
            return if patient { Err(failure) } else { end::bury(self, lease, None, &failure).await };
        };
        if job.has_ended().await? {
            return Ok(Verdict::Done);
        }
        match job.decision().await? {
            Some(decision) if decision.decision != Decided::Proceed => {
                end::carry_out(self, &record, &decision).await?;
                return Ok(Verdict::Done);
            }
            Some(_) if step.step != StepKind::Finish => return Ok(Verdict::Done),
            _ => {}
        }
        // Of the highest level, so that warnings carry it whatever is logged.
        let span = tracing::error_span!(
            "step", step = step.step.as_str(), job = %step.job, part = step.part, model = %step.model,
            traceparent = record.manifest.traceparent,
        );
        tracing::Instrument::instrument(self.timed(lease, step, &record), span).await
    }

    async fn timed(&self, lease: &Lease, step: &Step, record: &JobRecord) -> Result<Verdict> {
        let policy = policy(record)?;
        let (began, started) = (clock::now(), Instant::now());
        let stepped = if self.is_abandoned(lease, step, record).await? {
            Err(Trouble::Other(abandoned()))
        } else {
            match step.step {
                StepKind::Accept => accept::again(self, record).await,
                StepKind::Plan => plan::plan(self, record, &policy).await,
                StepKind::Part => part::part(self, record, &policy, step.part.unwrap_or(0)).await,
                StepKind::Finish => finish::finish(self, record, &policy).await,
            }
        };
        let took = started.elapsed();
        let mut event = self.event(step, began, took);
        let verdict = match stepped {
            Ok(Stepped::Done(bytes)) => {
                event.bytes = bytes;
                self.metrics.step_done(step.step, took);
                tracing::info!(milliseconds = event.milliseconds, bytes, "done");
                Verdict::Done
            }
            Ok(Stepped::Waits) => {
                event.came = Came::Waits;
                Verdict::Again(patience::pause(self.options.pauses, lease.retries))
            }
            Err(trouble) => {
                let patience = Patience { steps: self, lease, step: step.step, record, policy: &policy };
                patience.judge(trouble, &mut event).await?
            }
        };
        if let Verdict::Again(pause) = verdict {
            event.again_in = u64::try_from(pause.as_millis()).ok();
        }
        self.note(record, &event).await;
        if event.came == Came::Dead {
            let failure = event.error.clone().unwrap_or_else(|| why(&abandoned()));
            return end::die(self, record, step.step, failure).await;
        }
        if event.came == Came::NotReady {
            // Those that gave way to it must not wait with it.
            end::let_go_again(self, record).await?;
        }
        Ok(verdict)
    }

    /// An event of a step that was done.
    fn event(&self, step: &Step, began: Timestamp, took: Duration) -> Event {
        Event {
            schema: EventSchema::V1,
            step: step.step,
            part: step.part,
            came: Came::Done,
            error: None,
            again_in: None,
            observed: None,
            who: self.options.who.clone(),
            began,
            milliseconds: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            bytes: 0,
        }
    }

    /// Whether too many workers died over a message. Those that it was taken back from did not.
    async fn is_abandoned(&self, lease: &Lease, step: &Step, record: &JobRecord) -> Result<bool> {
        if lease.abandoned < MOST_ABANDONED {
            return Ok(false);
        }
        let events = Job::new(&self.root, &record.manifest.model, &record.job()).events(EVENTS).await?;
        let taken_back = events.iter().filter(|event| {
            let class = event.error.as_ref().map(|why| why.class.as_str());
            event.step == step.step && event.part == step.part && class == Some(TAKEN_BACK)
        });
        let taken_back = u32::try_from(taken_back.count()).unwrap_or(u32::MAX);
        Ok(lease.abandoned.saturating_sub(taken_back) >= MOST_ABANDONED)
    }

    /// A broker took a message back though it is worked on: that is noted, so that it does not count against its job.
    pub async fn taken_back(&self, lease: &Lease, error: QueueError) {
        let failure = Failure::from(error);
        tracing::warn!(message = %lease.message.id, error = %failure, "its work goes on; it comes again");
        self.metrics.retried(failure.class);
        if lease.message.kind != Kind::Step {
            return;
        }
        let Ok(step) = Step::parse(&lease.message.body) else { return };
        let Ok(Some(record)) = Job::new(&self.root, &step.model, &step.job).record().await else { return };
        let event = Event {
            came: Came::Failed,
            error: Some(why(&failure)),
            ..self.event(&step, clock::now(), Duration::ZERO)
        };
        self.note(&record, &event).await;
    }

    /// How many bytes of a checkpoint a part may have, so that it is done in half the time for which its message can be
    /// held.
    fn most_part_bytes(&self) -> u64 {
        let seconds = self.queue.longest_hold().map(|hold| hold.as_secs() / 2);
        seconds.map_or(u64::MAX, |seconds| seconds.saturating_mul(SLOWEST))
    }

    /// History that cannot be written holds nothing up.
    async fn note(&self, record: &JobRecord, event: &Event) {
        // Waiting for a turn is no news.
        if event.came == Came::Waits {
            return;
        }
        let (model, id) = (&record.manifest.model, record.job());
        if let Err(error) = Job::new(&self.root, model, &id).note(event, &clock::operation_id()).await {
            tracing::warn!(%error, "an event is not noted");
        }
    }
}

/// The policy that a job was accepted under.
fn policy(record: &JobRecord) -> Result<Policy> {
    let policy = policies::read(&record.policy, &record.policy_from);
    policy.map_err(|failure| failure.while_doing("the job's record"))
}

/// What a job publishes, and how.
fn request(record: &JobRecord, policy: &Policy) -> Result<Request> {
    let manifest = &record.manifest;
    let who = record.requested_by.clone().unwrap_or_else(|| "weighbridge".to_owned());
    Ok(Request {
        checkpoint: sources::locate(manifest.location.as_ref())?,
        format: manifest.format,
        files: manifest.files.clone(),
        created_at: Some(manifest.created_at),
        model: manifest.model.clone(),
        run: manifest.run.clone(),
        step: manifest.step,
        policy: policy.clone(),
        channel: record.channel.clone(),
        operation: Operation { id: record.job().to_string(), who, when: clock::now() },
    })
}

fn unknown_job(step: &Step) -> Failure {
    Failure {
        kind: weighbridge_schemas::error::Kind::Transient,
        class: "unknown_job",
        message: format!(
            "the queue holds a step of job {} of model {}, which the store does not know; do all workers use one \
             store?",
            step.job, step.model
        ),
        exit: crate::error::Exit::Failed,
    }
}

fn abandoned() -> Failure {
    let message = format!(
        "workers that had taken it died over it, or lost it, {MOST_ABANDONED} times or more; look at their logs and \
         their memory, then `weighbridge dead requeue` it"
    );
    Failure {
        kind: weighbridge_schemas::error::Kind::Permanent,
        class: "abandoned",
        message,
        exit: crate::error::Exit::Failed,
    }
}

/// A failure, as it stands in a document.
#[must_use]
pub fn why(failure: &Failure) -> Why {
    let mut message = failure.message.clone();
    if message.len() > limits::WHY_BYTES {
        let cut = (0..=limits::WHY_BYTES).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
        message.truncate(cut);
    }
    Why { kind: failure.kind.as_str().to_owned(), class: failure.class.to_owned(), message }
}
