//! An API in front of a bucket: what it asks of the bucket, and what those who ask it see when the bucket fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tonic::Code;
use weighbridge::api::proto;
use weighbridge_tests::buckets::{Asked, Fault, FaultyProxy, Kind, Server};
use weighbridge_tests::synthetic;

use super::served::{PATIENCE, Served, chunk_path, get, publish};
use crate::binary::{Store, ended, spawn, wait};
use crate::follower::Host;
use crate::numbered::{TABLES, WIDTH};
use crate::places::server;
use crate::site::http;

const HOSTS: usize = 20;

/// A store in a bucket, with a proxy between it and the API.
struct House {
    server: &'static Server,
    proxy: FaultyProxy,
    prefix: String,
    /// Past the proxy.
    direct: Store,
    /// By way of the proxy.
    fronted: Store,
}

impl House {
    /// `None` where there is no bucket here.
    fn new() -> Option<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        // It has a runtime of its own.
        let server = std::thread::spawn(|| server(Kind::SeaweedFs)).join().unwrap()?;
        let prefix = format!("fronted/{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let proxy = FaultyProxy::start(server, 7);
        let at = |port| Store::elsewhere(server.url(&prefix), server.environment(port));
        let (direct, fronted) = (at(None), at(Some(proxy.port())));
        Some(Self { server, proxy, prefix, direct, fronted })
    }

    /// The ids of the snapshot's chunks, each once.
    fn chunks(&self, snapshot: &str) -> Vec<String> {
        let bytes = self.server.get(&format!("{}/models/m/snapshots/{snapshot}", self.prefix)).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let files = manifest["files"].as_array().unwrap().iter();
        let chunks = files.flat_map(|file| file["chunks"].as_array().unwrap());
        let mut ids: Vec<_> = chunks.map(|chunk| chunk["id"].as_str().unwrap().to_owned()).collect();
        ids.sort();
        ids.dedup();
        ids
    }

    /// How often requests of this kind came since that was forgotten.
    fn asked(&self, is_so: impl Fn(&Asked) -> bool) -> usize {
        self.proxy.log().iter().filter(|entry| is_so(&entry.asked)).count()
    }
}

fn is_chunk(asked: &Asked) -> bool {
    asked.key.contains("/chunks/")
}

fn is_listing(asked: &Asked) -> bool {
    asked.query.contains("list-type")
}

