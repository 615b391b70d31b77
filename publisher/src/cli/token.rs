//! `token`: who may ask the API for what.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use weighbridge_schemas::time::Timestamp;

use super::Context;
use super::output::{lines, table};
use crate::api::tokens::{self, Entry, Role};
use crate::config::read_text;
use crate::error::{Failure, Result};

/// Make tokens for the API, list them, take them out.
///
/// A file of tokens keeps their hashes, never the tokens. A server reads it again when it changes: who is added is let
/// in, and who is taken out is shut out, within seconds.
#[derive(Debug, Subcommand)]
#[command(
    after_help = "Example:\n  weighbridge token new ranking-hosts --role fetch --model 'ranking-*' --file tokens.toml"
)]
pub(super) enum Token {
    New(New),
    /// List the tokens of a file: their names, roles and models.
    List {
        /// The file of tokens.
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Take the tokens of a name out of a file.
    Revoke {
        /// The name.
        name: String,
        /// The file of tokens.
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
    },
}

/// Make a token: it is printed, this once, and its hash goes into the file.
#[derive(Debug, Args)]
pub(super) struct New {
    /// Whose it is, for logs and for the channel's log.
    name: String,
    /// What its bearer may do: drop (hand over checkpoints), fetch (read and watch snapshots), operate (move channels,
    /// publish again). Give it more than once for several.
    #[arg(long, required = true, value_name = "ROLE")]
    role: Vec<Role>,
    /// For which models: a name in which * stands for anything. Give it more than once for several [default: all].
    #[arg(long, value_name = "PATTERN")]
    model: Vec<String>,
    /// Until when, such as 2027-06-30T00:00:00Z [default: for ever].
    #[arg(long, value_name = "TIME")]
    expires: Option<Timestamp>,
    /// The file of tokens, made if absent.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
}

impl Token {
    pub(super) fn run(self, context: &Context) -> Result<()> {
        match self {
            Self::New(new) => new.run(context),
            Self::List { file } => list(context, &file),
            Self::Revoke { name, file } => revoke(context, &name, &file),
        }
    }
}

impl New {
    fn run(self, context: &Context) -> Result<()> {
        let models = (!self.model.is_empty()).then_some(self.model.as_slice());
        let (secret, text) = tokens::new(&self.name, &self.role, models, self.expires)?;
        let mut all = if self.file.try_exists().unwrap_or(true) { read(&self.file)? } else { String::new() };
        if tokens::listed(&all)?.iter().any(|entry| entry.name == self.name) {
            tracing::info!(name = self.name, "there is a token of that name already; now there are two");
        }
        if !all.is_empty() && !all.ends_with("\n\n") {
            all.push('\n');
        }
        all.push_str(&text);
        tokens::listed(&all)?;
        replace(&self.file, &all)?;
        let document = json!({ "name": self.name, "token": secret.reveal(), "file": self.file });
        context.output.listing(&document, || format!("{}\n", secret.reveal()));
        Ok(())
    }
}

fn read(file: &Path) -> Result<String> {
    read_text(file)
        .map_err(|error| Failure::usage(format!("{}: the file of tokens: {error}", file.display())))
}

fn list(context: &Context, file: &Path) -> Result<()> {
    let entries = tokens::listed(&read(file)?)?;
    let document = json!({ "tokens": entries });
    context.output.listing(&document, || {
        let cells: Vec<_> = entries.iter().map(cells).collect();
        table(&["name", "roles", "models", "expires"], &cells)
    });
    Ok(())
}

fn cells(entry: &Entry) -> Vec<String> {
    let roles: Vec<_> = entry.roles.iter().map(|role| role.as_str()).collect();
    vec![
        entry.name.clone(),
        roles.join(", "),
        entry.models.as_ref().map_or_else(|| "all".to_owned(), |models| models.join(", ")),
        entry.expires.map_or_else(|| "never".to_owned(), |expires| expires.to_string()),
    ]
}

fn revoke(context: &Context, name: &str, file: &Path) -> Result<()> {
    let text = read(file)?;
    let (kept, gone) = tokens::without(&text, name)?;
    if gone == 0 {
        return Err(Failure::usage(format!("{}: it has no token of the name {name:?}", file.display())));
    }
    replace(file, &kept)?;
    let document = json!({ "name": name, "revoked": gone });
    context.output.done(&document, || lines(&[("revoked", format!("{gone} of the name {name}"))]));
    Ok(())
}

/// Puts `text` in the file's place in one step: a server must not read half of it.
fn replace(file: &Path, text: &str) -> Result<()> {
    let next = file.with_extension("next");
    let write = || {
        let mut options = OpenOptions::new();
        let mut written = options.create(true).truncate(true).write(true).mode(0o600).open(&next)?;
        // A server that runs as somebody else still may read it.
        match fs::metadata(file) {
            Ok(found) => {
                fchown(&written, Some(found.uid()), Some(found.gid()))?;
                written.set_permissions(found.permissions())?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        written.write_all(text.as_bytes())?;
        written.sync_data()?;
        fs::rename(&next, file)
    };
    write().map_err(|error: io::Error| {
        Failure::usage(format!("{}: it cannot be written: {error}", file.display()))
    })
}
