//! What stands between drops connections without a word: hosts notice, and hear of the next snapshot in time.

use std::time::{Duration, Instant};

use weighbridge_tests::proxy::Proxy;

use super::served::{Served, publish};
use crate::binary::Store;
use crate::follower::Host;

/// How soon a host has to have what was published.
const BOUND: Duration = Duration::from_secs(30);

/// A host behind a proxy, that serves the first snapshot.
fn host(store: &Store, served: &Served, first: &str) -> (Proxy, Host) {
    let proxy = Proxy::start(served.address);
    let api = format!("http://127.0.0.1:{}", proxy.port());
    let mut host = Host::start(store, &["--api", &api]);
    host.until_current(first);
    (proxy, host)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_dropped_when_idle_is_kept_alive() {
    let store = Store::new();
    let first = publish(&store, "m", 1);
    let served = Served::start(&store, "watch_milliseconds = 100", &[]);
    let (proxy, mut host) = host(&store, &served, &first);
    proxy.mute_idle(Duration::from_secs(10));
    tokio::time::sleep(Duration::from_secs(26)).await;
    let watching = served.figure("weighbridge_api_watchers").await;
    let second = publish(&store, "m", 2);
    let began = Instant::now();
    let status = host.until_current(&second);
    println!("idle: {:?}", began.elapsed());
    // Signs of life kept the stream, and what was fetched came over connections that nobody had dropped.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!((watching, &status["last_error"]), (1, &serde_json::Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_dropped_without_a_word_is_given_up_in_time() {
    let store = Store::new();
    let first = publish(&store, "m", 1);
    let served = Served::start(&store, "watch_milliseconds = 100", &[]);
    let (proxy, mut host) = host(&store, &served, &first);
    // What there is hears nothing more; what comes anew passes.
    proxy.mute();
    let second = publish(&store, "m", 2);
    let began = Instant::now();
    host.until_current(&second);
    println!("mute: {:?}", began.elapsed());
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    // Again, while it fetches.
    let third = publish(&store, "m", 3);
    proxy.mute();
    let began = Instant::now();
    host.until_current(&third);
    println!("mute at a swap: {:?}", began.elapsed());
    assert!(began.elapsed() < BOUND + Duration::from_secs(15), "{:?}", began.elapsed());
}
