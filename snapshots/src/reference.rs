//! `MODEL[@CHANNEL or @SNAPSHOT]`: how people point at a snapshot.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::error::{DocumentError, shorten};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::snapshot::SnapshotManifest;

use crate::api::Api;
use crate::catalog;
use crate::channel::Channel;
use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::manifest;
use crate::root::Root;

/// The fewest digits of a snapshot's id that may stand for it.
pub const PREFIX_DIGITS: usize = 6;

/// A snapshot by model and channel, id, or the first digits of an id. What looks like a channel's name and like
/// digits of an id is looked up as a channel first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The model.
    pub model: ModelName,
    /// What stands behind the `@`.
    pub at: Option<String>,
}

/// What a reference points at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The model.
    pub model: ModelName,
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The channel that says so, where one was asked.
    pub followed: Option<Followed>,
    /// The snapshot's manifest, where it was read on the way: it may be large.
    pub(crate) manifest: Option<Arc<SnapshotManifest>>,
}

/// Where a channel stood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Followed {
    /// The channel.
    pub channel: ChannelName,
    /// Its entry that ruled.
    pub entry: ChannelEntry,
}

impl FromStr for Reference {
    type Err = DocumentError;

    fn from_str(text: &str) -> std::result::Result<Self, DocumentError> {
        let (model, at) = match text.split_once('@') {
            Some((model, at)) => (model, Some(at)),
            None => (text, None),
        };
        if let Some(at) = at {
            at.parse::<ChannelName>()?;
        }
        Ok(Self { model: model.parse()?, at: at.map(ToOwned::to_owned) })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model.fmt(f)?;
        self.at.as_ref().map_or(Ok(()), |at| write!(f, "@{at}"))
    }
}

impl Reference {
    /// The snapshot that the reference points at now; without an `@`, where channel `default` points.
    ///
    /// # Errors
    /// [`Class::NotFound`] for an unknown model, channel or snapshot, [`Class::Refused`] for digits that several ids
    /// begin with; else as the store fails.
    pub async fn resolve(&self, root: &Root, default: &ChannelName) -> Result<Located> {
        let at = self.at.as_deref().unwrap_or(default.as_str());
        if let Some(api) = root.api() {
            return self.asked(root, api, at).await;
        }
        let id = at.parse::<SnapshotId>();
        if let Ok(id) = &id
            && root.size(&layout::snapshot(&self.model, id)).await?.is_some()
        {
            return Ok(self.by_id(*id));
        }
        // `parse` has made sure that this is a channel's name.
        if let Ok(name) = at.parse()
            && let Some(located) = follow(root, &self.model, &name).await?
        {
            return Ok(located);
        }
        Ok(self.by_id(self.by_prefix(root, at).await?))
    }

    /// What an API says that `at` points at. It is believed no more than a store.
    async fn asked(&self, root: &Root, api: &Api, at: &str) -> Result<Located> {
        let resolved = api.resolve(&self.model, at).await?;
        let Some((name, bytes)) = resolved.entry else { return Ok(self.by_id(resolved.snapshot)) };
        let entry = Channel::new(root, &self.model, &name).believed(&bytes)?;
        let manifest = Some(Arc::new(check_there(root, &self.model, &name, &entry).await?));
        let (snapshot, followed) = (entry.snapshot, Some(Followed { channel: name, entry }));
        Ok(Located { model: self.model.clone(), snapshot, followed, manifest })
    }

    fn by_id(&self, snapshot: SnapshotId) -> Located {
        Located { model: self.model.clone(), snapshot, followed: None, manifest: None }
    }

    /// The model and snapshot that `text` points at: a reference, or a whole snapshot id of any model.
    ///
    /// # Errors
    /// As [`Reference::resolve`]; [`Class::BadLocation`] where `text` is no reference.
    pub async fn locate(text: &str, root: &Root, default: &ChannelName) -> Result<Located> {
        if root.api().is_some() {
            let reference: Self = text.parse().map_err(|error: DocumentError| {
                StoreError::new(Class::BadLocation, shorten(text), error.to_string())
            })?;
            return reference.resolve(root, default).await;
        }
        let by_id = |(model, snapshot)| Located { model, snapshot, followed: None, manifest: None };
        if let Ok(id) = text.parse::<SnapshotId>() {
            for model in catalog::models(root).await? {
                if root.size(&layout::snapshot(&model, &id)).await?.is_some() {
                    return Ok(by_id((model, id)));
                }
            }
            if !catalog::models(root).await?.iter().any(|model| model.as_str() == text) {
                return Err(StoreError::new(
                    Class::NotFound,
                    id,
                    "no model in the store has such a snapshot",
                ));
            }
        }
        if let Some(found) = by_bare_prefix(text, root).await? {
            return Ok(by_id(found));
        }
        let reference: Self = text.parse().map_err(|error: DocumentError| {
            StoreError::new(Class::BadLocation, shorten(text), error.to_string())
        })?;
        reference.resolve(root, default).await
    }

