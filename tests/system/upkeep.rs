//! `serve` promotes what has stood one channel for long enough to another, and stops when it is told to.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::binary::{Store, ended, spawn, wait};
use crate::fixtures::data;

/// How long something that has to happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn terminate(child: &std::process::Child) {
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
}

fn log(store: &Store, channel: &str) -> Vec<Value> {
    let run = store.run(["channels", "log", channel]);
    if run.code == 6 { Vec::new() } else { run.succeeded()["entries"].as_array().unwrap().clone() }
}

#[test]
fn a_snapshot_that_has_stood_the_canary_goes_on_to_prod_and_not_past_a_hold() {
    let store = Store::new();
    let checkpoint = data().join("checkpoints/safetensors_single");
    let text = "[channel]\nname = 'canary'\n[promotion]\nto = 'prod'\nafter_minutes = 0";
    let policy = store.policy(text);
    let put = store.run(["policy", "put", "m", "default", policy.to_str().unwrap()]);
    put.succeeded();
    let published = |step: &str| store.publish(&checkpoint, &["--step", step]).succeeded();
    let first = published("1");
    assert_eq!(first["channel"], "canary", "the model's own policy says so");
    let mut serve = store.command(["serve", "--roles", "upkeep,worker", "--upkeep-seconds", "1"]);
    serve.args(["--listen", "127.0.0.1:0"]);
    serve.arg("--queue").arg(format!("embedded:{}", store.folder.path().join("queue").display()));
    let serving = spawn(serve);
    let began = Instant::now();
    while log(&store, "m@prod").is_empty() {
        assert!(began.elapsed() < PATIENCE, "prod was not moved");
        std::thread::sleep(Duration::from_millis(100));
    }
    let entries = log(&store, "m@prod");
    assert_eq!((&entries[0]["snapshot"], &entries[0]["reason"]), (&first["snapshot"], &"promote".into()));
    assert_eq!(entries[0]["who"], "promotion from canary");

    store.run(["hold", "m@prod"]).succeeded();
    published("2");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(log(&store, "m@prod").len(), 2, "a held channel stays");
    terminate(&serving);
    let stopped = wait(serving);
    assert_eq!(stopped.code, 0, "{stopped:?}");
}

#[test]
fn a_promotion_to_the_channel_that_it_comes_from_is_refused() {
    let store = Store::new();
    let policy = store.policy("[promotion]\nto = 'prod'\nafter_minutes = 5");
    let run = store.run(["config", "check", policy.to_str().unwrap()]);
    assert!(run.code == 2 && run.stderr.contains("promotion.to"), "{run:?}");
    let run = ended(store.command(["serve", "--upkeep-seconds", "0"]).output().unwrap());
    assert_eq!(run.failed(2), "usage");
}
