//! How much a caller may ask, and how large; and that others do not notice when somebody asks too much.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use futures::future::join_all;
use tonic::{Code, Request};
use tonic_types::StatusExt;
use weighbridge::api::proto;

use super::served::{Served, answer, get, publish, token};
use crate::binary::Store;
use crate::site::{by, http};

const RESOLVE: &str = "/v1/models/m/resolve";

fn resolve() -> proto::ResolveRequest {
    proto::ResolveRequest { model: "m".into(), at: String::new() }
}

fn watch() -> proto::WatchChannelRequest {
    proto::WatchChannelRequest { model: "m".into(), ..proto::WatchChannelRequest::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_too_often_waits_or_is_told_when_to_come_again() {
    let store = Store::new();
    publish(&store, "m", 1);
    let (busy, calm) =
        (token(&store, "busy", &["fetch"], "", &[]), token(&store, "calm", &["fetch"], "", &[]));
    let served = Served::start(&store, "requests_per_second = 3", &["--tokens", "tokens.toml"]);
    let began = Instant::now();
    let rpc = (0..40).map(|_| {
        let (mut client, request) = (served.snapshots(), by(&busy, resolve()));
        async move { client.resolve(request).await }
    });
    let plain = (0..40).map(|_| get(&served, RESOLVE, Some(&busy), &[]));
    let others = async {
        for _ in 0..3 {
            let asked = Instant::now();
            assert_eq!(get(&served, RESOLVE, Some(&calm), &[]).await.status, 200);
            assert!(asked.elapsed() < Duration::from_secs(2), "others are not affected");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let (rpc, plain, ()) = tokio::join!(join_all(rpc), join_all(plain), others);
    let answered = rpc.iter().filter(|answer| answer.is_ok()).count()
        + plain.iter().filter(|answer| answer.status == 200).count();
    // Three at once, and those whose turn comes within ten seconds.
    assert!((30..=36).contains(&answered), "{answered}");
    assert!(began.elapsed() > Duration::from_secs(8), "{:?}", began.elapsed());
    for status in rpc.into_iter().filter_map(Result::err) {
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        let again = status.get_error_details().retry_info().unwrap().retry_delay.unwrap();
        assert!(again >= Duration::from_secs(9) && again < Duration::from_secs(30), "{again:?}");
    }
    for refused in plain.iter().filter(|answer| answer.status != 200) {
        assert_eq!((refused.status, refused.class().as_str()), (429, "over_limit"));
        assert!(refused.headers["retry-after"].parse::<u64>().unwrap() >= 9);
    }
    assert_eq!(get(&served, RESOLVE, Some(&busy), &[]).await.status, 200, "and then all is well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_has_so_many_streams_and_others_have_theirs() {
    let store = Store::new();
    publish(&store, "m", 1);
    let (busy, calm) =
        (token(&store, "busy", &["fetch"], "", &[]), token(&store, "calm", &["fetch"], "", &[]));
    let served = Served::start(&store, "requests_at_once = 3", &["--tokens", "tokens.toml"]);
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(served.snapshots().watch_channel(by(&busy, watch())).await.unwrap().into_inner());
    }
    let lines = http().get(served.at("/v1/models/m/channels/prod/watch"));
    let lines = lines.header("authorization", format!("Bearer {busy}")).send().await.unwrap();
    let full = served.snapshots().resolve(by(&busy, resolve())).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted);
    assert!(full.get_error_details().retry_info().is_some());
    let full = get(&served, RESOLVE, Some(&busy), &[]).await;
    assert_eq!((full.status, full.headers["retry-after"].as_str()), (429, "1"));
    assert_eq!(get(&served, RESOLVE, Some(&calm), &[]).await.status, 200);
    // A stream that is dropped gives its place back, whichever way it goes.
    drop(lines);
    until_answered(&served, &busy).await;
    let again = served.snapshots().watch_channel(by(&busy, watch())).await.unwrap().into_inner();
    assert_eq!(get(&served, RESOLVE, Some(&busy), &[]).await.status, 429);
    streams.pop();
    until_answered(&served, &busy).await;
    drop((streams, again));
    served.until_figure("weighbridge_api_watchers", |watchers| watchers == 0).await;
}

async fn until_answered(served: &Served, token: &str) {
    let began = Instant::now();
    while get(served, RESOLVE, Some(token), &[]).await.status != 200 {
        assert!(began.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_guesses_tokens_is_held_up_and_who_has_one_is_not() {
    let store = Store::new();
    publish(&store, "m", 1);
    let good = token(&store, "host", &["fetch"], "", &[]);
    let served = Served::start(&store, "", &["--tokens", "tokens.toml"]);
    let guess = (0..60).map(|number| {
        let served = &served;
        async move { get(served, RESOLVE, Some(&format!("wb_{number}")), &[]).await }
    });
    let (guesses, own) = tokio::join!(join_all(guess), get(&served, RESOLVE, Some(&good), &[]));
    assert_eq!(own.status, 200);
    let told = |status| guesses.iter().filter(|answer| answer.status == status).count();
    assert!(told(401) >= 20 && told(429) > 10 && told(401) + told(429) == 60, "{} {}", told(401), told(429));
    assert_eq!(get(&served, RESOLVE, Some(&good), &[]).await.status, 200);
    let guess = served.snapshots().resolve(by("wb_x", resolve())).await.unwrap_err();
    assert!([Code::ResourceExhausted, Code::Unauthenticated].contains(&guess.code()));
}

/// Sends bytes, and gives what comes back until the server ends the connection.
fn sent(served: &Served, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(served.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may hang up before it has heard everything.
    let _ = stream.write_all(bytes);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_is_refused_and_the_next_is_answered() {
    let store = Store::new();
    publish(&store, "m", 1);
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    // A message, and headers.
    let large = proto::ResolveRequest { model: "m".into(), at: "x".repeat(3 << 20) };
    let refused = client.resolve(large).await.unwrap_err();
    assert!([Code::OutOfRange, Code::ResourceExhausted].contains(&refused.code()), "{refused:?}");
    for size in [20 << 10, 200 << 10] {
        let mut request = Request::new(resolve());
        request.metadata_mut().insert("x-large", "x".repeat(size).parse().unwrap());
        let refused = client.resolve(request).await.unwrap_err();
        assert_ne!(refused.code(), Code::Ok, "{refused:?}");
    }
    // The connection over which that came may be ended; another is not.
    served.snapshots().resolve(resolve()).await.unwrap();
    let head =
        format!("GET {RESOLVE} HTTP/1.1\r\nhost: localhost\r\nx-large: {}\r\n\r\n", "x".repeat(100 << 10));
    assert!(sent(&served, head.as_bytes()).starts_with("HTTP/1.1 431 "));
    let many = "x: y\r\n".repeat(1000);
    let head = format!("GET {RESOLVE} HTTP/1.1\r\nhost: localhost\r\n{many}\r\n");
    assert!(sent(&served, head.as_bytes()).starts_with("HTTP/1.1 431 "));
    let target = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x".repeat(100 << 10));
    assert!(sent(&served, target.as_bytes()).starts_with("HTTP/1.1 4"));
    // A body.
    let post = http().post(served.at("/v1/fleet/hosts")).body(vec![b' '; 100 << 10]).send().await.unwrap();
    assert_eq!(post.status(), 413);
    let error: serde_json::Value = serde_json::from_slice(&post.bytes().await.unwrap()).unwrap();
    assert_eq!(error["error"]["class"], "bad_request");
    assert_eq!(get(&served, RESOLVE, None, &[]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_said_in_the_same_words_everywhere() {
    use reqwest::Method;
    let store = Store::new();
    publish(&store, "m", 1);
    let served = Served::start(&store, "", &[]);
    for (method, path, status) in [
        (Method::GET, "/", 404),
        (Method::GET, "/v1/nothing", 404),
        (Method::GET, "/live/../v1", 404),
        (Method::POST, RESOLVE, 405),
        (Method::DELETE, "/v1/objects/models/m/snapshots/x", 405),
        (Method::GET, "/v1/models/m/channels/prod/watch?after=x", 400),
        (Method::GET, "/v1/models/%ff/resolve", 400),
        (Method::GET, "/v1/models/..%2fx/resolve", 400),
        (Method::GET, "/v1/models/m/resolve?at=a%2fb", 400),
        (Method::GET, "/v1/objects/models/m/../../etc/passwd", 404),
        (Method::GET, "/v1/objects/models/m/reports/x", 404),
        (Method::GET, "/v1/objects/models/m/chunks", 404),
        (Method::GET, "/v1/objects/%00", 404),
        // What is gRPC's is no page.
        (Method::GET, "/weighbridge.v1.Snapshots/Resolve", 404),
        (Method::POST, "/weighbridge.v1.Snapshots/WatchChannel", 404),
    ] {
        let answer = answer(&served, method.clone(), path, None, &[]).await;
        assert_eq!(answer.status, status, "{method} {path}: {}", String::from_utf8_lossy(&answer.body));
        let error = &answer.json()["error"];
        assert!(error["class"].is_string() && error["kind"].is_string(), "{path}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty(), "{path}: {error}");
        assert_eq!(answer.headers["cache-control"], "no-store", "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_callers_deadline_holds_for_answers_and_for_streams() {
    let store = Store::new();
    publish(&store, "m", 1);
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    // By hand: a client that is told of a deadline ends it by itself.
    let within = |deadline: &'static str| {
        let mut request = Request::new(watch());
        request.metadata_mut().insert("grpc-timeout", deadline.parse().unwrap());
        request
    };
    let began = Instant::now();
    let mut stream = client.watch_channel(within("1500m")).await.unwrap().into_inner();
    let end = loop {
        if let Err(status) = stream.message().await {
            break status;
        }
    };
    assert_eq!(end.code(), Code::DeadlineExceeded);
    assert!(began.elapsed() > Duration::from_millis(1400) && began.elapsed() < Duration::from_secs(5));
    let mut late = Request::new(resolve());
    late.metadata_mut().insert("grpc-timeout", "1n".parse().unwrap());
    // Whoever of the two sees it first.
    let late = client.resolve(late).await.unwrap_err();
    assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&late.code()), "{late:?}");
    for no_bound in ["99999999H", "x", "1", ""] {
        let mut request = Request::new(resolve());
        request.metadata_mut().insert("grpc-timeout", no_bound.parse().unwrap());
        client.resolve(request).await.unwrap();
    }
    served.until_figure("weighbridge_api_watchers", |watchers| watchers == 0).await;
}
