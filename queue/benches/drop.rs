//! For how long a trainer waits when it hands over a manifest: in both modes, with the queue up, slow and locked;
//! beside it, what the disk's syncs cost in the same run.
//!
//! ```text
//! cargo bench --workspace --bench drop [-- --drops N] [--folder PATH]
//! ```
//!
//! Every round hands over once in each case and syncs once in each way, so that all meet the same disk at the same
//! time.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rusqlite::{Connection, TransactionBehavior};
use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::dropper::{Dropper, Durability, Opener, Options};
use weighbridge_queue::error::Error as QueueError;
use weighbridge_queue::message::Message;
use weighbridge_queue::spool::SpoolLimits;
use weighbridge_queue::{Depth, Lease, Queue, Taker, url};
use weighbridge_schemas::checkpoint::CheckpointManifest;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long a slow queue takes for a message.
const SLOW: Duration = Duration::from_millis(50);
/// The time between two manifests of a dropper that is alone.
const BETWEEN: Duration = Duration::from_millis(2);
/// The size of a usual manifest, and of the files that are synced beside.
const BYTES: usize = 2048;
/// Memory for the manifests of a whole run: it is the caller's time that is measured, not a full memory.
const BACKLOG: usize = 1 << 30;
const ROUNDS: usize = 10_000;

/// A queue that takes its time.
#[derive(Debug)]
struct Slow(Arc<dyn Queue>);

#[async_trait]
impl Queue for Slow {
    async fn send(&self, message: &Message) -> std::result::Result<(), QueueError> {
        tokio::time::sleep(SLOW).await;
        self.0.send(message).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> std::result::Result<Option<Lease>, QueueError> {
        self.0.lease(taker, time).await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> std::result::Result<(), QueueError> {
        self.0.extend(lease, time).await
    }

    async fn done(&self, lease: &Lease) -> std::result::Result<(), QueueError> {
        self.0.done(lease).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> std::result::Result<(), QueueError> {
        self.0.retry(lease, delay).await
    }

    async fn depth(&self) -> std::result::Result<Vec<Depth>, QueueError> {
        self.0.depth().await
    }
}

/// A way to hand over or to sync, and how long each time took.
struct Case<'c> {
    name: String,
    work: Box<dyn FnMut(usize) -> Result<()> + 'c>,
    times: Vec<Duration>,
}

impl<'c> Case<'c> {
    fn new(name: impl Into<String>, work: impl FnMut(usize) -> Result<()> + 'c) -> Self {
        Self { name: name.into(), work: Box::new(work), times: Vec::new() }
    }

    fn run(&mut self, round: usize) -> Result<()> {
        let begin = Instant::now();
        (self.work)(round)?;
        self.times.push(begin.elapsed());
        Ok(())
    }

    /// A line of the table.
    fn line(&mut self) -> String {
        self.times.sort_unstable();
        let at = |share: usize| {
            let place = (self.times.len() * share / 1000).min(self.times.len().saturating_sub(1));
            self.times.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        format!("| {} | {:.4} | {:.4} | {:.4} |", self.name, at(500), at(990), at(1000))
    }
}

fn manifest(round: usize) -> Result<CheckpointManifest> {
    let json = serde_json::json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": format!("0f8fad5b-d9cb-469f-a165-{round:012x}"),
        "model": "dlrm", "run": "r1", "step": round, "created_at": "2026-11-29T16:10:04Z",
        "location": "/checkpoints/1", "labels": { "padding": "x".repeat(BYTES - 250) },
    });
    Ok(CheckpointManifest::parse(json.to_string().as_bytes())?)
}

/// A dropper with a queue and a spool of its own.
fn dropper(folder: &Path, state: &str, durability: Durability) -> Result<Dropper> {
    let place = folder.join(format!("{state} {durability:?}"));
    let queue = format!("embedded:{}", place.join("queue").display());
    let limits = SpoolLimits { items: u64::MAX, bytes: u64::MAX };
    let options = Options::new(place.join("spool"), queue.clone());
    let (flush, all) = (Duration::ZERO, usize::MAX);
    let options =
        Options { durability, limits, flush, backlog_items: all, backlog_bytes: BACKLOG, ..options };
    // It is there, so that it can be locked.
    let up = url::open(&queue, Arc::new(SystemClock::new()))?;
    if state == "slow" {
        let opener: Opener = Arc::new(move || Ok(Arc::new(Slow(Arc::clone(&up)))));
        return Ok(Dropper::with_queue(options, opener)?);
    }
    Ok(Dropper::open(options)?)
}

/// Options of the command line: how many rounds, and where.
fn arguments() -> Result<(usize, PathBuf)> {
    let (mut rounds, mut folder) = (ROUNDS, std::env::temp_dir());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--drops" => rounds = arguments.next().ok_or("--drops needs a number")?.parse()?,
            "--folder" => folder = arguments.next().ok_or("--folder needs a path")?.into(),
            // What cargo itself adds.
            "--bench" => {}
            other => return Err(format!("{other} is unknown; use --drops N, --folder PATH").into()),
        }
    }
    Ok((rounds, folder))
}

