//! Bytes that mean nothing, sent to the real port: each is refused or hung up on, and then the right is answered right.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use futures::future::join_all;

use super::served::{Served, get, publish};
use crate::binary::Store;

/// Sends bytes and hears what comes back for a moment; a server that goes on waiting is left.
fn send(served: &Served, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(served.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    // The server may hang up before it has heard everything.
    let _ = stream.write_all(bytes);
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        text.extend_from_slice(&buffer[..read]);
        if text.len() > 1 << 20 {
            break;
        }
    }
    text
}

/// A request of gRPC over HTTP/2, as bytes: a preface, settings, headers without compression, and one frame of data.
fn rpc(path: &str, kind: &str, data: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", kind),
        ("te", "trailers"),
    ] {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend(text.as_bytes());
        }
    }
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    bytes.extend(frame(1, 4, 1, &block));
    bytes.extend(frame(0, 1, 1, data));
    bytes
}

/// A message of gRPC: not compressed, its length, its bytes.
fn message(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap().to_be_bytes();
    [&[0], &length[..], bytes].concat()
}

/// The first is right; all others are wrong in some way.
fn inputs() -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(11);
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    let good = b"\x0a\x01m\x12\x04prod";
    for method in weighbridge::api::METHODS {
        let path = format!("/{method}");
        let grpc = "application/grpc";
        inputs.push(rpc(&path, grpc, &message(good)));
        // Truncated, of a length that is not so, compressed by what is not known, empty, and of chance.
        inputs.push(rpc(&path, grpc, &message(good)[..7]));
        inputs.push(rpc(&path, grpc, &[0, 0xff, 0xff, 0xff, 0xff, 1, 2]));
        inputs.push(rpc(&path, grpc, &[1, 0, 0, 0, 3, 1, 2, 3]));
        inputs.push(rpc(&path, grpc, b""));
        inputs.push(rpc(&path, grpc, &message(&good[..4])));
        let noise: Vec<u8> = (0..random.usize(1..200)).map(|_| random.u8(..)).collect();
        inputs.push(rpc(&path, grpc, &message(&noise)));
        inputs.push(rpc(&path, "application/json", b"{}"));
        inputs.push(rpc(&path, "application/grpc-web", &message(good)));
    }
    inputs.push(rpc("/weighbridge.v1.Snapshots/Nothing", "application/grpc", &message(good)));
    inputs.push(rpc("*", "application/grpc", &message(good)));
    let seed = rpc("/weighbridge.v1.Snapshots/Resolve", "application/grpc", &message(good));
    for _ in 0..150 {
        // The preface stays, so that frames are read at all.
        let mut changed = seed.clone();
        for _ in 0..random.usize(1..6) {
            let at = random.usize(24..changed.len());
            changed[at] = random.u8(..);
        }
        changed.truncate(random.usize(24..=changed.len()));
        inputs.push(changed);
    }
    for length in [1, 10, 100, 5000] {
        inputs.push((0..length).map(|_| random.u8(..)).collect());
    }
    for text in [
        "GET / HTTP/9.9\r\n\r\n",
        "GET\r\n\r\n",
        "\r\n\r\n\r\n",
        "GET /v1/models/m/resolve HTTP/1.1\r\n\r\n",
        "GET /v1/models/m/resolve HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        "POST /v1/fleet/hosts HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n\
         0\r\n\r\n",
        "POST /v1/fleet/hosts HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/fleet/hosts HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        "GET /v1/objects/\u{0} HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET http://example.org/ HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    ] {
        inputs.push(text.as_bytes().to_vec());
    }
    inputs
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_mean_nothing_harm_nobody() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let served = Served::start(&store, "", &[]);
    let inputs = inputs();
    println!("{} inputs", inputs.len());
    let answers = std::thread::scope(|scope| {
        let halves: Vec<_> = inputs
            .chunks(inputs.len().div_ceil(16))
            .map(|inputs| {
                let served = &served;
                scope.spawn(move || inputs.iter().map(|input| send(served, input)).collect::<Vec<_>>())
            })
            .collect();
        halves.into_iter().flat_map(|half| half.join().unwrap()).collect::<Vec<_>>()
    });
    // What is right by hand is answered, so that the rest was wrong for what it is.
    assert!(String::from_utf8_lossy(&answers[0]).contains(&snapshot));
    for answer in &answers {
        assert!(!String::from_utf8_lossy(answer).contains("panicked"));
    }
    let right = join_all((0..20).map(|_| get(&served, "/v1/models/m/resolve", None, &[]))).await;
    assert!(right.iter().all(|answer| answer.status == 200 && answer.json()["snapshot"] == snapshot));
    let request = weighbridge::api::proto::ResolveRequest { model: "m".into(), at: String::new() };
    assert_eq!(served.snapshots().resolve(request).await.unwrap().into_inner().snapshot, snapshot);
    served.until_figure("weighbridge_api_begun", |begun| begun == 0).await;
    assert!(served.stop() < Duration::from_secs(25));
}
