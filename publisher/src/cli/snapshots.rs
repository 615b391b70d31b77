//! `snapshots`: what is stored.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::report::Outcome;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::output::{bytes, short, table};
use crate::error::Result;

/// List snapshots, in the order in which they were stored.
#[derive(Debug, Args)]
pub(super) struct List {
    /// The model; without one, all.
    model: Option<String>,
}

struct Row {
    id: SnapshotId,
    found: SnapshotManifest,
    outcome: Option<Outcome>,
    channels: Vec<String>,
}

impl List {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let root = context.root(Absent::Refuse)?;
        let models = models(&root, self.model.as_deref()).await?;
        let mut rows = Vec::new();
        for model in &models {
            rows.extend(rows_of(&root, model).await?);
        }
        let documents: Vec<_> = rows.iter().map(document).collect();
        context.output.listing(&json!({ "snapshots": documents }), || {
            let cells: Vec<_> = rows.iter().map(cells).collect();
            table(&["model", "run", "step", "snapshot", "size", "tensors", "gates", "channels"], &cells)
        });
        Ok(())
    }
}

/// The model that was named, which has to be there; else all.
pub(super) async fn models(root: &Root, named: Option<&str>) -> Result<Vec<ModelName>> {
    let known = catalog::models(root).await?;
    let Some(named) = named else { return Ok(known) };
    let model: ModelName = named.parse()?;
    if known.contains(&model) {
        return Ok(vec![model]);
    }
    let known: Vec<_> = known.iter().map(ToString::to_string).collect();
    let why = format!("the store holds no such model; it holds: {}", known.join(", "));
    Err(StoreError::new(Class::NotFound, model, why).into())
}

async fn rows_of(root: &Root, model: &ModelName) -> Result<Vec<Row>> {
    let mut pointing: BTreeMap<SnapshotId, Vec<String>> = BTreeMap::new();
    for name in catalog::channels(root, model).await? {
        if let Some(latest) = Channel::new(root, model, &name).latest().await? {
            pointing.entry(latest.snapshot).or_default().push(name.to_string());
        }
    }
    let mut rows = Vec::new();
    for id in catalog::snapshots(root, model).await? {
        let found = manifest::get(root, model, &id).await?;
        let outcome = manifest::reports(root, model, &id).await?.first().map(|report| report.outcome);
        rows.push(Row { id, found, outcome, channels: pointing.remove(&id).unwrap_or_default() });
    }
    Ok(rows)
}

fn document(row: &Row) -> serde_json::Value {
    json!({
        "snapshot": row.id,
        "model": row.found.model,
        "run": row.found.run,
        "step": row.found.step,
        "bytes": row.found.bytes(),
        "tensors": row.found.tensors.len(),
        "gates": row.outcome,
        "channels": row.channels,
    })
}

fn cells(row: &Row) -> Vec<String> {
    vec![
        row.found.model.to_string(),
        row.found.run.to_string(),
        row.found.step.to_string(),
        short(&row.id),
        bytes(row.found.bytes()),
        row.found.tensors.len().to_string(),
        row.outcome.map_or("-", Outcome::as_str).to_owned(),
        row.channels.join(", "),
    ]
}
