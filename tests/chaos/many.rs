//! Four workers, two hundred manifests of five models, and whoever likes kills workers.

use std::collections::BTreeSet;
use std::process::Child;
use std::time::{Duration, Instant};

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use serde_json::{Value, json};
use tempfile::TempDir;

use weighbridge_schemas::job::Ended;
use weighbridge_snapshots::dead;
use weighbridge_tests::rabbit::Broker;

use crate::accounts;
use crate::crashes::start_worker;
use crate::house::{House, drop_manifest, id, manifest_with, policy};

const MANIFESTS: u64 = 200;
const WORKERS: usize = 4;
/// How many workers are killed, if the work lasts so long.
const KILLS: usize = 60;

/// The manifest of this number, and whether it is sent twice.
fn numbered(house: &House, number: u64, random: &mut TestRng) -> (Value, bool) {
    let chance = u64::from(random.next_u32());
    let model = format!("m{}", number % 5);
    // Mostly forwards, now and then a late one.
    let step = if chance % 10 == 0 { number / 10 } else { number };
    let run = if number % 5 == 1 && chance % 3 == 0 { "second" } else { "first" };
    let checkpoint = house.folder.join(match chance % 17 {
        0 => "garbage.safetensors",
        1 => "absent",
        2 => "small.safetensors",
        _ => "c.safetensors",
    });
    let all = if number % 5 == 2 { "latest_wins = false" } else { "other_run = \"take\"" };
    let strict = if chance % 13 == 0 { "[gates]\nmax_rms_error = 0.0001" } else { "" };
    let text = format!(
        "[[rule]]\nmatch = \"**\"\nencode = \"int4\"\n{strict}\n[channel]\n{all}\n[job]\ngrace_seconds = 1"
    );
    let fields = [
        ("model", json!(model)),
        ("run", json!(run)),
        ("policy", policy(&text)),
        ("priority", json!(chance % 10)),
    ];
    (manifest_with(&id(number), step, &checkpoint, &fields), chance % 7 == 0)
}

fn kill_some(house: &House, random: &mut TestRng) -> usize {
    let mut workers: Vec<Child> = (0..WORKERS).map(|_| start_worker(house)).collect();
    let mut killed = 0;
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        std::thread::sleep(Duration::from_millis(u64::from(random.next_u32() % 200)));
        if killed < KILLS {
            let worker = &mut workers[random.next_u32() as usize % WORKERS];
            if worker.try_wait().unwrap().is_none() {
                worker.kill().unwrap();
                worker.wait().unwrap();
                killed += 1;
                *worker = start_worker(house);
            }
        }
        let running = workers
            .iter_mut()
            .filter_map(|worker| worker.try_wait().unwrap().is_none().then_some(()))
            .count();
        if running == 0 {
            assert!(workers.iter_mut().all(|worker| worker.wait().unwrap().success()));
            return killed;
        }
        assert!(Instant::now() < deadline, "the workers do not come to an end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_manifests_are_all_accounted_for() {
    all_are_accounted_for(House::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_manifests_on_a_broker_are_all_accounted_for() {
    let Some(broker) = tokio::task::spawn_blocking(Broker::shared).await.unwrap() else { return };
    all_are_accounted_for(House::on(broker, "many")).await;
}

async fn all_are_accounted_for((_folder, house): (TempDir, House)) {
    let seed: [u8; 32] = std::array::from_fn(uuid_byte);
    println!("seed: {seed:?}");
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    house.checkpoint("c.safetensors", 2);
    house.checkpoint("small.safetensors", 1);
    std::fs::write(house.folder.join("garbage.safetensors"), b"no checkpoint at all").unwrap();
    let (root, queue) = (house.root(), house.queue());
    let (mut jobs, mut poison) = (BTreeSet::new(), BTreeSet::new());
    for number in 0..MANIFESTS {
        if number % 29 == 28 {
            let wrong = json!({ "id": id(number), "model": "m", "step": "no manifest" });
            drop_manifest(&*queue, &wrong).await;
            poison.insert(dead::id_of(wrong.to_string().as_bytes()));
            continue;
        }
        let (manifest, twice) = numbered(&house, number, &mut random);
        jobs.insert((manifest["model"].as_str().unwrap().to_owned(), id(number)));
        drop_manifest(&*queue, &manifest).await;
        if twice {
            drop_manifest(&*queue, &manifest).await;
        }
    }
    let (killed, house) =
        tokio::task::spawn_blocking(move || (kill_some(&house, &mut random), house)).await.unwrap();
    accounts::empty(&*house.queue()).await;
    accounts::sound(&root).await;
    let ends = accounts::balance(&root).await;
    for (model, id) in &jobs {
        assert!(accounts::outcome(&root, model, id).await.is_some(), "{id} of {model}");
    }
    let letters: BTreeSet<_> = accounts::letters(&root).await.into_iter().map(|(id, _)| id).collect();
    assert!(poison.is_subset(&letters));
    let dead = ends.get(&Ended::Dead).copied().unwrap_or(0);
    assert_eq!(letters.len() as u64, dead + poison.len() as u64);
    let all: u64 = ends.values().sum();
    println!(
        "{} manifests, {killed} workers killed: {all} jobs ({} of them again), {} without one; {ends:?}",
        MANIFESTS,
        all - jobs.len() as u64,
        poison.len()
    );
    assert!(killed >= 10, "{killed} killed");
}

fn uuid_byte(_: usize) -> u8 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish().to_le_bytes()[0]
}
