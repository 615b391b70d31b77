//! Publish, then fetch: wherever the store lies, the snapshot and every byte of it are the same, and are what the
//! libraries read that wrote the checkpoint.

use serde_json::Value;

use crate::fixtures::{checkpoints, copy_folder, data, expected, read_json, sha256, torchrec};
use crate::places::{House, PLACES, everywhere};
use crate::tensors::tensors;

/// Publishes every golden checkpoint as a step of its own, with all that can be read; each step's snapshot, and the
/// files that are served.
fn published(house: &House) -> Vec<(Value, std::collections::BTreeMap<String, Vec<u8>>)> {
    let mut found = Vec::new();
    for (step, checkpoint) in checkpoints().iter().enumerate() {
        let (expected, refusable) = expected(checkpoint);
        let drop = |name: &String| format!("[[rule]]\nmatch = '{name}'\ndrop = true\n");
        let rules: String = refusable.iter().map(drop).collect();
        let policy = house.store.policy(&format!("{rules}[gates]\nnon_finite = 'allow'"));
        let (step, policy) = (step.to_string(), policy.to_str().unwrap());
        let published = house.store.publish(checkpoint, &["--step", &step, "--policy", policy]).succeeded();
        assert_eq!(published["outcome"], "published", "{checkpoint:?}");
        assert_eq!(house.store.fetch("m").succeeded()["snapshot"], published["snapshot"]);
        let fetched = tensors(&house.store.served().join("current"));
        assert_eq!(fetched.len(), expected.len(), "{checkpoint:?}");
        for (name, expected) in &expected {
            let bytes = &fetched[name].bytes;
            assert_eq!(sha256(bytes), expected["sha256"].as_str().unwrap(), "{checkpoint:?} {name}");
        }
        found.push((published["snapshot"].clone(), house.served()));
    }
    house.store.run(["verify"]).succeeded();
    found
}

#[test]
fn every_golden_checkpoint_is_the_same_snapshot_at_every_place() {
    let mut houses = PLACES.iter().filter_map(|&place| House::at(place));
    let wanted = published(&houses.next().unwrap());
    for house in houses {
        println!("at {:?}", house.place);
        for (found, wanted) in published(&house).iter().zip(&wanted) {
            assert_eq!(found.0, wanted.0);
            assert!(found.1 == wanted.1, "other bytes in {}", found.0);
        }
    }
}

#[test]
fn tables_are_quantized_as_fbgemm_does_and_what_is_there_is_not_stored_again() {
    everywhere(|house| {
        let first = house.store.publish(&torchrec(), &["--step", "3", "--threads", "1"]).succeeded();
        assert!(first["bytes_stored"].as_u64().unwrap() > 0);
        house.store.fetch("m").succeeded();
        let fetched = tensors(&house.store.served().join("current"));
        let golden = &read_json(&data().join("quantization/tables.json"))["dcp_torchrec_2rank"];
        let tables = golden.as_object().unwrap();
        let seen = tables
            .iter()
            .filter(|(name, wanted)| sha256(&fetched[*name].bytes) == wanted["int8_sbf32"].as_str().unwrap());
        assert_eq!(seen.count(), tables.len());

        // The same again, from elsewhere.
        // What a publish claims, so that nothing is collected under it, stays until then.
        let kept = || house.keys("").into_iter().filter(|key| !key.contains("/claims/")).collect::<Vec<_>>();
        let before = kept();
        let elsewhere = house.store.folder.path().join("copy of it");
        copy_folder(&torchrec(), &elsewhere);
        let again = house.store.publish(&elsewhere, &["--step", "3", "--threads", "7"]).succeeded();
        assert_eq!((&again["snapshot"], &again["outcome"]), (&first["snapshot"], &"unchanged".into()));
        assert_eq!((&again["bytes_stored"], &again["bytes_reused"]), (&0.into(), &first["bytes_stored"]));
        assert_eq!(kept(), before);

        // Another step of the same content has a header of its own, and shares the rest.
        let chunks = house.keys("models/m/chunks").len();
        let next = house.store.publish(&torchrec(), &["--step", "4"]).succeeded();
        assert_eq!(next["outcome"], "published");
        assert_ne!(next["snapshot"], first["snapshot"]);
        assert_eq!((&next["bytes_stored"], house.keys("models/m/chunks").len()), (&0.into(), chunks));
        let fetched = house.store.fetch("m").succeeded();
        assert_eq!(fetched["snapshot"], next["snapshot"]);
        house.store.run(["verify"]).succeeded();
    });
}
