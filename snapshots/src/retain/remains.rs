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
    let (own, idle) = (layout::model(model), options.grace.max(options.claims));
    for one in root.unfinished(idle).await?.iter().filter(|one| one.key.prefix_matches(&own)) {
        if really {
            root.abandon(one).await?;
        }
        told(&format!("{}#{}", one.key, one.id));
        collected.remains += 1;
    }
    if really {
        root.drop_empty_folders(&own, idle).await?;
    }
    Ok(())
}

/// What belongs to no model; see [`super::tidy`].
pub(super) async fn tidy(root: &Root, grace: Duration, dry_run: bool) -> Result<(Vec<String>, u64)> {
    let mut keys = Vec::new();
    let mut bytes = 0u64;
    for one in root.unfinished(grace).await? {
        keys.push(format!("{}#{}", one.key, one.id));
        bytes = bytes.saturating_add(one.bytes.unwrap_or(0));
        if !dry_run {
            root.abandon(&one).await?;
        }
    }
    let now = root.now();
    let mut probed = Vec::new();
    root.walk(&layout::probes(), None, |listed| {
        if !layout::is_probes_note(&listed.key) && age(listed.modified, now) >= grace {
            probed.push(listed.key);
        }
        Ok(())
    })
    .await?;
    if !dry_run {
        root.delete(&probed).await?;
    }
    keys.extend(probed.iter().map(ToString::to_string));
    Ok((keys, bytes))
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
