//! Networks and stores that fail by chance, and ones that fail in one way all the time, between the binary and its
//! store: publish and fetch end right, or say why not, and little is read twice.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weighbridge_tests::buckets::{Answer, Asked, At, Chances, Fault, FaultyProxy, Kind};
use weighbridge_tests::synthetic;

use crate::binary::{Run, Store, ended, spawn, wait};
use crate::places::{House, Place, files, server};

/// A checkpoint, and what a folder's store makes of it when all of it is kept.
pub(crate) struct Wanted {
    pub(crate) checkpoint: PathBuf,
    pub(crate) policy: String,
    pub(crate) snapshot: String,
    pub(crate) bytes: u64,
    reference: Store,
}

impl Wanted {
    /// Some tables of `rows` rows of 33 F32: chunks of 4.3 MB.
    pub(crate) fn new(tables: usize, rows: usize) -> Self {
        let reference = Store::new();
        let checkpoint = reference.folder.path().join("model.safetensors");
        synthetic(&checkpoint, tables, rows, 33);
        let policy = reference.policy("[[rule]]\nmatch = '**'\n").to_str().unwrap().to_owned();
        let published = reference.publish(&checkpoint, &["--step", "5", "--policy", &policy]).succeeded();
        let fetched = reference.fetch("m").succeeded();
        let snapshot = published["snapshot"].as_str().unwrap().to_owned();
        let bytes = fetched["bytes"].as_u64().unwrap();
        std::fs::remove_dir_all(reference.root()).unwrap();
        Self { checkpoint, policy, snapshot, bytes, reference }
    }

    pub(crate) fn publish(&self, house: &House) -> Run {
        house.store.publish(&self.checkpoint, &["--step", "5", "--policy", &self.policy])
    }

    /// What a folder serves is right, byte for byte.
    #[track_caller]
    pub(crate) fn is_served(&self, into: &Path) {
        let (found, wanted) = (files(&into.join("current")), files(&self.reference.served().join("current")));
        assert!(found == wanted, "other bytes");
    }
}

/// Everything that passes, by chance.
fn chances(retry_after: Option<u32>) -> Chances {
    Chances {
        cut_answer: 0.12,
        cut_request: 0.08,
        drop_before: 0.04,
        drop_after: 0.04,
        internal_error: 0.05,
        slow_down: 0.03,
        retry_after,
        conflict: 0.1,
        precondition_failed: 0.0,
        delay: 0.3,
        longest_delay: Duration::from_millis(30),
    }
}

#[test]
fn publish_and_fetch_end_right_through_a_network_that_fails_by_chance() {
    // 200 MB, and 800 requests or so.
    let wanted = Wanted::new(3, 530_000);
    for (place, kind, seed, retry_after) in [
        (Place::SeaweedFs, Kind::SeaweedFs, 1, None),
        (Place::Moto, Kind::Moto, 2, Some(1)),
        (Place::Azurite, Kind::Azurite, 3, None),
    ] {
        let Some(server) = server(kind) else { continue };
        let proxy = FaultyProxy::start(server, seed);
        let house = House::of_server(place, server, Some(proxy.port()));
        proxy.by_chance(chances(retry_after));
        let began = Instant::now();
        let published = wanted.publish(&house);
        assert_eq!(published.code, 0, "{published:?}");
        assert_eq!(published.json()["snapshot"], *wanted.snapshot);
        let (publish, counts) = (began.elapsed(), proxy.counts());
        assert!(counts.faults > 10, "{counts:?}");
        proxy.forget();
        let fetched = house.store.fetch("m");
        assert_eq!(fetched.code, 0, "{fetched:?}");
        wanted.is_served(&house.store.served());
        let read = proxy.counts();
        let times = read.read as f64 / wanted.bytes as f64;
        println!(
            "{place:?}: {} bytes, published in {publish:?}, {} faults; fetched, {} faults, read {times:.3} times",
            wanted.bytes, counts.faults, read.faults
        );
        assert!(read.faults > 5 && times < 1.3, "{times}, {read:?}");
        proxy.pass();
        house.store.run(["verify"]).succeeded();
    }
}

