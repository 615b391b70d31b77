//! Every object key is spelled here, and nowhere else.
//!
//! ```text
//! models/MODEL/snapshots/ID                   snapshot manifest, immutable
//! models/MODEL/snapshots/ID.report            validation report; later ones that differ: ID.report.000000000002 ...
//! models/MODEL/channels/NAME/000000000001     channel log: dense from 1, put-if-absent, never deleted
//! models/MODEL/channels/NAME/hint             where to start looking: overwritten, and only advice
//! models/MODEL/chunks/AB/ABCDEF...            content-addressed bytes, immutable
//! ```

use object_store::path::{Path, PathPart};

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::names::{ChannelName, ModelName};

/// Digits of a sequence number in a key, so that keys sort as numbers.
const SEQUENCE_DIGITS: usize = 12;

/// Where all models lie.
#[must_use]
pub fn models() -> Path {
    Path::from("models")
}

/// Where everything of one model lies.
#[must_use]
pub fn model(model: &ModelName) -> Path {
    child(&models(), model.as_str())
}

/// Where a model's snapshots lie.
#[must_use]
pub fn snapshots(model_name: &ModelName) -> Path {
    child(&model(model_name), "snapshots")
}

/// A snapshot's manifest.
#[must_use]
pub fn snapshot(model: &ModelName, id: &SnapshotId) -> Path {
    child(&snapshots(model), &id.to_string())
}

/// A snapshot's validation report number `number`, from 1 on: the highest rules.
#[must_use]
pub fn report(model: &ModelName, id: &SnapshotId, number: u64) -> Path {
    let name = match number {
        0 | 1 => format!("{id}.report"),
        later => format!("{id}.report.{later:0SEQUENCE_DIGITS$}"),
    };
    child(&snapshots(model), &name)
}

/// Where a model's channels lie.
#[must_use]
pub fn channels(model_name: &ModelName) -> Path {
    child(&model(model_name), "channels")
}

/// Where a channel's entries lie.
#[must_use]
pub fn channel(model: &ModelName, channel: &ChannelName) -> Path {
    child(&channels(model), channel.as_str())
}

/// A channel's entry number `sequence`.
#[must_use]
pub fn channel_entry(model: &ModelName, name: &ChannelName, sequence: u64) -> Path {
    child(&channel(model, name), &format!("{sequence:0SEQUENCE_DIGITS$}"))
}

/// The sequence number of the channel entry under `key`; `None` for anything else that lies in or below the channel.
#[must_use]
pub fn sequence(model: &ModelName, name: &ChannelName, key: &Path) -> Option<u64> {
    let number = last_number(key)?;
    (channel_entry(model, name, number) == *key).then_some(number)
}

fn last_number(key: &Path) -> Option<u64> {
    let name = key.filename()?;
    let digits = name.len() >= SEQUENCE_DIGITS && name.bytes().all(|byte| byte.is_ascii_digit());
    if digits { name.parse().ok() } else { None }
}

/// Where to start looking for a channel's latest entry.
#[must_use]
pub fn channel_hint(model: &ModelName, name: &ChannelName) -> Path {
    child(&channel(model, name), "hint")
}

/// Where a model's chunks lie.
#[must_use]
pub fn chunks(model_name: &ModelName) -> Path {
    child(&model(model_name), "chunks")
}

/// A chunk.
#[must_use]
pub fn chunk(model: &ModelName, id: &ChunkId) -> Path {
    let hex = id.to_string();
    child(&child(&chunks(model), &hex[..2]), &hex)
}

fn child(parent: &Path, part: &str) -> Path {
    parent.clone().join(PathPart::from(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_spelled_as_documented() {
        let model: ModelName = "dlrm".parse().unwrap();
        let id = SnapshotId::from_bytes([0xab; 32]);
        let hex = "ab".repeat(32);
        assert_eq!(snapshot(&model, &id).as_ref(), format!("models/dlrm/snapshots/{hex}"));
        assert_eq!(report(&model, &id, 1).as_ref(), format!("models/dlrm/snapshots/{hex}.report"));
        let chunk = chunk(&model, &ChunkId::from_bytes([0xab; 32]));
        assert_eq!(chunk.as_ref(), format!("models/dlrm/chunks/ab/{hex}"));
        let prod = "prod".parse().unwrap();
        let entry = channel_entry(&model, &prod, 42);
        assert_eq!(entry.as_ref(), "models/dlrm/channels/prod/000000000042");
        assert_eq!(sequence(&model, &prod, &entry), Some(42));
        assert_eq!(sequence(&model, &prod, &channel_hint(&model, &prod)), None);
        let below = channel_entry(&model, &prod, 1).join("000000000042");
        assert_eq!(sequence(&model, &prod, &below), None);
    }
}
