//! Signed snapshots and channel entries: what a host that demands a signature takes, and what it refuses.

use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::binary::{Run, Store, ended};
use crate::fixtures::torchrec;
use crate::queued::{drop_manifest, queue, work};

/// Makes a key pair; the private key's file, and the public key as text.
fn key(store: &Store, name: &str) -> (String, String) {
    let file = store.folder.path().join(name);
    let file = file.to_str().unwrap().to_owned();
    let made = store.run(["keys", "generate", &file]).succeeded();
    assert_eq!(made["public"], format!("{file}.pub"));
    assert_eq!(store.run(["keys", "show", &file]).succeeded()["key"], made["key"]);
    assert_eq!(store.run(["keys", "show", &format!("{file}.pub")]).succeeded()["id"], made["id"]);
    (file, made["key"].as_str().unwrap().to_owned())
}

/// Publishes a step; its snapshot.
fn publish(store: &Store, step: &str, keys: &[&str]) -> String {
    let mut more = vec!["--run", "r", "--step", step];
    more.extend(keys.iter().flat_map(|key| ["--signing-key", key]));
    let published = store.publish(&torchrec(), &more).succeeded();
    assert_eq!(published["outcome"], "published");
    published["snapshot"].as_str().unwrap().to_owned()
}

fn fetch(store: &Store, reference: &str, key: &str) -> Run {
    ended(store.fetch_command(reference).args(["--require-signed-by", key]).output().unwrap())
}

/// A fetch that is refused, and leaves nothing that a server would open; what it says.
#[track_caller]
fn refused(store: &Store, reference: &str, key: &str) -> String {
    let run = fetch(store, reference, key);
    assert_eq!(run.failed(7), "integrity");
    let served = store.served();
    assert!(!served.join("current").exists(), "{run:?}");
    let versions = std::fs::read_dir(served.join("versions")).map_or(0, Iterator::count);
    assert_eq!(versions, 0, "{run:?}");
    run.stderr
}

fn entry(store: &Store, channel: &str, sequence: u64) -> PathBuf {
    store.root().join(format!("models/m/channels/{channel}/{sequence:012}"))
}

fn envelope(store: &Store, snapshot: &str) -> PathBuf {
    store.root().join(format!("models/m/snapshots/{snapshot}.signatures"))
}

#[test]
fn a_host_takes_what_its_key_signed_and_nothing_else() {
    let store = Store::new();
    let ((file, text), (_, other)) = (key(&store, "a"), key(&store, "b"));
    let id = publish(&store, "1", &[&file]);
    let said = refused(&store, "m", &other);
    assert!(said.contains("weighbridge promote m@"), "{said}");
    let said = refused(&store, &format!("m@{id}"), &other);
    assert!(said.contains("weighbridge sign m@"), "{said}");
    assert_eq!(fetch(&store, "m", &text).succeeded()["snapshot"], *id);
    assert_eq!(fetch(&store, &id, &format!("{file}.pub")).succeeded()["snapshot"], *id);
    assert_eq!(fetch(&store, "m@prod", &format!("{other},{text}")).succeeded()["bytes_read"], 0);
    store.fetch("m").succeeded();

    let verified = store.run(["verify", "--require-signed-by", &text]).succeeded();
    assert_eq!(verified["signed"], serde_json::json!({ "snapshots": 1, "channels": 1 }));
    let verified = store.run(["verify", "m@prod", "--require-signed-by", &text]).succeeded();
    assert_eq!(verified["signed"]["snapshots"], 1);
    let verified = store.run(["verify", "--require-signed-by", &other]);
    assert_eq!(verified.failed(7), "integrity");
    assert_eq!(verified.json()["problems"].as_array().unwrap().len(), 2);
    assert_eq!(store.run(["verify"]).succeeded()["signed"], Value::Null);

    // The same checkpoint again adds nothing, and is the same snapshot as without a signature.
    let before = store.lasting_objects("models");
    let again =
        store.publish(&torchrec(), &["--run", "r", "--step", "1", "--signing-key", &file]).succeeded();
    assert_eq!((&again["outcome"], &again["snapshot"]), (&"unchanged".into(), &id.clone().into()));
    assert_eq!(store.lasting_objects("models"), before);
    let unsigned = Store::new();
    assert_eq!(publish(&unsigned, "1", &[]), id);
    assert!(!envelope(&unsigned, &id).exists());
}

