//! Stores and queues that fail at every request, in every way: before it, after it, or so that nobody knows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use weighbridge_queue::error::Error;
use weighbridge_queue::faulty::{Fault, Faults};
use weighbridge_queue::message::Message;
use weighbridge_queue::{Depth, Lease, Queue, Taker};
use weighbridge_schemas::job::Ended;

use crate::accounts;
use crate::faults::{FaultyStore, faulty_queue};
use crate::house::{House, MODEL, drop_manifest, id, manifest, options, work};

const LEASE: Duration = Duration::from_millis(500);

fn at(number: u64, fault: Fault) -> Faults {
    Faults { at: [(number, fault)].into(), delay: Duration::from_millis(5), ..Faults::default() }
}

/// Publishes one job over a store and a queue that fail so; gives the snapshot, and how many requests there were.
async fn publish(of_store: Faults, of_queue: Faults) -> (String, u64, u64) {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 2);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 7, &checkpoint)).await;
    let store = FaultyStore::new(of_store, None);
    let faulty = faulty_queue(Arc::clone(&queue), of_queue, None);
    work(root.clone().behind(store.clone()), faulty.clone(), options(), LEASE).await;
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.expect("the job has an outcome");
    let snapshot = outcome.snapshot.unwrap().to_string();
    accounts::published_once(&root, &*queue, MODEL, &id(1), &snapshot).await;
    (snapshot, store.calls(), faulty.calls())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whatever_request_fails_a_job_is_published_once() {
    let (snapshot, of_store, of_queue) = publish(Faults::default(), Faults::default()).await;
    let mut runs = Vec::new();
    for fault in Fault::ALL {
        runs.extend((0..of_store).map(|number| (at(number, fault), Faults::default())));
        runs.extend((0..of_queue).map(|number| (Faults::default(), at(number, fault))));
    }
    let all = runs.len();
    let mut runs = runs.into_iter().peekable();
    while runs.peek().is_some() {
        let some = runs.by_ref().take(8).map(|(store, queue)| tokio::spawn(publish(store, queue)));
        for run in some.collect::<Vec<_>>() {
            assert_eq!(run.await.unwrap().0, snapshot);
        }
    }
    println!("{all} faults at {of_store} requests to the store and {of_queue} to the queue");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn with_many_failures_by_chance_a_job_is_published_once() {
    let (snapshot, ..) = publish(Faults::default(), Faults::default()).await;
    for seed in 0..10 {
        let chance =
            |seed| Faults { of_a_thousand: 100, seed, delay: Duration::from_millis(5), ..Faults::default() };
        println!("seed {seed}");
        assert_eq!(publish(chance(seed), chance(seed + 1000)).await.0, snapshot);
    }
}

/// A queue that takes nothing until some moment, though it answers.
#[derive(Debug)]
struct Full(Arc<dyn Queue>, Instant);

impl Full {
    fn takes(&self) -> Result<(), Error> {
        if Instant::now() >= self.1 {
            return Ok(());
        }
        Err(Error::Unreachable { what: "queue".to_owned(), why: "it is full".to_owned() })
    }
}

#[async_trait]
impl Queue for Full {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        self.takes()?;
        self.0.send(message).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.0.lease(taker, time).await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.0.extend(lease, time).await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.0.done(lease).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.takes()?;
        self.0.retry(lease, delay).await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.0.depth().await
    }
}

/// A queue that takes nothing for many leases is no death of the job whose messages cannot be given back meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_given_back_is_held_and_not_abandoned() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 7, &checkpoint)).await;
    let lease = Duration::from_millis(300);
    let full: Arc<dyn Queue> = Arc::new(Full(Arc::clone(&queue), Instant::now() + 30 * lease));
    work(root.clone(), full, options(), lease).await;
    assert_eq!(accounts::ended(&root, &id(1)).await, Ended::Published);
    accounts::empty(&*queue).await;
}
