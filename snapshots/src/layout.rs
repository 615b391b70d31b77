//! Every object key is spelled here, and nowhere else.
//!
//! ```text
//! models/MODEL/snapshots/ID                   snapshot manifest, immutable
//! models/MODEL/snapshots/ID.report            validation report; later ones that differ: ID.report.000000000002 ...
//! models/MODEL/snapshots/ID.signatures        signature envelope; later ones: ID.signatures.000000000002 ...
//! models/MODEL/channels/NAME/000000000001     channel log: dense from 1, put-if-absent, never deleted
//! models/MODEL/channels/NAME/hint             where to start looking: overwritten, and only advice
//! models/MODEL/chunks/AB/ABCDEF...            content-addressed bytes, immutable
//! models/MODEL/jobs/JOB/record                a queued publish; beside it plan, decision, outcome, each put-if-absent
//! models/MODEL/jobs/JOB/parts/000000000001    part results: that of part 0 and so on
//! models/MODEL/jobs/JOB/events/TIME-ID        what workers did, for people
//! models/MODEL/jobs/JOB/gave-way/STEP-OTHER   jobs that were coalesced into this one
//! models/MODEL/order/RUN/CHANNEL/STEP-JOB     which jobs there are, by step
//! models/MODEL/admitted/000000000001          jobs that were let in to be converted: dense, put-if-absent
//! models/MODEL/admitted/hint                  all before this number have ended: overwritten, and only advice
//! models/MODEL/policies/NAME/000000000001     named policies: dense, put-if-absent, the highest rules
//! models/MODEL/pins/SNAPSHOT/000000000001     whether gc has to keep it: dense, put-if-absent, the highest rules
//! models/MODEL/claims/SNAPSHOT.ID             what is about to be put on a channel or pinned: a root for a while
//! models/MODEL/claims/SNAPSHOT.ID.manifest    the same of a snapshot that is about to be sealed: its manifest
//! models/MODEL/gc/000000000001/begun          a run of gc; beside it listed, ended, each put-if-absent
//! models/MODEL/gc/000000000001/held/0000...   who carries the run out: dense, put-if-absent, the highest does
//! models/MODEL/gc/000000000001/condemned/0... what it may delete, a page each; dropped once it is done with
//! probe/ID                                    that the store was tried out; and what is left of trying
//! dead/ID                                     dead letters; ID.requeued and ID.discarded say what became of them
//! ```

mod fetched;

use object_store::path::{Path, PathPart};

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::{ChannelName, ModelName, PolicyName, RunName};

pub use fetched::{Content, Fetched, fetched};

/// Digits of a sequence number in a key, so that keys sort as numbers.
const SEQUENCE_DIGITS: usize = 12;

/// Where all models lie.
#[must_use]
pub fn models() -> Path {
    Path::from("models")
}

/// Where everything of one model lies.
#[must_use]
pub fn model(model: &ModelName) -> Path {
    child(&models(), model.as_str())
}

/// Where a model's snapshots lie.
#[must_use]
pub fn snapshots(model_name: &ModelName) -> Path {
    child(&model(model_name), "snapshots")
}

/// A snapshot's manifest.
#[must_use]
pub fn snapshot(model: &ModelName, id: &SnapshotId) -> Path {
    child(&snapshots(model), &id.to_string())
}

/// A snapshot's validation report number `number`, from 1 on: the highest rules.
#[must_use]
pub fn report(model: &ModelName, id: &SnapshotId, number: u64) -> Path {
    let name = match number {
        0 | 1 => format!("{id}.report"),
        later => format!("{id}.report.{later:0SEQUENCE_DIGITS$}"),
    };
    child(&snapshots(model), &name)
}

/// A snapshot's signature envelope number `number`, from 1 on.
#[must_use]
pub fn signatures(model: &ModelName, id: &SnapshotId, number: u64) -> Path {
    let name = match number {
        0 | 1 => format!("{id}.signatures"),
        later => format!("{id}.signatures.{later:0SEQUENCE_DIGITS$}"),
    };
    child(&snapshots(model), &name)
}

/// Where a model's channels lie.
#[must_use]
pub fn channels(model_name: &ModelName) -> Path {
    child(&model(model_name), "channels")
}

