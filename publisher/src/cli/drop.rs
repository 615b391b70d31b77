//! `drop`: hand a checkpoint's manifest over, and go on. `spool`: what was handed over and waits to be sent.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;
use tokio::time::Instant;

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::spool::{Sent, Spool, SpoolLimits};
use weighbridge_schemas::canonical;
use weighbridge_schemas::checkpoint::{CheckpointManifest, CheckpointSchema, PolicyChoice};
use weighbridge_schemas::job::JobId;
use weighbridge_schemas::names::{ChannelName, ModelName, PolicyName, RunName};
use weighbridge_schemas::policy::Policy;

use super::output::{bytes, count, plain, table};
use super::publish::{DEFAULT_RUN, FormatOption};
use super::{Context, manifest};
use crate::clock;
use crate::config::{DEFAULT_SPOOL, read_text};
use crate::error::{Failure, Result};
use crate::operations::submit;
use crate::sources;
use weighbridge_converter::source::Location;

/// How long `drop` tries to put the manifest on the queue itself.
const SEND: Duration = Duration::from_secs(2);
/// The priority of what is not said to be urgent or not.
const MIDDLE: u8 = 5;

/// Hand a checkpoint over to be published, and go on: for the end of a trainer's save.
///
/// The manifest is on this machine's disk when this returns, whatever the state of the queue. It is sent at once
/// where the queue takes it within 2 s; else it waits in the spool, and `weighbridge spool drain --follow` (or
/// `serve`, or the next `drop`) sends it. Prints the job's id: `weighbridge jobs wait ID` waits for the publish. The
/// checkpoint need not be complete yet: workers wait for it, up to the policy's grace.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  weighbridge drop /checkpoints/step-100 --model dlrm --run 2026-11 --step 100"
)]
pub(super) struct Drop {
    /// The checkpoint: a folder or file that workers can read by the same path, or an s3://, gs:// or az:// URL.
    #[arg(value_name = "CKPT", required_unless_present = "manifest")]
    checkpoint: Option<OsString>,
    /// The model.
    #[arg(long, value_name = "NAME", required_unless_present = "manifest")]
    model: Option<ModelName>,
    /// The training step.
    #[arg(long, value_name = "N", required_unless_present = "manifest")]
    step: Option<u64>,
    /// The training run [default: default].
    #[arg(long, value_name = "NAME")]
    run: Option<RunName>,
    /// The channel to move [default: the policy's].
    #[arg(long, value_name = "NAME")]
    channel: Option<ChannelName>,
    /// A policy, as a file whose text goes along.
    #[arg(long, value_name = "FILE", conflicts_with = "policy_name")]
    policy: Option<PathBuf>,
    /// A policy that is kept in the store (`weighbridge policy list MODEL`) [default: the one named default, where the
    /// model has one].
    #[arg(long, value_name = "NAME")]
    policy_name: Option<PolicyName>,
    /// The format [default: told by content].
    #[arg(long, value_enum, default_value = "auto")]
    format: FormatOption,
    /// 0 (last) to 9 (first) [default: 5].
    #[arg(long, value_name = "0-9", value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: Option<u8>,
    /// For people and dashboards; may be given several times.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// The trainer's W3C trace context, which goes into every log line of the job; --manifest has its own.
    #[arg(long, env = "TRACEPARENT", hide_env_values = true, value_name = "TEXT")]
    traceparent: Option<String>,
    /// A whole checkpoint manifest instead (`-`: on standard input). Dropping it again is dropping the same job: its id
    /// is kept. Options go before what it says; where they change it, the job gets an id of its own.
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    spool: SpoolOption,
}

