//! A worker killed at every request that it makes to its store and its queue, before it and after it. Another one
//! goes on; and it ends as if nothing had happened.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use weighbridge_queue::faulty::{Faults, Phase};
use weighbridge_tests::rabbit::Broker;

use crate::accounts;
use crate::faults::{FaultyStore, Point, faulty_queue};
use crate::house::{House, MODEL, drop_manifest, id, manifest, options, work};

/// The variable by which a process learns that it is the worker: where, and at which request it dies.
const CHILD: &str = "WEIGHBRIDGE_CHAOS_CHILD";
/// How long a message is taken for: as long as its next worker waits.
const LEASE: Duration = Duration::from_millis(300);

/// Which requests are meant: those to the store, or to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Store,
    Queue,
}

/// Not a test, but the worker that is killed: this program, run again.
#[tokio::test]
async fn child() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let told: Vec<_> = told.split('|').collect();
    let [folder, queue, which, number, phase] = told[..] else { panic!("{told:?}") };
    let phase = if phase == "before" { Phase::Before } else { Phase::After };
    let point = number.parse().ok().map(|number| (number, phase));
    let house = House { folder: folder.into(), queue: queue.to_owned() };
    let (at_store, at_queue) = if which == "store" { (point, None) } else { (None, point) };
    let store = FaultyStore::new(Faults::default(), at_store);
    let queue = faulty_queue(house.queue(), Faults::default(), at_queue);
    work(house.root().behind(store.clone()), queue.clone(), options(), LEASE).await;
    std::fs::write(house.folder.join("calls"), format!("{} {}", store.calls(), queue.calls())).unwrap();
}

/// Starts a worker, which is this program run again; it dies at `point`.
fn start(house: &House, which: Which, point: Option<Point>) -> Child {
    let which = if which == Which::Store { "store" } else { "queue" };
    let (number, phase) = match point {
        Some((number, Phase::Before)) => (number.to_string(), "before"),
        Some((number, Phase::After)) => (number.to_string(), "after"),
        None => ("none".to_owned(), "before"),
    };
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crashes::child", "--nocapture"])
        .env(CHILD, format!("{}|{}|{which}|{number}|{phase}", house.folder.display(), house.queue))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Starts a worker that does not die by itself.
pub(crate) fn start_worker(house: &House) -> Child {
    start(house, Which::Store, None)
}

/// Runs a worker that dies at `point`; says whether it did.
fn worker(house: &House, which: Which, point: Option<Point>) -> bool {
    let status = start(house, which, point).wait().unwrap();
    assert!(status.success() || status.code().is_none(), "{status:?} at {point:?} of {which:?}");
    !status.success()
}

async fn crash(house: House, which: Which, point: Point, snapshot: &str) -> bool {
    let checkpoint = house.checkpoint("c.safetensors", 2);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 7, &checkpoint)).await;
    let place = house.clone();
    let killed = tokio::task::spawn_blocking(move || {
        let killed = worker(&place, which, Some(point));
        assert!(!worker(&place, which, None));
        killed
    });
    let killed = killed.await.unwrap();
    accounts::published_once(&root, &*queue, MODEL, &id(1), snapshot).await;
    killed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_at_every_request_a_job_is_published_once() {
    killed_at_every_request(|_| House::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_at_every_request_on_a_broker_a_job_is_published_once() {
    let Some(broker) = tokio::task::spawn_blocking(Broker::shared).await.unwrap() else { return };
    killed_at_every_request(|lane| House::on(broker, &format!("crashes {lane}"))).await;
}

/// How many workers are killed at the same time.
const LANES: usize = 4;

/// Kills workers at every request that they make to a store and a queue; `houses` gives an empty one for each lane.
async fn killed_at_every_request(houses: impl Fn(usize) -> (TempDir, House)) {
    let (_folder, house) = houses(0);
    let checkpoint = house.checkpoint("c.safetensors", 2);
    drop_manifest(&*house.queue(), &manifest(&id(1), 7, &checkpoint)).await;
    let place = house.clone();
    tokio::task::spawn_blocking(move || assert!(!worker(&place, Which::Store, None))).await.unwrap();
    let calls = std::fs::read_to_string(house.folder.join("calls")).unwrap();
    let calls: Vec<u64> = calls.split(' ').map(|calls| calls.parse().unwrap()).collect();
    let outcome = accounts::outcome(&house.root(), MODEL, &id(1)).await.unwrap();
    let snapshot = outcome.snapshot.unwrap().to_string();

    let mut points = Vec::new();
    for (which, calls) in [(Which::Store, calls[0]), (Which::Queue, calls[1])] {
        for number in 0..calls {
            points.extend([Phase::Before, Phase::After].map(|phase| (which, (number, phase))));
        }
    }
    let (all, mut killed) = (points.len(), 0);
    for some in points.chunks(LANES) {
        let crashes = some.iter().enumerate().map(|(lane, &(which, point))| {
            let (folder, house) = houses(lane);
            let snapshot = snapshot.clone();
            tokio::spawn(async move {
                let killed = crash(house, which, point, &snapshot).await;
                drop(folder);
                killed
            })
        });
        for crash in crashes.collect::<Vec<_>>() {
            killed += usize::from(crash.await.unwrap());
        }
    }
    println!(
        "{all} crash points at {} requests to the store and {} to the queue: {killed} workers killed",
        calls[0], calls[1]
    );
    // Some of the last requests are only made when the queue was found empty, and need not come again.
    assert!(killed * 100 >= all * 90, "{killed} of {all}");
}
