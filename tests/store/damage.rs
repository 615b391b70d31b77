//! What was damaged in a store is not taken, wherever it lies: `fetch` and `verify` end with 7, and the version that
//! was served before is served still.

use serde_json::Value;

use crate::fixtures::torchrec;
use crate::places::{House, everywhere};

/// A served folder holds this version and no other, whole.
#[track_caller]
pub(crate) fn serves_alone(served: &std::path::Path, snapshot: &str) {
    let current = std::fs::read_link(served.join("current")).unwrap();
    assert_eq!(current, std::path::Path::new("versions").join(snapshot));
    let versions: Vec<_> =
        std::fs::read_dir(served.join("versions")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(versions, [snapshot]);
    crate::tensors::tensors(&served.join("current"));
}

impl House {
    /// The served folder holds this version and no other, whole.
    #[track_caller]
    pub(crate) fn serves_alone(&self, snapshot: &str) {
        serves_alone(&self.store.served(), snapshot);
    }

    /// Whoever reads is refused, and told which object it is.
    #[track_caller]
    fn refuses(&self, old: &str, key: &str) {
        let name = key.rsplit('/').next().unwrap();
        for run in [self.store.fetch("m"), self.store.run(["verify"]), self.store.run(["verify", "m@prod"])] {
            assert_eq!(run.failed(7), "integrity", "{key}");
            assert!(run.stderr.contains(name), "{key}: {run:?}");
        }
        self.serves_alone(old);
    }
}

/// Publishes and fetches one step, then publishes another one, of other bytes; both snapshots.
fn two_steps(house: &House) -> (String, String) {
    let id = |published: Value| published["snapshot"].as_str().unwrap().to_owned();
    let old = id(house.store.publish(&torchrec(), &["--step", "1"]).succeeded());
    house.store.fetch("m").succeeded();
    let policy = house.store.policy("[[rule]]\nmatch = '**'\nencode = 'bf16'");
    let more = ["--step", "2", "--policy", policy.to_str().unwrap()];
    (old, id(house.store.publish(&torchrec(), &more).succeeded()))
}

/// The keys of the chunks that a snapshot's manifest names.
fn chunks(house: &House, snapshot: &str) -> Vec<String> {
    let manifest = house.get(&format!("models/m/snapshots/{snapshot}"));
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let files = manifest["files"].as_array().unwrap().iter();
    let chunks = files.flat_map(|file| file["chunks"].as_array().unwrap());
    let key = |chunk: &Value| {
        let id = chunk["id"].as_str().unwrap();
        format!("models/m/chunks/{}/{id}", &id[..2])
    };
    chunks.map(key).collect()
}

#[test]
fn no_damaged_chunk_or_manifest_is_taken() {
    everywhere(|house| {
        let (old, new) = two_steps(house);
        let kept = chunks(house, &old);
        let mut only_new = chunks(house, &new);
        only_new.retain(|chunk| !kept.contains(chunk));
        let another = house.get(&kept[0]);
        for key in only_new.iter().take(1) {
            let right = house.get(key);
            let mut flipped = right.clone();
            flipped[right.len() / 2] ^= 0x10;
            let other_bytes: Vec<u8> = right.iter().map(|byte| !byte).collect();
            let longer = [&right[..], b"x"].concat();
            let shorter = right[..right.len() - 1].to_vec();
            for damaged in [flipped, shorter, longer, another.clone(), other_bytes, Vec::new()] {
                house.put(key, damaged);
                house.refuses(&old, key);
            }
            house.delete(key);
            house.refuses(&old, key);
            house.put(key, right);
        }
        let manifest = format!("models/m/snapshots/{new}");
        let right = house.get(&manifest);
        let text = String::from_utf8(right.clone()).unwrap();
        let altered = text.replace("\"step\":2", "\"step\":3");
        assert_ne!(altered, text);
        let other = house.get(&format!("models/m/snapshots/{old}"));
        for damaged in [altered.into_bytes(), right[..right.len() / 2].to_vec(), other, Vec::new()] {
            house.put(&manifest, damaged);
            house.refuses(&old, &manifest);
        }
        house.delete(&manifest);
        house.refuses(&old, &manifest);
        house.put(&manifest, right);
        house.store.run(["verify"]).succeeded();
        assert_eq!(house.store.fetch("m").succeeded()["snapshot"], *new);
    });
}

#[test]
fn no_altered_missing_or_replayed_entry_of_a_channel_is_taken() {
    everywhere(|house| {
        let (old, new) = two_steps(house);
        let [first, second] = [1, 2].map(|number| format!("models/m/channels/prod/{number:012}"));
        let right = house.get(&second);
        let replayed = house.get(&first);
        for damaged in [b"{}".to_vec(), Vec::new(), right[..right.len() / 2].to_vec(), replayed.clone()] {
            house.put(&second, damaged);
            house.refuses(&old, &second);
        }
        house.put(&second, right.clone());
        house.delete(&first);
        house.refuses(&old, &first);
        house.put(&first, replayed.clone());
        // The newest one has gone: what is left is a log, but the hint knows better.
        house.delete(&second);
        let verified = house.store.run(["verify"]);
        assert_eq!(verified.failed(7), "integrity");
        house.delete(&first);
        assert_eq!(house.store.fetch("m").failed(7), "integrity", "a log that is lost");
        house.serves_alone(&old);
        house.put(&first, replayed);
        house.put(&second, right);
        assert_eq!(house.store.fetch("m").succeeded()["snapshot"], *new);
    });
}

#[test]
fn a_publish_over_a_damaged_chunk_fails_or_leaves_it_to_be_found() {
    everywhere(|house| {
        let old = house.store.publish(&torchrec(), &["--step", "1"]).succeeded();
        house.store.fetch("m").succeeded();
        let old = old["snapshot"].as_str().unwrap();
        for key in chunks(house, old) {
            let right = house.get(&key);
            house.put(&key, &right[..right.len() - 1]);
            assert_eq!(house.store.publish(&torchrec(), &["--step", "2"]).failed(7), "integrity", "{key}");
            house.put(&key, right);
        }
        house.store.publish(&torchrec(), &["--step", "2"]).succeeded();
        house.store.run(["verify"]).succeeded();
    });
}
