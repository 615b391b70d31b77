//! Envelopes in a store: found, told apart, passed over; and entries that are somewhere else than they were signed for.

use std::convert::Infallible;
use std::path::PathBuf;

use proptest::prelude::*;
use weighbridge_schemas::channel::{ChannelEntry, Reason};
use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::ids::{Fingerprint, RulesDigest};
use weighbridge_schemas::report::{GateResult, Outcome, ReportSchema};
use weighbridge_schemas::snapshot::SnapshotSchema;
use weighbridge_schemas::time::Timestamp;

use super::*;
use crate::channel::{Appended, Channel, Move, Operation};
use crate::manifest;
use crate::root::Absent;
use crate::sign::{PublicKey, Signer, check_entry, generate, sign_entry};

/// A store's folder, and keys beside it.
struct House(tempfile::TempDir);

impl House {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> Root {
        Root::open(self.0.path().join("store").to_str().unwrap(), Absent::Create).unwrap()
    }

    fn file(&self, key: &str) -> PathBuf {
        self.0.path().join(key)
    }

    fn key(&self, name: &str) -> PublicKey {
        let file = self.file(name);
        if file.try_exists().unwrap() {
            Signer::read(&file).unwrap().public()
        } else {
            generate(&file).unwrap().key
        }
    }

    fn signers(&self, names: &[&str]) -> Signers {
        let read = |name: &&str| {
            self.key(name);
            Signer::read(&self.file(name)).unwrap()
        };
        Signers::new(names.iter().map(read).collect()).unwrap()
    }

    fn trust(&self, names: &[&str]) -> Trust {
        Trust::new(names.iter().map(|name| self.key(name)).collect()).unwrap()
    }
}

fn manifest_of(step: u64) -> SnapshotManifest {
    SnapshotManifest {
        schema: SnapshotSchema::V1,
        model: "m".parse().unwrap(),
        run: "r".parse().unwrap(),
        step,
        format: Format::Safetensors,
        checkpoint: Fingerprint::of(b"c"),
        rules: RulesDigest::of(b"p"),
        encoding_version: 1,
        files: vec![],
        tensors: vec![],
    }
}

fn report_of(manifest: &SnapshotManifest, outcome: Outcome) -> Report {
    Report {
        schema: ReportSchema::V1,
        snapshot: manifest.id(),
        model: manifest.model.clone(),
        run: manifest.run.clone(),
        step: manifest.step,
        outcome,
        gates: vec![GateResult { gate: "non_finite".into(), outcome, findings: vec![] }],
        tensors: vec![],
        artifacts: None,
        dropped: vec![],
        notes: vec![],
    }
}

async fn sign(root: &Root, manifest: &SnapshotManifest, signers: &Signers) -> Signed {
    let report = report_of(manifest, Outcome::Passed);
    put(root, manifest, &report, ReportDigest::of(&report.to_bytes()), signers).await.unwrap()
}

async fn checked(root: &Root, manifest: &SnapshotManifest, trust: &Trust) -> Result<Statement> {
    check(root, &manifest.id(), manifest, trust).await
}

#[tokio::test]
async fn each_set_of_keys_leaves_one_envelope_and_any_trusted_key_is_enough() {
    let house = House::new();
    let (root, manifest) = (house.root(), manifest_of(1));
    let error = checked(&root, &manifest, &house.trust(&["a"])).await.unwrap_err();
    assert!(
        error.class() == Class::Integrity && error.to_string().contains("nobody has signed it"),
        "{error}"
    );

    let first = sign(&root, &manifest, &house.signers(&["a"])).await;
    assert_eq!(first, Signed { number: 1, put: Put::Written });
    let again = sign(&root, &manifest, &house.signers(&["a"])).await;
    assert_eq!(again, Signed { number: 1, put: Put::Present });
    let both = sign(&root, &manifest, &house.signers(&["a", "b"])).await;
    assert_eq!(both, Signed { number: 2, put: Put::Written });
    assert_eq!(sign(&root, &manifest, &house.signers(&["b"])).await, Signed { number: 2, put: Put::Present });

    for names in [&["a"][..], &["b"], &["c", "b"]] {
        let statement = checked(&root, &manifest, &house.trust(names)).await.unwrap();
        assert_eq!(statement.predicate.gates[0].gate, "non_finite");
    }
    let error = checked(&root, &manifest, &house.trust(&["c"])).await.unwrap_err().to_string();
    let (a, b, c) = (house.key("a").id(), house.key("b").id(), house.key("c").id());
    for word in [a.to_string(), b.to_string(), c.to_string(), "weighbridge sign m@".to_owned()] {
        assert!(error.contains(&word), "{error}");
    }
}

