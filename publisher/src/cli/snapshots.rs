//! `snapshots`: what is stored.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::report::Outcome;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::layout;
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::retain::pins;
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::output::{bytes, error_object, short, table};
use crate::error::{Failure, Result};
use crate::operations;
pub(super) use crate::operations::whole;

/// List snapshots, in the order in which they were stored.
#[derive(Debug, Args)]
pub(super) struct List {
    /// The model; without one, all.
    model: Option<String>,
}

struct Row {
    model: ModelName,
    id: SnapshotId,
    /// Absent where the manifest is damaged.
    found: Option<SnapshotManifest>,
    outcome: Option<Outcome>,
    channels: Vec<String>,
    /// Absent where what was said of it is damaged.
    pinned: Option<bool>,
}

impl List {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let models = models(&root, self.model.as_deref()).await?;
        let mut rows = Vec::new();
        let mut damage = None;
        for model in &models {
            rows.extend(rows_of(&root, model, &mut damage).await?);
        }
        let documents: Vec<_> = rows.iter().map(document).collect();
        let mut listing = json!({ "snapshots": documents });
        let failure = damage.map(Failure::from);
        if let Some(failure) = &failure {
            listing["error"] = error_object(failure);
        }
        context.output.listing(&listing, || {
            let cells: Vec<_> = rows.iter().map(cells).collect();
            table(
                &["model", "run", "step", "snapshot", "size", "tensors", "gates", "pin", "channels"],
                &cells,
            )
        });
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}

/// A model's rows. What is damaged is listed as far as it can be, and the first damage is told.
async fn rows_of(root: &Root, model: &ModelName, damage: &mut Option<StoreError>) -> Result<Vec<Row>> {
    let mut pointing: BTreeMap<SnapshotId, Vec<String>> = BTreeMap::new();
    for name in catalog::channels(root, model).await? {
        let latest = Channel::new(root, model, &name).latest().await;
        if let Some(latest) = whole(latest, damage)?.flatten() {
            pointing.entry(latest.snapshot).or_default().push(name.to_string());
        }
    }
    let mut rows = Vec::new();
    for id in catalog::snapshots(root, model).await? {
        let found = manifest::get(root, model, &id).await;
        let report = manifest::report(root, model, &id).await;
        if root.size(&layout::snapshot(model, &id)).await?.is_none() {
            // Collected meanwhile.
            continue;
        }
        let found = whole(found, damage)?;
        let report = whole(report, damage)?;
        let pin = whole(pins::get(root, model, &id).await, damage)?;
        rows.push(Row {
            model: model.clone(),
            id,
            found,
            outcome: report.map(|(report, _)| report.outcome),
            channels: pointing.remove(&id).unwrap_or_default(),
            pinned: pin.map(|pin| pin.is_some_and(|pin| pin.pinned)),
        });
    }
    Ok(rows)
}

fn document(row: &Row) -> serde_json::Value {
    let found = row.found.as_ref();
    json!({
        "snapshot": row.id,
        "model": row.model,
        "run": found.map(|found| &found.run),
        "step": found.map(|found| found.step),
        "bytes": found.map(SnapshotManifest::bytes),
        "tensors": found.map(|found| found.tensors.len()),
        "gates": row.outcome,
        "channels": row.channels,
        "pinned": row.pinned,
    })
}

fn cells(row: &Row) -> Vec<String> {
    let cell = |value: &dyn Fn(&SnapshotManifest) -> String| row.found.as_ref().map_or("?".to_owned(), value);
    vec![
        row.model.to_string(),
        cell(&|found| found.run.to_string()),
        cell(&|found| found.step.to_string()),
        short(&row.id),
        cell(&|found| bytes(found.bytes())),
        cell(&|found| found.tensors.len().to_string()),
        row.outcome.map_or("?", Outcome::as_str).to_owned(),
        row.pinned.map_or("?", |pinned| if pinned { "pinned" } else { "" }).to_owned(),
        row.channels.join(", "),
    ]
}

/// The models that are meant: the one that is named, or all.
pub(super) async fn models(root: &Root, named: Option<&str>) -> Result<Vec<ModelName>> {
    if let Some((text, model)) = named.and_then(|text| Some((text, text.split_once('@')?.0))) {
        return Err(Failure::usage(format!(
            "{text}: name the model alone, {model}; `weighbridge channels log {text}` shows a channel's log"
        )));
    }
    operations::models(root, named).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_channel_in_the_place_of_a_model_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let failure = models(&root, Some("dlrm@prod")).await.unwrap_err();
        assert!(failure.message.contains("alone, dlrm; `weighbridge channels log dlrm@prod`"), "{failure}");
        assert!(models(&root, None).await.unwrap().is_empty());
    }
}
