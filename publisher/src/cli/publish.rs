//! `publish`: a checkpoint becomes a snapshot, here and now.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use weighbridge_converter::source::{Location, Source};
use weighbridge_schemas::checkpoint::{CheckpointManifest, Format};
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::job::Ended;
use weighbridge_schemas::names::{ChannelName, ModelName, RunName};
use weighbridge_schemas::policy::Policy;
use weighbridge_schemas::report::Outcome as Gated;
use weighbridge_snapshots::fetch::Progress;
use weighbridge_snapshots::probe;
use weighbridge_snapshots::root::Absent;

use super::bar::Bar;
use super::output::{bytes, error_object, plain, short};
use super::signing::PublisherOptions;
use super::{BudgetOptions, Context, SyncOption, manifest};
use crate::config::read_text;
use crate::error::{Exit, Failure, Result};
use crate::gates::REJECTED;
use crate::job::{self, Published, Request};
use crate::policies;
use crate::sources;

/// The run of a checkpoint for which none is named.
pub(super) const DEFAULT_RUN: &str = "default";
/// How many encoded tensors are shown to people.
const TENSORS_SHOWN: usize = 20;

/// Publish a checkpoint here and now, and move a channel to it.
///
/// Without --policy the manifest's policy is used, else the one named `default` that is kept for the model in the
/// store, else the default: optimizer state is dropped, embedding tables become int8, all else is kept.
/// Publishing the same checkpoint with the same rules again gives the same snapshot and stores nothing new, so a
/// publish that was interrupted is finished by running it again.
///
/// A publish that leaves the channel where it is because a newer step or another run is there (`superseded`), or
/// because an operator holds it (`held`), has done its work and exits with 0; the document and the last lines say
/// so.
///
/// With --manifest, the trainer's checkpoint manifest says what is not given on the command line, and each size and
/// BLAKE3 of a file that it declares is checked before anything is published.
///
/// With --require-signed-by, what the channel points at has to be signed as demanded, since it decides whether the
/// channel moves. A channel that is older than its signatures gets its first signed entry by `promote`.
#[derive(Debug, Args)]
pub(super) struct Publish {
    /// The checkpoint: a folder, or one file, here or in an object store: a path or a URL (s3://, gs://, az://,
    /// file://). Its format is told by content. Stores take credentials from the usual variables (AWS_*, GOOGLE_*,
    /// AZURE_*) [default: the manifest's location].
    #[arg(value_name = "CKPT", required_unless_present = "manifest")]
    checkpoint: Option<OsString>,
    /// The model's name.
    #[arg(long, required_unless_present = "manifest")]
    model: Option<String>,
    /// The training run's name [default: default].
    #[arg(long)]
    run: Option<String>,
    /// The training step [default: 0].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = step)]
    step: Option<u64>,
    /// A checkpoint manifest (`weighbridge.checkpoint/v1`, JSON): a file, or - for standard input. A relative location
    /// in it starts at the manifest's folder.
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// The channel to move [default: the policy's, which is prod].
    #[arg(long, value_name = "NAME")]
    channel: Option<String>,
    /// The policy: a TOML file. It replaces the default as a whole: what matches none of its rules is kept.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The checkpoint's format [default: auto].
    #[arg(long, value_enum)]
    format: Option<FormatOption>,
    #[command(flatten)]
    budget: BudgetOptions,
    #[command(flatten)]
    sync: SyncOption,
    #[command(flatten)]
    signatures: PublisherOptions,
}

fn step(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| "a step is a whole number from 0 on".to_owned())
}

/// A checkpoint's format, or that it is to be found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum FormatOption {
    /// Found out by content.
    Auto,
    /// safetensors files.
    Safetensors,
    /// PyTorch Distributed Checkpoint.
    Dcp,
    /// A file of torch.save.
    TorchSave,
}

