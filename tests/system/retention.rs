//! `gc`, `pin`, `unpin`: what is deleted, what is kept, and what an operator sees of it.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::binary::{Store, spawn, wait};
use crate::queued::{drop_manifest, queue, work};
use weighbridge_tests::synthetic;

/// Nothing is kept but what something points at.
const ALL: [&str; 5] = ["gc", "m", "--keep-last=0", "--keep-history=1", "--grace-hours=0"];

fn checkpoint(store: &Store, rows: usize) -> PathBuf {
    let path = store.folder.path().join(format!("{rows}.safetensors"));
    synthetic(&path, 1, rows, 8);
    path
}

/// Publishes steps 1 to `steps`, of which none shares a chunk with another; gives their snapshots.
fn published(store: &Store, steps: u64) -> Vec<String> {
    let publish = |step: u64| {
        let checkpoint = checkpoint(store, 10 * usize::try_from(step).unwrap());
        let published = store.publish(&checkpoint, &["--step", &step.to_string()]).succeeded();
        published["snapshot"].as_str().unwrap().to_owned()
    };
    (1..=steps).map(publish).collect()
}

fn keys(store: &Store) -> BTreeSet<String> {
    let files = store.objects("models");
    let names = files.iter().map(|path| path.strip_prefix(store.root()).unwrap().display().to_string());
    names.filter(|name| !name.contains("/gc/")).collect()
}

fn snapshots(store: &Store) -> Vec<(String, bool)> {
    let listed = store.run(["snapshots", "m"]).succeeded();
    let row = |row: &Value| (row["snapshot"].as_str().unwrap().to_owned(), row["pinned"].as_bool().unwrap());
    listed["snapshots"].as_array().unwrap().iter().map(row).collect()
}

fn ids(store: &Store) -> Vec<String> {
    snapshots(store).into_iter().map(|(id, _)| id).collect()
}

/// As if it had been put so many hours ago.
fn age(path: &Path, hours: u64) {
    let then = SystemTime::now() - Duration::from_secs(hours * 3600);
    File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

/// Makes all claims older than any that is heeded.
fn forget_claims(store: &Store) {
    store.objects("models/m/claims").iter().for_each(|claim| age(claim, 3));
}

#[test]
fn the_policy_says_what_is_kept_and_options_go_before_it() {
    let store = Store::new();
    assert_eq!(store.run(["gc"]).failed(6), "not_found");
    let all = published(&store, 4);
    assert_eq!(store.run(["gc", "n"]).failed(6), "not_found");
    for wrong in ["--keep-history=0", "--keep-each=0", "--keep-last=x", "--grace-hours=-1"] {
        assert_eq!(store.run(["gc", "m", wrong]).failed(2), "usage");
    }
    assert!(store.run(["gc", "m", "--last-run"]).succeeded()["models"][0]["run"].is_null());
    let kept = store.run(["gc", "--grace-hours=0"]).succeeded();
    assert_eq!(kept["models"][0]["kept_snapshots"], 4, "without a policy all are kept");
    assert_eq!(kept["models"][0]["kept_young_snapshots"], 0);

    let policy = store.policy("[retention]\nkeep_last = 2\nkeep_history = 1\ngrace_hours = 0\n");
    store
        .run(["policy".as_ref(), "put".as_ref(), "m".as_ref(), "default".as_ref(), policy.as_os_str()])
        .succeeded();
    store.run(["pin", &format!("m@{}", all[0]), "--why", "the paper"]).succeeded();
    forget_claims(&store);
    assert_eq!(store.run(["gc", "m", "--keep-last=9"]).succeeded()["models"][0]["snapshots"], json!([]));
    let before = keys(&store);
    let told = store.run(["gc", "--dry-run"]).succeeded();
    assert_eq!(keys(&store), before);
    let gone = store.run(["gc"]).succeeded();
    let model = &gone["models"][0];
    assert_eq!((&model["snapshots"], &model["kept_snapshots"]), (&json!([all[1]]), &json!(3)));
    assert_eq!((&model["kept_young_snapshots"], &model["kept_rooted_snapshots"]), (&json!(0), &json!(1)));
    let young = store.run(["gc", "m", "--keep-last=1", "--grace-hours=24", "--dry-run"]).succeeded();
    assert_eq!(young["models"][0]["kept_young_snapshots"], 2, "and why nothing goes is told");
    for figure in ["snapshots", "chunks", "bytes", "jobs", "remains", "kept_snapshots"] {
        assert_eq!(told["models"][0][figure], model[figure], "{figure}");
    }
    let told = told["models"][0]["objects"].as_array().unwrap();
    let told: BTreeSet<_> = told.iter().map(|key| key.as_str().unwrap().to_owned()).collect();
    assert_eq!(told, before.difference(&keys(&store)).cloned().collect());
    let last = store.run(["gc", "--last-run"]).succeeded();
    assert_eq!(last["models"][0]["ended"]["chunks"], model["chunks"]);

    let pinned = snapshots(&store);
    assert_eq!(pinned, [(all[0].clone(), true), (all[2].clone(), false), (all[3].clone(), false)]);
    store.run(["unpin", &format!("m@{}", all[0])]).succeeded();
    store.run(["gc"]).succeeded();
    assert_eq!(ids(&store), [all[2].clone(), all[3].clone()]);
    store.fetch("m").succeeded();
    assert_eq!(store.fetch(&format!("m@{}", all[0])).failed(6), "not_found");
    assert_eq!(store.run(["pin", &format!("m@{}", all[1])]).failed(6), "not_found");
}

#[test]
fn what_something_points_at_is_kept_and_what_is_gone_is_gone_for_good() {
    let store = Store::new();
    let all = published(&store, 5);
    store.run(["promote", &format!("m@{}", all[0]), "--channel", "canary"]).succeeded();
    store.run(["rollback", "m", "--to", &all[2]]).succeeded();
    forget_claims(&store);
    store.run(ALL).succeeded();
    assert_eq!(ids(&store), [all[0].clone(), all[2].clone()]);
    // Over the second, which is gone.
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], all[0]);
    assert_eq!(store.run(["rollback", "m"]).failed(6), "not_found");
    assert_eq!(store.run(["channels", "log", "m"]).succeeded()["entries"].as_array().unwrap().len(), 7);
    // Within the history that gc was told to keep, a snapshot that is gone is damage; behind it, it was collected.
    assert_eq!(store.run(["verify"]).succeeded()["collected_entries"], 3);
    for _ in 0..6 {
        store.run(["release", "m"]).succeeded();
        store.run(["hold", "m"]).succeeded();
    }
    let verified = store.run(["verify"]).succeeded();
    assert_eq!(verified["collected_entries"], 3);
    // What is published again is made again.
    let again = store.publish(&checkpoint(&store, 50), &["--step", "5"]).succeeded();
    assert_eq!((&again["snapshot"], &again["outcome"]), (&json!(all[4]), &json!("held")));
    store.run(["verify"]).succeeded();
}

