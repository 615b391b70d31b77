//! The documents of queued publishes, as they lie in the store: see [`weighbridge_schemas::job`] for what they say.
//!
//! All are put only if absent. What is there already rules, and whoever puts one gets it back, so that whoever comes
//! second goes by the first one's word.

use std::collections::BTreeSet;

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::job::{Decision, Document, Event, JobId, JobPlan, JobRecord, Outcome, PartResult};
use weighbridge_schemas::names::ModelName;

use crate::catalog;
use crate::error::{Class, Result, StoreError};
use crate::layout::{self, JobDocument};
use crate::root::{Put, Root};
use crate::sign::part::Part;

mod admission;

pub(crate) use admission::admissions_of_old;
pub use admission::{Admission, admit, has_room};

/// One job of one model.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    root: &'a Root,
    model: &'a ModelName,
    id: &'a JobId,
}

/// What a document says that rules, and whether it was there before.
#[derive(Debug)]
pub struct Settled<D> {
    /// The document.
    pub ruling: D,
    /// Whether somebody else had put it.
    pub put: Put,
}

impl<'a> Job<'a> {
    /// The job `id` of `model`.
    #[must_use]
    pub fn new(root: &'a Root, model: &'a ModelName, id: &'a JobId) -> Self {
        Self { root, model, id }
    }

    fn key(&self, document: JobDocument) -> Key {
        layout::job_document(self.model, self.id, document)
    }

    /// Its record; `None` where no worker has accepted it.
    ///
    /// # Errors
    /// [`Class::Integrity`] where it cannot be read; else as the store fails. So for all that follow.
    pub async fn record(&self) -> Result<Option<JobRecord>> {
        get(self.root, &self.key(JobDocument::Record)).await
    }

