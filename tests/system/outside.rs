//! What the outside does to a publish: empty and odd folders, unreadable files, full disks, stores that cannot be
//! written, checkpoints that change. A clear error or the right result, and what was published before untouched.

use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use crate::binary::{Store, ended, spawn, wait};
use crate::fixtures::{copy_folder, torchrec};
use crate::volume::Volume;
use weighbridge_tests::{peak_memory, synthetic};

#[test]
fn folders_and_files_that_are_no_checkpoint_are_refused_with_a_reason() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let run = store.publish(&folder, &[]);
    assert_eq!(run.failed(4), "unsupported_format");
    assert!(run.stderr.contains("empty"), "{run:?}");
    std::fs::write(folder.join("notes.txt"), "hello").unwrap();
    assert_eq!(store.publish(&folder, &[]).failed(4), "unsupported_format");
    assert_eq!(store.publish(&folder.join("notes.txt"), &[]).failed(4), "unsupported_format");
    std::fs::write(folder.join("empty.safetensors"), "").unwrap();
    let run = store.publish(&folder.join("empty.safetensors"), &[]);
    assert!(["truncated", "unsupported_format"].contains(&run.failed(4).as_str()));
    let pipe = folder.join("pipe.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_eq!(store.publish(&pipe, &[]).failed(4), "unreadable", "a pipe must not hang the reader");
    assert!(!store.root().join("models").exists());
}

#[test]
fn a_checkpoint_without_one_of_its_files_is_refused_by_name() {
    let store = Store::new();
    let before = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let folder = store.folder.path().join("checkpoint");
    copy_folder(&torchrec(), &folder);
    std::fs::remove_file(folder.join("__1_0.distcp")).unwrap();
    let run = store.publish(&folder, &["--step", "2"]);
    assert_eq!(run.failed(4), "dcp_missing_file");
    assert!(run.stderr.contains("__1_0.distcp"), "{run:?}");
    symlink("/nonexistent/file", folder.join("__1_0.distcp")).unwrap();
    assert_eq!(store.publish(&folder, &["--step", "2"]).failed(4), "dcp_missing_file");
    std::fs::remove_file(folder.join("__1_0.distcp")).unwrap();
    symlink(torchrec().join("__1_0.distcp"), folder.join("__1_0.distcp")).unwrap();
    assert_eq!(store.publish(&folder, &["--step", "2"]).failed(4), "index_path_escape");
    assert_eq!(store.fetch("m").succeeded()["snapshot"], before["snapshot"]);
}

/// Whether this user may read everything: then a file cannot be made unreadable to it.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn an_unreadable_file_is_refused_by_name() {
    use std::os::unix::fs::PermissionsExt;
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    copy_folder(&torchrec(), &folder);
    let file = folder.join("__1_0.distcp");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o000)).unwrap();
    let run = if is_root() {
        // Root reads everything, so somebody else has to try: `nobody`, in folders that it may enter.
        for path in [store.folder.path(), &folder] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let binary = store.folder.path().join("weighbridge");
        std::fs::copy(crate::binary::path(), &binary).unwrap();
        let publish = store.publish_command(&folder, &[]);
        let mut as_nobody = Command::new("setpriv");
        as_nobody
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(binary)
            .args(publish.get_args());
        ended(as_nobody.current_dir(store.folder.path()).output().unwrap())
    } else {
        store.publish(&folder, &[])
    };
    assert_eq!(run.failed(4), "unreadable");
    assert!(run.stderr.contains("__1_0.distcp"), "{run:?}");
}

#[test]
fn a_full_disk_under_the_store_is_said_and_changes_nothing() {
    let store = Store::new();
    let Some(volume) = Volume::mount(store.folder.path(), "6m") else { return };
    let root = volume.0.join("store");
    let root = root.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(crate::binary::path());
        command.args(arguments).args(["--json", "--store", root]).current_dir(store.folder.path());
        ended(command.output().unwrap())
    };
    let small = torchrec();
    let before = run(&["publish", small.to_str().unwrap(), "--model", "m", "--step", "1"]).succeeded();
    let large = store.folder.path().join("large.safetensors");
    synthetic(&large, 2, 100_000, 64);
    let full = run(&["publish", large.to_str().unwrap(), "--model", "m", "--step", "2"]);
    assert_eq!(full.failed(1), "disk_full");
    run(&["verify"]).succeeded();
    let into = store.served();
    let fetched = run(&["fetch", "m", "--into", into.to_str().unwrap()]).succeeded();
    assert_eq!(fetched["snapshot"], before["snapshot"]);
}

