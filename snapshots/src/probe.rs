//! A store is tried out before anything is published into it: whether it does what everything else rests on.
//!
//! Who puts an object if it is absent has to be told when it is there; of two who do so at once, one alone may win.
//! What was put is seen by whoever reads or lists next, and what was deleted is not. A store that takes no notice of
//! the condition would let two publishers move a channel to the same number, and neither would know.
//!
//! It is done once a store: [`ensure`] leaves a note behind. Folders are taken at their word, which is `local`'s own
//! code. What a try that was killed leaves below `probe/` is in nobody's way.

use bytes::Bytes;
use object_store::path::Path as Key;
use serde_json::{Value, json};

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Listed, Put, Root};

/// Longest note that a store was tried out, and longest object of trying, in bytes.
const NOTE_BYTES: usize = 64 << 10;
/// Digits of a store's own digest in its note's name.
const DIGITS: usize = 16;
/// How far the times in a listing may be from the store's clock, in nanoseconds.
const SKEW: u64 = 300 * 1_000_000_000;
/// Where put-if-absent is known to work.
const KNOWN: &str = "stores that do it are Amazon S3, Google Cloud Storage, Azure Blob Storage, and of those that one \
                     runs oneself SeaweedFS, MinIO and Ceph in recent versions; or use a folder";

/// What a store has to be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ability {
    /// It lists.
    List,
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// It puts an object if it is absent, and says when it is not.
    PutIfAbsent,
    /// Of two who do so at once, one wins.
    OneWinner,
    /// What was overwritten is read at once.
    FreshReads,
    /// What was put is listed at once, with a time by the store's own clock.
    FreshListings,
    /// It deletes, and what was deleted is gone.
    Delete,
}

impl Ability {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Read => "read",
            Self::Write => "write",
            Self::PutIfAbsent => "put_if_absent",
            Self::OneWinner => "one_winner",
            Self::FreshReads => "fresh_reads",
            Self::FreshListings => "fresh_listings",
            Self::Delete => "delete",
        }
    }
}

/// What came of trying a store out, in the order in which it was tried. What could not be tried is not in it.
#[derive(Debug)]
pub struct Findings(pub Vec<(Ability, Result<()>)>);

impl Findings {
    /// Why nothing may be published here: the store does not do what has to be relied on, or not for whom asks. Who may
    /// not delete may publish.
    #[must_use]
    pub fn failure(&self) -> Option<&StoreError> {
        let failures =
            || self.0.iter().filter_map(|(ability, found)| Some((*ability, found.as_ref().err()?)));
        let denied = |ability, error: &StoreError| {
            ability == Ability::Delete && matches!(error.class(), Class::AccessDenied | Class::ReadOnly)
        };
        let unfit = failures().find(|(_, error)| error.class() == Class::Unfit);
        unfit.or_else(|| failures().find(|(ability, error)| !denied(*ability, error))).map(|(_, error)| error)
    }

    /// Notes what came of it; whether it went well.
    fn note(&mut self, ability: Ability, found: Result<()>) -> bool {
        let well = found.is_ok();
        self.0.push((ability, found));
        well
    }
}

/// Tries the store out, unless a note says that this was done, and leaves one. Whoever writes calls it first.
///
/// # Errors
/// [`Class::Unfit`] where the store does not do what has to be relied on; else as the store fails.
pub async fn ensure(root: &Root) -> Result<()> {
    if !root.is_bucket() {
        return Ok(());
    }
    let identity = blake3::hash(root.identity().as_bytes()).to_hex();
    let note = layout::probes_note(identity.get(..DIGITS).unwrap_or_default());
    if root.get(&note, NOTE_BYTES).await?.is_some() {
        return Ok(());
    }
    let findings = try_out(root).await;
    if let Some(failure) = findings.failure() {
        return Err(failure.clone());
    }
    let abilities: serde_json::Map<_, _> = findings
        .0
        .iter()
        .map(|(ability, found)| (ability.as_str().to_owned(), Value::from(found.is_ok())))
        .collect();
    let document = json!({ "schema": "weighbridge.probe/v1", "when": root.now(), "abilities": abilities });
    root.put_if_absent(&note, Bytes::from(document.to_string())).await.map(drop)
}

