//! Dead letters in the store: kept for good, with notes of what became of them.

use std::collections::BTreeSet;

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::dead::DeadLetter;
use weighbridge_schemas::ids::ChunkId;

use crate::error::{Class, Result, StoreError};
use crate::jobs;
use crate::layout;
use crate::root::{Put, Root};

/// Longest note of what became of a dead letter, in bytes.
const NOTE_BYTES: usize = 4096;

/// What became of a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing yet.
    Waiting,
    /// It was queued again.
    Requeued,
    /// An operator wants to hear no more of it.
    Discarded,
}

impl Fate {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Requeued => "requeued",
            Self::Discarded => "discarded",
        }
    }
}

/// The id of the dead letter of a message that is no job: of what it holds, so that the same one is there once.
#[must_use]
pub fn id_of(body: &[u8]) -> String {
    ChunkId::of(body).to_string()
}

/// Puts a dead letter, unless there is one of this id.
///
/// # Errors
/// As the store fails.
pub async fn put(root: &Root, id: &str, letter: &DeadLetter) -> Result<Put> {
    jobs::put(root, &layout::dead_letter(id), letter).await
}

/// A dead letter.
///
/// # Errors
/// [`Class::NotFound`], [`Class::Integrity`]; else as the store fails.
pub async fn get(root: &Root, id: &str) -> Result<DeadLetter> {
    let letter = jobs::get(root, &layout::dead_letter(id)).await?;
    letter.ok_or_else(|| {
        let why = "there is no such dead letter; `weighbridge dead` lists them";
        StoreError::new(Class::NotFound, id, why)
    })
}

/// Notes what became of a dead letter.
///
/// # Errors
/// As the store fails.
pub async fn mark(root: &Root, id: &str, fate: Fate, note: &str) -> Result<()> {
    let Some(key) = key(id, fate) else { return Ok(()) };
    root.put_if_absent(&key, Bytes::from(note.to_owned())).await.map(drop)
}

/// What was noted of a dead letter's fate; `None` where nothing was.
///
/// # Errors
/// As the store fails.
pub async fn note(root: &Root, id: &str, fate: Fate) -> Result<Option<String>> {
    let Some(key) = key(id, fate) else { return Ok(None) };
    let bytes = root.get(&key, NOTE_BYTES).await?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn key(id: &str, fate: Fate) -> Option<Key> {
    match fate {
        Fate::Waiting => None,
        Fate::Requeued => Some(layout::dead_requeued(id)),
        Fate::Discarded => Some(layout::dead_discarded(id)),
    }
}

/// The ids of all dead letters, and what became of them. Names that are none of ours are passed over.
///
/// # Errors
/// As the store fails.
pub async fn list(root: &Root) -> Result<Vec<(String, Fate)>> {
    let keys = root.keys(&layout::dead_letters(), None).await?;
    let names: BTreeSet<&str> = keys.iter().filter_map(|key| key.filename()).collect();
    let is_id = |name: &&&str| name.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    let fate = |id: &str| {
        if names.contains(format!("{id}.requeued").as_str()) {
            Fate::Requeued
        } else if names.contains(format!("{id}.discarded").as_str()) {
            Fate::Discarded
        } else {
            Fate::Waiting
        }
    };
    Ok(names.iter().filter(is_id).map(|id| ((*id).to_owned(), fate(id))).collect())
}
