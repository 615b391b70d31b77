//! The operator's commands, their exit codes and documents.

use std::process::Command;

use serde_json::Value;

use crate::binary::{self, Store, ended};
use crate::fixtures::torchrec;

/// Publishes three steps; their snapshots.
fn three(store: &Store) -> Vec<String> {
    let publish = |step: &str| {
        let published = store.publish(&torchrec(), &["--run", "r", "--step", step]).succeeded();
        assert_eq!(published["outcome"], "published");
        published["snapshot"].as_str().unwrap().to_owned()
    };
    ["1", "2", "3"].map(publish).to_vec()
}

fn points_at(store: &Store, channel: &str) -> Value {
    let listed = store.run(["channels", "m"]).succeeded();
    let channels = listed["channels"].as_array().unwrap().clone();
    channels.into_iter().find(|entry| entry["channel"] == channel).unwrap()["snapshot"].clone()
}

#[test]
fn a_rollback_does_not_go_to_what_an_earlier_one_left() {
    let store = Store::new();
    let ids = three(&store);
    // The newest was no good.
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], ids[1]);
    store.run(["release", "m"]).succeeded();
    store.publish(&torchrec(), &["--run", "r", "--step", "4"]).succeeded();
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], ids[1]);
    // Somebody found it good after all.
    store.run(["promote", &format!("m@{}", ids[2])]).succeeded();
    store.publish(&torchrec(), &["--run", "r", "--step", "5"]).succeeded();
    assert_eq!(store.run(["rollback", "m"]).succeeded()["snapshot"], ids[2]);
}

#[test]
fn a_channel_is_rolled_back_held_promoted_and_released() {
    let store = Store::new();
    let ids = three(&store);
    let older = store.publish(&torchrec(), &["--run", "r", "--step", "0"]).succeeded();
    assert_eq!(older["outcome"], "superseded");
    let other = store.publish(&torchrec(), &["--run", "other", "--step", "9"]).succeeded();
    assert_eq!(other["outcome"], "superseded", "another run takes a channel only where the policy says so");

    let back = store.run(["rollback", "m"]).succeeded();
    assert_eq!((&back["snapshot"], &back["held"]), (&Value::from(ids[1].clone()), &Value::from(true)));
    let held = store.publish(&torchrec(), &["--run", "r", "--step", "4"]).succeeded();
    assert_eq!(held["outcome"], "held");
    assert_eq!(points_at(&store, "prod"), ids[1]);
    store.run(["release", "m@prod"]).succeeded();
    let moved = store.publish(&torchrec(), &["--run", "r", "--step", "4"]).succeeded();
    assert_eq!(moved["outcome"], "published");

    store.run(["rollback", "m", "--to", &ids[0][..12]]).succeeded();
    assert_eq!(points_at(&store, "prod"), ids[0]);
    store.run(["promote", &format!("m@{}", ids[2])]).succeeded();
    let published = store.publish(&torchrec(), &["--run", "r", "--step", "5"]).succeeded();
    assert_eq!(published["outcome"], "published", "promote ends a hold");

    store.run(["hold", "m", "--channel", "prod"]).succeeded();
    let held = store.publish(&torchrec(), &["--run", "r", "--step", "6"]).succeeded();
    assert_eq!(held["outcome"], "held");
    let log = store.run(["channels", "log", "m"]).succeeded();
    let reasons: Vec<_> =
        log["entries"].as_array().unwrap().iter().rev().map(|entry| entry["reason"].clone()).collect();
    let expected = [
        "publish", "publish", "publish", "rollback", "release", "publish", "rollback", "promote", "publish",
        "hold",
    ];
    assert_eq!(reasons, expected);

    store.run(["promote", "m@prod", "--channel", "canary"]).succeeded();
    assert_eq!(points_at(&store, "canary"), published["snapshot"]);
    assert_eq!(store.fetch("m@canary").succeeded()["snapshot"], published["snapshot"]);
    store.run(["verify"]).succeeded();
}

#[test]
fn a_policy_may_let_another_run_take_the_channel() {
    let store = Store::new();
    three(&store);
    let policy = store.policy("[channel]\nname = 'prod'\nother_run = 'take'");
    let taken = store
        .publish(&torchrec(), &["--run", "other", "--step", "1", "--policy", policy.to_str().unwrap()])
        .succeeded();
    assert_eq!(taken["outcome"], "published");
}

