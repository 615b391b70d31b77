//! The whole of it: snapshots are published one after the other, hosts follow the channel, half of them by an API and
//! half in the store, and threads look up rows all the time. Every answer belongs wholly to one snapshot; nobody ends
//! on an old one.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weighbridge_snapshots::reader::{Options, Serving};
use weighbridge_tests::lookups::Lookups;

use crate::binary::Store;
use crate::follower::Host;
use crate::numbered::{self, ROWS, TABLES, WIDTH};

/// How many snapshots are published, unless the variable says otherwise; and how many hosts follow.
const SNAPSHOTS: u16 = 60;
const HOSTS: usize = 8;
/// The whole number: 200 snapshots, 20 hosts.
const WHOLE_VARIABLE: &str = "WEIGHBRIDGE_TEST_LARGE";
const READERS: usize = 8;
/// Rows of a batch, of each table.
const BATCH: usize = 16;
/// What a reader does between batches: it leaves the processor to the others.
const BETWEEN: Duration = Duration::from_millis(1);
/// How soon a reader's process sees that the link has moved.
const LOOK: Duration = Duration::from_millis(20);

/// An API in front of a store, on a port of its own.
struct Api {
    child: Child,
    address: String,
}

impl Api {
    fn start(store: &Store) -> Self {
        let mut command = store.command(["serve", "--roles", "api", "--listen", "127.0.0.1:0"]);
        command.args(["--api-listen", "127.0.0.1:0", "--config"]).arg(config(store));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines
            .find_map(|line| Some(line.unwrap().strip_prefix("API on ")?.split(' ').next()?.to_owned()))
            .unwrap();
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Hosts on one machine share a caller's limits.
fn config(store: &Store) -> PathBuf {
    let path = store.folder.path().join("api.toml");
    std::fs::write(&path, "[api]\nrequests_per_second = 10000\nwatch_milliseconds = 100\n").unwrap();
    path
}

/// Looks up rows of what `into` serves until `done`; how long that took, and how many snapshots were seen.
fn read(into: &Path, done: &AtomicBool, seed: usize) -> (Lookups, usize) {
    let serving = Serving::open(into, Options::default()).unwrap();
    let (mut lookups, mut seen) = (Lookups::default(), std::collections::BTreeSet::new());
    let rows: Vec<u64> = (0..BATCH).map(|n| ((seed * 7 + n * 5) % ROWS) as u64).collect();
    let mut decoded = vec![0f32; BATCH * WIDTH];
    let mut looked = Instant::now();
    while !done.load(Ordering::Relaxed) {
        let swapped = looked.elapsed() >= LOOK && {
            looked = Instant::now();
            serving.refresh().unwrap().is_some()
        };
        let began = Instant::now();
        let version = serving.current();
        let number = version.manifest().step as f32;
        for name in TABLES {
            assert_eq!(version.table(name).unwrap().decode_rows(&rows, &mut decoded).unwrap(), 0);
            assert!(decoded.iter().all(|value| *value == number), "{name}: {decoded:?} in {number}");
        }
        let times = if swapped { &mut lookups.during_swaps } else { &mut lookups.at_rest };
        times.record(began.elapsed());
        seen.insert(version.manifest().step);
        std::thread::sleep(BETWEEN);
    }
    (lookups, seen.len())
}

#[test]
fn hosts_and_readers_go_with_a_channel_and_nobody_sees_anything_torn_or_stays_behind() {
    let whole = std::env::var_os(WHOLE_VARIABLE).is_some();
    let (snapshots, hosts) = if whole { (200, 20) } else { (SNAPSHOTS, HOSTS) };
    let store = Store::new();
    let policy = numbered::policy(&store);
    let first = numbered::publish(&store, &policy, 1);
    let api = Api::start(&store);
    let mut hosts: Vec<Host> = (0..hosts)
        .map(|number| {
            let into = store.folder.path().join(format!("host-{number}"));
            let by_api = ["--api", &api.address, "--no-sync"];
            let more = if number % 2 == 0 { &by_api[..] } else { &by_api[2..] };
            Host::start_into(&store, &into, more)
        })
        .collect();
    for host in &mut hosts {
        host.until_current(&first);
    }
    let done = AtomicBool::new(false);
    let (lookups, seen) = std::thread::scope(|scope| {
        let stop = Stop(&done);
        let readers: Vec<_> = (0..READERS)
            .map(|seed| {
                let (into, done) = (hosts[seed % hosts.len()].into.clone(), &done);
                scope.spawn(move || read(&into, done, seed))
            })
            .collect();
        let mut last = first.clone();
        for number in 2..=snapshots {
            last = numbered::publish(&store, &policy, number);
        }
        for host in &mut hosts {
            let status = host.until_current(&last);
            assert_eq!((&status["attempts"], &status["last_error"]), (&0.into(), &serde_json::Value::Null));
        }
        // Readers see what is served last.
        std::thread::sleep(5 * LOOK);
        drop(stop);
        let (mut lookups, mut seen) = (Lookups::default(), Vec::new());
        for reader in readers {
            let (own, snapshots) = reader.join().unwrap();
            lookups.add(&own);
            seen.push(snapshots);
        }
        (lookups, seen)
    });
    println!("{lookups}\nsnapshots that readers saw: {seen:?}");
    assert!(seen.iter().all(|seen| *seen >= 2), "{seen:?}");
    for host in &mut hosts {
        assert_eq!(host.terminate(), Some(0), "{}", host.said());
    }
}

/// Ends the readers, however this ends.
struct Stop<'d>(&'d AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
