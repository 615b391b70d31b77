//! Who may ask for what: on every method and path, for what exists and what does not, while tokens come and go.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};
use weighbridge::api::proto;
use weighbridge::api::proto::snapshots_client::SnapshotsClient;
use weighbridge::api::proto::watch_channel_response::Event;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};

use super::served::{Served, chunks, get, move_channel, publish, token};
use crate::binary::Store;
use crate::numbered::TABLES;
use crate::site::{by, http};

/// How soon a token that was taken out is refused, and its streams have ended.
const SECONDS: Duration = Duration::from_secs(10);

/// Methods that whoever moves channels may call too.
const OPERATORS_SEE: [&str; 4] = ["ListChannels", "ListModels", "ListSnapshots", "Resolve"];

/// What is asked for: it may be there or not.
struct Wanted {
    model: &'static str,
    snapshot: String,
    chunk: String,
}

/// The code, and all else that is told.
type Told = (String, String);

fn told<T>(answer: Result<T, Status>) -> Told {
    match answer {
        Ok(_) => ("Ok".to_owned(), String::new()),
        Err(status) => {
            let details = String::from_utf8_lossy(status.details()).into_owned();
            (format!("{:?}", status.code()), format!("{} {details}", status.message()))
        }
    }
}

/// What every method and path tells the bearer of `token`, who asks from `address`.
async fn ask(
    served: &Served,
    address: &str,
    token: Option<&str>,
    wanted: &Wanted,
) -> BTreeMap<&'static str, Told> {
    let address: IpAddr = address.parse().unwrap();
    let endpoint = Endpoint::from_shared(served.url.clone()).unwrap().local_address(Some(address));
    let mut client = SnapshotsClient::new(endpoint.connect_lazy());
    let mut all = BTreeMap::new();
    let model = wanted.model.to_owned();
    macro_rules! rpc {
        ($name:literal, $method:ident, $message:expr) => {
            let message = $message;
            let request =
                token.map_or_else(|| Request::new(message.clone()), |token| by(token, message.clone()));
            all.insert($name, told(client.$method(request).await));
        };
    }
    rpc!("Resolve", resolve, proto::ResolveRequest { model: model.clone(), at: String::new() });
    rpc!(
        "GetManifest",
        get_manifest,
        proto::GetManifestRequest { model: model.clone(), snapshot: wanted.snapshot.clone() }
    );
    rpc!("ListModels", list_models, proto::ListModelsRequest::default());
    rpc!(
        "ListSnapshots",
        list_snapshots,
        proto::ListSnapshotsRequest { model: model.clone(), ..proto::ListSnapshotsRequest::default() }
    );
    rpc!(
        "ListChannels",
        list_channels,
        proto::ListChannelsRequest { model: model.clone(), ..proto::ListChannelsRequest::default() }
    );
    rpc!(
        "WatchChannel",
        watch_channel,
        proto::WatchChannelRequest { model: model.clone(), ..proto::WatchChannelRequest::default() }
    );
    let range = proto::ChunkRange { chunk: wanted.chunk.clone(), offset: 0, length: 0 };
    rpc!("ReadChunks", read_chunks, proto::ReadChunksRequest { model: model.clone(), chunks: vec![range] });
    rpc!(
        "LookUpRows",
        look_up_rows,
        proto::LookUpRowsRequest {
            model: model.clone(),
            tensor: TABLES[0].to_owned(),
            rows: vec![0],
            ..proto::LookUpRowsRequest::default()
        }
    );
    ask_by_http(served, address, token, wanted, &mut all).await;
    all
}

async fn ask_by_http(
    served: &Served,
    address: IpAddr,
    token: Option<&str>,
    Wanted { model, snapshot, chunk }: &Wanted,
    all: &mut BTreeMap<&'static str, Told>,
) {
    let paths = [
        ("manifest", format!("/v1/objects/models/{model}/snapshots/{snapshot}")),
        ("signatures", format!("/v1/objects/models/{model}/snapshots/{snapshot}.signatures")),
        ("chunk", super::served::chunk_path(model, chunk)),
        ("entry", format!("/v1/objects/models/{model}/channels/prod/{:012}", 1)),
        ("resolve", format!("/v1/models/{model}/resolve?at={snapshot}")),
        ("watch", format!("/v1/models/{model}/channels/prod/watch?after=7")),
    ];
    let client = reqwest::Client::builder().local_address(address).build().unwrap();
    for (name, path) in paths {
        let mut request = client.get(served.at(&path));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = request.send().await.unwrap();
        let status = answer.status();
        // A stream has no end.
        let body = if status.is_success() { String::new() } else { answer.text().await.unwrap() };
        all.insert(name, (status.as_u16().to_string(), body));
    }
}

