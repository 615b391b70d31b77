//! Messages that could not be published: listed, queued again, discarded.

use serde::Deserialize;
use serde_json::Value;

use weighbridge_queue::Queue;
use weighbridge_queue::message::{Device, Kind as MessageKind, Message, Priority};
use weighbridge_schemas::dead::DeadLetter;
use weighbridge_schemas::error::{Kind, shorten};
use weighbridge_schemas::job::{JobId, JobRecord, Republish, RepublishSchema};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::dead::{self, Fate};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::Root;

use super::{Page, is_prefix, whole};
use crate::clock;
use crate::error::{Exit, Failure, Result};
use crate::steps::messages;

/// The priority of a message that says nothing else, as of a checkpoint manifest.
const MIDDLE_PRIORITY: u8 = 5;

/// A dead letter, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Letter {
    /// Its id.
    pub id: String,
    /// What became of it.
    pub fate: Fate,
    /// What it says.
    pub letter: DeadLetter,
}

/// A page of dead letters, by id, without their bodies and histories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The letters.
    pub letters: Vec<Letter>,
    /// Where the next page begins: behind this id. `None` where there is none.
    pub next: Option<String>,
    /// The first that cannot be read, and is left out.
    pub damage: Option<StoreError>,
}

/// Dead letters: those that nothing became of yet, or `all`; of models that `wanted` takes.
///
/// # Errors
/// As the store fails.
pub async fn list(
    root: &Root,
    all: bool,
    wanted: impl Fn(Option<&ModelName>) -> bool,
    page: Page<'_, String>,
) -> Result<Listed> {
    let mut listed = Listed { letters: Vec::new(), next: None, damage: None };
    let letters = dead::list(root).await?.into_iter();
    let of_interest = |(id, fate): &(String, Fate)| {
        (all || *fate == Fate::Waiting) && page.after.is_none_or(|after| id > after)
    };
    let mut behind = letters.filter(of_interest).peekable();
    let mut reads = 0;
    while let Some((id, fate)) = behind.next() {
        reads += 1;
        // A page of whole ones would take much memory.
        let last = id.clone();
        if let Some(mut letter) = whole(dead::get(root, &id).await, &mut listed.damage)?
            && wanted(letter.model.as_ref())
        {
            letter.body.0 = Vec::new();
            letter.history = Vec::new();
            listed.letters.push(Letter { id, fate, letter });
        }
        if listed.letters.len() >= page.most || reads >= page.reads {
            listed.next = behind.peek().is_some().then_some(last);
            break;
        }
    }
    Ok(listed)
}

/// The dead letters whose ids are, or begin with, these; and what became of them.
///
/// # Errors
/// A usage failure for what no id begins with; [`Class::NotFound`]; [`Class::Refused`] where there are several.
pub async fn find(root: &Root, wanted: &[String]) -> Result<Vec<(String, Fate)>> {
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

/// A dead letter that is to be queued again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Again {
    /// The letter's id.
    pub letter: String,
    /// What is sent; its id is the new job's.
    pub message: Message,
}

/// What is sent to queue these letters again, each with a new id; the same one, where it was sent before and that could
/// not be noted. All are looked at before the first is sent.
///
/// # Errors
/// As [`find`]; a conflict for one that was requeued before, unless `again`; a permanent failure for one that cannot
/// be.
pub async fn again(root: &Root, ids: &[String], again: bool, who: &str) -> Result<Vec<Again>> {
    let mut letters = Vec::new();
    for (id, fate) in find(root, ids).await? {
        if fate == Fate::Requeued && !again {
            return Err(requeued_before(root, &id).await?);
        }
        let letter = dead::get(root, &id).await?;
        let job = match fate {
            Fate::Requeued => clock::operation_id(),
            Fate::Waiting | Fate::Discarded => JobId::of(format!("requeue of {id}").as_bytes()).to_string(),
        };
        let message = message(root, (&id, job), &letter, who).await?;
        letters.push(Again { letter: id, message });
    }
    Ok(letters)
}

/// Sends these, and notes it. A crash in between has a message sent twice under one id, and never lost.
///
/// # Errors
/// As the store or the queue fails.
pub async fn send(root: &Root, queue: &dyn Queue, letters: &[Again], who: &str) -> Result<()> {
    for Again { letter, message } in letters {
        queue.send(message).await?;
        let note = format!("as job {} by {who} at {}", message.id, clock::now());
        dead::mark(root, letter, Fate::Requeued, &note).await?;
    }
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
async fn message(root: &Root, (id, job): (&str, String), letter: &DeadLetter, who: &str) -> Result<Message> {
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

/// Notes of these letters that nobody wants to hear more of them; gives their ids.
///
/// # Errors
/// As [`find`]; a usage failure for one that was requeued.
pub async fn discard(root: &Root, ids: &[String], who: &str) -> Result<Vec<String>> {
    let letters = find(root, ids).await?;
    if let Some((id, _)) = letters.iter().find(|(_, fate)| *fate == Fate::Requeued) {
        return Err(Failure::usage(format!("dead letter {id} was requeued, and needs no discarding")));
    }
    for (id, _) in &letters {
        dead::mark(root, id, Fate::Discarded, &format!("by {who} at {}", clock::now())).await?;
    }
    Ok(letters.into_iter().map(|(id, _)| id).collect())
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
}
