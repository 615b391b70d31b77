//! Jobs that somebody follows: each is looked at once, however many follow it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::{JobId, JobRecord};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Root;

use super::answer;
use crate::api::answers::Refusal;
use crate::api::proto;
use crate::clock;
use crate::operations::jobs::{Progress, Standing};

/// Most jobs that are followed at once.
const MOST_JOBS: usize = 1_000;
/// Pauses between two looks: after a change, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));
/// For how long a store that fails is asked again before those who follow are told.
const PATIENCE: Duration = Duration::from_secs(30);
/// For how long a job is waited for that no worker has accepted.
const UNKNOWN: Duration = Duration::from_secs(1800);
/// When to ask again where too many are followed.
const AGAIN: Duration = Duration::from_secs(10);

/// What is known of a job.
#[derive(Debug, Clone, Default)]
pub(super) enum Look {
    /// It was not looked at yet, or no worker has accepted it.
    #[default]
    Unknown,
    /// How it stands.
    Stands(Arc<proto::Job>),
    /// It cannot be looked at.
    Failed(Refusal),
}

impl Look {
    /// Whether nothing more will be told.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Self::Unknown => false,
            Self::Stands(job) => job.ended,
            Self::Failed(_) => true,
        }
    }
}

type Name = (ModelName, JobId);
type Looks = Mutex<HashMap<Name, watch::Receiver<Look>>>;

/// The jobs that somebody follows.
#[derive(Debug)]
pub(super) struct Watched {
    root: Root,
    looks: Arc<Looks>,
}

impl Watched {
    pub(super) fn new(root: Root) -> Self {
        Self { root, looks: Arc::default() }
    }

    /// What is known of a job, now and from now on.
    pub(super) fn follow(&self, model: &ModelName, job: &JobId) -> Result<watch::Receiver<Look>, Refusal> {
        let name = (model.clone(), job.clone());
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(look) = looks.get(&name) {
            return Ok(look.clone());
        }
        if looks.len() >= MOST_JOBS {
            let why = format!("{MOST_JOBS} jobs are followed already, which is the most");
            return Err(Refusal::over_limit(why, AGAIN));
        }
        let (sender, receiver) = watch::channel(Look::Unknown);
        looks.insert(name.clone(), receiver.clone());
        tokio::spawn(run(self.root.clone(), name, sender, Arc::clone(&self.looks)));
        Ok(receiver)
    }
}

/// What need not be read again: it does not change.
#[derive(Default)]
struct Read {
    record: Option<JobRecord>,
    planned: Option<u64>,
}

/// Looks at a job until it has ended, or nobody follows it any more.
async fn run(root: Root, name: Name, sender: watch::Sender<Look>, looks: Arc<Looks>) {
    let (mut read, mut pause, mut failing) = (Read::default(), PAUSES.0, None);
    let began = Instant::now();
    loop {
        let changed = match look(&root, &name, &mut read).await {
            Ok(job) => {
                failing = None;
                if job.is_none() && began.elapsed() >= UNKNOWN {
                    sender.send_replace(Look::Failed(super::unknown(&name.1)));
                }
                let job = job.map_or(Look::Unknown, |job| Look::Stands(Arc::new(job)));
                !sender.borrow().is_last() && sender.send_if_modified(|known| news(known, job))
            }
            Err(error) => {
                let since = *failing.get_or_insert_with(Instant::now);
                if error.kind() == Kind::Permanent || since.elapsed() >= PATIENCE {
                    sender.send_replace(Look::Failed(error.into()));
                }
                false
            }
        };
        pause = if changed { PAUSES.0 } else { pause.mul_f64(1.5).min(PAUSES.1) };
        {
            let mut looks = looks.lock().unwrap_or_else(PoisonError::into_inner);
            // One receiver is the list's own.
            if sender.borrow().is_last() || sender.receiver_count() <= 1 {
                looks.remove(&name);
                return;
            }
        }
        // Those of many jobs are not all looked at in the same moment.
        sleep(pause.mul_f64(0.8 + 0.4 * clock::fraction())).await;
    }
}

/// Notes what was seen, and tells whether it is news.
fn news(known: &mut Look, seen: Look) -> bool {
    let same = match (&*known, &seen) {
        (Look::Unknown, Look::Unknown) => true,
        (Look::Stands(known), Look::Stands(seen)) => known == seen,
        _ => false,
    };
    if !same {
        *known = seen;
    }
    !same
}

/// How a job stands; `None` where no worker has accepted it.
async fn look(root: &Root, (model, id): &Name, read: &mut Read) -> Result<Option<proto::Job>, StoreError> {
    let job = Job::new(root, model, id);
    if read.record.is_none() {
        read.record = job.record().await?.map(without_texts);
    }
    let Some(record) = &read.record else { return Ok(None) };
    let standing = Standing::again(&job, &mut read.planned).await?;
    Ok(Some(answer(&Progress { record: record.clone(), standing })))
}

/// A record without what may be long, and is not told.
fn without_texts(record: JobRecord) -> JobRecord {
    let mut record = JobRecord { dropped: None, policy: String::new(), ..record };
    (record.manifest.files, record.manifest.policy) = (Vec::new(), None);
    record.manifest.labels.clear();
    record
}
