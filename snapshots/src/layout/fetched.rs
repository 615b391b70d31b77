//! Which objects serving hosts read.

use object_store::path::Path;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::names::ModelName;

use super::{channel_entry, chunk, signatures, snapshot};

/// An object that serving hosts read, and that is never changed once it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The model.
    pub model: ModelName,
    /// What its bytes have to hash to, where its name says that.
    pub content: Option<Content>,
    /// Its key.
    pub key: Path,
}

/// What an object's bytes have to hash to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A chunk.
    Chunk(ChunkId),
    /// A snapshot's manifest.
    Manifest(SnapshotId),
}

impl Content {
    /// Whether these are its bytes.
    #[must_use]
    pub fn is_of(&self, bytes: &[u8]) -> bool {
        self.is_hash(&blake3::hash(bytes))
    }

    /// Whether this is the hash of its bytes.
    #[must_use]
    pub fn is_hash(&self, hash: &blake3::Hash) -> bool {
        match self {
            Self::Chunk(id) => ChunkId::from_bytes(*hash.as_bytes()) == *id,
            Self::Manifest(id) => SnapshotId::from_bytes(*hash.as_bytes()) == *id,
        }
    }
}

/// The object under `key`, where that is a snapshot's manifest or signatures, a channel's entry, or a chunk, spelled as
/// it is here.
#[must_use]
pub fn fetched(key: &str) -> Option<Fetched> {
    let parts: Vec<_> = key.splitn(6, '/').collect();
    let (model, kind) = match parts[..] {
        ["models", model, kind, ..] => (model.parse::<ModelName>().ok()?, kind),
        _ => return None,
    };
    let numbered = |text: &str| text.parse::<u64>().ok();
    let (spelled, content) = match (kind, &parts[3..]) {
        ("chunks", [_, name]) => {
            let id = name.parse().ok()?;
            (chunk(&model, &id), Some(Content::Chunk(id)))
        }
        ("channels", [name, number]) => (channel_entry(&model, &name.parse().ok()?, numbered(number)?), None),
        ("snapshots", [name]) => match name.split_once(".signatures") {
            None => {
                let id = name.parse().ok()?;
                (snapshot(&model, &id), Some(Content::Manifest(id)))
            }
            Some((id, "")) => (signatures(&model, &id.parse().ok()?, 1), None),
            Some((id, number)) => {
                (signatures(&model, &id.parse().ok()?, numbered(number.strip_prefix('.')?)?), None)
            }
        },
        _ => return None,
    };
    (spelled.as_ref() == key).then_some(Fetched { model, content, key: spelled })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{pin_entry, report};

    #[test]
    fn what_serving_hosts_read_is_recognised_and_nothing_else_is() {
        let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let id = SnapshotId::of(b"s");
        for key in [
            snapshot(&model, &id),
            signatures(&model, &id, 1),
            signatures(&model, &id, 12),
            channel_entry(&model, &name, 7),
            chunk(&model, &ChunkId::of(b"c")),
        ] {
            assert_eq!(fetched(key.as_ref()).unwrap().key, key);
        }
        let chunk = chunk(&model, &ChunkId::of(b"c")).to_string();
        for key in [
            "",
            "models",
            "models/m/channels/prod/hint",
            "models/m/channels/prod/7",
            "models/m/channels/../000000000007",
            "models/../chunks/aa/aa",
            "dead/x",
            report(&model, &id, 1).as_ref(),
            &format!("{chunk}/"),
            &format!("/{chunk}"),
            &chunk.to_uppercase(),
            &chunk.replace("chunks/", "chunks/f"),
            pin_entry(&model, &id, 1).as_ref(),
        ] {
            assert_eq!(fetched(key), None, "{key}");
        }
    }
}
