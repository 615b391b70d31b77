//! `fetch`: a snapshot out of the store, verified, into a folder that serving hosts open.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use weighbridge_snapshots::fetch::{self, Folder, Limits};
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::{Absent, Root};

use super::api::ApiOptions;
use super::bar::Bar;
use super::follow::{FollowOptions, Task};
use super::output::bytes;
use super::signing::TrustOptions;
use super::{BudgetOptions, Context, SyncOption, default_channel, given};
use crate::config::{check_bandwidth, check_threads};
use crate::error::{Failure, Result};
use crate::job::Budget;

/// Chunks that come from a bucket at once, where memory allows.
const STREAMS: usize = 16;
/// The memory that everything else takes: code, the manifest.
pub(super) const PROCESS_MEMORY: u64 = 96 << 20;

/// Fetch a snapshot into a folder, verify it, and swap to it.
///
/// DIR/versions/SNAPSHOT holds the files once they are complete; DIR/current is a link that is flipped to it
/// atomically. A fetch that was interrupted goes on where it stopped when it is run again. Chunks that another version
/// in DIR/versions holds are copied from there. DIR/.seen.json keeps the newest entry that was seen of each channel:
/// one that goes back behind it is refused (exit code 7). With --require-signed-by, nothing is fetched unless the
/// channel's entry and the snapshot are signed.
///
/// With --follow, DIR goes with the channel until this is told to stop: SIGTERM or Ctrl-C, exit code 0. Commands get
/// WEIGHBRIDGE_PHASE (before, after or restore), _MODEL, _CHANNEL, _SNAPSHOT, _PREVIOUS (the snapshot before, or
/// nothing), _RUN, _STEP, _SEQUENCE (the entry's number), _VERSION (the folder) and _CURRENT (the link) in their
/// environment. With --json every change is one line: a weighbridge.host/v1 document, as DIR/status.json is.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge fetch dlrm --into /srv/dlrm\n  \
                  weighbridge fetch dlrm --into /srv/dlrm --follow --exec 'systemctl try-reload-or-restart x'")]
pub(super) struct Fetch {
    /// MODEL, MODEL@CHANNEL or MODEL@SNAPSHOT; without @, channel prod.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: String,
    /// The folder to fetch into.
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    /// The most bytes a second that come out of the store, such as 100MiB [default: no bound].
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<String>,
    /// Chunks that come out of a bucket at once, where memory allows [default: 16].
    #[arg(long, value_name = "N")]
    streams: Option<usize>,
    /// Take the channel as it is, whatever was seen of it before: once it is known why its log was cut or replaced. Not
    /// beside a follower of DIR, which would undo it.
    #[arg(long)]
    forget_sequence: bool,
    #[command(flatten)]
    budget: BudgetOptions,
    #[command(flatten)]
    sync: SyncOption,
    #[command(flatten)]
    trust: TrustOptions,
    #[command(flatten)]
    follow: FollowOptions,
    #[command(flatten)]
    api: ApiOptions,
}

impl Fetch {
    /// Whether it runs until it is told to stop.
    pub(super) fn follows(&self) -> bool {
        self.follow.follows()
    }

    pub(super) async fn run(self, context: &Context) -> Result<()> {
        if self.follows() {
            return self.go_on(context).await;
        }
        let started = Instant::now();
        let budget = context.budget(&self.budget)?;
        let (pace, streams) = self.bounds(context)?;
        let root = match self.api.open(context)? {
            Some(api) => Root::behind_api(&api, &context.config.bucket.options())?,
            None => context.root(Absent::Refuse)?,
        };
        let root = self.trust.on(context, root)?;
        let located = Reference::locate(&self.reference, &root, &default_channel()).await?;
        let Located { model, snapshot: id, .. } = located.clone();
        let folder = Folder::open(&self.into, context.durability(&self.sync)?)?;
        let limits = limits(&root, &budget, streams, pace);
        let bar = Bar::new("fetching", context.output.is_json());
        let fetched = fetch::fetch(&root, located, &folder, self.forget_sequence, &limits, &*bar).await;
        drop(bar);
        let fetched =
            fetched.map_err(|error| Failure::from(error).while_doing(format!("fetching {model}@{id}")))?;
        // A channel may have moved on while another fetch worked in the folder.
        let id = fetched.snapshot;
        let seconds = started.elapsed().as_secs_f64();
        let document = json!({
            "snapshot": id,
            "model": model,
            "path": folder.version(&id).display().to_string(),
            "current": folder.current().display().to_string(),
            "bytes": fetched.bytes,
            "bytes_read": fetched.bytes_read,
            "bytes_reused": fetched.bytes_reused,
            "seconds": seconds,
        });
        context.output.done(&document, || {
            format!(
                "    fetched  {model}@{id}\n   verified  {}: {} from the store, {} there already\n        path  \
                 {}\n     current  {}\n        took  {seconds:.2} s\n",
                bytes(fetched.bytes),
                bytes(fetched.bytes_read),
                bytes(fetched.bytes_reused),
                folder.version(&id).display(),
                folder.current().display(),
            )
        });
        Ok(())
    }

    /// Follows the channel.
    async fn go_on(self, context: &Context) -> Result<()> {
        let budget = context.budget(&self.budget)?;
        let (pace, streams) = self.bounds(context)?;
        let task = Task {
            durability: context.durability(&self.sync)?,
            trust: self.trust.trust(context)?,
            forget: self.forget_sequence,
            limits: Box::new(move |root| limits(root, &budget, streams, pace.clone())),
            reference: self.reference,
            into: self.into,
            api: self.api.open(context)?,
        };
        self.follow.run(context, task).await
    }

    /// How fast bytes may come, and how many chunks at once.
    fn bounds(&self, context: &Context) -> Result<(Pace, usize)> {
        let configured = &context.config.fetch;
        let bandwidth = given(self.bandwidth.as_ref()).or(configured.bandwidth.as_deref());
        let pace = match bandwidth.map(check_bandwidth).transpose() {
            Ok(bandwidth) => bandwidth.map_or_else(Pace::default, Pace::of),
            Err(why) => return Err(Failure::usage(format!("--bandwidth: {why}"))),
        };
        let streams = check_threads(self.streams.or(configured.streams).unwrap_or(STREAMS));
        Ok((pace, streams.map_err(|why| Failure::usage(format!("--streams: {why}")))?))
    }
}

/// How much a fetch out of `root` may use.
fn limits(root: &Root, budget: &Budget, streams: usize, pace: Pace) -> Limits {
    // Threads bound what is read from a disk, not what comes over a network.
    let most = if root.is_bucket() { streams } else { budget.threads.saturating_mul(2) };
    Limits::new(root, budget.memory.saturating_sub(PROCESS_MEMORY), most, pace)
}
