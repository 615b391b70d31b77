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
use crate::clock;
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
    /// List the tokens of a file: their names, roles and models, and how their hashes begin.
    List {
        /// The file of tokens.
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Take the tokens of a name out of a file.
    Revoke {
        /// The name.
        name: String,
        /// Leave the one that was made last: to replace a token, make another of the same name, give it to those who
        /// need it, and then revoke the older ones.
        #[arg(long)]
        keep_newest: bool,
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
            Self::Revoke { name, keep_newest, file } => revoke(context, &name, keep_newest, &file),
        }
    }
}

impl New {
    fn run(self, context: &Context) -> Result<()> {
        if self.expires.is_some_and(|expires| expires <= clock::now()) {
            return Err(Failure::usage(
                "--expires: that time has passed; the token would be good for nothing",
            ));
        }
        if self.model.iter().any(String::is_empty) {
            return Err(Failure::usage(
                "--model: an empty pattern fits no model; leave it out for all of them",
            ));
        }
        let models = (!self.model.is_empty()).then_some(self.model.as_slice());
        let (secret, text) = tokens::new(&self.name, &self.role, models, self.expires)?;
        let _alone = lock(&self.file)?;
        let mut all = if self.file.try_exists().unwrap_or(true) { read(&self.file)? } else { String::new() };
        if tokens::listed(&all)?.iter().any(|entry| entry.name == self.name) {
            let name = &self.name;
            context.output.tell(&format!(
                "there is a token named {name} already, which stays; `weighbridge token revoke {name} --keep-newest` \
                 takes it out\n"
            ));
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
        table(&["name", "roles", "models", "expires", "hash"], &cells)
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
        // It tells tokens of one name apart.
        entry.hash.chars().take(8).collect(),
    ]
}

fn revoke(context: &Context, name: &str, keep_newest: bool, file: &Path) -> Result<()> {
    let _alone = lock(file)?;
    let text = read(file)?;
    let (kept, gone) = tokens::without(&text, name, keep_newest)?;
    if gone == 0 && !keep_newest {
        return Err(Failure::usage(format!("{}: it has no token of the name {name:?}", file.display())));
    }
    replace(file, &kept)?;
    let document = json!({ "name": name, "revoked": gone });
    context.output.done(&document, || lines(&[("revoked", format!("{gone} of the name {name}"))]));
    Ok(())
}

/// Waits until nobody else changes the file: what one writes must not undo what another did.
fn lock(file: &Path) -> Result<fs::File> {
    let failed =
        |error: io::Error| Failure::usage(format!("{}: it cannot be locked: {error}", file.display()));
    let file = fs::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
    let folder = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let folder = fs::File::open(folder).map_err(failed)?;
    folder.lock().map_err(failed)?;
    Ok(folder)
}

/// Puts `text` in the file's place in one step: a server must not read half of it.
fn replace(file: &Path, text: &str) -> Result<()> {
    // A link goes on pointing where it does.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
    let next = file.with_extension(format!("{}.next", std::process::id()));
    let write = || {
        let mut written = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&next)?;
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
        let _ = fs::remove_file(&next);
        Failure::usage(format!("{}: it cannot be written: {error}", file.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_name_are_told_apart() {
        let made = || tokens::new("hosts", &[Role::Fetch], None, None).unwrap().1;
        let entries = tokens::listed(&format!("{}\n{}", made(), made())).unwrap();
        let rows: Vec<_> = entries.iter().map(cells).collect();
        assert_eq!(rows[0][..4], rows[1][..4]);
        assert_ne!(rows[0][4], rows[1][4]);
        assert_eq!(rows[0][4], entries[0].hash[..8]);
    }
}
