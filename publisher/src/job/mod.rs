//! One publish of one checkpoint, a file a stage, in reading order:
//!
//! | stage | does | leaves behind |
//! |---|---|---|
//! | [`accept`] | opens the checkpoint, lists it from its metadata alone | nothing |
//! | [`plan`] | applies the policy, lays out files, cuts chunks | nothing |
//! | [`convert`] | reads, encodes, hashes and stores, all overlapped | chunks |
//! | [`accept`] again | the checkpoint is still the same, and what was declared of its bytes holds | nothing |
//! | [`assemble`] | puts results in order | nothing |
//! | [`judge`] | applies the gates | nothing |
//! | [`seal`] | stores the report, then the manifest: now there is a snapshot | report, manifest |
//! | [`promote`] | moves the channel, if it may | channel entry |
//!
//! Every stage writes the same bytes under the same names when it is run again, so a publish that was killed anywhere
//! is finished by running it again.

pub mod accept;
pub mod assemble;
pub mod convert;
pub mod judge;
pub mod plan;
pub mod promote;
pub mod seal;

use std::path::Path;
use std::sync::Arc;

use weighbridge_converter::checkpoint::Checkpoint;
use weighbridge_converter::source::Location;
use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::checkpoint::{Format, ManifestFile};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::Ended;
use weighbridge_schemas::names::{ChannelName, ModelName, RunName};
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::report::{Outcome as Gated, Report};
use weighbridge_schemas::time::Timestamp;
use weighbridge_snapshots::channel::Operation;
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};
use promote::Force;
use seal::Sealing;

/// What is to be published, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint: a folder, or one file, here or in an object store.
    pub checkpoint: Location,
    /// Its format; `None`: found out by content.
    pub format: Option<Format>,
    /// The files that its manifest declares: each size and digest is checked.
    pub files: Vec<ManifestFile>,
    /// When it was written, by its manifest; `None`: by its files.
    pub created_at: Option<Timestamp>,
    /// The model.
    pub model: ModelName,
    /// The training run.
    pub run: RunName,
    /// The training step.
    pub step: u64,
    /// The policy.
    pub policy: Policy,
    /// The channel to move.
    pub channel: ChannelName,
    /// Who publishes, and when.
    pub operation: Operation,
}

/// How much of the machine a publish may use.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// The process's memory, in bytes.
    pub memory: u64,
    /// Threads that read and encode.
    pub threads: usize,
}

/// What a publish did.
#[derive(Debug)]
pub struct Published {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// How it ended.
    pub outcome: Ended,
    /// The channel's entry that rules now; `None` where the channel has none.
    pub ruling: Option<ChannelEntry>,
    /// The checkpoint's format.
    pub format: Format,
    /// Bytes of tensors and artifacts read from the checkpoint.
    pub bytes_read: u64,
    /// Chunk bytes written to the store.
    pub bytes_stored: u64,
    /// Chunk bytes that the store held already.
    pub bytes_reused: u64,
    /// The validation report.
    pub report: Report,
}

/// Plans off the I/O threads: lists of rows to keep are read, and folders searched for artifacts.
async fn plan_apart(
    root: &Root,
    checkpoint: Checkpoint,
    request: &Request,
    budget: Budget,
) -> Result<Arc<plan::Plan>> {
    let (policy, store) = (request.policy.clone(), root.folder().map(Path::to_path_buf));
    let planned =
        tokio::task::spawn_blocking(move || plan::plan(checkpoint, &policy, store.as_deref(), budget.memory));
    Ok(Arc::new(planned.await.map_err(|error| Failure::internal("planning", error))??))
}

/// Lists a checkpoint, and plans its publish.
///
/// # Errors
/// As its reader fails, or where the policy does not fit it.
pub async fn planned(root: &Root, request: &Request, budget: Budget) -> Result<Arc<plan::Plan>> {
    let checkpoint = accept::accept(request, budget).await?;
    plan_apart(root, checkpoint, request, budget).await
}

/// Publishes a checkpoint: all stages, here and now.
///
/// # Errors
/// A [`crate::error::Failure`] of the stage that failed. What was published before stays as it was.
pub async fn publish(
    root: &Root,
    request: &Request,
    budget: Budget,
    progress: &Arc<dyn Progress>,
) -> Result<Published> {
    promote::check(root, request).await?;
    let plan = planned(root, request, budget).await?;
    tracing::info!(
        model = %request.model,
        step = request.step,
        tensors = plan.tensors.len(),
        dropped = plan.dropped.len(),
        artifacts = plan.artifacts.len(),
        chunks = plan.pieces.len(),
        bytes = plan.source_bytes(),
        "planned"
    );
    progress.start(plan.source_bytes());
    let pieces = 0..plan.pieces.len();
    let converted = convert::convert(root, &request.model, &plan, pieces, budget, progress).await?;
    accept::check(&plan, budget, progress).await?;
    let described = convert::describe(root, &request.model, &plan, budget).await?;
    let mut bytes = converted.bytes;
    bytes += described.bytes;
    let (manifest, statistics) = assemble::assemble(request, &plan, &converted.pieces, &described);
    tracing::info!(bytes_stored = bytes.stored, bytes_reused = bytes.reused, "converted");
    let report = judge::judge(request, &plan, &manifest, &statistics);
    let (plan, pieces, described) = (&plan, &converted.pieces, &described);
    let sealing = Sealing { manifest: &manifest, report: &report, plan, pieces, described, budget };
    let claim = sealing.seal(root).await?;
    let (outcome, ruling) = if report.outcome == Gated::Rejected {
        promote::leave(root, request).await?
    } else {
        promote::promote(root, request, plan, report.snapshot, &claim, Force::No).await?
    };
    tracing::info!(snapshot = %report.snapshot, outcome = outcome.as_str(), "done");
    Ok(Published {
        snapshot: report.snapshot,
        outcome,
        ruling,
        format: plan.checkpoint.format,
        bytes_read: plan.source_bytes(),
        bytes_stored: bytes.stored,
        bytes_reused: bytes.reused,
        report,
    })
}
