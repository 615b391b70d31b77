//! What a queued publish leaves in the store, so that any worker goes on where another stopped.
//!
//! A job is one publish of one checkpoint. Its documents are put only if absent: the first one rules, and whoever comes
//! later reads it. In the order in which they appear:
//!
//! | document | says |
//! |---|---|
//! | [`JobRecord`] | which checkpoint, under which policy: both are fixed from here on |
//! | [`JobPlan`] | what the checkpoint was when it was planned, and its parts |
//! | [`PartResult`] | the chunks of one part, and what was measured of them |
//! | [`Decision`] | whether the job may move its channel; written before it does |
//! | [`Outcome`] | how it ended; written last |
//! | [`Event`] | what a worker did, and how long it took: history for people, on which nothing rests but patience |

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::canonical;
use crate::checkpoint::{CheckpointManifest, Format, is_uuid};
use crate::dead::Body;
use crate::digests::PartialDigests;
use crate::error::{DocumentError, shorten};
use crate::ids::{Fingerprint, ObservationId, RulesDigest, SnapshotId};
use crate::json;
use crate::limits;
use crate::names::{ChannelName, ModelName};
use crate::signature::Signature;
use crate::snapshot::Chunk;
use crate::time::Timestamp;

mod statistics;
mod step;

pub use statistics::{Bits, PartStatistics};
pub use step::{Republish, RepublishSchema, Step, StepKind, StepSchema};

/// A job's id: the UUID of the checkpoint manifest that it publishes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(String);

impl JobId {
    /// The id as text: a lower-case UUID.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the job that publishes the checkpoint of `self` again because `ended`, which it had given way to,
    /// ended unpublished. Whoever works it out comes to the same.
    #[must_use]
    pub fn again_after(&self, ended: &Self) -> Self {
        Self::of(format!("{self} again after {ended}").as_bytes())
    }

    /// The id of a job that is known by `content`: the same for the same.
    #[must_use]
    pub fn of(content: &[u8]) -> Self {
        let hash = blake3::hash(content);
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.as_bytes()[..16]);
        // The version and variant of a UUID of one's own making (RFC 9562, section 5.8).
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for JobId {
    type Err = DocumentError;

    fn from_str(text: &str) -> Result<Self, DocumentError> {
        if is_uuid(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(DocumentError::malformed("job id", format!("{:?} is not a lower-case UUID", shorten(text))))
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for JobId {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "JobId".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "uuid" })
    }
}

/// A document with a version, a largest size, and canonical bytes.
pub trait Document: Serialize + DeserializeOwned {
    /// What it is called in messages.
    const NAME: &'static str;
    /// Its largest size, in bytes.
    const MOST: usize;

    /// Reads it.
    ///
    /// # Errors
    /// [`DocumentError`] where it is too large or malformed.
    fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        if bytes.len() > Self::MOST {
            let why = format!("{} bytes; at most {}", bytes.len(), Self::MOST);
            return Err(DocumentError::OverLimit { document: Self::NAME, why });
        }
        json::object(Self::NAME, bytes)
    }

    /// Its canonical bytes.
    fn to_bytes(&self) -> Vec<u8> {
        canonical::bytes(self)
    }
}

macro_rules! document {
    ($type:ident, $name:literal, $most:expr, $schema:ident, $version:literal) => {
        /// The `schema` field of the document of this name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
        pub enum $schema {
            /// Version 1.
            #[default]
            #[serde(rename = $version)]
            V1,
        }

        impl Document for $type {
            const NAME: &'static str = $name;
            const MOST: usize = $most;
        }
    };
}
use document;

document!(JobRecord, "job record", limits::JOB_RECORD_BYTES, RecordSchema, "weighbridge.job/v1");
document!(JobPlan, "job plan", limits::JOB_PLAN_BYTES, PlanSchema, "weighbridge.plan/v1");
document!(PartResult, "part result", limits::PART_RESULT_BYTES, PartSchema, "weighbridge.part/v1");
document!(Decision, "decision", limits::JOB_DOCUMENT_BYTES, DecisionSchema, "weighbridge.decision/v1");
document!(Outcome, "outcome", limits::JOB_DOCUMENT_BYTES, OutcomeSchema, "weighbridge.outcome/v1");
document!(Event, "event", limits::JOB_DOCUMENT_BYTES, EventSchema, "weighbridge.event/v1");

