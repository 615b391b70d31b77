//! Plans of the checkpoints at hand: a part is a small piece of work, and listing a checkpoint anew for each is not.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use weighbridge_schemas::job::{JobId, JobRecord};
use weighbridge_schemas::policy::Policy;
use weighbridge_snapshots::root::Root;

use super::request;
use crate::error::Result;
use crate::job::plan::Plan;
use crate::job::{self, Budget};

/// The plans that were used last.
#[derive(Debug)]
pub(super) struct Plans {
    most: usize,
    last: Mutex<VecDeque<(JobId, Arc<Plan>)>>,
}

impl Plans {
    /// Keeps up to `most` plans: they take memory.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.max(1), last: Mutex::default() }
    }

    /// Lists a job's checkpoint, and plans it.
    pub(super) async fn make(
        &self,
        root: &Root,
        record: &JobRecord,
        policy: &Policy,
        budget: Budget,
    ) -> Result<Arc<Plan>> {
        self.forget(&record.job());
        let request = request(record, policy)?;
        let plan = job::planned(root, &request, budget).await?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.truncate(self.most.saturating_sub(1));
        last.push_front((record.job(), Arc::clone(&plan)));
        Ok(plan)
    }

    /// The plan of a job, if it was made here lately.
    pub(super) fn of(&self, job: &JobId) -> Option<Arc<Plan>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().find(|(id, _)| id == job).map(|(_, plan)| Arc::clone(plan))
    }

    /// Forgets the plan of a job: its checkpoint has changed, or it has ended.
    pub(super) fn forget(&self, job: &JobId) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).retain(|(id, _)| id != job);
    }
}
