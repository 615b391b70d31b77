//! Versions swapped under reading threads, again and again: every batch is of one snapshot.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weighbridge_snapshots::reader::{Options, Pages, Serving, Version};
use weighbridge_tests::lookups::Lookups;

use crate::binary::Store;
use crate::numbered::{self, ROWS, TABLES, WIDTH};

/// How many snapshots are published, unless the variable says otherwise.
const SNAPSHOTS: u16 = 200;
const SNAPSHOTS_VARIABLE: &str = "WEIGHBRIDGE_SWAPS";
const READERS: u64 = 8;
/// Rows of a batch, of each table.
const BATCH: usize = 16;
/// What a reader does between batches: it leaves the processor to those that publish.
const BETWEEN: Duration = Duration::from_micros(200);

/// What the readers and the one that swaps know of each other.
#[derive(Default)]
struct House {
    /// Odd while a version is being opened and swapped in.
    swaps: AtomicU64,
    done: AtomicBool,
}

/// Reads one batch of all tables out of one version; every value has to be the version's number.
fn read_batch(version: &Version, rows: &[u64], decoded: &mut [f32]) {
    let number = version.manifest().step as f32;
    for name in TABLES {
        let table = version.table(name).unwrap();
        assert_eq!(table.decode_rows(rows, decoded).unwrap(), 0);
        assert!(decoded.iter().all(|value| *value == number), "{name}: {decoded:?} in snapshot {number}");
    }
}

fn read(serving: &Serving, house: &House, seed: u64) -> Lookups {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut lookups, mut decoded) = (Lookups::default(), [0.0; BATCH * WIDTH]);
    while !house.done.load(Ordering::Relaxed) {
        let rows: [u64; BATCH] = std::array::from_fn(|_| random.u64(..ROWS as u64));
        let before = house.swaps.load(Ordering::SeqCst);
        let began = Instant::now();
        let version = serving.current();
        read_batch(&version, &rows, &mut decoded);
        drop(version);
        let took = began.elapsed();
        let met = before % 2 == 1 || house.swaps.load(Ordering::SeqCst) != before;
        if met {
            lookups.during_swaps.record(took);
        } else {
            lookups.at_rest.record(took);
        }
        std::thread::sleep(BETWEEN);
    }
    lookups
}

fn swap(serving: &Serving, house: &House) {
    house.swaps.fetch_add(1, Ordering::SeqCst);
    let swapped = serving.refresh();
    house.swaps.fetch_add(1, Ordering::SeqCst);
    swapped.unwrap().unwrap();
}

/// The versions below `folder` of which this process has something mapped.
fn mapped(folder: &Path) -> Vec<String> {
    let versions = format!("{}/versions/", folder.to_str().unwrap());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ids = maps.lines().filter_map(|line| line.split_once(&versions)?.1.split('/').next());
    let mut ids: Vec<_> = ids.map(str::to_owned).collect();
    ids.sort();
    ids.dedup();
    ids
}

/// The peak of this process's resident memory, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn every_batch_is_of_one_snapshot_however_often_versions_are_swapped() {
    let snapshots = std::env::var(SNAPSHOTS_VARIABLE).map_or(SNAPSHOTS, |text| text.parse().unwrap());
    let store = Store::new();
    let policy = numbered::policy(&store);
    let first = numbered::publish(&store, &policy, 1);
    store.fetch("m").succeeded();
    let serving = Serving::open(&store.served(), Options::default()).unwrap();
    let house = House::default();
    let (lookups, last) = std::thread::scope(|scope| {
        // However this ends, the readers end too.
        let _done = Done(&house.done);
        let (serving, house) = (&serving, &house);
        let readers: Vec<_> =
            (0..READERS).map(|seed| scope.spawn(move || read(serving, house, seed))).collect();
        let mut last = first.clone();
        for number in 2..=snapshots {
            last = numbered::publish(&store, &policy, number);
            store.fetch("m").succeeded();
            swap(serving, house);
            assert_eq!(serving.current().manifest().step, u64::from(number));
            if number % 25 == 0 {
                // Back to the first one, and on again.
                for id in [&first, &last] {
                    store.fetch(&format!("m@{id}")).succeeded();
                    swap(serving, house);
                    assert_eq!(serving.current().id().to_string(), *id);
                }
            }
        }
        house.done.store(true, Ordering::Relaxed);
        let mut lookups = Lookups::default();
        readers.into_iter().for_each(|reader| lookups.add(&reader.join().unwrap()));
        (lookups, last)
    });
    assert_eq!((serving.refresh().unwrap(), serving.retired()), (None, 0));
    assert_eq!(mapped(&store.served()), [last], "all generations but one are unmapped");
    println!("{lookups}\npeak memory: {} KiB", peak());
    assert!(lookups.at_rest.count() > 0 && lookups.during_swaps.count() > 0);
}

/// Sets its flag when it is dropped.
struct Done<'f>(&'f AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// B31: readers, and swaps all the time. Each load sees one snapshot.
#[test]
fn no_load_fails_or_sees_two_snapshots_while_sixty_swaps_happen() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[TABLE, 4096]);
    let first = checkpoint.publish(&store);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    // What is loaded while two swaps happen has to stay meanwhile.
    let mut host = Host::start(&store, &["--interval", "100ms", "--keep", "3"]);
    host.until_current(&second);
    let loads: Vec<_> = (0..4).map(|_| Server::start(&host.into)).collect();
    for swap in 0..60 {
        let to = if swap % 2 == 0 { &first } else { &second };
        store.run(["promote", &format!("m@{to}")]).succeeded();
        host.until_current(to);
    }
    for load in loads {
        let steps = load.steps();
        assert!(steps.len() > 10 && steps.iter().all(|step| [1, 2].contains(step)), "{steps:?}");
    }
}

#[test]
fn a_version_damaged_after_its_fetch_is_found_and_the_old_one_serves_on_until_it_is_mended() {
    let store = Store::new();
    let policy = numbered::policy(&store);
    numbered::publish(&store, &policy, 1);
    store.fetch("m").succeeded();
    let options = Options { verify: true, pages: Pages::Present, ..Options::default() };
    let serving = Serving::open(&store.served(), options).unwrap();
    let second = numbered::publish(&store, &policy, 2);
    store.fetch("m").succeeded();
    let file = store.served().join("versions").join(&second).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let refused = serving.refresh().unwrap_err();
    assert_eq!(refused.class().as_str(), "integrity");
    let mut decoded = [0.0; BATCH * WIDTH];
    read_batch(&serving.current(), &[3; BATCH], &mut decoded);
    assert_eq!(serving.current().manifest().step, 1);
    // The next fetch replaces the version, under the same name.
    let fetched = store.run(["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), store.served().as_os_str()]);
    assert_eq!(fetched.code, 0, "{fetched:?}");
    assert_eq!(serving.refresh().unwrap().unwrap().to.to_string(), second);
    read_batch(&serving.current(), &[3; BATCH], &mut decoded);

    // So too where the damaged one was served.
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(serving.refresh().unwrap(), None, "its folder is the same: nobody looks");
    assert_eq!(store.fetch("m").code, 0);
    let swap = serving.refresh().unwrap().unwrap();
    assert_eq!((swap.from, swap.to), (serving.current().id(), serving.current().id()));
}