#[test]
fn a_full_disk_under_a_fetch_is_said_before_the_first_byte() {
    let store = Store::new();
    let Some(volume) = Volume::mount(store.folder.path(), "4m") else { return };
    let first = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let into = volume.0.join("served");
    let fetch = || store.run(["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), into.as_os_str()]);
    fetch().succeeded();
    let large = store.folder.path().join("large.safetensors");
    synthetic(&large, 1, 100_000, 64);
    store.publish(&large, &["--step", "2"]).succeeded();
    let full = fetch();
    assert_eq!(full.failed(1), "disk_full");
    assert!(full.stderr.contains("are needed"), "{full:?}");
    let current = std::fs::read_link(into.join("current")).unwrap();
    assert!(current.ends_with(first["snapshot"].as_str().unwrap()));
    store.run(["rollback", "m"]).succeeded();
    fetch().succeeded();
}

#[test]
fn a_store_that_cannot_be_written_is_exit_code_5() {
    let store = Store::new();
    let Some(volume) = Volume::mount(store.folder.path(), "6m") else { return };
    let root = volume.0.join("store");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(crate::binary::path());
        command.args(arguments).arg("--json").arg("--store").arg(&root).current_dir(store.folder.path());
        ended(command.output().unwrap())
    };
    let checkpoint = torchrec();
    let checkpoint = checkpoint.to_str().unwrap();
    run(&["publish", checkpoint, "--model", "m", "--step", "1"]).succeeded();
    volume.remount_read_only();
    assert_eq!(run(&["publish", checkpoint, "--model", "m", "--step", "2"]).failed(5), "read_only");
    assert_eq!(run(&["hold", "m"]).failed(5), "read_only");
    let into = store.served();
    run(&["fetch", "m", "--into", into.to_str().unwrap()]).succeeded();
    run(&["verify"]).succeeded();
    let elsewhere = volume.0.join("served");
    assert_eq!(run(&["fetch", "m", "--into", elsewhere.to_str().unwrap()]).failed(5), "read_only");
}

#[test]
fn a_checkpoint_that_changes_while_it_is_read_is_never_published_as_a_mixture() {
    let store = Store::new();
    let mut served = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let file = store.folder.path().join("model.safetensors");
    synthetic(&file, 4, 100_000, 64);
    let mut changed = 0;
    for round in 0..4u64 {
        let child = spawn(store.publish_command(&file, &["--step", "2"]));
        std::thread::sleep(Duration::from_millis(20 + round * 15));
        // The last bytes are written over in place: same size, same header, other rows.
        let writer = std::fs::File::options().write(true).open(&file).unwrap();
        let end = writer.metadata().unwrap().len();
        std::os::unix::fs::FileExt::write_all_at(&writer, &round.to_le_bytes(), end - 8).unwrap();
        drop(writer);
        let run = wait(child);
        if run.code == 0 {
            // It was done before the change.
            served = run.succeeded();
            continue;
        }
        changed += 1;
        assert_eq!(run.failed(4), "checkpoint_changed");
        assert!(run.stderr.contains("model.safetensors"), "{run:?}");
        assert_eq!(store.fetch("m").succeeded()["snapshot"], served["snapshot"]);
    }
    println!("{changed} of 4 publishes saw the change");
    store.publish(&file, &["--step", "2"]).succeeded();
}

#[test]
fn a_checkpoint_of_a_wider_run_may_lie_in_the_same_folder() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    copy_folder(&torchrec(), &folder);
    std::fs::write(folder.join("__7_0.distcp"), "left over").unwrap();
    let with = store.publish(&folder, &[]).succeeded();
    assert_eq!(store.publish(&torchrec(), &[]).succeeded()["snapshot"], with["snapshot"]);
}

#[test]
fn memory_stays_within_the_budget_whatever_the_checkpoint() {
    let store = Store::new();
    let file = store.folder.path().join("model.safetensors");
    synthetic(&file, 3, 1_000_000, 64);
    let mut publish = store.publish_command(&file, &["--memory", "128MiB", "--threads", "8"]);
    let (ended, peak) = peak_memory(&mut publish).unwrap();
    assert!(ended.success());
    println!("peak {} MiB for {} MiB of input", peak >> 20, std::fs::metadata(&file).unwrap().len() >> 20);
    assert!(peak <= 128 << 20, "{peak}");
}

#[test]
fn a_listing_that_the_budget_does_not_hold_is_refused_before_it_is_made() {
    let store = Store::new();
    let file = store.folder.path().join("model.safetensors");
    // A header of 20 MB: parsed, it could take 240 MB.
    let mut entries = Vec::new();
    for tensor in 0..200_000 {
        entries.push(format!(
            r#""layers.{tensor:08}.embedding.weight":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    std::fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    for memory in ["128MiB", "512MiB"] {
        let mut publish = store.publish_command(&file, &["--memory", memory]);
        publish.stderr(std::process::Stdio::null());
        let (ended, peak) = peak_memory(&mut publish).unwrap();
        assert_eq!(ended.code(), Some(4));
        let budget = if memory == "128MiB" { 128 } else { 512 };
        assert!(peak <= budget << 20, "{peak}");
        let run = store.publish(&file, &["--memory", memory]);
        assert_eq!(run.failed(4), "limit_exceeded");
        assert!(run.stderr.contains("--memory"), "{run:?}");
    }
    store.publish(&file, &["--memory", "2GiB"]).succeeded();
}