/// What a job publishes, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JobRecord {
    /// Always `weighbridge.job/v1`.
    pub schema: RecordSchema,
    /// The manifest, whose id is the job's.
    pub manifest: CheckpointManifest,
    /// The manifest as it was dropped, to the byte: it may say more than this version reads. Absent where an operator,
    /// or another job, asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<Body>,
    /// The policy as it was when the job was accepted, in TOML; a later change of a named one is not seen.
    pub policy: String,
    /// Where that policy came from, for people: `manifest`, `request`, `store NAME`, `default`.
    pub policy_from: String,
    /// The channel to move.
    pub channel: ChannelName,
    /// Whether it moves the channel to an older step too: an operator said so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub promote: bool,
    /// The job that it repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats: Option<JobId>,
    /// The operator who asked for it; absent for what a trainer dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_by: Option<String>,
    /// When a worker accepted it, by that worker's clock.
    pub accepted_at: Timestamp,
}

impl JobRecord {
    /// The job's id.
    #[must_use]
    pub fn job(&self) -> JobId {
        JobId(self.manifest.id.clone())
    }
}

/// What is decided before the first tensor byte is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JobPlan {
    /// Always `weighbridge.plan/v1`.
    pub schema: PlanSchema,
    /// What the checkpoint was: every part checks that it still is.
    pub fingerprint: Fingerprint,
    /// The digest of the rules.
    pub rules: RulesDigest,
    /// The version of the encodings; a worker that lacks it gives a part back.
    pub encoding_version: u32,
    /// The checkpoint's format.
    pub format: Format,
    /// Bytes of tensors and artifacts that are read.
    pub bytes: u64,
    /// The parts, which hold all chunks of the plan in order.
    pub parts: Vec<PartRange>,
}

impl JobPlan {
    /// What is signed of the result of part number `part` of `job`, whose stored bytes are `json`: the canonical bytes
    /// of an object with these three, with where the part begins, the rules and the version of the encodings, and with
    /// the result without its signatures. Plans are not signed: a result that was made by one is none by another.
    ///
    /// # Errors
    /// [`DocumentError`] where `json` is no object, or the plan has no such part.
    pub fn signed_part(
        &self,
        model: &ModelName,
        job: &JobId,
        part: u64,
        json: &[u8],
    ) -> Result<Vec<u8>, DocumentError> {
        let range = usize::try_from(part).ok().and_then(|part| self.parts.get(part));
        let no_part = || DocumentError::malformed(PartResult::NAME, "the job's plan has no such part");
        let first = range.ok_or_else(no_part)?.first;
        let mut result: serde_json::Map<String, serde_json::Value> = json::object(PartResult::NAME, json)?;
        result.remove("signatures");
        Ok(canonical::bytes(&serde_json::json!({
            "encoding_version": self.encoding_version,
            "first": first,
            "job": job,
            "model": model,
            "part": part,
            "result": result,
            "rules": self.rules,
        })))
    }
}

/// The chunks of one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartRange {
    /// The first chunk's place in the plan.
    pub first: u64,
    /// How many chunks.
    pub count: u64,
    /// Bytes that are read for it.
    pub bytes: u64,
}

/// The chunks of one part, stored, and what was measured of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartResult {
    /// Always `weighbridge.part/v1`.
    pub schema: PartSchema,
    /// What the checkpoint was.
    pub fingerprint: Fingerprint,
    /// The chunks in order.
    pub chunks: Vec<PartChunk>,
    /// What its worker knows of the digests that are declared of the checkpoint's bytes.
    #[serde(default, skip_serializing_if = "PartialDigests::is_empty")]
    pub digests: PartialDigests,
    /// Chunk bytes that were written.
    pub bytes_stored: u64,
    /// Chunk bytes that were there already.
    pub bytes_reused: u64,
    /// Signatures on [`JobPlan::signed_part`]. Absent where nobody signed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<Signature>,
}

