//! Many processes at one object, and at one channel: each number has one winner, and nothing is lost.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::again::Again;
use crate::places::{House, Place, everywhere};

const PROCESSES: usize = 16;
const PATIENCE: Duration = Duration::from_secs(120);

fn processes(house: &House, count: usize) -> Vec<Again> {
    let location = house.store.location().into_string().unwrap();
    (0..count).map(|_| Again::start(&location, &house.store.variables(), PATIENCE)).collect()
}

/// All processes put under all of these keys, at once.
fn race(house: &House, processes: &mut [Again], keys: &[String]) {
    for (number, process) in processes.iter_mut().enumerate() {
        process.order(&json!({ "do": "create", "keys": keys, "bytes": format!("process {number}") }));
    }
    let answers: Vec<Value> = processes.iter_mut().map(Again::answer).collect();
    for (at, key) in keys.iter().enumerate() {
        let winners: Vec<_> =
            (0..answers.len()).filter(|&number| answers[number][at] == json!(true)).collect();
        let losers = answers.iter().filter(|answer| answer[at] == json!(false)).count();
        assert_eq!((winners.len(), losers), (1, answers.len() - 1), "{key}: {answers:?}");
        assert_eq!(house.get(key), format!("process {}", winners[0]).into_bytes(), "{key}");
    }
}

#[test]
fn of_sixteen_processes_that_create_an_object_one_wins() {
    everywhere(|house| {
        // Of those who lose at SeaweedFS each waits for seconds: many rounds at once there, on keys of their own.
        let (rounds, at_once) = match house.place {
            Place::Folder | Place::Moto => (300, 1),
            Place::SeaweedFs => (10, 10),
            Place::Azurite => (50, 1),
        };
        let mut processes = processes(house, PROCESSES);
        let began = Instant::now();
        let keys: Vec<_> = (0..rounds).map(|round| format!("race/{round:04}")).collect();
        for keys in keys.chunks(at_once) {
            race(house, &mut processes, keys);
        }
        println!("{:?}: {rounds} rounds in {:?}", house.place, began.elapsed());
    });
}

#[test]
fn eight_processes_that_append_to_a_channel_leave_a_dense_log() {
    everywhere(|house| {
        let mut processes = processes(house, 8);
        let mut sequences = BTreeSet::new();
        let began = Instant::now();
        let rounds = if house.place == Place::SeaweedFs { 1 } else { 4 };
        for round in 0..rounds {
            for (number, process) in processes.iter_mut().enumerate() {
                process.order(&json!({ "do": "append", "id": format!("{round} {number}") }));
            }
            for process in &mut processes {
                let answer = process.answer();
                let sequence = answer.as_u64().unwrap_or_else(|| panic!("{answer}"));
                assert!(sequences.insert(sequence), "{sequence} was given twice");
            }
        }
        println!("{:?}: {} entries in {:?}", house.place, 8 * rounds, began.elapsed());
        assert!(sequences.into_iter().eq(1..=8 * rounds), "a dense log");
        let log = house.store.run(["channels", "log", "m"]).succeeded();
        let entries = log["entries"].as_array().unwrap();
        assert_eq!(entries.len() as u64, (8 * rounds).min(entries.len() as u64));
        let snapshots: BTreeSet<_> =
            entries.iter().map(|entry| entry["snapshot"].as_str().unwrap()).collect();
        assert_eq!(snapshots.len(), entries.len(), "each has its own");
        for pair in entries.windows(2) {
            assert_eq!(pair[0]["previous"], pair[1]["snapshot"]);
        }
    });
}
