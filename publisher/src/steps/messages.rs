//! The messages that jobs are made of.

use std::time::Duration;

use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::job::{Document, JobRecord, Republish, Step, StepKind, StepSchema};
use weighbridge_schemas::policy::{JobDevice, JobPolicy};

/// The message that asks for a step of a job.
#[must_use]
pub fn step(record: &JobRecord, step: StepKind, part: Option<u64>, device: Device) -> Message {
    let step =
        Step { schema: StepSchema::V1, model: record.manifest.model.clone(), job: record.job(), step, part };
    Message {
        id: step.message_id(),
        kind: Kind::Step,
        body: step.to_bytes(),
        priority: Priority::of(record.manifest.priority),
        device,
    }
}

/// The message that hands over a checkpoint, whose manifest was written as `body`.
#[must_use]
pub fn checkpoint(manifest: &CheckpointManifest, body: Vec<u8>) -> Message {
    Message {
        id: manifest.id.clone(),
        kind: Kind::Checkpoint,
        body,
        priority: Priority::of(manifest.priority),
        device: Device::Any,
    }
}

/// The message that asks to publish a checkpoint again.
#[must_use]
pub fn republish(request: &Republish) -> Message {
    Message {
        id: request.manifest.id.clone(),
        kind: Kind::Republish,
        body: request.to_bytes(),
        priority: Priority::of(request.manifest.priority),
        device: Device::Any,
    }
}

/// Which workers may convert parts under this policy.
#[must_use]
pub fn device(policy: &JobPolicy) -> Device {
    match policy.device {
        JobDevice::Cpu => Device::Cpu,
        JobDevice::Gpu => Device::Gpu { wait: Duration::from_secs(policy.gpu_wait_seconds.into()) },
        JobDevice::Auto => Device::Any,
    }
}
