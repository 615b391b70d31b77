//! Which job may move a channel: the newest step of its run, and who gives way to whom.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use weighbridge::steps::{Options, end};
use weighbridge_queue::Queue;
use weighbridge_schemas::channel::Reason;
use weighbridge_schemas::job::{Came, Decided, Ended, JobId};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::{Channel, Move, Operation};
use weighbridge_snapshots::dead;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Root;

use crate::accounts::{self, ended, letters, steps};
use crate::house::{House, MODEL, drop_manifest, id, manifest, manifest_with, options, policy, work};

const LEASE: Duration = Duration::from_secs(10);
/// A policy under which nobody gives way.
const ALL_OF_THEM: &str = "[channel]\nlatest_wins = false";

/// Drops the manifests, and works until the queue is empty.
async fn publish(house: &House, manifests: &[Value]) -> (Root, Arc<dyn Queue>) {
    publish_with(house, manifests, options()).await
}

async fn publish_with(house: &House, manifests: &[Value], options: Options) -> (Root, Arc<dyn Queue>) {
    let (root, queue) = (house.root(), house.queue());
    for manifest in manifests {
        drop_manifest(&*queue, manifest).await;
    }
    work(root.clone(), Arc::clone(&queue), options, LEASE).await;
    accounts::empty(&*queue).await;
    accounts::sound(&root).await;
    (root, queue)
}

/// The id of the job that publishes `number` again, because `other` ended unpublished.
fn again(number: u64, other: u64) -> String {
    let job = |number| id(number).parse::<JobId>().unwrap();
    job(number).again_after(&job(other)).to_string()
}

fn garbage(house: &House) -> std::path::PathBuf {
    let path = house.folder.join("garbage.safetensors");
    std::fs::write(&path, b"\x08\0\0\0\0\0\0\0[1,2,3] no tensors").unwrap();
    path
}

#[tokio::test]
async fn waiting_steps_give_way_to_the_newest() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let manifests: Vec<_> = (1..=5).map(|step| manifest(&id(step), step, &checkpoint)).collect();
    let (root, _) = publish(&house, &manifests).await;
    for step in 1..=4 {
        let outcome = accounts::outcome(&root, MODEL, &id(step)).await.unwrap();
        assert_eq!((outcome.outcome, outcome.by.unwrap().to_string()), (Ended::Coalesced, id(5)));
    }
    assert_eq!(ended(&root, &id(5)).await, Ended::Published);
    assert_eq!(steps(&root).await, [5]);
}

#[tokio::test]
async fn where_nobody_gives_way_all_are_published_and_none_goes_backwards() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let with =
        |number, step| manifest_with(&id(number), step, &checkpoint, &[("policy", policy(ALL_OF_THEM))]);
    let (root, _) = publish(&house, &[with(1, 1), with(2, 2), with(3, 3)]).await;
    assert_eq!(steps(&root).await, [1, 2, 3]);
    // A late step is stored, and stays off the channel.
    let (root, _) = publish(&house, &[with(4, 2)]).await;
    assert_eq!(ended(&root, &id(4)).await, Ended::Superseded);
    let (root, _) = publish(&house, &[with(5, 1), with(6, 4)]).await;
    assert_eq!(
        (ended(&root, &id(5)).await, ended(&root, &id(6)).await),
        (Ended::Superseded, Ended::Published)
    );
    assert_eq!(steps(&root).await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_step_that_gave_way_to_one_that_dies_goes_again() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let bad = garbage(&house);
    let manifests =
        [manifest(&id(1), 1, &checkpoint), manifest(&id(2), 2, &checkpoint), manifest(&id(3), 3, &bad)];
    let (root, _) = publish(&house, &manifests).await;
    assert_eq!(ended(&root, &id(3)).await, Ended::Dead);
    assert_eq!(
        (ended(&root, &id(1)).await, ended(&root, &id(2)).await),
        (Ended::Coalesced, Ended::Coalesced)
    );
    assert_eq!(ended(&root, &again(2, 3)).await, Ended::Published);
    assert_eq!(steps(&root).await, [2]);
    let letters = letters(&root).await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].0, id(3));
}

