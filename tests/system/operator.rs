//! What an operator does with queued publishes: jobs, dead letters, the queue, policies by name, publishing again.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use serde_json::{Value, json};

use crate::binary::{Run, Store, spawn, wait};
use crate::fixtures::{copy_folder, torchrec};
use crate::queued::{drop_bytes, drop_manifest, queue, work};

/// A policy under which a checkpoint that is not there is given up at once.
const IMPATIENT: &str = "schema = 'weighbridge.policy/v1'\n[job]\ngrace_seconds = 0\n";

fn list(store: &Store, arguments: &[&str]) -> Vec<Value> {
    let listed = store.run(arguments).succeeded();
    listed["jobs"].as_array().or(listed["dead"].as_array()).unwrap().clone()
}

/// A run without `--json`.
fn plain(store: &Store, arguments: &[&str]) -> Run {
    let mut command = std::process::Command::new(crate::binary::path());
    command.args(arguments).arg("--store").arg(store.root()).current_dir(store.folder.path());
    command.env_remove("WEIGHBRIDGE_QUEUE").env_remove("WEIGHBRIDGE_STORE");
    crate::binary::ended(command.output().unwrap())
}

/// A job that died since its checkpoint is not there; the checkpoint's place.
fn dead_job(store: &Store, more: Value) -> (String, std::path::PathBuf) {
    let place = store.folder.path().join("later");
    let mut all = json!({ "policy": { "toml": IMPATIENT } });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let job = drop_manifest(&*queue(store), "m", "r", 7, &place, all);
    work(store);
    (job, place)
}

#[test]
fn jobs_are_listed_shown_and_waited_for() {
    let store = Store::new();
    let queue = queue(&store);
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let labels = json!({ "labels": { "team": "ads" }, "traceparent": trace });
    let first = drop_manifest(&*queue, "m", "r", 1, &torchrec(), labels);
    work(&store);
    let second = drop_manifest(&*queue, "m", "r", 2, &torchrec(), json!({}));
    work(&store);

    let listed = list(&store, &["jobs"]);
    assert_eq!(listed.iter().map(|job| job["job"].clone()).collect::<Vec<_>>(), [second.as_str(), &first]);
    assert_eq!((&listed[1]["state"], &listed[1]["step"]), (&json!("published"), &json!(1)));
    assert!(listed[0]["age_seconds"].is_f64() && listed[0]["error"].is_null(), "{listed:?}");
    assert_eq!(list(&store, &["jobs", "m", "--most", "1"]).len(), 1);
    assert_eq!(list(&store, &["jobs", "--outcome", "published"]).len(), 2);
    assert!(list(&store, &["jobs", "--outcome", "dead"]).is_empty());
    assert!(list(&store, &["jobs", "--open"]).is_empty());

    let shown = store.run(["jobs", "show", &first[..8]]).succeeded();
    assert_eq!(shown["job"], first);
    assert_eq!(shown["record"]["manifest"]["labels"]["team"], "ads");
    assert_eq!(shown["record"]["policy_from"], "default");
    assert_eq!(shown["plan"]["percent_done"], 100);
    assert_eq!(shown["decision"]["decision"], "proceed");
    assert_eq!(shown["outcome"]["outcome"], "published");
    let steps: Vec<_> =
        shown["events"].as_array().unwrap().iter().map(|event| event["step"].clone()).collect();
    assert_eq!(steps, ["plan", "part", "finish"]);
    for stage in ["accept_to_plan_seconds", "conversion_seconds", "finish_seconds", "total_seconds"] {
        assert!(shown["timings"][stage].is_f64(), "{stage}: {shown}");
    }
    let text = plain(&store, &["jobs", "show", &first]).stdout;
    for word in [&first, "team = ads", "00-0af7651916cd43dd8448eb211c80319c", "100 %", "published", "finish"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    let text = plain(&store, &["jobs"]).stdout;
    assert!(text.contains(&first) && text.contains("published"), "{text}");

    let waited = store.run(["jobs", "wait", &second, "--timeout", "60"]).succeeded();
    assert_eq!((&waited["outcome"], &waited["snapshot"]), (&json!("published"), &listed[0]["snapshot"]));
    assert_eq!(store.run(["jobs", "show", "abcdef0"]).failed(6), "not_found");
    assert_eq!(store.run(["jobs", "show", "abc"]).failed(2), "usage");
    assert_eq!(store.run(["jobs", "other"]).failed(6), "not_found");
}

#[test]
fn a_job_is_waited_for_before_any_worker_has_seen_it() {
    let store = Store::new();
    let job = drop_manifest(&*queue(&store), "m", "r", 1, &torchrec(), json!({}));
    let over = store.run(["jobs", "wait", &job, "--timeout", "0"]);
    assert_eq!(over.failed(1), "timeout");
    assert!(over.stderr.contains("there is no store yet"), "{over:?}");
    assert!(!store.root().exists(), "waiting makes no store");

    let waiting = spawn(store.command(["jobs", "wait", &job, "--timeout", "120"]));
    std::thread::sleep(Duration::from_millis(200));
    work(&store);
    let waited = wait(waiting).succeeded();
    assert_eq!((&waited["outcome"], &waited["job"]), (&json!("published"), &json!(job)));
    let unknown = store.run(["jobs", "wait", &job.replace(&job[..6], "ffffff"), "--timeout", "0"]);
    assert_eq!(unknown.failed(1), "timeout");
    assert!(unknown.stderr.contains("no worker has accepted it"), "{unknown:?}");
}

#[test]
fn whoever_waits_where_no_worker_runs_is_told() {
    let store = Store::new();
    let job = drop_manifest(&*queue(&store), "m", "r", 1, &torchrec(), json!({}));
    for command in [&["jobs"][..], &["dead"], &["republish", "m", "--step", "1"]] {
        let run = store.run(command);
        assert_eq!(run.failed(6), "not_found");
        assert!(run.stderr.contains("the first worker makes the store"), "{run:?}");
    }
    let mut waiting = spawn(store.command(["jobs", "wait", &job]));
    let mut said = BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("no worker has accepted it yet, 1 message is ready"), "{line}");
    let pid = rustix::process::Pid::from_child(&waiting);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("jobs go on") && !line.contains("published"), "{line}");
    assert_eq!(wait(waiting).code, 130);
}