/// Where manifests wait to be sent.
#[derive(Debug, Clone, Args)]
pub(super) struct SpoolOption {
    /// The folder on this machine where manifests wait until they are on the queue [default: weighbridge-data/spool].
    #[arg(long = "spool", env = "WEIGHBRIDGE_SPOOL", value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

impl SpoolOption {
    pub(super) fn open(&self, context: &Context) -> Result<Spool> {
        let configured = context.config.spool.clone();
        let named = self.folder.clone().filter(|folder| !folder.as_os_str().is_empty()).or(configured);
        let folder = named.unwrap_or_else(|| PathBuf::from(DEFAULT_SPOOL));
        Ok(Spool::open(&folder, SpoolLimits::default(), Arc::new(SystemClock::new()))?)
    }
}

fn label(text: &str) -> std::result::Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl Drop {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        weighbridge_queue::url::check(context.queue_url())?;
        let manifest = self.manifest(context)?;
        let written = serde_json::to_vec(&manifest)
            .map_err(|error| Failure::internal("writing the manifest", error))?;
        // What no worker would take is not handed over.
        submit::check(&written)?;
        let sent = self.send(context, &manifest, written).await?;
        let waits = match &sent {
            Sent::Yes => None,
            Sent::Waits(why) => Some(why.as_str()),
        };
        let absent = is_absent(&manifest.location);
        let document = json!({
            "id": manifest.id,
            "model": manifest.model,
            "run": manifest.run,
            "step": manifest.step,
            "location": manifest.location,
            "sent": waits.is_none(),
            "waits": waits,
        });
        context.output.listing(&document, || format!("{}\n", manifest.id));
        if !context.output.is_json() {
            context.output.tell(&told(context, &manifest, waits, absent));
        }
        Ok(())
    }

    /// Puts the manifest into the spool, and tries to send it from there; and whatever else waits, while there is time.
    /// Where the spool cannot take it, the queue itself may.
    async fn send(&self, context: &Context, manifest: &CheckpointManifest, written: Vec<u8>) -> Result<Sent> {
        let deadline = Instant::now() + SEND;
        let queue = context.queue_within(SEND).await;
        let spooled = self.spool.open(context).and_then(|spool| {
            spool.put(&manifest.id, &written)?;
            Ok(spool)
        });
        let spool = match (spooled, &queue) {
            (Ok(spool), _) => spool,
            (Err(failure), Ok(queue)) => {
                tracing::warn!(error = %failure, "the spool cannot take it; it is sent without");
                let sending = submit::send(&**queue, manifest, written);
                return match tokio::time::timeout_at(deadline, sending).await {
                    Ok(Ok(())) => Ok(Sent::Yes),
                    _ => Err(unspooled(failure)),
                };
            }
            (Err(failure), Err(_)) => return Err(unspooled(failure)),
        };
        let queue = match queue {
            Ok(queue) => queue,
            Err(failure) => return Ok(Sent::Waits(failure.message)),
        };
        let sent = spool.send_one(&*queue, &manifest.id, SEND).await?;
        if sent == Sent::Yes && spool.waiting() > 0 {
            spool.drain(&*queue, deadline).await?;
        }
        Ok(sent)
    }

    fn manifest(&self, context: &Context) -> Result<CheckpointManifest> {
        let given = self.manifest.as_deref().map(manifest::read).transpose()?;
        let location = match (&self.checkpoint, &given, &self.manifest) {
            (Some(text), ..) => absolute(sources::locate(text)?, text)?,
            (None, Some(manifest), Some(file)) => {
                let located = manifest::location(&manifest.location, file)?;
                absolute(located, manifest.location.as_ref())?
            }
            _ => return Err(Failure::usage("no checkpoint is named; give CKPT or --manifest")),
        };
        let missing = |what: &str| Failure::usage(format!("no {what} is named; give --{what} or --manifest"));
        let mut manifest = match given {
            Some(manifest) => manifest,
            None => CheckpointManifest {
                schema: CheckpointSchema::V1,
                id: clock::operation_id(),
                model: self.model.clone().ok_or_else(|| missing("model"))?,
                run: DEFAULT_RUN.parse()?,
                step: self.step.ok_or_else(|| missing("step"))?,
                created_at: clock::now(),
                location: String::new(),
                format: None,
                files: Vec::new(),
                channel: None,
                policy: None,
                priority: MIDDLE,
                labels: BTreeMap::new(),
                traceparent: None,
            },
        };
        manifest.location = location;
        let written = manifest.clone();
        self.override_fields(&mut manifest)?;
        if self.manifest.is_some() && manifest != written {
            // Another manifest is another job; the same options make the same one of it.
            manifest.id = JobId::of(&canonical::bytes(&manifest)).to_string();
        }
        tracing::debug!(id = %manifest.id, queue = context.queue_shown(), "dropping");
        Ok(manifest)
    }