#[tokio::test]
async fn a_quarantined_step_lets_the_one_before_go_again() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let strict = "[[rule]]\nmatch = \"**\"\nencode = \"int2\"\n[gates]\nmax_rms_error = 0.000001";
    let manifests = [
        manifest(&id(1), 1, &checkpoint),
        manifest_with(&id(2), 2, &checkpoint, &[("policy", policy(strict))]),
    ];
    let (root, _) = publish(&house, &manifests).await;
    let outcome = accounts::outcome(&root, MODEL, &id(2)).await.unwrap();
    assert_eq!(outcome.outcome, Ended::Quarantined);
    assert!(outcome.snapshot.is_some());
    assert!(outcome.error.unwrap().message.contains("max_rms_error"));
    assert_eq!(ended(&root, &again(1, 2)).await, Ended::Published);
    assert_eq!(steps(&root).await, [1]);
}

#[tokio::test]
async fn however_many_newer_steps_come_to_nothing_a_good_one_is_published() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let (absent, bad) = (house.folder.join("absent"), garbage(&house));
    let short = [("policy", policy("[job]\ngrace_seconds = 1"))];
    for newer in [[&absent, &absent, &absent], [&bad, &bad, &bad], [&absent, &bad, &absent]] {
        let (_folder, house) = House::new();
        let mut manifests: Vec<_> = (1..=3).map(|step| manifest(&id(step), step, &checkpoint)).collect();
        let newer = (4u64..).zip(newer).map(|(step, place)| manifest_with(&id(step), step, place, &short));
        manifests.extend(newer);
        let (root, _) = publish(&house, &manifests).await;
        assert_eq!(steps(&root).await, [3]);
        accounts::balance(&root).await;
    }
}

#[tokio::test]
async fn a_held_channel_stays() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let (root, _) = publish(&house, &[manifest(&id(1), 1, &checkpoint)]).await;
    hold(&root).await;
    let (root, _) = publish(&house, &[manifest(&id(2), 2, &checkpoint)]).await;
    assert_eq!(ended(&root, &id(2)).await, Ended::Held);
    assert_eq!(steps(&root).await, [1, 1]);
}

async fn hold(root: &Root) {
    let (model, prod) = (MODEL.parse().unwrap(), "prod".parse().unwrap());
    let channel = Channel::new(root, &model, &prod);
    let operation = Operation { id: "hold".into(), who: "test".into(), when: Timestamp::from_nanoseconds(0) };
    let appended = channel.append(&operation, |latest| {
        let latest = latest.ok_or(())?;
        Ok::<_, ()>(Move {
            snapshot: latest.snapshot,
            run: latest.run.clone(),
            step: latest.step,
            created_at: latest.created_at,
            reason: Reason::Hold,
        })
    });
    appended.await.unwrap();
}

#[tokio::test]
async fn another_run_takes_a_channel_only_where_the_policy_says_so() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let (root, _) = publish(&house, &[manifest(&id(1), 5, &checkpoint)]).await;
    let other = |number, text| {
        let fields = [("run", json!("other")), ("policy", policy(text))];
        manifest_with(&id(number), 9, &checkpoint, &fields)
    };
    publish(&house, &[other(2, "")]).await;
    assert_eq!(ended(&root, &id(2)).await, Ended::Superseded);
    publish(&house, &[other(3, "[channel]\nother_run = \"take\"")]).await;
    assert_eq!(ended(&root, &id(3)).await, Ended::Published);
}

#[tokio::test]
async fn one_id_is_one_job_and_two_ids_are_two() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let first = manifest(&id(1), 1, &checkpoint);
    publish(&house, &[first.clone(), first.clone()]).await;
    // Once more, when it has ended; and the same content under an id of its own.
    let (root, _) = publish(&house, &[first, manifest(&id(2), 1, &checkpoint)]).await;
    let outcomes = (ended(&root, &id(1)).await, ended(&root, &id(2)).await);
    assert_eq!(outcomes, (Ended::Published, Ended::Unchanged));
    assert_eq!(steps(&root).await, [1]);
    // Another manifest of a used id is a dead letter, and leaves the job as it was.
    let (root, _) = publish(&house, &[manifest(&id(1), 2, &checkpoint)]).await;
    let letters = letters(&root).await;
    assert_eq!(letters.len(), 1);
    assert_ne!(letters[0].0, id(1));
    assert_eq!(steps(&root).await, [1]);
}

