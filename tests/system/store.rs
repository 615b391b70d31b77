//! `store check` over folders: what a store can do, and for whom.

use crate::binary::{Store, ended};
use crate::fixtures::torchrec;

#[test]
fn a_folder_is_tried_out_and_left_as_it_was() {
    let store = Store::new();
    assert_eq!(store.run(["store", "check"]).failed(6), "not_found");
    assert!(!store.root().exists(), "looking makes no store");
    store.publish(&torchrec(), &[]).succeeded();
    let before = store.objects("");
    let checked = store.run(["store", "check"]).succeeded();
    assert_eq!((&checked["kind"], &checked["fit"]), (&"folder".into(), &true.into()));
    let abilities = checked["abilities"].as_object().unwrap();
    assert_eq!(abilities.len(), 8);
    assert!(abilities.values().all(|ability| ability["works"] == true), "{checked}");
    assert_eq!(store.objects(""), before);
    let looked = store.run(["store", "check", "--read-only"]).succeeded();
    assert_eq!(looked["abilities"].as_object().unwrap().len(), 2);
    store.run(["verify"]).succeeded();
}

#[test]
fn for_people_there_is_a_line_for_each_ability() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let mut command = std::process::Command::new(crate::binary::path());
    let run = ended(command.args(["store", "check", "--store"]).arg(store.root()).output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    for ability in ["list  yes", "read  yes", "put if absent  yes", "one winner  yes", "delete  yes"] {
        assert!(run.stdout.contains(ability), "{ability}: {run:?}");
    }
}

#[test]
fn a_bucket_that_cannot_be_reached_is_exit_code_5_and_takes_its_options_from_the_file() {
    let store = Store::new();
    let config = "[bucket]\nendpoint = 'http://127.0.0.1:1'\nallow_http = true\nretry_seconds = 1\n";
    std::fs::write(store.folder.path().join("weighbridge.toml"), config).unwrap();
    let run = |key: Option<&str>| {
        let mut command = std::process::Command::new(crate::binary::path());
        command.args(["store", "check", "--json", "--store", "s3://bucket/prefix"]);
        command.current_dir(store.folder.path()).env("HOME", store.folder.path());
        for variable in ["AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ALLOW_HTTP"] {
            command.env_remove(variable);
        }
        if let Some(key) = key {
            command.env("AWS_ACCESS_KEY_ID", key).env("AWS_SECRET_ACCESS_KEY", "secret");
        }
        ended(command.output().unwrap())
    };
    let away = run(Some("key"));
    assert_eq!(away.failed(5), "store_unreachable");
    assert!(away.stderr.contains("127.0.0.1:1"), "{away:?}");
    // Without keys in the environment, those of a profile do; and one that is no good is said.
    std::fs::create_dir(store.folder.path().join(".aws")).unwrap();
    let credentials = store.folder.path().join(".aws/credentials");
    std::fs::write(&credentials, "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n")
        .unwrap();
    assert_eq!(run(None).failed(5), "store_unreachable");
    std::fs::write(&credentials, "[default]\ncredential_process = /bin/secret\n").unwrap();
    let refused = run(None);
    assert_eq!(refused.failed(2), "bad_location");
    assert!(
        refused.stderr.contains("credential_process") && !refused.stderr.contains("/bin/secret"),
        "{refused:?}"
    );
}
