//! From what a person writes for a job to the job: its id, or the first digits of it, of whatever model.

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::job::{JobId, JobRecord};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};
use crate::operations::is_prefix;

/// Refuses what no job's id begins with.
///
/// # Errors
/// A usage failure.
pub fn check(job: &str) -> Result<()> {
    if is_prefix(job) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{:?} is no job: give its id, or the first {PREFIX_DIGITS} or more characters of it; \
         `weighbridge jobs` lists them",
        shorten(job)
    )))
}

/// The job whose id is `job` or begins so, of this model or of any; `None` where no worker has accepted it.
///
/// # Errors
/// As [`check`]; [`Class::Refused`] where there are several; else as the store fails.
pub async fn find(root: &Root, job: &str, model: Option<&ModelName>) -> Result<Option<(ModelName, JobId)>> {
    check(job)?;
    let models = match model {
        Some(model) => vec![model.clone()],
        None => catalog::models(root).await?,
    };
    let mut found = Vec::new();
    for model in models {
        match job.parse::<JobId>() {
            Ok(id) if Job::new(root, &model, &id).record().await?.is_some() => found.push((model, id)),
            Ok(_) => {}
            Err(_) => {
                let ids = jobs::list(root, &model).await?;
                let ids = ids.into_iter().filter(|id| id.as_str().starts_with(job));
                found.extend(ids.map(|id| (model.clone(), id)));
            }
        }
    }
    if found.len() > 1 {
        return Err(several(job, &found));
    }
    Ok(found.pop())
}

fn several(job: &str, found: &[(ModelName, JobId)]) -> Failure {
    let listed: Vec<_> = found.iter().take(5).map(|(model, id)| format!("{id} of {model}")).collect();
    let why = format!(
        "{} jobs have such an id ({}{}); give more of it, or --model",
        found.len(),
        listed.join(", "),
        if found.len() > listed.len() { ", ..." } else { "" },
    );
    StoreError::new(Class::Refused, shorten(job), why).into()
}

/// The record of such a job, which has to be there.
///
/// # Errors
/// As [`find`]; [`Class::NotFound`].
pub async fn get(root: &Root, job: &str, model: Option<&ModelName>) -> Result<JobRecord> {
    if let Some((model, id)) = find(root, job, model).await?
        && let Some(record) = Job::new(root, &model, &id).record().await?
    {
        return Ok(record);
    }
    let why = "no worker has accepted such a job; `weighbridge jobs` lists those that there are, \
               `weighbridge queue status` tells what still waits, `weighbridge dead` what could not be read";
    Err(StoreError::new(Class::NotFound, shorten(job), why).into())
}
