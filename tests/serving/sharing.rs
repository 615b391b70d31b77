//! What two versions have in common lies on the disk once, and none of them is harmed by what becomes of the other.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::binary::{Run, Store, ended};
use crate::follower::{Checkpoint, load, serves, versions};
use crate::volume::Volume;

/// More than 8 MiB: a table that has a file of its own.
const LARGE: usize = 10 << 20;

fn fetch(store: &Store, into: &Path) -> Run {
    let arguments = ["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), into.as_os_str()];
    ended(store.command(arguments).output().unwrap())
}

/// The version's file that is as large as a large table.
fn large(into: &Path, snapshot: &str) -> PathBuf {
    let version = into.join("versions").join(snapshot);
    let mut files = std::fs::read_dir(version).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.metadata().unwrap().len() > LARGE as u64).unwrap()
}

/// A file of a version is another one from now on, as if somebody had written into it.
fn write_into(path: &Path, bytes: &[u8]) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_file_that_did_not_change_takes_no_room_and_is_not_read_from_the_store() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    // Room for one large table, and not for two.
    let Some(volume) = Volume::mount(store.folder.path(), "18m") else { return };
    let into = volume.0.join("served");
    let mut checkpoint = Checkpoint::new(&store, &[LARGE, 1 << 20]);
    let first = checkpoint.publish(&store);
    fetch(&store, &into).succeeded();
    checkpoint.change(1..);
    let second = checkpoint.publish(&store);
    let fetched = fetch(&store, &into).succeeded();
    assert!(fetched["bytes_read"].as_u64().unwrap() < 2 << 20, "{fetched}");
    let (one, other) = (large(&into, &first), large(&into, &second));
    let (one, other) = (one.metadata().unwrap(), other.metadata().unwrap());
    assert_eq!((one.ino(), one.nlink()), (other.ino(), 2), "this file system cannot share bytes by itself");
    assert_eq!(one.mode() & 0o222, 0, "nobody writes to it by mistake");
    for snapshot in [first, second] {
        load(&into.join("versions").join(snapshot)).unwrap();
    }
    // What changed needs room, and that is known before the first byte.
    checkpoint.change(..);
    checkpoint.publish(&store);
    assert_eq!(fetch(&store, &into).failed(1), "disk_full");
}

/// A file system that can share bytes, where this user may make one.
struct Clones(PathBuf);

impl Clones {
    fn mount(folder: &Path) -> Option<Self> {
        let (image, at) = (folder.join("image"), folder.join("clones"));
        std::fs::File::create(&image).unwrap().set_len(400 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let done = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        let made = done(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image));
        if made && done(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at)) {
            return Some(Self(at));
        }
        println!("skipped: this user cannot make and mount an XFS");
        None
    }
}

impl Drop for Clones {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn where_the_file_system_shares_bytes_by_itself_files_are_their_own() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let Some(volume) = Clones::mount(store.folder.path()) else { return };
    let into = volume.0.join("served");
    let mut checkpoint = Checkpoint::new(&store, &[LARGE, 1 << 20]);
    let first = checkpoint.publish(&store);
    fetch(&store, &into).succeeded();
    checkpoint.change(1..);
    let second = checkpoint.publish(&store);
    let fetched = fetch(&store, &into).succeeded();
    assert!(fetched["bytes_read"].as_u64().unwrap() < 2 << 20, "{fetched}");
    assert_eq!(large(&into, &first).metadata().unwrap().nlink(), 1);
    write_into(&large(&into, &first), b"damaged");
    load(&into.join("versions").join(second)).unwrap();
}

#[test]
fn damage_in_one_version_does_not_get_into_the_next_and_is_mended_in_each() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let into = store.served();
    let mut checkpoint = Checkpoint::new(&store, &[LARGE, 1 << 20]);
    let first = checkpoint.publish(&store);
    fetch(&store, &into).succeeded();
    checkpoint.change(1..);
    let second = checkpoint.publish(&store);
    fetch(&store, &into).succeeded();
    let mut bytes = std::fs::read(large(&into, &second)).unwrap();
    bytes[LARGE / 2] ^= 1;
    write_into(&large(&into, &second), &bytes);
    // The next one is right all the same; one chunk comes from the store.
    checkpoint.change(1..);
    let third = checkpoint.publish(&store);
    let fetched = fetch(&store, &into).succeeded();
    assert!((4 << 20..11 << 20).contains(&fetched["bytes_read"].as_u64().unwrap()), "{fetched}");
    load(&into.join("versions").join(&third)).unwrap();
    // And each of the damaged ones is mended when it is fetched, out of what is right by now.
    for damaged in [first, second] {
        let version = into.join("versions").join(&damaged);
        load(&version).unwrap_err();
        let mended = store.run(["fetch", &format!("m@{damaged}"), "--into", into.to_str().unwrap()]);
        assert_eq!(mended.code, 0, "{mended:?}");
        assert!(mended.json()["bytes_read"].as_u64().unwrap() < 2 << 20, "{mended:?}");
        load(&version).unwrap();
    }
    load(&into.join("versions").join(&third)).unwrap();
}

#[test]
fn what_a_killed_fetch_left_is_never_written_through_to_another_version() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let into = store.served();
    let mut checkpoint = Checkpoint::new(&store, &[LARGE, 1 << 20]);
    let first = checkpoint.publish(&store);
    fetch(&store, &into).succeeded();
    let name = large(&into, &first).file_name().unwrap().to_owned();
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    // A link to a file of the other version, where others bytes are wanted; one of them read-only and its own.
    let staged = into.join(".staging").join(&second);
    std::fs::create_dir_all(&staged).unwrap();
    std::fs::hard_link(large(&into, &first), staged.join(&name)).unwrap();
    let mut files = std::fs::read_dir(into.join("current")).unwrap().map(|entry| entry.unwrap().path());
    let is_other = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "safetensors") && path.file_name() != Some(&name)
    };
    let small = files.find(is_other).unwrap();
    std::fs::copy(&small, staged.join(small.file_name().unwrap())).unwrap();
    fetch(&store, &into).succeeded();
    assert_eq!(serves(&into).as_ref(), Some(&second));
    for snapshot in versions(&into) {
        load(&into.join("versions").join(snapshot)).unwrap();
    }
    assert_eq!(large(&into, &first).metadata().unwrap().nlink(), 1);
}
