//! Channel entries `weighbridge.channel/v1`, and the rule that says which publish may move a channel.
//!
//! A channel is an append-only log of entries, numbered densely from 1 and written by put-if-absent; the highest
//! sequence rules. A channel never moves backwards by itself ([`decide`]).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::canonical;
use crate::error::DocumentError;
use crate::ids::{EntryId, SnapshotId};
use crate::json;
use crate::limits;
use crate::names::{ChannelName, ModelName, RunName};
use crate::policy::OtherRun;
use crate::signature::{Signature, within};
use crate::time::Timestamp;

const DOCUMENT: &str = "channel entry";

/// The `schema` field of a channel entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ChannelSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.channel/v1")]
    V1,
}

/// Why a channel got an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A publish moved it.
    Publish,
    /// An operator moved it; a hold ends.
    Promote,
    /// An operator moved it back, and holds it.
    Rollback,
    /// An operator holds it where it is.
    Hold,
    /// An operator ends the hold.
    Release,
}

impl Reason {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Promote => "promote",
            Self::Rollback => "rollback",
            Self::Hold => "hold",
            Self::Release => "release",
        }
    }

    /// Whether the channel is held once this entry rules.
    #[must_use]
    pub const fn holds(self) -> bool {
        matches!(self, Self::Rollback | Self::Hold)
    }
}

/// One entry of a channel's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChannelEntry {
    /// Always `weighbridge.channel/v1`.
    pub schema: ChannelSchema,
    /// From 1 on, without holes.
    pub sequence: u64,
    /// A hash of the operation and the channel: whoever takes over an unknown outcome recognises the entry by it.
    pub id: EntryId,
    /// Where the channel points.
    pub snapshot: SnapshotId,
    /// Where it pointed before; absent in the first entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<SnapshotId>,
    /// The snapshot's training run.
    pub run: RunName,
    /// The snapshot's training step.
    pub step: u64,
    /// When the checkpoint was written.
    pub created_at: Timestamp,
    /// Why the entry was written.
    pub reason: Reason,
    /// Who wrote it.
    pub who: String,
    /// When it was written.
    pub when: Timestamp,
    /// Signatures on [`signed_bytes`]. Absent where nobody signed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<Signature>,
}

impl ChannelEntry {
    /// The canonical bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        canonical::bytes(self)
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no channel entry.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        within(DOCUMENT, json.len(), limits::CHANNEL_ENTRY_BYTES, "bytes")?;
        let entry: Self = json::object(DOCUMENT, json)?;
        within(DOCUMENT, entry.signatures.len(), limits::SIGNATURES, "signatures")?;
        Ok(entry)
    }
}

/// What is signed of the entry whose stored bytes are `json`: the canonical bytes of an object with the fields
/// `channel`, `entry` and `model`, the entry without its signatures. With model, channel and sequence in it, a copy
/// elsewhere is signed by nobody. Fields of the entry that this version does not know are signed too.
///
/// # Errors
/// [`DocumentError`] where `json` is no object.
pub fn signed_bytes(model: &ModelName, channel: &ChannelName, json: &[u8]) -> Result<Vec<u8>, DocumentError> {
    within(DOCUMENT, json.len(), limits::CHANNEL_ENTRY_BYTES, "bytes")?;
    let mut entry: serde_json::Map<String, serde_json::Value> = json::object(DOCUMENT, json)?;
    entry.remove("signatures");
    Ok(canonical::bytes(&serde_json::json!({ "channel": channel, "entry": entry, "model": model })))
}

/// The id of the entry that `operation` (a job's or operator request's id) writes into `channel`.
#[must_use]
pub fn entry_id(operation: &str, channel: &ChannelName) -> EntryId {
    EntryId::of(format!("weighbridge.channel/v1\n{operation}\n{channel}").as_bytes())
}

/// What a publish would put on a channel.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Its training run.
    pub run: &'a RunName,
    /// Its training step.
    pub step: u64,
}

/// Whether a publish moves a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It does.
    Move,
    /// The channel points there already.
    Unchanged,
    /// The channel holds a newer step, or another run's that the policy protects.
    Superseded,
    /// An operator holds the channel.
    Held,
}

