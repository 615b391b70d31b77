//! What an operator does with channels, snapshots and policies, wherever the store lies.

use serde_json::{Value, json};

use crate::fixtures::torchrec;
use crate::places::{House, everywhere};

/// Publishes a step; its outcome and snapshot.
fn publish(house: &House, step: u32, more: &[&str]) -> (String, String) {
    let step = step.to_string();
    let arguments = [&["--step", step.as_str()], more].concat();
    let published = house.store.publish(&torchrec(), &arguments).succeeded();
    let text = |field: &str| published[field].as_str().unwrap().to_owned();
    (text("outcome"), text("snapshot"))
}

#[test]
fn a_channel_is_moved_held_released_and_rolled_back() {
    everywhere(|house| {
        let store = &house.store;
        let ids: Vec<_> = (1..=3).map(|step| publish(house, step, &["--run", "r"]).1).collect();
        assert_eq!(publish(house, 0, &["--run", "r"]).0, "superseded");
        assert_eq!(publish(house, 9, &["--run", "other"]).0, "superseded");
        let back = store.run(["rollback", "m"]).succeeded();
        assert_eq!((&back["snapshot"], &back["held"]), (&json!(ids[1]), &json!(true)));
        assert_eq!(publish(house, 4, &["--run", "r"]).0, "held");
        store.run(["release", "m@prod"]).succeeded();
        assert_eq!(publish(house, 4, &["--run", "r"]).0, "published");
        store.run(["rollback", "m", "--to", &ids[0][..12]]).succeeded();
        store.run(["promote", &format!("m@{}", ids[2])]).succeeded();
        store.run(["hold", "m", "--channel", "prod"]).succeeded();
        let log = store.run(["channels", "log", "m"]).succeeded();
        let reasons: Vec<_> =
            log["entries"].as_array().unwrap().iter().rev().map(|entry| entry["reason"].clone()).collect();
        let expected = [
            "publish", "publish", "publish", "rollback", "release", "publish", "rollback", "promote", "hold",
        ];
        assert_eq!(reasons, expected);
        assert_eq!(house.keys("models/m/channels/prod").len(), expected.len() + 1, "the entries and a hint");
        store.run(["promote", "m@prod", "--channel", "canary"]).succeeded();
        assert_eq!(store.fetch("m@canary").succeeded()["snapshot"], ids[2]);
        store.run(["verify"]).succeeded();
    });
}

#[test]
fn what_is_published_can_be_looked_at() {
    everywhere(|house| {
        let store = &house.store;
        assert_eq!(store.fetch("m").failed(6), "not_found");
        let (_, id) = publish(house, 1, &[]);
        assert_eq!(store.run(["snapshots"]).succeeded()["snapshots"][0]["snapshot"], json!(id));
        let inspected = store.run(["inspect", "m@prod"]).succeeded();
        assert_eq!((&inspected["snapshot"], &inspected["step"]), (&json!(id), &json!(1)));
        let tensors = inspected["tensors"].as_array().unwrap();
        assert!(tensors.iter().any(|tensor| tensor["encoding"] == "int8_sbf32"));
        let report = store.run(["report", "m"]).succeeded();
        assert_eq!((&report["outcome"], &report["step"]), (&json!("passed"), &json!(1)));
        assert_eq!(store.run(["verify", &format!("m@{id}")]).succeeded()["problems"], json!([]));
        for command in [
            &["fetch", "m@nowhere", "--into", "x"][..],
            &["snapshots", "other"],
            &["inspect", "other"],
            &["rollback", "m", "--to", "abcdef"],
        ] {
            assert_eq!(store.run(command).failed(6), "not_found", "{command:?}");
        }
    });
}

#[test]
fn a_snapshot_that_a_gate_rejects_is_stored_and_on_no_channel() {
    everywhere(|house| {
        let store = &house.store;
        let (_, good) = publish(house, 1, &[]);
        let strict = store.policy("[[rule]]\nmatch = '**'\nencode = 'int8'\n[gates]\nmax_rms_error = 1e-9");
        let rejected = store.publish(&torchrec(), &["--step", "2", "--policy", strict.to_str().unwrap()]);
        rejected.failed(3);
        let bad = rejected.json()["snapshot"].clone();
        assert_eq!(store.fetch("m").succeeded()["snapshot"], json!(good));
        let named = format!("m@{}", bad.as_str().unwrap());
        assert_eq!(store.fetch(&named).succeeded()["snapshot"], bad);
        assert_eq!(store.run(["report", &named]).succeeded()["outcome"], "rejected");
        store.run(["verify"]).succeeded();
    });
}

#[test]
fn policies_are_kept_by_name_and_used() {
    everywhere(|house| {
        let store = &house.store;
        let (first, second) =
            (store.policy("[channel]\nname = 'canary'"), store.policy("[channel]\nname = 'kept'"));
        let put = |name: &str, file: &std::path::Path| -> Value {
            store.run(["policy", "put", "m", name, file.to_str().unwrap()]).succeeded()["version"].clone()
        };
        let versions = [put("default", &first), put("default", &second), put("default", &second)];
        assert_eq!(versions, [1, 2, 2]);
        let listed = store.run(["policy", "list", "m"]).succeeded();
        assert_eq!(
            (&listed["policies"][0]["policy"], &listed["policies"][0]["version"]),
            (&json!("default"), &json!(2))
        );
        let published = store.publish(&torchrec(), &[]).succeeded();
        assert_eq!(
            (&published["channel"], &published["policy_from"]),
            (&json!("kept"), &json!("store default version 2"))
        );
    });
}
