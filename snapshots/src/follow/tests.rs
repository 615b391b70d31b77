//! A follower in a process that has other things to do: stopped, dropped half way, begun again.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::FutureExt;
use weighbridge_schemas::channel::{ChannelSchema, Reason, entry_id};
use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::ids::{ChunkId, Fingerprint, RulesDigest, SnapshotId};
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotManifest, SnapshotSchema};

use super::*;
use crate::channel::{Channel, Move, Operation};
use crate::pace::Pace;
use crate::root::{Absent, Intercept, Request};
use crate::watch::StoreWatch;
use crate::{chunk, manifest};

/// Counts chunks that are read, each of which takes a while.
#[derive(Debug, Default)]
struct Slow(AtomicU64);

impl Intercept for Slow {
    fn before(&self, request: &Request) -> Result<()> {
        if request.name == "open" {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(())
    }

    fn after(&self, _: &Request) -> Result<()> {
        Ok(())
    }
}

/// A store with a model, and a folder that follows it.
struct House {
    at: tempfile::TempDir,
    root: Root,
    slow: Arc<Slow>,
    /// The states that were told, and how often something was swapped to.
    told: Arc<Mutex<(Vec<HostStatus>, u64)>>,
}

impl House {
    fn new() -> Self {
        let at = tempfile::tempdir().unwrap();
        let root = Root::open(at.path().join("store").to_str().unwrap(), Absent::Create).unwrap();
        Self { at, root, slow: Arc::default(), told: Arc::default() }
    }

    /// Publishes a snapshot of a file for each text.
    async fn publish(&self, step: u64, texts: &[String]) -> SnapshotId {
        let model: ModelName = "m".parse().unwrap();
        let mut files = Vec::new();
        for (number, text) in texts.iter().enumerate() {
            let bytes = Bytes::from(text.clone().into_bytes());
            let chunk = Chunk { id: ChunkId::of(&bytes), size: bytes.len() as u64 };
            chunk::put(&self.root, &model, chunk, bytes).await.unwrap();
            let name = format!("files/{number:03}");
            files.push(SnapshotFile { name, size: chunk.size, artifact: true, chunks: vec![chunk] });
        }
        let manifest = SnapshotManifest {
            schema: SnapshotSchema::V1,
            model: model.clone(),
            run: "r".parse().unwrap(),
            step,
            format: Format::Safetensors,
            checkpoint: Fingerprint::of(b"c"),
            rules: RulesDigest::of(b"p"),
            encoding_version: 1,
            files,
            tensors: vec![],
        };
        let (snapshot, _) = manifest::put(&self.root, &manifest).await.unwrap();
        let (when, name) = (now(), "prod".parse().unwrap());
        let operation = Operation { id: step.to_string(), who: "test".into(), when };
        let (run, reason) = (manifest.run, Reason::Publish);
        let to = Move { snapshot, run, step, created_at: when, reason };
        let channel = Channel::new(&self.root, &model, &name);
        channel.append(&operation, |_| Ok::<_, Infallible>(to.clone())).await.unwrap();
        snapshot
    }

    fn folder(&self) -> std::path::PathBuf {
        self.at.path().join("served")
    }

    async fn follower(&self) -> Follower {
        let following = Following {
            model: "m".parse().unwrap(),
            channel: "prod".parse().unwrap(),
            host: "h".into(),
            keep: 2,
            hooks: Hooks { before: None, after: None, limit: Duration::from_secs(1) },
            forget: false,
        };
        let root = self.root.clone().behind(self.slow.clone());
        let opener: Opener = Box::new(move || {
            let (model, channel) = ("m".parse().unwrap(), "prod".parse().unwrap());
            let watch = StoreWatch::new(&root, model, channel, None, Duration::from_millis(5));
            let limits = Limits::new(&root, 64 << 20, 4, Pace::default());
            Ok(Source { watch: Watch::Store(watch), root: root.clone(), limits })
        });
        let told = Arc::clone(&self.told);
        let listener: Listener = Arc::new(move |event| {
            let mut told = told.lock().unwrap();
            match event {
                Event::Status { status, is_news: true } => told.0.push((*status).clone()),
                Event::Swapped => told.1 += 1,
                _ => {}
            }
        });
        Follower::new(&self.folder(), Durability::Synced, following, opener, listener).await.unwrap()
    }

    /// Follows until this snapshot is current.
    async fn follow_until(&self, snapshot: SnapshotId) {
        self.told.lock().unwrap().0.clear();
        let follower = self.follower().await;
        let is_current = async {
            while !self.told.lock().unwrap().0.last().is_some_and(|status| {
                status.state == HostState::Current
                    && status.serving.as_ref().map(|target| target.snapshot) == Some(snapshot)
            }) {
                sleep(Duration::from_millis(2)).await;
            }
            // An attempt that goes on now is heard of when it is over.
            let lock = Folder::open(&self.folder(), Durability::Synced).unwrap().lock().await.unwrap();
            drop(lock);
        };
        timeout(Duration::from_secs(60), follower.run(is_current)).await.unwrap().unwrap();
    }