#[expect(clippy::print_stdout, reason = "a program that prints a table")]
fn main() -> Result<()> {
    let (rounds, folder) = arguments()?;
    let folder = tempfile::tempdir_in(folder)?;
    let path = folder.path();
    let mut droppers = Vec::new();
    let mut locks = Vec::new();
    for durability in [Durability::Background, Durability::Durable] {
        for state in ["up", "slow", "locked"] {
            droppers.push((format!("{durability:?}, queue {state}"), dropper(path, state, durability)?));
            if state == "locked" {
                locks.push(Connection::open(
                    path.join(format!("{state} {durability:?}/queue/queue.sqlite3")),
                )?);
            }
        }
    }
    let held: std::result::Result<Vec<_>, _> =
        locks.iter_mut().map(|lock| lock.transaction_with_behavior(TransactionBehavior::Immediate)).collect();
    let held = held?;
    let manifests = (0..rounds).map(manifest).collect::<Result<Vec<_>>>()?;
    let hand_over = |dropper: &Dropper, round: usize| -> Result<()> {
        Ok(manifests.get(round).map_or(Ok(()), |manifest| dropper.hand_over(manifest))?)
    };
    let (bytes, synced) = (vec![b'x'; BYTES], path.join("synced"));
    fs::create_dir(&synced)?;
    let (bytes, synced) = (&bytes, &synced);
    let mut cases: Vec<Case<'_>> = droppers
        .iter()
        .map(|(name, dropper)| Case::new(name, move |round| hand_over(dropper, round)))
        .collect();
    cases.push(Case::new("the bytes made, and nothing else", |round| {
        let bytes = manifests.get(round).map(serde_json::to_vec).transpose()?;
        std::hint::black_box(bytes);
        Ok(())
    }));
    cases.push(Case::new("fdatasync of a new file of 2 KiB", move |round| {
        let mut file = File::create(synced.join(format!("a{round}")))?;
        file.write_all(bytes)?;
        Ok(file.sync_data()?)
    }));
    cases.push(Case::new("fsync of a new file and its folder", move |round| {
        let mut file = File::create(synced.join(format!("b{round}")))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(File::open(synced)?.sync_all()?)
    }));
    for round in 0..rounds {
        for case in &mut cases {
            case.run(round)?;
        }
    }
    println!("| {rounds} times | p50, ms | p99, ms | max, ms |\n|---|---:|---:|---:|");
    cases.iter_mut().for_each(|case| println!("{}", case.line()));
    drop(cases);
    drop(held);
    drop(droppers);
    for state in ["up", "slow", "locked"] {
        println!("{}", alone(&path.join("alone"), state, &manifests)?);
    }
    Ok(())
}

/// As a trainer does it: one dropper, in the background, and some time between two manifests.
fn alone(folder: &Path, state: &str, manifests: &[CheckpointManifest]) -> Result<String> {
    let dropper = dropper(folder, state, Durability::Background)?;
    let file = folder.join(format!("{state} Background/queue/queue.sqlite3"));
    let mut lock = if state == "locked" { Some(Connection::open(file)?) } else { None };
    let held = lock.as_mut().map(|lock| lock.transaction_with_behavior(TransactionBehavior::Immediate));
    let held = held.transpose()?;
    let mut case = Case::new(format!("Background, queue {state}, alone, one every 2 ms"), |round| {
        Ok(manifests.get(round).map_or(Ok(()), |manifest| dropper.hand_over(manifest))?)
    });
    for round in 0..manifests.len() {
        std::thread::sleep(BETWEEN);
        case.run(round)?;
    }
    drop(held);
    Ok(case.line())
}