#[tokio::test]
async fn what_is_no_manifest_is_a_dead_letter_with_its_bytes() {
    let (_folder, house) = House::new();
    let poison = json!({ "schema": "weighbridge.checkpoint/v1", "id": "x", "model": "../../etc" });
    let (root, _) = publish(&house, std::slice::from_ref(&poison)).await;
    let letters = letters(&root).await;
    assert_eq!(letters.len(), 1);
    let letter = dead::get(&root, &letters[0].0).await.unwrap();
    assert_eq!(letter.body.0, poison.to_string().into_bytes());
    assert!(letter.error.message.contains("checkpoint manifest"), "{letter:?}");
}

#[tokio::test]
async fn places_that_are_not_allowed_are_not_read() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let allowed = house.folder.join("allowed");
    std::fs::create_dir(&allowed).unwrap();
    std::os::unix::fs::symlink(&checkpoint, allowed.join("link.safetensors")).unwrap();
    std::fs::copy(&checkpoint, allowed.join("c.safetensors")).unwrap();
    let prefix = allowed.to_str().unwrap().to_owned();
    let options = Options { sources: weighbridge::sources::Allowed::new(&[prefix]).unwrap(), ..options() };
    let remote = Path::new("s3://bucket/step-1");
    let manifests = [
        manifest(&id(1), 1, &checkpoint),
        manifest(&id(2), 2, &allowed.join("../c.safetensors")),
        manifest(&id(3), 3, &allowed.join("link.safetensors")),
        manifest(&id(4), 4, remote),
        manifest(&id(5), 5, Path::new("relative")),
        manifest(&id(6), 6, &allowed.join("c.safetensors")),
    ];
    let (root, _) = publish_with(&house, &manifests, options).await;
    for number in 1..=5 {
        let outcome = accounts::outcome(&root, MODEL, &id(number)).await.unwrap();
        let class = outcome.error.unwrap().class;
        assert_eq!((outcome.outcome, class.as_str()), (Ended::Dead, "source_not_allowed"), "{number}");
    }
    assert_eq!(ended(&root, &id(6)).await, Ended::Published);
    assert_eq!(letters(&root).await.len(), 5);
}

#[tokio::test]
async fn an_unknown_policy_is_a_dead_letter_and_a_named_one_is_fixed_when_the_job_is_accepted() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let named =
        |number| manifest_with(&id(number), number, &checkpoint, &[("policy", json!({ "name": "p" }))]);
    let (root, _) = publish(&house, &[named(1)]).await;
    assert_eq!(ended(&root, &id(1)).await, Ended::Dead);
    let model = MODEL.parse().unwrap();
    let text = "schema = \"weighbridge.policy/v1\"\n[channel]\nname = \"canary\"\n";
    weighbridge_snapshots::policies::put(&root, &model, &"p".parse().unwrap(), text).await.unwrap();
    let (root, _) = publish(&house, &[named(2)]).await;
    assert_eq!(ended(&root, &id(2)).await, Ended::Published);
    assert_eq!(steps(&root).await, [0u64; 0]);
    let canary = Channel::new(&root, &model, &"canary".parse().unwrap()).latest().await.unwrap();
    assert_eq!(canary.unwrap().step, 2);
}

#[tokio::test]
async fn a_job_is_cancelled_or_published_and_never_both() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let (root, queue) = (house.root(), house.queue());
    let absent = house.folder.join("absent");
    drop_manifest(&*queue, &manifest(&id(1), 1, &checkpoint)).await;
    drop_manifest(&*queue, &manifest(&id(2), 2, &absent)).await;
    // Until step 2 waits for its checkpoint, and step 1, which gave way to it, goes again.
    let worker = tokio::spawn(work(root.clone(), Arc::clone(&queue), options(), LEASE));
    let (model, waits) = (MODEL.parse().unwrap(), id(2).parse().unwrap());
    let job = Job::new(&root, &model, &waits);
    while accounts::outcome(&root, MODEL, &again(1, 2)).await.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let record = job.record().await.unwrap().unwrap();
    assert_eq!(end::cancel(&root, &*queue, &record, "test").await.unwrap(), Decided::Cancelled);
    worker.await.unwrap();
    assert_eq!(ended(&root, &id(2)).await, Ended::Cancelled);
    assert_eq!(steps(&root).await, [1]);
    let first = again(1, 2).parse().unwrap();
    let published = Job::new(&root, &model, &first).record().await.unwrap().unwrap();
    assert_eq!(end::cancel(&root, &*queue, &published, "test").await.unwrap(), Decided::Proceed);
    accounts::empty(&*queue).await;
}

