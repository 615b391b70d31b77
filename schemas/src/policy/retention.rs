//! The `[retention]` section of a policy.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What `gc` keeps. A snapshot is kept if any of the first three says so, and all are where none is set. Kept in any
/// case are pinned snapshots, those that a channel points at or pointed at in its newest entries, chunks of running
/// jobs, and what is younger than the grace period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// The newest snapshots of the model to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u32>,
    /// Snapshots are kept for so many days after they were stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_days: Option<u32>,
    /// Snapshots are kept whose step is a multiple of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_each: Option<u64>,
    /// So many different snapshots of each channel are kept, the newest, so that it can be rolled back; 1 or more.
    #[serde(default = "ten")]
    pub keep_history: u32,
    /// For how many days the documents of jobs are kept that have ended.
    #[serde(default = "thirty")]
    pub keep_jobs_days: u32,
    /// What is younger than so many hours is not deleted.
    #[serde(default = "twenty_four")]
    pub grace_hours: u32,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            keep_last: None,
            keep_days: None,
            keep_each: None,
            keep_history: ten(),
            keep_jobs_days: thirty(),
            grace_hours: twenty_four(),
        }
    }
}

impl Retention {
    /// Whether the numbers make sense.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if self.keep_history == 0 || self.keep_each == Some(0) {
            return Err("retention.keep_history and retention.keep_each are numbers from 1 on");
        }
        Ok(())
    }
}

const fn ten() -> u32 {
    10
}

const fn thirty() -> u32 {
    30
}

const fn twenty_four() -> u32 {
    24
}