#[test]
fn an_equal_step_with_another_snapshot_takes_the_channel() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let policy = store.policy("[channel]\nname = 'prod'");
    let newer = store.publish(&torchrec(), &["--policy", policy.to_str().unwrap()]).succeeded();
    assert_eq!((newer["outcome"].as_str(), newer["step"].as_u64()), (Some("published"), Some(0)));
}

#[test]
fn what_is_published_can_be_looked_at() {
    let store = Store::new();
    let ids = three(&store);
    let listed = store.run(["snapshots"]).succeeded();
    let listed: Vec<_> =
        listed["snapshots"].as_array().unwrap().iter().map(|row| row["snapshot"].clone()).collect();
    assert_eq!(listed, ids);
    let inspected = store.run(["inspect", "m@prod"]).succeeded();
    assert_eq!(inspected["snapshot"], ids[2]);
    let table =
        inspected["tensors"].as_array().unwrap().iter().find(|tensor| tensor["encoding"] == "int8_sbf32");
    assert_eq!(table.unwrap()["source_dtype"], "F32");
    assert_eq!(store.run(["inspect", &ids[0]]).succeeded()["step"], 1);
    let report = store.run(["report", "m"]).succeeded();
    assert_eq!((report["outcome"].as_str(), report["step"].as_u64()), (Some("passed"), Some(3)));
    assert!(report["tensors"].as_array().unwrap().iter().any(|t| t["relative_rms_error"].as_f64().is_some()));
    let version = store.run(["version"]).succeeded();
    assert_eq!(version["encoding_version"], 2);
}

#[test]
fn what_is_not_there_is_exit_code_6() {
    let store = Store::new();
    assert_eq!(store.fetch("m").failed(6), "not_found");
    assert_eq!(store.run(["verify"]).failed(6), "not_found");
    assert!(!store.root().exists(), "looking makes no store");
    assert_eq!(store.publish("/no/such/checkpoint".as_ref(), &[]).failed(6), "not_found");
    three(&store);
    for command in [
        &["fetch", "other", "--into", "x"][..],
        &["fetch", "m@nowhere", "--into", "x"],
        &["report", &"ab".repeat(32)],
        &["report", &format!("m@{}", "ab".repeat(32))],
        &["snapshots", "other"],
        &["channels", "log", "m@nowhere"],
        &["promote", &format!("m@{}", "ab".repeat(32))],
        &["rollback", "m", "--to", "abcdef"],
        &["rollback", "other"],
        &["hold", "m@nowhere"],
        &["inspect", "other"],
        &["verify", "m@nowhere"],
    ] {
        let run = store.run(command);
        assert_eq!(run.failed(6), "not_found", "{command:?}");
    }
    assert!(!store.folder.path().join("x").exists());
}

#[test]
fn what_makes_no_sense_is_exit_code_2() {
    let store = Store::new();
    let checkpoint = torchrec();
    let checkpoint = checkpoint.to_str().unwrap();
    let unknown = store.policy("[[rule]]\nmatch = '**'\nencode = 'int7'");
    let clash = store.policy("[[rule]]\nmatch = '**'\nrename = 'one'");
    for command in [
        &["publish", checkpoint, "--model", "../m"][..],
        &["publish", checkpoint, "--model", "m", "--run", "a/b"],
        &["publish", checkpoint, "--model", "m", "--channel", ".hidden"],
        &["publish", checkpoint, "--model", "m", "--step", "-1"],
        &["publish", checkpoint, "--model", "m", "--memory", "lots"],
        &["publish", checkpoint, "--model", "m", "--memory", "1MiB"],
        &["publish", checkpoint, "--model", "m", "--threads", "0"],
        &["publish", checkpoint, "--model", "m", "--policy", "/no/such/policy"],
        &["publish", checkpoint, "--model", "m", "--policy", unknown.to_str().unwrap()],
        &["publish", checkpoint, "--model", "m", "--policy", clash.to_str().unwrap()],
        &["publish", checkpoint],
        &["fetch", "m@../x", "--into", "x"],
        &["hold", "m@a", "--channel", "b"],
        &["no-such-command"],
    ] {
        let run = store.run(command);
        assert_eq!(run.code, 2, "{command:?}: {run:?}");
        assert!(run.json()["error"]["message"].is_string(), "{command:?}");
    }
    assert!(!store.root().join("models").exists());
    let run = ended(
        store
            .command(["snapshots"])
            .env("WEIGHBRIDGE_STORE", "s3://b")
            .arg("--store=s3://b")
            .output()
            .unwrap(),
    );
    assert_eq!(run.code, 2, "{run:?}");
}

