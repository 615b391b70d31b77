//! `gc`, `pin`, `unpin`: what is kept, and what is not.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::policy::Retention;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::retain::past::{self, Past};
use weighbridge_snapshots::retain::{self, Collected, HEEDED, HOLD, Options};
use weighbridge_snapshots::root::{Absent, Root};

use super::bar::Bar;
use super::output::{bytes, count, plain, short};
use super::snapshots::models;
use super::{Context, MemoryOption, default_channel};
use crate::error::{Failure, Result};
use crate::operations::pins;
use crate::policies;
use crate::process;

/// The memory that the process takes beside the ids of chunks: code, listings, a manifest.
const PROCESS_MEMORY: u64 = 96 << 20;
/// Most objects that the JSON document of a dry run names.
const MOST_NAMED: usize = 100_000;

/// Delete snapshots that the model's policy does not keep, and chunks that no snapshot needs.
///
/// Kept in any case: what a channel points at, or pointed at in its newest entries, pinned snapshots, chunks of jobs
/// that have not ended, and what is younger than the grace period. It may run while everything else does. After an
/// interrupted run it is run again. What the policy keeps stands in its section [retention]: keep_last, keep_days,
/// keep_each, keep_history, keep_jobs_days, grace_hours; without the first three all snapshots are kept.
#[derive(Debug, Args)]
pub(super) struct Gc {
    /// The model; without one, all.
    model: Option<String>,
    /// List what would be deleted, and delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// Tell when the last run was, and what it deleted; delete nothing.
    #[arg(long, conflicts_with = "dry_run")]
    last_run: bool,
    /// Keep the newest N snapshots [default: the policy's].
    #[arg(long, value_name = "N")]
    keep_last: Option<u32>,
    /// Keep snapshots that were stored in the last D days [default: the policy's].
    #[arg(long, value_name = "D")]
    keep_days: Option<u32>,
    /// Keep snapshots whose step is a multiple of K [default: the policy's].
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    keep_each: Option<u64>,
    /// Keep the newest N different snapshots that each channel pointed at [default: the policy's, or 10].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_history: Option<u32>,
    /// Keep the documents of jobs for D days after they ended [default: the policy's, or 30].
    #[arg(long, value_name = "D")]
    keep_jobs_days: Option<u32>,
    /// Delete nothing that is younger than H hours [default: the policy's, or 24].
    #[arg(long, value_name = "H")]
    grace_hours: Option<u32>,
    #[command(flatten)]
    memory: MemoryOption,
}

impl Gc {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let memory = context.memory(&self.memory)?.saturating_sub(PROCESS_MEMORY);
        let root = context.root(Absent::Refuse)?;
        if self.last_run {
            return last_run(context, &root, self.model.as_deref()).await;
        }
        let operation = context.operation()?;
        let mut documents = Vec::new();
        let mut text = String::new();
        for model in models(&root, self.model.as_deref()).await? {
            let retention = self.retention(&root, &model).await?;
            let options = Options {
                retention,
                grace: Duration::from_secs(u64::from(retention.grace_hours) * 3600),
                hold: HOLD,
                claims: HEEDED,
                memory,
                holder: operation.id.clone(),
                process: process::own(),
                is_there: process::is_there,
                who: operation.who.clone(),
            };
            let (collected, named) = self.collect(context, &root, &model, &options).await?;
            text.push_str(&shown(&model, &collected, &named, self.dry_run));
            documents.push(document(&model, &collected, named, self.dry_run));
        }
        let mut document = json!({ "dry_run": self.dry_run, "models": documents });
        if self.model.is_none() {
            let hours = self.grace_hours.unwrap_or_else(|| Retention::default().grace_hours);
            let grace = Duration::from_secs(u64::from(hours) * 3600);
            let (left, size) = retain::tidy(&root, grace, self.dry_run).await?;
            left.iter().filter(|_| self.dry_run).for_each(|key| text.push_str(&format!("  {key}\n")));
            let verb = if self.dry_run { "would end" } else { "ended" };
            let writes = count(left.len() as u64, "unfinished write");
            text.push_str(&format!("the store: {verb} {writes} ({})\n", bytes(size)));
            document["unfinished"] = json!(left);
        }
        context.output.done(&document, || text);
        Ok(())
    }

    async fn collect(
        &self,
        context: &Context,
        root: &Root,
        model: &ModelName,
        options: &Options,
    ) -> Result<(Collected, Vec<String>)> {
        let while_doing = |error| Failure::from(error).while_doing(format!("collecting {model}"));
        if self.dry_run {
            let named = Mutex::new(Vec::new());
            let told = |key: &str| {
                named.lock().unwrap_or_else(PoisonError::into_inner).push(key.to_owned());
            };
            let collected = retain::preview(root, model, options, &told).await.map_err(while_doing)?;
            return Ok((collected, named.into_inner().unwrap_or_else(PoisonError::into_inner)));
        }
        let bar = Bar::new("collecting", context.output.is_json());
        let told = |key: &str| tracing::debug!(key, "deleted");
        let collected = retain::collect(root, model, options, &told, &*bar).await;
        drop(bar);
        Ok((collected.map_err(while_doing)?, Vec::new()))
    }

    /// What is kept: by the command line, then by the model's policy.
    async fn retention(&self, root: &Root, model: &ModelName) -> Result<Retention> {
        let policy = policies::resolve(Some(root), model, None).await??.policy()?.retention;
        Ok(Retention {
            keep_last: self.keep_last.or(policy.keep_last),
            keep_days: self.keep_days.or(policy.keep_days),
            keep_each: self.keep_each.or(policy.keep_each),
            keep_history: self.keep_history.unwrap_or(policy.keep_history),
            keep_jobs_days: self.keep_jobs_days.unwrap_or(policy.keep_jobs_days),
            grace_hours: self.grace_hours.unwrap_or(policy.grace_hours),
        })
    }
}

