//! What a store holds: models, their snapshots and channels. Names and ids that are not ours are passed over.

use object_store::path::Path as Key;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};

use crate::error::Result;
use crate::layout;
use crate::root::Root;

/// The models, sorted.
///
/// # Errors
/// As the store fails.
pub async fn models(root: &Root) -> Result<Vec<ModelName>> {
    folders(root, &layout::models()).await
}

/// A model's channels, sorted.
///
/// # Errors
/// As the store fails.
pub async fn channels(root: &Root, model: &ModelName) -> Result<Vec<ChannelName>> {
    folders(root, &layout::channels(model)).await
}

/// A model's snapshots, in the order in which they were stored.
///
/// # Errors
/// As the store fails.
pub async fn snapshots(root: &Root, model: &ModelName) -> Result<Vec<SnapshotId>> {
    let mut found: Vec<_> = root
        .entries(&layout::snapshots(model))
        .await?
        .objects
        .into_iter()
        .filter_map(|meta| Some((meta.last_modified, meta.location.filename()?.parse().ok()?)))
        .collect();
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, id)| id).collect())
}

/// The names of the folders in `folder` that are names of this kind, sorted.
pub(crate) async fn folders<N: std::str::FromStr + Ord>(root: &Root, folder: &Key) -> Result<Vec<N>> {
    let prefixes = root.entries(folder).await?.common_prefixes;
    let mut names: Vec<N> = prefixes.iter().filter_map(|prefix| prefix.filename()?.parse().ok()).collect();
    names.sort_unstable();
    Ok(names)
}