/// B07: a body that breaks is read on where it broke.
#[test]
fn each_third_answer_is_cut_and_only_what_is_missing_is_read_again() {
    let wanted = Wanted::new(2, 200_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 3);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    for (number, part) in [(0, 0.01), (3, 0.5), (6, 0.99)] {
        let reads = AtomicU64::new(0);
        proxy.always(Fault::CutAnswer(At::Part(part)), move |asked: &Asked| {
            asked.is_get() && reads.fetch_add(1, Ordering::Relaxed) % 9 == number
        });
    }
    assert_eq!(wanted.publish(&house).succeeded()["snapshot"], *wanted.snapshot);
    proxy.forget();
    house.store.fetch("m").succeeded();
    wanted.is_served(&house.store.served());
    let counts = proxy.counts();
    assert!(counts.faults > 4, "{counts:?}");
    assert!(counts.read as f64 / (wanted.bytes as f64) < 1.3, "{counts:?} for {}", wanted.bytes);
}

/// B38: three hosts at once, and several chunks each; every byte is right, and none is read twice.
#[test]
fn hosts_that_fetch_at_once_get_every_byte_once() {
    let wanted = Wanted::new(2, 150_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 3);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    wanted.publish(&house).succeeded();
    for round in 0..4 {
        proxy.forget();
        let into = |host: u32| house.store.folder.path().join(format!("host {round} {host}"));
        let fetch = |host: u32| {
            let into = into(host);
            let arguments = ["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), into.as_os_str()];
            spawn(house.store.command(arguments))
        };
        for fetch in [0, 1, 2].map(fetch) {
            assert_eq!(wait(fetch).succeeded()["bytes_read"], wanted.bytes);
        }
        for host in 0..3 {
            wanted.is_served(&into(host));
            std::fs::remove_dir_all(into(host)).unwrap();
        }
        let documents = 3 << 20;
        assert!(proxy.counts().read < 3 * wanted.bytes + documents, "{:?}", proxy.counts());
    }
}

/// B88: a store that lets one change a second through to an object. A channel moves ten times, in order.
#[test]
fn a_channel_is_moved_ten_times_where_an_object_may_change_once_a_second() {
    let Some(server) = server(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(server, 3);
    let house = House::of_server(Place::Moto, server, Some(proxy.port()));
    let checkpoint = crate::fixtures::torchrec();
    let ids = ["1", "2"].map(|step| {
        let published = house.store.publish(&checkpoint, &["--step", step]).succeeded();
        published["snapshot"].as_str().unwrap().to_owned()
    });
    let changed = Mutex::new(std::collections::BTreeMap::<String, Instant>::new());
    let busy = Fault::Answer(Answer::new(429, "rateLimitExceeded"));
    let rule = proxy.always(busy, move |asked: &Asked| {
        if !asked.is_put() {
            return false;
        }
        let (mut changed, now) = (changed.lock().unwrap(), Instant::now());
        let is_soon = changed.get(&asked.key).is_some_and(|then| now - *then < Duration::from_secs(1));
        if !is_soon {
            changed.insert(asked.key.clone(), now);
        }
        is_soon
    });
    proxy.forget();
    for flip in 0..10 {
        let run = house.store.run(["promote", &format!("m@{}", ids[flip % 2])]);
        assert_eq!(run.code, 0, "{run:?}");
    }
    let log = house.store.run(["channels", "log", "m"]).succeeded();
    let entries = log["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 12);
    for (at, entry) in entries.iter().take(10).enumerate() {
        assert_eq!(entry["snapshot"], ids[(9 - at) % 2]);
    }
    let put = proxy.log().into_iter().filter(|entry| entry.asked.is_put()).map(|entry| entry.asked.key);
    let hints = put.filter(|key| key.ends_with("/hint")).count();
    println!("{} changes came too soon, of {hints} of the hint", rule.fired());
    // What rules is an object of its own each time; only the hint is written over.
    assert!(proxy.log().iter().all(|entry| entry.status != Some(429) || entry.asked.key.ends_with("/hint")));
}

/// B79: what is staged lies beside its target, not in the system's folder for temporary files.
#[test]
fn a_small_folder_for_temporary_files_is_no_obstacle() {
    let wanted = Wanted::new(1, 200_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let house = House::of_server(Place::SeaweedFs, server, None);
    let Some(volume) = crate::volume::Volume::mount(house.store.folder.path(), "1m") else { return };
    let mut publish =
        house.store.publish_command(&wanted.checkpoint, &["--step", "5", "--policy", &wanted.policy]);
    let published = ended(publish.env("TMPDIR", &volume.0).output().unwrap());
    assert_eq!(published.succeeded()["snapshot"], *wanted.snapshot);
    ended(house.store.fetch_command("m").env("TMPDIR", &volume.0).output().unwrap()).succeeded();
    wanted.is_served(&house.store.served());
}