/// Tells of each model's newest run.
async fn last_run(context: &Context, root: &Root, model: Option<&str>) -> Result<()> {
    let mut documents = Vec::new();
    let mut text = String::new();
    for model in models(root, model).await? {
        let newest = past::newest(root, &model).await?;
        let line = match &newest {
            None => "never run".to_owned(),
            Some(Past { number, ended: Some(ended), .. }) if ended.carried_out => format!(
                "run {number} by {}, ended {}: deleted {}, {} ({})",
                ended.who,
                ended.when,
                count(ended.snapshots, "snapshot"),
                count(ended.chunks, "chunk"),
                bytes(ended.bytes)
            ),
            Some(Past { number, ended: Some(ended), .. }) => {
                format!("run {number} was broken off; noted {} by {}", ended.when, ended.who)
            }
            Some(Past { number, begun, ended: None }) => {
                let (who, when) = begun.as_ref().map_or(("?".to_owned(), "?".to_owned()), |begun| {
                    (begun.who.clone(), begun.when.to_string())
                });
                format!("run {number} by {who}, begun {when}, goes on, or was left")
            }
        };
        text.push_str(&format!("{model}: {}\n", plain(&line)));
        documents.push(json!({
            "model": model,
            "run": newest.as_ref().map(|run| run.number),
            "begun": newest.as_ref().and_then(|run| run.begun.as_ref()),
            "ended": newest.as_ref().and_then(|run| run.ended.as_ref()),
        }));
    }
    context.output.done(&json!({ "models": documents }), || text);
    Ok(())
}

fn document(model: &ModelName, collected: &Collected, mut named: Vec<String>, dry_run: bool) -> Value {
    let mut document = json!({
        "model": model,
        "snapshots": collected.snapshots,
        "chunks": collected.chunks,
        "bytes": collected.bytes,
        "jobs": collected.jobs,
        "remains": collected.remains,
        "young_chunks": collected.young,
        "kept_snapshots": collected.kept,
        "kept_young_snapshots": collected.kept_young,
        "kept_rooted_snapshots": collected.kept_rooted,
        "running_jobs": collected.running,
        "left_runs": collected.left,
    });
    if dry_run {
        document["objects_left_out"] = json!(named.len().saturating_sub(MOST_NAMED));
        named.truncate(MOST_NAMED);
        document["objects"] = json!(named);
    }
    document
}

fn shown(model: &ModelName, collected: &Collected, named: &[String], dry_run: bool) -> String {
    let mut text: String = named.iter().map(|key| format!("  {key}\n")).collect();
    let verb = if dry_run { "would delete" } else { "deleted" };
    text.push_str(&format!(
        "{model}: {verb} {}, {} ({}), documents of {}, {}; kept {}, {} too young, of {} not ended\n",
        count(collected.snapshots.len() as u64, "snapshot"),
        count(collected.chunks, "chunk"),
        bytes(collected.bytes),
        count(collected.jobs.len() as u64, "job"),
        count(collected.remains, "left-over"),
        count(collected.kept, "snapshot"),
        count(collected.young, "chunk"),
        count(collected.running, "job"),
    ));
    let reasons = [
        (collected.kept_young, "only for being younger than the grace period (--grace-hours)"),
        (collected.kept_rooted, "only for a channel's newest entries (--keep-history), a pin or a claim"),
    ];
    for (kept, why) in reasons.iter().filter(|(kept, _)| *kept > 0) {
        text.push_str(&format!("  (kept {why}: {})\n", count(*kept, "snapshot")));
    }
    if collected.left > 0 {
        text.push_str(&format!("  (first ended: {} that had been left)\n", count(collected.left, "run")));
    }
    text
}

/// Keep a snapshot from `gc`, whatever the policy says.
#[derive(Debug, Args)]
pub(super) struct Pin {
    /// MODEL@SNAPSHOT, or MODEL@CHANNEL for what a channel points at now.
    #[arg(value_name = "MODEL@SNAPSHOT")]
    reference: String,
    /// Why, for those who come later.
    #[arg(long, value_name = "TEXT", default_value = "")]
    why: String,
}

/// End a pin: the policy alone says again whether `gc` keeps the snapshot.
#[derive(Debug, Args)]
pub(super) struct Unpin {
    /// MODEL@SNAPSHOT, or MODEL@CHANNEL for what a channel points at now.
    #[arg(value_name = "MODEL@SNAPSHOT")]
    reference: String,
}

impl Pin {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        set(context, &self.reference, true, &self.why).await
    }
}

impl Unpin {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        set(context, &self.reference, false, "").await
    }
}

async fn set(context: &Context, reference: &str, pinned: bool, why: &str) -> Result<()> {
    let root = context.root(Absent::Refuse)?;
    let Located { model, snapshot: id, .. } = Reference::locate(reference, &root, &default_channel()).await?;
    let changed = pins::set(&root, &model, &id, pinned, why, &context.operation()?).await?;
    let document = json!({ "model": model, "snapshot": id, "pinned": pinned, "changed": changed });
    context.output.done(&document, || {
        let state = if pinned { "pinned" } else { "not pinned" };
        let already = if changed { "now" } else { "already" };
        format!("{model}@{}: {already} {state}\n", short(&id))
    });
    Ok(())
}
