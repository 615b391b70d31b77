//! Checkpoints in object stores: the same snapshots as from a folder, and clear words where that fails.

use std::process::Command;

use weighbridge_tests::buckets::{Chances, FaultyProxy, Kind, SECRET, Server};
use weighbridge_tests::{peak_memory, synthetic};

use crate::binary::{Run, Store, ended};
use crate::fixtures::data;

const CHECKPOINTS: [&str; 3] = ["dcp_torchrec_2rank", "hf_dcp_indexed", "safetensors_single"];

fn publish(store: &Store, server: &Server, key: &str, change: impl FnOnce(&mut Command)) -> Run {
    let mut command = store.publish_command(server.url(key).as_ref(), &[]);
    server.lend(&mut command, None);
    change(&mut command);
    ended(command.output().unwrap())
}

#[test]
fn a_checkpoint_in_a_bucket_gives_the_snapshot_that_its_copy_here_gives() {
    for kind in [Kind::SeaweedFs, Kind::Azurite] {
        let Some(server) = Server::start(kind) else { continue };
        for name in CHECKPOINTS {
            let folder = data().join("checkpoints").join(name);
            server.put_folder(&folder, &format!("runs/{name}"));
            let here = Store::new().publish(&folder, &[]).succeeded();
            let store = Store::new();
            let there = publish(&store, &server, &format!("runs/{name}"), |_| {}).succeeded();
            assert_eq!(there["snapshot"], here["snapshot"], "{name}");
            let url = server.url(&format!("runs/{name}"));
            let mut inspect = store.command(["inspect", url.as_str()]);
            server.lend(&mut inspect, None);
            assert_eq!(ended(inspect.output().unwrap()).succeeded()["kind"], "checkpoint");
        }
    }
}

#[test]
fn what_is_wrong_with_a_remote_place_is_said() {
    let Some(server) = Server::start(Kind::SeaweedFs) else { return };
    server.put("a.safetensors", vec![0; 10]);
    let store = Store::new();
    let run = publish(&store, &server, "absent", |_| {});
    assert_eq!(run.failed(6), "not_found");
    assert_eq!(run.stderr.matches("s3://").count(), 1, "{run:?}");
    let mut command = store.publish_command("s3://another-bucket/x".as_ref(), &[]);
    server.lend(&mut command, None);
    assert_eq!(ended(command.output().unwrap()).failed(6), "not_found");
    assert!(!store.root().exists(), "a checkpoint that is not there makes no store");
    let run = publish(&store, &server, "a.safetensors", |command| {
        command.env("AWS_SECRET_ACCESS_KEY", "wrong");
    });
    assert_eq!(run.failed(5), "access_denied");
    assert!(run.stderr.contains("AWS_ACCESS_KEY_ID") && !run.stderr.contains(SECRET), "{run:?}");
    let run = publish(&store, &server, "a.safetensors", |command| {
        command.env_remove("AWS_ALLOW_HTTP");
    });
    assert_eq!(run.failed(5), "access_denied");
    assert!(run.stderr.contains("AWS_ALLOW_HTTP=true") && !run.stderr.contains("tries"), "{run:?}");
    let run = publish(&store, &server, "a.safetensors", |command| {
        command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:9");
    });
    assert_eq!(run.failed(5), "unreachable");
    let run = store.publish("hdfs://a/b".as_ref(), &[]);
    assert_eq!(run.failed(2), "usage");
    assert!(run.stderr.contains("s3, gs, az and file"), "{run:?}");
}

#[test]
fn large_checkpoints_come_in_bounded_memory_and_over_connections_that_break() {
    let Some(server) = Server::start(Kind::SeaweedFs) else { return };
    let store = Store::new();
    let path = store.folder.path().join("large.safetensors");
    synthetic(&path, 3, 100_000, 64);
    server.put("large.safetensors", std::fs::read(&path).unwrap());
    let here = store.publish(&path, &[]).succeeded();
    let proxy = FaultyProxy::start(&server, 1);
    proxy.by_chance(Chances { cut_answer: 0.3, ..Chances::default() });
    let there = publish(&Store::new(), &server, "large.safetensors", |command| {
        server.lend(command, Some(proxy.port()));
    });
    assert_eq!(there.succeeded()["snapshot"], here["snapshot"]);
    assert!(proxy.counts().faults > 0, "no answer was cut");

    let fresh = Store::new();
    let mut command = fresh.publish_command(server.url("large.safetensors").as_ref(), &[]);
    server.lend(&mut command, None);
    command.env("WEIGHBRIDGE_MEMORY", "128MiB").env("WEIGHBRIDGE_THREADS", "2");
    let (status, peak) = peak_memory(&mut command).unwrap();
    println!("peak {} MiB", peak >> 20);
    assert!(status.success() && peak <= 128 << 20, "{status}, peak {} MiB", peak >> 20);
}
