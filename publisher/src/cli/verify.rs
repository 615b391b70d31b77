//! `verify`: every byte read and checked.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use weighbridge_schemas::error::Kind;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::fetch::Limits;
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::{Absent, Root};
use weighbridge_snapshots::sign::audit::{self, Audit};
use weighbridge_snapshots::verify::{self, Verified};

use super::bar::Bar;
use super::fetch::PROCESS_MEMORY;
use super::output::{bytes, count, error_object};
use super::signing::TrustOptions;
use super::snapshots::models;
use super::{Context, MemoryOption, default_channel};
use crate::error::{Exit, Failure, Result};

/// Read and check a snapshot, a model, or the whole store: manifests, reports, channel entries, and every chunk.
///
/// With --require-signed-by also that every snapshot, its ruling report, and the entry that rules each channel are
/// signed.
#[derive(Debug, Args)]
pub(super) struct Verify {
    /// MODEL for all of a model, MODEL@CHANNEL for a channel's log and the snapshot that it points at, MODEL@SNAPSHOT
    /// for one snapshot; without any, the whole store.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: Option<String>,
    #[command(flatten)]
    trust: TrustOptions,
    #[command(flatten)]
    memory: MemoryOption,
}

impl Verify {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let memory = context.memory(&self.memory)?.saturating_sub(PROCESS_MEMORY);
        let root = context.root(Absent::Refuse)?;
        let demanding = self.trust.on(context, root.clone())?;
        let most = if root.is_bucket() { verify::OF_A_BUCKET } else { verify::OF_A_FOLDER };
        let limits = Limits::new(&root, memory, most, Pace::default());
        let bar = Bar::new("verifying", context.output.is_json());
        let mut signed = Audit::default();
        let verified = match self.reference.as_deref() {
            Some(text)
                if text.contains('@') || text.parse::<weighbridge_schemas::ids::SnapshotId>().is_ok() =>
            {
                let Located { model, snapshot, followed, .. } =
                    Reference::locate(text, &demanding, &default_channel()).await?;
                let channel = followed.map(|followed| followed.channel);
                let verified =
                    verify::snapshot(&root, &model, &snapshot, channel.as_ref(), &limits, &*bar).await?;
                audit::snapshot(&demanding, &model, &snapshot, &mut signed).await?;
                verified
            }
            named => {
                let models = models(&root, named).await?;
                if models.is_empty() {
                    let why = "there is nothing to verify: it holds no model; is it the right place?";
                    return Err(StoreError::new(Class::NotFound, &root, why).into());
                }
                let verified = all(&root, &models, &limits, &bar).await?;
                for model in &models {
                    audit::model(&demanding, model, &mut signed).await?;
                }
                verified
            }
        };
        drop(bar);
        Ok(tell(context, verified, demanding.trust().map(|_| signed)))
    }
}

async fn all(root: &Root, models: &[ModelName], limits: &Limits, bar: &Bar) -> Result<Verified> {
    let mut sum = Verified::default();
    for model in models {
        let verified = verify::model(root, model, limits, bar).await?;
        sum.snapshots += verified.snapshots;
        sum.entries += verified.entries;
        sum.collected += verified.collected;
        sum.chunks += verified.chunks;
        sum.bytes += verified.bytes;
        sum.problems.extend(verified.problems);
    }
    Ok(sum)
}

/// Tells what was checked; `signed` is there where signatures are demanded.
fn tell(context: &Context, verified: Verified, signed: Option<Audit>) -> ExitCode {
    let mut problems = verified.problems;
    let way_out = match problems.is_empty() {
        true => "",
        false => "; restore it, or move it away and publish the checkpoint again",
    };
    let signatures = signed.map(|signed| {
        // What is damaged has been told already.
        let new =
            signed.problems.into_iter().filter(|problem| !problems.contains(problem)).collect::<Vec<_>>();
        problems.extend(new);
        (signed.snapshots, signed.channels)
    });
    let listed: Vec<_> = problems
        .iter()
        .map(|problem| json!({ "object": problem.object(), "message": problem.to_string() }))
        .collect();
    let mut document = json!({
        "snapshots": verified.snapshots,
        "entries": verified.entries,
        "collected_entries": verified.collected,
        "chunks": verified.chunks,
        "bytes": verified.bytes,
        "problems": listed,
    });
    let mut summary = format!(
        "checked {}, {}, {} ({})",
        count(verified.snapshots, "snapshot"),
        count(verified.entries, "channel entry"),
        count(verified.chunks, "chunk"),
        bytes(verified.bytes)
    );
    if verified.collected > 0 {
        summary
            .push_str(&format!("; {} of snapshots collected since", count(verified.collected, "old entry")));
    }
    if let Some((snapshots, channels)) = signatures {
        document["signed"] = json!({ "snapshots": snapshots, "channels": channels });
        let (snapshots, channels) = (count(snapshots, "snapshot"), count(channels, "channel"));
        summary.push_str(&format!("; {snapshots} and {channels} signed as demanded"));
    }
    let Some(first) = problems.first() else {
        context.output.done(&document, || format!("{summary}: all right\n"));
        return ExitCode::SUCCESS;
    };
    let more = match problems.len() - 1 {
        0 => String::new(),
        more => format!("; and {} more", count(more as u64, "problem")),
    };
    let failure = Failure {
        kind: Kind::Permanent,
        class: "integrity",
        message: format!("{first}{more}{way_out}"),
        exit: Exit::Integrity,
    };
    document["error"] = error_object(&failure);
    context.output.done(&document, || {
        let lines: String = problems.iter().map(|problem| format!("  {problem}\n")).collect();
        format!("{summary}: {}\n{lines}", count(problems.len() as u64, "problem"))
    });
    context.output.failure_line(&failure);
    ExitCode::from(failure.exit as u8)
}
