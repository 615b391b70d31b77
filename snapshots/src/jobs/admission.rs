//! How many jobs of a model are converted at once: so that one model's flood leaves workers to others.
//!
//! Those that were let in stand in a dense log, written by put-if-absent alone. A job gets the next number if fewer
//! than the cap of those before have not ended; who loses the race for a number counts anew, so the cap is never
//! passed. A hint says up to where all have ended: it saves reading, and is only advice.

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::ModelName;

use super::Job;
use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// Whether a job may be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It may; it was let in now or before.
    In,
    /// So many others of its model are being converted that it has to wait.
    Full,
}

/// How often a job tries for the next number.
const ATTEMPTS: usize = 100;

/// Lets `job` in, if fewer than `cap` others have been let in and have not ended.
///
/// # Errors
/// [`Class::Conflict`] where others keep winning; else as the store fails.
pub async fn admit(root: &Root, model: &ModelName, job: &JobId, cap: usize) -> Result<Admission> {
    for _ in 0..ATTEMPTS {
        let (open, next) = open(root, model).await?;
        if open.contains(job) {
            return Ok(Admission::In);
        }
        if open.len() >= cap {
            return Ok(Admission::Full);
        }
        let key = layout::admission(model, next);
        if root.put_if_absent(&key, Bytes::from(job.to_string())).await? == Put::Written {
            return Ok(Admission::In);
        }
    }
    let why = format!("others were let in {ATTEMPTS} times meanwhile");
    Err(StoreError::new(Class::Conflict, layout::admitted(model), why))
}

/// Whether `job` would be let in now; nothing is changed.
///
/// # Errors
/// As the store fails.
pub async fn has_room(root: &Root, model: &ModelName, job: &JobId, cap: usize) -> Result<Admission> {
    let (open, _) = open(root, model).await?;
    Ok(if open.contains(job) || open.len() < cap { Admission::In } else { Admission::Full })
}

/// Those that were let in and have not ended, and the next free number.
async fn open(root: &Root, model: &ModelName) -> Result<(Vec<JobId>, u64)> {
    let hint_key = layout::admitted_hint(model);
    let hint = root.get(&hint_key, 32).await.ok().flatten();
    let hint = hint.and_then(|bytes| str::from_utf8(&bytes).ok()?.parse::<u64>().ok()).unwrap_or(1).max(1);
    // The last one before is listed too: without any, the hint is not believed.
    let before = (hint > 1).then(|| layout::admission(model, hint.saturating_sub(2)));
    let mut numbers = numbers(root, model, before.as_ref()).await?;
    let hinted = numbers.first() == Some(&hint.saturating_sub(1));
    let first = if hint > 1 && !hinted {
        numbers = self::numbers(root, model, None).await?;
        1
    } else {
        hint
    };
    let mut open = Vec::new();
    let mut ended_before = first;
    for &number in numbers.iter().filter(|&&number| number >= first) {
        let job = admitted(root, model, number).await?;
        match job {
            Some(job) if !Job::new(root, model, &job).has_ended().await? => open.push(job),
            _ if open.is_empty() => ended_before = number.saturating_add(1),
            _ => {}
        }
    }
    if ended_before > hint
        && let Err(error) = root.put_advice(&hint_key, Bytes::from(ended_before.to_string())).await
    {
        tracing::debug!(%error, "no hint left");
    }
    Ok((open, numbers.last().map_or(1, |last| last.saturating_add(1))))
}

/// The notes of jobs that were let in, and ended so long ago that no hint leads to them any more.
///
/// # Errors
/// As the store fails.
pub(crate) async fn admissions_of_old(root: &Root, model: &ModelName) -> Result<Vec<Key>> {
    let hint = root.get(&layout::admitted_hint(model), 32).await?;
    let hint = hint.and_then(|bytes| str::from_utf8(&bytes).ok()?.parse::<u64>().ok()).unwrap_or(0);
    let keys = root.keys(&layout::admitted(model), None).await?;
    // The last one before the hint is what makes it believed.
    let old = |key: &Key| layout::number(key).is_some_and(|number| number.saturating_add(1) < hint);
    Ok(keys.into_iter().filter(old).collect())
}