/// Where a channel's entries lie.
#[must_use]
pub fn channel(model: &ModelName, channel: &ChannelName) -> Path {
    child(&channels(model), channel.as_str())
}

/// The id with which the name of a snapshot's manifest, or of what lies beside it, begins.
#[must_use]
pub fn snapshot_of(key: &Path) -> Option<SnapshotId> {
    let name = key.filename()?;
    name.split_once('.').map_or(name, |(id, _)| id).parse().ok()
}

/// A channel's entry number `sequence`.
#[must_use]
pub fn channel_entry(model: &ModelName, name: &ChannelName, sequence: u64) -> Path {
    child(&channel(model, name), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// The sequence number of the channel entry under `key`; `None` for anything else that lies in or below the channel.
#[must_use]
pub fn sequence(model: &ModelName, name: &ChannelName, key: &Path) -> Option<u64> {
    let number = last_number(key)?;
    (channel_entry(model, name, number) == *key).then_some(number)
}

fn last_number(key: &Path) -> Option<u64> {
    let name = key.filename()?;
    let digits = name.len() >= SEQUENCE_DIGITS && name.bytes().all(|byte| byte.is_ascii_digit());
    if digits { name.parse().ok() } else { None }
}

/// Where to start looking for a channel's latest entry.
#[must_use]
pub fn channel_hint(model: &ModelName, name: &ChannelName) -> Path {
    child(&channel(model, name), "hint")
}

/// Where a model's chunks lie.
#[must_use]
pub fn chunks(model_name: &ModelName) -> Path {
    child(&model(model_name), "chunks")
}

/// Where the chunks lie whose ids begin with the byte `first`.
#[must_use]
pub fn chunks_of(model: &ModelName, first: u8) -> Path {
    child(&chunks(model), &format!("{first:02x}"))
}

/// A chunk.
#[must_use]
pub fn chunk(model: &ModelName, id: &ChunkId) -> Path {
    let hex = id.to_string();
    child(&child(&chunks(model), &hex[..2]), &hex)
}

/// Where a model's pins lie.
#[must_use]
pub fn pins(model_name: &ModelName) -> Path {
    child(&model(model_name), "pins")
}

/// Where it is said whether a snapshot is pinned.
#[must_use]
pub fn pin(model: &ModelName, id: &SnapshotId) -> Path {
    child(&pins(model), &id.to_string())
}

/// What was said as number `sequence`.
#[must_use]
pub fn pin_entry(model: &ModelName, id: &SnapshotId, sequence: u64) -> Path {
    child(&pin(model, id), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// Where a model's claims lie.
#[must_use]
pub fn claims(model_name: &ModelName) -> Path {
    child(&model(model_name), "claims")
}

/// The claim of `operation`, an id without dots, on a snapshot.
#[must_use]
pub fn claim(model: &ModelName, id: &SnapshotId, operation: &str) -> Path {
    child(&claims(model), &format!("{id}.{operation}"))
}

/// The claim of `operation` on a snapshot that is not sealed yet, and on its chunks: its manifest.
#[must_use]
pub fn claimed_manifest(model: &ModelName, id: &SnapshotId, operation: &str) -> Path {
    child(&claims(model), &format!("{id}.{operation}.manifest"))
}

/// The snapshot that a claim is on, and whether the claim holds its manifest.
#[must_use]
pub fn claimed(key: &Path) -> Option<(SnapshotId, bool)> {
    let (id, rest) = key.filename()?.split_once('.')?;
    Some((id.parse().ok()?, rest.ends_with(".manifest")))
}

/// Where a model's runs of gc are noted.
#[must_use]
pub fn gc(model_name: &ModelName) -> Path {
    child(&model(model_name), "gc")
}

/// Where run `run` of gc is noted.
#[must_use]
pub fn gc_run(model: &ModelName, run: u64) -> Path {
    child(&gc(model), &format!("{run:0SEQUENCE_DIGITS$}"))
}

/// The notes that a run of gc has one of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcNote {
    /// It has begun.
    Begun,
    /// Its list is whole: whoever writes a root from now on has to read it.
    Listed,
    /// It has ended: its list is void.
    Ended,
}

/// One of a run's notes.
#[must_use]
pub fn gc_note(model: &ModelName, run: u64, note: GcNote) -> Path {
    let name = match note {
        GcNote::Begun => "begun",
        GcNote::Listed => "listed",
        GcNote::Ended => "ended",
    };
    child(&gc_run(model, run), name)
}

/// Where it is noted who carries a run out.
#[must_use]
pub fn gc_holders(model: &ModelName, run: u64) -> Path {
    child(&gc_run(model, run), "held")
}

/// The note number `sequence` of who carries a run out.
#[must_use]
pub fn gc_holder(model: &ModelName, run: u64, sequence: u64) -> Path {
    child(&gc_holders(model, run), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// Where a run's list lies.
#[must_use]
pub fn condemned(model: &ModelName, run: u64) -> Path {
    child(&gc_run(model, run), "condemned")
}

/// Page `page` of a run's list, from 1 on.
#[must_use]
pub fn condemned_page(model: &ModelName, run: u64, page: u64) -> Path {
    child(&condemned(model, run), &format!("{page:0SEQUENCE_DIGITS$}"))
}

/// Where it is noted that a store was tried out, and where it is tried out.
#[must_use]
pub fn probes() -> Path {
    Path::from("probe")
}

/// The note that the store of this identity was tried out.
#[must_use]
pub fn probes_note(identity: &str) -> Path {
    probe(&format!("{PASSED}{identity}"))
}

/// How the names of such notes begin.
const PASSED: &str = "passed-";

/// Whether it is such a note.
#[must_use]
pub fn is_probes_note(key: &Path) -> bool {
    key.filename().is_some_and(|name| name.starts_with(PASSED))
}

/// An object of these.
#[must_use]
pub fn probe(name: &str) -> Path {
    child(&probes(), name)
}

/// Where a model's jobs lie.
#[must_use]
pub fn jobs(model_name: &ModelName) -> Path {
    child(&model(model_name), "jobs")
}

/// Where a job's documents lie.
#[must_use]
pub fn job(model: &ModelName, job: &JobId) -> Path {
    child(&jobs(model), job.as_str())
}

/// One of a job's documents.
#[must_use]
pub fn job_document(model: &ModelName, id: &JobId, document: JobDocument) -> Path {
    child(&job(model, id), document.name())
}

/// The documents that a job has one of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobDocument {
    /// What is published.
    Record,
    /// Its parts.
    Plan,
    /// Whether it may move its channel.
    Decision,
    /// How it ended.
    Outcome,
}

impl JobDocument {
    const fn name(self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::Plan => "plan",
            Self::Decision => "decision",
            Self::Outcome => "outcome",
        }
    }
}

/// Where a job's part results lie.
#[must_use]
pub fn parts(model: &ModelName, id: &JobId) -> Path {
    child(&job(model, id), "parts")
}

/// The result of part `part`, from 0 on.
#[must_use]
pub fn part(model: &ModelName, id: &JobId, part: u64) -> Path {
    child(&parts(model, id), &format!("{:0SEQUENCE_DIGITS$}", part.saturating_add(1)))
}

/// The part, from 0 on, whose result lies under `key`; `None` for anything else.
#[must_use]
pub fn part_number(key: &Path) -> Option<u64> {
    last_number(key)?.checked_sub(1)
}

/// Where a job's events lie.
#[must_use]
pub fn events(model: &ModelName, id: &JobId) -> Path {
    child(&job(model, id), "events")
}

/// An event that began `nanoseconds` after 1970, and has an `id` of its own: events sort by time.
#[must_use]
pub fn event(model: &ModelName, job: &JobId, nanoseconds: u64, id: &str) -> Path {
    child(&events(model, job), &format!("{nanoseconds:0STEP_DIGITS$}-{id}"))
}

/// Digits of a step, or of nanoseconds, in a key.
const STEP_DIGITS: usize = 20;

/// Where the jobs that gave way to a job are noted.
#[must_use]
pub fn gave_way(model: &ModelName, id: &JobId) -> Path {
    child(&job(model, id), "gave-way")
}

/// The note in job `to` that `job`, of `step`, gave way to it.
#[must_use]
pub fn gave_way_note(model: &ModelName, to: &JobId, step: u64, job: &JobId) -> Path {
    child(&gave_way(model, to), &step_key(step, job))
}

/// Where the jobs of a run that want a channel are noted.
#[must_use]
pub fn order(model_name: &ModelName, run: &RunName, channel: &ChannelName) -> Path {
    child(&child(&child(&model(model_name), "order"), run.as_str()), channel.as_str())
}

/// The note that there is `job`, of `step`.
#[must_use]
pub fn order_note(model: &ModelName, run: &RunName, channel: &ChannelName, step: u64, job: &JobId) -> Path {
    child(&order(model, run, channel), &step_key(step, job))
}

fn step_key(step: u64, job: &JobId) -> String {
    format!("{step:0STEP_DIGITS$}-{job}")
}

/// The step and the job of a note.
#[must_use]
pub fn noted(key: &Path) -> Option<(u64, JobId)> {
    let (step, job) = key.filename()?.split_once('-')?;
    let digits = step.len() == STEP_DIGITS && step.bytes().all(|byte| byte.is_ascii_digit());
    Some((step.parse().ok().filter(|_| digits)?, job.parse().ok()?))
}

/// Where the jobs that were let in are noted.
#[must_use]
pub fn admitted(model_name: &ModelName) -> Path {
    child(&model(model_name), "admitted")
}

/// The job that was let in as number `sequence`.
#[must_use]
pub fn admission(model: &ModelName, sequence: u64) -> Path {
    child(&admitted(model), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// Where to start looking for jobs that were let in and have not ended.
#[must_use]
pub fn admitted_hint(model: &ModelName) -> Path {
    child(&admitted(model), "hint")
}

/// Where a model's named policies lie.
#[must_use]
pub fn policies(model_name: &ModelName) -> Path {
    child(&model(model_name), "policies")
}

/// Where the versions of a named policy lie.
#[must_use]
pub fn policy(model: &ModelName, name: &PolicyName) -> Path {
    child(&policies(model), name.as_str())
}

/// Version `sequence` of a named policy.
#[must_use]
pub fn policy_version(model: &ModelName, name: &PolicyName, sequence: u64) -> Path {
    child(&policy(model, name), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// The number that ends `key`, as entries of a dense log have one.
#[must_use]
pub fn number(key: &Path) -> Option<u64> {
    last_number(key)
}

/// Where dead letters lie.
#[must_use]
pub fn dead_letters() -> Path {
    Path::from("dead")
}

/// A dead letter; `id` is a job's, or a digest.
#[must_use]
pub fn dead_letter(id: &str) -> Path {
    child(&dead_letters(), id)
}

/// The note that a dead letter was queued again.
#[must_use]
pub fn dead_requeued(id: &str) -> Path {
    child(&dead_letters(), &format!("{id}.requeued"))
}

/// The note that a dead letter was discarded.
#[must_use]
pub fn dead_discarded(id: &str) -> Path {
    child(&dead_letters(), &format!("{id}.discarded"))
}

fn child(parent: &Path, part: &str) -> Path {
    parent.clone().join(PathPart::from(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_spelled_as_documented() {
        let model: ModelName = "dlrm".parse().unwrap();
        let id = SnapshotId::from_bytes([0xab; 32]);
        let hex = "ab".repeat(32);
        assert_eq!(snapshot(&model, &id).as_ref(), format!("models/dlrm/snapshots/{hex}"));
        assert_eq!(report(&model, &id, 1).as_ref(), format!("models/dlrm/snapshots/{hex}.report"));
        assert_eq!(signatures(&model, &id, 1).as_ref(), format!("models/dlrm/snapshots/{hex}.signatures"));
        let second = signatures(&model, &id, 2);
        assert_eq!(second.as_ref(), format!("models/dlrm/snapshots/{hex}.signatures.000000000002"));
        let chunk = chunk(&model, &ChunkId::from_bytes([0xab; 32]));
        assert_eq!(chunk.as_ref(), format!("models/dlrm/chunks/ab/{hex}"));
        let prod = "prod".parse().unwrap();
        let entry = channel_entry(&model, &prod, 42);
        assert_eq!(entry.as_ref(), "models/dlrm/channels/prod/000000000042");
        assert_eq!(sequence(&model, &prod, &entry), Some(42));
        assert_eq!(sequence(&model, &prod, &channel_hint(&model, &prod)), None);
        let below = channel_entry(&model, &prod, 1).join("000000000042");
        assert_eq!(sequence(&model, &prod, &below), None);
    }
}
