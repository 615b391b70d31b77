//! Those who read slowly or not at all, who say nothing or half of something, and connections that grow old.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weighbridge::api::proto;
use weighbridge::api::proto::watch_channel_response::Event;
use weighbridge_tests::certificates::Certificates;
use weighbridge_tests::synthetic;

use super::served::{PATIENCE, Served, chunk_path, chunks, get, move_channel, publish, token};
use crate::binary::{Store, ended};
use crate::follower::Host;

/// The most memory that a server may take here, in MiB.
const MEMORY: u64 = 160;

/// Publishes tables of so many MiB together, as they are, for model `m`; the snapshot's id and chunks.
fn publish_large(store: &Store, mebibytes: usize) -> (String, Vec<(String, u64)>) {
    let checkpoint = store.folder.path().join("large.safetensors");
    synthetic(&checkpoint, 2, mebibytes << 11, 64);
    let policy = store.policy("rule = []");
    let more = ["--policy", policy.to_str().unwrap(), "--step", "1", "--no-sync"];
    let snapshot = store.publish(&checkpoint, &more).succeeded()["snapshot"].as_str().unwrap().to_owned();
    std::fs::remove_file(checkpoint).unwrap();
    let chunks = chunks(store, "m", &snapshot);
    (snapshot, chunks)
}

fn ranges(chunks: &[(String, u64)]) -> proto::ReadChunksRequest {
    let range = |(chunk, _): &(String, u64)| proto::ChunkRange { chunk: chunk.clone(), offset: 0, length: 0 };
    proto::ReadChunksRequest { model: "m".into(), chunks: chunks.iter().map(range).collect() }
}

