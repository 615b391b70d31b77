//! The signatures inside a channel entry.

use weighbridge_schemas::channel::{ChannelEntry, signed_bytes};
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::signature::CHANNEL_ENTRY_TYPE;

use super::keys::{Trust, claimed};
use super::signer::Signers;
use crate::error::{Class, Result, StoreError};
use crate::layout;

/// Puts the signatures of all keys into `entry`, in place of those that it has.
///
/// # Errors
/// [`DocumentError`] where the entry is too large to be read again.
pub fn sign_entry(
    signers: &Signers,
    model: &ModelName,
    channel: &ChannelName,
    entry: &mut ChannelEntry,
) -> std::result::Result<(), DocumentError> {
    let body = signed_bytes(model, channel, &entry.to_bytes())?;
    entry.signatures = signers.sign(CHANNEL_ENTRY_TYPE, &body);
    Ok(())
}

/// Checks that a trusted key has signed `entry`, of this model and channel; `json` are its stored bytes, since a newer
/// version may have signed fields that this one does not know.
///
/// # Errors
/// [`Class::Integrity`], with the way out.
pub fn check_entry(
    trust: &Trust,
    model: &ModelName,
    channel: &ChannelName,
    entry: &ChannelEntry,
    json: &[u8],
) -> Result<()> {
    let key = layout::channel_entry(model, channel, entry.sequence);
    let body = signed_bytes(model, channel, json)
        .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
    if trust.signer_of(CHANNEL_ENTRY_TYPE, &body, &entry.signatures).is_some() {
        return Ok(());
    }
    let what = if entry.signatures.is_empty() {
        "the entry is not signed".to_owned()
    } else {
        format!(
            "no signature of a trusted key on the entry is right; those on it say that they are of {}",
            claimed(&entry.signatures)
        )
    };
    let why = format!(
        "{what}; a signature of {trust} is demanded. If it is right that {model}@{channel} points at {snapshot}, let \
         `weighbridge promote {model}@{snapshot} --channel {channel} --signing-key FILE` write a signed entry; or \
         trust the key that did sign it",
        snapshot = entry.snapshot
    );
    Err(StoreError::new(Class::Integrity, key, why))
}
