//! Whether what a store holds is signed by trusted keys: every snapshot, and the entry that rules each channel. Older
//! entries are history, on which nobody acts.

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;

use crate::catalog;
use crate::channel::Channel;
use crate::error::{Class, Result, StoreError};
use crate::manifest;
use crate::root::Root;

/// What was found signed, and what was not.
#[derive(Debug, Default)]
pub struct Audit {
    /// Snapshots that a trusted key has signed.
    pub snapshots: u64,
    /// Channels whose ruling entry a trusted key has signed.
    pub channels: u64,
    /// Everything that is not signed as it must be.
    pub problems: Vec<StoreError>,
}

impl Audit {
    /// Notes what is missing or damaged and goes on; any other failure ends the work.
    fn note<T>(&mut self, outcome: Result<T>) -> Result<Option<T>> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if matches!(error.class(), Class::Integrity | Class::NotFound) => {
                self.problems.push(error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Looks at one snapshot and its ruling report, where `root` trusts somebody.
///
/// # Errors
/// As the store fails; what is not signed is in the result.
pub async fn snapshot(root: &Root, model: &ModelName, id: &SnapshotId, audit: &mut Audit) -> Result<()> {
    if root.trust().is_none() {
        return Ok(());
    }
    let found = manifest::get(root, model, id).await;
    if audit.note(found)?.is_some() {
        let report = manifest::report(root, model, id).await;
        audit.snapshots += u64::from(audit.note(report)?.is_some());
    }
    Ok(())
}

/// Looks at every snapshot and every channel of `model`, where `root` trusts somebody.
///
/// # Errors
/// As [`snapshot`].
pub async fn model(root: &Root, model: &ModelName, audit: &mut Audit) -> Result<()> {
    if root.trust().is_none() {
        return Ok(());
    }
    for id in catalog::snapshots(root, model).await? {
        snapshot(root, model, &id, audit).await?;
    }
    for name in catalog::channels(root, model).await? {
        let latest = Channel::new(root, model, &name).latest().await;
        audit.channels += u64::from(audit.note(latest)?.flatten().is_some());
    }
    Ok(())
}