#[tokio::test]
async fn one_models_flood_leaves_workers_to_others() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let mut manifests: Vec<_> = (1..=24)
        .map(|number| manifest_with(&id(number), number, &checkpoint, &[("policy", policy(ALL_OF_THEM))]))
        .collect();
    manifests.push(manifest_with(&id(100), 1, &checkpoint, &[("model", json!("other"))]));
    let flood = Options { jobs_per_model: 2, ..options() };
    let (root, _) = publish_with(&house, &manifests, flood).await;
    let other = accounts::outcome(&root, "other", &id(100)).await.unwrap();
    let mut earlier = 0;
    for number in 1..=24 {
        let outcome = accounts::outcome(&root, MODEL, &id(number)).await.unwrap();
        assert!(matches!(outcome.outcome, Ended::Published | Ended::Superseded), "{outcome:?}");
        earlier += usize::from(outcome.when < other.when);
    }
    assert!(earlier <= 8, "{earlier} of 24 went before the other model's only one");
    assert_eq!(steps(&root).await.last(), Some(&24));
}

#[tokio::test]
async fn the_urgent_goes_first() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let with = |number, priority: u8| {
        let fields = [("priority", json!(priority)), ("model", json!(format!("m{number}")))];
        manifest_with(&id(number), 1, &checkpoint, &fields)
    };
    let (root, _) = publish(&house, &[with(1, 0), with(2, 5), with(3, 9)]).await;
    let mut ended = Vec::new();
    for number in 1..=3 {
        ended.push(accounts::outcome(&root, &format!("m{number}"), &id(number)).await.unwrap().when);
    }
    assert!(ended[2] < ended[1] && ended[1] < ended[0], "{ended:?}");
}

#[tokio::test]
async fn parts_for_a_gpu_wait_for_one_and_then_take_any_worker() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let gpu = policy("[job]\ndevice = \"gpu\"\ngpu_wait_seconds = 1");
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest_with(&id(1), 1, &checkpoint, &[("policy", gpu)])).await;
    let worker = tokio::spawn(work(root.clone(), Arc::clone(&queue), options(), LEASE));
    let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
    let job = Job::new(&root, &model, &job);
    while job.plan().await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A worker without one leaves it on the queue.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(job.parts_done().await.unwrap().is_empty());
    worker.await.unwrap();
    assert_eq!(ended(&root, &id(1)).await, Ended::Published);
}

#[tokio::test]
async fn a_worker_that_lacks_the_plans_encodings_gives_the_part_back() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 2);
    let (root, queue) = (house.root(), house.queue());
    let short = policy("[job]\nretry_seconds = 1");
    drop_manifest(&*queue, &manifest_with(&id(1), 1, &checkpoint, &[("policy", short)])).await;
    let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
    let job = Job::new(&root, &model, &job);
    // A newer worker has planned it.
    let plan = plan_elsewhere(&house, &checkpoint).await;
    job.put_plan(&weighbridge_schemas::job::JobPlan { encoding_version: 99, ..plan }).await.unwrap();
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.unwrap();
    assert_eq!((outcome.outcome, outcome.error.unwrap().class.as_str()), (Ended::Dead, "encoding_version"));
    let letter = dead::get(&root, &id(1)).await.unwrap();
    assert!(letter.history.iter().filter(|event| event.came == Came::Failed).count() > 1, "{letter:?}");
}

/// The plan of the checkpoint, as a worker on another store made it.
async fn plan_elsewhere(house: &House, checkpoint: &Path) -> weighbridge_schemas::job::JobPlan {
    let folder = house.folder.join("other");
    std::fs::create_dir(&folder).unwrap();
    let queue = format!("embedded:{}", folder.join("queue").display());
    let other = House { folder, queue };
    let (root, _) = publish(&other, &[manifest(&id(1), 1, checkpoint)]).await;
    let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
    Job::new(&root, &model, &job).plan().await.unwrap().unwrap()
}
