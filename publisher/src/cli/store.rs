//! `store check`: does the store do what is relied on, and for whom asks?

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use weighbridge_snapshots::error::StoreError;
use weighbridge_snapshots::probe::{self, Ability, Findings};
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::output::{error_object, lines};
use crate::error::{Failure, Result};

/// Look at the store itself.
#[derive(Debug, Subcommand)]
pub(super) enum Store {
    Check(Check),
}

/// Try out whether the store does what is relied on, and what these credentials may do there.
///
/// It puts small objects below probe/, among them two of one name at once, reads, overwrites, lists and deletes them.
/// Who writes to a bucket (publish, worker, serve) does the same before the first time. A store that lets two puts on
/// condition of absence succeed is refused: two publishers could move a channel to the same number, and neither would
/// know. Exit code 5 where something that is needed does not work; deleting is needed by garbage collection alone.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge store check --store s3://models/weighbridge\n  \
                        weighbridge store check --store s3://models/weighbridge --read-only")]
pub(super) struct Check {
    /// Look alone whether the store can be listed and read, and write nothing: for hosts that only fetch.
    #[arg(long)]
    read_only: bool,
}

impl Store {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        match self {
            Self::Check(check) => check.run(context).await,
        }
    }
}

impl Check {
    async fn run(self, context: &Context) -> Result<ExitCode> {
        let root = context.root(Absent::Refuse)?;
        let findings = if self.read_only { probe::look(&root).await } else { probe::try_out(&root).await };
        let failure = findings.failure().map(|error: &StoreError| Failure::from(error.clone()));
        let mut document = document(&root, &findings, self.read_only);
        if let Some(failure) = &failure {
            document["error"] = error_object(failure);
        }
        context.output.listing(&document, || text(&root, &findings));
        let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
        context.output.failure_line(&failure);
        Ok(ExitCode::from(failure.exit as u8))
    }
}

fn document(root: &Root, findings: &Findings, read_only: bool) -> Value {
    let (endpoint, region) = root.destination();
    let abilities: Map<String, Value> = findings
        .0
        .iter()
        .map(|(ability, found)| {
            let told = match found {
                Ok(()) => json!({ "works": true }),
                Err(error) => {
                    json!({ "works": false, "class": error.class().as_str(), "message": error.to_string() })
                }
            };
            (ability.as_str().to_owned(), told)
        })
        .collect();
    json!({
        "store": root.to_string(),
        "kind": if root.is_bucket() { "bucket" } else { "folder" },
        "endpoint": endpoint,
        "region": region,
        "clock_ahead_seconds": root.ahead(),
        "read_only": read_only,
        "abilities": abilities,
        "fit": findings.failure().is_none(),
    })
}

fn text(root: &Root, findings: &Findings) -> String {
    let (endpoint, region) = root.destination();
    let mut known = vec![("store", root.to_string())];
    known.extend(endpoint.map(|endpoint| ("endpoint", endpoint.to_owned())));
    known.extend(region.map(|region| ("region", region.to_owned())));
    if root.is_bucket() {
        known.push(("clock", format!("{} s ahead of this machine's", root.ahead())));
    }
    for (ability, found) in &findings.0 {
        let told = match found {
            Ok(()) => "yes".to_owned(),
            Err(error) => format!("NO: {error}"),
        };
        known.push((name(*ability), told));
    }
    lines(&known)
}

/// What is tried, in as many letters as fit.
fn name(ability: Ability) -> &'static str {
    match ability {
        Ability::List => "list",
        Ability::Read => "read",
        Ability::Write => "write",
        Ability::PutIfAbsent => "put if absent",
        Ability::OneWinner => "one winner",
        Ability::FreshReads => "fresh reads",
        Ability::FreshListings => "fresh listing",
        Ability::Delete => "delete",
    }
}