/// Looks whether the store can be listed and read, and writes nothing.
pub async fn look(root: &Root) -> Findings {
    let mut findings = Findings(Vec::new());
    findings.note(Ability::List, root.entries(&layout::models()).await.map(drop));
    // Whatever is there or not: what counts is an answer.
    let read = root.get(&layout::probe("passed"), NOTE_BYTES).await;
    findings.note(Ability::Read, read.map(drop));
    findings
}

/// Tries out all that a store has to be able to do, with objects of its own.
pub async fn try_out(root: &Root) -> Findings {
    let id = format!("{:016x}", fastrand::u64(..));
    let key = |what: &str| layout::probe(&format!("{id}.{what}"));
    let (first, race, over) = (key("first"), key("race"), key("over"));
    let mut findings = Findings(Vec::new());
    let list = root.entries(&layout::models()).await.map(drop);
    // Some stores make a bucket of whatever name somebody puts something into.
    let absent = list.as_ref().is_err_and(|error| error.class() == Class::NotFound);
    findings.note(Ability::List, list);
    if absent {
        return findings;
    }
    if findings.note(Ability::Write, root.put_advice(&over, Bytes::from_static(b"once")).await) {
        if findings.note(Ability::Read, reads(root, &over, b"once").await) {
            findings.note(Ability::PutIfAbsent, put_twice(root, &first).await);
            findings.note(Ability::OneWinner, put_at_once(root, &race).await);
            findings.note(Ability::FreshReads, overwrite(root, &over).await);
        }
        if listable(&findings) {
            findings.note(Ability::FreshListings, listed(root, &id, &over).await);
        }
    }
    let gone = remove(root, &[first, race, over], &id, listable(&findings)).await;
    findings.note(Ability::Delete, gone);
    findings
}

fn listable(findings: &Findings) -> bool {
    findings.0.iter().any(|(ability, found)| *ability == Ability::List && found.is_ok())
}

fn unfit(root: &Root, what: &str) -> StoreError {
    let why = format!("{what}, so that nothing may be published here; {KNOWN}");
    StoreError::new(Class::Unfit, root, why)
}

async fn reads(root: &Root, key: &Key, bytes: &[u8]) -> Result<()> {
    match root.get(key, NOTE_BYTES).await? {
        Some(found) if found == bytes => Ok(()),
        Some(_) => Err(unfit(root, "the store gave other bytes than were put last")),
        None => Err(unfit(root, "the store does not have what was just put")),
    }
}

/// A store that refuses the condition is told apart from one that refuses everything.
async fn create(root: &Root, key: &Key, bytes: &'static [u8]) -> Result<Put> {
    root.put_if_absent(key, Bytes::from_static(bytes)).await.map_err(|error| match error.class() {
        Class::Refused => {
            unfit(root, &format!("the store does not put an object on condition that it is absent ({error})"))
        }
        _ => error,
    })
}

async fn put_twice(root: &Root, key: &Key) -> Result<()> {
    create(root, key, b"first").await?;
    if create(root, key, b"second").await? == Put::Written {
        return Err(unfit(root, "the store let a second put-if-absent of one object succeed"));
    }
    reads(root, key, b"first").await
}

async fn put_at_once(root: &Root, key: &Key) -> Result<()> {
    let (one, other) = futures::future::join(create(root, key, b"one"), create(root, key, b"other")).await;
    let won = match (one?, other?) {
        (Put::Written, Put::Written) => {
            return Err(unfit(root, "the store let two put-if-absent of one object at once both succeed"));
        }
        (Put::Written, Put::Present) => &b"one"[..],
        (Put::Present, Put::Written) => b"other",
        // An answer was lost on the way, and the put was sent again.
        (Put::Present, Put::Present) => return Ok(()),
    };
    reads(root, key, won).await
}

async fn overwrite(root: &Root, key: &Key) -> Result<()> {
    root.put_advice(key, Bytes::from_static(b"twice")).await?;
    reads(root, key, b"twice").await
}

/// The objects of this try that a listing shows.
async fn shown(root: &Root, id: &str) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    let before = layout::probe(id);
    let take = |listed: Listed| {
        if listed.key.as_ref().starts_with(before.as_ref()) {
            found.push(listed);
        }
        Ok(())
    };
    root.walk(&layout::probes(), Some(&before), take).await?;
    Ok(found)
}