async fn numbers(root: &Root, model: &ModelName, after: Option<&Key>) -> Result<Vec<u64>> {
    let keys = root.keys(&layout::admitted(model), after).await?;
    Ok(keys.iter().filter_map(layout::number).collect())
}

/// The job that was let in as this number; `None` where it is damaged, and holds nobody up.
async fn admitted(root: &Root, model: &ModelName, number: u64) -> Result<Option<JobId>> {
    let key = layout::admission(model, number);
    let bytes = match root.get(&key, 64).await {
        Err(error) if error.class() == Class::Integrity => None,
        read => read?,
    };
    let job = bytes.as_deref().and_then(|bytes| str::from_utf8(bytes).ok()?.parse().ok());
    if job.is_none() {
        tracing::warn!(%key, "it does not name the job that was let in");
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use weighbridge_schemas::job::{Ended, Outcome, OutcomeSchema};
    use weighbridge_schemas::time::Timestamp;

    use super::*;
    use crate::root::{Absent, Durability};

    fn id(number: u64) -> JobId {
        format!("00000000-0000-4000-8000-{number:012x}").parse().unwrap()
    }

    async fn end(root: &Root, model: &ModelName, job: &JobId) {
        let outcome = Outcome {
            schema: OutcomeSchema::V1,
            outcome: Ended::Published,
            snapshot: None,
            sequence: None,
            by: None,
            error: None,
            bytes_stored: 0,
            bytes_reused: 0,
            who: "test".into(),
            when: Timestamp::from_nanoseconds(0),
        };
        Job::new(root, model, job).put_outcome(&outcome).await.unwrap();
    }

    fn store() -> (tempfile::TempDir, Root, ModelName) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let root = Root::open_with(path, Absent::Refuse, Durability::Unsynced).unwrap();
        (folder, root, "m".parse().unwrap())
    }

    #[tokio::test]
    async fn so_many_are_let_in_and_the_next_when_one_has_ended() {
        let (_folder, root, model) = store();
        for number in 0..5 {
            let wanted = if number < 3 { Admission::In } else { Admission::Full };
            assert_eq!(admit(&root, &model, &id(number), 3).await.unwrap(), wanted, "{number}");
        }
        // Again is as before, and what has ended makes room, whichever it is.
        assert_eq!(admit(&root, &model, &id(1), 3).await.unwrap(), Admission::In);
        end(&root, &model, &id(1)).await;
        assert_eq!(admit(&root, &model, &id(3), 3).await.unwrap(), Admission::In);
        assert_eq!(admit(&root, &model, &id(4), 3).await.unwrap(), Admission::Full);
        for number in [0, 2, 3] {
            end(&root, &model, &id(number)).await;
        }
        assert_eq!(admit(&root, &model, &id(4), 3).await.unwrap(), Admission::In);
        for hint in ["", "x", "0", "1", "3", "5", "99"] {
            root.put_advice(&layout::admitted_hint(&model), Bytes::from(hint)).await.unwrap();
            let (open, next) = open(&root, &model).await.unwrap();
            assert_eq!((open, next), (vec![id(4)], 6), "hint {hint:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn the_cap_holds_in_a_race() {
        let (_folder, root, model) = store();
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let jobs = (0..24).map(|number| {
            let (root, model) = (root.clone(), model.clone());
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            tokio::spawn(async move {
                while admit(&root, &model, &id(number), 3).await.unwrap() == Admission::Full {
                    tokio::task::yield_now().await;
                }
                most.fetch_max(1 + inside.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                end(&root, &model, &id(number)).await;
            })
        });
        for job in jobs.collect::<Vec<_>>() {
            job.await.unwrap();
        }
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)), "{most:?}");
    }
}