/// The same, but for the model's name.
fn nameless(all: BTreeMap<&'static str, Told>, model: &str) -> BTreeMap<&'static str, Told> {
    all.into_iter().map(|(name, (code, text))| (name, (code, text.replace(model, "MODEL")))).collect()
}

fn codes<'a>(all: &'a BTreeMap<&'static str, Told>) -> BTreeMap<&'static str, &'a str> {
    all.iter().map(|(name, (code, _))| (*name, code.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_learns_anything_without_the_right_to() {
    let _ = http();
    let store = Store::new();
    let snapshot = publish(&store, "real", 1);
    let chunk = chunks(&store, "real", &snapshot)[0].0.clone();
    let real = Wanted { model: "real", snapshot, chunk };
    let none = Wanted {
        model: "none",
        snapshot: SnapshotId::of(b"none").to_string(),
        chunk: ChunkId::of(b"none").to_string(),
    };
    let good = token(&store, "host", &["fetch"], "real", &[]);
    let expired = token(&store, "old", &["fetch"], "", &["--expires", "2100-01-01T00:00:00Z"]);
    let tokens = store.folder.path().join("tokens.toml");
    let text = std::fs::read_to_string(&tokens).unwrap();
    std::fs::write(&tokens, text.replace("2100-01-01", "2020-01-01")).unwrap();
    let revoked = token(&store, "gone", &["fetch", "operate", "drop"], "", &[]);
    store.run(["token", "revoke", "gone", "--file", "tokens.toml"]).succeeded();
    let trainer = token(&store, "trainer", &["drop"], "", &[]);
    let operator = token(&store, "operator", &["operate"], "", &[]);
    let other = token(&store, "other", &["fetch", "operate", "drop"], "other-*", &[]);
    let served = Served::start(&store, "", &["--tokens", "tokens.toml"]);

    let allowed = ask(&served, "127.0.0.1", Some(&good), &real).await;
    for (name, code) in codes(&allowed) {
        let wanted: &[&str] = if name == "signatures" { &["404"] } else { &["Ok", "200"] };
        assert!(wanted.contains(&code), "{name}: {:?}", allowed[name]);
    }
    // One letter more or less is another token.
    let (longer, shorter) = (format!("{good}A"), good[..good.len() - 1].to_owned());
    let unknown = [None, Some("wb_"), Some(&expired), Some(&revoked), Some(&longer), Some(&shorter)];
    let mut first = None;
    for (number, bad) in unknown.iter().enumerate() {
        for (wanted, net) in [(&real, 1), (&none, 2)] {
            // Those that come from one address too often are told to wait.
            let all = ask(&served, &format!("127.0.{net}.{}", number + 2), *bad, wanted).await;
            assert!(codes(&all).values().all(|code| ["Unauthenticated", "401"].contains(code)), "{all:?}");
            assert_eq!(*first.get_or_insert_with(|| all.clone()), all, "{bad:?}");
        }
    }
    for (token, exceptions) in
        [(&trainer, &[][..]), (&operator, &OPERATORS_SEE[..]), (&other, &["ListModels"])]
    {
        let [of_real, of_none] = [&real, &none].map(|wanted| async {
            nameless(ask(&served, "127.0.0.1", Some(token), wanted).await, wanted.model)
        });
        let (mut of_real, mut of_none) = (of_real.await, of_none.await);
        for (name, code) in codes(&of_real) {
            let is_right = exceptions.contains(&name) != ["PermissionDenied", "403"].contains(&code);
            assert!(is_right, "{name}: {:?}", of_real[name]);
        }
        for seen in exceptions {
            of_real.remove(seen);
            of_none.remove(seen);
        }
        assert_eq!(of_real, of_none, "whether something is there does not show");
    }
    let models = served.snapshots().list_models(by(&other, proto::ListModelsRequest::default())).await;
    assert!(models.unwrap().into_inner().models.is_empty());
    let models = served.snapshots().list_models(by(&good, proto::ListModelsRequest::default())).await;
    assert_eq!(models.unwrap().into_inner().models, ["real"]);
}

/// Waits until the bearer is let in, or is not any more.
async fn until(served: &Served, token: &str, status: u16) {
    let began = Instant::now();
    loop {
        let found = get(served, "/v1/models/m/resolve", Some(token), &[]).await.status;
        if found == status {
            return;
        }
        assert!(began.elapsed() < SECONDS, "{found} in place of {status}: {}", served.said());
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_come_and_go_while_it_runs_and_streams_end_with_them() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let first = token(&store, "first", &["fetch"], "", &[]);
    let served = Served::start(&store, "watch_milliseconds = 100", &["--tokens", "tokens.toml"]);
    let second = token(&store, "second", &["fetch"], "m*", &[]);
    until(&served, &second, 200).await;

    let watched = proto::WatchChannelRequest { model: "m".into(), ..proto::WatchChannelRequest::default() };
    let mut client = served.snapshots();
    let mut kept = client.watch_channel(by(&first, watched.clone())).await.unwrap().into_inner();
    let mut ended = client.watch_channel(by(&second, watched.clone())).await.unwrap().into_inner();
    let lines = http().get(served.at("/v1/models/m/channels/prod/watch"));
    let lines = lines.header("authorization", format!("Bearer {second}")).send().await.unwrap();
    assert_eq!(lines.status(), 200);
    for stream in [&mut kept, &mut ended] {
        let told = stream.message().await.unwrap().unwrap();
        assert!(matches!(told.event, Some(Event::Entry(entry)) if entry.snapshot == snapshot));
    }
    store.run(["token", "revoke", "second", "--file", "tokens.toml"]).succeeded();
    until(&served, &second, 401).await;
    // The channel goes on moving: what comes now is not theirs any more.
    let began = Instant::now();
    let moving = async {
        for step in 2.. {
            move_channel(&store, &snapshot, step).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let ending = async {
        let (mut entries, mut status) = (0, None);
        while status.is_none() {
            match ended.message().await {
                Ok(told) => entries += i32::from(matches!(told.unwrap().event, Some(Event::Entry(_)))),
                Err(error) => status = Some(error),
            }
        }
        assert_eq!((status.unwrap().code(), entries), (Code::Unauthenticated, 0));
        let mut lines = lines.bytes_stream();
        let mut text = String::new();
        while let Some(Ok(bytes)) = lines.next().await {
            text += &String::from_utf8_lossy(&bytes);
        }
        assert_eq!(text.matches("{\"entry\"").count(), 1, "{text}");
    };
    tokio::select! {
        () = moving => {}
        ended = tokio::time::timeout(SECONDS, ending) => ended.unwrap(),
    }
    assert!(began.elapsed() < SECONDS);
    let told = kept.message().await.unwrap().unwrap();
    assert!(matches!(told.event, Some(Event::Entry(entry)) if entry.sequence > 1), "the other one goes on");
    narrowed(&store, &served, &first, kept).await;
}

/// What is no file of tokens changes nothing; and a token that is for fewer models now ends its streams of the others.
async fn narrowed(
    store: &Store,
    served: &Served,
    first: &str,
    mut kept: tonic::Streaming<proto::WatchChannelResponse>,
) {
    let path = store.folder.path().join("tokens.toml");
    let good = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, "[[token]]\nname = 'half").unwrap();
    served.until_said("tokens cannot be read again");
    until(served, first, 200).await;
    // Fewer models: the stream of the one that is not among them ends too.
    std::fs::write(&path, good.replace("roles = ", "models = [\"x\"]\nroles = ")).unwrap();
    until(served, first, 403).await;
    let end = async {
        loop {
            if let Err(status) = kept.message().await {
                return status.code();
            }
        }
    };
    assert_eq!(tokio::time::timeout(SECONDS, end).await.unwrap(), Code::Unauthenticated);
}

#[test]
fn without_tokens_and_tls_other_machines_are_not_answered() {
    let store = Store::new();
    token(&store, "host", &["fetch"], "", &[]);
    for (more, way_out) in [
        (&[][..], "weighbridge token new"),
        (&["--plain-http"], "weighbridge token new"),
        (&["--tokens", "tokens.toml"], "--plain-http"),
        (&["--tokens", "absent.toml", "--plain-http"], "absent.toml"),
        (&["--tls-certificate", "x"], "--tls-key"),
        (&["--client-ca", "x"], "--tls-certificate"),
    ] {
        for address in ["0.0.0.0:0", "[::]:0"] {
            let mut command = Served::command_at(&store, "", address);
            let run = Served::run({
                command.args(more);
                command
            });
            let run = run.map(|served| served.said()).unwrap_err();
            assert!(run.code == 2 && run.stderr.contains(way_out), "{more:?}: {run:?}");
        }
    }
    let mut command = Served::command_at(&store, "", "0.0.0.0:0");
    command.args(["--tokens", "tokens.toml", "--plain-http"]);
    Served::run(command).unwrap_or_else(|run| panic!("{run:?}"));
    // A file that everybody may write lets everybody in.
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(store.folder.path().join("tokens.toml"), open).unwrap();
    let run = Served::run(Served::command(&store, "", &["--tokens", "tokens.toml"]));
    let run = run.map(|served| served.said()).unwrap_err();
    assert!(run.code == 2 && run.stderr.contains("chmod o-w"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_the_web_are_not_answered() {
    let store = Store::new();
    publish(&store, "m", 1);
    let host = token(&store, "host", &["fetch"], "", &[]);
    let open = Served::start(&store, "", &[]);
    let closed = Served::start(&store, "", &["--tokens", "tokens.toml"]);
    for (served, token) in [(&open, None), (&closed, Some(host.as_str()))] {
        for path in ["/v1/models/m/resolve", "/v1/models/m/channels/prod/watch", "/v1/fleet/hosts", "/"] {
            let origin = get(served, path, token, &[("origin", "https://example.org")]).await;
            assert_eq!((origin.status, origin.class().as_str()), (403, "forbidden"), "{path}");
            assert!(!origin.headers.contains_key("access-control-allow-origin"));
        }
        let asked = super::served::answer(
            served,
            reqwest::Method::OPTIONS,
            "/v1/models/m/resolve",
            token,
            &[("origin", "https://example.org")],
        );
        assert_eq!(asked.await.status, 403);
    }
    // A page whose own name was made to mean this machine sends no origin, but its name.
    for (host, status) in [("example.org", 403), ("localhost", 200), ("127.0.0.1:1", 200)] {
        let named = get(&open, "/v1/models/m/resolve", None, &[("host", host)]).await;
        assert_eq!(named.status, status, "{host}");
    }
    let with_token = get(&closed, "/v1/models/m/resolve", Some(&host), &[("host", "example.org")]).await;
    assert_eq!(with_token.status, 200, "who has a token may call the server by any name");
}

/// Whatever stands between may keep what is answered with 200: a refusal never is, however it is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn no_refusal_can_be_taken_for_a_file() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let (chunk, _) = chunks(&store, "m", &snapshot).swap_remove(0);
    token(&store, "hosts", &["fetch"], "m", &[]);
    let tokens = store.folder.path().join("tokens.toml");
    let served = Served::start(&store, "", &["--tokens", tokens.to_str().unwrap()]);
    let object = super::served::chunk_path("m", &chunk);
    for path in [object.as_str(), "/v1/nothing", "/weighbridge.v1.Snapshots/Resolve"] {
        for kind in ["application/grpc", "application/grpc+proto", "text/plain"] {
            for more in
                [("accept", "*/*"), ("origin", "https://example.org"), ("authorization", "Bearer wb_x")]
            {
                let answer = get(&served, path, None, &[("content-type", kind), more]).await;
                let kept = answer.headers.get("cache-control").map(String::as_str);
                assert!(
                    answer.status >= 400 && kept == Some("no-store"),
                    "{path} {kind} {more:?} {}",
                    answer.status
                );
            }
        }
    }
}
