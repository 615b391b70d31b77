//! Odd states that people, crashes and other programs leave behind: in stores, in fetch folders, on the command line.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::binary::{Store, ended, spawn, wait};
use crate::fixtures::torchrec;
use crate::tensors::tensors;

fn publish(store: &Store, step: &str) -> String {
    let published = store.publish(&torchrec(), &["--step", step]).succeeded();
    published["snapshot"].as_str().unwrap().to_owned()
}

fn make_pipe(path: &std::path::Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn entries_that_are_gone_are_missed() {
    let store = Store::new();
    for step in ["1", "2", "3"] {
        publish(&store, step);
    }
    let prod = store.root().join("models/m/channels/prod");
    let newest = prod.join("000000000003");
    let kept = std::fs::read(&newest).unwrap();
    std::fs::remove_file(&newest).unwrap();
    let run = store.run(["verify"]);
    assert_eq!(run.failed(7), "integrity");
    assert!(run.stderr.contains("hint"), "{run:?}");
    let fetched = store.fetch("m");
    assert!(fetched.code == 0 && fetched.stderr.contains("WARN"), "the hint is only advice: {fetched:?}");
    std::fs::write(&newest, kept).unwrap();
    std::fs::remove_file(prod.join("000000000002")).unwrap();
    std::fs::write(prod.join("hint"), "1").unwrap();
    for run in [store.fetch("m"), store.run(["verify"]), store.publish(&torchrec(), &["--step", "4"])] {
        assert_eq!(run.failed(7), "integrity");
        assert!(run.stderr.contains("000000000002"), "{run:?}");
    }
    std::fs::copy(prod.join("000000000001"), prod.join("999999999999")).unwrap();
    assert_eq!(store.run(["verify"]).failed(7), "integrity");
    for entry in store.objects("models/m/channels/prod") {
        if !entry.ends_with("hint") {
            std::fs::remove_file(entry).unwrap();
        }
    }
    for run in [store.fetch("m"), store.run(["verify"]), store.publish(&torchrec(), &["--step", "4"])] {
        assert_eq!(run.failed(7), "integrity");
    }
    assert_eq!(store.run(["promote", "m"]).failed(2), "usage");
}

#[test]
fn a_channel_that_points_at_what_is_gone_or_altered_is_damage() {
    let store = Store::new();
    let id = publish(&store, "1");
    publish(&store, "2");
    store.run(["rollback", "m"]).succeeded();
    let entry = store.root().join("models/m/channels/prod/000000000003");
    let right = std::fs::read_to_string(&entry).unwrap();
    for (from, to) in [("\"step\":1", "\"step\":7"), ("\"previous\":\"", "\"previous\":\"0")] {
        let mut altered = right.replace(from, to);
        if from.contains("previous") {
            // Another hash of the same length.
            let at = altered.find(to).unwrap() + to.len() + 63;
            altered.remove(at);
        }
        assert_ne!(altered, right);
        std::fs::write(&entry, altered).unwrap();
        assert_eq!(store.run(["verify"]).failed(7), "integrity");
    }
    std::fs::write(&entry, right).unwrap();
    std::fs::remove_file(store.root().join("models/m/snapshots").join(&id)).unwrap();
    let run = store.fetch("m");
    assert_eq!(run.failed(7), "integrity");
    assert!(run.stderr.contains(&id), "{run:?}");
}

#[test]
fn publishing_over_damage_does_not_end_as_published() {
    let store = Store::new();
    let id = publish(&store, "1");
    let manifest = store.root().join("models/m/snapshots").join(&id);
    let right = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, "").unwrap();
    assert_eq!(store.publish(&torchrec(), &["--step", "1"]).failed(7), "integrity");
    std::fs::write(&manifest, right).unwrap();
    for chunk in store.objects("models/m/chunks") {
        let right = std::fs::read(&chunk).unwrap();
        let mut flipped = right.clone();
        flipped[0] ^= 1;
        std::fs::write(&chunk, flipped).unwrap();
        let run = store.publish(&torchrec(), &["--step", "1"]);
        assert_eq!(run.failed(7), "integrity");
        assert!(run.stderr.contains(chunk.file_name().unwrap().to_str().unwrap()), "{run:?}");
        std::fs::write(&chunk, right).unwrap();
    }
    publish(&store, "1");
}

