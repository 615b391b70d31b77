//! Signatures, wherever the store lies: what nobody trusted has signed is not taken, however it came there.

use crate::binary::{Run, ended};
use crate::fixtures::torchrec;
use crate::places::{House, everywhere};

/// Makes a key pair; the private key's file, and the public key as text.
fn key(house: &House, name: &str) -> (String, String) {
    let file = house.store.folder.path().join(name).to_str().unwrap().to_owned();
    let made = house.store.run(["keys", "generate", &file]).succeeded();
    (file, made["key"].as_str().unwrap().to_owned())
}

fn publish(house: &House, step: &str, more: &[&str]) -> String {
    let arguments = [&["--run", "r", "--step", step], more].concat();
    let published = house.store.publish(&torchrec(), &arguments).succeeded();
    assert_eq!(published["outcome"], "published");
    published["snapshot"].as_str().unwrap().to_owned()
}

fn fetch(house: &House, reference: &str, key: &str) -> Run {
    ended(house.store.fetch_command(reference).args(["--require-signed-by", key]).output().unwrap())
}

/// A fetch that is refused, while the version that was served before stays the only one.
#[track_caller]
fn refused(house: &House, reference: &str, key: &str, served: &str) {
    assert_eq!(fetch(house, reference, key).failed(7), "integrity");
    house.serves_alone(served);
}

fn entry(channel: &str, sequence: u64) -> String {
    format!("models/m/channels/{channel}/{sequence:012}")
}

#[test]
fn a_host_takes_what_its_key_signed_and_nothing_else() {
    everywhere(|house| {
        let ((file, text), (_, other)) = (key(house, "a"), key(house, "b"));
        let first = publish(house, "1", &["--signing-key", &file]);
        assert_eq!(fetch(house, "m", &text).succeeded()["snapshot"], *first);
        refused(house, "m", &other, &first);
        let second = publish(house, "2", &["--signing-key", &file]);
        let unsigned = publish(house, "2", &["--channel", "canary"]);
        assert_eq!(unsigned, second);
        refused(house, "m@canary", &text, &first);

        let right = house.get(&entry("prod", 2));
        let text_of = String::from_utf8(right.clone()).unwrap();
        for (from, to) in [("\"step\":2", "\"step\":3"), (&*second, &*first), ("\"publish\"", "\"promote\"")]
        {
            let altered = text_of.replace(from, to);
            assert_ne!(altered, text_of);
            house.put(&entry("prod", 2), altered);
            refused(house, "m", &text, &first);
        }
        // An old state played back: as it is, and as if it were the newer one.
        let old = String::from_utf8(house.get(&entry("prod", 1))).unwrap();
        for replayed in [old.clone(), old.replace("\"sequence\":1", "\"sequence\":2")] {
            house.put(&entry("prod", 2), replayed);
            refused(house, "m", &text, &first);
        }
        house.put(&entry("prod", 2), right);
        // Signed for one channel, lying on another.
        house.put(&entry("canary", 1), old);
        house.store.run(["inspect", "m@canary"]).succeeded();
        refused(house, "m@canary", &text, &first);

        let envelope = format!("models/m/snapshots/{second}.signatures");
        let signed = house.get(&envelope);
        house.put(&envelope, house.get(&format!("models/m/snapshots/{first}.signatures")));
        refused(house, "m", &text, &first);
        house.delete(&envelope);
        refused(house, "m", &text, &first);
        house.put(&envelope, signed);
        assert_eq!(fetch(house, "m", &text).succeeded()["snapshot"], *second);
        house.store.run(["verify", "m@prod", "--require-signed-by", &text]).succeeded();
    });
}
