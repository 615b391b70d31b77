//! What must hold of every document: policies, manifests, channel entries, reports.
//!
//! A document that is accepted has to survive being written and read again; what its id is made of has to be the same
//! bytes each time.

use std::fmt::Debug;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::dead::DeadLetter;
use weighbridge_schemas::digests::PartialDigests;
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::job::{
    Decision, Document, Event, JobPlan, JobRecord, Outcome, PartResult, Republish, Step,
};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::{Policy, Treatment};
use weighbridge_schemas::report::Report;
use weighbridge_schemas::signature::{Envelope, Statement};
use weighbridge_schemas::snapshot::SnapshotManifest;

/// Names that every accepted policy is asked about.
const NAMES: [&str; 6] = [
    "",
    "model.ebc.embedding_bags.t1.weight",
    "optim.state.t1.weight.exp_avg",
    "a.b",
    "模型.表",
    "$1.**.${2}",
];

/// A policy's TOML.
///
/// # Panics
/// Where its rules have two digests, or two answers about one name.
pub fn policy(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (Ok(policy), Ok(again)) = (Policy::parse(text), Policy::parse(text)) else {
        assert!(Policy::parse(text).is_err(), "one text is refused and accepted");
        return;
    };
    assert_eq!(policy.rules_digest(), again.rules_digest());
    let quoted = text.split(['"', '\'']).take(16);
    for name in NAMES.into_iter().chain(quoted).filter_map(|name| name.parse::<TensorName>().ok()) {
        let treatment = policy.treat(&name);
        assert_eq!(treatment, again.treat(&name));
        if let Ok((_, Treatment::Publish { name, .. })) = treatment {
            assert!(name.as_str().parse::<TensorName>().is_ok(), "{name:?}");
        }
    }
}

/// A checkpoint manifest.
///
/// # Panics
/// Where it cannot be written and read again.
pub fn checkpoint_manifest(input: &[u8]) {
    let Ok(manifest) = CheckpointManifest::parse(input) else { return };
    assert!(manifest.priority <= 9, "{}", manifest.priority);
    let written = serde_json::to_vec(&manifest).unwrap_or_default();
    assert_same(&manifest, CheckpointManifest::parse(&written));
}

/// A snapshot manifest.
///
/// # Panics
/// Where its canonical bytes read back as another manifest, or its tensors lie outside its files.
pub fn snapshot_manifest(input: &[u8]) {
    let Ok(manifest) = SnapshotManifest::parse(input) else { return };
    let written = manifest.to_bytes();
    let again = SnapshotManifest::parse(&written);
    assert!(again.as_ref().is_ok_and(|again| again.id() == manifest.id() && again.to_bytes() == written));
    for tensor in &manifest.tensors {
        let file = manifest.files.iter().find(|file| file.name == tensor.file);
        assert!(file.is_some_and(|file| tensor.end <= file.size), "{tensor:?}");
        assert_eq!(tensor.stored_bytes(), tensor.end.checked_sub(tensor.begin), "{tensor:?}");
    }
    assert!(manifest.chunks().into_values().sum::<u64>() <= manifest.bytes(), "chunks are counted once");
    assert_same(&manifest, again);
}

/// A channel's entry.
///
/// # Panics
/// Where its canonical bytes read back as another entry.
pub fn channel_entry(input: &[u8]) {
    let Ok(entry) = ChannelEntry::parse(input) else { return };
    assert_same(&entry, ChannelEntry::parse(&entry.to_bytes()));
}

/// A signature envelope, with the statement in it.
///
/// # Panics
/// Where it is over its limits, or either cannot be written and read again.
pub fn envelope(input: &[u8]) {
    let Ok(envelope) = Envelope::parse(input) else { return };
    assert!(envelope.signatures.len() <= limits::SIGNATURES);
    let written = envelope.to_bytes();
    // What was written without padding is written with it, and may then be over the limit.
    if written.len() <= limits::ENVELOPE_BYTES {
        assert_same(&envelope, Envelope::parse(&written));
    }
    let Ok(statement) = Statement::parse(&envelope.payload.0) else { return };
    assert_eq!(statement.subject.len(), 1);
    assert_same(&statement, Statement::parse(&statement.to_bytes()));
}

/// A validation report. Its figures may lose their last bit when they are read, so only the second writing is exact.
///
/// # Panics
/// Where it cannot be written and read again.
pub fn report(input: &[u8]) {
    let Ok(report) = Report::parse(input) else { return };
    let again = Report::parse(&report.to_bytes());
    let same = |again: &Report| {
        (again.snapshot, again.step, again.outcome) == (report.snapshot, report.step, report.outcome)
            && (&again.dropped, &again.notes) == (&report.dropped, &report.notes)
            && (again.gates.len(), again.tensors.len()) == (report.gates.len(), report.tensors.len())
    };
    assert!(again.as_ref().is_ok_and(same), "{again:?} is not {report:?}");
}

/// A document of a queued publish, whichever: what workers, operators and the queue hand each other.
///
/// # Panics
/// Where it cannot be written and read again.
pub fn queued(input: &[u8]) {
    written_again::<JobRecord>(input);
    written_again::<JobPlan>(input);
    written_again::<PartResult>(input);
    written_again::<Decision>(input);
    written_again::<Outcome>(input);
    written_again::<Event>(input);
    written_again::<Step>(input);
    written_again::<Republish>(input);
    written_again::<DeadLetter>(input);
    if let Ok(digests) = PartialDigests::parse(input) {
        assert_same(&digests, PartialDigests::parse(&digests.to_bytes()));
    }
}

fn written_again<D: Document + Debug + PartialEq>(input: &[u8]) {
    let Ok(document) = D::parse(input) else { return };
    assert_same(&document, D::parse(&document.to_bytes()));
}

fn assert_same<T: Debug + PartialEq>(document: &T, again: Result<T, DocumentError>) {
    assert_eq!(again.as_ref(), Ok(document));
}
