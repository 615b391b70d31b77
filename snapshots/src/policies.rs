//! Named policies of a model: every version is kept, the newest rules.

use bytes::Bytes;
use object_store::ObjectMeta;

use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ModelName, PolicyName};
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::time::Timestamp;

use crate::catalog;
use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// A version of a named policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its number, from 1 on.
    pub number: u64,
    /// The policy, in TOML.
    pub text: String,
}

/// Puts a policy as the newest version of that name, unless it is that already. The text is a policy that parses: the
/// caller has seen to that.
///
/// # Errors
/// As the store fails.
pub async fn put(root: &Root, model: &ModelName, name: &PolicyName, text: &str) -> Result<u64> {
    loop {
        let latest = latest(root, model, name).await?;
        if let Some(version) = latest.as_ref().filter(|version| version.text == text) {
            return Ok(version.number);
        }
        let number = latest.map_or(1, |version| version.number.saturating_add(1));
        let key = layout::policy_version(model, name, number);
        if root.put_if_absent(&key, Bytes::from(text.to_owned())).await? == Put::Written {
            return Ok(number);
        }
    }
}

/// The newest version; `None` where there is no policy of that name.
///
/// # Errors
/// [`Class::Integrity`] where it is no policy; else as the store fails.
pub async fn latest(root: &Root, model: &ModelName, name: &PolicyName) -> Result<Option<Version>> {
    let keys = root.keys(&layout::policy(model, name), None).await?;
    match keys.iter().filter_map(layout::number).max() {
        Some(number) => version(root, model, name, number).await.map(Some),
        None => Ok(None),
    }
}

/// One version.
///
/// # Errors
/// [`Class::NotFound`], [`Class::Integrity`] where it is no policy; else as the store fails.
pub async fn version(root: &Root, model: &ModelName, name: &PolicyName, number: u64) -> Result<Version> {
    let key = layout::policy_version(model, name, number);
    let Some(bytes) = root.get(&key, limits::POLICY_BYTES).await? else {
        return Err(StoreError::new(Class::NotFound, key, "there is no such version of the policy"));
    };
    let damaged = |why: String| StoreError::new(Class::Integrity, &key, why);
    let text = String::from_utf8(bytes.to_vec()).map_err(|error| damaged(error.to_string()))?;
    Policy::parse(&text).map_err(|error| damaged(error.to_string()))?;
    Ok(Version { number, text })
}

/// The numbers of a policy's versions, in order, and when each was put.
///
/// # Errors
/// As the store fails.
pub async fn versions(root: &Root, model: &ModelName, name: &PolicyName) -> Result<Vec<(u64, Timestamp)>> {
    let objects = root.entries(&layout::policy(model, name)).await?.objects;
    let version = |object: &ObjectMeta| {
        let put = object.last_modified.timestamp_nanos_opt().unwrap_or_default();
        Some((layout::number(&object.location)?, Timestamp::from_nanoseconds(put.into())))
    };
    let mut versions: Vec<_> = objects.iter().filter_map(version).collect();
    versions.sort_unstable();
    Ok(versions)
}

/// The names of a model's policies, sorted.
///
/// # Errors
/// As the store fails.
pub async fn list(root: &Root, model: &ModelName) -> Result<Vec<PolicyName>> {
    catalog::folders(root, &layout::policies(model)).await
}
