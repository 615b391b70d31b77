//! TLS and mutual TLS, and certificates that are replaced while the server runs.

use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;
use weighbridge_tests::certificates::Certificates;

use super::served::{Served, move_channel, publish, secret_file, token};
use crate::binary::Store;
use crate::follower::Host;
use crate::site::http;

/// How soon a certificate that was replaced is used.
const SECONDS: Duration = Duration::from_secs(20);

/// A client that trusts `authority`, and shows this certificate.
fn client(authority: &Path, identity: Option<(&Path, &Path)>) -> reqwest::Client {
    let _ = http();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let authority = reqwest::Certificate::from_pem(read(authority).as_bytes()).unwrap();
    let mut builder = reqwest::Client::builder().tls_certs_only([authority]);
    if let Some((certificate, key)) = identity {
        let both = format!("{}\n{}", read(certificate), read(key));
        builder = builder.identity(reqwest::Identity::from_pem(both.as_bytes()).unwrap());
    }
    builder.build().unwrap()
}

/// The status of an answer; `None` where there is no secure connection.
async fn status(client: &reqwest::Client, served: &Served, token: &str) -> Option<u16> {
    let request =
        client.get(served.at("/v1/models/m/resolve")).header("authorization", format!("Bearer {token}"));
    request.send().await.ok().map(|answer| answer.status().as_u16())
}

fn start(store: &Store, certificates: &Certificates, more: &[&str]) -> Served {
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let (certificate, key) = (path(&certificates.server), path(&certificates.server_key));
    let own = ["--tokens", "tokens.toml", "--tls-certificate", &certificate, "--tls-key", &key];
    Served::start(store, "watch_milliseconds = 100", &[&own[..], more].concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_mutual_tls_only_who_has_the_right_certificate_gets_as_far_as_a_token() {
    let (store, folder, other) = (Store::new(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ours = Certificates::make(folder.path(), "host");
    let theirs = Certificates::make(other.path(), "host");
    let snapshot = publish(&store, "m", 1);
    let token = token(&store, "host", &["fetch"], "m", &[]);
    let served = start(&store, &ours, &["--client-ca", ours.authority.to_str().unwrap()]);
    let right = client(&ours.authority, Some((&ours.client, &ours.client_key)));
    assert_eq!(status(&right, &served, &token).await, Some(200));
    assert_eq!(status(&right, &served, "wb_wrong").await, Some(401), "a certificate is no token");
    let wrong = [
        client(&ours.authority, None),
        client(&ours.authority, Some((&theirs.client, &theirs.client_key))),
        client(&ours.authority, Some((&ours.expired, &ours.expired_key))),
        client(&ours.authority, Some((&ours.server, &ours.server_key))),
        client(&theirs.authority, Some((&ours.client, &ours.client_key))),
    ];
    for (number, wrong) in wrong.iter().enumerate() {
        assert_eq!(status(wrong, &served, &token).await, None, "{number}");
    }
    let plain = http().get(served.url.replace("https", "http")).send().await;
    assert!(plain.is_err(), "{plain:?}");

    // A host, by the command.
    let file = secret_file(&store, "token", &token);
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let (ca, certificate, key) = (path(&ours.authority), path(&ours.client), path(&ours.client_key));
    let by = ["--api", &served.url, "--api-token-file", file.to_str().unwrap(), "--api-ca", &ca];
    let with = [&by[..], &["--api-certificate", &certificate, "--api-key", &key]].concat();
    let mut host = Host::start(&store, &with);
    host.until_current(&snapshot);
    let mut fetch = store.fetch_command("m");
    fetch.args(by);
    let refused = crate::binary::ended(fetch.output().unwrap());
    assert!(refused.code == 5 && !refused.stderr.contains("panicked"), "{refused:?}");
    assert_eq!(host.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_while_it_runs() {
    let (store, folder, other) = (Store::new(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let before = Certificates::make(folder.path(), "host");
    let after = Certificates::make(other.path(), "host");
    let snapshot = publish(&store, "m", 1);
    let token = token(&store, "host", &["fetch"], "m", &[]);
    let served = start(&store, &before, &[]);
    let old_ca = folder.path().join("old.pem");
    std::fs::copy(&before.authority, &old_ca).unwrap();
    let watched = client(&old_ca, None).get(served.at("/v1/models/m/channels/prod/watch"));
    let watched = watched.header("authorization", format!("Bearer {token}")).send().await.unwrap();
    let mut watched = watched.bytes_stream();
    assert!(String::from_utf8_lossy(&watched.next().await.unwrap().unwrap()).contains(&snapshot));

    // The certificate first: with the key that is there it is of no use.
    std::fs::copy(&after.server, &before.server).unwrap();
    served.until_said("certificates cannot be used");
    assert_eq!(status(&client(&old_ca, None), &served, &token).await, Some(200));
    std::fs::copy(&after.server_key, &before.server_key).unwrap();
    let began = Instant::now();
    while status(&client(&after.authority, None), &served, &token).await != Some(200) {
        assert!(began.elapsed() < SECONDS, "{}", served.said());
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(status(&client(&old_ca, None), &served, &token).await, None);
    // The connection that was there goes on.
    let entry = move_channel(&store, &snapshot, 2).await;
    let mut text = String::new();
    while !text.contains(&format!("\"sequence\":{entry}")) {
        text += &String::from_utf8_lossy(&watched.next().await.unwrap().unwrap());
    }
}
