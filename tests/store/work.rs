//! Publishing by a queue and workers into a store at every place.

use serde_json::{Value, json};
use weighbridge_tests::synthetic;

use crate::binary::{spawn, wait};
use crate::fixtures::{copy_folder, torchrec};
use crate::places::everywhere;
use crate::queued::{drop_bytes, drop_manifest, queue, work};

#[test]
fn a_dropped_checkpoint_is_published_and_published_again() {
    everywhere(|house| {
        let store = &house.store;
        let torchrec = torchrec();
        let place = torchrec.to_str().unwrap();
        let dropped = store.run(["drop", place, "--model", "m", "--run", "r", "--step", "1"]).succeeded();
        let job = dropped["id"].as_str().or(dropped["job"].as_str()).unwrap().to_owned();
        work(store);
        let waited = store.run(["jobs", "wait", &job]).succeeded();
        assert_eq!(waited["outcome"], "published");
        assert_eq!(store.run(["jobs"]).succeeded()["jobs"][0]["state"], "published");
        let shown = store.run(["jobs", "show", &job]).succeeded();
        assert_eq!(
            (&shown["plan"]["percent_done"], &shown["decision"]["decision"]),
            (&json!(100), &json!("proceed"))
        );
        let sent = store.run(["republish", "m", "--step", "1"]).succeeded();
        work(store);
        let again = store.run(["jobs", "wait", sent["job"].as_str().unwrap()]).succeeded();
        assert_eq!((&again["outcome"], &again["snapshot"]), (&json!("unchanged"), &waited["snapshot"]));
        assert_eq!(store.fetch("m").succeeded()["snapshot"], waited["snapshot"]);
        store.run(["verify"]).succeeded();
    });
}

#[test]
fn two_workers_share_the_parts_of_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    synthetic(&file, 4, 60_000, 64);
    let wanted = std::cell::OnceCell::new();
    everywhere(|house| {
        let store = &house.store;
        let queue = queue(store);
        let job = drop_manifest(&*queue, "m", "r", 1, &file, json!({}));
        let worker = || {
            let arguments = ["worker", "--until-empty", "--threads", "1", "--part-size", "16MiB"];
            spawn(store.command(arguments))
        };
        let workers = [worker(), worker()];
        for run in workers.map(wait) {
            assert_eq!(run.code, 0, "{run:?}");
        }
        let waited = store.run(["jobs", "wait", &job]).succeeded();
        assert_eq!(waited["outcome"], "published");
        let parts = house.keys(&format!("models/m/jobs/{job}/parts")).len();
        assert!(parts > 1, "{parts} parts");
        // What is stored is the same whoever made it.
        assert_eq!(wanted.get_or_init(|| waited["snapshot"].clone()), &waited["snapshot"]);
        store.fetch("m").succeeded();
        store.run(["verify"]).succeeded();
    });
}

#[test]
fn jobs_that_end_badly_say_why_and_letters_are_queued_again() {
    everywhere(|house| {
        let store = &house.store;
        let queue = queue(store);
        let strict = "schema = 'weighbridge.policy/v1'\n[[rule]]\nmatch = '**'\nencode = 'int8'\n\
                      [gates]\nmax_rms_error = 1e-9";
        let strict = json!({ "policy": { "toml": strict } });
        let rejected = drop_manifest(&*queue, "m", "r", 1, &torchrec(), strict);
        work(store);
        let impatient = "schema = 'weighbridge.policy/v1'\n[job]\ngrace_seconds = 0\n";
        let impatient = json!({ "policy": { "toml": impatient } });
        let place = store.folder.path().join("later");
        let absent = drop_manifest(&*queue, "m", "r", 7, &place, impatient);
        drop_bytes(&*queue, "one", b"\x1b[2J{");
        work(store);
        store.run(["jobs", "wait", &rejected]).failed(3);
        assert_eq!(store.run(["jobs", "wait", &absent]).failed(4), "not_found");
        let dead = store.run(["dead"]).succeeded();
        assert_eq!(dead["dead"].as_array().unwrap().len(), 2, "{dead}");
        let other = |letter: &&Value| letter["id"] != json!(absent);
        let other = dead["dead"].as_array().unwrap().iter().find(other).unwrap()["id"].as_str().unwrap();
        store.run(["dead", "discard", other]).succeeded();
        copy_folder(&torchrec(), &place);
        let requeued = store.run(["dead", "requeue", &absent]).succeeded();
        work(store);
        let again = requeued["requeued"][0]["job"].as_str().unwrap();
        assert_eq!(store.run(["jobs", "wait", again]).succeeded()["outcome"], "published");
        assert_eq!(store.run(["dead"]).succeeded()["dead"], json!([]));
        assert_eq!(house.keys("dead").len(), 4, "two letters, and what became of them");
        store.run(["verify"]).succeeded();
    });
}
