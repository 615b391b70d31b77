//! When jobs were accepted. Their ids tell nothing of it, so every record has to be read to list the newest first; but
//! records never change, and what was read once is remembered.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use futures::{StreamExt, stream};
use weighbridge_schemas::error::{DocumentError, shorten};
use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};
use crate::operations::whole;

/// How many records are read at a time.
const BESIDE: usize = 16;
/// The most jobs that are remembered: some 100 bytes each.
const MOST: usize = 100_000;

/// A job by the time at which it was accepted: newer ones are greater.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Accepted {
    /// When it was.
    pub at: Timestamp,
    /// Its model.
    pub model: ModelName,
    /// The job.
    pub id: JobId,
}

impl fmt::Display for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.at.nanoseconds(), self.model, self.id)
    }
}

impl FromStr for Accepted {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Failure::usage(format!("{:?} is no place in a list of jobs", shorten(text)));
        let mut parts = text.splitn(3, '/');
        let mut part = || parts.next().ok_or_else(bad);
        let at: u64 = part()?.parse().map_err(|_| bad())?;
        let at = Timestamp::from_nanoseconds(i128::from(at));
        let model = part()?.parse().map_err(|_: DocumentError| bad())?;
        Ok(Self { at, model, id: part()?.parse().map_err(|_: DocumentError| bad())? })
    }
}

/// When jobs were accepted, as far as it was read before.
#[derive(Debug, Default)]
pub struct Ages {
    known: Mutex<BTreeMap<ModelName, BTreeMap<JobId, Timestamp>>>,
    /// Who has it reads records: whoever else wants some finds them read.
    reading: tokio::sync::Mutex<()>,
}

impl Ages {
    /// A model's jobs, in no order. Those that are damaged are left out, and the first damage is kept.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn of(
        &self,
        root: &Root,
        model: &ModelName,
        damage: &mut Option<StoreError>,
    ) -> Result<Vec<Accepted>> {
        let ids = jobs::list(root, model).await?;
        let (mut accepted, mut unknown) = self.known(model, &ids);
        if unknown.is_empty() {
            return Ok(accepted);
        }
        let _reading = self.reading.lock().await;
        (accepted, unknown) = self.known(model, &ids);
        let read = |id: JobId| async move {
            let record = Job::new(root, model, &id).record().await;
            (id, record.map(|record| record.map(|record| record.accepted_at)))
        };
        let mut reading = stream::iter(unknown).map(read).buffered(BESIDE);
        while let Some((id, at)) = reading.next().await {
            let Some(at) = whole(at, damage)?.flatten() else { continue };
            // At once, so that what was read stays read where nobody waits for the rest.
            self.remember(model, &id, at);
            accepted.push(Accepted { at, model: model.clone(), id });
        }
        Ok(accepted)
    }

    /// Of these jobs those whose age is known, and the others; jobs that are not among them are forgotten.
    fn known(&self, model: &ModelName, ids: &[JobId]) -> (Vec<Accepted>, Vec<JobId>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let listed: BTreeSet<&JobId> = ids.iter().collect();
        let Some(ages) = known.get_mut(model) else { return (Vec::new(), ids.to_vec()) };
        ages.retain(|id, _| listed.contains(id));
        let (mut accepted, mut unknown) = (Vec::with_capacity(ids.len()), Vec::new());
        for id in ids {
            match ages.get(id) {
                Some(&at) => accepted.push(Accepted { at, model: model.clone(), id: id.clone() }),
                None => unknown.push(id.clone()),
            }
        }
        if ages.is_empty() {
            known.remove(model);
        }
        (accepted, unknown)
    }

    fn remember(&self, model: &ModelName, id: &JobId, at: Timestamp) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.values().map(BTreeMap::len).sum::<usize>() < MOST {
            known.entry(model.clone()).or_default().insert(id.clone(), at);
        }
    }

    /// A model's jobs, the newest first.
    ///
    /// # Errors
    /// As the store fails; a damaged record is a failure here.
    pub async fn newest_first(&self, root: &Root, model: &ModelName) -> Result<Vec<JobId>> {
        let mut damage = None;
        let mut newest = self.of(root, model, &mut damage).await?;
        if let Some(damage) = damage {
            return Err(damage.into());
        }
        newest.sort_unstable_by(|one, other| other.cmp(one));
        Ok(newest.into_iter().map(|accepted| accepted.id).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_remembered_for_as_long_as_it_is_listed() {
        let (ages, model) = (Ages::default(), "m".parse().unwrap());
        let ids: Vec<_> = (0..3u8).map(|n| JobId::of(&[n])).collect();
        assert_eq!(ages.known(&model, &ids), (vec![], ids.clone()));
        for (n, id) in (0..).zip(&ids[..2]) {
            ages.remember(&model, id, Timestamp::from_nanoseconds(n));
        }
        let (known, unknown) = ages.known(&model, &ids[1..]);
        assert_eq!((known[0].id.clone(), known.len()), (ids[1].clone(), 1));
        assert_eq!(unknown, ids[2..]);
        assert_eq!(ages.known(&model, &ids[..1]), (vec![], ids[..1].to_vec()), "it was not listed before");
        assert!(ages.known.lock().unwrap().is_empty());
    }

    #[test]
    fn a_place_in_a_list_is_read_as_it_was_written() {
        let text = "1700000000000000000/m.1/0f8fad5b-d9cb-469f-a165-70867728950e";
        assert_eq!(text.parse::<Accepted>().unwrap().to_string(), text);
        for wrong in ["", "1", "1/m", "1/m/x", "x/m/0f8fad5b-d9cb-469f-a165-70867728950e", "1/../1"] {
            assert_eq!(wrong.parse::<Accepted>().unwrap_err().class, "usage", "{wrong}");
        }
    }
}
