//! Figures of what is done.

use std::time::Duration;

use weighbridge_schemas::job::{Ended, StepKind};

use crate::job::convert::Bytes;

/// Figures of what is done.
#[derive(Debug, Default)]
pub struct Metrics {}

impl Metrics {
    /// A job ended.
    pub fn job_ended(&self, _ended: Ended) {}
    /// A step was done.
    pub fn step_done(&self, _step: StepKind, _took: Duration) {}
    /// Something is tried again because of a failure of this class.
    pub fn retried(&self, _class: &'static str) {}
    /// There is a new dead letter.
    pub fn dead_letter(&self) {}
    /// A part was converted: so many bytes were read of the checkpoint, and so many of chunks stored.
    pub fn converted(&self, _read: u64, _bytes: Bytes) {}
    /// Headers were stored.
    pub fn described(&self, _bytes: Bytes) {}
}