impl FormatOption {
    pub(super) fn format(self) -> Option<Format> {
        match self {
            Self::Auto => None,
            Self::Safetensors => Some(Format::Safetensors),
            Self::Dcp => Some(Format::Dcp),
            Self::TorchSave => Some(Format::TorchSave),
        }
    }
}

impl Publish {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let started = Instant::now();
        let budget = context.budget(&self.budget)?;
        let manifest = self.manifest.as_deref().map(manifest::read).transpose()?;
        let (policy, policy_from) = self.policy(context, manifest.as_ref()).await?;
        let request = self.request(context, manifest.as_ref(), policy)?;
        let failed = |failure| failed(&request.checkpoint, failure);
        // A checkpoint that is not there makes no store.
        let location = request.checkpoint.clone();
        let opened = tokio::task::spawn_blocking(move || Source::open_location(&location).map(drop)).await;
        let opened = opened.map_err(|error| Failure::internal("opening the checkpoint", error))?;
        opened.map_err(|error| failed(error.into()))?;
        let root = context.root_with(Absent::Create, context.durability(&self.sync)?)?;
        let root = self.signatures.on(context, root)?;
        probe::ensure(&root).await?;
        let bar: Arc<dyn Progress> = Bar::new("publishing", context.output.is_json());
        let published = job::publish(&root, &request, budget, &bar).await;
        drop(bar);
        let published = published.map_err(failed)?;
        Ok(tell(context, &request, &policy_from, &published, started.elapsed()))
    }

    /// The policy, and where it came from. A store that is not there yet holds none, and is not made for it.
    async fn policy(
        &self,
        context: &Context,
        manifest: Option<&CheckpointManifest>,
    ) -> Result<(Policy, String)> {
        if let Some(path) = &self.policy {
            return Ok((read_policy(path)?, "command line".to_owned()));
        }
        let root = match context.root(Absent::Refuse) {
            Ok(root) => Some(root),
            Err(failure) if failure.exit == Exit::NotFound => None,
            Err(failure) => return Err(failure),
        };
        let choice = manifest.and_then(|manifest| manifest.policy.as_ref());
        let resolved = policies::resolve(root.as_ref(), &self.model(manifest)?, choice).await??;
        Ok((resolved.policy()?, resolved.from))
    }

    fn model(&self, manifest: Option<&CheckpointManifest>) -> Result<ModelName> {
        match (&self.model, manifest) {
            (Some(name), _) => Ok(name.parse()?),
            (None, Some(manifest)) => Ok(manifest.model.clone()),
            (None, None) => Err(Failure::usage("no model is named; give --model or --manifest")),
        }
    }

    /// What is given on the command line comes before what the manifest says.
    fn request(
        &self,
        context: &Context,
        manifest: Option<&CheckpointManifest>,
        policy: Policy,
    ) -> Result<Request> {
        let channel = match (&self.channel, manifest.and_then(|manifest| manifest.channel.clone())) {
            (Some(name), _) => name.parse::<ChannelName>()?,
            (None, Some(name)) => name,
            (None, None) => policy.channel.name.clone(),
        };
        Ok(Request {
            checkpoint: self.located(manifest)?,
            format: match self.format {
                Some(format) => format.format(),
                None => manifest.and_then(|manifest| manifest.format),
            },
            files: manifest.map(|manifest| manifest.files.clone()).unwrap_or_default(),
            created_at: manifest.map(|manifest| manifest.created_at),
            model: self.model(manifest)?,
            run: match (&self.run, manifest) {
                (None, Some(manifest)) => manifest.run.clone(),
                (name, _) => name.as_deref().unwrap_or(DEFAULT_RUN).parse::<RunName>()?,
            },
            step: self.step.or(manifest.map(|manifest| manifest.step)).unwrap_or(0),
            policy,
            channel,
            operation: context.operation()?,
        })
    }

    fn located(&self, manifest: Option<&CheckpointManifest>) -> Result<Location> {
        match (&self.checkpoint, manifest, &self.manifest) {
            (Some(text), _, _) => sources::locate(text),
            (None, Some(manifest), Some(file)) => manifest::location(&manifest.location, file),
            _ => Err(Failure::usage("no checkpoint is named; give CKPT or --manifest")),
        }
    }
}