    /// What is given on the command line goes before what the manifest says.
    fn override_fields(&self, manifest: &mut CheckpointManifest) -> Result<()> {
        if let Some(model) = &self.model {
            manifest.model = model.clone();
        }
        if let Some(run) = &self.run {
            manifest.run = run.clone();
        }
        manifest.step = self.step.unwrap_or(manifest.step);
        manifest.channel = self.channel.clone().or_else(|| manifest.channel.take());
        manifest.format = self.format.format().or(manifest.format);
        manifest.priority = self.priority.unwrap_or(manifest.priority);
        manifest.labels.extend(self.labels.iter().cloned());
        if self.manifest.is_none() {
            manifest.traceparent = self.traceparent.clone().filter(|text| !text.is_empty());
        }
        if let Some(path) = &self.policy {
            manifest.policy = Some(PolicyChoice::Toml(policy_text(path)?));
        } else if let Some(name) = &self.policy_name {
            manifest.policy = Some(PolicyChoice::Name(name.clone()));
        }
        Ok(())
    }
}

/// The text of a policy that parses.
pub(super) fn policy_text(path: &Path) -> Result<String> {
    let shown = path.display();
    let text = read_text(path)
        .map_err(|error| Failure::usage(format!("policy {shown}: it cannot be read: {error}")))?;
    Policy::parse(&text).map_err(|error| Failure::from(error).while_doing(shown))?;
    Ok(text)
}

/// The failure of a spool that cannot take a manifest, when the queue does not either.
fn unspooled(mut failure: Failure) -> Failure {
    failure.class = "spool";
    failure.message.push_str("; and the queue did not take it either: it is not handed over");
    failure
}

/// A location that means the same on every machine that has it: a URL, or an absolute path without links as far as it
/// is there, so that a link named `latest` is what it is now.
fn absolute(location: Location, written: &std::ffi::OsStr) -> Result<String> {
    let path = match location {
        Location::Remote(_) => return Ok(written.to_string_lossy().into_owned()),
        Location::Local(path) => path,
    };
    let bad = |error: std::io::Error| Failure::usage(format!("{}: {error}", path.display()));
    if path.as_os_str().is_empty() {
        return Err(Failure::usage("the checkpoint's path is empty"));
    }
    let absolute = real(&std::path::absolute(&path).map_err(bad)?);
    absolute.into_os_string().into_string().map_err(|path| {
        Failure::usage(format!("{}: a manifest can only name paths that are UTF-8", path.display()))
    })
}

/// An absolute path without links and `..`, as far as it is there; by the letter beyond that.
fn real(path: &Path) -> PathBuf {
    let mut real = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                real.pop();
            }
            Component::CurDir => {}
            part => {
                real.push(part);
                real = std::fs::canonicalize(&real).unwrap_or(real);
            }
        }
    }
    real
}

/// Whether a path of this machine is not there.
fn is_absent(location: &str) -> bool {
    let path = Path::new(location);
    path.is_absolute() && matches!(path.try_exists(), Ok(false))
}

fn told(context: &Context, manifest: &CheckpointManifest, waits: Option<&str>, absent: bool) -> String {
    let (model, run, step) = (&manifest.model, &manifest.run, manifest.step);
    let mut text = match waits {
        None => format!(
            "dropped: step {step} of {model} (run {run}), on {}; `weighbridge jobs wait {}` waits for it\n",
            context.queue_shown(),
            manifest.id
        ),
        Some(why) => format!(
            "in the spool: step {step} of {model} (run {run}) waits to be sent: {}; `weighbridge spool drain --follow` \
             sends it\n",
            plain(why)
        ),
    };
    if absent {
        text.push_str(&format!(
            "{} is not on this machine (yet): workers wait for it, up to the policy's grace\n",
            plain(&manifest.location)
        ));
    }
    text
}

/// List what waits in this machine's spool, or send it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct SpoolCommand {
    #[command(flatten)]
    spool: SpoolOption,
    #[command(subcommand)]
    command: Option<SpoolAction>,
}