    async fn by_prefix(&self, root: &Root, at: &str) -> Result<SnapshotId> {
        let ids = catalog::snapshots(root, &self.model).await?;
        let digits = at.len() >= PREFIX_DIGITS && at.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut matching = ids.iter().filter(|id| digits && id.to_string().starts_with(at));
        match (matching.next(), matching.next()) {
            (Some(&only), None) => Ok(only),
            (Some(_), Some(_)) => {
                let why = "several snapshots' ids begin so; give more digits";
                Err(StoreError::new(Class::Refused, shorten(at), why))
            }
            (None, _) => Err(self.unknown(root, at, ids.len()).await),
        }
    }

    async fn unknown(&self, root: &Root, at: &str, snapshots: usize) -> StoreError {
        let model = &self.model;
        let channels = catalog::channels(root, model).await.unwrap_or_default();
        let why = if snapshots == 0 && channels.is_empty() {
            let known: Vec<_> = catalog::models(root).await.unwrap_or_default();
            format!("the store holds no model {model}; it holds {}", listed(&known))
        } else {
            format!(
                "model {model} has no channel or snapshot of that name; its channels: {}; \
                 `weighbridge snapshots {model}` lists its snapshots ({snapshots}), whose ids may be shortened to \
                 {PREFIX_DIGITS} digits",
                listed(&channels)
            )
        };
        let object = if self.at.is_some() { self.to_string() } else { format!("{model}@{at}") };
        StoreError::new(Class::NotFound, object, why)
    }
}

/// The one snapshot, of whatever model, whose id begins with `text`; `None` where `text` is a model's name, or no such
/// digits, or names none or several.
async fn by_bare_prefix(text: &str, root: &Root) -> Result<Option<(ModelName, SnapshotId)>> {
    if text.len() < PREFIX_DIGITS || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(None);
    }
    let models = catalog::models(root).await?;
    if models.iter().any(|model| model.as_str() == text) {
        return Ok(None);
    }
    let mut found = Vec::new();
    for model in models {
        let ids = catalog::snapshots(root, &model).await?;
        found.extend(
            ids.into_iter().filter(|id| id.to_string().starts_with(text)).map(|id| (model.clone(), id)),
        );
    }
    Ok(if found.len() == 1 { found.pop() } else { None })
}

/// What channel `name` points at now; `None` where it has no entries.
pub(crate) async fn follow(root: &Root, model: &ModelName, name: &ChannelName) -> Result<Option<Located>> {
    let Some(entry) = Channel::new(root, model, name).latest().await? else { return Ok(None) };
    let (snapshot, followed) = (entry.snapshot, Followed { channel: name.clone(), entry });
    let manifest = Some(pointed_at(root, model, &followed).await?);
    Ok(Some(Located { model: model.clone(), snapshot, followed: Some(followed), manifest }))
}

/// The manifest of the snapshot that an entry of channel `name` points at.
///
/// # Errors
/// [`Class::Integrity`] where it is not there, or is not what the entry says; else as the store fails.
pub(crate) async fn pointed_at(
    root: &Root,
    model: &ModelName,
    followed: &Followed,
) -> Result<Arc<SnapshotManifest>> {
    check_there(root, model, &followed.channel, &followed.entry).await.map(Arc::new)
}

/// A channel's snapshot is in the store and is what the entry says: else something was deleted or altered.
async fn check_there(
    root: &Root,
    model: &ModelName,
    name: &ChannelName,
    entry: &ChannelEntry,
) -> Result<SnapshotManifest> {
    let found = manifest::get(root, model, &entry.snapshot).await;
    let why = match found {
        Ok(found) if found.run == entry.run && found.step == entry.step => return Ok(found),
        Ok(_) => {
            format!("the run or step of entry {} of channel {name} is not its snapshot's", entry.sequence)
        }
        Err(error) if error.class() == Class::NotFound => {
            format!("entry {} of channel {name} points at it, but it is not in the store", entry.sequence)
        }
        Err(error) => return Err(error),
    };
    Err(StoreError::new(Class::Integrity, layout::snapshot(model, &entry.snapshot), why))
}

fn listed<N: fmt::Display>(names: &[N]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().take(20).map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_parse_and_print() {
        for text in ["dlrm", "dlrm@prod", &format!("dlrm@{}", "ab".repeat(32))] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), text);
        }
        for text in ["", "@prod", "dlrm@", "dlrm@../x", "../dlrm", "a@b@c"] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
    }
}
