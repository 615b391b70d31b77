//! Hosts tell how they stand, and operators look at all of them.

use serde_json::{Value, json};
use tonic::Code;

use weighbridge::api::proto::{ListHostsRequest, ReportRequest};

use crate::binary::ended;
use crate::site::{Site, by, field, http, refused};

/// The status of a host that follows `prod` of a model, and serves entry number `serving`.
fn status(host: &str, model: &str, serving: u64) -> Value {
    let target = |sequence: u64| {
        json!({
            "snapshot": "ab".repeat(32), "sequence": sequence, "run": "r", "step": 10 * sequence,
            "created_at": "2026-11-29T12:00:00Z", "when": "2026-11-29T12:00:00Z",
        })
    };
    json!({
        "schema": "weighbridge.host/v1", "host": host, "folder": "/srv/m", "model": model, "channel": "prod",
        "state": "current", "wanted": target(3), "serving": target(serving), "age_seconds": 100,
        "updated_at": "2026-11-29T12:01:40Z",
    })
}

fn report(status: &Value) -> ReportRequest {
    ReportRequest { status: status.to_string().into_bytes().into() }
}

#[tokio::test]
async fn hosts_are_seen_by_who_operates_their_model() {
    let site = Site::start("api");
    let mut client = site.fleet();
    client.report(by(&site.fetch, report(&status("b", "m", 2)))).await.unwrap();
    client.report(by(&site.other, report(&status("c", "other", 3)))).await.unwrap();
    let plain = http();
    let url = format!("{}/v1/fleet/hosts", site.url);
    let post = |token: &str, body: String| plain.post(&url).bearer_auth(token).body(body).send();
    let answer = post(&site.fetch, status("a", "m", 3).to_string()).await.unwrap();
    assert_eq!(answer.status(), 204);
    // The newest word of a host counts.
    client.report(by(&site.fetch, report(&status("b", "m", 1)))).await.unwrap();

    let list = async |token: &str, change: fn(&mut ListHostsRequest)| {
        let mut request = ListHostsRequest::default();
        change(&mut request);
        let answer = site.fleet().list_hosts(by(token, request)).await.unwrap().into_inner();
        let names: Vec<_> = answer.hosts.iter().map(|host| host.host.clone()).collect();
        (names, answer)
    };
    let (names, answer) = list(&site.operate, |_| {}).await;
    assert_eq!(names, ["a", "b"]);
    let host = &answer.hosts[1];
    assert_eq!((host.serving_sequence, host.wanted_sequence, host.age_seconds), (1, 3, Some(100)));
    assert_eq!((host.state.as_str(), host.serving.len()), ("current", 64));
    assert_eq!(serde_json::from_slice::<Value>(&host.status).unwrap(), status("b", "m", 1));
    assert_eq!(list(&site.all, |_| {}).await.0, ["a", "b", "c"]);
    assert_eq!(list(&site.all, |request| request.model = "other".into()).await.0, ["c"]);
    assert!(list(&site.all, |request| request.channel = "canary".into()).await.0.is_empty());
    let (names, answer) = list(&site.all, |request| request.page_size = 2).await;
    assert_eq!(names, ["a", "b"]);
    let rest = ListHostsRequest { page_token: answer.next_page_token, ..Default::default() };
    let rest = client.list_hosts(by(&site.all, rest)).await.unwrap().into_inner();
    assert_eq!((rest.hosts[0].host.as_str(), rest.next_page_token.as_str()), ("c", ""));

    let listed =
        plain.get(format!("{url}?model=m&page_size=1")).bearer_auth(&site.operate).send().await.unwrap();
    assert_eq!(listed.headers()["cache-control"], "no-store");
    let listed: Value = serde_json::from_slice(&listed.bytes().await.unwrap()).unwrap();
    assert_eq!(listed["hosts"][0]["status"]["host"], "a");
    assert!(listed["next_page_token"].is_string() && listed["hosts"][0]["silent_seconds"].is_u64());
}

