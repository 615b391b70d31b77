//! SIGKILL at any moment of a publish to a bucket, or of a fetch out of one: it goes on where it stopped, and nobody
//! ever sees a part.

use std::process::Child;
use std::time::{Duration, Instant};

use weighbridge_tests::buckets::{Asked, Fault, FaultyProxy, Kind};

use crate::binary::spawn;
use crate::chance::Wanted;
use crate::fixtures::torchrec;
use crate::places::{House, Place, server};

/// With this variable the snapshot whose fetch is killed has 1 GiB.
const LARGE: &str = "WEIGHBRIDGE_TEST_LARGE";
/// Of 128 MiB, 96 are the process's own, and half of the rest is for chunks on their way, which are lost by a kill.
const ON_THE_WAY: u64 = 16 << 20;

/// Kills the process once `moved` bytes have reached the goal; says whether it was still running.
fn kill(mut child: Child, goal: u64, moved: impl Fn() -> u64) -> bool {
    while moved() < goal {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap().code().is_none()
}

#[test]
fn a_fetch_that_is_killed_twenty_times_goes_on_each_time() {
    let rows = if std::env::var_os(LARGE).is_some() { 2_033_601 } else { 508_401 };
    let wanted = Wanted::new(4, rows);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let old = house.store.publish(&torchrec(), &["--step", "1"]).succeeded()["snapshot"].clone();
    let old = old.as_str().unwrap();
    house.store.fetch("m").succeeded();
    wanted.publish(&house).succeeded();
    proxy.always(Fault::Throttle(Duration::from_millis(5)), Asked::is_get);
    proxy.forget();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let kills = 20;
    let fetch = || {
        let mut fetch = house.store.fetch_command("m");
        fetch.args(["--memory", "128MiB"]);
        spawn(fetch)
    };
    let began = Instant::now();
    let mut killed = 0;
    for _ in 0..kills {
        let goal = proxy.counts().read + random.u64(0..wanted.bytes / kills * 3 / 2);
        killed += u64::from(kill(fetch(), goal, || proxy.counts().read));
        house.serves_alone(old);
    }
    assert_eq!(killed, kills);
    let before = proxy.counts().read;
    let last = house.store.fetch("m").succeeded();
    assert_eq!(last["snapshot"], *wanted.snapshot);
    wanted.is_served(&house.store.served());
    let read = proxy.counts().read;
    println!(
        "{} bytes, {kills} kills in {:?}: read {read} in all, {:.2} times; {} at the end, {} reused",
        wanted.bytes,
        began.elapsed(),
        read as f64 / wanted.bytes as f64,
        read - before,
        last["bytes_reused"]
    );
    // Beside the chunks on their way: what lies in sockets, and a few documents.
    assert!(read < wanted.bytes + kills * (ON_THE_WAY + (4 << 20)), "{read}");
    assert!(last["bytes_reused"].as_u64().unwrap() > 0, "{last}");
    let staged = std::fs::read_dir(house.store.served().join(".staging")).map_or(0, Iterator::count);
    assert_eq!(staged, 0, "nothing is left lying about");
}

#[test]
fn a_publish_that_is_killed_ten_times_is_finished_by_running_it_again() {
    let wanted = Wanted::new(2, 400_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let old = house.store.publish(&torchrec(), &["--step", "1"]).succeeded()["snapshot"].clone();
    proxy.always(Fault::Throttle(Duration::from_millis(3)), Asked::is_put);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let publish =
        || house.store.publish_command(&wanted.checkpoint, &["--step", "5", "--policy", &wanted.policy]);
    let mut killed = 0;
    for _ in 0..10 {
        let goal = proxy.counts().written + random.u64(0..wanted.bytes / 6);
        killed += usize::from(kill(spawn(publish()), goal, || proxy.counts().written));
        // Whatever stands on the channel now is whole.
        let seen = house.store.run(["verify", "m@prod"]).succeeded();
        let now = house.store.run(["inspect", "m"]).succeeded()["snapshot"].clone();
        assert!(now == old || now == *wanted.snapshot, "{now}, {seen}");
    }
    println!("{killed} killed, {} bytes written for {}", proxy.counts().written, wanted.bytes);
    assert!(killed >= 5, "{killed}");
    assert_eq!(wanted.publish(&house).succeeded()["snapshot"], *wanted.snapshot);
    house.store.run(["verify"]).succeeded();
    house.store.fetch("m").succeeded();
    wanted.is_served(&house.store.served());
    let log = house.store.run(["channels", "log", "m"]).succeeded();
    assert_eq!(log["entries"].as_array().unwrap().len(), 2, "one entry a step");
}