/// Asks for something over plain HTTP, and never looks at the answer.
fn ask_and_never_read(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_never_read_cost_little_and_hold_up_nobody() {
    let store = Store::new();
    let (snapshot, chunks) = publish_large(&store, 64);
    let largest = chunks.iter().max_by_key(|(_, size)| *size).unwrap();
    assert!(largest.1 > 7 << 20, "{chunks:?}");
    let served = Served::start(&store, "", &[]);
    let (mut stuck, mut first) = (Vec::new(), 0);
    for _ in 0..4 {
        let mut client = served.snapshots();
        for number in 0..24 {
            let mut stream = client.read_chunks(ranges(&chunks)).await.unwrap().into_inner();
            // Whoever reads nothing holds up their own connection. The first comes before that.
            if number == 0 {
                first = stream.message().await.unwrap().unwrap().data.len() as u64;
            }
            stuck.push((client.clone(), stream));
        }
    }
    let path = chunk_path("m", &largest.0);
    let unread: Vec<_> = (0..96).map(|_| ask_and_never_read(served.address, &path)).collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let began = Instant::now();
    for round in 0..3 {
        let mut fetch = store.fetch_command("m");
        fetch.args(["--api", &served.url, "--no-sync"]);
        let fetched = ended(fetch.output().unwrap()).succeeded();
        assert_eq!(
            (&fetched["snapshot"], fetched["bytes"].as_u64() > Some(64 << 20)),
            (&snapshot.as_str().into(), true)
        );
        std::fs::remove_dir_all(store.served()).unwrap();
        println!("fetch {round}: {:?}", began.elapsed());
    }
    assert!(began.elapsed() < PATIENCE);
    let peak = served.peak();
    println!("{} streams that nobody reads: {peak} MiB", stuck.len() + unread.len());
    assert!(peak < MEMORY, "{peak} MiB");
    // Those who go on reading get what they asked for.
    let (client, mut stream) = stuck.swap_remove(0);
    drop((stuck, client));
    let mut bytes = first;
    while let Some(piece) = stream.message().await.unwrap() {
        bytes += piece.data.len() as u64;
    }
    assert_eq!(bytes, chunks.iter().map(|(_, size)| size).sum::<u64>());
    drop((unread, stream));
    served.until_figure("weighbridge_api_connections", |connections| connections <= 1).await;
    assert!(served.stop() < Duration::from_secs(25));
}

/// How long the server keeps a connection over which `first` is said, and `then` twice a second.
fn kept(address: SocketAddr, first: &'static [u8], then: &'static [u8]) -> JoinHandle<Duration> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    std::thread::spawn(move || {
        let began = Instant::now();
        let _ = stream.write_all(first);
        let mut buffer = [0; 4096];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return began.elapsed(),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return began.elapsed(),
            }
            if !then.is_empty() && stream.write_all(then).is_err() {
                return began.elapsed();
            }
            assert!(began.elapsed() < PATIENCE, "{:?}", String::from_utf8_lossy(first));
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_say_nothing_or_half_of_something_make_room_for_others() {
    let (store, folder) = (Store::new(), tempfile::tempdir().unwrap());
    publish(&store, "m", 1);
    let host = token(&store, "host", &["fetch"], "", &[]);
    let certificates = Certificates::make(folder.path(), "host");
    let (certificate, key) =
        (certificates.server.to_str().unwrap(), certificates.server_key.to_str().unwrap());
    let tls = ["--tokens", "tokens.toml", "--tls-certificate", certificate, "--tls-key", key];
    let plain = Served::start(&store, "connections = 7", &["--tokens", "tokens.toml"]);
    let secure = Served::start(&store, "connections = 4", &tls);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    let asks = b"GET /v1/models/m/resolve HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wb_x\r\n\r\n";
    let silent = [
        kept(plain.address, b"", b""),
        kept(plain.address, b"G", b""),
        kept(plain.address, b"GET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n"),
        kept(
            plain.address,
            b"POST /v1/fleet/hosts HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n",
            b" ",
        ),
        kept(plain.address, b"PRI * HTTP/2.0\r\n\r\nSM", b""),
        kept(plain.address, preface, b""),
        // Whoever has no right to ask does not stay by asking.
        kept(plain.address, asks, asks),
        kept(plain.address, b"PRI * HTTP/2.0\r\n", b""),
        kept(secure.address, b"", b""),
        kept(secure.address, b"\x16\x03\x01\x02\x00\x01", b""),
        kept(secure.address, b"\x16\x03\x01\x40\x00\x01", b"\x00"),
        kept(secure.address, b"GET / HTTP/1.1\r\n\r\n", b""),
    ];
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    // It has to wait until somebody is sent away.
    let asked = get(&plain, "/v1/models/m/resolve", Some(&host), &[]).await;
    assert_eq!(asked.status, 200);
    println!("answered after {:?}", began.elapsed());
    for (number, silent) in silent.into_iter().enumerate() {
        let kept = silent.join().unwrap();
        println!("{number}: {kept:?}");
        assert!(kept < Duration::from_secs(40), "{number}: {kept:?}");
    }
    assert!(plain.peak() < MEMORY && secure.peak() < MEMORY);
}

/// Connections are old after two seconds: whoever watches comes again, a fetch goes on, and who never reads is gone.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_grow_old_end_and_nothing_is_lost() {
    let store = Store::new();
    let (snapshot, chunks) = publish_large(&store, 8);
    let served = Served::start(&store, "connection_seconds = 2\nwatch_milliseconds = 100", &[]);
    let path = chunk_path("m", &chunks.iter().max_by_key(|(_, size)| *size).unwrap().0);
    let unread = ask_and_never_read(served.address, &path);
    let mut client = served.snapshots();
    let stuck = client.read_chunks(ranges(&chunks)).await.unwrap().into_inner();
    // It takes longer than a connection is kept and what was begun on it may take.
    let mut fetch = store.fetch_command("m");
    fetch.args(["--api", &served.url, "--no-sync", "--bandwidth", "300KiB", "--streams", "1"]);
    let fetching = std::thread::spawn(move || ended(fetch.output().unwrap()));
    let mut host = Host::start_into(&store, &store.folder.path().join("host"), &["--api", &served.url]);
    host.until_current(&snapshot);

    let (mut seen, mut ends, mut after) = (Vec::new(), 0, 0);
    let mut moved = 1;
    let mut watching = served.snapshots();
    while ends < 8 {
        let request = proto::WatchChannelRequest { model: "m".into(), channel: "prod".into(), after };
        let Ok(stream) = watching.watch_channel(request).await else { continue };
        let mut stream = stream.into_inner();
        // It ends without an error.
        while let Some(told) = stream.message().await.unwrap() {
            if let Some(Event::Entry(entry)) = told.event {
                after = entry.sequence;
                seen.push(entry.sequence);
                moved = move_channel(&store, &snapshot, moved + 1).await;
            }
        }
        ends += 1;
    }
    assert!(seen.is_sorted() && seen.len() > 8, "{seen:?}");
    let began = Instant::now();
    host.until("it heard the last entry", |status| status["wanted"]["sequence"].as_u64() >= Some(after));
    println!(
        "{} entries over {ends} connections; the host heard the last after {:?}",
        seen.len(),
        began.elapsed()
    );
    let fetched = fetching.join().unwrap();
    assert_eq!(fetched.json()["snapshot"], snapshot, "{fetched:?}");
    // Those who never read hold a connection each no longer; what is left are the host's and the watcher's.
    assert_eq!(host.terminate(), Some(0));
    drop(watching);
    served.until_figure("weighbridge_api_connections", |connections| connections == 0).await;
    drop((unread, stuck));
}