#[tokio::test]
async fn who_may_not_and_what_is_no_status_is_refused() {
    let site = Site::start("api");
    let mut client = site.fleet();
    let mine = status("a", "m", 1);
    for token in [&site.drop, &site.operate, &site.other] {
        refused(client.report(by(token, report(&mine))).await, Code::PermissionDenied);
    }
    for token in [&site.drop, &site.fetch] {
        refused(client.list_hosts(by(token, ListHostsRequest::default())).await, Code::PermissionDenied);
    }
    let of_m = ListHostsRequest { model: "m".into(), ..Default::default() };
    refused(client.list_hosts(by(&site.other, of_m)).await, Code::PermissionDenied);
    let mut forged = mine.clone();
    forged["host"] = json!("a\u{1b}[2J");
    let mut large = mine.clone();
    large["last_error"] = json!({ "kind": "transient", "class": "x", "message": "x".repeat(40 << 10) });
    for wrong in [json!({}), json!([]), forged, large] {
        let status = client.report(by(&site.all, report(&wrong))).await.unwrap_err();
        assert_eq!((status.code(), field(&status)), (Code::InvalidArgument, "status".to_owned()));
    }
    let bad = ListHostsRequest { page_token: "x".into(), ..Default::default() };
    let status = client.list_hosts(by(&site.all, bad)).await.unwrap_err();
    assert_eq!((status.code(), field(&status)), (Code::InvalidArgument, "page_token".to_owned()));

    let plain = http();
    let url = format!("{}/v1/fleet/hosts", site.url);
    let post = async |token: &str, body: String| {
        plain.post(&url).bearer_auth(token).body(body).send().await.unwrap().status().as_u16()
    };
    assert_eq!(post(&site.operate, mine.to_string()).await, 403);
    assert_eq!(post("wb_nobody", mine.to_string()).await, 401);
    assert_eq!(post(&site.fetch, "{}".into()).await, 400);
    assert_eq!(post(&site.fetch, " ".repeat(100 << 10)).await, 413);
    let get = async |query: &str| {
        let answer = plain.get(format!("{url}{query}")).bearer_auth(&site.all).send().await.unwrap();
        let code = answer.status().as_u16();
        (code, serde_json::from_slice::<Value>(&answer.bytes().await.unwrap()).unwrap())
    };
    let (code, answer) = get("?page_size=x").await;
    assert_eq!((code, &answer["error"]["class"]), (400, &json!("bad_request")));
    assert_eq!(get("?page_size=1001").await.0, 400);
    assert_eq!(get("").await, (200, json!({ "hosts": [] })));
}

#[tokio::test]
async fn a_token_does_not_go_to_a_proxy_by_plain_http() {
    let site = Site::start("api");
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    proxy.set_nonblocking(true).unwrap();
    let address = format!("http://{}", proxy.local_addr().unwrap());
    let mut command = site.store.command(["fleet"]);
    command.env("WEIGHBRIDGE_API", &site.url).env("WEIGHBRIDGE_API_TOKEN", &site.operate);
    for variable in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env(variable, &address);
    }
    command.env_remove("no_proxy").env_remove("NO_PROXY");
    assert_eq!(ended(command.output().unwrap()).succeeded()["hosts"], json!([]));
    assert_eq!(proxy.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[tokio::test]
async fn a_fleet_is_listed_for_people_and_for_monitors() {
    let site = Site::start("api");
    for (host, serving) in [("a", 3), ("b", 1)] {
        site.fleet().report(by(&site.fetch, report(&status(host, "m", serving)))).await.unwrap();
    }
    let run = |arguments: &[&str], token: &str| {
        let mut command = site.store.command([&["fleet"], arguments].concat());
        command.env("WEIGHBRIDGE_API", &site.url).env("WEIGHBRIDGE_API_TOKEN", token);
        ended(command.output().unwrap())
    };
    let listed = run(&[], &site.operate).succeeded();
    let hosts: Vec<_> = listed["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|host| (host["host"].clone(), host["behind"].clone(), host["state"].clone()))
        .collect();
    assert_eq!(hosts, [(json!("a"), json!(0), json!("current")), (json!("b"), json!(2), json!("current"))]);
    assert_eq!(run(&["m@canary"], &site.operate).succeeded()["hosts"], json!([]));
    run(&["m@prod", "--stale-seconds", "100000"], &site.operate).succeeded();
    assert_eq!(run(&["--stale-seconds", "50"], &site.operate).failed(1), "stale");
    assert_eq!(run(&[], &site.drop).failed(5), "store_access_denied");
    let mut unnamed = site.store.command(["fleet"]);
    assert_eq!(ended(unnamed.env_remove("WEIGHBRIDGE_API").output().unwrap()).failed(2), "usage");
}
