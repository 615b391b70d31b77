//! From what a person writes for a job to the job: its id, or the first digits of it, of whatever model.

use clap::Args;

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::job::{JobId, JobRecord};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};

/// The job that is meant.
#[derive(Debug, Args)]
pub(in crate::cli) struct Which {
    /// The job's id, or its first 6 or more characters.
    #[arg(value_name = "JOB")]
    job: String,
    /// The job's model [default: it is looked for in all].
    #[arg(long, value_name = "MODEL")]
    model: Option<ModelName>,
}

impl Which {
    pub(in crate::cli) fn new(job: String, model: Option<ModelName>) -> Self {
        Self { job, model }
    }

    /// Refuses what no job's id begins with.
    pub(in crate::cli) fn check(&self) -> Result<()> {
        if is_prefix(&self.job) {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "{:?} is no job: give its id, or the first {PREFIX_DIGITS} or more characters of it; \
             `weighbridge jobs` lists them",
            shorten(&self.job)
        )))
    }

    /// The job; `None` where no worker has accepted it.
    pub(in crate::cli) async fn find(&self, root: &Root) -> Result<Option<(ModelName, JobId)>> {
        self.check()?;
        let models = match &self.model {
            Some(model) => vec![model.clone()],
            None => catalog::models(root).await?,
        };
        let mut found = Vec::new();
        for model in models {
            match self.job.parse::<JobId>() {
                Ok(id) if Job::new(root, &model, &id).record().await?.is_some() => found.push((model, id)),
                Ok(_) => {}
                Err(_) => {
                    let ids = jobs::list(root, &model).await?;
                    let ids = ids.into_iter().filter(|id| id.as_str().starts_with(&self.job));
                    found.extend(ids.map(|id| (model.clone(), id)));
                }
            }
        }
        if found.len() > 1 {
            return Err(self.several(&found));
        }
        Ok(found.pop())
    }

    fn several(&self, found: &[(ModelName, JobId)]) -> Failure {
        let listed: Vec<_> = found.iter().take(5).map(|(model, id)| format!("{id} of {model}")).collect();
        let why = format!(
            "{} jobs have such an id ({}{}); give more of it, or --model",
            found.len(),
            listed.join(", "),
            if found.len() > listed.len() { ", ..." } else { "" },
        );
        StoreError::new(Class::Refused, shorten(&self.job), why).into()
    }

    /// The job, which has to be there, and its record.
    pub(in crate::cli) async fn get(&self, root: &Root) -> Result<JobRecord> {
        if let Some((model, id)) = self.find(root).await?
            && let Some(record) = Job::new(root, &model, &id).record().await?
        {
            return Ok(record);
        }
        let why = "no worker has accepted such a job; `weighbridge jobs` lists those that there are, \
                   `weighbridge queue status` tells what still waits, `weighbridge dead` what could not be read";
        Err(StoreError::new(Class::NotFound, shorten(&self.job), why).into())
    }
}

/// Whether ids may begin so, and it is long enough.
pub(in crate::cli) fn is_prefix(text: &str) -> bool {
    text.len() >= PREFIX_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_may_be_shortened_but_not_too_much() {
        for (text, right) in [
            ("0f8fad5b-d9cb-469f-a165-70867728950e", true),
            ("0f8fad", true),
            ("0f8fa", false),
            ("0F8FAD", false),
            ("../../x", false),
        ] {
            assert_eq!(Which::new(text.to_owned(), None).check().is_ok(), right, "{text}");
        }
    }
}