#[test]
fn grace_and_claims_are_by_age_and_what_a_killed_process_left_goes() {
    let store = Store::new();
    let all = published(&store, 2);
    let staged = store.root().join("models/m/chunks/ab/abc#1");
    std::fs::create_dir_all(staged.parent().unwrap()).unwrap();
    std::fs::write(&staged, "torn").unwrap();
    // Claimed.
    store.run(ALL).succeeded();
    assert_eq!(ids(&store).len(), 2);
    forget_claims(&store);
    // Too young.
    store.run(["gc", "m", "--keep-last=0", "--keep-history=1"]).succeeded();
    assert_eq!(ids(&store).len(), 2);
    std::fs::metadata(&staged).unwrap();
    age(&staged, 3);
    let gone = store.run(ALL).succeeded();
    assert_eq!(gone["models"][0]["remains"], 1, "{gone}");
    assert_eq!(ids(&store), [all[1].clone()]);
    std::fs::metadata(&staged).unwrap_err();
}

#[test]
fn a_root_that_cannot_be_read_keeps_everything_and_is_named() {
    let store = Store::new();
    let all = published(&store, 3);
    store.run(["pin", &format!("m@{}", all[0])]).succeeded();
    forget_claims(&store);
    let pin = format!("models/m/pins/{}/000000000001", all[0]);
    let claim = format!("models/m/claims/{}.x.manifest", all[1]);
    let roots = [pin.as_str(), "models/m/channels/prod/000000000003", "models/m/channels/prod/hint", &claim];
    for name in roots {
        let path = store.root().join(name);
        let whole = std::fs::read(&path);
        std::fs::write(&path, if name.ends_with("hint") { "9" } else { "{" }).unwrap();
        let before = keys(&store);
        for _ in 0..2 {
            let run = store.run(ALL);
            assert_eq!(run.failed(7), "integrity", "{name}");
            assert!(run.stderr.contains(name.trim_end_matches("/hint")), "{name}: {run:?}");
        }
        assert_eq!(keys(&store), before, "{name}");
        whole.map_or_else(|_| std::fs::remove_file(&path), |whole| std::fs::write(&path, whole)).unwrap();
    }
    store.run(ALL).succeeded();
    assert_eq!(ids(&store), [all[0].clone(), all[2].clone()]);
}

