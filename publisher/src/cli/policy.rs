//! `policy`: policies that are kept in the store by name, so that trainers need not carry them.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;

use weighbridge_schemas::names::{ModelName, PolicyName};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::policies;
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::channels::seconds;
use super::output::table;
use super::publish::read_policy_text;
use super::snapshots::models;
use crate::error::Result;

/// Keep policies in the store by name, a model's own.
///
/// A checkpoint manifest may name one. The one named `default` is used for every publish of its model, queued or in the
/// foreground, that says nothing else. Every version is kept, the newest rules; a job goes by the version that ruled
/// when it was accepted.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge config default-policy > dlrm.toml\n  \
    weighbridge policy put dlrm default dlrm.toml\n  weighbridge policy list dlrm")]
pub(super) struct Policy {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put a policy as the newest version of its name. It is checked as `config check` does; the same text again makes
    /// no new version.
    #[command(after_help = "Example:\n  weighbridge policy put dlrm default dlrm.toml")]
    Put {
        /// The model's name.
        model: ModelName,
        /// The policy's name.
        name: PolicyName,
        /// The policy: a TOML file.
        file: PathBuf,
    },
    /// Print a policy.
    #[command(after_help = "Example:\n  weighbridge policy get dlrm default --version 2 > old.toml")]
    Get {
        /// The model's name.
        model: ModelName,
        /// The policy's name.
        name: PolicyName,
        /// The version [default: the newest].
        #[arg(long, value_name = "N")]
        version: Option<u64>,
    },
    /// List policies: names, their newest versions, and when these were put.
    #[command(after_help = "Example:\n  weighbridge policy list dlrm")]
    List {
        /// The model; without one, all.
        model: Option<String>,
    },
}

impl Policy {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        match self.command {
            Command::Put { model, name, file } => {
                let (text, _) = read_policy_text(&file)?;
                let root = context.root(Absent::Create)?;
                let version = policies::put(&root, &model, &name, &text).await?;
                let document = json!({ "model": model, "policy": name, "version": version });
                context.output.done(&document, || {
                    format!("put: policy {name} of model {model} is version {version} now\n")
                });
                Ok(())
            }
            Command::Get { model, name, version } => get(context, &model, &name, version).await,
            Command::List { model } => list(context, model.as_deref()).await,
        }
    }
}

async fn get(context: &Context, model: &ModelName, name: &PolicyName, version: Option<u64>) -> Result<()> {
    let root = context.root(Absent::Refuse)?;
    let found = match version {
        Some(number) => policies::version(&root, model, name, number).await?,
        None => policies::latest(&root, model, name).await?.ok_or_else(|| unknown(model, name))?,
    };
    let document = json!({ "model": model, "policy": name, "version": found.number, "text": found.text });
    context.output.listing(&document, || found.text);
    Ok(())
}

fn unknown(model: &ModelName, name: &PolicyName) -> StoreError {
    let why = format!(
        "model {model} has no policy of that name; `weighbridge policy list` lists them, \
         `weighbridge policy put {model} {name} FILE` makes one"
    );
    StoreError::new(Class::NotFound, name, why)
}

async fn list(context: &Context, model: Option<&str>) -> Result<()> {
    let root: Root = context.root(Absent::Refuse)?;
    let (mut documents, mut rows) = (Vec::new(), Vec::new());
    for model in models(&root, model).await? {
        for name in policies::list(&root, &model).await? {
            let versions = policies::versions(&root, &model, &name).await?;
            let Some((newest, when)) = versions.last() else { continue };
            let versions: Vec<_> =
                versions.iter().map(|(version, when)| json!({ "version": version, "when": when })).collect();
            documents.push(json!({
                "model": model, "policy": name, "version": newest, "when": when, "versions": versions,
            }));
            rows.push(vec![
                model.to_string(),
                name.to_string(),
                newest.to_string(),
                seconds(&when.to_string()),
            ]);
        }
    }
    context
        .output
        .listing(&json!({ "policies": documents }), || table(&["model", "policy", "version", "put"], &rows));
    Ok(())
}