#[tokio::test]
async fn what_is_damaged_altered_or_anothers_is_passed_over_and_counts_for_nothing() {
    let house = House::new();
    let (root, manifest, trust) = (house.root(), manifest_of(1), house.trust(&["a"]));
    let (id, model) = (manifest.id(), manifest.model.clone());
    let place = |number| house.file(&format!("store/{}", layout::signatures(&model, &id, number)));
    // Another snapshot's envelope, copied here.
    let other = manifest_of(2);
    sign(&root, &other, &house.signers(&["a"])).await;
    let of_other = house.file(&format!("store/{}", layout::signatures(&model, &other.id(), 1)));
    std::fs::copy(of_other, place(1)).unwrap();
    let error = checked(&root, &manifest, &trust).await.unwrap_err().to_string();
    assert!(error.contains("something else than this"), "{error}");
    std::fs::write(place(2), b"rubbish").unwrap();
    std::fs::write(place(3), vec![b' '; limits::ENVELOPE_BYTES + 1]).unwrap();
    let signed = sign(&root, &manifest, &house.signers(&["a"])).await;
    assert_eq!(signed, Signed { number: 4, put: Put::Written });
    checked(&root, &manifest, &trust).await.unwrap();

    let right = std::fs::read(place(4)).unwrap();
    let envelope = Envelope::parse(&right).unwrap();
    let alter = |change: &dyn Fn(&mut Envelope)| {
        let mut altered = envelope.clone();
        change(&mut altered);
        std::fs::write(place(4), altered.to_bytes()).unwrap();
    };
    let changes: [&dyn Fn(&mut Envelope); 5] = [
        &|envelope| envelope.payload.0[20] ^= 1,
        &|envelope| envelope.signatures[0].sig.0[3] ^= 1,
        &|envelope| envelope.payload_type.push('x'),
        &|envelope| envelope.signatures.clear(),
        &|envelope| {
            envelope.payload_type = "application/json".into();
            envelope.signatures = house.signers(&["a"]).sign("application/json", &envelope.payload.0);
        },
    ];
    for (index, change) in changes.iter().enumerate() {
        alter(change);
        assert!(checked(&root, &manifest, &trust).await.is_err(), "change {index}");
    }
    alter(&|envelope| envelope.signatures[0].keyid = "ed25519:0000000000000000".into());
    checked(&root, &manifest, &trust).await.unwrap();
    std::fs::write(place(4), right).unwrap();
    // The right id over another manifest, as a store that lies might have it.
    assert!(check(&root, &id, &manifest_of(3), &trust).await.is_err());
}

#[tokio::test]
async fn a_root_that_trusts_demands_signatures_of_manifest_and_report() {
    let house = House::new();
    let (plain, manifest) = (house.root(), manifest_of(1));
    let (id, model) = (manifest.id(), manifest.model.clone());
    let demanding = house.root().trusting(house.trust(&["a"]));
    let passed = report_of(&manifest, Outcome::Passed);
    manifest::put_report(&plain, &passed).await.unwrap();
    manifest::put(&plain, &manifest).await.unwrap();
    assert_eq!(manifest::get(&demanding, &model, &id).await.unwrap_err().class(), Class::Integrity);
    sign(&plain, &manifest, &house.signers(&["a"])).await;
    manifest::get(&demanding, &model, &id).await.unwrap();
    manifest::report(&demanding, &model, &id).await.unwrap();
    // A verdict that nobody signed does not take the place of one that somebody did.
    manifest::put_report(&plain, &report_of(&manifest, Outcome::Rejected)).await.unwrap();
    assert_eq!(manifest::report(&demanding, &model, &id).await.unwrap_err().class(), Class::Integrity);
    assert_eq!(manifest::report(&plain, &model, &id).await.unwrap().1, 2);
}

fn to(step: u64) -> Move {
    let (run, created_at) = ("r".parse().unwrap(), Timestamp::from_nanoseconds(0));
    Move { snapshot: manifest_of(step).id(), run, step, created_at, reason: Reason::Publish }
}

async fn append(root: &Root, model: &str, name: &str, step: u64) -> ChannelEntry {
    let operation =
        Operation { id: step.to_string(), who: "test".into(), when: Timestamp::from_nanoseconds(0) };
    let (model, name) = (model.parse().unwrap(), name.parse().unwrap());
    let channel = Channel::new(root, &model, &name);
    match channel.append(&operation, |_| Ok::<_, Infallible>(to(step))).await.unwrap() {
        Appended::Stands(entry) => entry,
        Appended::Declined { why, .. } => match why {},
    }
}

