//! A store, a queue and workers on them, in this process or in others.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use weighbridge::job::Budget;
use weighbridge::metrics::Metrics;
use weighbridge::sources::Allowed;
use weighbridge::steps::{Options, Pauses, Steps};
use weighbridge::worker::{self, Health, Stop};
use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Queue, Taker};
use weighbridge_snapshots::root::{Absent, Durability, Root};
use weighbridge_tests::rabbit::Broker;
use weighbridge_tests::tables::{Pattern, Table, safetensors};

/// The model that tests publish, unless they publish several.
pub(crate) const MODEL: &str = "m";

/// Where a store and a queue lie.
#[derive(Debug, Clone)]
pub(crate) struct House {
    pub(crate) folder: PathBuf,
    /// The queue's URL.
    pub(crate) queue: String,
}

impl House {
    /// An empty one; it goes with the folder.
    pub(crate) fn new() -> (TempDir, Self) {
        // A path with a space in it, as people have them.
        let folder = tempfile::Builder::new().prefix("a house ").tempdir().unwrap();
        let queue = format!("embedded:{}", folder.path().join("queue").display());
        let house = Self { folder: folder.path().to_path_buf(), queue };
        (folder, house)
    }

    /// An empty one, whose queue is a broker's.
    pub(crate) fn on(broker: &Broker, name: &str) -> (TempDir, Self) {
        let (folder, house) = Self::new();
        (folder, Self { queue: broker.url(name), ..house })
    }

    /// The store. Nothing is synced: no test can take the machine's power away.
    pub(crate) fn root(&self) -> Root {
        let place = self.folder.join("store");
        Root::open_with(place.to_str().unwrap(), Absent::Create, Durability::Unsynced).unwrap()
    }

    /// The queue.
    pub(crate) fn queue(&self) -> Arc<dyn Queue> {
        weighbridge_queue::url::open(&self.queue, Arc::new(SystemClock::new())).unwrap()
    }

    /// A checkpoint of `tables` tables, each of which becomes a part of its own.
    pub(crate) fn checkpoint(&self, name: &str, tables: usize) -> PathBuf {
        let path = self.folder.join(name);
        let pattern = Pattern::new();
        let names: Vec<_> = (0..tables).map(|table| format!("dense.t{table:02}.weight")).collect();
        let tables: Vec<_> =
            names.iter().map(|name| Table::dense(name, PART_BYTES / 256, 64, &pattern)).collect();
        safetensors(&path, &tables).unwrap();
        path
    }
}

/// The size of a table that makes a part, in bytes.
pub(crate) const PART_BYTES: u64 = 5 << 18;

/// How steps are done in tests.
pub(crate) fn options() -> Options {
    Options {
        who: format!("test {}", std::process::id()),
        budget: Budget { memory: 256 << 20, threads: 2 },
        concurrency: 1,
        part_bytes: PART_BYTES,
        jobs_per_model: 4,
        sources: Allowed::default(),
        pauses: Pauses { first: Duration::from_millis(5), longest: Duration::from_millis(100) },
    }
}

/// How a worker goes about it in tests: until the queue is empty.
pub(crate) fn until_empty(lease: Duration) -> worker::Options {
    worker::Options {
        taker: Taker::Cpu,
        lease,
        idle: (Duration::from_millis(2), Duration::from_millis(20)),
        stop: Duration::from_secs(5),
        until_empty: true,
    }
}

/// Works in this process until the queue is empty.
pub(crate) async fn work(root: Root, queue: Arc<dyn Queue>, options: Options, lease: Duration) {
    let concurrency = options.concurrency;
    let steps = Arc::new(Steps::new(root, queue, options, Arc::new(Metrics::default())));
    let (_tell, stop) = Stop::new();
    worker::run(steps, concurrency, until_empty(lease), Arc::new(Health::default()), stop).await;
}

/// A checkpoint manifest.
pub(crate) fn manifest(id: &str, step: u64, location: &Path) -> serde_json::Value {
    serde_json::json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": id,
        "model": MODEL,
        "run": "r",
        "step": step,
        "created_at": "2026-11-29T12:00:00Z",
        "location": location,
    })
}

/// A checkpoint manifest with more fields, or others.
pub(crate) fn manifest_with(
    id: &str,
    step: u64,
    location: &Path,
    fields: &[(&str, serde_json::Value)],
) -> serde_json::Value {
    let mut manifest = manifest(id, step, location);
    for (field, value) in fields {
        manifest[*field] = value.clone();
    }
    manifest
}

/// A policy as it stands in a manifest: nothing is encoded, and what `text` says.
pub(crate) fn policy(text: &str) -> serde_json::Value {
    serde_json::json!({ "toml": format!("schema = \"weighbridge.policy/v1\"\n{text}") })
}

/// Puts a manifest on the queue.
pub(crate) async fn drop_manifest(queue: &dyn Queue, manifest: &serde_json::Value) {
    let message = Message {
        id: manifest["id"].as_str().unwrap_or("none").to_owned(),
        kind: Kind::Checkpoint,
        body: manifest.to_string().into_bytes(),
        priority: Priority::Normal,
        device: Device::Any,
    };
    queue.send(&message).await.unwrap();
}

/// An id of test number `number`.
pub(crate) fn id(number: u64) -> String {
    format!("00000000-0000-4000-8000-{number:012x}")
}