#[test]
fn a_job_that_ends_badly_has_its_exit_code() {
    let store = Store::new();
    let (job, _) = dead_job(&store, json!({}));
    let waited = store.run(["jobs", "wait", &job]);
    assert_eq!(waited.failed(4), "not_found");
    assert_eq!(waited.json()["outcome"], "dead");
    let text = "schema = 'weighbridge.policy/v1'\n[[rule]]\nmatch = '**'\nencode = 'int8'\n\
                [gates]\nmax_rms_error = 1e-9";
    let strict = json!({ "policy": { "toml": text } });
    let rejected = drop_manifest(&*queue(&store), "m", "r", 8, &torchrec(), strict);
    work(&store);
    let waited = store.run(["jobs", "wait", &rejected]);
    waited.failed(3);
    assert_eq!(waited.json()["outcome"], "quarantined");
    assert_eq!(list(&store, &["jobs", "--outcome", "quarantined"])[0]["job"], rejected);
}

#[test]
fn a_job_is_cancelled_unless_it_is_too_late() {
    let store = Store::new();
    let queue = queue(&store);
    // It waits for its checkpoint.
    let job = drop_manifest(&*queue, "m", "r", 1, &store.folder.path().join("later"), json!({}));
    let worker = spawn(store.command(["worker", "--until-empty"]));
    let state = || match store.root().exists() {
        true => store.run(["jobs", "--open"]).json()["jobs"][0]["state"].clone(),
        false => Value::Null,
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while state() != "waiting" {
        assert!(std::time::Instant::now() < deadline, "{}", state());
        std::thread::sleep(Duration::from_millis(50));
    }
    let over = store.run(["jobs", "wait", &job, "--timeout", "0"]);
    assert_eq!(over.failed(1), "timeout");
    assert!(over.stderr.contains("waits for its checkpoint"), "{over:?}");
    let cancelled = store.run(["jobs", "cancel", &job[..8], "--who", "alice"]).succeeded();
    assert_eq!((&cancelled["decision"], &cancelled["outcome"]), (&json!("cancelled"), &json!("cancelled")));
    let waited = store.run(["jobs", "wait", &job]);
    assert_eq!(waited.failed(1), "cancelled");
    assert!(waited.stderr.contains("alice"), "{waited:?}");
    assert_eq!(wait(worker).code, 0);
    assert_eq!(store.run(["jobs", "cancel", &job]).succeeded()["decision"], "cancelled");

    let done = drop_manifest(&*queue, "m", "r", 2, &torchrec(), json!({}));
    work(&store);
    let late = store.run(["jobs", "cancel", &done]);
    assert_eq!(late.failed(1), "already_decided");
    assert_eq!(late.json()["outcome"], "published");
    assert_eq!(store.run(["jobs", "cancel", "abcdef0"]).failed(6), "not_found");
}

#[test]
fn a_dead_letter_is_looked_at_and_queued_again() {
    let store = Store::new();
    let (job, place) = dead_job(&store, json!({}));
    let listed = list(&store, &["dead"]);
    assert_eq!((&listed[0]["id"], &listed[0]["fate"]), (&json!(job), &json!("waiting")));
    assert_eq!(listed[0]["error"]["class"], "not_found");
    let shown = store.run(["dead", "show", &job[..8]]).succeeded();
    assert!(shown["text"].as_str().unwrap().contains(&job), "{shown}");
    assert!(!shown["history"].as_array().unwrap().is_empty(), "{shown}");
    let text = plain(&store, &["dead", "show", &job]).stdout;
    assert!(text.contains("grace_seconds") && text.contains("dead"), "{text}");
    let text = plain(&store, &["dead"]).stdout;
    assert!(text.contains(&job) && text.contains("not_found"), "{text}");

    copy_folder(&torchrec(), &place);
    let requeued = store.run(["dead", "requeue", &job[..8], "--who", "alice"]).succeeded();
    let again = requeued["requeued"][0]["job"].as_str().unwrap().to_owned();
    assert_ne!(again, job);
    work(&store);
    assert_eq!(store.run(["jobs", "wait", &again]).succeeded()["outcome"], "published");

    assert!(list(&store, &["dead"]).is_empty());
    assert_eq!(list(&store, &["dead", "--all"])[0]["fate"], "requeued");
    let shown = store.run(["dead", "show", &job]).succeeded();
    let note = shown["note"].as_str().unwrap();
    assert!(note.contains(&again) && note.contains("alice"), "{note}");
    let twice = store.run(["dead", "requeue", &job]);
    assert_eq!(twice.failed(1), "already_requeued");
    assert!(twice.stderr.contains("--again") && twice.stderr.contains(&again), "{twice:?}");
    let third = plain(&store, &["dead", "requeue", &job, "--again"]);
    work(&store);
    assert_eq!(store.run(["jobs", "wait", third.stdout.trim()]).succeeded()["outcome"], "unchanged");
}

#[test]
fn what_a_newer_trainer_says_is_queued_again_too() {
    let store = Store::new();
    let more = json!({ "policy": { "name": "mine" }, "from_the_future": { "n": 1.5 } });
    let job = drop_manifest(&*queue(&store), "m", "r", 1, &torchrec(), more);
    work(&store);
    let dead = store.run(["jobs", "wait", &job]);
    assert_eq!(dead.failed(1), "usage");
    assert!(dead.stderr.contains("weighbridge policy put m mine FILE"), "{dead:?}");
    let policy = store.policy("");
    store.run(["policy", "put", "m", "mine", policy.to_str().unwrap()]).succeeded();
    let before = store.run(["dead", "show", &job]).succeeded()["text"].as_str().unwrap().to_owned();
    assert!(before.contains("from_the_future"), "{before}");
    let again = plain(&store, &["dead", "requeue", &job]).stdout.trim().to_owned();
    // It dies again, so that what was sent can be seen.
    std::fs::remove_dir_all(store.root().join("models/m/policies")).unwrap();
    work(&store);
    let after = store.run(["dead", "show", &again]).succeeded();
    assert_eq!(after["text"], before.replace(&job, &again));
}

#[test]
fn a_letter_that_is_no_manifest_is_discarded() {
    let store = Store::new();
    drop_bytes(&*queue(&store), "one", b"\x1b[2J{");
    drop_bytes(&*queue(&store), "two", b"[\"0f8fad5b-d9cb-469f-a165-70867728950e\"]");
    work(&store);
    let listed = list(&store, &["dead"]);
    let ids: Vec<_> = listed.iter().map(|letter| letter["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 2);
    for id in &ids {
        let refused = store.run(["dead", "requeue", &id[..10]]);
        assert_eq!(refused.failed(2), "bad_document");
        assert!(refused.stderr.contains("dead discard"), "{refused:?}");
        let text = plain(&store, &["dead", "show", id]).stdout;
        assert!(text.contains("body") && !text.contains('\u{1b}'), "{text}");
    }
    let discarded = store.run(["dead", "discard", ids[0], &ids[1][..9]]).succeeded();
    assert_eq!(discarded["discarded"].as_array().unwrap().len(), 2);
    assert!(list(&store, &["dead"]).is_empty());
    assert_eq!(list(&store, &["dead", "--all"])[0]["fate"], "discarded");
    assert_eq!(store.run(["dead", "show", "abcdef0"]).failed(6), "not_found");
    assert_eq!(store.run(["dead", "discard", "abc"]).failed(2), "usage");
}

#[test]
fn the_queue_is_looked_at_and_not_made() {
    let store = Store::new();
    assert_eq!(store.run(["queue", "status"]).failed(6), "not_found");
    assert!(!store.folder.path().join("weighbridge-data").exists());
    let queue = queue(&store);
    drop_manifest(&*queue, "m", "r", 1, &torchrec(), json!({}));
    let status = store.run(["queue", "status"]).succeeded();
    assert_eq!((&status["ready"], &status["delayed"], &status["leased"]), (&json!(1), &json!(0), &json!(0)));
    let classes: Vec<_> =
        status["classes"].as_array().unwrap().iter().map(|class| class["class"].clone()).collect();
    assert_eq!(classes, ["high", "normal", "low"]);
    assert!(
        status["classes"][1]["oldest_seconds"].is_f64() && status["classes"][0]["oldest_seconds"].is_null()
    );
    assert!(plain(&store, &["queue", "status"]).stdout.contains("normal"));
    let nowhere = store.run(["queue", "status", "--queue", "embedded:/dev/null/queue"]);
    assert_eq!(nowhere.failed(5), "queue_unreachable");
}

#[test]
fn policies_are_kept_by_name_and_used() {
    let store = Store::new();
    let drops = store.policy("[[rule]]\nmatch = 'optim.**'\ndrop = true\n[channel]\nname = 'canary'");
    let keeps = store.policy("[channel]\nname = 'kept'");
    let put = |name: &str, file: &std::path::Path| {
        store.run(["policy", "put", "m", name, file.to_str().unwrap()]).succeeded()["version"].clone()
    };
    assert_eq!(
        (put("default", &drops), put("default", &keeps), put("default", &keeps)),
        (json!(1), json!(2), json!(2))
    );
    assert_eq!(put("small", &drops), 1);
    let bad = store.policy("[[rule]]\nmatch = '**'\nencod = 'f16'");
    assert_eq!(store.run(["policy", "put", "m", "bad", bad.to_str().unwrap()]).failed(2), "bad_document");
    let listed = store.run(["policy", "list", "m"]).succeeded();
    let listed = listed["policies"].as_array().unwrap();
    assert_eq!((&listed[0]["policy"], &listed[0]["version"]), (&json!("default"), &json!(2)));
    assert_eq!((&listed[1]["policy"], listed[1]["versions"].as_array().unwrap().len()), (&json!("small"), 1));
    assert!(listed[0]["when"].is_string());
    let text = std::fs::read_to_string(&drops).unwrap();
    assert_eq!(plain(&store, &["policy", "get", "m", "default", "--version", "1"]).stdout, text);
    assert_eq!(store.run(["policy", "get", "m", "default"]).succeeded()["version"], 2);
    assert_eq!(store.run(["policy", "get", "m", "none"]).failed(6), "not_found");
    assert_eq!(store.run(["policy", "get", "m", "default", "--version", "9"]).failed(6), "not_found");

    let published = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    assert_eq!(
        (&published["channel"], &published["policy_from"]),
        (&json!("kept"), &json!("store default version 2"))
    );
    let told =
        plain(&store, &["publish", torchrec().to_str().unwrap(), "--model", "m", "--step", "1"]).stderr;
    assert!(told.contains("store default version 2"), "{told}");
    let given = store.publish(&torchrec(), &["--step", "1", "--policy", drops.to_str().unwrap()]).succeeded();
    assert_eq!((&given["channel"], &given["policy_from"]), (&json!("canary"), &json!("command line")));
    let manifest = store.folder.path().join("manifest.json");
    let document = json!({
        "schema": "weighbridge.checkpoint/v1", "id": "0f8fad5b-d9cb-469f-a165-70867728950e", "model": "m", "run": "r",
        "step": 3, "created_at": "2026-11-29T16:10:04Z", "location": torchrec(), "policy": { "name": "small" },
    });
    std::fs::write(&manifest, document.to_string()).unwrap();
    let named = store.run(["publish".as_ref(), "--manifest".as_ref(), manifest.as_os_str()]).succeeded();
    assert_eq!(
        (&named["channel"], &named["policy_from"]),
        (&json!("canary"), &json!("store small version 1"))
    );

    let queued = drop_manifest(&*queue(&store), "m", "r", 4, &torchrec(), json!({}));
    work(&store);
    assert_eq!(store.run(["jobs", "wait", &queued]).succeeded()["channel"], "kept");
    assert_eq!(
        store.run(["jobs", "show", &queued]).succeeded()["record"]["policy_from"],
        "store default version 2"
    );
}

#[test]
fn a_checkpoint_is_published_again() {
    let store = Store::new();
    let queue = queue(&store);
    let first = drop_manifest(&*queue, "m", "r", 1, &torchrec(), json!({}));
    work(&store);
    let snapshot = store.run(["jobs", "wait", &first]).succeeded()["snapshot"].as_str().unwrap().to_owned();
    drop_manifest(&*queue, "m", "r", 2, &torchrec(), json!({}));
    work(&store);

    let policy = store.policy("[[rule]]\nmatch = 'optim.**'\ndrop = true");
    let again = |arguments: &[&str]| {
        let arguments = [&["republish", "m"][..], arguments].concat();
        let sent = store.run(&arguments).succeeded();
        work(&store);
        (sent.clone(), store.run(["jobs", "wait", sent["job"].as_str().unwrap()]).succeeded())
    };
    let (sent, ended) = again(&["--step", "1", "--policy", policy.to_str().unwrap()]);
    assert_eq!((&sent["repeats"], &ended["outcome"]), (&json!(first), &json!("superseded")));
    let (_, ended) = again(&["--job", &first[..9], "--promote"]);
    assert_eq!((&ended["outcome"], &ended["snapshot"]), (&json!("published"), &json!(snapshot)));
    let (_, ended) = again(&["--snapshot", &snapshot[..10], "--channel", "canary"]);
    assert_eq!((&ended["outcome"], &ended["channel"]), (&json!("published"), &json!("canary")));
    store.run(["policy", "put", "m", "mine", policy.to_str().unwrap()]).succeeded();
    let (sent, ended) = again(&["--step", "2", "--run", "r", "--policy-name", "mine"]);
    assert_eq!(ended["outcome"], "published");
    let shown = store.run(["jobs", "show", sent["job"].as_str().unwrap()]).succeeded();
    assert_eq!(shown["record"]["policy_from"], "store mine version 1");
    assert!(shown["record"]["requested_by"].is_string(), "{shown}");

    let waiting = spawn(store.command(["republish", "m", "--step", "2", "--wait", "--timeout", "120"]));
    while store.run(["queue", "status"]).succeeded()["ready"] == 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    work(&store);
    let ended = wait(waiting).succeeded();
    assert_eq!((&ended["outcome"], &ended["repeats"]), (&json!("unchanged"), &sent["job"]));

    drop_manifest(&*queue, "m", "other", 2, &torchrec(), json!({}));
    work(&store);
    let several = store.run(["republish", "m", "--step", "2"]);
    assert_eq!(several.failed(2), "usage");
    assert!(several.stderr.contains("other, r") && several.stderr.contains("--run"), "{several:?}");
    let foreground = store.publish(&torchrec(), &["--step", "9"]).succeeded();
    let id = foreground["snapshot"].as_str().unwrap();
    for what in [&["--step", "9"][..], &["--snapshot", id], &["--job", "abcdef0"]] {
        let refused = store.run([&["republish", "m"][..], what].concat());
        assert_eq!(refused.failed(6), "not_found", "{what:?}");
    }
    assert!(store.run(["republish", "m", "--step", "9"]).stderr.contains("weighbridge publish"));
    assert_eq!(store.run(["republish", "m"]).failed(2), "usage");
    assert_eq!(store.run(["republish", "m", "--step", "1", "--policy-name", "none"]).failed(2), "usage");
}