#[tokio::test]
async fn an_entry_is_signed_for_its_place_alone() {
    let house = House::new();
    let (plain, signing) = (house.root(), house.root().signing(house.signers(&["a"])));
    let demanding = house.root().trusting(house.trust(&["a"]));
    append(&plain, "m", "prod", 1).await;
    let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
    let channel = Channel::new(&demanding, &model, &name);
    assert_eq!(channel.latest().await.unwrap_err().class(), Class::Integrity, "an unsigned entry rules");
    append(&signing, "m", "prod", 2).await;
    let third = append(&signing, "m", "prod", 3).await;
    assert_eq!(channel.latest().await.unwrap(), Some(third.clone()));
    let steps: Vec<_> = channel.log(9).await.unwrap().iter().map(|entry| entry.step).collect();
    assert_eq!(steps, [3, 2], "what is older than the trust is left out");

    let place = |model: &str, name: &str, number: u64| {
        let key = layout::channel_entry(&model.parse().unwrap(), &name.parse().unwrap(), number);
        house.file(&format!("store/{key}"))
    };
    for (model, name) in [("m", "canary"), ("other", "prod")] {
        append(&plain, model, name, 1).await;
        append(&plain, model, name, 1).await;
        std::fs::copy(place("m", "prod", 3), place(model, name, 3)).unwrap();
        std::fs::copy(place("m", "prod", 2), place(model, name, 2)).unwrap();
        let (model, name) = (model.parse().unwrap(), name.parse().unwrap());
        let copied = Channel::new(&demanding, &model, &name).latest().await;
        assert_eq!(copied.unwrap_err().class(), Class::Integrity, "{model}@{name}");
    }
    let right = std::fs::read_to_string(place("m", "prod", 3)).unwrap();
    let trust = house.trust(&["a"]);
    let check = |text: &str| {
        let entry = ChannelEntry::parse(text.as_bytes()).unwrap();
        check_entry(&trust, &model, &name, &entry, text.as_bytes())
    };
    check(&right).unwrap();
    check(&right.replace(',', " ,\n")).unwrap();
    for (from, to) in [
        ("\"step\":3", "\"step\":4"),
        ("\"sequence\":3", "\"sequence\":4"),
        ("\"reason\":\"publish\"", "\"reason\":\"hold\""),
        ("\"step\":3", "\"later\":1,\"step\":3"),
        (&third.snapshot.to_string(), &manifest_of(9).id().to_string()),
    ] {
        let altered = right.replace(from, to);
        assert!(altered != right && check(&altered).is_err(), "{from}");
    }
    let mut by_other = third;
    sign_entry(&house.signers(&["b", "a"]), &model, &name, &mut by_other).unwrap();
    check(&String::from_utf8(by_other.to_bytes()).unwrap()).unwrap();
    sign_entry(&house.signers(&["b"]), &model, &name, &mut by_other).unwrap();
    let error = check(&String::from_utf8(by_other.to_bytes()).unwrap()).unwrap_err().to_string();
    assert!(error.contains(&house.key("b").id().to_string()) && error.contains("promote m@"), "{error}");
}

proptest! {
    #[test]
    fn no_envelope_makes_it_panic_and_none_that_was_changed_verifies(
        noise in proptest::collection::vec(any::<u8>(), 0..64),
        at in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let key = ed25519_dalek::SigningKey::from_bytes(&[7; 32]);
        let trust = Trust::new(vec![PublicKey::from_bytes(key.verifying_key().as_bytes()).unwrap()]).unwrap();
        let manifest = manifest_of(1);
        let report = report_of(&manifest, Outcome::Passed);
        let payload = Statement::new(&manifest, &report, ReportDigest::of(b"")).to_bytes();
        let message = weighbridge_schemas::signature::pre_authentication(STATEMENT_TYPE, &payload);
        let sig = Base64(ed25519_dalek::Signer::sign(&key, &message).to_vec());
        let signatures = vec![weighbridge_schemas::signature::Signature { keyid: String::new(), sig }];
        let whole = Envelope { payload_type: STATEMENT_TYPE.into(), payload: Base64(payload), signatures };
        let bytes = whole.to_bytes();
        let at = at.index(bytes.len());
        let mut spliced = bytes.clone();
        spliced.splice(at..(at + noise.len()).min(bytes.len()), noise.iter().copied());
        for hostile in [noise.clone(), spliced, bytes[..cut.index(bytes.len())].to_vec()] {
            let Ok(envelope) = Envelope::parse(&hostile) else { continue };
            let signer = trust.signer_of(&envelope.payload_type, &envelope.payload.0, &envelope.signatures);
            let same = (&envelope.payload_type, &envelope.payload) == (&whole.payload_type, &whole.payload);
            prop_assert!(signer.is_none() || same);
            let _ = Statement::parse(&envelope.payload.0);
        }
    }
}
