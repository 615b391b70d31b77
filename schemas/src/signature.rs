//! Signatures: DSSE envelopes, and what ours hold: an in-toto statement about a snapshot.
//!
//! What is signed is never JSON as such but the bytes that [`pre_authentication`] makes of a type and a body, so that
//! nobody has to agree on how JSON is written, and a signature on one kind of thing is none on another. The keys and
//! the arithmetic are elsewhere; here is what is said.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_PAD_INDIFFERENT, URL_SAFE_PAD_INDIFFERENT};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::canonical;
use crate::error::DocumentError;
use crate::ids::{Fingerprint, ReportDigest, RulesDigest, SnapshotId};
use crate::json;
use crate::limits;
use crate::names::{ModelName, RunName};
use crate::report::{Outcome, Report};
use crate::snapshot::SnapshotManifest;

/// The payload type of an envelope that holds a [`Statement`].
pub const STATEMENT_TYPE: &str = "application/vnd.in-toto+json";
/// The payload type under which a channel entry is signed.
pub const CHANNEL_ENTRY_TYPE: &str = "application/vnd.weighbridge.channel-entry.v1+json";
/// The payload type under which the result of a job's part is signed.
pub const PART_TYPE: &str = "application/vnd.weighbridge.part.v1+json";

const ENVELOPE: &str = "signature envelope";
const STATEMENT: &str = "signed statement";

/// The bytes that are signed for `body`, which is of `payload_type`: DSSE's pre-authentication encoding.
#[must_use]
pub fn pre_authentication(payload_type: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), body.len());
    [head.as_bytes(), body].concat()
}

/// One signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Signature {
    /// A hint at the key. Nobody relies on it: it is not signed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub keyid: String,
    /// The signature: of Ed25519, 64 bytes.
    pub sig: Base64,
}

/// Signatures around a payload, as in DSSE. Unknown fields are ignored when read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Envelope {
    /// What the payload is.
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// The payload.
    pub payload: Base64,
    /// At least one, in well-formed envelopes.
    pub signatures: Vec<Signature>,
}

impl Envelope {
    /// The bytes that are stored.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        canonical::bytes(self)
    }

    /// Reads an envelope. Who signed it, and whether they did, is not looked at.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no envelope, or over a limit.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        within(ENVELOPE, json.len(), limits::ENVELOPE_BYTES, "bytes")?;
        let envelope: Self = json::object(ENVELOPE, json)?;
        within(ENVELOPE, envelope.signatures.len(), limits::SIGNATURES, "signatures")?;
        Ok(envelope)
    }
}

/// Checks a number against its limit.
pub(crate) fn within(
    document: &'static str,
    found: usize,
    most: usize,
    what: &str,
) -> Result<(), DocumentError> {
    if found <= most {
        return Ok(());
    }
    Err(DocumentError::OverLimit { document, why: format!("{found} {what}; at most {most}") })
}

/// Bytes in base64: written in the standard alphabet with padding, read in either alphabet, with padding or without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base64(pub Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let read = STANDARD_PAD_INDIFFERENT.decode(&text);
        let read = read.or_else(|error| URL_SAFE_PAD_INDIFFERENT.decode(&text).map_err(|_| error));
        read.map(Self).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Base64 {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Base64".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "contentEncoding": "base64" })
    }
}

/// The `_type` of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum StatementType {
    /// in-toto's version 1.
    #[default]
    #[serde(rename = "https://in-toto.io/Statement/v1")]
    V1,
}

/// The `predicateType` of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum PredicateType {
    /// Version 1 of what we say about a snapshot.
    #[default]
    #[serde(rename = "urn:weighbridge:snapshot:v1")]
    V1,
}

/// What is signed of a snapshot: an in-toto statement. It holds no time, so that signing again with the same key gives
/// the same bytes. Unknown fields are ignored when read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Statement {
    /// Always `https://in-toto.io/Statement/v1`.
    #[serde(rename = "_type")]
    pub statement: StatementType,
    /// The snapshot, and nothing else.
    pub subject: Vec<Subject>,
    /// Always `urn:weighbridge:snapshot:v1`.
    #[serde(rename = "predicateType")]
    pub predicate_type: PredicateType,
    /// What is said of it.
    pub predicate: Predicate,
}

/// What a statement is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Subject {
    /// `MODEL@SNAPSHOT`, for people.
    pub name: String,
    /// Its digests.
    pub digest: SubjectDigest,
}

/// The digests of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SubjectDigest {
    /// The snapshot's id, which is the BLAKE3 of its manifest's bytes. The manifest names every chunk by its BLAKE3.
    pub blake3: SnapshotId,
}