#[test]
fn keys_come_from_option_variable_or_configuration_and_bad_ones_are_usage() {
    let store = Store::new();
    let ((file, text), (_, other)) = (key(&store, "a"), key(&store, "b"));
    let config = store.folder.path().join("weighbridge.toml");
    std::fs::write(&config, format!("[signing]\nkeys = ['a']\nrequire = ['{text}']\n")).unwrap();
    let id = publish(&store, "1", &[]);
    assert!(envelope(&store, &id).exists());
    store.fetch("m").succeeded();
    let mut command = store.fetch_command("m");
    let by_variable = ended(command.env("WEIGHBRIDGE_REQUIRE_SIGNED_BY", &other).output().unwrap());
    assert_eq!(by_variable.failed(7), "integrity");
    fetch(&store, "m", &text).succeeded();
    std::fs::remove_file(&config).unwrap();

    let worker =
        store.run(["drop", torchrec().to_str().unwrap(), "--model", "m", "--run", "r", "--step", "2"]);
    worker.succeeded();
    let mut worker = store.command(["worker", "--until-empty"]);
    ended(worker.env("WEIGHBRIDGE_SIGNING_KEYS", &file).output().unwrap()).succeeded();
    assert_eq!(fetch(&store, "m", &text).succeeded()["model"], "m");

    let exposed = store.folder.path().join("exposed");
    std::fs::copy(&file, &exposed).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&exposed, mode).unwrap();
    let exposed = exposed.to_str().unwrap();
    for (command, word) in [
        (vec!["hold", "m", "--signing-key", exposed], "chmod 600"),
        (vec!["hold", "m", "--signing-key", "absent"], "absent"),
        (vec!["hold", "m", "--signing-key", "a.pub"], "private key"),
        (vec!["sign", "m"], "--signing-key"),
        (vec!["verify", "--require-signed-by", "absent"], "absent"),
        (vec!["verify", "--require-signed-by", "a"], "public key"),
        (vec!["verify", "--require-signed-by", "ed25519:0123456789abcdef"], "stands for a key"),
        (vec!["keys", "generate", "a"], "never overwritten"),
        (vec!["keys", "show", "absent"], "absent"),
        (vec!["verify", "--require-signed-by", ""], "names no key"),
        (vec!["verify", "--require-signed-by", ","], "names no key"),
        (vec!["verify", "--require-signed-by", &text, "--require-signed-by="], "names no key"),
        (vec!["fetch", "m", "--into", "elsewhere", "--require-signed-by", ""], "names no key"),
        (vec!["hold", "m", "--signing-key", ""], "names no key"),
        (vec!["hold", "m", "--signing-key", ":"], "names no key"),
    ] {
        let run = store.run(&command);
        assert!(["bad_key", "usage"].contains(&&*run.failed(2)), "{command:?}");
        assert!(run.stderr.contains(word) && !run.stderr.contains("BEGIN"), "{run:?}");
    }
    // A variable that is set to nothing is not set; one of separators alone is a mistake.
    let by_variable = |variable: &str, value: &str| {
        let command = if variable.ends_with("KEYS") { ["hold", "m"] } else { ["verify", "m@prod"] };
        ended(store.command(command).env(variable, value).output().unwrap())
    };
    for (variable, separator) in [("WEIGHBRIDGE_SIGNING_KEYS", ":"), ("WEIGHBRIDGE_REQUIRE_SIGNED_BY", ",")] {
        by_variable(variable, "").succeeded();
        assert_eq!(by_variable(variable, separator).failed(2), "usage");
    }
}

