//! Stores and queues that fail at every request, in every way: before it, after it, or so that nobody knows.

use std::sync::Arc;
use std::time::Duration;

use weighbridge_queue::faulty::{Fault, Faults};

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
