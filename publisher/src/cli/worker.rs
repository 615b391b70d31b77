//! `worker`: publishes what is on the queue.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use weighbridge_queue::Taker;
use weighbridge_snapshots::probe;
use weighbridge_snapshots::root::{Absent, Root};

use super::shown::Shown;
use super::signing::PublisherOptions;
use super::{BudgetOptions, Context, SyncOption, given};
use crate::config::{DEFAULT_PART, Device, LEAST_MEMORY, check_part, check_threads};
use crate::error::{Exit, Failure, Result};
use crate::job::Budget;
use crate::metrics::Metrics;
use crate::sources::Allowed;
use crate::steps::{self, Pauses, Steps};
use crate::systemd;
use crate::worker::{self, Health, Stop};

/// How long a call to the queue waits for other processes.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Publish what is on the queue, until told to stop.
///
/// Any number of workers share one queue and one store. Kill one at any moment: what it was doing is done by another.
/// SIGTERM: nothing more is taken, what is at hand ends or is given back, exit code 0.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  weighbridge worker --store /srv/store --queue embedded:/srv/queue --threads 4\n  \
                  weighbridge worker --store /mnt/store --queue amqp://broker.example.org/weighbridge"
)]
pub(super) struct Worker {
    #[command(flatten)]
    work: WorkOptions,
    /// Stop when the queue is empty: nothing is ready, waits for a retry, or is being worked on. On a broker, what
    /// other processes work on is not seen: there it may stop before they are done, and before what follows from it.
    #[arg(long)]
    until_empty: bool,
}

/// What a process works with, once it is there.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) steps: Arc<Steps>,
    pub(super) health: Arc<Health>,
}

#[derive(Debug, Args)]
pub(super) struct WorkOptions {
    /// Which messages are taken: those that need no GPU, those for a GPU first, or by what this machine has [default:
    /// auto]. In this version tables are encoded by the CPU on every machine.
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Messages handled at the same time, which share memory and threads [default: 1].
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
    /// How many bytes of a checkpoint make a part, which is what a crash costs and what workers share; at
    /// least one chunk, 8 MiB encoded, is a part [default: 1GiB].
    #[arg(long, value_name = "SIZE")]
    part_size: Option<String>,
    /// Jobs of one model that are converted at the same time, by all workers, at most [default: 4].
    #[arg(long, value_name = "N")]
    jobs_per_model: Option<usize>,
    /// The address where health and metrics are served: /live, /ready, /metrics [default: none; with `serve`
    /// 127.0.0.1:7460].
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// How long a message is taken for at a time, in seconds; it is extended while it is worked on [default: 60].
    #[arg(long, value_name = "SECONDS")]
    lease_seconds: Option<u64>,
    /// How long messages at hand may take to end when told to stop, in seconds [default: 20].
    #[arg(long, value_name = "SECONDS")]
    stop_seconds: Option<u64>,
    #[command(flatten)]
    budget: BudgetOptions,
    #[command(flatten)]
    sync: SyncOption,
    #[command(flatten)]
    signatures: PublisherOptions,
}

impl Worker {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let stop = told_to_stop(context);
        let listen = self.work.listen(context);
        let opened = self.work.open(context, listen, &stop).await?;
        self.work.work(context, opened, self.until_empty, stop).await
    }
}

impl WorkOptions {
    /// Where health and metrics are to be served, where that is said.
    pub(super) fn listen(&self, context: &Context) -> Option<SocketAddr> {
        self.listen.or(context.config.worker.listen)
    }

    /// Opens store and queue, and begins to show how the process is.
    pub(super) async fn open(
        &self,
        context: &Context,
        listen: Option<SocketAddr>,
        stop: &Stop,
    ) -> Result<Opened> {
        let shown = Shown::on(context, listen).await?;
        let health = Arc::new(Health::default());
        let steps = Arc::new(self.steps(context).await?.watched_by(Arc::clone(&health)));
        shown.start(&steps, &health, stop);
        Ok(Opened { steps, health })
    }

    /// Works until told to stop; or until the queue is empty, where that is wanted.
    pub(super) async fn work(
        &self,
        context: &Context,
        Opened { steps, health }: Opened,
        until_empty: bool,
        stop: Stop,
    ) -> Result<()> {
        let seconds = |option: Option<u64>, configured: Option<u64>, default| {
            Duration::from_secs(option.or(configured).unwrap_or(default))
        };
        let configured = &context.config.worker;
        let options = worker::Options {
            taker: taker(self.device.or(configured.device).unwrap_or(Device::Auto))?,
            lease: seconds(self.lease_seconds, configured.lease_seconds, 60),
            idle: (Duration::from_millis(10), Duration::from_millis(250)),
            stop: seconds(self.stop_seconds, configured.stop_seconds, 20),
            until_empty,
        };
        let concurrency = steps.options().concurrency;
        tracing::info!(store = %steps.root(), queue = context.queue_shown(), concurrency, "working");
        // A queue that will never be one is said now; one that is away is waited for.
        let mut told = stop.clone();
        let looked = tokio::select! {
            looked = steps.queue().prepare() => looked,
            () = told.wait() => Ok(()),
        };
        if let Err(error) = looked {
            if error.kind() == weighbridge_schemas::error::Kind::Permanent {
                return Err(error.into());
            }
            health.queue_fails(&error);
        }
        tried_out(steps.root(), &health, stop.clone()).await?;
        worker::run(steps, concurrency, options, health, stop).await;
        if context.output.is_json() {
            let why = if told.is_set() { "told" } else { "empty" };
            context.output.document(&serde_json::json!({ "stopped": why }));
        }
        Ok(())
    }