#[test]
fn nothing_that_was_altered_copied_or_left_unsigned_is_taken() {
    let store = Store::new();
    let (file, text) = key(&store, "a");
    let first = publish(&store, "1", &[&file]);
    let second = publish(&store, "2", &[&file]);
    let elsewhere = store.publish(&torchrec(), &["--run", "r", "--step", "1", "--channel", "canary"]);
    assert_eq!(elsewhere.succeeded()["outcome"], "published", "nobody signed this entry");
    refused(&store, "m@canary", &text);

    let place = entry(&store, "prod", 2);
    let right = std::fs::read_to_string(&place).unwrap();
    for (from, to) in [("\"step\":2", "\"step\":3"), (&*second, &*first), ("\"publish\"", "\"promote\"")] {
        let altered = right.replace(from, to);
        assert_ne!(altered, right);
        std::fs::write(&place, altered).unwrap();
        refused(&store, "m", &text);
    }
    // The first entry again, as the second: an old state played back.
    std::fs::copy(entry(&store, "prod", 1), &place).unwrap();
    refused(&store, "m", &text);
    std::fs::write(&place, &right).unwrap();
    // An entry that was signed for one channel, on another.
    std::fs::copy(entry(&store, "prod", 1), entry(&store, "canary", 1)).unwrap();
    store.run(["inspect", "m@canary"]).succeeded();
    refused(&store, "m@canary", &text);

    let manifest = store.root().join("models/m/snapshots").join(&second);
    let whole = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, whole.replace("\"step\":2", "\"step\":3")).unwrap();
    refused(&store, "m", &text);
    std::fs::write(&manifest, whole).unwrap();

    let signed = std::fs::read(envelope(&store, &second)).unwrap();
    std::fs::copy(envelope(&store, &first), envelope(&store, &second)).unwrap();
    assert!(refused(&store, "m", &text).contains("something else"));
    std::fs::write(envelope(&store, &second), "rubbish").unwrap();
    let run = fetch(&store, "m", &text);
    assert_eq!(run.code, 7, "{run:?}");
    assert!(run.stderr.contains("passed over"), "{run:?}");
    std::fs::remove_file(envelope(&store, &second)).unwrap();
    refused(&store, "m", &text);
    std::fs::write(envelope(&store, &second), signed).unwrap();
    // A verdict that nobody signed.
    let judged = store.root().join(format!("models/m/snapshots/{second}.report"));
    let report = std::fs::read_to_string(&judged).unwrap();
    std::fs::write(&judged, report.replace("\"dropped\": [", "\"dropped\": [\n    \"x.y\",")).unwrap();
    let promote = ["promote", "m@prod", "--channel", "next", "--require-signed-by", &text];
    assert_eq!(store.run(promote).failed(7), "integrity");
    std::fs::write(&judged, report).unwrap();
    store.run(promote).succeeded();
    assert_eq!(fetch(&store, "m", &text).succeeded()["snapshot"], *second);
}

#[test]
fn signing_begins_late_and_a_key_is_followed_by_another() {
    let store = Store::new();
    let ((old, old_text), (new, new_text)) = (key(&store, "old"), key(&store, "new"));
    let first = publish(&store, "1", &[]);
    let second = publish(&store, "2", &[]);
    refused(&store, "m", &old_text);
    // It begins: what rules is signed, and written anew.
    let demand = ["--require-signed-by", &old_text, "--signing-key", &old];
    let run = |command: &[&str]| store.run(command.iter().chain(&demand));
    assert_eq!(run(&["release", "m"]).failed(7), "integrity", "what nobody signed is not signed in passing");
    assert_eq!(run(&["promote", &format!("m@{second}")]).failed(7), "integrity");
    let signed = store.run(["sign", &format!("m@{second}"), "--signing-key", &old]).succeeded();
    assert_eq!((&signed["written"], &signed["envelope"]), (&true.into(), &1.into()));
    run(&["promote", &format!("m@{second}")]).succeeded();
    assert_eq!(fetch(&store, "m", &old_text).succeeded()["snapshot"], *second);
    let log = store.run(["channels", "log", "m"]).succeeded();
    assert_eq!(log["entries"].as_array().unwrap().len(), 3, "looking demands nothing");

    let third = publish(&store, "3", &[&old]);
    let fourth = publish(&store, "4", &[&old]);
    let back = run(&["rollback", "m"]).succeeded();
    assert_eq!(back["snapshot"], *third);
    let back = run(&["rollback", "m"]).succeeded();
    assert_eq!(back["snapshot"], *second);
    let none = run(&["rollback", "m"]);
    assert_eq!(none.failed(6), "not_found", "the first was never signed");
    assert!(none.stderr.contains("signed as demanded"), "{none:?}");
    assert_eq!(run(&["rollback", "m", "--to", &first]).failed(7), "integrity");
    run(&["promote", &format!("m@{fourth}")]).succeeded();

    // Rotation: hosts trust both, both sign, hosts trust the new one alone.
    let fifth = publish(&store, "5", &[&old, &new]);
    for text in [&old_text, &new_text] {
        assert_eq!(fetch(&store, "m", text).succeeded()["snapshot"], *fifth);
    }
    let sixth = publish(&store, "6", &[&new]);
    assert_eq!(fetch(&store, "m", &format!("{old_text},{new_text}")).succeeded()["snapshot"], *sixth);
    assert_eq!(fetch(&store, "m", &old_text).failed(7), "integrity");
    assert_eq!(fetch(&store, &fourth, &new_text).failed(7), "integrity");
    let signed = store.run(["sign", &fourth, "--signing-key", &format!("{old}:{new}")]).succeeded();
    assert_eq!((&signed["written"], &signed["envelope"]), (&true.into(), &2.into()));
    fetch(&store, &fourth, &new_text).succeeded();
    let again = store.run(["sign", &fourth, "--signing-key", &new]).succeeded();
    assert_eq!((&again["written"], &again["envelope"]), (&false.into(), &2.into()));
    assert_eq!(store.run(["snapshots"]).succeeded()["snapshots"].as_array().unwrap().len(), 6);
    store.run(["verify"]).succeeded();
}

