//! Documents of jobs that ended long ago, and what killed processes left: nothing that anything rests on.

use std::time::Duration;

use object_store::path::Path as Key;

use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::ModelName;

use super::keep::age;
use super::{Collected, Options, Told};
use crate::error::{Class, Result};
use crate::jobs::{self, Job};
use crate::layout::{self, JobDocument};
use crate::root::Root;

/// Deletes them; or tells what would be deleted, and that is all, where `really` says no.
pub(super) async fn delete(
    root: &Root,
    model: &ModelName,
    options: &Options,
    collected: &mut Collected,
    told: Told<'_>,
    really: bool,
) -> Result<()> {
    let now = root.now();
    let mut others = Vec::new();
    root.walk(&layout::claims(model), None, |listed| {
        if age(listed.modified, now) >= options.claims {
            others.push(listed.key);
        }
        Ok(())
    })
    .await?;
    others.extend(jobs::admissions_of_old(root, model).await?);
    if really {
        root.delete(&others).await?;
    }
    others.iter().for_each(|key| told(key.as_ref()));
    collected.remains += others.len() as u64;

    let days = Duration::from_secs(u64::from(options.retention.keep_jobs_days) * 86_400).max(options.grace);
    for id in jobs::list(root, model).await? {
        let outcome = root.look(&layout::job_document(model, &id, JobDocument::Outcome)).await?;
        if outcome.is_none_or(|outcome| age(outcome.modified, now) < days) {
            continue;
        }
        // One after another: with its outcome, which goes last, a job has ended for whoever looks.
        for key in job_keys(root, model, &id).await? {
            if really {
                root.delete(std::slice::from_ref(&key)).await?;
            }
            told(key.as_ref());
        }
        collected.jobs.push(id);
    }

    // Somebody may be at work on what is younger than claims that are heeded.
    let left = root.left(&layout::model(model), options.grace.max(options.claims), really).await?;
    left.iter().for_each(|name| told(name));
    collected.remains += left.len() as u64;
    Ok(())
}

/// The keys of a job that has ended, in the order in which they go: first the note that there is such a job.
async fn job_keys(root: &Root, model: &ModelName, id: &JobId) -> Result<Vec<Key>> {
    let mut keys = Vec::new();
    match Job::new(root, model, id).record().await {
        Ok(Some(record)) => {
            let manifest = &record.manifest;
            let note = layout::order_note(model, &manifest.run, &record.channel, manifest.step, id);
            if root.size(&note).await?.is_some() {
                keys.push(note);
            }
        }
        Ok(None) => {}
        // Who cannot be read has no note that could be found; its documents go all the same.
        Err(error) if error.class() == Class::Integrity => {}
        Err(error) => return Err(error),
    }
    let outcome = layout::job_document(model, id, JobDocument::Outcome);
    let documents = root.keys(&layout::job(model, id), None).await?;
    keys.extend(documents.into_iter().filter(|key| *key != outcome));
    keys.push(outcome);
    Ok(keys)
}
