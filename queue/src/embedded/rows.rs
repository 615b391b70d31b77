//! What is done with messages, as SQL.
//!
//! Times are milliseconds since the boot that `state` names. `due` is when a message may be taken: when its delay is
//! over, or the lease of whoever has it.

use std::time::Duration;

use rusqlite::types::{FromSql, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use super::file::Fault;
use crate::clock::Moment;
use crate::message::{BODY_BYTES, Device, ID_BYTES, Kind, Message, Priority};
use crate::{Depth, Lease, Taker};

/// Bodies lie apart, so that what changes often is small.
const TABLES: &str = "
CREATE TABLE state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    boot BLOB NOT NULL,
    fence INTEGER NOT NULL
) STRICT;
CREATE TABLE messages (
    sequence INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    kind INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    device INTEGER NOT NULL,
    gpu_wait INTEGER NOT NULL,
    sent INTEGER NOT NULL,
    sent_wall INTEGER NOT NULL,
    due INTEGER NOT NULL,
    leased INTEGER NOT NULL DEFAULT 0 CHECK (leased IN (0, 1)),
    fence INTEGER NOT NULL DEFAULT 0,
    abandoned INTEGER NOT NULL DEFAULT 0,
    retries INTEGER NOT NULL DEFAULT 0,
    waited INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX turn ON messages (device, priority, due, sequence);
CREATE TABLE bodies (sequence INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
";

const ANY: i64 = 0;
const CPU: i64 = 1;
const GPU: i64 = 2;

/// The classes, the highest first, with their numbers in the table.
const CLASSES: [(i64, Priority); 3] = [(2, Priority::High), (1, Priority::Normal), (0, Priority::Low)];
const KINDS: [(i64, Kind); 3] = [(0, Kind::Checkpoint), (1, Kind::Republish), (2, Kind::Step)];

/// Clamped to a time that can be added to another: more than a hundred million years.
fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

fn duration(milliseconds: i64) -> Duration {
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}

/// The last millisecond that is over, so that nothing begins too early.
fn since_boot(now: Moment) -> i64 {
    i64::try_from(now.since_boot.as_millis()).unwrap_or(i64::MAX / 4)
}

/// The number in the table of `wanted`.
fn number<T: PartialEq>(table: &[(i64, T)], wanted: &T) -> i64 {
    table.iter().find(|(_, value)| value == wanted).map_or(0, |(number, _)| *number)
}

pub(super) fn make(rows: &Transaction<'_>, now: Moment) -> Result<(), Fault> {
    rows.execute_batch(TABLES)?;
    rows.execute("INSERT INTO state VALUES (1, ?1, 0)", params![now.boot.to_be_bytes()])?;
    Ok(())
}

/// Whether the times in the tables are of the present boot.
pub(super) fn is_settled(rows: &Connection, now: Moment) -> Result<bool, Fault> {
    Ok(rows.query_row("SELECT boot = ?1 FROM state", params![now.boot.to_be_bytes()], |row| row.get(0))?)
}

/// Brings what another boot wrote into the present one's time: whoever held a message is gone, and how much of a delay
/// is left nobody knows, so everything is due. The wall clock is all that tells how long a message has waited.
pub(super) fn settle(rows: &Transaction<'_>, now: Moment) -> Result<(), Fault> {
    if is_settled(rows, now)? {
        return Ok(());
    }
    rows.execute(
        "UPDATE messages SET due = 0, abandoned = abandoned + leased, leased = 0, sent = ?1 - max(0, ?2 - sent_wall)",
        params![since_boot(now), milliseconds(now.wall)],
    )?;
    rows.execute("UPDATE state SET boot = ?1", params![now.boot.to_be_bytes()])?;
    Ok(())
}

/// Adds a message, unless one of its id is there. Tells whether what is there then says the same: two manifests of one
/// id must not pass for one. Steps may differ: each is an order to look at its job.
pub(super) fn send(rows: &Transaction<'_>, now: Moment, message: &Message) -> Result<bool, Fault> {
    let (device, wait) = match message.device {
        Device::Any => (ANY, Duration::ZERO),
        Device::Cpu => (CPU, Duration::ZERO),
        Device::Gpu { wait } => (GPU, wait),
    };
    let added = rows.execute(
        "INSERT INTO messages (id, kind, priority, device, gpu_wait, sent, sent_wall, due)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?6) ON CONFLICT (id) DO NOTHING",
        params![
            message.id,
            number(&KINDS, &message.kind),
            number(&CLASSES, &message.priority),
            device,
            milliseconds(wait),
            since_boot(now),
            milliseconds(now.wall)
        ],
    )?;
    if added > 0 {
        let body = "INSERT INTO bodies VALUES (?1, ?2)";
        rows.execute(body, params![rows.last_insert_rowid(), message.body])?;
        return Ok(true);
    }
    let same = "SELECT kind = ?2 AND body = ?3 FROM messages JOIN bodies USING (sequence) WHERE id = ?1";
    let kind = number(&KINDS, &message.kind);
    let same = rows.query_row(same, params![message.id, kind, message.body], |row| row.get(0)).optional()?;
    Ok(message.kind != Kind::Checkpoint || same.unwrap_or(true))
}

/// The message whose turn it is, by its sequence.
pub(super) fn next(rows: &Connection, now: Moment, taker: Taker) -> Result<Option<i64>, Fault> {
    let rounds: &[&[i64]] = match taker {
        Taker::Cpu => &[&[ANY, CPU, GPU]],
        Taker::Gpu => &[&[ANY, GPU], &[CPU]],
    };
    // A message of a kind that only newer versions know waits for one.
    let mut first = rows.prepare(
        "SELECT due, sequence FROM messages
         WHERE device = ?1 AND priority = ?2 AND due <= ?3 AND (?4 OR sent + gpu_wait <= ?3)
           AND kind BETWEEN 0 AND 2
         ORDER BY due, sequence LIMIT 1",
    )?;
    for devices in rounds {
        for (class, _) in CLASSES {
            let mut found: Option<(i64, i64)> = None;
            for &device in *devices {
                let at_once = device != GPU || taker == Taker::Gpu;
                let here = first
                    .query_row(params![device, class, since_boot(now), at_once], |row| {
                        Ok((row.get(0)?, row.get(1)?))
                    })
                    .optional()?;
                found = [found, here].into_iter().flatten().min();
            }
            if let Some((_, sequence)) = found {
                return Ok(Some(sequence));
            }
        }
    }
    Ok(None)
}

pub(super) fn lease(
    rows: &Transaction<'_>,
    now: Moment,
    taker: Taker,
    time: Duration,
) -> Result<Option<Lease>, Fault> {
    let Some(sequence) = next(rows, now, taker)? else { return Ok(None) };
    let fence: i64 =
        rows.query_row("UPDATE state SET fence = fence + 1 RETURNING fence", [], |row| row.get(0))?;
    rows.execute(
        "UPDATE messages SET fence = ?1, due = ?2, abandoned = abandoned + leased, leased = 1 WHERE sequence = ?3",
        params![fence, since_boot(now).saturating_add(milliseconds(time)), sequence],
    )?;
    let mut leased = rows.prepare(
        "SELECT id, body, kind, priority, device, gpu_wait, abandoned, retries, waited
         FROM messages LEFT JOIN bodies USING (sequence) WHERE sequence = ?1",
    )?;
    let mut found = leased.query(params![sequence])?;
    let row = found.next()?.ok_or_else(|| Fault::Row(format!("message {sequence} is not there")))?;
    let unsigned = |value: i64| u32::try_from(value).unwrap_or(u32::MAX);
    Ok(Some(Lease {
        message: message(row, sequence)?,
        abandoned: unsigned(row.get(6)?),
        retries: unsigned(row.get(7)?),
        waited: duration(row.get(8)?),
        fence: u64::try_from(fence).unwrap_or(0),
    }))
}

/// Reads a message. Another program may have written to the file: lengths are checked before they are allocated.
fn message(row: &Row<'_>, sequence: i64) -> Result<Message, Fault> {
    let wrong = |what: &str| Fault::Row(format!("message {sequence} has {what}"));
    let (ValueRef::Text(id), ValueRef::Blob(body)) = (row.get_ref(0)?, row.get_ref(1)?) else {
        return Err(wrong("no body"));
    };
    if id.len() > ID_BYTES || body.len() > BODY_BYTES {
        return Err(wrong("an id or a body that is too large"));
    }
    let wait = duration(row.get(5)?);
    let device = match row.get(4)? {
        ANY => Device::Any,
        CPU => Device::Cpu,
        GPU => Device::Gpu { wait },
        _ => return Err(wrong("no known device")),
    };
    Ok(Message {
        id: String::from_utf8(id.to_vec()).map_err(|_| wrong("an id that is no text"))?,
        kind: meaning(&KINDS, row.get(2)?).ok_or_else(|| wrong("no known kind"))?,
        body: body.to_vec(),
        priority: meaning(&CLASSES, row.get(3)?).ok_or_else(|| wrong("no known class"))?,
        device,
    })
}

/// What `wanted` means in the table.
fn meaning<T: Copy>(table: &[(i64, T)], wanted: i64) -> Option<T> {
    table.iter().find(|(number, _)| *number == wanted).map(|(_, value)| *value)
}

fn signed(fence: u64) -> i64 {
    i64::try_from(fence).unwrap_or(-1)
}

/// Whether the lease was still there; so with the next two.
pub(super) fn extend(
    rows: &Transaction<'_>,
    now: Moment,
    id: &str,
    fence: u64,
    time: Duration,
) -> Result<bool, Fault> {
    let changed = rows.execute(
        "UPDATE messages SET due = ?3 WHERE id = ?1 AND fence = ?2 AND leased = 1",
        params![id, signed(fence), since_boot(now).saturating_add(milliseconds(time))],
    )?;
    Ok(changed > 0)
}

pub(super) fn done(rows: &Transaction<'_>, id: &str, fence: u64) -> Result<bool, Fault> {
    let gone: Option<i64> = rows
        .query_row(
            "DELETE FROM messages WHERE id = ?1 AND fence = ?2 AND leased = 1 RETURNING sequence",
            params![id, signed(fence)],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(sequence) = gone {
        rows.execute("DELETE FROM bodies WHERE sequence = ?1", params![sequence])?;
    }
    Ok(gone.is_some())
}

pub(super) fn retry(
    rows: &Transaction<'_>,
    now: Moment,
    id: &str,
    fence: u64,
    delay: Duration,
) -> Result<bool, Fault> {
    let delay = milliseconds(delay);
    // The sum of delays cannot grow beyond what a delay can be.
    let changed = rows.execute(
        "UPDATE messages SET leased = 0, due = ?3, retries = retries + 1, waited = min(waited + ?4, ?5)
         WHERE id = ?1 AND fence = ?2 AND leased = 1",
        params![id, signed(fence), since_boot(now).saturating_add(delay), delay, i64::MAX / 4],
    )?;
    Ok(changed > 0)
}

pub(super) fn depth(rows: &Connection, now: Moment) -> Result<Vec<Depth>, Fault> {
    let now = since_boot(now);
    let mut counts = rows.prepare(
        "SELECT coalesce(sum(due <= ?2), 0), coalesce(sum(due > ?2 AND leased = 0), 0),
                coalesce(sum(due > ?2 AND leased = 1), 0), min(sent)
         FROM messages WHERE priority = ?1",
    )?;
    let mut depths = Vec::new();
    for (class, priority) in CLASSES {
        depths.push(counts.query_row(params![class, now], |row| {
            let oldest: Option<i64> = row.get(3)?;
            Ok(Depth {
                priority,
                ready: count(row, 0)?,
                delayed: count(row, 1)?,
                leased: count(row, 2)?,
                oldest: oldest.map(|sent| duration(now.saturating_sub(sent))),
            })
        })?);
    }
    Ok(depths)
}

fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    let value = i64::column_result(row.get_ref(column)?)?;
    Ok(u64::try_from(value).unwrap_or(0))
}
