//! Disks that are full at the fetching side, and memory that is bounded.

use std::io::Write;
use std::time::{Duration, Instant};

use weighbridge_tests::buckets::{Asked, Fault, FaultyProxy, Kind};
use weighbridge_tests::peak_memory;

use crate::binary::{ended, spawn, wait};
use crate::chance::Wanted;
use crate::damage::serves_alone;
use crate::fixtures::torchrec;
use crate::places::{House, Place, server};
use crate::volume::Volume;

/// Fills a file until there is no room.
fn fill(path: &std::path::Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for length in [1 << 20, 4 << 10] {
        while file.write_all(&vec![1; length]).is_ok() {}
    }
}

#[test]
fn a_disk_that_fills_up_under_a_fetch_leaves_the_old_version_and_room_is_all_it_takes() {
    let wanted = Wanted::new(1, 200_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let Some(volume) = Volume::mount(house.store.folder.path(), "48m") else { return };
    let (into, filler) = (volume.0.join("served"), volume.0.join("filler"));
    let fetch = || house.store.command(["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), into.as_os_str()]);
    let old = house.store.publish(&torchrec(), &["--step", "1"]).succeeded()["snapshot"].clone();
    let old = old.as_str().unwrap();
    ended(fetch().output().unwrap()).succeeded();
    wanted.publish(&house).succeeded();

    // Before the first byte.
    fill(&filler);
    let run = ended(fetch().output().unwrap());
    assert_eq!(run.failed(1), "disk_full");
    serves_alone(&into, old);
    std::fs::remove_file(&filler).unwrap();

    // In the middle: when chunks are asked for, room was checked.
    let is_chunk = |asked: &Asked| asked.is_get() && asked.key.contains("/chunks/");
    let held = proxy.always(Fault::Delay(Duration::from_secs(2)), is_chunk);
    let fetching = spawn(fetch());
    let deadline = Instant::now() + Duration::from_secs(60);
    while held.fired() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    fill(&filler);
    let run = wait(fetching);
    assert_eq!(run.failed(1), "disk_full");
    serves_alone(&into, old);
    held.end();
    std::fs::remove_file(&filler).unwrap();
    assert_eq!(ended(fetch().output().unwrap()).succeeded()["snapshot"], *wanted.snapshot);
    wanted.is_served(&into);
}

#[test]
fn memory_stays_within_the_budget_to_a_bucket_and_from_one() {
    let wanted = Wanted::new(3, 1_520_000);
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let house = House::of_server(Place::SeaweedFs, server, None);
    let more = ["--step", "5", "--policy", &wanted.policy, "--memory", "256MiB"];
    let began = Instant::now();
    let (status, published) =
        peak_memory(&mut house.store.publish_command(&wanted.checkpoint, &more)).unwrap();
    let publish = began.elapsed();
    assert!(status.success());
    let mut fetch = house.store.fetch_command("m");
    let (status, fetched) = peak_memory(fetch.args(["--memory", "256MiB"])).unwrap();
    assert!(status.success());
    println!(
        "{} bytes: published with {} MiB in {publish:?}, fetched with {} MiB in {:?}",
        wanted.bytes,
        published >> 20,
        fetched >> 20,
        began.elapsed() - publish
    );
    wanted.is_served(&house.store.served());
    assert!(published <= 256 << 20 && fetched <= 256 << 20, "{published}, {fetched}");
}