#[derive(Debug, Subcommand)]
enum SpoolAction {
    /// Put what was refused back, to be sent again.
    Retry {
        #[command(flatten)]
        spool: SpoolOption,
    },
    /// Send what waits. One at a time drains a spool; a second one waits for the first.
    #[command(after_help = "Example:\n  weighbridge spool drain --follow --spool /var/spool/weighbridge")]
    Drain {
        /// Go on until told to stop, and send whatever comes.
        #[arg(long)]
        follow: bool,
        /// How long to try, in seconds, where not following [default: 60].
        #[arg(
            long,
            value_name = "SECONDS",
            conflicts_with = "follow",
            default_value_t = 60,
            hide_default_value = true
        )]
        timeout: u64,
        #[command(flatten)]
        spool: SpoolOption,
    },
}

impl SpoolCommand {
    /// Whether it runs until it is told to stop.
    pub(super) fn follows(&self) -> bool {
        matches!(self.command, Some(SpoolAction::Drain { follow: true, .. }))
    }

    pub(super) async fn run(self, context: &Context) -> Result<()> {
        match self.command {
            None => list(context, &self.spool.open(context)?),
            Some(SpoolAction::Retry { spool }) => {
                let put_back = spool.open(context)?.put_back()?;
                context.output.done(&json!({ "put_back": put_back }), || {
                    format!(
                        "{} put back; `weighbridge spool drain` sends them\n",
                        count(put_back, "manifest")
                    )
                });
                Ok(())
            }
            Some(SpoolAction::Drain { follow, timeout, spool }) => {
                let spool = spool.open(context)?;
                let patience = Duration::from_secs(if follow { 10 } else { timeout.min(10) });
                let queue = context.queue_patiently(patience).await?;
                let drained = if follow {
                    let mut stop = super::worker::told_to_stop(context);
                    crate::systemd::is_ready().await;
                    spool.follow(&*queue, stop.wait()).await?
                } else {
                    spool.drain(&*queue, Instant::now() + Duration::from_secs(timeout)).await?
                };
                let document =
                    json!({ "sent": drained.sent, "refused": drained.refused, "left": drained.left });
                context.output.done(&document, || {
                    format!(
                        "{} sent, {} refused (`weighbridge spool` tells why), {} left\n",
                        count(drained.sent, "manifest"),
                        drained.refused,
                        drained.left
                    )
                });
                if drained.refused > 0 {
                    let message = format!(
                        "{} refused; `weighbridge spool` tells why, `weighbridge spool retry` puts them back",
                        count(drained.refused, "manifest")
                    );
                    let kind = weighbridge_schemas::error::Kind::Permanent;
                    return Err(Failure {
                        kind,
                        class: "refused",
                        message,
                        exit: crate::error::Exit::Failed,
                    });
                }
                if follow || drained.left == 0 {
                    return Ok(());
                }
                Err(Failure {
                    kind: weighbridge_schemas::error::Kind::Transient,
                    class: "queue_unreachable",
                    message: format!(
                        "{} still in the spool; `weighbridge queue status` shows the queue, the log above what kept \
                         them",
                        count(drained.left, "manifest")
                    ),
                    exit: crate::error::Exit::Unreachable,
                })
            }
        }
    }
}

fn list(context: &Context, spool: &Spool) -> Result<()> {
    let items = spool.list()?;
    let documents: Vec<_> = items
        .iter()
        .map(|item| {
            json!({
                "id": item.id, "bytes": item.bytes, "age_seconds": item.age.as_secs(),
                "state": if item.refused.is_some() { "refused" } else { "waiting" },
                "reason": item.refused,
            })
        })
        .collect();
    context.output.listing(&json!({ "spool": documents }), || {
        let rows: Vec<_> = items
            .iter()
            .map(|item| {
                vec![
                    item.id.clone(),
                    if item.refused.is_some() { "refused" } else { "waiting" }.to_owned(),
                    bytes(item.bytes),
                    format!("{} s", item.age.as_secs()),
                    plain(item.refused.as_deref().unwrap_or_default()),
                ]
            })
            .collect();
        table(&["id", "state", "size", "age", "reason"], &rows)
    });
    Ok(())
}