/// Says which checkpoint was being published, once.
fn failed(checkpoint: &Location, mut failure: Failure) -> Failure {
    if let Some(why) = failure.message.strip_prefix(&format!("{checkpoint}: ")) {
        failure.message = why.to_owned();
    }
    failure.while_doing(format!("publishing {checkpoint}"))
}

/// The policy in a file.
pub(super) fn read_policy(path: &Path) -> Result<Policy> {
    read_policy_text(path).map(|(_, policy)| policy)
}

/// The text of the policy in a file, which is one that parses.
pub(super) fn read_policy_text(path: &Path) -> Result<(String, Policy)> {
    let shown = path.display();
    let text = read_text(path)
        .map_err(|error| Failure::usage(format!("policy {shown}: it cannot be read: {error}")))?;
    let policy = Policy::parse(&text).map_err(|error| Failure::from(error).while_doing(shown))?;
    Ok((text, policy))
}

fn tell(
    context: &Context,
    request: &Request,
    policy_from: &str,
    published: &Published,
    took: Duration,
) -> ExitCode {
    let mut document = document(request, published, took);
    document["policy_from"] = json!(policy_from);
    let rejected = rejection(request, published);
    if let Some(failure) = &rejected {
        document["error"] = error_object(failure);
    }
    context.output.done(&document, || text(request, policy_from, published, took));
    match rejected {
        Some(failure) => {
            context.output.failure_line(&failure);
            ExitCode::from(failure.exit as u8)
        }
        None => ExitCode::SUCCESS,
    }
}

fn document(request: &Request, published: &Published, took: Duration) -> Value {
    let report = &published.report;
    json!({
        "snapshot": published.snapshot,
        "model": request.model,
        "run": request.run,
        "step": request.step,
        "channel": request.channel,
        "outcome": published.outcome.as_str(),
        "format": published.format,
        "tensors": report.tensors.len(),
        "dropped": report.dropped.len(),
        "bytes_read": published.bytes_read,
        "bytes_stored": published.bytes_stored,
        "bytes_reused": published.bytes_reused,
        "artifacts": {
            "count": report.artifacts.map_or(0, |artifacts| artifacts.count),
            "bytes": report.artifacts.map_or(0, |artifacts| artifacts.bytes),
        },
        "gates": report.gates,
        "seconds": took.as_secs_f64(),
        "notes": report.notes,
    })
}

/// The failure of a snapshot that a gate rejected: each tensor, its rows, the figure.
fn rejection(request: &Request, published: &Published) -> Option<Failure> {
    let report = &published.report;
    let rejecting = report.gates.iter().filter(|gate| gate.outcome == Gated::Rejected);
    let findings: Vec<_> = rejecting
        .flat_map(|gate| gate.findings.iter().map(move |finding| (gate, finding)))
        .map(|(gate, finding)| {
            format!("{}: tensor {:?}: {}", gate.gate, finding.tensor.as_str(), finding.message)
        })
        .collect();
    let first = findings.first()?;
    let more = match findings.len() - 1 {
        0 => String::new(),
        more => format!("; and {more} more in the report"),
    };
    let (id, model) = (published.snapshot, &report.model);
    let message = format!(
        "snapshot {} is quarantined: {first}{more}; {}; `weighbridge report {model}@{id}` tells all; mend the \
         checkpoint, or change [gates] in the policy",
        short(&id),
        left_where_it_was(request, published),
    );
    Some(Failure { kind: Kind::Permanent, class: REJECTED, message, exit: Exit::Rejected })
}

