//! The `[promotion]` section of a policy.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::ChannelName;

/// Where a snapshot goes that has stood on the policy's channel for a while: from `canary` to `prod`. It concerns the
/// policy that the model has in the store under the name `default`, and is carried out by `serve`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Promotion {
    /// The channel that is moved. It is not while an operator holds it, nor to an older step.
    pub to: ChannelName,
    /// For how many minutes the snapshot has to have stood on the policy's own channel, without a newer one and without
    /// a hold.
    pub after_minutes: u32,
}
