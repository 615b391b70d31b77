//! `fetch`: a snapshot out of the store, verified, into a folder that serving hosts open.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use weighbridge_snapshots::fetch::{self, Folder, Limits};
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::reference::Reference;
use weighbridge_snapshots::root::Absent;

use super::bar::Bar;
use super::output::bytes;
use super::signing::TrustOptions;
use super::{BudgetOptions, Context, SyncOption, default_channel};
use crate::error::Result;

/// Chunks that come from a bucket at once, where memory allows.
const STREAMS: usize = 16;
/// The memory that everything else takes: code, the manifest.
const PROCESS_MEMORY: u64 = 96 << 20;

/// Fetch a snapshot into a folder, verify it, and swap to it.
///
/// DIR/versions/SNAPSHOT holds the files once they are complete; DIR/current is a link that is flipped to it
/// atomically. A fetch that was interrupted goes on where it stopped when it is run again. With --require-signed-by,
/// nothing is fetched unless the channel's entry and the snapshot are signed.
#[derive(Debug, Args)]
pub(super) struct Fetch {
    /// MODEL, MODEL@CHANNEL or MODEL@SNAPSHOT; without @, channel prod.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: String,
    /// The folder to fetch into.
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    #[command(flatten)]
    budget: BudgetOptions,
    #[command(flatten)]
    sync: SyncOption,
    #[command(flatten)]
    trust: TrustOptions,
}

impl Fetch {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let started = Instant::now();
        let budget = context.budget(&self.budget)?;
        let root = self.trust.on(context, context.root(Absent::Refuse)?)?;
        let (model, id) = Reference::locate(&self.reference, &root, &default_channel()).await?;
        let folder = Folder::open(&self.into, context.durability(&self.sync)?)?;
        // Threads bound what is read from a disk, not what comes over a network.
        let most = if root.is_bucket() { STREAMS } else { budget.threads.saturating_mul(2) };
        let limits = Limits::new(&root, budget.memory.saturating_sub(PROCESS_MEMORY), most, Pace::default());
        let bar = Bar::new("fetching", context.output.is_json());
        let fetched = fetch::fetch(&root, &model, &id, &folder, &limits, &*bar).await;
        drop(bar);
        let fetched = fetched.map_err(|error| {
            crate::error::Failure::from(error).while_doing(format!("fetching {model}@{id}"))
        })?;
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
}
