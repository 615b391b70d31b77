//! SIGKILL at any moment of `publish` or `fetch`, then run it again: it completes with the same snapshot, and nobody
//! ever sees a part of one.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::binary::{Store, spawn, wait};
use crate::fixtures::torchrec;
use crate::tensors::tensors;
use weighbridge_tests::synthetic;

/// Kills after a random part of `usual`, at most; says whether the process was still running.
fn kill(mut child: Child, usual: Duration, random: &mut TestRng) -> bool {
    let share = f64::from(random.next_u32()) / f64::from(u32::MAX);
    let deadline = Instant::now() + usual.mul_f64(share);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    child.kill().unwrap();
    child.wait().unwrap().code().is_none()
}

/// The random moments of a run, which it prints: a failing one can be run again.
fn random() -> TestRng {
    let seed: [u8; 32] = std::array::from_fn(|_| rand_byte());
    println!("seed: {seed:?}");
    TestRng::from_seed(RngAlgorithm::ChaCha, &seed)
}

fn rand_byte() -> u8 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish().to_le_bytes()[0]
}

/// What a reader may see at any time: whole versions only, and `current` pointing at one of them.
fn check_reader(store: &Store, expected: &str) {
    let versions = store.served().join("versions");
    for version in std::fs::read_dir(versions).into_iter().flatten() {
        let version = version.unwrap().path();
        assert!(version.join("snapshot.json").is_file(), "{version:?}");
        tensors(&version);
    }
    if let Ok(target) = std::fs::read_link(store.served().join("current")) {
        assert_eq!(target, Path::new("versions").join(expected));
        assert!(store.served().join(target).join("snapshot.json").is_file());
    }
}

fn crash_and_finish(checkpoint: &Path, rounds: usize) {
    let mut random = random();
    let reference = Store::new();
    let started = Instant::now();
    let expected = reference.publish(checkpoint, &["--step", "5"]).succeeded();
    let expected = expected["snapshot"].as_str().unwrap();
    let publish_time = started.elapsed();
    let started = Instant::now();
    reference.fetch("m").succeeded();
    let fetch_time = started.elapsed();
    let wanted = tensors(&reference.served().join("current"));

    let mut killed = 0;
    for _ in 0..rounds {
        let store = Store::new();
        for _ in 0..3 {
            killed += usize::from(kill(
                spawn(store.publish_command(checkpoint, &["--step", "5"])),
                publish_time,
                &mut random,
            ));
            // Whatever stands on the channel now is whole.
            let seen = store.fetch("m");
            if seen.code == 0 {
                assert_eq!(seen.json()["snapshot"], expected);
            } else {
                assert_eq!(seen.failed(6), "not_found");
            }
        }
        let published = store.publish(checkpoint, &["--step", "5"]).succeeded();
        assert_eq!(published["snapshot"], expected);
        store.run(["verify"]).succeeded();
        std::fs::remove_dir_all(store.served()).ok();

        for _ in 0..3 {
            killed += usize::from(kill(spawn(store.fetch_command("m")), fetch_time, &mut random));
            check_reader(&store, expected);
        }
        store.fetch("m").succeeded();
        check_reader(&store, expected);
        let fetched = tensors(&store.served().join("current"));
        assert!(
            fetched
                .iter()
                .map(|(name, tensor)| (name, &tensor.bytes))
                .eq(wanted.iter().map(|(name, tensor)| (name, &tensor.bytes)))
        );
        let left: Vec<_> =
            std::fs::read_dir(store.served()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.len() == 4, "nothing is left lying about: {left:?}");
    }
    println!("{killed} processes killed in {rounds} rounds");
    assert!(killed >= rounds, "{killed} killed");
}

#[test]
fn killed_at_random_moments_a_small_checkpoint_is_finished() {
    crash_and_finish(&torchrec(), 12);
}

#[test]
fn killed_at_random_moments_a_larger_checkpoint_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    synthetic(&file, 4, 100_000, 64);
    crash_and_finish(&file, 6);
}

#[test]
fn a_polite_signal_ends_a_publish_at_once_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    synthetic(&file, 8, 100_000, 64);
    let store = Store::new();
    let first = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let before = store.objects("models/m/chunks").len();
    let child = spawn(store.publish_command(&file, &["--step", "2"]));
    while store.objects("models/m/chunks").len() == before {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let run = wait(child);
    if run.code != 0 {
        assert_eq!(run.failed(130), "interrupted");
        assert_eq!(store.fetch("m").succeeded()["snapshot"], first["snapshot"]);
    }
    store.publish(&file, &["--step", "2"]).succeeded();
    store.run(["verify"]).succeeded();
}