#[test]
fn a_damaged_snapshot_does_not_hide_the_others_from_the_list() {
    let store = Store::new();
    let ids = [publish(&store, "1"), publish(&store, "2")];
    std::fs::write(store.root().join("models/m/snapshots").join(&ids[0]), "{}").unwrap();
    let run = store.run(["snapshots", "m"]);
    assert_eq!(run.failed(7), "integrity");
    let listed = run.json();
    let rows = listed["snapshots"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().any(|row| row["step"] == 2) && rows.iter().any(|row| row["step"].is_null()));
}

#[test]
fn other_programs_files_in_a_store_are_passed_over() {
    let store = Store::new();
    publish(&store, "1");
    let model = store.root().join("models/m");
    for junk in [
        "chunks/.DS_Store",
        "chunks/ab/x",
        "snapshots/x",
        "channels/prod/sub/000000000009",
        "channels/x",
        "x",
    ] {
        let path = model.join(junk);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "junk").unwrap();
    }
    let chunk = &store.objects("models/m/chunks")[0];
    std::fs::copy(chunk, format!("{}#1", chunk.display())).unwrap();
    store.run(["verify"]).succeeded();
    store.run(["snapshots"]).succeeded();
    store.fetch("m").succeeded();
    publish(&store, "2");
    assert_eq!(store.run(["channels", "m"]).succeeded()["channels"][0]["step"], 2);
    let huge = "ab".repeat(32);
    let stray = std::fs::File::create(model.join("chunks/ab").join(&huge)).unwrap();
    stray.set_len(6 << 30).unwrap();
    let run = store.run(["verify"]);
    assert_eq!(run.failed(7), "integrity");
    assert!(run.stderr.contains(&huge), "{run:?}");
}

#[test]
fn the_verdict_of_the_last_publish_rules() {
    let store = Store::new();
    let strict = store.policy("[gates]\nmax_abs_error = 1e-12\n[[rule]]\nmatch = '**'\nencode = 'bf16'");
    let lenient = store.policy("[[rule]]\nmatch = '**'\nencode = 'bf16'");
    let publish =
        |policy: &std::path::Path| store.publish(&torchrec(), &["--policy", policy.to_str().unwrap()]);
    let gates = || store.run(["snapshots", "m"]).succeeded()["snapshots"][0]["gates"].clone();
    let id = publish(&lenient).succeeded()["snapshot"].as_str().unwrap().to_owned();
    assert_eq!(gates(), "passed");
    publish(&strict).failed(3);
    assert_eq!(gates(), "rejected");
    assert_eq!(store.run(["promote", &format!("m@{id}")]).failed(3), "rejected_by_gate");
    publish(&lenient).succeeded();
    assert_eq!(gates(), "passed");
    store.run(["promote", &format!("m@{id}")]).succeeded();
    publish(&strict).failed(3);
    assert_eq!(store.run(["report", "m"]).succeeded()["outcome"], "rejected");
    store.run(["promote", &format!("m@{id}"), "--force"]).succeeded();
    let report = store.root().join(format!("models/m/snapshots/{id}.report"));
    std::fs::remove_file(report).unwrap();
    assert_eq!(store.run(["verify"]).failed(7), "integrity");
}

#[test]
fn a_second_rollback_goes_a_step_further_back() {
    let store = Store::new();
    let ids = ["1", "2", "3"].map(|step| publish(&store, step));
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], ids[1]);
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], ids[0]);
    let run = store.run(["rollback", "m"]);
    assert_eq!(run.failed(6), "not_found");
    assert!(run.stderr.contains("--to"), "{run:?}");
}

