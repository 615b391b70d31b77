//! Documents of jobs that are damaged, and queues that are lost: one job's trouble is no other's.

use std::sync::Arc;
use std::time::Duration;

use weighbridge::steps::{Options, end};
use weighbridge_schemas::job::{Decided, Ended};
use weighbridge_snapshots::jobs::{self, Job};

use crate::accounts::{self, ended, letters, steps};
use crate::house::{House, MODEL, drop_manifest, id, manifest, manifest_with, options, policy, work};

/// Others wait for as long, when a worker is stopped.
const LEASE: Duration = Duration::from_millis(800);

/// Works until job 1 has a plan; its parts wait on the queue.
async fn until_planned(house: &House) {
    let (root, queue) = (house.root(), house.queue());
    let worker = tokio::spawn(work(root.clone(), Arc::clone(&queue), options(), LEASE));
    let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
    while Job::new(&root, &model, &job).plan().await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker.abort();
    let _ = worker.await;
}

#[tokio::test]
async fn a_job_with_a_damaged_document_is_given_up_and_others_go_on() {
    for document in ["record", "plan", "decision", "outcome"] {
        let (_folder, house) = House::new();
        let checkpoint = house.checkpoint("c.safetensors", 3);
        let (root, queue) = (house.root(), house.queue());
        let all = [("policy", policy("[channel]\nlatest_wins = false"))];
        drop_manifest(&*queue, &manifest_with(&id(1), 1, &checkpoint, &all)).await;
        until_planned(&house).await;
        let job = house.folder.join("store/models/m/jobs").join(id(1));
        std::fs::write(job.join(document), b"{\"schema\": 1}").unwrap();
        drop_manifest(&*queue, &manifest_with(&id(2), 2, &checkpoint, &all)).await;
        // The lease of whoever was stopped has to run out first.
        work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
        assert_eq!(ended(&root, &id(2)).await, Ended::Published, "{document}");
        assert_eq!(steps(&root).await, [2], "{document}");
        // An outcome that is damaged is an outcome: what is left of its job on the queue is no work any more.
        if document != "outcome" {
            assert_eq!(ended(&root, &id(1)).await, Ended::Dead, "{document}");
            assert_eq!(letters(&root).await, [(id(1), "integrity".to_owned())], "{document}");
        }
        accounts::empty(&*queue).await;
    }
}

#[tokio::test]
async fn a_queue_that_is_lost_costs_no_job() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 3);
    let root = house.root();
    drop_manifest(&*house.queue(), &manifest(&id(1), 1, &checkpoint)).await;
    until_planned(&house).await;
    std::fs::remove_dir_all(house.folder.join("queue")).unwrap();
    let queue = house.queue();
    let model = MODEL.parse().unwrap();
    for job in jobs::list(&root, &model).await.unwrap() {
        let record = Job::new(&root, &model, &job).record().await.unwrap().unwrap();
        assert!(end::resume(&root, &*queue, &record).await.unwrap());
    }
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    let snapshot = accounts::outcome(&root, MODEL, &id(1)).await.unwrap().snapshot.unwrap();
    accounts::published_once(&root, &*queue, MODEL, &id(1), &snapshot.to_string()).await;
}

#[tokio::test]
async fn a_worker_that_is_stopped_for_longer_than_its_lease_does_no_harm() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 3);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 1, &checkpoint)).await;
    // Leases so short that they end while a message is handled: everything is done by several, several times.
    let workers = (0..4).map(|number| {
        let options = Options { who: format!("worker {number}"), ..options() };
        tokio::spawn(work(root.clone(), house.queue(), options, Duration::from_millis(3)))
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.unwrap();
    if outcome.outcome == Ended::Dead {
        // Five workers lost the same message: then it is given up, and nothing is on the channel.
        assert_eq!(outcome.error.unwrap().class, "abandoned");
        assert!(steps(&root).await.is_empty());
        let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
        let decision = Job::new(&root, &model, &job).decision().await.unwrap().unwrap();
        assert_eq!(decision.decision, Decided::Dead);
        return;
    }
    accounts::published_once(&root, &*queue, MODEL, &id(1), &outcome.snapshot.unwrap().to_string()).await;
}
