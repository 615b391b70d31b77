//! One checkpoint, published by 1, 2 and 4 workers into a store that takes a fixed time for each request and a fixed
//! bandwidth for its bytes: how the wall time falls.
//!
//! The workers are threads of this program, each with a store, a queue and a budget of its own, as processes would have
//! them; one thread encodes in each, and what they wait for is the store.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weighbridge::job::Budget;
use weighbridge::metrics::Metrics;
use weighbridge::sources::Allowed;
use weighbridge::steps::{Options, Pauses, Steps};
use weighbridge::worker::{self, Health, Stop};
use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Queue, Taker};
use weighbridge_schemas::job::{Ended, JobId};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::error::Result as StoreResult;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::{Absent, Durability, Intercept, Request, Root};

use crate::Failure;

/// What each request takes.
const LATENCY: Duration = Duration::from_millis(30);
/// Bytes a second of one request.
const BANDWIDTH: f64 = 20e6;
/// How much of the checkpoint is a part.
const PART: u64 = 32 << 20;
/// The job.
const JOB: &str = "00000000-0000-4000-8000-000000000001";

/// A store over a long way.
#[derive(Debug)]
struct Far;

impl Intercept for Far {
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    fn before(&self, request: &Request) -> StoreResult<()> {
        std::thread::sleep(LATENCY + Duration::from_secs_f64(request.bytes as f64 / BANDWIDTH));
        Ok(())
    }

    fn after(&self, _request: &Request) -> StoreResult<()> {
        Ok(())
    }
}

fn open(folder: &Path) -> Result<(Root, Arc<dyn Queue>), Failure> {
    let store = folder.join("store");
    let store = store.to_str().ok_or("the folder's name is not UTF-8")?;
    let root = Root::open_with(store, Absent::Create, Durability::Unsynced)?;
    let url = format!("embedded:{}", folder.join("queue").display());
    Ok((root, weighbridge_queue::url::open(&url, Arc::new(SystemClock::new()))?))
}

/// Publishes `checkpoint` by so many workers; gives the wall time.
fn publish(folder: &Path, checkpoint: &Path, workers: usize) -> Result<Duration, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    let (root, queue) = open(folder)?;
    let manifest = serde_json::json!({
        "schema": "weighbridge.checkpoint/v1", "id": JOB, "model": "m", "run": "r", "step": 1,
        "created_at": "2026-11-29T12:00:00Z", "location": std::path::absolute(checkpoint)?,
    });
    let message = Message {
        id: JOB.to_owned(),
        kind: Kind::Checkpoint,
        body: manifest.to_string().into_bytes(),
        priority: Priority::Normal,
        device: Device::Any,
    };
    runtime.block_on(queue.send(&message))?;
    let started = Instant::now();
    let mut tasks = Vec::new();
    for number in 0..workers {
        let (root, queue) = open(folder)?;
        tasks.push(runtime.spawn(work(root.behind(Arc::new(Far)), queue, number)));
    }
    for task in tasks {
        runtime.block_on(task)?;
    }
    let took = started.elapsed();
    let (model, job): (ModelName, JobId) = ("m".parse()?, JOB.parse()?);
    let outcome =
        runtime.block_on(Job::new(&root, &model, &job).outcome())?.ok_or("the job has not ended")?;
    if outcome.outcome == Ended::Published {
        return Ok(took);
    }
    Err(format!("the job ended {}: {:?}", outcome.outcome.as_str(), outcome.error).into())
}

async fn work(root: Root, queue: Arc<dyn Queue>, number: usize) {
    let options = Options {
        who: format!("worker {number}"),
        budget: Budget { memory: 256 << 20, threads: 1 },
        concurrency: 1,
        part_bytes: PART,
        jobs_per_model: 4,
        sources: Allowed::default(),
        pauses: Pauses { first: Duration::from_millis(50), longest: Duration::from_secs(1) },
    };
    let steps = Arc::new(Steps::new(root, queue, options, Arc::new(Metrics::default())));
    let loop_options = worker::Options {
        taker: Taker::Cpu,
        lease: Duration::from_secs(60),
        idle: (Duration::from_millis(5), Duration::from_millis(20)),
        stop: Duration::from_secs(5),
        until_empty: true,
    };
    let (_tell, stop) = Stop::new();
    worker::run(steps, 1, loop_options, Arc::new(Health::default()), stop).await;
}

/// Measures, and gives a Markdown table.
pub(crate) fn measure(folder: &Path, checkpoint: &Path, label: &str, rounds: u32) -> Result<String, Failure> {
    let mut text = format!(
        "{label}, parts of {} MiB; every request takes {} ms and its bytes {} MB/s; {rounds} rounds\n\n\
         | workers | s: best of the rounds | times as fast as one |\n|---|---|---|\n",
        PART >> 20,
        LATENCY.as_millis(),
        BANDWIDTH / 1e6
    );
    let mut one = None;
    for workers in [1, 2, 4] {
        let mut best = Duration::MAX;
        for _ in 0..rounds {
            let place = tempfile::tempdir_in(folder)?;
            best = best.min(publish(place.path(), checkpoint, workers)?);
        }
        let seconds = best.as_secs_f64();
        let first = *one.get_or_insert(seconds);
        text.push_str(&format!("| {workers} | {seconds:.2} | {:.2} |\n", first / seconds));
    }
    Ok(text)
}