#[test]
fn documents_of_jobs_go_and_a_message_of_such_a_job_does_no_harm() {
    let store = Store::new();
    let queue = queue(&store);
    let place = checkpoint(&store, 10);
    let job = drop_manifest(&*queue, "m", "r", 1, &place, json!({}));
    work(&store);
    let gone = store.run(["gc", "m", "--keep-jobs-days=0", "--grace-hours=0"]).succeeded();
    assert_eq!(gone["models"][0]["jobs"], json!([job]));
    assert_eq!(store.run(["jobs"]).succeeded()["jobs"], json!([]));
    assert_eq!(store.run(["jobs", "show", &job]).failed(6), "not_found");
    let gone = store.run(["gc", "m", "--keep-jobs-days=0", "--grace-hours=0"]).succeeded();
    assert_eq!((&gone["models"][0]["jobs"], &gone["models"][0]["running_jobs"]), (&json!([]), &json!(0)));
    // The same manifest comes again.
    drop_manifest(&*queue, "m", "r", 1, &place, json!({ "id": job }));
    work(&store);
    let listed = store.run(["jobs"]).succeeded();
    assert_eq!(listed["jobs"].as_array().unwrap().len(), 1, "{listed}");
    store.run(["verify"]).succeeded();
}

#[test]
fn a_killed_run_is_ended_at_once_and_of_two_one_works() {
    let store = Store::new();
    let all = published(&store, 3);
    forget_claims(&store);
    for milliseconds in [1, 5, 10, 20, 30, 50, 80] {
        let mut gc = spawn(store.command(ALL));
        std::thread::sleep(Duration::from_millis(milliseconds));
        gc.kill().unwrap();
        gc.wait().unwrap();
    }
    let runs: Vec<_> = (0..4).map(|_| spawn(store.command(ALL))).collect();
    let runs: Vec<_> = runs.into_iter().map(wait).collect();
    for run in &runs {
        if run.code != 0 {
            assert_eq!(run.failed(1), "conflict");
            assert!(run.stderr.contains("another process carries out run"), "{run:?}");
        }
    }
    assert!(runs.iter().any(|run| run.code == 0), "{runs:?}");
    assert_eq!(ids(&store), [all[2].clone()]);
    store.run(["verify", "m@prod"]).succeeded();
}

/// B76: gc in a tight loop while chunks are shared by publishes, in the foreground and by workers.
#[test]
fn gc_in_a_loop_costs_no_publish_anything() {
    let store = Store::new();
    let places: Vec<_> = (1..4).map(|number| checkpoint(&store, number * 10)).collect();
    store.publish(&places[0], &[]).succeeded();
    let queue = queue(&store);
    for step in 0..30 {
        let fields = json!({ "policy": { "toml": "schema = 'weighbridge.policy/v1'\n[channel]\nname = 'queued'\n\
                                                  latest_wins = false\n" } });
        drop_manifest(&*queue, "m", "r", step, &places[usize::try_from(step).unwrap() % 3], fields);
    }
    let over = AtomicBool::new(false);
    let runs = std::thread::scope(|scope| {
        let gc = scope.spawn(|| {
            let mut runs = 0;
            while !over.load(Ordering::SeqCst) {
                store.run(["gc", "m", "--keep-last=1", "--grace-hours=0"]).succeeded();
                runs += 1;
            }
            runs
        });
        let publishers = [0, 1].map(|lane| {
            let (store, places) = (&store, &places);
            scope.spawn(move || {
                for step in 0..35 {
                    let step: usize = 2 * step + lane;
                    let channel = format!("lane{lane}");
                    let more = ["--step", &step.to_string(), "--channel", &channel];
                    store.publish(&places[step % 3], &more).succeeded();
                }
            })
        });
        work(&store);
        publishers.into_iter().for_each(|publisher| publisher.join().unwrap());
        over.store(true, Ordering::SeqCst);
        gc.join().unwrap()
    });
    println!("{runs} runs of gc");
    store.run(["verify"]).succeeded();
    let published = store.run(["jobs", "--outcome", "published", "--most", "100"]).succeeded();
    assert!(!published["jobs"].as_array().unwrap().is_empty());
    let dead = store.run(["dead"]).succeeded();
    assert_eq!(dead["dead"], json!([]));
    for channel in ["lane0", "lane1", "queued"] {
        store.run(["verify", &format!("m@{channel}")]).succeeded();
    }
}