    pub(super) fn root(&self, context: &Context) -> Result<Root> {
        let root = context.root_with(Absent::Create, context.durability(&self.sync)?)?;
        self.signatures.on(context, root)
    }

    async fn steps(&self, context: &Context) -> Result<Steps> {
        let configured = &context.config.worker;
        let number = |name: &str, option: Option<usize>, configured: Option<usize>, default| {
            let number = option.or(configured).unwrap_or(default);
            check_threads(number).map_err(|why| Failure::usage(format!("--{name}: {why}")))
        };
        let concurrency = number("concurrency", self.concurrency, configured.concurrency, 1)?;
        let whole = context.budget(&self.budget)?;
        let budget = Budget {
            memory: whole.memory / concurrency as u64,
            threads: (whole.threads / concurrency).max(1),
        };
        if budget.memory < LEAST_MEMORY {
            return Err(Failure::usage(format!(
                "--concurrency {concurrency} leaves {} MiB for each message; at least {} MiB are needed: raise \
                 --memory",
                budget.memory >> 20,
                LEAST_MEMORY >> 20
            )));
        }
        let part_bytes = match given(self.part_size.as_ref()).or(configured.part_size.as_deref()) {
            Some(text) => check_part(text).map_err(|why| Failure::usage(format!("--part-size: {why}")))?,
            None => DEFAULT_PART,
        };
        let options = steps::Options {
            who: who(),
            budget,
            concurrency,
            part_bytes,
            jobs_per_model: number("jobs-per-model", self.jobs_per_model, configured.jobs_per_model, 4)?,
            sources: match &context.config.sources.allow {
                Some(prefixes) => Allowed::new(prefixes)?,
                None => Allowed::default(),
            },
            pauses: Pauses { first: Duration::from_secs(1), longest: Duration::from_secs(30) },
        };
        let root = self.root(context)?;
        Ok(Steps::new(root, context.queue_patiently(PATIENCE).await?, options, Arc::new(Metrics::default())))
    }
}

/// Tries the store out before anything is published into it, for as long as it is away, or until told to stop. One that
/// will never do is said now.
async fn tried_out(root: &Root, health: &Health, mut stop: Stop) -> Result<()> {
    loop {
        let ensured = tokio::select! {
            ensured = probe::ensure(root) => ensured.map_err(Failure::from),
            () = stop.wait() => return Ok(()),
        };
        let Err(failure) = ensured else { return Ok(()) };
        if failure.kind == weighbridge_schemas::error::Kind::Permanent {
            return Err(failure);
        }
        tracing::warn!(%failure, "the store cannot be tried out yet");
        health.failed(&failure);
        tokio::select! {
            () = tokio::time::sleep(PATIENCE) => {}
            () = stop.wait() => return Ok(()),
        }
    }
}

/// This process, for documents and logs.
fn who() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("worker {host}:{}", std::process::id())
}

fn taker(device: Device) -> Result<Taker> {
    let has_gpu = Path::new("/dev/nvidiactl").try_exists().unwrap_or(false);
    match device {
        Device::Cpu => Ok(Taker::Cpu),
        Device::Auto => Ok(if has_gpu { Taker::Gpu } else { Taker::Cpu }),
        Device::Gpu if has_gpu => Ok(Taker::Gpu),
        Device::Gpu => Err(Failure {
            kind: weighbridge_schemas::error::Kind::Permanent,
            class: "no_device",
            message:
                "--device gpu: this machine shows no NVIDIA GPU (/dev/nvidiactl); use --device cpu or auto"
                    .to_owned(),
            exit: Exit::Unreachable,
        }),
    }
}

/// SIGTERM and Ctrl-C tell workers to stop, also where they came before this was asked.
pub(super) fn told_to_stop(context: &Context) -> Stop {
    let (sender, stop) = Stop::new();
    let mut signals = context.signals.clone();
    tokio::spawn(async move {
        if signals.wait_for(|count| *count >= 1).await.is_ok() {
            tracing::info!("told to stop");
            systemd::stops().await;
            let _ = sender.send(true);
        }
        // Kept, so that whoever listens goes on listening.
        std::future::pending::<()>().await;
    });
    stop
}
