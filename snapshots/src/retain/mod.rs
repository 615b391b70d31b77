//! What is kept, and the only place that deletes.
//!
//! | room | holds |
//! |---|---|
//! | [`keep`] | which snapshots a policy keeps |
//! | [`pins`] | snapshots that are kept whatever the policy says |
//! | [`claims`] | the first flag: who is about to rely on something says so, and then looks at what is condemned |
//! | `roots` | everything that keeps a snapshot or a chunk |
//! | `members` | which chunks are named, in bounded memory |
//! | `run` | the second flag: a run of gc, its list, and who carries it out |
//! | [`past`] | how the newest run ended |
//! | `sweep` | what is condemned, and what of that is deleted |
//! | `remains` | documents of old jobs, and what killed processes left |
//!
//! Two flags keep what is in use. A run of `gc` writes what it may delete ("condemned"), notes that its list is whole
//! ("listed"), and only then reads the roots; what no root names is deleted. Whoever is about to rely on something
//! writes a root (a claim), and only then reads the lists that are whole: what is condemned there is waited for, and
//! looked for again afterwards. One of the two sees the other: either the run reads the claim, or the claimant the
//! list. So it does not matter how old anything is; the grace period only spares needless work.
//!
//! A run is carried out by one process at a time, which notes that it does ([`HOLD`]). One whose process is gone is
//! ended, its list void, and a new one begins: at once where the process was of this machine, else after twice as long
//! by the store's clock. Nothing has to be carried out first: what a run leaves is nothing that anything rests on, and
//! the next one finds it by itself, under the policy of its own time.

pub mod claims;
pub mod keep;
mod members;
pub mod past;
pub mod pins;
mod remains;
mod roots;
mod run;
mod sweep;

use std::time::Duration;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::policy::Retention;
use weighbridge_schemas::retention::GcProcess;

use crate::error::Result;
use crate::fetch::Progress;
use crate::root::Root;

pub use claims::HEEDED;
pub use run::HOLD;

/// How a collection is done.
#[derive(Debug, Clone)]
pub struct Options {
    /// What is kept.
    pub retention: Retention,
    /// What is younger than this is not deleted.
    pub grace: Duration,
    /// For how long one process carries a run out without saying so again.
    pub hold: Duration,
    /// For how long claims are heeded: [`HEEDED`], unless nobody else is there.
    pub claims: Duration,
    /// Memory for the ids of chunks, in bytes.
    pub memory: u64,
    /// The id of this process, by chance.
    pub holder: String,
    /// This process, where the system tells.
    pub process: Option<GcProcess>,
    /// Whether a process is there; `None` where that cannot be told, as of another machine's.
    pub is_there: fn(&GcProcess) -> Option<bool>,
    /// Who does it, for people.
    pub who: String,
}

/// What was deleted, or would be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Snapshots.
    pub snapshots: Vec<SnapshotId>,
    /// How many chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Jobs whose documents went.
    pub jobs: Vec<JobId>,
    /// What else is left: files that never got their name, old claims, old notes of jobs.
    pub remains: u64,
    /// Chunks that no snapshot names and that are too young.
    pub young: u64,
    /// Snapshots that are kept.
    pub kept: u64,
    /// Of these, what the policy would let go, were it not younger than the grace period.
    pub kept_young: u64,
    /// Of these, what the policy would let go, but a channel's newest entries, a pin or a claim keeps.
    pub kept_rooted: u64,
    /// Jobs that have not ended, whose chunks are kept.
    pub running: u64,
    /// Runs that others had left unfinished, which were ended first.
    pub left: u64,
}

/// Told of every object that is deleted, or would be.
pub type Told<'t> = &'t (dyn Fn(&str) + Send + Sync);

/// Deletes what `options` do not keep of `model`, and what nobody needs. Whoever is interrupted runs it again.
///
/// # Errors
/// [`crate::error::Class::Conflict`] where another process is at it, [`crate::error::Class::Integrity`] where a root
/// cannot be read: then nothing is deleted. Else as the store fails.
pub async fn collect(
    root: &Root,
    model: &ModelName,
    options: &Options,
    told: Told<'_>,
    progress: &dyn Progress,
) -> Result<Collected> {
    let mut collected = Collected::default();
    let run = run::begin(root, model, options, &mut collected.left).await?;
    sweep::sweep(root, model, options, run, &mut collected, told, progress).await?;
    remains::delete(root, model, options, &mut collected, told, true).await?;
    Ok(collected)
}

/// What belongs to no model and is left: unfinished writes, and what a killed probe left, which are older than the
/// grace period, and than [`LEAST_IDLE`] at the least. It is deleted, unless `dry_run`; gives the keys, and how many
/// bytes are known of.
///
/// # Errors
/// As the store fails.
pub async fn tidy(root: &Root, grace: Duration, dry_run: bool) -> Result<(Vec<String>, u64)> {
    remains::tidy(root, grace.max(LEAST_IDLE), dry_run).await
}

/// A write that was not gone on with for so long is nobody's any more.
pub const LEAST_IDLE: Duration = Duration::from_secs(3600);

/// What [`collect`] would delete now; nothing is changed.
///
/// # Errors
/// As [`collect`].
pub async fn preview(root: &Root, model: &ModelName, options: &Options, told: Told<'_>) -> Result<Collected> {
    let mut collected = Collected::default();
    sweep::preview(root, model, options, &mut collected, told).await?;
    remains::delete(root, model, options, &mut collected, told, false).await?;
    Ok(collected)
}
