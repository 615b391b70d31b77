//! Many hosts behind one token, and a server that allows few requests a second.

use std::time::{Duration, Instant};

use super::served::{Served, publish};
use crate::binary::Store;
use crate::follower::Host;

const HOSTS: u64 = 50;
const A_SECOND: u64 = 20;

/// Requests that were answered in whatever way, but for what hosts tell of themselves.
async fn asked(served: &Served) -> u64 {
    let text = served.metrics().await;
    let series = text.lines().filter(|line| {
        line.starts_with("weighbridge_api_requests_total{") && !line.contains("/v1/fleet/hosts")
    });
    series.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

/// Publishes the snapshot of this number, and waits until all hosts serve it; gives how often the API was asked.
async fn flip(store: &Store, served: &Served, hosts: &mut [Host], number: u16) -> u64 {
    let before = asked(served).await;
    let snapshot = publish(store, "m", number);
    for host in hosts.iter_mut() {
        host.until_current(&snapshot);
    }
    asked(served).await - before
}

fn start(store: &Store, served: &Served, count: u64) -> Vec<Host> {
    let host = |number: u64| {
        let into = store.folder.path().join(format!("host-{number}"));
        Host::start_into(store, &into, &["--api", &served.url, "--no-sync"])
    };
    (0..count).map(host).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_herd_is_served_in_turn_and_hardly_anybody_has_to_come_again() {
    let store = Store::new();
    let first = publish(&store, "m", 1);
    // What one host asks for, when nobody is in its way.
    let needed = {
        let served = Served::start(&store, "watch_milliseconds = 100", &[]);
        let mut one = start(&store, &served, 1);
        one[0].until_current(&first);
        flip(&store, &served, &mut one, 2).await
    };
    std::fs::remove_dir_all(store.folder.path().join("host-0")).unwrap();
    assert!(needed > 1, "{needed}");
    let config = format!("watch_milliseconds = 100\nrequests_per_second = {A_SECOND}");
    let served = Served::start(&store, &config, &[]);
    let began = Instant::now();
    let mut hosts = start(&store, &served, HOSTS);
    let second = first_of(&store);
    for host in &mut hosts {
        host.until_current(&second);
    }
    println!("{HOSTS} hosts came within {:?}", began.elapsed());
    let began = Instant::now();
    let asked = flip(&store, &served, &mut hosts, 3).await;
    println!("{asked} requests for {HOSTS} hosts that need {needed} each, {:?}", began.elapsed());
    assert!(asked >= HOSTS * needed && asked * 2 < HOSTS * needed * 3, "{asked}");
    // No host came to harm.
    for host in &hosts {
        assert_eq!(host.status().unwrap()["serving"]["step"], 3);
    }
    assert!(began.elapsed() < Duration::from_secs(60));
}

/// What channel `prod` points at.
fn first_of(store: &Store) -> String {
    let listed = store.run(["channels", "m"]).succeeded();
    listed["channels"][0]["snapshot"].as_str().unwrap().to_owned()
}
