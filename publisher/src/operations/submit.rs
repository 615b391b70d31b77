//! A checkpoint manifest is looked at, and handed over.

use std::time::Duration;

use tokio::time::timeout;

use weighbridge_converter::source::Location;
use weighbridge_queue::Queue;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::error::{Kind, shorten};
use weighbridge_schemas::job::JobId;
use weighbridge_snapshots::bucket;
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::root::Root;

use crate::error::{Exit, Failure, Result};
use crate::sources;
use crate::steps::messages;

/// Reads a manifest that is to be handed over: what no worker would take is refused here. Its checkpoint has to lie at
/// a place that means the same on every machine.
///
/// # Errors
/// A failure of the document; a usage failure for its location.
pub fn check(written: &[u8]) -> Result<CheckpointManifest> {
    let manifest = CheckpointManifest::parse(written)?;
    let location = &manifest.location;
    if location.chars().any(char::is_control) {
        let shown = shorten(&location.escape_debug().to_string());
        return Err(Failure::usage(format!(
            "the manifest's location \"{shown}\" has control characters in it"
        )));
    }
    if bucket::is_bucket(location) {
        // Whether a client can be built of it is for whoever reads there: that takes a while, and what they have.
        bucket::check(location)
            .map_err(|error| Failure::usage(format!("the manifest's location {error}")))?;
        return Ok(manifest);
    }
    let located = sources::locate(location.as_ref());
    match located.map_err(|failure| failure.while_doing("the manifest's location"))? {
        Location::Local(path) if !path.is_absolute() => Err(Failure::usage(format!(
            "the manifest's location {:?} is neither an absolute path nor a URL: a worker cannot know what it is \
             relative to; give where the checkpoint lies for every machine",
            shorten(location)
        ))),
        Location::Local(_) | Location::Remote(_) => Ok(manifest),
    }
}

/// How long the store is asked whether an id was used before: nobody waits for a store to hand a manifest over.
const LOOK: Duration = Duration::from_secs(2);

/// Refuses a manifest whose id another one of its model has, as far as the store tells: workers would find that later.
///
/// # Errors
/// A conflict.
pub async fn unused(root: &Root, manifest: &CheckpointManifest) -> Result<()> {
    let id: JobId = manifest.id.parse()?;
    let job = Job::new(root, &manifest.model, &id);
    let known = match timeout(LOOK, job.record()).await {
        Ok(Ok(Some(record))) => record.manifest,
        Ok(Ok(None)) => return Ok(()),
        Ok(Err(error)) => {
            tracing::debug!(%error, "whether an id was used before is not known");
            return Ok(());
        }
        Err(_) => return Ok(()),
    };
    if known == *manifest {
        return Ok(());
    }
    let model = &manifest.model;
    let message =
        format!("the id {id} was used before, for another manifest of model {model}; give it its own");
    Err(Failure { kind: Kind::Conflict, class: "id_used", message, exit: Exit::Failed })
}

/// Puts a manifest on the queue, as it was written.
///
/// # Errors
/// As the queue fails.
pub async fn send(queue: &dyn Queue, manifest: &CheckpointManifest, written: Vec<u8>) -> Result<()> {
    Ok(queue.send(&messages::checkpoint(manifest, written)).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(location: &str) -> std::result::Result<String, &'static str> {
        let manifest = serde_json::json!({
            "schema": "weighbridge.checkpoint/v1", "id": "0f8fad5b-d9cb-469f-a165-70867728950e",
            "model": "m", "run": "r", "step": 1, "created_at": "2026-11-29T16:10:04Z", "location": location,
        });
        check(manifest.to_string().as_bytes()).map(|manifest| manifest.id).map_err(|failure| failure.class)
    }

    #[test]
    fn a_location_means_the_same_everywhere() {
        for right in [
            "/checkpoints/step-1",
            "file:///checkpoints/step-1",
            "s3://bucket/runs/7/step-1",
            "S3://bucket/x",
        ] {
            assert_eq!(at(right).unwrap(), "0f8fad5b-d9cb-469f-a165-70867728950e", "{right}");
        }
        for wrong in [
            "",
            "step-1",
            "/checkpoints/\0step-1",
            "./step-1",
            "ftp://host/step-1",
            "s3://key:secret@bucket/step-1",
            "gs:///x",
            "é",
        ] {
            assert_eq!(at(wrong).unwrap_err(), "usage", "{wrong}");
        }
        assert_eq!(check(b"{}").unwrap_err().class, "bad_document");
    }
}
