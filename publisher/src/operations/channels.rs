//! Where channels point, and how they got there.

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::{Channel, LogPart};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::root::Root;

use super::whole;
use crate::error::Result;

/// A channel, and the entry that rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// The entry.
    pub entry: ChannelEntry,
}

/// Where the channels of these models point. One that is damaged hides no other: the first damage is kept.
///
/// # Errors
/// As the store fails.
pub async fn list(
    root: &Root,
    models: &[ModelName],
    damage: &mut Option<StoreError>,
) -> Result<Vec<Standing>> {
    let mut standing = Vec::new();
    for model in models {
        for channel in catalog::channels(root, model).await? {
            let latest = Channel::new(root, model, &channel).latest().await;
            if let Some(entry) = whole(latest, damage)?.flatten() {
                standing.push(Standing { model: model.clone(), channel, entry });
            }
        }
    }
    Ok(standing)
}

/// The entry that rules; that there is none is an error.
///
/// # Errors
/// [`Class::NotFound`] where there is no such channel; else as [`Channel::latest`].
pub async fn latest(root: &Root, model: &ModelName, channel: &ChannelName) -> Result<ChannelEntry> {
    let latest = Channel::new(root, model, channel).latest().await?;
    latest.ok_or_else(|| {
        let why = "there is no such channel; `weighbridge channels` lists them";
        StoreError::new(Class::NotFound, format!("{model}@{channel}"), why).into()
    })
}

/// A part of a channel's log, the newest entry first: of `most` entries before number `before`.
///
/// # Errors
/// As [`latest`].
pub async fn log(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    before: u64,
    most: usize,
) -> Result<LogPart> {
    latest(root, model, channel).await?;
    Ok(Channel::new(root, model, channel).log_before(before, most).await?)
}