/// Whether a publish of `candidate` moves a channel whose latest entry is `latest`. An equal step of the same run
/// takes the channel by being the newest publish; an older one does not; another run's only where `other_run` says.
#[must_use]
pub fn decide(latest: Option<&ChannelEntry>, candidate: Candidate<'_>, other_run: OtherRun) -> Decision {
    let Some(latest) = latest else { return Decision::Move };
    if latest.snapshot == candidate.snapshot {
        return Decision::Unchanged;
    }
    if latest.reason.holds() {
        return Decision::Held;
    }
    let newer = if latest.run == *candidate.run {
        candidate.step >= latest.step
    } else {
        other_run == OtherRun::Take
    };
    if newer { Decision::Move } else { Decision::Superseded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(step: u64, reason: Reason) -> ChannelEntry {
        ChannelEntry {
            schema: ChannelSchema::V1,
            sequence: 3,
            id: entry_id("operation", &"prod".parse().unwrap()),
            snapshot: SnapshotId::of(b"latest"),
            previous: None,
            run: "r1".parse().unwrap(),
            step,
            created_at: Timestamp::from_nanoseconds(0),
            reason,
            who: "operator".into(),
            when: Timestamp::from_nanoseconds(1),
            signatures: Vec::new(),
        }
    }

    fn decided(latest: &ChannelEntry, run: &str, step: u64, other_run: OtherRun) -> Decision {
        let run = run.parse().unwrap();
        let candidate = Candidate { snapshot: SnapshotId::of(b"candidate"), run: &run, step };
        decide(Some(latest), candidate, other_run)
    }

    #[test]
    fn a_channel_never_moves_backwards_by_itself() {
        let latest = entry(5, Reason::Publish);
        assert_eq!(decided(&latest, "r1", 6, OtherRun::Refuse), Decision::Move);
        assert_eq!(decided(&latest, "r1", 5, OtherRun::Refuse), Decision::Move);
        assert_eq!(decided(&latest, "r1", 4, OtherRun::Refuse), Decision::Superseded);
        assert_eq!(decided(&latest, "r2", 9, OtherRun::Refuse), Decision::Superseded);
        assert_eq!(decided(&latest, "r2", 1, OtherRun::Take), Decision::Move);
        let same = Candidate { snapshot: latest.snapshot, run: &latest.run, step: 5 };
        assert_eq!(decide(Some(&latest), same, OtherRun::Refuse), Decision::Unchanged);
        assert_eq!(decide(None, same, OtherRun::Refuse), Decision::Move);
    }

    #[test]
    fn a_held_channel_takes_no_publish() {
        for reason in [Reason::Rollback, Reason::Hold] {
            assert_eq!(decided(&entry(5, reason), "r1", 6, OtherRun::Take), Decision::Held);
        }
        for reason in [Reason::Promote, Reason::Release] {
            assert_eq!(decided(&entry(5, reason), "r1", 6, OtherRun::Refuse), Decision::Move);
        }
    }

    #[test]
    fn entries_round_trip() {
        let entry = entry(5, Reason::Hold);
        assert_eq!(ChannelEntry::parse(&entry.to_bytes()).unwrap(), entry);
        assert!(ChannelEntry::parse(b"{}").is_err());
    }

    #[test]
    fn what_is_signed_names_model_and_channel_and_holds_all_but_the_signatures() {
        let (model, prod) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let unsigned = entry(5, Reason::Hold);
        assert!(
            !String::from_utf8(unsigned.to_bytes()).unwrap().contains("signatures"),
            "bytes stay as they were"
        );
        let bytes = signed_bytes(&model, &prod, &unsigned.to_bytes()).unwrap();
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(text.starts_with("{\"channel\":\"prod\",\"entry\":{\"created_at\":"), "{text}");
        assert!(text.ends_with("},\"model\":\"m\"}"), "{text}");
        let mut signed = unsigned;
        signed.signatures = vec![Signature { keyid: "k".into(), sig: crate::signature::Base64(vec![1]) }];
        assert_eq!(ChannelEntry::parse(&signed.to_bytes()).unwrap(), signed);
        assert_eq!(signed_bytes(&model, &prod, &signed.to_bytes()).unwrap(), bytes);
        let later = text.replace("\"step\":5", "\"later\":true,\"step\":5");
        let later: serde_json::Value = serde_json::from_str(&later).unwrap();
        let of_later = signed_bytes(&model, &prod, later["entry"].to_string().as_bytes()).unwrap();
        assert_ne!(of_later, bytes, "what this version does not know is signed too");
        signed.signatures = vec![signed.signatures[0].clone(); limits::SIGNATURES + 1];
        assert!(ChannelEntry::parse(&signed.to_bytes()).is_err());
    }
}
