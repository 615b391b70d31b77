//! What is on the queue beside checkpoint manifests: the next step of a job, and requests to publish again.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Document, JobId, document};
use crate::checkpoint::CheckpointManifest;
use crate::limits;
use crate::names::ModelName;

document!(Step, "step", limits::JOB_DOCUMENT_BYTES, StepSchema, "weighbridge.step/v1");
document!(
    Republish,
    "republish request",
    limits::JOB_RECORD_BYTES,
    RepublishSchema,
    "weighbridge.republish/v1"
);

/// The next step of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// Always `weighbridge.step/v1`.
    pub schema: StepSchema,
    /// The model.
    pub model: ModelName,
    /// The job.
    pub job: JobId,
    /// Which step.
    pub step: StepKind,
    /// Which part, from 0 on, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u64>,
}

impl Step {
    /// The id of the message that asks for it: asking again carries the same one.
    #[must_use]
    pub fn message_id(&self) -> String {
        match self.part {
            Some(part) => format!("{}.{}.{part}", self.job, self.step.as_str()),
            None => format!("{}.{}", self.job, self.step.as_str()),
        }
    }
}

/// The steps of a job, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// The manifest becomes a job.
    Accept,
    /// The checkpoint is listed, and cut into parts.
    Plan,
    /// One part is read, encoded and stored.
    Part,
    /// The parts become a snapshot, which is judged, sealed and put on its channel.
    Finish,
}

impl StepKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Accept, Self::Plan, Self::Part, Self::Finish];

    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Plan => "plan",
            Self::Part => "part",
            Self::Finish => "finish",
        }
    }
}

/// A request to publish a checkpoint again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Republish {
    /// Always `weighbridge.republish/v1`.
    pub schema: RepublishSchema,
    /// The manifest, with an id of its own.
    pub manifest: CheckpointManifest,
    /// The job that it repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats: Option<JobId>,
    /// Whether it moves the channel to an older step too.
    #[serde(default)]
    pub promote: bool,
    /// The operator; absent where a job goes again because the one that it gave way to ended unpublished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_by: Option<String>,
}
