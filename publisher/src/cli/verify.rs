//! `verify`: every byte read and checked.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::fetch::Limits;
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::{Absent, Root};
use weighbridge_snapshots::verify::{self, Verified};

use super::bar::Bar;
use super::fetch::PROCESS_MEMORY;
use super::output::{bytes, count, error_object};
use super::snapshots::models;
use super::{Context, MemoryOption, default_channel};
use crate::error::{Exit, Failure, Result};

/// Read and check a snapshot, a model, or the whole store: manifests, reports, channel entries, and every chunk.
#[derive(Debug, Args)]
pub(super) struct Verify {
    /// MODEL for all of a model, MODEL@CHANNEL for a channel's log and the snapshot that it points at, MODEL@SNAPSHOT
    /// for one snapshot; without any, the whole store.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: Option<String>,
    #[command(flatten)]
    memory: MemoryOption,
}

impl Verify {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let memory = context.memory(&self.memory)?.saturating_sub(PROCESS_MEMORY);
        let root = context.root(Absent::Refuse)?;
        let most = if root.is_bucket() { verify::OF_A_BUCKET } else { verify::OF_A_FOLDER };
        let limits = Limits::new(&root, memory, most, Pace::default());
        let bar = Bar::new("verifying", context.output.is_json());
        let verified = match self.reference.as_deref() {
            Some(text)
                if text.contains('@') || text.parse::<weighbridge_schemas::ids::SnapshotId>().is_ok() =>
            {
                let Located { model, snapshot, followed } =
                    Reference::locate(text, &root, &default_channel()).await?;
                let channel = followed.map(|followed| followed.channel);
                verify::snapshot(&root, &model, &snapshot, channel.as_ref(), &limits, &*bar).await?
            }
            model => all(&root, &models(&root, model).await?, &limits, &bar).await?,
        };
        drop(bar);
        Ok(tell(context, &verified))
    }
}

async fn all(root: &Root, models: &[ModelName], limits: &Limits, bar: &Bar) -> Result<Verified> {
    let mut sum = Verified::default();
    for model in models {
        let verified = verify::model(root, model, limits, bar).await?;
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
