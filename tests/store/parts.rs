//! Objects that go up in parts: all of it is there, or nothing; and what was given up leaves nothing behind.

use std::time::Duration;

use serde_json::{Value, json};
use weighbridge_tests::buckets::{Answer, Asked, Fault, FaultyProxy, Kind, Server};

use crate::again::Again;
use crate::places::server;

const LENGTH: usize = 40 << 20;

fn start(server: &Server, prefix: &str, port: u16) -> Again {
    Again::start(&server.url(prefix), &server.environment(Some(port)), Duration::from_secs(20))
}

fn order(key: &str) -> Value {
    json!({ "do": "put", "key": key, "bytes": LENGTH })
}

fn is_part(asked: &Asked, number: u32) -> bool {
    asked.is_put() && asked.query.split('&').any(|field| field == format!("partNumber={number}"))
}

/// B72: who fails gives up its own upload.
#[test]
fn a_large_object_is_there_as_a_whole_or_not_at_all() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let mut process = start(server, "parts", proxy.port());
    assert_eq!(process.ask(&order("whole")), json!("put"));
    assert!(server.get("parts/whole").is_some_and(|bytes| bytes == vec![7; LENGTH]));
    assert_eq!(server.unfinished_uploads("parts"), 0);
    let completes = |asked: &Asked| asked.method == "POST" && asked.query.contains("uploadId");
    for number in [1, 2, 3] {
        proxy.always(Fault::Answer(Answer::access_denied()), move |asked: &Asked| is_part(asked, number));
        let told = process.ask(&order("denied"));
        assert!(told["error"].as_str().unwrap().contains("does not allow it"), "{told}");
        assert_eq!((server.get("parts/denied"), server.unfinished_uploads("parts")), (None, 0));
        proxy.pass();
    }
    proxy.always(Fault::Answer(Answer::access_denied()), completes);
    assert!(process.ask(&order("denied"))["error"].is_string());
    assert_eq!((server.get("parts/denied"), server.unfinished_uploads("parts")), (None, 0));
    proxy.pass();
    assert_eq!(process.ask(&order("denied")), json!("put"));
}

#[test]
fn who_is_killed_within_an_upload_leaves_no_object_and_the_next_one_does_it() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let held = proxy.times(1, Fault::Delay(Duration::from_secs(600)), |asked: &Asked| is_part(asked, 2));
    let mut process = start(server, "killed", proxy.port());
    process.order(&order("object"));
    while held.fired() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(process);
    assert_eq!((server.get("killed/object"), server.unfinished_uploads("killed")), (None, 1));
    assert_eq!(start(server, "killed", proxy.port()).ask(&order("object")), json!("put"));
    assert!(server.get("killed/object").is_some_and(|bytes| bytes.len() == LENGTH));
    assert_eq!(server.unfinished_uploads("killed"), 1, "the live one was not the dead one");
}
