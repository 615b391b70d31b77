//! When jobs were accepted. Their ids tell nothing of it, so every record has to be read to list the newest first; but
//! records never change, and what was read once is remembered.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use futures::{StreamExt, stream};
use tokio::sync::Mutex;

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
        // Whoever asks meanwhile waits, and finds it read.
        let mut known = self.known.lock().await;
        let before = known.remove(model).unwrap_or_default();
        let room = MOST.saturating_sub(known.values().map(BTreeMap::len).sum());
        let read = |id: JobId| {
            let remembered = before.get(&id).copied();
            async move {
                let at = match remembered {
                    Some(at) => Ok(Some(at)),
                    None => Job::new(root, model, &id)
                        .record()
                        .await
                        .map(|record| record.map(|record| record.accepted_at)),
                };
                (id, at)
            }
        };
        let ages = known.entry(model.clone()).or_default();
        let mut reading = stream::iter(ids).map(read).buffered(BESIDE);
        let mut accepted = Vec::new();
        while let Some((id, at)) = reading.next().await {
            let Some(at) = whole(at, damage)?.flatten() else { continue };
            if ages.len() < room {
                ages.insert(id.clone(), at);
            }
            accepted.push(Accepted { at, model: model.clone(), id });
        }
        Ok(accepted)
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
    fn a_place_in_a_list_is_read_as_it_was_written() {
        let text = "1700000000000000000/m.1/0f8fad5b-d9cb-469f-a165-70867728950e";
        assert_eq!(text.parse::<Accepted>().unwrap().to_string(), text);
        for wrong in ["", "1", "1/m", "1/m/x", "x/m/0f8fad5b-d9cb-469f-a165-70867728950e", "1/../1"] {
            assert_eq!(wrong.parse::<Accepted>().unwrap_err().class, "usage", "{wrong}");
        }
    }
}