    /// Its plan; `None` where it has not been planned.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn plan(&self) -> Result<Option<JobPlan>> {
        get(self.root, &self.key(JobDocument::Plan)).await
    }

    /// What was decided of it; `None` where nothing was.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn decision(&self) -> Result<Option<Decision>> {
        get(self.root, &self.key(JobDocument::Decision)).await
    }

    /// How it ended; `None` where it has not.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn outcome(&self) -> Result<Option<Outcome>> {
        get(self.root, &self.key(JobDocument::Outcome)).await
    }

    /// Whether it has ended, in whatever way: its outcome is not read, so one that is damaged counts too.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn has_ended(&self) -> Result<bool> {
        Ok(self.root.size(&self.key(JobDocument::Outcome)).await?.is_some())
    }

    /// The result of a part of `plan`; `None` where there is none. Where the root signs, or trusts somebody, it has to
    /// be signed by one of them: a snapshot is made of it, and signed.
    ///
    /// # Errors
    /// As [`Self::record`]; [`Class::Integrity`] where it is not signed so.
    pub async fn part(&self, plan: &JobPlan, number: u64) -> Result<Option<PartResult>> {
        let key = layout::part(self.model, self.id, number);
        let Some(bytes) = self.root.get(&key, PartResult::MOST).await? else { return Ok(None) };
        let result = PartResult::parse(&bytes)
            .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
        if let Some(trust) = self.root.believed() {
            self.of_plan(plan, number).check(&trust, &result, &bytes)?;
        }
        Ok(Some(result))
    }

    fn of_plan<'p>(&'p self, plan: &'p JobPlan, number: u64) -> Part<'p> {
        Part { model: self.model, job: self.id, plan, number }
    }

    /// Puts the record, unless there is one; gives the one that rules.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn put_record(&self, record: &JobRecord) -> Result<Settled<JobRecord>> {
        settle(self.root, &self.key(JobDocument::Record), record).await
    }

    /// Puts the plan, unless there is one; gives the one that rules.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn put_plan(&self, plan: &JobPlan) -> Result<Settled<JobPlan>> {
        settle(self.root, &self.key(JobDocument::Plan), plan).await
    }

    /// Puts a decision, unless there is one; gives the one that rules.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn put_decision(&self, decision: &Decision) -> Result<Settled<Decision>> {
        settle(self.root, &self.key(JobDocument::Decision), decision).await
    }

    /// Puts the outcome, unless there is one; gives the one that rules.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn put_outcome(&self, outcome: &Outcome) -> Result<Settled<Outcome>> {
        settle(self.root, &self.key(JobDocument::Outcome), outcome).await
    }

    /// Puts the result of a part of `plan`, signed where the root signs, unless there is one. Every chunk that it names
    /// is on the disk before it is.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn put_part(&self, plan: &JobPlan, number: u64, result: &PartResult) -> Result<Put> {
        let key = layout::part(self.model, self.id, number);
        let Some(signers) = self.root.signers() else { return put(self.root, &key, result).await };
        let signed = self.of_plan(plan, number).sign(signers, result);
        let signed = signed.map_err(|error| StoreError::new(Class::Refused, &key, error.to_string()))?;
        put(self.root, &key, &signed).await
    }

    /// The parts, from 0 on, that have results.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn parts_done(&self) -> Result<BTreeSet<u64>> {
        let keys = self.root.keys(&layout::parts(self.model, self.id), None).await?;
        Ok(keys.iter().filter_map(layout::part_number).collect())
    }

    /// Notes what a worker did. `id` tells it from others that began at the same time.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn note(&self, event: &Event, id: &str) -> Result<()> {
        let key = layout::event(self.model, self.id, event.began.nanoseconds(), id);
        self.root.put_history(&key, Bytes::from(event.to_bytes())).await.map(drop)
    }

    /// What workers did, the oldest first; the newest `most` of it. An event that cannot be read is passed over: it is
    /// only history.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn events(&self, most: usize) -> Result<Vec<Event>> {
        let keys = self.root.keys(&layout::events(self.model, self.id), None).await?;
        let mut events = Vec::new();
        for key in keys.iter().skip(keys.len().saturating_sub(most)) {
            match get(self.root, key).await {
                Ok(event) => events.extend(event),
                Err(error) if error.class() == Class::Integrity => {
                    tracing::warn!(%error, "an event is passed over");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(events)
    }

    /// Notes, beside the jobs of its run that want the same channel, that there is this one.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn note_order(&self, record: &JobRecord) -> Result<()> {
        let key = self.order_key(record);
        self.root.put_if_absent(&key, Bytes::new()).await.map(drop)
    }

    fn order_key(&self, record: &JobRecord) -> Key {
        let manifest = &record.manifest;
        layout::order_note(self.model, &manifest.run, &record.channel, manifest.step, self.id)
    }

    /// The jobs of later steps of its run that want the same channel, the newest first, at most `most`.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn later(&self, record: &JobRecord, most: usize) -> Result<Vec<(u64, JobId)>> {
        let folder = layout::order(self.model, &record.manifest.run, &record.channel);
        let keys = self.root.keys(&folder, Some(&self.order_key(record))).await?;
        let later = keys.iter().rev().filter_map(layout::noted);
        Ok(later.filter(|(step, _)| *step > record.manifest.step).take(most).collect())
    }

    /// Notes in job `to` that this one, of `step`, gives way to it.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn give_way(&self, to: &JobId, step: u64) -> Result<()> {
        let key = layout::gave_way_note(self.model, to, step, self.id);
        self.root.put_if_absent(&key, Bytes::new()).await.map(drop)
    }

    /// The jobs that gave way to this one, or were about to, the newest first.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn gave_way(&self) -> Result<Vec<(u64, JobId)>> {
        let keys = self.root.keys(&layout::gave_way(self.model, self.id), None).await?;
        Ok(keys.iter().rev().filter_map(layout::noted).collect())
    }
}

/// The ids of a model's jobs, in no order that means anything.
///
/// # Errors
/// As the store fails.
pub async fn list(root: &Root, model: &ModelName) -> Result<Vec<JobId>> {
    catalog::folders(root, &layout::jobs(model)).await
}

/// The document under `key`; `None` where nothing is there.
pub(crate) async fn get<D: Document>(root: &Root, key: &Key) -> Result<Option<D>> {
    let Some(bytes) = root.get(key, D::MOST).await? else { return Ok(None) };
    let document = D::parse(&bytes);
    document.map(Some).map_err(|error| StoreError::new(Class::Integrity, key, error.to_string()))
}

/// Puts a document, unless one is there. What could not be read again is not written.
pub(crate) async fn put<D: Document>(root: &Root, key: &Key, document: &D) -> Result<Put> {
    let bytes = document.to_bytes();
    if bytes.len() > D::MOST {
        let why = format!("the {} would have {} bytes; at most {}", D::NAME, bytes.len(), D::MOST);
        return Err(StoreError::new(Class::Refused, key, why));
    }
    root.put_if_absent(key, Bytes::from(bytes)).await
}

async fn settle<D: Document + Clone>(root: &Root, key: &Key, document: &D) -> Result<Settled<D>> {
    let put = put(root, key, document).await?;
    let ruling = match put {
        Put::Written => document.clone(),
        Put::Present => {
            let gone = || StoreError::new(Class::Integrity, key, "it was there, and is gone");
            get(root, key).await?.ok_or_else(gone)?
        }
    };
    Ok(Settled { ruling, put })
}