/// What is said of a snapshot: where it comes from, and how it was judged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Predicate {
    /// The model.
    pub model: ModelName,
    /// The training run.
    pub run: RunName,
    /// The training step.
    pub step: u64,
    /// The checkpoint's fingerprint.
    pub checkpoint: Fingerprint,
    /// The digest of the policy's rules.
    pub rules: RulesDigest,
    /// The version of the encoders.
    pub encoding_version: u32,
    /// What the gates came to in all.
    pub outcome: Outcome,
    /// Every gate that was applied.
    pub gates: Vec<SignedGate>,
    /// The digest of the validation report.
    pub report: ReportDigest,
}

/// What one gate came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignedGate {
    /// The gate's name in the policy.
    pub gate: String,
    /// What it came to.
    pub outcome: Outcome,
    /// How many tensors it found something in.
    pub findings: u64,
}

impl Statement {
    /// The statement about the snapshot that `report` is of; `digest` is that of the report's stored bytes.
    #[must_use]
    pub fn new(manifest: &SnapshotManifest, report: &Report, digest: ReportDigest) -> Self {
        let gates = report.gates.iter().map(|gate| SignedGate {
            gate: gate.gate.clone(),
            outcome: gate.outcome,
            findings: gate.findings.len() as u64,
        });
        Self {
            statement: StatementType::V1,
            subject: vec![Subject {
                name: format!("{}@{}", manifest.model, report.snapshot),
                digest: SubjectDigest { blake3: report.snapshot },
            }],
            predicate_type: PredicateType::V1,
            predicate: Predicate {
                model: manifest.model.clone(),
                run: manifest.run.clone(),
                step: manifest.step,
                checkpoint: manifest.checkpoint,
                rules: manifest.rules,
                encoding_version: manifest.encoding_version,
                outcome: report.outcome,
                gates: gates.collect(),
                report: digest,
            },
        }
    }

    /// The canonical bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        canonical::bytes(self)
    }

    /// Reads a statement.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no statement of ours, or it is about anything but one snapshot.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        within(STATEMENT, json.len(), limits::ENVELOPE_BYTES, "bytes")?;
        let statement: Self = json::object(STATEMENT, json)?;
        match statement.subject.len() {
            1 => Ok(statement),
            other => Err(DocumentError::malformed(STATEMENT, format!("{other} subjects, where 1 belongs"))),
        }
    }

    /// Whether it is about snapshot `id`, whose manifest is `manifest`.
    #[must_use]
    pub fn is_of(&self, id: &SnapshotId, manifest: &SnapshotManifest) -> bool {
        let said = &self.predicate;
        self.subject.iter().all(|subject| subject.digest.blake3 == *id)
            && (&said.model, &said.run, said.step) == (&manifest.model, &manifest.run, manifest.step)
            && (said.checkpoint, said.rules) == (manifest.checkpoint, manifest.rules)
            && said.encoding_version == manifest.encoding_version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_that_are_signed_are_those_of_the_specification() {
        let signed = pre_authentication("http://example.com/HelloWorld", b"hello world");
        assert_eq!(signed, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
        assert_eq!(pre_authentication("", b""), b"DSSEv1 0  0 ");
        // Lengths count bytes, and what stands in the body cannot pass for a length.
        assert_eq!(pre_authentication("\u{e9}", b"1 a"), "DSSEv1 2 \u{e9} 3 1 a".as_bytes());
    }

    #[test]
    fn envelopes_are_read_in_either_alphabet_and_within_limits() {
        let parse = |payload: &str, more: &str| {
            let json = format!(
                r#"{{"payload":"{payload}","payloadType":"t","signatures":[{{"sig":"AA=="{more}}}],"x":[1]}}"#
            );
            Envelope::parse(json.as_bytes())
        };
        let standard = parse("+/8=", "").unwrap();
        assert_eq!((&standard.payload.0[..], &*standard.signatures[0].keyid), (&[0xfb, 0xff][..], ""));
        for same in ["+/8", "-_8=", "-_8"] {
            assert_eq!(parse(same, r#","unknown":{}"#).unwrap(), standard, "{same}");
        }
        assert_eq!(Envelope::parse(&standard.to_bytes()).unwrap(), standard);
        for wrong in ["+_8=", "+/9=", "+", "\u{e9}"] {
            assert!(parse(wrong, "").is_err(), "{wrong}");
        }
        let many = r#"{"sig":""},"#.repeat(limits::SIGNATURES);
        let json = format!(r#"{{"payload":"","payloadType":"","signatures":[{many}{{"sig":""}}]}}"#);
        assert!(matches!(Envelope::parse(json.as_bytes()), Err(DocumentError::OverLimit { .. })));
        let large = vec![b' '; limits::ENVELOPE_BYTES + 1];
        assert!(matches!(Envelope::parse(&large), Err(DocumentError::OverLimit { .. })));
    }
}