/// What a quarantine means for the channel. An earlier publish under other gates may have put this very snapshot on it.
fn left_where_it_was(request: &Request, published: &Published) -> String {
    let channel = &request.channel;
    if published.ruling.as_ref().is_some_and(|ruling| ruling.snapshot == published.snapshot) {
        return format!(
            "channel {channel} points at this very snapshot since an earlier publish; `weighbridge rollback` moves it"
        );
    }
    format!("channel {channel} stays where it was")
}

fn text(request: &Request, policy_from: &str, published: &Published, took: Duration) -> String {
    let report = &published.report;
    let mut text = String::new();
    let mut line = |what: &str, value: String| text.push_str(&format!("{what:>11}  {value}\n"));
    let encoded: u64 = report.tensors.iter().map(|tensor| tensor.stored_bytes).sum();
    let checkpoint = plain(&request.checkpoint.to_string());
    line("checkpoint", format!("{checkpoint} ({})", published.format.as_str()));
    if policy_from.starts_with("store ") {
        line("policy", format!("{policy_from}; `weighbridge policy list {}` lists them", report.model));
    }
    line(
        "tensors",
        format!(
            "{} published, {} dropped; {} became {}",
            report.tensors.len(),
            report.dropped.len(),
            bytes(published.bytes_read),
            bytes(encoded)
        ),
    );
    let encoded_tensors = || report.tensors.iter().filter(|tensor| tensor.relative_rms_error.is_some());
    for tensor in encoded_tensors().take(TENSORS_SHOWN) {
        line(
            "",
            format!(
                "{}  {:?} {} -> {}, relative RMS error {:.2e}",
                plain(tensor.name.as_str()),
                tensor.shape,
                tensor.source_dtype.as_str(),
                tensor.encoding.as_str(),
                tensor.relative_rms_error.unwrap_or_default()
            ),
        );
    }
    let more = encoded_tensors().count().saturating_sub(TENSORS_SHOWN);
    if more > 0 {
        line(
            "",
            format!(
                "and {more} more; `weighbridge report {}@{}` shows all",
                report.model, published.snapshot
            ),
        );
    }
    if let Some(artifacts) = &report.artifacts {
        line("artifacts", format!("{} published, {}", artifacts.count, bytes(artifacts.bytes)));
    }
    for gate in &report.gates {
        line("gate", format!("{} {}", gate.gate, gate.outcome.as_str()));
    }
    for note in report.notes.iter().take(20) {
        line("note", plain(note));
    }
    line("snapshot", published.snapshot.to_string());
    line(
        "store",
        format!("{} new, {} there already", bytes(published.bytes_stored), bytes(published.bytes_reused)),
    );
    line("outcome", outcome(request, published));
    line("took", format!("{:.2} s", took.as_secs_f64()));
    text
}

fn outcome(request: &Request, published: &Published) -> String {
    let (name, channel) = (published.outcome.as_str(), &request.channel);
    match published.outcome {
        Ended::Published => format!("{name}: channel {channel} points at it now"),
        Ended::Unchanged => format!("{name}: channel {channel} pointed at it already"),
        Ended::Superseded => {
            let other = published.ruling.as_ref().is_some_and(|ruling| ruling.run != request.run);
            let why = if other {
                " (another run takes a channel where the policy's other_run says so)"
            } else {
                ""
            };
            let keeps = published.ruling.as_ref().map_or_else(
                || "something newer".to_owned(),
                |ruling| format!("step {} of run {}", ruling.step, ruling.run),
            );
            format!(
                "{name}: channel {channel} keeps {keeps}{why}; `weighbridge promote` moves it all the same"
            )
        }
        Ended::Held => {
            format!("{name}: an operator holds channel {channel}; `weighbridge release` ends that")
        }
        Ended::Quarantined | Ended::Coalesced | Ended::Dead | Ended::Cancelled => {
            format!("{name}: {}", left_where_it_was(request, published))
        }
    }
}
