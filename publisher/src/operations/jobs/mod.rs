//! Queued publishes: found, listed, looked at, cancelled, resumed.

mod ages;
mod find;
mod known;
mod standing;

use weighbridge_queue::Queue;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::{Decided, Ended, JobId, JobRecord, Outcome};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::root::Root;

pub use ages::{Accepted, Ages};
pub use find::{check, find, get};
pub use known::Known;
pub use standing::{Standing, State};

use super::{Page, whole};
use crate::error::{Exit, Failure, Result};
use crate::steps::end;

/// A job, and how far it has got.
#[derive(Debug)]
pub struct Progress {
    /// What it publishes.
    pub record: JobRecord,
    /// How far it has got.
    pub standing: Standing,
}

impl Progress {
    /// Looks at a job; `None` where there is none.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn of(
        root: &Root,
        model: &ModelName,
        id: &JobId,
    ) -> weighbridge_snapshots::error::Result<Option<Self>> {
        let job = Job::new(root, model, id);
        let Some(record) = job.record().await? else { return Ok(None) };
        Ok(Some(Self { record, standing: Standing::of(&job).await? }))
    }
}

/// Which jobs are wanted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filter {
    /// Only those that have not ended.
    pub open: bool,
    /// Only those that ended so.
    pub outcome: Option<Ended>,
}

impl Filter {
    fn lets_pass(self, standing: &Standing) -> bool {
        let ended = standing.outcome.as_ref().map(|outcome| outcome.outcome);
        (!self.open || ended.is_none()) && self.outcome.is_none_or(|wanted| ended == Some(wanted))
    }
}

/// A page of jobs, the newest first.
#[derive(Debug)]
pub struct Listed {
    /// The jobs.
    pub jobs: Vec<Progress>,
    /// Where the next page begins: behind this one. `None` where there is none.
    pub next: Option<Accepted>,
    /// The first of them that are damaged, which are left out.
    pub damage: Option<StoreError>,
}

/// Jobs of these models, the newest first.
///
/// # Errors
/// As the store fails.
pub async fn list(
    root: &Root,
    ages: &Ages,
    models: &[ModelName],
    filter: Filter,
    page: Page<'_, Accepted>,
) -> Result<Listed> {
    let mut listed = Listed { jobs: Vec::new(), next: None, damage: None };
    let mut newest = Vec::new();
    for model in models {
        newest.extend(ages.of(root, model, &mut listed.damage).await?);
    }
    newest.sort_unstable_by(|one, other| other.cmp(one));
    // The newest are the greatest.
    let mut behind = newest.into_iter().filter(|job| page.after.is_none_or(|after| job < after)).peekable();
    let mut reads = 0;
    while listed.jobs.len() < page.most
        && let Some(job) = behind.next()
    {
        reads += 1;
        let progress = Progress::of(root, &job.model, &job.id).await;
        let progress = whole(progress, &mut listed.damage)?.flatten();
        listed.jobs.extend(progress.filter(|progress| filter.lets_pass(&progress.standing)));
        if listed.jobs.len() >= page.most || reads >= page.reads {
            listed.next = behind.peek().is_some().then_some(job);
            break;
        }
    }
    Ok(listed)
}

/// What came of a request to end a job.
#[derive(Debug)]
pub struct Cancelled {
    /// What rules.
    pub ruling: Decided,
    /// How the job ended, as far as it has.
    pub outcome: Option<Outcome>,
    /// Why it is not cancelled, where it is not.
    pub too_late: Option<Failure>,
}

/// Ends a job before it gets onto its channel. One that has ended, or is going onto its channel, stays as it is.
///
/// # Errors
/// As the store or the queue fails.
pub async fn cancel(root: &Root, queue: &dyn Queue, record: &JobRecord, who: &str) -> Result<Cancelled> {
    let ruling = end::cancel(root, queue, record, who).await?;
    let outcome = Job::new(root, &record.manifest.model, &record.job()).outcome().await?;
    let too_late = (ruling != Decided::Cancelled).then(|| too_late(record, ruling));
    Ok(Cancelled { ruling, outcome, too_late })
}

fn too_late(record: &JobRecord, ruling: Decided) -> Failure {
    let rules = match ruling {
        Decided::Proceed => format!(
            "it goes onto channel {0}, or has; `weighbridge rollback {1}@{0}` moves that back",
            record.channel, record.manifest.model
        ),
        Decided::Coalesced => "it gave way to a newer step".to_owned(),
        Decided::Dead => "it is dead".to_owned(),
        Decided::Cancelled => "it was cancelled".to_owned(),
    };
    let id = record.job();
    Failure {
        kind: Kind::Conflict,
        class: "already_decided",
        message: format!("job {id} is not cancelled: {rules}; `weighbridge jobs show {id}` tells all"),
        exit: Exit::Failed,
    }
}

/// Asks for the next step of every job of these models that has not ended; gives those that were asked to go on.
///
/// # Errors
/// As the store or the queue fails.
pub async fn resume(root: &Root, queue: &dyn Queue, models: &[ModelName]) -> Result<Vec<JobId>> {
    let mut resumed = Vec::new();
    for model in models {
        for id in jobs::list(root, model).await? {
            let Some(record) = Job::new(root, model, &id).record().await? else { continue };
            if end::resume(root, queue, &record).await? {
                resumed.push(id);
            }
        }
    }
    Ok(resumed)
}