#[tokio::test(flavor = "multi_thread")]
async fn many_hosts_read_the_bucket_once_and_watching_lists_nothing() {
    let Some(house) = House::new() else { return };
    let checkpoint = house.direct.folder.path().join("large.safetensors");
    synthetic(&checkpoint, 3, 40_000, 64);
    let policy = house.direct.policy("rule = []");
    let more = ["--policy", policy.to_str().unwrap(), "--step", "1"];
    let snapshot =
        house.direct.publish(&checkpoint, &more).succeeded()["snapshot"].as_str().unwrap().to_owned();
    let chunks = house.chunks(&snapshot);
    let served = Served::start(&house.fronted, "watch_milliseconds = 200\nrequests_per_second = 10000", &[]);
    // Those who watch, and one who follows, are there from the start.
    let mut watchers = Vec::new();
    for _ in 0..10 {
        let lines = http().get(served.at("/v1/models/m/channels/prod/watch")).send().await.unwrap();
        watchers.push(lines.bytes_stream());
    }
    for watcher in &mut watchers {
        assert!(String::from_utf8_lossy(&watcher.next().await.unwrap().unwrap()).contains(&snapshot));
    }
    house.proxy.forget();
    let began = Instant::now();
    let fetches: Vec<_> = (0..HOSTS)
        .map(|number| {
            let into = house.direct.folder.path().join(format!("host-{number}"));
            let mut fetch = house.direct.command(["fetch", "m", "--api", &served.url, "--no-sync"]);
            fetch.arg("--into").arg(into);
            spawn(fetch)
        })
        .collect();
    for fetch in fetches {
        assert_eq!(wait(fetch).succeeded()["snapshot"], snapshot);
    }
    let read = house.asked(is_chunk);
    let bytes = house.proxy.counts().read;
    println!("{HOSTS} hosts: {read} reads of {} chunks, {bytes} bytes, {:?}", chunks.len(), began.elapsed());
    assert!(read >= chunks.len() && read <= chunks.len() + chunks.len() / 4, "{read} of {}", chunks.len());
    for chunk in &chunks {
        assert!(house.asked(|asked| asked.key.ends_with(chunk.as_str())) <= 2, "{chunk}");
    }
    let manifests = house.asked(|asked| asked.is_get() && asked.key.ends_with(&snapshot));
    assert!((1..=2).contains(&manifests), "{manifests} reads of the manifest");
    // Watching goes on, and asks for the next entry alone: as often for ten as for one.
    house.proxy.forget();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let log = house.proxy.log();
    let next = format!("{}/models/m/channels/prod/", house.prefix);
    // The process looks after channels for its figures too, every half minute.
    let looks = log.iter().filter(|entry| entry.asked.is_get() && entry.asked.key.starts_with(&next)).count();
    println!("{looks} looks in 4 s: {log:?}");
    assert!((8..=60).contains(&looks), "{looks}");
    let listings = house.asked(|asked| is_listing(asked) && asked.query.contains("channels%2Fprod"));
    assert_eq!(listings, 0, "{log:?}");
    drop(watchers);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_bucket_is_away_hosts_are_told_and_then_all_goes_on() {
    let Some(house) = House::new() else { return };
    let first = publish(&house.direct, "m", 1);
    let served = Served::start(&house.fronted, "watch_milliseconds = 200", &[]);
    let mut host = Host::start(&house.direct, &["--api", &served.url]);
    host.until_current(&first);
    let lines = http().get(served.at("/v1/models/m/channels/prod/watch")).send().await.unwrap();
    let mut lines = lines.bytes_stream();
    let mut watching = served.snapshots();
    let request = proto::WatchChannelRequest { model: "m".into(), after: 1, ..Default::default() };
    let mut stream = watching.watch_channel(request).await.unwrap().into_inner();
    let away = house.proxy.always(Fault::DropBefore, |_| true);
    let began = Instant::now();
    let until =
        async |lines: &mut (dyn futures::Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin + Send),
               text: &str| {
            let (mut all, began) = (String::new(), Instant::now());
            while !all.contains(text) {
                assert!(began.elapsed() < PATIENCE, "{text}: {all}");
                all += &String::from_utf8_lossy(&lines.next().await.unwrap().unwrap());
            }
        };
    until(&mut lines, "\"stale\":").await;
    assert!(began.elapsed() < Duration::from_secs(16), "{:?}", began.elapsed());
    loop {
        let Some(proto::watch_channel_response::Event::Heartbeat(beat)) =
            stream.message().await.unwrap().unwrap().event
        else {
            panic!("nothing new can be known");
        };
        if !beat.stale.is_empty() {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    let status = host.until_behind("store_unreachable");
    assert_eq!(status["serving"]["snapshot"], first, "what is served is served on");
    // Whoever asks now is told to come again.
    let asked = get(&served, "/v1/models/m/resolve", None, &[]);
    let refused = tokio::time::timeout(Duration::from_secs(70), asked).await.unwrap();
    assert!([503, 504].contains(&refused.status), "{}", refused.status);
    assert!(refused.headers.contains_key("retry-after") || refused.status == 504);
    away.end();
    house.proxy.pass();
    let back = Instant::now();
    let second = publish(&house.direct, "m", 2);
    until(&mut lines, &second).await;
    println!("heard of it {:?} after the bucket came back", back.elapsed());
    host.until_current(&second);
    println!("served {:?} after the bucket came back", back.elapsed());
    assert!(back.elapsed() < PATIENCE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_is_missing_or_damaged_is_told_as_what_it_is() {
    let Some(house) = House::new() else { return };
    let first = publish(&house.direct, "m", 1);
    let served = Served::start(&house.fronted, "watch_milliseconds = 200", &[]);
    let mut host = Host::start(&house.direct, &["--api", &served.url]);
    host.until_current(&first);
    let flips = house.proxy.always(Fault::FlipByte(3), is_chunk);
    let second = publish(&house.direct, "m", 2);
    let old = house.chunks(&first);
    let chunks: Vec<_> = house.chunks(&second).into_iter().filter(|chunk| !old.contains(chunk)).collect();
    let mut client = served.snapshots();
    let range = |chunk: &String| proto::ChunkRange { chunk: chunk.clone(), offset: 0, length: 0 };
    let read = |chunks: Vec<proto::ChunkRange>| proto::ReadChunksRequest { model: "m".into(), chunks };
    let rows = |tensor: &str| proto::LookUpRowsRequest {
        model: "m".into(),
        tensor: tensor.into(),
        rows: vec![1, 2, 3],
        ..Default::default()
    };
    // Damaged: never handed out, whoever asks in whatever way.
    let mut stream = client.read_chunks(read(chunks.iter().map(range).collect())).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DataLoss);
    let looked_up = client.look_up_rows(rows(TABLES[0])).await.unwrap_err();
    assert_eq!(looked_up.code(), Code::DataLoss, "{looked_up:?}");
    let over_http = get(&served, &chunk_path("m", &chunks[0]), None, &[]).await;
    assert_eq!((over_http.status, over_http.class().as_str()), (500, "integrity"));
    assert_eq!(over_http.headers["cache-control"], "no-store");
    let status = host.until_behind("integrity");
    assert_eq!(status["serving"]["snapshot"], first);
    let mut fetch = house.direct.command(["fetch", "m", "--api", &served.url, "--into", "fetched"]);
    let began = Instant::now();
    let failed = ended(fetch.output().unwrap());
    assert_eq!(failed.failed(7), "integrity");
    assert!(began.elapsed() < Duration::from_secs(20), "it is not tried again and again");
    assert!(failed.stderr.contains("chunks/"), "{failed:?}");
    flips.end();
    host.until_current(&second);
    let found = client.look_up_rows(rows(TABLES[0])).await.unwrap().into_inner();
    assert_eq!(found.data.as_ref(), 2f32.to_le_bytes().repeat(3 * WIDTH));

    // Missing.
    let third = publish(&house.direct, "m", 3);
    host.until_current(&third);
    let missing: Vec<_> = house.chunks(&third).into_iter().filter(|chunk| !chunks.contains(chunk)).collect();
    for chunk in &missing {
        house.server.delete(&format!("{}/models/m/chunks/{}/{chunk}", house.prefix, &chunk[..2]));
    }
    // What was read is known for a while; a server that begins anew knows nothing.
    let anew = Served::start(&house.fronted, "", &[]);
    let mut client = anew.snapshots();
    let mut stream = client.read_chunks(read(vec![range(&missing[0])])).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap_err().code(), Code::NotFound);
    let codes = TABLES.map(|table| {
        let (mut client, request) = (client.clone(), rows(table));
        async move { client.look_up_rows(request).await.map(|_| ()).unwrap_err().code() }
    });
    for code in codes {
        assert_eq!(code.await, Code::DataLoss, "the manifest says that it is there");
    }
    assert_eq!(get(&anew, &chunk_path("m", &missing[0]), None, &[]).await.status, 404);
    let mut fetch = house.direct.command(["fetch", "m", "--api", &anew.url, "--into", "again"]);
    assert_eq!(ended(fetch.output().unwrap()).failed(7), "integrity");
}