/// A chunk, and the statistics of the rows in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartChunk {
    /// The chunk.
    pub chunk: Chunk,
    /// Of each run of rows of one tensor, in order.
    pub statistics: Vec<PartStatistics>,
}

/// Whether a job may move its channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Decision {
    /// Always `weighbridge.decision/v1`.
    pub schema: DecisionSchema,
    /// What was decided.
    pub decision: Decided,
    /// The job that it gives way to, where it was coalesced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<JobId>,
    /// Who decided it: a worker, or an operator.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

/// What can be decided of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decided {
    /// It goes on to its channel.
    Proceed,
    /// An operator ended it.
    Cancelled,
    /// A newer step goes in its place.
    Coalesced,
    /// It cannot be published.
    Dead,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outcome {
    /// Always `weighbridge.outcome/v1`.
    pub schema: OutcomeSchema,
    /// How.
    pub outcome: Ended,
    /// The snapshot, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// The number of its entry in the channel's log, where it was published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The job that it gave way to, where it was coalesced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<JobId>,
    /// Why it is dead or quarantined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Why>,
    /// Chunk bytes that were written.
    #[serde(default)]
    pub bytes_stored: u64,
    /// Chunk bytes that were there already.
    #[serde(default)]
    pub bytes_reused: u64,
    /// Who wrote it.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

/// The ends of a job. There is no other, and no job has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The channel points at its snapshot.
    Published,
    /// The channel pointed at its snapshot already.
    Unchanged,
    /// Its snapshot is stored; the channel keeps a newer step, or another run's.
    Superseded,
    /// A newer step, which was queued behind it, went in its place.
    Coalesced,
    /// Its snapshot is stored; an operator holds the channel.
    Held,
    /// Its snapshot is stored, on no channel: a gate rejected it.
    Quarantined,
    /// There is no snapshot: a dead letter says why.
    Dead,
    /// An operator ended it.
    Cancelled,
}

impl Ended {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Published,
        Self::Unchanged,
        Self::Superseded,
        Self::Coalesced,
        Self::Held,
        Self::Quarantined,
        Self::Dead,
        Self::Cancelled,
    ];

    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::Unchanged => "unchanged",
            Self::Superseded => "superseded",
            Self::Coalesced => "coalesced",
            Self::Held => "held",
            Self::Quarantined => "quarantined",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether those who gave way to it were cheated of their turn.
    #[must_use]
    pub const fn leaves_a_gap(self) -> bool {
        matches!(self, Self::Quarantined | Self::Dead | Self::Cancelled)
    }
}

/// A failure, as it stands in a document: see the command line's errors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Why {
    /// `transient`, `permanent`, `conflict` or `unknown_outcome`.
    pub kind: String,
    /// The stable class.
    pub class: String,
    /// What happened, to what, and the way out.
    pub message: String,
}