    /// The texts that are served.
    fn served(&self) -> Vec<String> {
        let folder = std::fs::canonicalize(self.folder().join("current")).unwrap().join("files");
        let names: BTreeSet<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }
}

fn texts(seed: u64) -> Vec<String> {
    (0..40).map(|number| format!("text {number} of {}", if number < 20 { 0 } else { seed })).collect()
}

#[tokio::test]
async fn a_restart_reads_nothing_and_what_is_shared_is_not_read_either() {
    let house = House::new();
    let first = house.publish(1, &texts(1)).await;
    house.follow_until(first).await;
    assert_eq!(house.served(), texts(1));
    assert_eq!(house.slow.0.swap(0, Ordering::Relaxed), 40);
    house.follow_until(first).await;
    assert_eq!(house.slow.0.load(Ordering::Relaxed), 0, "a restart reads no chunk");
    assert_eq!(house.told.lock().unwrap().1, 1, "nor does it swap");
    let second = house.publish(2, &texts(2)).await;
    house.follow_until(second).await;
    assert_eq!(house.served(), texts(2));
    assert_eq!(house.slow.0.swap(0, Ordering::Relaxed), 20);
    // Who touches what is served has it looked at, and put right.
    let path = house.folder().join("current/files/030");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "else").unwrap();
    house.follow_until(second).await;
    assert_eq!(house.served(), texts(2));
    let third = house.publish(3, &texts(1)).await;
    house.follow_until(third).await;
    assert_eq!(house.served(), texts(1));
    let status = std::fs::read(house.folder().join("status.json")).unwrap();
    assert_eq!(HostStatus::parse(&status).unwrap().serving.unwrap().snapshot, third);
}

#[tokio::test]
async fn one_that_is_dropped_at_any_moment_goes_on_in_the_same_process() {
    let house = House::new();
    let first = house.publish(1, &texts(1)).await;
    house.follow_until(first).await;
    let second = house.publish(2, &texts(2)).await;
    for moment in 0..25 {
        let follower = house.follower().await;
        let _ = timeout(Duration::from_millis(moment * 2), follower.run(pending())).await;
        let served = house.served();
        assert!(served == texts(1) || served == texts(2), "{moment}: {served:?}");
    }
    house.follow_until(second).await;
    assert_eq!(house.served(), texts(2));
}

/// An entry of this number, which nobody published.
fn entry(sequence: u64, reason: Reason) -> ChannelEntry {
    let (name, when) = ("prod".parse().unwrap(), now());
    ChannelEntry {
        schema: ChannelSchema::V1,
        sequence,
        id: entry_id(&sequence.to_string(), &name),
        snapshot: SnapshotId::of(&sequence.to_le_bytes()),
        previous: None,
        run: "r".parse().unwrap(),
        step: sequence,
        created_at: when,
        reason,
        who: "test".into(),
        when,
        signatures: Vec::new(),
    }
}

#[tokio::test]
async fn an_order_ends_a_fetch_even_where_a_publish_came_right_behind_it() {
    let house = House::new();
    let (sender, receiver) = watch::channel(None);
    let (_stops, stop) = watch::channel(false);
    let mut told = Orders::new(receiver, stop);
    let want = |entry: ChannelEntry, publishes_after| {
        let (root, limits) = (house.root.clone(), Limits::new(&house.root, 64 << 20, 4, Pace::default()));
        sender.send_modify(|wanted: &mut Option<Wanted>| {
            let orders = orders(wanted.as_ref(), &entry, publishes_after);
            *wanted = Some(Wanted { root, limits, entry: Arc::new(entry), orders });
        });
    };
    want(entry(5, Reason::Publish), 4);
    let begun = sender.borrow().clone().unwrap();
    for (sequence, publishes_after) in [(5, 4), (6, 5), (9, 6), (9, 8), (10, 9)] {
        want(entry(sequence, Reason::Publish), publishes_after);
        assert!(told.overruled(&begun).now_or_never().is_none(), "{sequence}: publishes alone");
    }
    let begun = sender.borrow().clone().unwrap();
    want(entry(14, Reason::Publish), 12);
    assert!(told.overruled(&begun).now_or_never().is_some());
    want(entry(15, Reason::Publish), 14);
    assert!(told.overruled(&begun).now_or_never().is_some(), "what was heard meanwhile counts too");
    let begun = sender.borrow().clone().unwrap();
    want(entry(16, Reason::Rollback), 16);
    assert!(told.overruled(&begun).now_or_never().is_some());
    let begun = sender.borrow().clone().unwrap();
    want(entry(16, Reason::Rollback), 16);
    assert!(told.overruled(&begun).now_or_never().is_none(), "it is the same");
    let held = ChannelEntry { snapshot: begun.entry.snapshot, ..entry(17, Reason::Hold) };
    want(held, 17);
    assert!(told.overruled(&begun).now_or_never().is_none(), "it points at what is fetched");
    want(entry(18, Reason::Release), 18);
    assert!(told.overruled(&begun).now_or_never().is_some());
}

#[test]
fn pauses_grow_and_are_bounded() {
    for failures in 0..70 {
        let pause = pause(failures);
        assert!(pause >= PAUSES.0 && pause <= PAUSES.1, "{failures}: {pause:?}");
    }
    assert!((0..50).map(|_| pause(1)).all(|pause| pause <= 2 * PAUSES.0));
    assert!((0..200).map(|_| pause(60)).any(|pause| pause > PAUSES.1 / 2));
}

/// A server in Rust may follow in a task of its own runtime.
#[tokio::test]
async fn following_is_a_task_like_any_other() {
    let house = House::new();
    let first = house.publish(1, &texts(1)).await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let follows = tokio::spawn(house.follower().await.run(async { drop(stopped.await) }));
    let is_swapped = async {
        while house.told.lock().unwrap().1 == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(60), is_swapped).await.unwrap();
    stop.send(()).unwrap();
    follows.await.unwrap().unwrap();
    let current = std::fs::read_link(house.folder().join("current")).unwrap();
    assert!(current.ends_with(first.to_string()));
}
