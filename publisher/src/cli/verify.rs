//! `verify`: every byte read and checked.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::fetch::Progress as _;
use weighbridge_snapshots::reference::Reference;
use weighbridge_snapshots::root::{Absent, Root};
use weighbridge_snapshots::verify::{self, Verified};

use super::bar::Bar;
use super::output::{bytes, count, error_object};
use super::snapshots::models;
use super::{Context, default_channel};
use crate::error::{Exit, Failure, Result};

/// Read and check a snapshot, a model, or the whole store: manifests, reports, channel entries, and every chunk.
#[derive(Debug, Args)]
pub(super) struct Verify {
    /// MODEL for all of a model, MODEL@CHANNEL or MODEL@SNAPSHOT for one snapshot; without any, the whole store.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: Option<String>,
}

impl Verify {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let bar = Bar::new("verifying", context.output.is_json());
        let progress = |bytes| bar.advance(bytes);
        let verified = match self.reference.as_deref() {
            Some(text)
                if text.contains('@') || text.parse::<weighbridge_schemas::ids::SnapshotId>().is_ok() =>
            {
                let (model, id) = Reference::locate(text, &root, &default_channel()).await?;
                verify::snapshot(&root, &model, &id, &progress).await?
            }
            model => all(&root, &models(&root, model).await?, &progress).await?,
        };
        drop(bar);
        Ok(tell(context, &verified))
    }
}

async fn all(root: &Root, models: &[ModelName], progress: verify::Progress<'_>) -> Result<Verified> {
    let mut sum = Verified::default();
    for model in models {
        let verified = verify::model(root, model, progress).await?;
        sum.snapshots += verified.snapshots;
        sum.entries += verified.entries;
        sum.chunks += verified.chunks;
        sum.bytes += verified.bytes;
        sum.problems.extend(verified.problems);
    }
    Ok(sum)
}

fn tell(context: &Context, verified: &Verified) -> ExitCode {
    let problems: Vec<_> = verified
        .problems
        .iter()
        .map(|problem| json!({ "object": problem.object(), "message": problem.to_string() }))
        .collect();
    let mut document = json!({
        "snapshots": verified.snapshots,
        "entries": verified.entries,
        "chunks": verified.chunks,
        "bytes": verified.bytes,
        "problems": problems,
    });
    let summary = format!(
        "checked {}, {}, {} ({})",
        count(verified.snapshots, "snapshot"),
        count(verified.entries, "channel entry"),
        count(verified.chunks, "chunk"),
        bytes(verified.bytes)
    );
    let Some(first) = verified.problems.first() else {
        context.output.done(&document, || format!("{summary}: all right\n"));
        return ExitCode::SUCCESS;
    };
    let more = match verified.problems.len() - 1 {
        0 => String::new(),
        more => format!("; and {} more", count(more as u64, "problem")),
    };
    let failure = Failure {
        kind: Kind::Permanent,
        class: "integrity",
        message: format!("{first}{more}; restore it, or move it away and publish the checkpoint again"),
        exit: Exit::Integrity,
    };
    document["error"] = error_object(&failure);
    context.output.done(&document, || {
        let lines: String = verified.problems.iter().map(|problem| format!("  {problem}\n")).collect();
        format!("{summary}: {}\n{lines}", count(verified.problems.len() as u64, "problem"))
    });
    context.output.failure_line(&failure);
    ExitCode::from(failure.exit as u8)
}
