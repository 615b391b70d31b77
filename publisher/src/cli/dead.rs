//! `dead`: messages that could not be published, whole, and why; queued again or discarded.

use std::cmp::Reverse;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::dead::{get, note};
use weighbridge_snapshots::root::Root;

use super::Context;
use super::channels::seconds;
use super::jobs::{event_cells, events_table};
use super::output::{count, error_cell, error_object, lines, plain, short, table};
use crate::error::{Failure, Result};
use crate::operations::Page;
use crate::operations::dead::{self, Letter};

/// List dead letters: messages that could not be published, and why. Nothing is dropped silently.
///
/// A dead letter has its job's id, or that of its bytes where it is no job. It is kept for good; `requeue` and
/// `discard` note what became of it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(
    after_help = "Example:\n  weighbridge dead\n  weighbridge dead show 0f8fad\n  weighbridge dead requeue 0f8fad"
)]
pub(super) struct Dead {
    /// Show those that were requeued or discarded too.
    #[arg(long)]
    all: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show a dead letter: why it is dead, what was tried, and its body.
    #[command(after_help = "Example:\n  weighbridge dead show 0f8fad")]
    Show {
        /// The dead letter's id, or its first 6 or more characters.
        id: String,
    },
    /// Put messages on the queue again, each with a new id and otherwise as it was; prints the new ids, which are those
    /// of their jobs.
    ///
    /// Mend what was wrong before: the checkpoint, the policy in the store, or what workers may read.
    #[command(after_help = "Example:\n  weighbridge dead requeue 0f8fad 7c9e66\n  \
        weighbridge jobs wait $(weighbridge dead requeue 0f8fad)")]
    Requeue {
        /// Ids of dead letters, or their first 6 or more characters.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Those too that were requeued before.
        #[arg(long)]
        again: bool,
    },
    /// Note of dead letters that nobody wants to hear more of them. They are kept all the same.
    #[command(after_help = "Example:\n  weighbridge dead discard 0f8fad")]
    Discard {
        /// Ids of dead letters, or their first 6 or more characters.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

impl Dead {
    pub(super) async fn run(self, context: &Context) -> Result<ExitCode> {
        let root = context.root_of_jobs()?;
        match self.command {
            Some(Command::Show { id }) => show(context, &root, id).await?,
            Some(Command::Requeue { ids, again }) => requeue(context, &root, &ids, again).await?,
            Some(Command::Discard { ids }) => discard(context, &root, &ids).await?,
            None => return list(context, &root, self.all).await,
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn list(context: &Context, root: &Root, all: bool) -> Result<ExitCode> {
    let dead::Listed { mut letters, damage, .. } =
        dead::list(root, all, |_| true, Page::first(usize::MAX)).await?;
    let failure = damage.map(Failure::from);
    letters.sort_by_key(|letter| Reverse(letter.letter.when));
    let documents: Vec<_> = letters
        .iter()
        .map(|Letter { letter, id, fate }| {
            json!({
                "id": id, "model": letter.model, "job": letter.job, "error": letter.error,
                "when": letter.when, "fate": fate.as_str(),
            })
        })
        .collect();
    let mut listing = json!({ "dead": documents });
    if let Some(failure) = &failure {
        listing["error"] = error_object(failure);
    }
    context.output.listing(&listing, || {
        let cells = |Letter { letter, id, fate }: &Letter| {
            vec![
                letter_name(id),
                letter.model.as_ref().map_or("-".to_owned(), ModelName::to_string),
                letter.job.as_ref().map_or("-", |_| "yes").to_owned(),
                error_cell(&letter.error),
                seconds(&letter.when.to_string()),
                fate.as_str().to_owned(),
            ]
        };
        table(
            &["id", "model", "job", "error", "when", "fate"],
            &letters.iter().map(cells).collect::<Vec<_>>(),
        )
    });
    let Some(failure) = failure else { return Ok(ExitCode::SUCCESS) };
    context.output.failure_line(&failure);
    Ok(ExitCode::from(failure.exit as u8))
}

/// A job's id whole, of another the first digits.
fn letter_name(id: &str) -> String {
    if id.contains('-') { id.to_owned() } else { short(&id) }
}

async fn show(context: &Context, root: &Root, id: String) -> Result<()> {
    let (id, fate) = dead::find(root, &[id]).await?.swap_remove(0);
    let letter = get(root, &id).await?;
    let note = note(root, &id, fate).await?;
    let mut document = json!(letter);
    let text = std::str::from_utf8(&letter.body.0).ok();
    document["id"] = json!(id);
    document["fate"] = json!(fate.as_str());
    document["note"] = json!(note);
    document["text"] = json!(text);
    context.output.listing(&document, || {
        let mut known = vec![
            ("id", id.clone()),
            ("model", letter.model.as_ref().map_or("not known".to_owned(), ModelName::to_string)),
            ("job", letter.job.as_ref().map_or("none".to_owned(), ToString::to_string)),
            ("error", plain(&format!("{}: {}", letter.error.class, letter.error.message))),
            ("when", format!("{}, by {}", seconds(&letter.when.to_string()), plain(&letter.who))),
            ("fate", fate.as_str().to_owned()),
        ];
        known.extend(note.as_deref().map(|note| ("note", plain(note))));
        let mut shown = lines(&known);
        if !letter.history.is_empty() {
            let rows: Vec<_> = letter.history.iter().map(event_cells).collect();
            shown.push_str(&format!("\n{}", events_table(&rows)));
        }
        shown.push_str(&format!("\n{}\n", body_text(text, &document["body"])));
        shown
    });
    Ok(())
}

/// The body as it is where a terminal can show it, else in base64.
fn body_text(text: Option<&str>, base64: &Value) -> String {
    let is_printable = |text: &&str| !text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t'));
    match text.filter(is_printable) {
        Some(text) => format!("body:\n{text}"),
        None => format!("body, in base64:\n{}", base64.as_str().unwrap_or_default()),
    }
}

async fn requeue(context: &Context, root: &Root, ids: &[String], again: bool) -> Result<()> {
    let who = context.operation()?.who;
    let letters = dead::again(root, ids, again, &who).await?;
    dead::send(root, &*context.queue().await?, &letters, &who).await?;
    let requeued: Vec<_> =
        letters.iter().map(|again| json!({ "id": again.letter, "job": again.message.id })).collect();
    context.output.listing(&json!({ "requeued": requeued }), || {
        letters.iter().map(|again| format!("{}\n", again.message.id)).collect()
    });
    Ok(())
}

async fn discard(context: &Context, root: &Root, ids: &[String]) -> Result<()> {
    let ids = dead::discard(root, ids, &context.operation()?.who).await?;
    context.output.done(&json!({ "discarded": ids }), || {
        format!(
            "discarded: {}; `weighbridge dead --all` still lists them\n",
            count(ids.len() as u64, "dead letter")
        )
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_could_steer_a_terminal_is_shown_in_base64() {
        let base64 = json!("QQ==");
        assert_eq!(body_text(Some("{\n}"), &base64), "body:\n{\n}");
        for text in [Some("\u{1b}[2J"), None] {
            assert_eq!(body_text(text, &base64), "body, in base64:\nQQ==");
        }
    }
}