async fn listed(root: &Root, id: &str, key: &Key) -> Result<()> {
    let shown = shown(root, id).await?;
    let Some(found) = shown.iter().find(|listed| listed.key == *key) else {
        return Err(unfit(root, "the store does not list what was just put"));
    };
    let apart = found.modified.nanoseconds().abs_diff(root.now().nanoseconds());
    if apart > SKEW {
        let apart = apart / 1_000_000_000;
        let what = format!("the store lists what was just put with a time {apart} s away from its clock's");
        return Err(unfit(root, &what));
    }
    Ok(())
}

async fn remove(root: &Root, keys: &[Key], id: &str, listable: bool) -> Result<()> {
    root.delete(keys).await?;
    for key in keys {
        if root.get(key, NOTE_BYTES).await?.is_some() {
            return Err(unfit(root, "the store still has what was just deleted"));
        }
    }
    if listable && !shown(root, id).await?.is_empty() {
        return Err(unfit(root, "the store still lists what was just deleted"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::root::{Absent, Intercept, Request};

    fn root(folder: &tempfile::TempDir) -> Root {
        Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap()
    }

    #[tokio::test]
    async fn a_folder_does_all_that_is_relied_on_and_nothing_is_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = root(&folder);
        let findings = try_out(&root).await;
        assert!(findings.0.iter().all(|(_, found)| found.is_ok()), "{findings:?}");
        assert_eq!((findings.0.len(), findings.failure()), (8, None));
        assert_eq!(root.keys(&layout::probes(), None).await.unwrap(), []);
        assert_eq!(look(&root).await.0.len(), 2);
        ensure(&root).await.unwrap();
        assert_eq!(root.keys(&layout::probes(), None).await.unwrap(), [], "a folder is taken at its word");
    }

    /// Before a put-if-absent it removes what is there, as a store does that takes no notice of the condition.
    #[derive(Debug)]
    struct Careless(std::path::PathBuf, AtomicUsize);

    impl Intercept for Careless {
        fn before(&self, request: &Request) -> Result<()> {
            if request.name == "put_if_absent" {
                self.1.fetch_add(1, Ordering::Relaxed);
                let _ = std::fs::remove_file(self.0.join(request.key.as_ref()));
            }
            Ok(())
        }

        fn after(&self, _: &Request) -> Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_store_that_takes_no_notice_of_the_condition_is_unfit() {
        let folder = tempfile::tempdir().unwrap();
        let careless = Arc::new(Careless(folder.path().to_path_buf(), AtomicUsize::new(0)));
        let findings = try_out(&root(&folder).behind(careless.clone())).await;
        let failure = findings.failure().unwrap();
        assert_eq!(failure.class(), Class::Unfit);
        assert!(failure.to_string().contains("second put-if-absent"), "{failure}");
        assert!(careless.1.load(Ordering::Relaxed) >= 2);
    }

    /// Denies one kind of request.
    #[derive(Debug)]
    struct Denying(&'static str);

    impl Intercept for Denying {
        fn before(&self, request: &Request) -> Result<()> {
            if request.name == self.0 {
                return Err(StoreError::new(Class::AccessDenied, &request.key, "no"));
            }
            Ok(())
        }

        fn after(&self, _: &Request) -> Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn what_is_denied_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let denied = async |name: &'static str| {
            let findings = try_out(&root(&folder).behind(Arc::new(Denying(name)))).await;
            let failing: Vec<_> = findings
                .0
                .iter()
                .filter(|(_, found)| found.is_err())
                .map(|(ability, _)| ability.as_str())
                .collect();
            (failing, findings.failure().map(StoreError::class))
        };
        let no = Some(Class::AccessDenied);
        assert_eq!(denied("list").await, (vec!["list"], no));
        assert_eq!(denied("get").await, (vec!["read", "delete"], no));
        assert_eq!(denied("put_advice").await, (vec!["write"], no));
        assert_eq!(denied("put_if_absent").await, (vec!["put_if_absent", "one_winner"], no));
        assert_eq!(denied("delete").await, (vec!["delete"], None), "who may not delete may publish");
    }
}