#[test]
fn a_part_that_a_stranger_wrote_is_not_sealed_and_an_honest_one_is() {
    let (store, elsewhere) = (Store::new(), Store::new());
    let (file, text) = key(&store, "a");
    let job = |store: &Store, step| {
        drop_manifest(&*queue(store), "m", "r", step, &torchrec(), serde_json::json!({}))
    };
    let part =
        |store: &Store, job: &str| store.root().join(format!("models/m/jobs/{job}/parts/000000000001"));
    let worker = || {
        let mut worker = store.command(["worker", "--until-empty", "--threads", "2", "--signing-key", &file]);
        ended(worker.args(["--require-signed-by", &text]).output().unwrap())
    };
    // The same checkpoint in a store of the attacker's own; a chunk of it is exchanged.
    let theirs = job(&elsewhere, 1);
    work(&elsewhere);
    let made = std::fs::read_to_string(part(&elsewhere, &theirs)).unwrap();
    assert!(!made.contains("signatures"), "without keys nothing changes");
    let mut forged: Value = serde_json::from_str(&made).unwrap();
    let chunk = &mut forged["chunks"][0]["chunk"];
    let bytes = vec![0x41; usize::try_from(chunk["size"].as_u64().unwrap()).unwrap()];
    chunk["id"] = blake3::hash(&bytes).to_hex().as_str().into();
    let victim = job(&store, 1);
    std::fs::create_dir_all(part(&store, &victim).parent().unwrap()).unwrap();
    std::fs::write(part(&store, &victim), forged.to_string()).unwrap();
    let run = worker();
    assert!(run.stderr.contains("no key that this worker signs with or trusts"), "{run:?}");
    assert!(run.stderr.contains(&format!("weighbridge republish m --job {victim}")), "{run:?}");
    assert!(!store.root().join("models/m/channels").exists(), "{run:?}");
    assert!(!store.root().join("models/m/snapshots").exists(), "nothing is signed");

    let honest = job(&store, 2);
    let run = worker();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(std::fs::read_to_string(part(&store, &honest)).unwrap().contains("signatures"));
    fetch(&store, "m", &text).succeeded();
}

