//! What a follower has to remember: `.followed.json`. A crash at any moment leaves a note that tells what is to be
//! done.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};

use weighbridge_schemas::host::Target;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::time::Timestamp;

use crate::disk::open_regular;
use crate::error::{Result, StoreError};
use crate::fetch::{Folder, taken};

/// The note's name in the folder.
const NAME: &str = ".followed.json";
/// Largest note: some hundred bytes a version.
const BYTES: u64 = 1 << 20;

/// What a follower has to remember of its folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    schema: Schema,
    /// What is followed: `MODEL@CHANNEL`.
    of: String,
    /// What is served: `current` pointed at it, and the command that is run after a swap succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) serving: Option<Served>,
    /// A swap that is not over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pending: Option<Pending>,
    /// What `current` points at may not be served well: the command that is run after a swap was not seen to succeed
    /// for what lies there now.
    #[serde(default)]
    pub(super) is_doubtful: bool,
    /// What was served, the newest first.
    #[serde(default)]
    pub(super) history: Vec<SnapshotId>,
    /// Versions that were verified to the last byte, and what their files looked like then.
    #[serde(default)]
    pub(super) verified: BTreeMap<SnapshotId, String>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Schema {
    #[default]
    #[serde(rename = "weighbridge.followed/v1")]
    V1,
}

/// What is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Served {
    pub(super) target: Target,
    pub(super) since: Timestamp,
}

/// A swap that is not over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pending {
    pub(super) step: Step,
    /// Where it leads.
    pub(super) target: Target,
    /// What `current` pointed at before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<SnapshotId>,
}

/// How far a swap has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Step {
    /// `current` is flipped, or about to be; the command is to be run then.
    After,
    /// That failed: `current` goes back, and the command is to be run for what was served before.
    Restore,
}

impl Note {
    /// Nothing is known of the folder.
    pub(super) fn new(of: &str) -> Self {
        Self {
            schema: Schema::V1,
            of: of.to_owned(),
            serving: None,
            pending: None,
            is_doubtful: false,
            history: Vec::new(),
            verified: BTreeMap::new(),
        }
    }

    /// The folder's note; an empty one where there is none, or another channel was followed. One that cannot be read
    /// is forgotten: what lies there is verified again then, and the command run again.
    ///
    /// # Errors
    /// [`crate::error::Class::Refused`] where another model was followed.
    pub(super) fn read(folder: &Folder, model: &ModelName, channel: &ChannelName) -> Result<Self> {
        let of = &format!("{model}@{channel}");
        let path = folder.path().join(NAME);
        let read = || {
            let mut text = String::new();
            let file = open_regular(&path, File::options().read(true))?;
            file.take(BYTES).read_to_string(&mut text)?;
            Ok(serde_json::from_str::<Self>(&text)?)
        };
        Ok(match read() {
            Ok(note) if note.of == *of => note,
            Ok(note) => {
                let other = note.of.split('@').next().and_then(|other| other.parse::<ModelName>().ok());
                if let Some(other) = other.filter(|other| other != model) {
                    return Err(taken(folder, &other, NAME));
                }
                // What was verified was verified, whatever led there.
                Self { verified: note.verified, ..Self::new(of) }
            }
            Err(error) => {
                let error: io::Error = error;
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(note = %path.display(), %error, "what was served is not known");
                }
                Self::new(of)
            }
        })
    }

    /// Writes the note, durably where that is wanted.
    pub(super) fn write(&self, folder: &Folder) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = folder.replace(NAME, &bytes, folder.durability());
        written.map_err(|error| StoreError::own(folder.path().join(NAME).display(), &error))
    }

    /// Whether no command is to be run, nor to be run again.
    pub(super) fn is_over(&self) -> bool {
        self.pending.is_none() && !self.is_doubtful
    }

    /// Whether this snapshot is served, and the command succeeded for it.
    pub(super) fn serves(&self, snapshot: SnapshotId) -> bool {
        self.is_over() && self.serving.as_ref().is_some_and(|served| served.target.snapshot == snapshot)
    }

    /// The swap is over: `served` is served. What was served before is kept too, also where the note knows nothing of
    /// it: it may have been fetched without being followed.
    pub(super) fn served(&mut self, served: Served, previous: Option<SnapshotId>) {
        let snapshot = served.target.snapshot;
        self.history.retain(|id| *id != snapshot);
        self.history.insert(0, snapshot);
        if let Some(previous) = previous.filter(|previous| !self.history.contains(previous)) {
            self.history.push(previous);
        }
        (self.serving, self.pending, self.is_doubtful) = (Some(served), None, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Durability;
    use crate::error::Class;

    #[test]
    fn a_note_is_kept_for_its_channel_and_a_damaged_one_forgotten() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::open(at.path(), Durability::Synced).unwrap();
        let read = |model: &str, channel: &str| {
            Note::read(&folder, &model.parse().unwrap(), &channel.parse().unwrap())
        };
        assert_eq!(read("m", "prod").unwrap(), Note::new("m@prod"));
        let time = Timestamp::from_nanoseconds(0);
        let target = |name: &[u8]| Target {
            snapshot: SnapshotId::of(name),
            sequence: 1,
            run: "r".parse().unwrap(),
            step: 5,
            created_at: time,
            when: time,
        };
        let mut note = Note::new("m@prod");
        let ids = [b"a", b"b", b"o", b"x"].map(|name| SnapshotId::of(name));
        note.served(Served { target: target(b"a"), since: time }, Some(ids[2]));
        assert_eq!(note.history, [ids[0], ids[2]], "what was there before it was followed counts");
        for (name, previous) in [(b"b", ids[0]), (b"a", ids[1])] {
            note.served(Served { target: target(name), since: time }, Some(previous));
        }
        assert_eq!(note.history, [ids[0], ids[1], ids[2]]);
        note.served(Served { target: target(b"a"), since: time }, Some(ids[3]));
        assert_eq!(
            note.history,
            [ids[0], ids[1], ids[2], ids[3]],
            "what the channel said goes before what a hand did"
        );
        assert!(note.serves(SnapshotId::of(b"a")) && !note.serves(SnapshotId::of(b"b")));
        note.verified.insert(SnapshotId::of(b"a"), "stamp".into());
        note.pending = Some(Pending { step: Step::After, target: target(b"c"), previous: None });
        assert!(!note.serves(SnapshotId::of(b"a")));
        (note.pending, note.is_doubtful) = (None, true);
        assert!(!note.serves(SnapshotId::of(b"a")), "its command failed");
        note.served(Served { target: target(b"a"), since: time }, None);
        assert!(note.serves(SnapshotId::of(b"a")));
        note.write(&folder).unwrap();
        assert_eq!(read("m", "prod").unwrap(), note);
        let error = read("other", "prod").unwrap_err();
        assert!(error.class() == Class::Refused && error.to_string().contains("another folder"), "{error}");
        let other = read("m", "canary").unwrap();
        assert_eq!((other.serving, other.pending, other.verified), (None, None, note.verified));
        std::fs::write(at.path().join(NAME), "{").unwrap();
        assert_eq!(read("m", "prod").unwrap(), Note::new("m@prod"));
    }
}