#[test]
fn a_fetch_folder_in_any_state_is_put_in_order_or_refused_at_once() {
    let store = Store::new();
    let id = publish(&store, "1");
    let into = store.served();
    let victim = store.folder.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let staging = into.join(".staging");
    let own = staging.join(&id);
    let states: [(&str, &dyn Fn()); 7] = [
        ("a file among the stages", &|| {
            std::fs::create_dir_all(&staging).unwrap();
            std::fs::write(staging.join(".DS_Store"), "x").unwrap();
        }),
        ("a file for the stages", &|| std::fs::write(&staging, "x").unwrap()),
        ("a file for the stage", &|| {
            std::fs::create_dir_all(&staging).unwrap();
            std::fs::write(&own, "x").unwrap();
        }),
        ("a folder for a file", &|| std::fs::create_dir_all(own.join("model.safetensors")).unwrap()),
        ("a link out", &|| {
            std::fs::create_dir_all(&own).unwrap();
            symlink(&victim, own.join("model.safetensors")).unwrap();
        }),
        ("a pipe, and a file of somebody else's", &|| {
            std::fs::create_dir_all(&own).unwrap();
            make_pipe(&own.join("model.safetensors"));
            std::fs::write(own.join("else"), "x").unwrap();
        }),
        ("a folder for the next link", &|| std::fs::create_dir_all(into.join(".current.next/x")).unwrap()),
    ];
    for (what, spoil) in states {
        std::fs::create_dir_all(&into).unwrap();
        spoil();
        store.fetch("m").succeeded();
        let mut files: Vec<_> = std::fs::read_dir(into.join("current"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, ["model.safetensors", "snapshot.json"], "{what}");
        tensors(&into.join("current"));
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious", "{what}");
        std::fs::remove_dir_all(&into).unwrap();
    }

    std::fs::create_dir_all(into.join("current")).unwrap();
    assert_eq!(store.fetch("m").failed(1), "refused");
    assert!(!staging.exists(), "nothing is downloaded first");
    std::fs::remove_dir_all(&into).unwrap();
    std::fs::write(&into, "a file").unwrap();
    assert_eq!(store.fetch("m").failed(1), "refused");
}

#[test]
fn a_fetch_that_waits_for_another_can_be_interrupted() {
    let store = Store::new();
    publish(&store, "1");
    std::fs::create_dir_all(store.served()).unwrap();
    let lock = std::fs::File::create(store.served().join(".lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let child = spawn(store.fetch_command("m"));
    std::thread::sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let started = Instant::now();
    assert_eq!(wait(child).failed(130), "interrupted");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn files_that_people_name_are_bounded_and_not_waited_for() {
    let store = Store::new();
    let pipe = store.folder.path().join("pipe");
    make_pipe(&pipe);
    let large = store.folder.path().join("large.toml");
    std::fs::File::create(&large).unwrap().set_len(3 << 30).unwrap();
    for path in [pipe.to_str().unwrap(), "/dev/zero", large.to_str().unwrap()] {
        assert_eq!(store.publish(&torchrec(), &["--policy", path]).code, 2, "{path}");
        assert_eq!(store.run(["config", "check", path]).failed(2), "usage", "{path}");
        assert_eq!(store.run(["config", "check", "--config", path]).failed(2), "usage", "{path}");
    }
}

#[test]
fn names_of_people_and_places_may_be_odd() {
    let store = Store::new();
    publish(&store, "1");
    let long = "a".repeat(100_000);
    assert_eq!(store.run(["hold", "m", "--who", &long]).failed(2), "usage");
    let hold =
        ended(store.command(["hold", "m"]).env("USER", OsStr::from_bytes(b"\xff\x1b")).output().unwrap());
    assert!(hold.succeeded()["who"].as_str().unwrap().len() < 10);
    let odd = store.folder.path().join(OsStr::from_bytes(b"odd\xff"));
    let fetch = ["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), odd.as_os_str()];
    store.run(fetch).succeeded();
    crate::fixtures::copy_folder(&torchrec(), &odd.join("checkpoint"));
    store.run(["inspect".as_ref(), odd.join("checkpoint").as_os_str()]).succeeded();
    let run = store.run(["publish", "no\u{1b}[31msuch", "--model", "m"]);
    assert!(run.failed(6) == "not_found" && !run.stderr.contains('\u{1b}'), "{run:?}");
    let elsewhere = Store::new();
    elsewhere.publish("/no/such/checkpoint".as_ref(), &[]).failed(6);
    assert!(!elsewhere.root().exists(), "a checkpoint that is not there makes no store");
}

#[test]
fn a_variable_that_is_set_to_nothing_counts_as_not_set() {
    let store = Store::new();
    let mut command = store.publish_command(&torchrec(), &[]);
    command.env("WEIGHBRIDGE_STORE", "").env("WEIGHBRIDGE_THREADS", "").env("WEIGHBRIDGE_MEMORY", "");
    ended(command.output().unwrap()).succeeded();
}

#[test]
fn mistakes_on_the_command_line_are_one_line() {
    let store = Store::new();
    for arguments in
        [&["no-such-command"][..], &["publish"], &["publish", "x", "--model", "m", "--step", "-1"]]
    {
        let run = store.run(arguments);
        assert_eq!(run.failed(2), "usage", "{arguments:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
    }
    assert!(store.run(["publish"]).stderr.contains("--model"));
}

#[test]
fn results_that_cannot_be_written_are_a_failure() {
    let store = Store::new();
    publish(&store, "1");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let run = store.command(["snapshots"]).stdout(full).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    let mut child = store.command(["snapshots"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0), "a reader that went away is no failure");
}
