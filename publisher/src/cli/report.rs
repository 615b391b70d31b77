//! `report`: a snapshot's validation report.

use clap::Args;
use serde_json::json;

use weighbridge_schemas::report::Report;
use weighbridge_snapshots::manifest;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::Absent;

use super::output::{bytes, count, plain, table};
use super::{Context, default_channel};
use crate::error::Result;

/// Show a snapshot's validation report: every tensor's figures, and what the gates made of them.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// MODEL[@CHANNEL|@SNAPSHOT], or a snapshot's id.
    #[arg(value_name = "SNAPSHOT")]
    reference: String,
}

impl Show {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let root = context.root(Absent::Refuse)?;
        let Located { model, snapshot: id, .. } =
            Reference::locate(&self.reference, &root, &default_channel()).await?;
        manifest::get(&root, &model, &id).await?;
        let (report, count) = manifest::report(&root, &model, &id).await?;
        context.output.listing(&json!(report), || text(&report, count - 1));
        Ok(())
    }
}

fn text(report: &Report, older: u64) -> String {
    let figure =
        |figure: Option<f64>| figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.3e}"));
    let rows: Vec<_> = report
        .tensors
        .iter()
        .map(|tensor| {
            vec![
                plain(tensor.name.as_str()),
                tensor.encoding.as_str().to_owned(),
                bytes(tensor.source_bytes),
                bytes(tensor.stored_bytes),
                figure(tensor.min),
                figure(tensor.max),
                figure(tensor.norm),
                figure(tensor.max_error),
                figure(tensor.relative_rms_error),
            ]
        })
        .collect();
    let heading =
        ["tensor", "encoding", "from", "to", "min", "max", "norm", "max error", "relative RMS error"];
    let mut text = table(&heading, &rows);
    for gate in &report.gates {
        text.push_str(&format!("gate {}: {}\n", gate.gate, gate.outcome.as_str()));
        for finding in &gate.findings {
            text.push_str(&format!("  {}: {}\n", plain(finding.tensor.as_str()), finding.message));
        }
    }
    for note in &report.notes {
        text.push_str(&format!("note: {}\n", plain(note)));
    }
    if let Some(artifacts) = &report.artifacts {
        let files = count(artifacts.count, "artifact");
        text.push_str(&format!("{files}, {}\n", bytes(artifacts.bytes)));
    }
    if !report.dropped.is_empty() {
        let dropped = count(report.dropped.len() as u64, "tensor");
        text.push_str(&format!("{dropped} dropped by the policy\n"));
    }
    if older > 0 {
        let older = count(older, "older report");
        text.push_str(&format!("{older} of this snapshot, under other gates, kept beside this one\n"));
    }
    text.push_str(&format!("snapshot {}: {}\n", report.snapshot, report.outcome.as_str()));
    text
}