#[test]
fn the_store_comes_from_option_variable_configuration_or_default() {
    let store = Store::new();
    let folder = store.folder.path();
    let publish = |configure: &dyn Fn(&mut Command)| {
        let mut command = Command::new(binary::path());
        command.arg("publish").arg(torchrec()).args(["--model", "m"]).current_dir(folder);
        command.env_remove("WEIGHBRIDGE_STORE").env_remove("WEIGHBRIDGE_CONFIG");
        configure(&mut command);
        let run = ended(command.output().unwrap());
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stdout.is_empty() && run.stderr.contains("published"), "{run:?}");
    };
    publish(&|_| {});
    assert!(folder.join("weighbridge-data/store/models/m").is_dir());
    std::fs::write(folder.join("weighbridge.toml"), "store = 'configured'").unwrap();
    publish(&|_| {});
    assert!(folder.join("configured/models/m").is_dir());
    publish(&|command| {
        command.env("WEIGHBRIDGE_STORE", "variable");
    });
    assert!(folder.join("variable/models/m").is_dir());
    publish(&|command| {
        command.env("WEIGHBRIDGE_STORE", "variable").arg("--store");
        command.arg(format!("file://{}", folder.join("option").display()));
    });
    assert!(folder.join("option/models/m").is_dir());
}

#[test]
fn a_command_of_the_store_says_so_where_an_api_is_named() {
    let store = Store::new();
    let mut command = store.command(["rollback", "m"]);
    let run = ended(command.env("WEIGHBRIDGE_API", "https://example.org").output().unwrap());
    assert_eq!(run.failed(6), "not_found");
    assert!(run.stderr.contains("the store itself") && run.stderr.contains("docs/api.md"), "{run:?}");
    let run = store.run(["rollback", "m"]);
    assert!(run.failed(6) == "not_found" && !run.stderr.contains("docs/api.md"), "{run:?}");
}

#[test]
fn whoever_has_no_name_has_a_number() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let hold = |user: Option<&str>, model: &str| {
        let mut command = store.command([model, "m"]);
        command.env_remove("USER").env_remove("LOGNAME").envs(user.map(|user| ("LOGNAME", user)));
        ended(command.output().unwrap()).succeeded();
        store.run(["channels", "log", "m"]).succeeded()["entries"][0]["who"].clone()
    };
    let number = hold(None, "hold");
    assert!(number.as_str().unwrap().starts_with("uid "), "{number}");
    assert_eq!(hold(Some("ada"), "release"), "ada");
}

#[test]
fn configuration_and_policies_are_checked() {
    let store = Store::new();
    let good = store.policy("");
    let bad = store.policy("[[rule]]\nmatch = '**'\nencod = 'f16'");
    let checked = store.run(["config", "check", good.to_str().unwrap()]).succeeded();
    assert_eq!(checked["checked"][0]["kind"], "policy");
    let run = store.run(["config", "check", bad.to_str().unwrap()]);
    assert_eq!(run.failed(2), "bad_document");
    assert!(run.stderr.contains("encod"), "{run:?}");
    let config = store.folder.path().join("weighbridge.toml");
    std::fs::write(&config, "store = 'x'\n").unwrap();
    assert_eq!(store.run(["config", "check"]).succeeded()["checked"][0]["kind"], "configuration");
    std::fs::write(&config, "[client]\ntoken_file = 'absent'\nca = 'weighbridge.toml'\n").unwrap();
    let run = store.run(["config", "check"]);
    assert!(run.stderr.contains("token_file absent is not there"), "{run:?}");
    assert_eq!(run.succeeded()["checked"][0]["missing"], serde_json::json!(["[client] token_file absent"]));
    std::fs::write(&config, "stoer = 'x'\n").unwrap();
    assert_eq!(store.run(["config", "check"]).failed(2), "usage");
    std::fs::remove_file(config).unwrap();
    let shown = store.run(["config", "default-policy"]).succeeded();
    let path = store.folder.path().join("default.toml");
    std::fs::write(&path, shown["policy"].as_str().unwrap()).unwrap();
    store.run(["config".as_ref(), "check".as_ref(), path.as_os_str()]).succeeded();
}

#[test]
fn completions_are_written_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let run = ended(Command::new(binary::path()).args(["completions", shell]).output().unwrap());
        assert!(run.code == 0 && run.stdout.contains("rollback"), "{shell}");
    }
}

