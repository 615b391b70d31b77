//! Faults that people who publish models have reported, each as a test.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::path::Path as Key;
use serde_json::json;

use weighbridge_schemas::job::Ended;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::error::Result;
use weighbridge_snapshots::root::{Intercept, Request, Root};
use weighbridge_snapshots::verify;

use crate::accounts::{self, ended, steps};
use crate::house::{House, MODEL, drop_manifest, id, manifest, manifest_with, options, policy, work};

const LEASE: Duration = Duration::from_secs(10);

/// A store in which chunks take their time.
#[derive(Debug)]
struct Slow {
    /// Part of the keys of chunks that are slow.
    of: String,
    time: Duration,
}

impl Intercept for Slow {
    fn before(&self, request: &Request) -> Result<()> {
        if request.name == "put_ahead" && request.key.as_ref().contains(&self.of) {
            std::thread::sleep(self.time);
        }
        Ok(())
    }

    fn after(&self, _request: &Request) -> Result<()> {
        Ok(())
    }
}

/// Looks at the channel again and again; whatever it points at has to be whole.
async fn watch(root: Root, over: Arc<AtomicBool>) -> Vec<u64> {
    let (model, prod) = (MODEL.parse().unwrap(), "prod".parse().unwrap());
    let mut seen = Vec::new();
    while !over.load(Ordering::SeqCst) {
        if let Some(entry) = Channel::new(&root, &model, &prod).latest().await.unwrap() {
            let verified = verify::snapshot(&root, &model, &entry.snapshot, &|_| {}).await.unwrap();
            assert!(verified.problems.is_empty(), "step {}: {:?}", entry.step, verified.problems);
            if seen.last() != Some(&entry.step) {
                seen.push(entry.step);
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    seen
}

/// B01: a channel never points at something that is not all there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b01_a_watcher_sees_whole_snapshots_alone() {
    let (_folder, house) = House::new();
    let (root, queue) = (house.root(), house.queue());
    let over = Arc::new(AtomicBool::new(false));
    let watcher = tokio::spawn(watch(root.clone(), Arc::clone(&over)));
    let slow = Arc::new(Slow { of: "/chunks/".into(), time: Duration::from_millis(20) });
    for step in 1..=8 {
        let checkpoint =
            house.checkpoint(&format!("{step}.safetensors"), 1 + usize::try_from(step).unwrap() % 3);
        drop_manifest(&*queue, &manifest(&id(step), step, &checkpoint)).await;
        work(root.clone().behind(slow.clone()), Arc::clone(&queue), options(), LEASE).await;
    }
    over.store(true, Ordering::SeqCst);
    let seen = watcher.await.unwrap();
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
    assert_eq!(steps(&root).await, (1..=8).collect::<Vec<_>>());
}

/// A store that says of one chunk that it was written, and has lost it, however often it is written.
#[derive(Debug)]
struct Forgetful {
    folder: std::path::PathBuf,
    puts: AtomicU64,
    lost: OnceLock<Key>,
}

impl Intercept for Forgetful {
    fn before(&self, _request: &Request) -> Result<()> {
        Ok(())
    }

    fn after(&self, request: &Request) -> Result<()> {
        if request.name == "put_ahead"
            && request.key.as_ref().contains("/chunks/")
            && (self.puts.fetch_add(1, Ordering::SeqCst) == 1 || self.lost.get() == Some(&request.key))
        {
            self.lost.get_or_init(|| request.key.clone());
            std::fs::remove_file(self.folder.join(request.key.as_ref())).unwrap();
        }
        Ok(())
    }
}

/// B10: what a store has lost is noticed before the channel moves.
#[tokio::test]
async fn b10_a_chunk_that_the_store_lost_keeps_the_channel_where_it_is() {
    let (_folder, house) = House::new();
    let (root, queue) = (house.root(), house.queue());
    let first = house.checkpoint("first.safetensors", 1);
    drop_manifest(&*queue, &manifest(&id(1), 1, &first)).await;
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    let second = house.checkpoint("second.safetensors", 3);
    let forgetful = Arc::new(Forgetful {
        folder: house.folder.join("store"),
        puts: AtomicU64::new(0),
        lost: OnceLock::new(),
    });
    drop_manifest(&*queue, &manifest(&id(2), 2, &second)).await;
    work(root.clone().behind(forgetful), Arc::clone(&queue), options(), LEASE).await;
    let outcome = accounts::outcome(&root, MODEL, &id(2)).await.unwrap();
    let error = outcome.error.unwrap();
    assert_eq!((outcome.outcome, error.class.as_str()), (Ended::Dead, "integrity"));
    assert!(error.message.contains("missing from the store"), "{error:?}");
    assert_eq!(steps(&root).await, [1]);
    // Published again, it is whole.
    drop_manifest(&*queue, &manifest(&id(3), 2, &second)).await;
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    assert_eq!(ended(&root, &id(3)).await, Ended::Published);
    accounts::sound(&root).await;
}

/// B64: a long job holds nobody up while other workers are idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b64_short_jobs_go_past_a_long_one() {
    let (_folder, house) = House::new();
    let (root, queue) = (house.root(), house.queue());
    let checkpoint = house.checkpoint("c.safetensors", 1);
    drop_manifest(&*queue, &manifest_with(&id(1), 1, &checkpoint, &[("model", json!("long"))])).await;
    for number in 2..10 {
        let fields = [("policy", policy("[channel]\nlatest_wins = false"))];
        drop_manifest(&*queue, &manifest_with(&id(number), number, &checkpoint, &fields)).await;
    }
    let slow = Arc::new(Slow { of: "/long/".into(), time: Duration::from_secs(3) });
    let workers = (0..3)
        .map(|_| tokio::spawn(work(root.clone().behind(slow.clone()), house.queue(), options(), LEASE)));
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    let long = accounts::outcome(&root, "long", &id(1)).await.unwrap();
    for number in 2..10 {
        let short = accounts::outcome(&root, MODEL, &id(number)).await.unwrap();
        assert!(short.when < long.when, "{number}: {short:?} {long:?}");
    }
}

/// B35: half of a checkpoint's files replaced under an old completion marker, and digests that say so.
#[tokio::test]
async fn b35_files_that_are_not_those_of_the_manifest_are_refused_across_parts() {
    let (_folder, house) = House::new();
    let (root, queue) = (house.root(), house.queue());
    let checkpoint = house.checkpoint("c.safetensors", 3);
    let bytes = std::fs::read(&checkpoint).unwrap();
    let folder = house.folder.join("step-1");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("model.safetensors"), &bytes).unwrap();
    let file = |hash: &str| json!([{ "path": "model.safetensors", "size": bytes.len(), "blake3": hash }]);
    let right = blake3::hash(&bytes).to_hex().to_string();
    let wrong = blake3::hash(b"the step before").to_hex().to_string();
    drop_manifest(&*queue, &manifest_with(&id(1), 1, &folder, &[("files", file(&wrong))])).await;
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.unwrap();
    assert_eq!(
        (outcome.outcome, outcome.error.unwrap().class.as_str()),
        (Ended::Dead, "file_digest_mismatch")
    );
    drop_manifest(&*queue, &manifest_with(&id(2), 1, &folder, &[("files", file(&right))])).await;
    work(root.clone(), Arc::clone(&queue), options(), LEASE).await;
    assert_eq!(ended(&root, &id(2)).await, Ended::Published);
}
