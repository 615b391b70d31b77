//! Publishing by a queue and workers, as trainers and operators do it.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Queue, url};

use crate::binary::{Run, Store, ended};

/// The queue that the binary uses where none is named.
pub(crate) fn queue(store: &Store) -> Arc<dyn Queue> {
    let folder = store.folder.path().join("weighbridge-data/queue");
    url::open(&format!("embedded:{}", folder.display()), Arc::new(SystemClock::new())).unwrap()
}

/// Puts any bytes on the queue, as if a trainer had sent them.
pub(crate) fn drop_bytes(queue: &dyn Queue, id: &str, body: &[u8]) {
    let message = Message {
        id: id.to_owned(),
        kind: Kind::Checkpoint,
        body: body.to_vec(),
        priority: Priority::Normal,
        device: Device::Any,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(queue.send(&message)).unwrap();
}

/// Puts a checkpoint manifest on the queue, with what else `more` says; gives its id, which is the job's.
pub(crate) fn drop_manifest(
    queue: &dyn Queue,
    model: &str,
    run: &str,
    step: u64,
    location: &Path,
    more: Value,
) -> String {
    let id = weighbridge::clock::operation_id();
    let mut manifest = json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": id, "model": model, "run": run, "step": step,
        "created_at": "2026-11-29T16:10:04Z",
        "location": location,
    });
    manifest.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    drop_bytes(queue, &id, manifest.to_string().as_bytes());
    id
}

/// Runs a worker until the queue is empty.
#[track_caller]
pub(crate) fn work(store: &Store) -> Run {
    let mut worker = store.command(["worker", "--until-empty", "--threads", "2"]);
    let run = ended(worker.output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    run
}