#[test]
fn a_publish_that_demands_goes_by_nothing_unsigned() {
    let store = Store::new();
    let ((file, text), (other, other_text)) = (key(&store, "a"), key(&store, "b"));
    let first = publish(&store, "1", &[]);
    let demand = ["--signing-key", &file, "--require-signed-by", &text];
    let demanding = |step: &str| {
        let step = ["--run", "r", "--step", step];
        store.publish(&torchrec(), &[&step[..], &demand].concat())
    };
    let refused = demanding("2");
    assert_eq!(refused.failed(7), "integrity");
    let promote = format!("weighbridge promote m@{first} --channel prod");
    assert!(refused.stderr.contains(&promote) && refused.stderr.contains("publish again"), "{refused:?}");
    let run = |command: &[&str]| store.run(command.iter().chain(&demand));
    assert_eq!(run(&["sign", &first]).failed(7), "integrity", "nobody has signed it");
    store.run(["sign", &first, "--signing-key", &file]).succeeded();
    run(&["promote", &format!("m@{first}")]).succeeded();
    assert_eq!(demanding("2").succeeded()["outcome"], "published");
    let second = ["sign", "m@prod", "--signing-key", &other, "--require-signed-by", &text];
    assert_eq!(store.run(second).succeeded()["written"], true, "another key follows");

    // Whoever would refuse their own work is told before it begins.
    for keys in
        [&["--require-signed-by", &text][..], &["--require-signed-by", &other_text, "--signing-key", &file]]
    {
        let more = [&["--run", "r", "--step", "3"], keys].concat();
        assert_eq!(store.publish(&torchrec(), &more).failed(2), "usage");
        assert_eq!(store.run([&["worker", "--until-empty"], keys].concat()).failed(2), "usage");
    }
}

/// What `openssl` says, if it is there.
fn openssl(folder: &Path, arguments: &[&str]) -> Option<Run> {
    match Command::new("openssl").args(arguments).current_dir(folder).output() {
        Ok(output) => Some(ended(output)),
        Err(_) => {
            println!(
                "SKIPPED: openssl is not installed, so signatures were not looked at by another program"
            );
            None
        }
    }
}

fn pre_authentication(payload_type: &str, body: &[u8]) -> Vec<u8> {
    [format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), body.len()).as_bytes(), body].concat()
}

#[test]
fn openssl_makes_keys_for_us_and_verifies_what_they_signed() {
    let store = Store::new();
    let folder = store.folder.path();
    let Some(made) = openssl(folder, &["genpkey", "-algorithm", "ed25519", "-out", "a"]) else { return };
    assert_eq!(made.code, 0, "{made:?}");
    let run = |arguments: &[&str]| openssl(folder, arguments).unwrap();
    assert_eq!(run(&["pkey", "-in", "a", "-pubout", "-out", "a.pub"]).code, 0);
    // And it reads ours.
    key(&store, "b");
    let public = run(&["pkey", "-in", "b", "-pubout"]);
    assert_eq!(public.stdout, std::fs::read_to_string(folder.join("b.pub")).unwrap(), "{public:?}");

    let id = publish(&store, "1", &["a"]);
    fetch(&store, "m", "a.pub").succeeded();
    let verify = |message: &[u8], signature: &Value, key: &str| {
        std::fs::write(folder.join("message"), message).unwrap();
        let signature = STANDARD.decode(signature["sig"].as_str().unwrap()).unwrap();
        std::fs::write(folder.join("signature"), signature).unwrap();
        let verify = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", key];
        run(&[&verify[..], &["-in", "message", "-sigfile", "signature"]].concat()).code == 0
    };
    let document: Value = serde_json::from_slice(&std::fs::read(envelope(&store, &id)).unwrap()).unwrap();
    assert_eq!(document["payloadType"], "application/vnd.in-toto+json");
    let payload = STANDARD.decode(document["payload"].as_str().unwrap()).unwrap();
    let statement: Value = serde_json::from_slice(&payload).unwrap();
    let manifest = std::fs::read(store.root().join("models/m/snapshots").join(&id)).unwrap();
    assert_eq!(statement["subject"][0]["digest"]["blake3"], *blake3::hash(&manifest).to_hex());
    let report = std::fs::read(store.root().join(format!("models/m/snapshots/{id}.report"))).unwrap();
    assert_eq!(statement["predicate"]["report"], *blake3::hash(&report).to_hex());
    let message = pre_authentication("application/vnd.in-toto+json", &payload);
    assert!(verify(&message, &document["signatures"][0], "a.pub"));
    assert!(!verify(&message, &document["signatures"][0], "b.pub"));

    let mut entry: Value = serde_json::from_slice(&std::fs::read(entry(&store, "prod", 1)).unwrap()).unwrap();
    let signatures = entry.as_object_mut().unwrap().remove("signatures").unwrap();
    let body = serde_json::json!({ "channel": "prod", "entry": entry, "model": "m" }).to_string();
    let message = pre_authentication("application/vnd.weighbridge.channel-entry.v1+json", body.as_bytes());
    assert!(verify(&message, &signatures[0], "a.pub"));
}
