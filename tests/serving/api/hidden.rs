//! Tokens are shown nowhere: not in logs of any level, errors, figures, documents, or the list of processes.

use std::path::Path;

use weighbridge::api::proto;

use super::served::{Served, get, publish, secret_file, token};
use crate::binary::{Store, ended};
use crate::follower::Host;
use crate::site::by;

/// The arguments of all processes.
fn processes() -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        all += &String::from_utf8_lossy(&arguments);
        all.push('\n');
    }
    all
}

/// The files below `folder` that hold `text`.
fn holding(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else if path.is_file() && String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains(text)
            {
                found.push(path.file_name().unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_shown_nowhere() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let good = token(&store, "host", &["fetch", "operate"], "m", &[]);
    let bad = "wb_this-is-nobodys-token-but-secret-even-so";
    let mut command = Served::command(&store, "", &["--tokens", "tokens.toml", "--audit-log", "audit.jsonl"]);
    let served = Served::run({
        command.args(["--log", "trace"]);
        command
    })
    .unwrap_or_else(|run| panic!("{run:?}"));

    let file = secret_file(&store, "token", &good);
    let wrong = secret_file(&store, "wrong", bad);
    let mut by_variable = Host::command(&store, &store.folder.path().join("one"), &["--api", &served.url]);
    by_variable.env("WEIGHBRIDGE_API_TOKEN", &good).env("WEIGHBRIDGE_LOG", "trace");
    let by_file = ["--api", &served.url, "--api-token-file", file.to_str().unwrap()];
    let mut by_file = Host::command(&store, &store.folder.path().join("two"), &by_file);
    by_file.env("WEIGHBRIDGE_LOG", "trace");
    let mut hosts = vec![
        Host::spawn(by_variable, &store.folder.path().join("one")),
        Host::spawn(by_file, &store.folder.path().join("two")),
    ];
    for host in &mut hosts {
        host.until_current(&snapshot);
    }
    let mut fetch = store.fetch_command("m");
    fetch.args(["--api", &served.url, "--api-token-file"]).arg(&wrong).env("WEIGHBRIDGE_LOG", "trace");
    let refused = ended(fetch.output().unwrap());
    assert_eq!((refused.code, refused.json()["error"]["class"].as_str()), (5, Some("store_access_denied")));
    let answers = [
        get(&served, "/v1/models/m/resolve", Some(&good), &[]).await,
        get(&served, "/v1/models/m/resolve", Some(bad), &[]).await,
        get(&served, &format!("/v1/objects/{bad}?token={bad}"), Some(bad), &[]).await,
    ];
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 401, 401]);
    for token in [good.as_str(), bad] {
        let request = proto::ResolveRequest { model: "m".into(), at: String::new() };
        let _ = served.snapshots().resolve(by(token, request)).await;
    }

    let mut shown = vec![served.metrics().await, processes(), refused.stdout.clone(), refused.stderr.clone()];
    shown.extend(answers.iter().map(|answer| String::from_utf8_lossy(&answer.body).into_owned()));
    shown.extend(answers.iter().map(|answer| format!("{:?}", answer.headers)));
    for host in hosts {
        shown.extend([host.said(), format!("{:?}", host.lines()), format!("{:?}", host.status())]);
    }
    // By the path of the request alone, which whoever asks has to keep to himself.
    let log: String = served.said().lines().filter(|line| !line.contains("/v1/objects/")).collect();
    println!("{} bytes of logs", log.len());
    assert!(log.contains("listening on "), "it was heard: {log}");
    shown.push(log);
    for secret in [&good[3..], &bad[3..]] {
        for text in &shown {
            let at = text.find(secret).map(|at| &text[at.saturating_sub(300)..at]);
            assert_eq!(at, None, "it stands behind this");
        }
    }
    assert_eq!(holding(store.folder.path(), &good[3..]), ["token"]);
    assert_eq!(holding(store.folder.path(), &bad[3..]), ["wrong"]);
}
