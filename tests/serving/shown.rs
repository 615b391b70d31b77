//! What a follower shows: over HTTP, to systemd, and of signatures that it misses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;

use crate::binary::Store;
use crate::follower::{Checkpoint, Host, PATIENCE, serves};

fn scene() -> (Store, Checkpoint) {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let checkpoint = Checkpoint::new(&store, &[4096]);
    (store, checkpoint)
}

/// The status and the body of an answer.
fn get(host: &Host, path: &str) -> (u16, String) {
    let said = host.said();
    let address = said.lines().find_map(|line| line.strip_prefix("listening on ")).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn it_is_ready_when_it_serves_something_and_its_figures_follow() {
    let (store, mut checkpoint) = scene();
    let mut host = Host::start(&store, &["--listen", "127.0.0.1:0", "--host-name", "serving-1"]);
    let status = host.until("it waits", |status| status["heard_at"].is_string());
    assert_eq!(status["host"], "serving-1");
    assert_eq!(get(&host, "/live"), (200, "alive\n".to_owned()));
    let (code, why) = get(&host, "/ready");
    assert_eq!((code, why.lines().count()), (503, 1), "{why}");
    for _ in 0..2 {
        checkpoint.change(..);
        let published = checkpoint.publish(&store);
        host.until_current(&published);
    }
    host.until_held(2);
    assert_eq!(get(&host, "/ready"), (200, "ready\n".to_owned()));
    let (_, metrics) = get(&host, "/metrics");
    for line in [
        "weighbridge_ready 1".to_owned(),
        "weighbridge_host_serving_step{model=\"m\",channel=\"prod\"} 2".to_owned(),
        "weighbridge_host_wanted_sequence{model=\"m\",channel=\"prod\"} 2".to_owned(),
        "weighbridge_host_swaps_total{model=\"m\",channel=\"prod\"} 2".to_owned(),
        "weighbridge_host_behind{model=\"m\",channel=\"prod\"} 0".to_owned(),
    ] {
        assert!(metrics.lines().any(|shown| shown == line), "{line} is not in\n{metrics}");
    }
}

#[test]
fn systemd_is_told_when_something_is_served_and_when_it_stops() {
    let (store, mut checkpoint) = scene();
    let path = store.folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let told = |wanted: &str| {
        let mut buffer = [0; 4096];
        loop {
            let size = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}"));
            if str::from_utf8(&buffer[..size]).unwrap().lines().any(|line| line == wanted) {
                return;
            }
        }
    };
    let mut command = Host::command(&store, &store.served(), &[]);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000");
    let mut host = Host::spawn(command, &store.served());
    told("WATCHDOG=1");
    checkpoint.publish(&store);
    told("READY=1");
    assert_eq!(host.terminate(), Some(0));
    told("STOPPING=1");
}

#[test]
fn an_entry_that_is_not_signed_as_demanded_is_not_followed_until_one_is() {
    let (store, mut checkpoint) = scene();
    let keys = store.run(["keys", "generate", "key"]);
    assert_eq!(keys.code, 0, "{keys:?}");
    let first = checkpoint.publish_with(&store, &["--signing-key", "key"]);
    let mut host = Host::start(&store, &["--require-signed-by", "key.pub"]);
    host.until_current(&first);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    let status = host.until_behind("integrity");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("not signed"), "{status}");
    assert_eq!(serves(&host.into), Some(first));
    // The way out that it names: whoever has the key says so.
    store.run(["sign", &format!("m@{second}"), "--signing-key", "key"]).succeeded();
    store.run(["promote", &format!("m@{second}"), "--signing-key", "key"]).succeeded();
    host.until_current(&second);
    // A host that demands another key does not take what was fetched under this one.
    assert_eq!(host.terminate(), Some(0));
    store.run(["keys", "generate", "other"]);
    let mut host = Host::start(&store, &["--require-signed-by", "other.pub"]);
    let status = host.until_behind("integrity");
    assert!(status["wanted"].is_null(), "{status}");
}
