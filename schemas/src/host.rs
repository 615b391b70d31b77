//! What a serving host follows `weighbridge.host/v1`: what it wants, holds and serves. It lies beside the versions as
//! `status.json`, and is what a host tells the API, so that an operator sees the whole fleet.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::ids::SnapshotId;
use crate::job::Why;
use crate::json;
use crate::limits;
use crate::names::{ChannelName, ModelName, RunName};
use crate::signature::within;
use crate::time::Timestamp;

const DOCUMENT: &str = "host status";

/// The `schema` field of a host's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum HostSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.host/v1")]
    V1,
}

/// One channel that one host follows, into one folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostStatus {
    /// Always `weighbridge.host/v1`.
    pub schema: HostSchema,
    /// The host's name: at most [`limits::HOST_BYTES`] bytes, without control characters.
    pub host: String,
    /// The folder on the host.
    pub folder: String,
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// How the host is.
    pub state: HostState,
    /// What the channel says: the newest entry that was seen and believed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Target>,
    /// What `current` points at; while that is on trial, what was served before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Target>,
    /// Since when it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving_since: Option<Timestamp>,
    /// How old what is served is: from its checkpoint's time stamp to [`Self::updated_at`], in
    /// seconds. Absent where that time is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// The versions that lie in the folder, complete; the newest [`limits::HOST_VERSIONS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<SnapshotId>,
    /// Failures since the last success, whatever was wanted.
    #[serde(default)]
    pub attempts: u64,
    /// What went wrong last, since the last success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<Why>,
    /// When that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_at: Option<Timestamp>,
    /// When something was last heard of the source of snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_at: Option<Timestamp>,
    /// When this was written, by the host's clock.
    pub updated_at: Timestamp,
}

/// How a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// Nothing is served yet, nor known to be wanted.
    Starting,
    /// What is wanted is being fetched, or about to be swapped to.
    Fetching,
    /// `current` points at what is wanted, and a command is about to say whether it stays.
    Trying,
    /// What is wanted is served.
    Current,
    /// What is wanted could not be had, and is tried again; what was served before is.
    Behind,
}

impl HostState {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Fetching => "fetching",
            Self::Trying => "trying",
            Self::Current => "current",
            Self::Behind => "behind",
        }
    }
}

/// A snapshot as a channel's entry names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Target {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The entry's number.
    pub sequence: u64,
    /// The snapshot's training run.
    pub run: RunName,
    /// The snapshot's training step.
    pub step: u64,
    /// When its checkpoint was written.
    pub created_at: Timestamp,
    /// When the channel came to point at it.
    pub when: Timestamp,
}

impl HostStatus {
    /// The document as indented JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and lists alone: nothing in it can fail.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Reads a host's status.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are none.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        within(DOCUMENT, json.len(), limits::HOST_STATUS_BYTES, "bytes")?;
        let status: Self = json::object(DOCUMENT, json)?;
        within(DOCUMENT, status.held.len(), limits::HOST_VERSIONS, "versions")?;
        within(DOCUMENT, status.host.len(), limits::HOST_BYTES, "bytes of a host's name")?;
        within(DOCUMENT, status.folder.len(), limits::HOST_FOLDER_BYTES, "bytes of a folder's name")?;
        if status.host.is_empty() || status.host.chars().chain(status.folder.chars()).any(char::is_control) {
            return Err(DocumentError::malformed(
                DOCUMENT,
                "a host's name is empty, or has control characters",
            ));
        }
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> HostStatus {
        let time = Timestamp::from_nanoseconds(1_000_000_000);
        let target = Target {
            snapshot: SnapshotId::of(b"s"),
            sequence: 3,
            run: "r".parse().unwrap(),
            step: 7,
            created_at: time,
            when: time,
        };
        HostStatus {
            schema: HostSchema::V1,
            host: "serving-1".into(),
            folder: "/srv/models/dlrm".into(),
            model: "dlrm".parse().unwrap(),
            channel: "prod".parse().unwrap(),
            state: HostState::Current,
            wanted: Some(target.clone()),
            serving: Some(target),
            serving_since: Some(time),
            age_seconds: Some(0),
            held: vec![SnapshotId::of(b"s")],
            attempts: 0,
            last_error: None,
            last_error_at: None,
            heard_at: Some(time),
            updated_at: time,
        }
    }

    #[test]
    fn a_status_is_read_as_it_was_written() {
        assert_eq!(HostStatus::parse(&example().to_json()).unwrap(), example());
    }

    #[test]
    fn what_is_too_much_or_would_spoil_a_terminal_is_refused() {
        type Spoil = fn(&mut HostStatus);
        let cases: [(&str, Spoil); 5] = [
            ("no name", |status| status.host.clear()),
            ("a long name", |status| status.host = "x".repeat(limits::HOST_BYTES + 1)),
            ("a name that moves the cursor", |status| status.host = "\u{1b}[2J".into()),
            ("a folder that does", |status| status.folder = "a\nb".into()),
            ("many versions", |status| {
                status.held = vec![SnapshotId::of(b"s"); limits::HOST_VERSIONS + 1];
            }),
        ];
        for (what, spoil) in cases {
            let mut status = example();
            spoil(&mut status);
            assert!(HostStatus::parse(&status.to_json()).is_err(), "{what}");
        }
        assert!(HostStatus::parse(&vec![b' '; limits::HOST_STATUS_BYTES + 1]).is_err());
    }
}
