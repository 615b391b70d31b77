//! `dead`: messages that could not be published, whole, and why; queued again or discarded.

use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Value, json};

use weighbridge_queue::message::{Device, Kind as MessageKind, Message, Priority};
use weighbridge_schemas::dead::DeadLetter;
use weighbridge_schemas::error::{Kind, shorten};
use weighbridge_schemas::job::{JobRecord, Republish, RepublishSchema};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::dead::{self, Fate};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::{Absent, Root};

use super::Context;
use super::channels::seconds;
use super::jobs::{event_cells, events_table, is_prefix};
use super::output::{count, error_cell, lines, plain, short, table};
use crate::clock;
use crate::error::{Exit, Failure, Result};
use crate::steps::messages;

/// The priority of a message that says nothing else, as of a checkpoint manifest.
const MIDDLE_PRIORITY: u8 = 5;

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
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let root = context.root(Absent::Refuse)?;
        match self.command {
            Some(Command::Show { id }) => show(context, &root, id).await,
            Some(Command::Requeue { ids, again }) => requeue(context, &root, &ids, again).await,
            Some(Command::Discard { ids }) => discard(context, &root, &ids).await,
            None => list(context, &root, self.all).await,
        }
    }
}

async fn list(context: &Context, root: &Root, all: bool) -> Result<()> {
    let mut letters = Vec::new();
    for (id, fate) in dead::list(root).await? {
        if all || fate == Fate::Waiting {
            letters.push((dead::get(root, &id).await?, id, fate));
        }
    }
    letters.sort_by_key(|(letter, _, _)| std::cmp::Reverse(letter.when));
    let documents: Vec<_> = letters
        .iter()
        .map(|(letter, id, fate)| {
            json!({
                "id": id, "model": letter.model, "job": letter.job, "error": letter.error,
                "when": letter.when, "fate": fate.as_str(),
            })
        })
        .collect();
    context.output.listing(&json!({ "dead": documents }), || {
        let cells = |(letter, id, fate): &(DeadLetter, String, Fate)| {
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
    Ok(())
}

/// A job's id whole, of another the first digits.
fn letter_name(id: &str) -> String {
    if id.contains('-') { id.to_owned() } else { short(&id) }
}

async fn show(context: &Context, root: &Root, id: String) -> Result<()> {
    let (id, fate) = find(root, &[id]).await?.swap_remove(0);
    let letter = dead::get(root, &id).await?;
    let note = dead::note(root, &id, fate).await?;
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

/// The dead letters whose ids are, or begin with, these; and what became of them.
async fn find(root: &Root, wanted: &[String]) -> Result<Vec<(String, Fate)>> {
    let letters = dead::list(root).await?;
    let mut found: Vec<(String, Fate)> = Vec::new();
    for text in wanted {
        if !is_prefix(text) {
            return Err(Failure::usage(format!(
                "{:?} is no dead letter: give its id, or the first {PREFIX_DIGITS} or more characters of it; \
                 `weighbridge dead --all` lists them",
                shorten(text)
            )));
        }
        let mut fitting = letters.iter().filter(|(id, _)| id.starts_with(text));
        let letter = match (fitting.next(), fitting.next()) {
            (Some(only), None) => only,
            (Some(_), Some(_)) => {
                let why = "the ids of several dead letters begin so; give more of it";
                return Err(StoreError::new(Class::Refused, shorten(text), why).into());
            }
            (None, _) => {
                let why = "there is no such dead letter; `weighbridge dead --all` lists them";
                return Err(StoreError::new(Class::NotFound, shorten(text), why).into());
            }
        };
        if !found.contains(letter) {
            found.push(letter.clone());
        }
    }
    Ok(found)
}

/// Sends each again. All are looked at before the first is sent. A crash between sending and noting it has the message
/// sent twice, and never lost.
async fn requeue(context: &Context, root: &Root, ids: &[String], again: bool) -> Result<()> {
    let who = context.operation()?.who;
    let mut letters = Vec::new();
    for (id, fate) in find(root, ids).await? {
        if fate == Fate::Requeued && !again {
            return Err(requeued_before(root, &id).await?);
        }
        let letter = dead::get(root, &id).await?;
        let message = message(root, &id, &letter, &who).await?;
        letters.push((id, message));
    }
    let queue = context.queue().await?;
    for (id, message) in &letters {
        queue.send(message).await?;
        let note = format!("as job {} by {who} at {}", message.id, clock::now());
        dead::mark(root, id, Fate::Requeued, &note).await?;
    }
    let requeued: Vec<_> =
        letters.iter().map(|(id, message)| json!({ "id": id, "job": message.id })).collect();
    context.output.listing(&json!({ "requeued": requeued }), || {
        letters.iter().map(|(_, message)| format!("{}\n", message.id)).collect()
    });
    Ok(())
}

async fn requeued_before(root: &Root, id: &str) -> Result<Failure> {
    let note = dead::note(root, id, Fate::Requeued).await?.unwrap_or_default();
    let message = format!(
        "dead letter {id} was requeued before, {note}; `weighbridge dead requeue {id} --again` does it once more"
    );
    Ok(Failure { kind: Kind::Conflict, class: "already_requeued", message, exit: Exit::Failed })
}

/// What is sent for a dead letter. What an operator asked for is asked for again; else it is what the trainer dropped.
async fn message(root: &Root, id: &str, letter: &DeadLetter, who: &str) -> Result<Message> {
    let job = clock::operation_id();
    if let Some(record) = asked_for(root, letter).await? {
        let mut manifest = record.manifest;
        manifest.id = job;
        let request = Republish {
            schema: RepublishSchema::V1,
            manifest,
            repeats: letter.job.clone(),
            promote: record.promote,
            requested_by: Some(who.to_owned()),
        };
        return Ok(messages::republish(&request));
    }
    let body = with_id(&letter.body.0, &job).ok_or_else(|| Failure {
        kind: Kind::Permanent,
        class: "bad_document",
        message: format!(
            "dead letter {id} is no JSON object with an `id` of its own, so it cannot be queued again: see \
             `weighbridge dead show {id}`, drop a manifest that is right, and `weighbridge dead discard {id}`"
        ),
        exit: Exit::Usage,
    })?;
    let priority = serde_json::from_slice::<Value>(&body).ok();
    let priority = priority.and_then(|manifest| u8::try_from(manifest["priority"].as_u64()?).ok());
    Ok(Message {
        id: job,
        kind: MessageKind::Checkpoint,
        body,
        priority: Priority::of(priority.unwrap_or(MIDDLE_PRIORITY)),
        device: Device::Any,
    })
}

/// The record of a letter's job, where an operator asked for it.
async fn asked_for(root: &Root, letter: &DeadLetter) -> Result<Option<JobRecord>> {
    let (Some(model), Some(job)) = (&letter.model, &letter.job) else { return Ok(None) };
    let record = Job::new(root, model, job).record().await?;
    Ok(record.filter(|record| record.requested_by.is_some()))
}

/// What a requeued message has to have.
#[derive(Deserialize)]
struct Identified<'a> {
    #[serde(borrow)]
    id: &'a str,
}

/// A manifest with another `id`, and every other byte as it was; `None` where it is no JSON object with an id.
fn with_id(body: &[u8], id: &str) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(body).ok()?;
    if !text.trim_start().starts_with('{') {
        return None;
    }
    // Borrowed from the text, so where it stands there is known.
    let old = serde_json::from_str::<Identified<'_>>(text).ok()?.id;
    let at = old.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let (before, behind) = (text.get(..at)?, text.get(at.checked_add(old.len())?..)?);
    Some([before, id, behind].concat().into_bytes())
}

async fn discard(context: &Context, root: &Root, ids: &[String]) -> Result<()> {
    let who = context.operation()?.who;
    let letters = find(root, ids).await?;
    if let Some((id, _)) = letters.iter().find(|(_, fate)| *fate == Fate::Requeued) {
        return Err(Failure::usage(format!("dead letter {id} was requeued, and needs no discarding")));
    }
    for (id, _) in &letters {
        dead::mark(root, id, Fate::Discarded, &format!("by {who} at {}", clock::now())).await?;
    }
    let ids: Vec<_> = letters.iter().map(|(id, _)| id).collect();
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
    fn a_manifest_gets_another_id_and_is_otherwise_as_it_was() {
        let with = |body: &str| with_id(body.as_bytes(), "NEW").map(|body| String::from_utf8(body).unwrap());
        let body = " {\"x\": {\"id\": \"old\"},\t\"n\":1.10, \"id\" :\"old\",\"f\":123456789012345678901234567890}\n";
        let expected = body.replace("\"id\" :\"old\"", "\"id\" :\"NEW\"");
        assert_eq!(with(body).as_deref(), Some(expected.as_str()));
        assert_eq!(with(r#"{"id":""}"#).as_deref(), Some(r#"{"id":"NEW"}"#));
        for body in
            ["", "[\"a\"]", "{}", "{\"id\": 7}", "{\"id\": \"a\"", "{\"id\": \"a\", \"id\": \"b\"}", "x"]
        {
            assert_eq!(with(body), None, "{body}");
        }
        assert_eq!(with_id(&[0xff, b'{'], "NEW"), None);
    }

    #[test]
    fn a_body_that_could_steer_a_terminal_is_shown_in_base64() {
        let base64 = json!("QQ==");
        assert_eq!(body_text(Some("{\n}"), &base64), "body:\n{\n}");
        for text in [Some("\u{1b}[2J"), None] {
            assert_eq!(body_text(text, &base64), "body, in base64:\nQQ==");
        }
    }
}
