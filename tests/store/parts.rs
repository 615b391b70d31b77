//! Uploads in parts, which others began below a store's prefix: they are seen and ended, and nobody else's are. Of our
//! own there are none: an object goes in one request, and is there as a whole or not at all.

use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use serde_json::{Value, json};
use weighbridge_tests::buckets::{Asked, At, Fault, FaultyProxy, Kind, Server};

use crate::again::Again;
use crate::places::server;

const LENGTH: usize = 40 << 20;

fn start(server: &Server, prefix: &str, port: u16) -> Again {
    Again::start(&server.url(prefix), &server.environment(Some(port)), Duration::from_secs(20))
}

fn order(key: &str) -> Value {
    json!({ "do": "put", "key": key, "bytes": LENGTH })
}

#[test]
fn a_large_object_is_there_as_a_whole_or_not_at_all() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let is_put = |asked: &Asked| asked.is_put();
    let held = proxy.times(1, Fault::Delay(Duration::from_secs(600)), is_put);
    let mut process = start(server, "whole", proxy.port());
    process.order(&order("object"));
    while held.fired() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(process);
    assert_eq!((server.get("whole/object"), server.unfinished_uploads("whole")), (None, 0));
    let cut = proxy.times(1, Fault::CutRequest(At::Byte(1 << 20)), is_put);
    assert_eq!(start(server, "whole", proxy.port()).ask(&order("object")), json!("put"));
    assert_eq!(cut.fired(), 1, "it was sent again");
    assert!(server.get("whole/object").is_some_and(|bytes| bytes == vec![7; LENGTH]));
    assert_eq!(server.unfinished_uploads("whole"), 0);
}

/// B72: what others left unfinished is ended, below the store's own prefix alone.
#[test]
fn uploads_that_others_left_below_the_prefix_are_ended() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let store = server.client(None, 5);
    runtime.block_on(async {
        for key in ["left/models/m/a", "left/models/m/b", "beside/models/m/a"] {
            let mut upload = store.put_multipart(&Key::from(key)).await.unwrap();
            upload.put_part(PutPayload::from(vec![1; 5 << 20])).await.unwrap();
        }
    });
    assert_eq!((server.unfinished_uploads("left"), server.unfinished_uploads("beside")), (2, 1));
    assert_eq!(start(server, "left", server.port()).ask(&json!({ "do": "abandon" })), json!(2));
    assert_eq!((server.unfinished_uploads("left"), server.unfinished_uploads("beside")), (0, 1));
}