/// What a worker did with one message of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Always `weighbridge.event/v1`.
    pub schema: EventSchema,
    /// Which step.
    pub step: StepKind,
    /// Which part, where it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u64>,
    /// What came of it.
    pub came: Came,
    /// Why it is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Why>,
    /// In how many milliseconds it is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again_in: Option<u64>,
    /// What the checkpoint's files looked like, where it was not complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<ObservationId>,
    /// Who did it.
    pub who: String,
    /// When it began, by their clock.
    pub began: Timestamp,
    /// How long it took, in milliseconds.
    pub milliseconds: u64,
    /// Bytes that were read of the checkpoint.
    #[serde(default)]
    pub bytes: u64,
}

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Came {
    /// It was done.
    Done,
    /// The checkpoint is not complete yet: it is tried again later.
    NotReady,
    /// Other jobs of the model go first: it is tried again later.
    Waits,
    /// Something failed that may not fail again: it is tried again later.
    Failed,
    /// It cannot be done: the job is dead.
    Dead,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_job_that_goes_again_has_an_id_that_follows_from_both() {
        let id = |text: &str| text.parse::<JobId>().unwrap();
        let first = id("0f8fad5b-d9cb-469f-a165-70867728950e");
        let second = id("00000000-0000-4000-8000-000000000001");
        let again = first.again_after(&second);
        assert_eq!(again.as_str().parse::<JobId>().unwrap(), again);
        assert_eq!(again, first.again_after(&second));
        assert_ne!(again, second.again_after(&first));
        assert_eq!(&again.as_str()[14..15], "8");
    }

    #[test]
    fn a_part_is_signed_for_its_place_in_its_plan_with_all_that_its_result_says() {
        let plan = json!({
            "schema": "weighbridge.plan/v1", "fingerprint": "0".repeat(64), "rules": "1".repeat(64),
            "encoding_version": 2, "format": "dcp", "bytes": 3,
            "parts": [{ "first": 0, "count": 2, "bytes": 2 }, { "first": 2, "count": 2, "bytes": 1 }],
        });
        let result = json!({
            "schema": "weighbridge.part/v1", "fingerprint": "0".repeat(64), "chunks": [],
            "bytes_stored": 0, "bytes_reused": 0,
        });
        let job: JobId = "0f8fad5b-d9cb-469f-a165-70867728950e".parse().unwrap();
        let signed = |plan: &serde_json::Value, part, result: &serde_json::Value| {
            let plan = JobPlan::parse(plan.to_string().as_bytes()).unwrap();
            plan.signed_part(&"m".parse().unwrap(), &job, part, result.to_string().as_bytes())
        };
        let bytes = signed(&plan, 1, &result).unwrap();
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(text.starts_with("{\"encoding_version\":2,\"first\":2,\"job\":\"0f8f"), "{text}");
        let parsed = PartResult::parse(result.to_string().as_bytes()).unwrap();
        assert!(!String::from_utf8(parsed.to_bytes()).unwrap().contains("signatures"));
        assert_ne!(signed(&plan, 0, &result).unwrap(), bytes);
        let mut others = [plan.clone(), plan.clone(), plan.clone()];
        others[0]["parts"][1]["first"] = json!(0);
        others[1]["rules"] = json!("2".repeat(64));
        others[2]["encoding_version"] = json!(1);
        assert!(others.iter().all(|other| signed(other, 1, &result).unwrap() != bytes));
        let with = |field: &str, value| {
            let mut result = result.clone();
            result[field] = value;
            signed(&plan, 1, &result).unwrap()
        };
        assert_eq!(with("signatures", json!([{ "sig": "AA==" }])), bytes);
        assert_ne!(with("from_the_future", json!(true)), bytes);
        assert!(signed(&plan, 2, &result).is_err());
    }

    #[test]
    fn documents_come_back_as_they_were_and_what_is_wrong_is_refused() {
        let step = json!({
            "schema": "weighbridge.step/v1", "model": "m", "job": "0f8fad5b-d9cb-469f-a165-70867728950e",
            "step": "part", "part": 3, "from_the_future": true,
        });
        let read = Step::parse(step.to_string().as_bytes()).unwrap();
        assert_eq!(Step::parse(&read.to_bytes()).unwrap(), read);
        assert_eq!(read.message_id(), "0f8fad5b-d9cb-469f-a165-70867728950e.part.3");
        for (field, value) in [
            ("schema", json!("weighbridge.step/v2")),
            ("model", json!("../m")),
            ("job", json!("0F8FAD5B-D9CB-469F-A165-70867728950E")),
            ("step", json!("promote")),
            ("part", json!(-1)),
        ] {
            let mut wrong = step.clone();
            wrong[field] = value;
            assert!(Step::parse(wrong.to_string().as_bytes()).is_err(), "{field}");
        }
        let long = vec![b' '; Step::MOST + 1];
        assert!(matches!(Step::parse(&long), Err(DocumentError::OverLimit { .. })));
    }
}
