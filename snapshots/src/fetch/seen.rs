//! What a folder's fetches last saw of each channel: `.seen.json`.
//!
//! A channel's log only grows. Where it ends before what was seen of it, or says something else there, it was cut or
//! replaced, and with it perhaps a rollback, or a hold: a host that follows the channel stays where it is and says so.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};

use weighbridge_schemas::names::ModelName;

use crate::disk::{Durability, open_regular};
use crate::error::{Class, Result, StoreError};
use crate::reference::Followed;

use super::Folder;

/// The file's name in the folder.
const NAME: &str = ".seen.json";
/// Largest file of what was seen: some hundred bytes a channel.
const BYTES: u64 = 4 << 20;
/// What brings a host on again, once it is known what happened.
const WAY_OUT: &str = "find out why first; once that is known, fetch with --forget-sequence";

/// What was seen of the channels that were fetched into a folder.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    schema: Schema,
    /// By `MODEL@CHANNEL`.
    channels: BTreeMap<String, Mark>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Schema {
    #[default]
    #[serde(rename = "weighbridge.seen/v1")]
    V1,
}

/// The newest entry that was seen of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    sequence: u64,
    id: String,
}

impl Mark {
    fn of(followed: &Followed) -> Self {
        Self { sequence: followed.entry.sequence, id: followed.entry.id.to_string() }
    }
}

fn name(model: &ModelName, followed: &Followed) -> String {
    format!("{model}@{}", followed.channel)
}

impl Seen {
    /// What was seen by fetches into `folder`.
    ///
    /// # Errors
    /// [`Class::Integrity`] where that cannot be read: whether the channel was cut is not known then.
    pub(crate) fn read(folder: &Folder) -> Result<Self> {
        let path = folder.path().join(NAME);
        let read = || {
            let mut text = String::new();
            let file = open_regular(&path, File::options().read(true))?;
            file.take(BYTES + 1).read_to_string(&mut text)?;
            if text.len() as u64 > BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("it has more than {BYTES} bytes"),
                ));
            }
            Ok(serde_json::from_str(&text)?)
        };
        match read() {
            Ok(seen) => Ok(seen),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(StoreError::own(path.display(), &error))
            }
            Err(error) => {
                let why = format!(
                    "what was last seen of the channels cannot be read ({error}), and so not whether a log was cut; \
                     {WAY_OUT}, which begins the file anew"
                );
                Err(StoreError::new(Class::Integrity, path.display(), why))
            }
        }
    }

    /// Whether `followed` is not before, nor beside, what was seen.
    pub(crate) fn check(&self, model: &ModelName, followed: &Followed) -> Result<()> {
        let name = name(model, followed);
        let (now, why) = match self.channels.get(&name) {
            None => return Ok(()),
            Some(seen) => {
                let now = Mark::of(followed);
                if now.sequence > seen.sequence || now == *seen {
                    return Ok(());
                }
                let why = if now.sequence == seen.sequence {
                    format!("entry {} of the channel is another one than was seen here before", now.sequence)
                } else {
                    format!(
                        "the channel ends at entry {}, and entry {} was seen here before",
                        now.sequence, seen.sequence
                    )
                };
                (now, why)
            }
        };
        tracing::debug!(%name, ?now, "the channel goes back");
        let why = format!("{why}: its log was cut or replaced, or this is another store; {WAY_OUT}");
        Err(StoreError::new(Class::Integrity, name, why))
    }

    /// Notes `followed` in `folder`, durably even where versions are not: an empty file after a loss of power would
    /// stop every fetch until a person says otherwise.
    pub(crate) fn note(mut self, folder: &Folder, model: &ModelName, followed: &Followed) -> Result<()> {
        let mark = Mark::of(followed);
        let name = name(model, followed);
        if self.channels.get(&name) == Some(&mark) {
            return Ok(());
        }
        self.channels.insert(name, mark);
        let note = || folder.replace(NAME, &serde_json::to_vec_pretty(&self)?, Durability::Synced);
        note().map_err(|error: io::Error| StoreError::own(folder.path().join(NAME).display(), &error))
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::channel::{ChannelEntry, ChannelSchema, Reason, entry_id};
    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_schemas::time::Timestamp;

    use super::*;
    use crate::disk::losing;

    fn at(channel: &str, sequence: u64, operation: &str) -> Followed {
        let name = channel.parse().unwrap();
        let time = Timestamp::from_nanoseconds(0);
        let entry = ChannelEntry {
            schema: ChannelSchema::V1,
            sequence,
            id: entry_id(operation, &name),
            snapshot: SnapshotId::of(b"s"),
            previous: None,
            run: "r".parse().unwrap(),
            step: 1,
            created_at: time,
            reason: Reason::Publish,
            who: "test".into(),
            when: time,
            signatures: Vec::new(),
        };
        Followed { channel: name, entry }
    }

    #[test]
    fn what_was_seen_of_each_channel_is_kept_and_compared() {
        let at_disk = tempfile::tempdir().unwrap();
        let folder = Folder::open(at_disk.path(), Durability::Synced).unwrap();
        let model = "m".parse().unwrap();
        let read = || Seen::read(&folder).unwrap();
        let refused = |followed: &Followed| {
            let error = read().check(&model, followed).unwrap_err();
            assert_eq!(error.class(), Class::Integrity);
            assert!(error.to_string().contains("--forget-sequence"), "{error}");
            error.to_string()
        };
        read().check(&model, &at("prod", 1, "a")).unwrap();
        for durability in [Durability::Synced, Durability::Unsynced] {
            let folder = Folder::open(at_disk.path(), durability).unwrap();
            read().note(&folder, &model, &at("prod", 5, "e")).unwrap();
            read().note(&folder, &model, &at("canary", 2, "b")).unwrap();
        }
        let unsynced = Folder::open(at_disk.path(), Durability::Unsynced).unwrap();
        losing::once(at_disk.path());
        assert!(
            read().note(&unsynced, &model, &at("canary", 3, "c")).is_err(),
            "it is synced where nothing else is"
        );
        read().check(&model, &at("prod", 5, "e")).unwrap();
        read().check(&model, &at("prod", 6, "f")).unwrap();
        read().check(&"other".parse().unwrap(), &at("prod", 1, "a")).unwrap();
        assert!(refused(&at("prod", 4, "d")).contains("ends at entry 4"));
        assert!(refused(&at("prod", 5, "x")).contains("another one"));
        assert!(refused(&at("canary", 1, "a")).contains("m@canary"));
    }

    #[test]
    fn a_damaged_file_is_said_and_begun_anew() {
        let at_disk = tempfile::tempdir().unwrap();
        let folder = Folder::open(at_disk.path(), Durability::Synced).unwrap();
        let model = "m".parse().unwrap();
        let path = at_disk.path().join(NAME);
        let later = r#"{"schema": "weighbridge.seen/v2", "channels": {}}"#;
        for damaged in ["", "{", "[]", later] {
            std::fs::write(&path, damaged).unwrap();
            let error = Seen::read(&folder).unwrap_err();
            assert!(error.class() == Class::Integrity && error.to_string().contains("begins the file anew"));
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(Seen::read(&folder).is_err());
        Seen::default().note(&folder, &model, &at("prod", 1, "a")).unwrap();
        Seen::read(&folder).unwrap().check(&model, &at("prod", 1, "a")).unwrap();
    }
}
