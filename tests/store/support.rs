//! The support itself: each server does what it is there for, and each fault of the proxy happens as it is told.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{
    Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, PutResult,
};
use weighbridge_tests::buckets::{
    Answer, Asked, At, Chances, Fault, FaultyProxy, KEY, Kind, READER_KEY, READER_SECRET, Server,
};

/// A client by way of the proxy, and what it takes to ask it.
struct Client {
    store: Arc<dyn ObjectStore>,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    fn new(server: &Server, port: Option<u16>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { store: server.client(port, 0), runtime }
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, Error> {
        self.runtime.block_on(async { Ok(self.store.get(&Key::from(key)).await?.bytes().await?.to_vec()) })
    }

    fn range(&self, key: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>, Error> {
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let key = Key::from(key);
        let get = self.store.get_opts(&key, options);
        self.runtime.block_on(async { Ok(get.await?.bytes().await?.to_vec()) })
    }

    fn put(&self, key: &str, bytes: &'static [u8]) -> Result<PutResult, Error> {
        self.runtime.block_on(self.store.put(&Key::from(key), bytes.into()))
    }

    fn create(&self, key: &str, bytes: impl Into<PutPayload>) -> Result<PutResult, Error> {
        let options = PutOptions::from(PutMode::Create);
        self.runtime.block_on(self.store.put_opts(&Key::from(key), bytes.into(), options))
    }

    fn keys(&self) -> Result<usize, Error> {
        self.runtime.block_on(self.store.list(None).try_collect::<Vec<_>>()).map(|keys| keys.len())
    }
}

#[test]
fn each_server_starts_empty_and_the_first_who_creates_wins() {
    for kind in Kind::ALL {
        let Some(server) = Server::start(kind) else { continue };
        assert!(server.list("").is_empty(), "{kind:?}");
        server.put("a/b c+d%", "one");
        server.put("ab", vec![7; 3 << 20]);
        assert_eq!(server.list(""), ["a/b c+d%25", "ab"], "{kind:?}: object_store escapes a percent sign");
        assert_eq!(server.list("a"), ["a/b c+d%25"], "{kind:?}");
        assert_eq!(server.get("ab"), Some(vec![7; 3 << 20]), "{kind:?}");
        server.delete("ab");
        server.delete("ab");
        assert_eq!(server.get("ab"), None, "{kind:?}");
        let client = Client::new(&server, None);
        client.create("new", "mine").unwrap();
        let second = client.create("new", "theirs");
        assert!(matches!(second, Err(Error::AlreadyExists { .. })), "{kind:?}: {second:?}");
        assert_eq!(server.get("new").unwrap(), b"mine", "{kind:?}");
        let race = (0..4).map(|number| {
            let (store, options) = (Arc::clone(&client.store), PutOptions::from(PutMode::Create));
            async move { store.put_opts(&Key::from("race"), vec![number; 5].into(), options).await }
        });
        let won = client.runtime.block_on(futures::future::join_all(race));
        assert_eq!(won.iter().filter(|put| put.is_ok()).count(), 1, "{kind:?}: {won:?}");
        assert!(server.url("x").ends_with("://checkpoints/x"), "{kind:?}");
    }
}

#[test]
fn a_server_can_be_used_where_a_runtime_runs() {
    let Some(server) = Server::start(Kind::Moto) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async move {
        server.put("a", "b");
        let got = server.client(None, 3).get(&Key::from("a")).await.unwrap();
        assert_eq!(got.bytes().await.unwrap(), "b");
    });
}

#[test]
fn who_may_only_read_cannot_write() {
    let Some(server) = Server::start(Kind::SeaweedFs) else { return };
    server.put("a", "b");
    let reader = |secret: &str| {
        let mut variables = server.environment(None);
        variables.insert("AWS_ACCESS_KEY_ID".into(), READER_KEY.into());
        variables.insert("AWS_SECRET_ACCESS_KEY".into(), secret.into());
        let retry = object_store::RetryConfig { max_retries: 0, ..Default::default() };
        let builder =
            object_store::aws::AmazonS3Builder::new().with_bucket_name("checkpoints").with_retry(retry);
        let builder = variables.iter().fold(builder, |builder, (name, value)| {
            builder.with_config(name.to_lowercase().parse().unwrap(), value)
        });
        let mut client = Client::new(&server, None);
        client.store = Arc::new(builder.build().unwrap());
        client
    };
    let allowed = reader(READER_SECRET);
    assert_eq!(allowed.get("a").unwrap(), b"b");
    assert_eq!(allowed.keys().unwrap(), 1);
    assert!(matches!(allowed.put("c", b"d"), Err(Error::PermissionDenied { .. })));
    assert!(matches!(reader("wrong").get("a"), Err(Error::PermissionDenied { .. })));
    assert_eq!(server.list(""), ["a"]);
    let mut command = std::process::Command::new("true");
    server.lend_to_reader(&mut command, Some(1));
    let variables: Vec<_> = command.get_envs().map(|(name, value)| (name, value.unwrap())).collect();
    assert!(variables.contains(&("AWS_ENDPOINT_URL".as_ref(), "http://127.0.0.1:1".as_ref())));
    assert!(!variables.iter().any(|(_, value)| *value == KEY), "{variables:?}");
}

#[test]
fn a_proxy_without_orders_passes_everything_and_counts() {
    for kind in Kind::ALL {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = FaultyProxy::start(&server, 1);
        let client = Client::new(&server, Some(proxy.port()));
        client.put("a b", b"0123456789").unwrap();
        assert_eq!(client.get("a b").unwrap(), b"0123456789", "{kind:?}");
        let head = client.runtime.block_on(client.store.head(&Key::from("a b"))).unwrap();
        assert_eq!(head.size, 10, "{kind:?}");
        assert_eq!(client.range("a b", 2..5).unwrap(), b"234", "{kind:?}");
        assert!(matches!(client.get("absent"), Err(Error::NotFound { .. })), "{kind:?}");
        assert_eq!(client.keys().unwrap(), 1, "{kind:?}");
        client.create("new", "mine").unwrap();
        assert!(matches!(client.create("new", "mine"), Err(Error::AlreadyExists { .. })), "{kind:?}");
        let counts = proxy.counts();
        assert_eq!((counts.requests["GET"], counts.requests["PUT"], counts.faults), (4, 3, 0), "{kind:?}");
        assert_eq!(counts.written, 18, "{kind:?}");
        assert!(counts.read >= 13, "{kind:?}: {counts:?}");
        let log = proxy.log();
        assert!(log[0].asked.is_put() && log[0].asked.key == "a b", "{log:?}");
        assert_eq!(log[4].status, Some(404), "{log:?}");
        assert!(log[5].asked.query.contains("list") && log[5].asked.key.is_empty(), "{log:?}");
        assert!(log[7].asked.if_none_match && matches!(log[7].status, Some(409 | 412)), "{log:?}");
        proxy.forget();
        assert!(proxy.log().is_empty() && proxy.counts().requests.is_empty());

        proxy.always(Fault::IgnoreIfNoneMatch, Asked::is_put);
        client.create("new", "theirs").unwrap();
        assert_eq!(server.get("new").unwrap(), b"theirs", "{kind:?}: two creators win");
    }
}

#[test]
fn answers_are_damaged_as_told() {
    let Some(server) = crate::places::server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let client = Client::new(server, Some(proxy.port()));
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
    server.put("a", bytes.clone());
    server.put("b", "another object");
    let damaged = |fault: Fault| {
        let rule = proxy.times(1, fault, |asked| asked.is_get() && asked.key == "a");
        let got = client.get("a");
        assert_eq!(rule.fired(), 1);
        got
    };
    let flipped = damaged(Fault::FlipByte(700_001)).unwrap();
    let different: Vec<_> = (0..bytes.len()).filter(|&at| flipped[at] != bytes[at]).collect();
    assert_eq!((flipped.len(), different), (bytes.len(), vec![700_001]));
    let wrong = damaged(Fault::WrongBytes).unwrap();
    assert!(wrong.len() == bytes.len() && (0..bytes.len()).all(|at| wrong[at] != bytes[at]));
    assert_eq!(damaged(Fault::Truncate(1000)).unwrap(), bytes[..1000]);
    assert_eq!(damaged(Fault::BodyOf("b".into())).unwrap(), b"another object");
    proxy.forget();
    assert!(damaged(Fault::CutAnswer(At::Byte(600_000))).is_err());
    assert_eq!(proxy.counts().read, 600_000);
    assert_eq!(client.get("a").unwrap(), bytes, "it passes again");

    let until = Instant::now();
    proxy.times(3, Fault::Throttle(Duration::from_millis(50)), Asked::is_get);
    for _ in 0..3 {
        client.range("a", 0..1).unwrap();
    }
    assert!(until.elapsed() >= Duration::from_millis(100), "three requests have two pauses between them");
}

#[test]
fn requests_are_refused_cut_and_lost_as_told() {
    let Some(server) = Server::start(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(&server, 1);
    let client = Client::new(&server, Some(proxy.port()));
    server.put("a", "here");
    let put = |fault: Fault| {
        proxy.times(1, fault, Asked::is_put);
        let put = client.create("new", vec![1; 300_000]);
        (put, server.get("new").map(|bytes| bytes.len()))
    };
    let said = |fault: Fault, word: &str| {
        let (put, stored) = put(fault);
        let error = format!("{:?}", put.unwrap_err());
        assert!(error.contains(word) && stored.is_none(), "{error}");
    };
    said(Fault::Answer(Answer::slow_down()), "SlowDown");
    said(Fault::Answer(Answer::internal_error()), "InternalError");
    said(Fault::Answer(Answer::expired_token()), "ExpiredToken");
    said(Fault::Answer(Answer::access_denied()), "PermissionDenied");
    said(Fault::Answer(Answer::conflict()), "AlreadyExists");
    said(Fault::Answer(Answer::precondition_failed()), "AlreadyExists");
    said(Fault::DropBefore, "");
    said(Fault::CutRequest(At::Byte(100_000)), "");
    assert_eq!(client.get("a").unwrap(), b"here", "only puts were refused");
    let (lost, stored) = put(Fault::DropAfter);
    assert!(lost.is_err() && stored == Some(300_000), "it is done, but nobody was told: {lost:?}");
}

/// What a plain client sees of an answer: its status, its headers and its text.
async fn asked(proxy: &FaultyProxy) -> (u16, reqwest::header::HeaderMap, String) {
    let url = format!("http://127.0.0.1:{}/checkpoints/a", proxy.port());
    let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let answer = client.get(url).send().await.unwrap();
    (answer.status().as_u16(), answer.headers().clone(), answer.text().await.unwrap())
}

#[test]
fn other_regions_wrong_clocks_and_pauses_are_told_in_headers() {
    let Some(server) = Server::start(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(&server, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rule = proxy.always(Fault::Answer(Answer::other_region("eu-west-1")), Asked::is_get);
    let (status, headers, text) = runtime.block_on(asked(&proxy));
    assert_eq!((status, headers["x-amz-bucket-region"].to_str().unwrap()), (301, "eu-west-1"));
    assert!(text.contains("<Code>PermanentRedirect</Code>") && !headers.contains_key("location"), "{text}");
    rule.end();

    let busy = Chances { slow_down: 1.0, retry_after: Some(3), ..Chances::default() };
    proxy.by_chance(busy);
    let (status, headers, text) = runtime.block_on(asked(&proxy));
    assert_eq!((status, headers["retry-after"].to_str().unwrap()), (503, "3"), "{text}");

    proxy.always(Fault::Answer(Answer::time_too_skewed()), Asked::is_get);
    proxy.always(Fault::ShiftDate(-7200), Asked::is_get);
    let (status, headers, text) = runtime.block_on(asked(&proxy));
    assert!(status == 403 && text.contains("<Code>RequestTimeTooSkewed</Code>"), "{text}");
    let date = jiff::fmt::rfc2822::parse(headers["date"].to_str().unwrap()).unwrap().timestamp();
    let off = jiff::Timestamp::now().duration_since(date).as_secs();
    assert!((7000..7400).contains(&off), "{off}");
}

#[test]
fn faults_by_chance_happen_and_much_passes_even_so() {
    let Some(server) = Server::start(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(&server, 5);
    let client = Client::new(&server, Some(proxy.port()));
    server.put("a", vec![1; 10_000]);
    proxy.by_chance(Chances {
        cut_answer: 0.1,
        cut_request: 0.1,
        drop_before: 0.05,
        drop_after: 0.05,
        internal_error: 0.05,
        slow_down: 0.05,
        conflict: 0.1,
        precondition_failed: 0.1,
        delay: 0.5,
        longest_delay: Duration::from_millis(2),
        ..Chances::default()
    });
    let good = (0..100).filter(|_| client.get("a").is_ok_and(|bytes| bytes == [1; 10_000])).count();
    let made = (0..100).filter(|number| client.create(&format!("k{number}"), vec![2; 1000]).is_ok()).count();
    assert!((10..100).contains(&good) && (10..100).contains(&made), "{good}, {made}");
    assert!(server.list("").len() > made, "some were stored, and nobody was told");
    assert!(server.list("").iter().all(|key| matches!(server.get(key).unwrap().len(), 1000 | 10_000)));
    proxy.pass();
    assert_eq!(client.get("a").unwrap().len(), 10_000);
}

#[test]
fn large_bodies_pass_in_both_directions() {
    let Some(server) = crate::places::server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    for (way, port) in [("direct", server.port()), ("proxy", proxy.port())] {
        let client = Client::new(server, Some(port));
        let started = Instant::now();
        client.runtime.block_on(client.store.put(&Key::from("large"), vec![3; 200 << 20].into())).unwrap();
        let put = started.elapsed();
        assert_eq!(client.get("large").unwrap().len(), 200 << 20);
        println!("{way}: put {put:?}, got {:?}", started.elapsed() - put);
    }
    assert_eq!((proxy.counts().read, proxy.counts().written), (200 << 20, 200 << 20));
}
