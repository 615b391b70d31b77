//! Very many at once: five hundred who watch and some who fetch, while the channel moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::task::JoinSet;
use weighbridge::api::proto;
use weighbridge::api::proto::watch_channel_response::Event;

use super::served::{PATIENCE, Served, chunk_path, chunks, get, move_channel, publish};
use crate::binary::Store;
use crate::site::http;

const WATCHERS: usize = 500;
/// How many of them go by gRPC, over few connections; the others have one each.
const BY_RPC: usize = 300;
const CONNECTIONS: usize = 5;
const FETCHERS: usize = 32;
const MOVES: u64 = 20;
/// The most memory that the server may take, in MiB.
const MEMORY: u64 = 160;

/// What the crowd has seen.
#[derive(Default)]
struct Seen {
    /// Watchers that have heard their first entry.
    began: AtomicU64,
    /// Those that have heard the last one.
    last: AtomicU64,
    /// Entries that were told.
    told: AtomicU64,
    done: AtomicBool,
}

impl Seen {
    /// Notes an entry, the first being this one; the last one is number `last`.
    fn note(&self, sequence: u64, before: u64, last: u64) {
        assert!(sequence > before, "{sequence} after {before}");
        self.told.fetch_add(1, Ordering::Relaxed);
        self.began.fetch_add(u64::from(before == 0), Ordering::Relaxed);
        self.last.fetch_add(u64::from(sequence == last), Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_hear_of_every_move_and_the_server_stays_small() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let chunk = chunk_path("m", &chunks(&store, "m", &snapshot)[0].0);
    // The caller is one, and its hosts are many.
    let config = "watch_milliseconds = 100\nrequests_per_second = 100000";
    let served = Arc::new(Served::start(&store, config, &[]));
    let (seen, last) = (Arc::new(Seen::default()), 1 + MOVES);
    let mut crowd = JoinSet::<()>::new();
    gather(&mut crowd, &served, &seen, last);
    until(&seen.began, WATCHERS, "all have heard the first entry", &served).await;
    let watching = served.figure("weighbridge_api_watchers").await;
    assert_eq!(watching, WATCHERS as u64);
    let mut fetchers = JoinSet::new();
    for _ in 0..FETCHERS {
        let (served, seen, chunk) = (Arc::clone(&served), Arc::clone(&seen), chunk.clone());
        fetchers.spawn(async move {
            let mut fetched = 0;
            while !seen.done.load(Ordering::Relaxed) {
                assert_eq!(get(&served, &chunk, None, &[]).await.status, 200);
                fetched += 1;
            }
            fetched
        });
    }
    let began = Instant::now();
    for step in 2..=last {
        assert_eq!(move_channel(&store, &snapshot, step).await, step);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let moved = Instant::now();
    until(&seen.last, WATCHERS, "all have heard the last entry", &served).await;
    let late = moved.elapsed();
    seen.done.store(true, Ordering::Relaxed);
    let fetched: u64 = fetchers.join_all().await.into_iter().sum();
    let (peak, told) = (served.peak(), seen.told.load(Ordering::Relaxed));
    println!(
        "{told} entries told to {WATCHERS} watchers in {:?}, the last one {late:?} late; {fetched} fetches; {peak} MiB",
        began.elapsed()
    );
    assert_eq!(served.figure("weighbridge_api_watchers").await, WATCHERS as u64, "nobody was lost");
    assert!(peak < MEMORY, "{peak} MiB");
    let served = Arc::into_inner(served).unwrap();
    let took = served.stop();
    assert!(took < Duration::from_secs(20), "{took:?}");
    crowd.join_all().await;
}

/// All who follow: by gRPC on a few connections, by HTTP each on its own.
fn gather(crowd: &mut JoinSet<()>, served: &Arc<Served>, seen: &Arc<Seen>, last: u64) {
    for _ in 0..CONNECTIONS {
        let client = served.snapshots();
        for _ in 0..BY_RPC / CONNECTIONS {
            let (mut client, seen) = (client.clone(), Arc::clone(seen));
            crowd.spawn(async move {
                let request = proto::WatchChannelRequest { model: "m".into(), ..Default::default() };
                let mut stream = client.watch_channel(request).await.unwrap().into_inner();
                let mut before = 0;
                // The server's end is the end of it, and no error.
                while let Some(told) = stream.message().await.unwrap() {
                    if let Some(Event::Entry(entry)) = told.event {
                        seen.note(entry.sequence, before, last);
                        before = entry.sequence;
                    }
                }
                assert_eq!(before, last);
            });
        }
    }
    for _ in BY_RPC..WATCHERS {
        let (url, seen) = (served.at("/v1/models/m/channels/prod/watch"), Arc::clone(seen));
        crowd.spawn(async move {
            let mut lines = http().get(url).send().await.unwrap().bytes_stream();
            let (mut before, mut text) = (0, String::new());
            while let Some(bytes) = lines.next().await {
                text += std::str::from_utf8(&bytes.unwrap()).unwrap();
                while let Some((line, rest)) = text.split_once('\n') {
                    let line: serde_json::Value = serde_json::from_str(line).unwrap();
                    if let Some(sequence) = line["entry"]["sequence"].as_u64() {
                        seen.note(sequence, before, last);
                        before = sequence;
                    }
                    text = rest.to_owned();
                }
            }
            assert_eq!((before, text.as_str()), (last, ""));
        });
    }
}

async fn until(counter: &AtomicU64, most: usize, what: &str, served: &Served) {
    let began = Instant::now();
    while counter.load(Ordering::Relaxed) < most as u64 {
        let now = counter.load(Ordering::Relaxed);
        assert!(began.elapsed() < PATIENCE, "{what}: {now} of {most}\n{}", served.said());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