#[test]
fn without_syncing_the_same_is_published_and_fetched() {
    let synced = Store::new().publish(&torchrec(), &[]).succeeded();
    let store = Store::new();
    let published = store.publish(&torchrec(), &["--no-sync"]).succeeded();
    assert_eq!(published["snapshot"], synced["snapshot"]);
    let mut fetch = store.fetch_command("m");
    let fetched = ended(fetch.env("WEIGHBRIDGE_NO_SYNC", "true").output().unwrap()).succeeded();
    assert_eq!(fetched["snapshot"], synced["snapshot"]);
    store.run(["verify"]).succeeded();
    let again = store.publish(&torchrec(), &["--no-sync=false"]).succeeded();
    assert_eq!((&again["outcome"], &again["bytes_stored"]), (&Value::from("unchanged"), &Value::from(0)));

    let wrong = store.publish(&torchrec(), &["--no-sync=perhaps"]);
    assert_eq!(wrong.failed(2), "usage");
    assert!(wrong.stderr.contains("neither true nor false"), "{wrong:?}");
    let mut variable = store.publish_command(&torchrec(), &[]);
    let unset = ended(variable.env("WEIGHBRIDGE_NO_SYNC", "").output().unwrap());
    assert_eq!(unset.succeeded()["outcome"], "unchanged");
}

/// The commands, in the order of the reference.
const COMMANDS: &[&[&str]] = &[
    &[],
    &["publish"],
    &["drop"],
    &["spool"],
    &["spool", "drain"],
    &["spool", "retry"],
    &["worker"],
    &["serve"],
    &["jobs"],
    &["jobs", "show"],
    &["jobs", "wait"],
    &["jobs", "cancel"],
    &["jobs", "resume"],
    &["republish"],
    &["dead"],
    &["dead", "show"],
    &["dead", "requeue"],
    &["dead", "discard"],
    &["queue"],
    &["queue", "status"],
    &["policy"],
    &["policy", "put"],
    &["policy", "get"],
    &["policy", "list"],
    &["fetch"],
    &["fleet"],
    &["inspect"],
    &["report"],
    &["snapshots"],
    &["channels"],
    &["channels", "log"],
    &["promote"],
    &["rollback"],
    &["hold"],
    &["release"],
    &["pin"],
    &["unpin"],
    &["gc"],
    &["verify"],
    &["store"],
    &["store", "check"],
    &["sign"],
    &["keys"],
    &["keys", "generate"],
    &["keys", "show"],
    &["token"],
    &["token", "new"],
    &["token", "list"],
    &["token", "revoke"],
    &["config"],
    &["config", "check"],
    &["config", "default-policy"],
    &["completions"],
    &["version"],
];

/// Whoever adds a command adds it to the reference.
#[test]
fn every_command_is_in_the_reference() {
    let mut found = vec![(Vec::new(), weighbridge::cli::definition())];
    while let Some((path, command)) = found.pop() {
        let path: Vec<String> = path;
        assert!(COMMANDS.iter().any(|listed| path.iter().eq(listed.iter())), "{path:?} is missing");
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            let path = path.iter().cloned().chain([below.get_name().to_owned()]).collect();
            found.push((path, below.clone()));
        }
    }
}

/// Every flag and word of `--help`, so that none changes unseen. `UPDATE_HELP=1` writes the file anew.
#[test]
fn the_command_line_is_what_the_reference_says() {
    let mut text =
        String::from("# The command line\n\nWhat `--help` prints, command by command; checked by a test.\n");
    for command in COMMANDS {
        let mut help = Command::new(binary::path());
        help.args(*command).arg("--help").env("COLUMNS", "100");
        help.env_remove("WEIGHBRIDGE_QUEUE");
        help.env_remove("WEIGHBRIDGE_SIGNING_KEYS").env_remove("WEIGHBRIDGE_REQUIRE_SIGNED_BY");
        help.env_remove("WEIGHBRIDGE_STORE").env_remove("WEIGHBRIDGE_CONFIG").env_remove("WEIGHBRIDGE_LOG");
        let run = ended(help.output().unwrap());
        assert_eq!(run.code, 0);
        let name = ["weighbridge"].iter().chain(*command).copied().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = run.stdout.lines().map(str::trim_end).collect();
        text.push_str(&format!("\n## {name}\n\n```text\n{}\n```\n", lines.join("\n")));
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/command-line.md");
    if std::env::var_os("UPDATE_HELP").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let reference = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        reference == text,
        "docs/command-line.md has drifted; run the tests with UPDATE_HELP=1 and look at the diff"
    );
}
