//! The envelopes beside a snapshot's manifest: `ID.signatures`, then `ID.signatures.000000000002` and so on.
//!
//! Each is put if absent and never overwritten; any one of them that a trusted key has signed, and that is about this
//! very snapshot, is enough. What is damaged, or another snapshot's, is passed over: who can write to the store can
//! put rubbish there, and must not take a good signature's effect away by it.

use bytes::Bytes;

use weighbridge_schemas::ids::{ReportDigest, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::report::Report;
use weighbridge_schemas::signature::{Base64, Envelope, STATEMENT_TYPE, Statement};
use weighbridge_schemas::snapshot::SnapshotManifest;

use super::keys::{Trust, claimed};
use super::signer::Signers;
use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// An envelope that stands in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signed {
    /// Its number, from 1 on.
    pub number: u64,
    /// Whether it was written, or stood there already.
    pub put: Put,
}

/// Signs the snapshot that `report` is of, with all keys: adds an envelope, unless one by these keys over the same
/// statement is there. `digest` is that of the report's stored bytes.
///
/// # Errors
/// [`Class::Refused`] where there are [`limits::ENVELOPES`] already; else as the store fails.
pub async fn put(
    root: &Root,
    manifest: &SnapshotManifest,
    report: &Report,
    digest: ReportDigest,
    signers: &Signers,
) -> Result<Signed> {
    let (model, id) = (&manifest.model, &report.snapshot);
    let payload = Statement::new(manifest, report, digest).to_bytes();
    let envelope = Envelope {
        payload_type: STATEMENT_TYPE.to_owned(),
        signatures: signers.sign(STATEMENT_TYPE, &payload),
        payload: Base64(payload),
    };
    let bytes = Bytes::from(envelope.to_bytes());
    // What could not be read again must not be written.
    Envelope::parse(&bytes).map_err(|error| StoreError::new(Class::Refused, id, error.to_string()))?;
    let mut number = 1;
    while number <= limits::ENVELOPES {
        let key = layout::signatures(model, id, number);
        match read(root, model, id, number).await? {
            // Whoever was faster is looked at next.
            Found::Nothing => {
                if root.put_if_absent(&key, bytes.clone()).await? == Put::Written {
                    return Ok(Signed { number, put: Put::Written });
                }
            }
            Found::Envelope(found)
                if found.payload == envelope.payload
                    && signers.have_all_signed(&found.payload_type, &found.payload.0, &found.signatures) =>
            {
                root.secure(&key).await?;
                return Ok(Signed { number, put: Put::Present });
            }
            Found::Envelope(_) | Found::Damaged => number += 1,
        }
    }
    let why =
        format!("the snapshot has {} signature envelopes already, which is the most", limits::ENVELOPES);
    Err(StoreError::new(Class::Refused, id, why))
}

/// Checks that a trusted key has signed a statement about snapshot `id`, whose manifest is `manifest`, and gives the
/// first such statement.
///
/// # Errors
/// [`Class::Integrity`] where none has, with who did sign and the way out; else as the store fails.
pub async fn check(
    root: &Root,
    id: &SnapshotId,
    manifest: &SnapshotManifest,
    trust: &Trust,
) -> Result<Statement> {
    let model = &manifest.model;
    find(root, model, id, trust, "the snapshot", |statement| statement.is_of(id, manifest)).await
}

/// Checks that a trusted key has signed a statement that names the validation report whose stored bytes have `digest`.
///
/// # Errors
/// As [`check`].
pub(crate) async fn check_report(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    digest: ReportDigest,
    trust: &Trust,
) -> Result<()> {
    let names_it = |statement: &Statement| {
        statement.subject.iter().all(|subject| subject.digest.blake3 == *id)
            && (&statement.predicate.model, statement.predicate.report) == (model, digest)
    };
    find(root, model, id, trust, "the snapshot's ruling validation report", names_it).await.map(drop)
}

/// The first statement by a trusted key of which `fits` is true.
async fn find(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    trust: &Trust,
    what: &str,
    fits: impl Fn(&Statement) -> bool,
) -> Result<Statement> {
    let mut others = Vec::new();
    let mut by_trusted = false;
    for number in 1..=limits::ENVELOPES {
        let envelope = match read(root, model, id, number).await? {
            Found::Nothing => break,
            Found::Damaged => continue,
            Found::Envelope(envelope) => envelope,
        };
        let signer = trust.signer_of(&envelope.payload_type, &envelope.payload.0, &envelope.signatures);
        if signer.is_none() || envelope.payload_type != STATEMENT_TYPE {
            others.extend(envelope.signatures);
            continue;
        }
        match Statement::parse(&envelope.payload.0) {
            Ok(statement) if fits(&statement) => return Ok(statement),
            _ => by_trusted = true,
        }
    }
    let found = if by_trusted {
        "a trusted key has signed, but something else than this".to_owned()
    } else if others.is_empty() {
        "nobody has signed it".to_owned()
    } else {
        format!(
            "no signature of a trusted key is right; those there say that they are of {}",
            claimed(&others)
        )
    };
    let why = format!(
        "{what} is not signed as demanded, by {trust}: {found}. If you know that it is right, `weighbridge sign \
         {model}@{id} --signing-key FILE` signs it; or trust the key that did sign it"
    );
    Err(StoreError::new(Class::Integrity, layout::snapshot(model, id), why))
}

enum Found {
    Nothing,
    /// Something that is no envelope.
    Damaged,
    Envelope(Envelope),
}

async fn read(root: &Root, model: &ModelName, id: &SnapshotId, number: u64) -> Result<Found> {
    let key = layout::signatures(model, id, number);
    let read = match root.get(&key, limits::ENVELOPE_BYTES).await {
        Ok(None) => return Ok(Found::Nothing),
        Ok(Some(bytes)) => Envelope::parse(&bytes).map_err(|error| error.to_string()),
        Err(error) if error.class() == Class::Integrity => Err(error.to_string()),
        Err(error) => return Err(error),
    };
    Ok(read.map(Found::Envelope).unwrap_or_else(|error| {
        tracing::warn!(%key, error, "a signature envelope is damaged, and passed over");
        Found::Damaged
    }))
}

#[cfg(test)]
mod tests;
