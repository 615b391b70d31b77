//! Dead letters `weighbridge.dead/v1`: messages that cannot be published, whole, and why.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::job::{Document, Event, JobId, Why};
use crate::limits;
use crate::names::ModelName;
use crate::time::Timestamp;

/// The `schema` field of a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum DeadSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.dead/v1")]
    V1,
}

/// A message that cannot be published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeadLetter {
    /// Always `weighbridge.dead/v1`.
    pub schema: DeadSchema,
    /// The message's bytes, as they came: most often a checkpoint manifest.
    pub body: Body,
    /// Why.
    pub error: Why,
    /// The model, where the message could be read so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// The job, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobId>,
    /// What was tried, the oldest first; the newest [`limits::DEAD_HISTORY`] of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<Event>,
    /// Who wrote it.
    pub who: String,
    /// When, by their clock.
    pub when: Timestamp,
}

impl Document for DeadLetter {
    const NAME: &'static str = "dead letter";
    const MOST: usize = limits::DEAD_LETTER_BYTES;
}

/// Bytes of any kind, in base64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body(pub Vec<u8>);

impl Serialize for Body {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Self).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Body {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Body".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "contentEncoding": "base64" })
    }
}
