//! The checkpoint manifest `weighbridge.checkpoint/v1`: the small document that a trainer drops.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::ids::FileDigest;
use crate::json;
use crate::limits;
use crate::names::{ChannelName, ModelName, PolicyName, RunName};
use crate::policy::Policy;
use crate::time::Timestamp;

const DOCUMENT: &str = "checkpoint manifest";

/// The `schema` field of a checkpoint manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum CheckpointSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.checkpoint/v1")]
    V1,
}

/// A checkpoint format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// safetensors: one file, a folder of files, or a Hugging Face sharded index.
    Safetensors,
    /// PyTorch Distributed Checkpoint: `.metadata` and `.distcp` files.
    Dcp,
    /// One file that `torch.save` wrote, in its zip layout.
    TorchSave,
}

impl Format {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Dcp => "dcp",
            Self::TorchSave => "torch_save",
        }
    }
}

/// What a trainer says about a checkpoint. Unknown fields are ignored: a newer trainer may say more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointManifest {
    /// Always `weighbridge.checkpoint/v1`.
    pub schema: CheckpointSchema,
    /// A UUID by the dropper. Sending again carries the same one; publishing again carries a new one.
    #[schemars(with = "String", regex(pattern = UUID_PATTERN))]
    #[serde(deserialize_with = "uuid")]
    pub id: String,
    /// The model.
    pub model: ModelName,
    /// The training run.
    pub run: RunName,
    /// The training step.
    pub step: u64,
    /// When the checkpoint was written.
    pub created_at: Timestamp,
    /// Where it lies: a URL, or an absolute path.
    pub location: String,
    /// Its format; absent or `auto`: found out by content.
    #[serde(default, deserialize_with = "format", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "format_schema")]
    pub format: Option<Format>,
    /// Its files, where the trainer knows them: each size and digest given is checked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<ManifestFile>,
    /// The channel to move; absent: the policy's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<ChannelName>,
    /// The policy; absent: the model's in the store, else the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyChoice>,
    /// 0 (last) to 9 (first).
    #[serde(default = "middle_priority")]
    #[schemars(range(max = 9))]
    pub priority: u8,
    /// For people and dashboards.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The trainer's W3C trace context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// A file of the checkpoint, as the trainer wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ManifestFile {
    /// Relative to the location.
    pub path: String,
    /// In bytes.
    pub size: u64,
    /// The BLAKE3 of the whole file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<FileDigest>,
}

/// A policy, by name or whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyChoice {
    /// A policy kept in the store.
    Name(PolicyName),
    /// A policy's TOML text, up to 64 KiB.
    Toml(String),
}

/// The name that stands for no format in particular.
const AUTO: &str = "auto";

fn format<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Format>, D::Error> {
    let name = Option::<Cow<'de, str>>::deserialize(deserializer)?.filter(|name| name != AUTO);
    name.map(|name| Format::deserialize(name.into_deserializer())).transpose()
}

fn format_schema(generator: &mut SchemaGenerator) -> Schema {
    let format = generator.subschema_for::<Format>();
    json_schema!({ "anyOf": [format, { "const": AUTO }, { "type": "null" }] })
}

const UUID_PATTERN: &str = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";

fn middle_priority() -> u8 {
    5
}

fn uuid<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if is_uuid(&text) { Ok(text) } else { Err(serde::de::Error::custom("id is not a lower-case UUID")) }
}

/// Whether `text` is a UUID in lower case.
pub(crate) fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
}

impl CheckpointManifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// [`DocumentError`] where it is over 1 MiB, malformed, or carries a policy that does not parse.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        if json.len() > limits::CHECKPOINT_MANIFEST_BYTES {
            return Err(DocumentError::OverLimit {
                document: DOCUMENT,
                why: format!("{} bytes; at most {}", json.len(), limits::CHECKPOINT_MANIFEST_BYTES),
            });
        }
        let manifest: Self = json::object(DOCUMENT, json)?;
        if manifest.priority > 9 {
            return Err(DocumentError::malformed(DOCUMENT, "priority is 0 to 9"));
        }
        if manifest.traceparent.as_ref().is_some_and(|text| text.len() > limits::TRACEPARENT_BYTES) {
            let why = format!("traceparent has more than {} bytes", limits::TRACEPARENT_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        if let Some(PolicyChoice::Toml(text)) = &manifest.policy {
            Policy::parse(text)?;
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn example() -> serde_json::Value {
        json!({
            "schema": "weighbridge.checkpoint/v1",
            "id": "0f8fad5b-d9cb-469f-a165-70867728950e",
            "model": "dlrm", "run": "r1", "step": 100,
            "created_at": "2026-11-29T16:10:04Z",
            "location": "/checkpoints/step-100",
        })
    }

    #[test]
    fn a_small_manifest_parses_and_unknown_fields_are_ignored() {
        let mut document = example();
        document["from_the_future"] = json!(1);
        let manifest = CheckpointManifest::parse(document.to_string().as_bytes()).unwrap();
        assert_eq!((manifest.priority, manifest.step), (5, 100));
        let again = serde_json::to_vec(&manifest).unwrap();
        assert_eq!(CheckpointManifest::parse(&again).unwrap(), manifest);
    }

    #[test]
    fn a_format_may_be_left_to_the_content() {
        for (value, format) in
            [(json!("auto"), None), (json!(null), None), (json!("torch_save"), Some(Format::TorchSave))]
        {
            let mut document = example();
            document["format"] = value;
            let manifest = CheckpointManifest::parse(document.to_string().as_bytes()).unwrap();
            assert_eq!(manifest.format, format);
        }
        let schema = serde_json::to_string(&schemars::schema_for!(CheckpointManifest)).unwrap();
        assert!(schema.contains("\"const\":\"auto\""), "{schema}");
    }

    #[test]
    fn what_is_wrong_is_refused() {
        for (field, value) in [
            ("schema", json!("weighbridge.checkpoint/v2")),
            ("id", json!("1")),
            ("model", json!("../x")),
            ("step", json!(-1)),
            ("created_at", json!("now")),
            ("priority", json!(10)),
            ("policy", json!({ "toml": "rules = 1" })),
            ("format", json!("onnx")),
        ] {
            let mut document = example();
            document[field] = value;
            assert!(CheckpointManifest::parse(document.to_string().as_bytes()).is_err(), "{field}");
        }
        let array = format!(
            "[{}]",
            example().as_object().unwrap().values().map(ToString::to_string).collect::<Vec<_>>().join(",")
        );
        let error = CheckpointManifest::parse(array.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("no JSON object"), "{error}");
        let long = " ".repeat(limits::CHECKPOINT_MANIFEST_BYTES + 1);
        assert!(matches!(CheckpointManifest::parse(long.as_bytes()), Err(DocumentError::OverLimit { .. })));
    }
}
