//! The database of an embedded queue: opened, checked, its tables made.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::place::Place;
use super::rows;
use crate::clock::Moment;

/// The version of the tables.
const VERSION: i64 = 1;
/// Tells our databases from others: "WBRQ".
const APPLICATION: i64 = 0x5742_5251;
/// How long to wait before a step of opening is tried again, where SQLite itself does not wait.
const PAUSE: Duration = Duration::from_millis(20);

/// Why something could not be done.
#[derive(Debug)]
pub(super) enum Fault {
    Sqlite(rusqlite::Error),
    /// The file is no longer there.
    Gone,
    /// A newer version's file.
    Newer(i64),
    /// Another program's database.
    Foreign,
    /// A row that no queue wrote.
    Row(String),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

impl Fault {
    fn is_busy(&self) -> bool {
        matches!(self, Self::Sqlite(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy))
    }

    /// Whether the connection is better opened anew.
    pub(super) fn spoils_the_connection(&self) -> bool {
        match self {
            Self::Sqlite(error) => !matches!(
                error.sqlite_error_code(),
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::DiskFull)
            ),
            Self::Gone => true,
            Self::Newer(_) | Self::Foreign | Self::Row(_) => false,
        }
    }
}

/// An open database.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) connection: Connection,
    /// The file that it is, by device and number.
    identity: (u64, u64),
}

/// Opens the database, and makes it where it is absent.
pub(super) fn open(place: &Place, now: Moment) -> Result<Opened, Fault> {
    // For the group too, where the umask lets it; SQLite alone would not.
    let _ = File::options().write(true).create_new(true).mode(0o660).open(place.file());
    open_as(place, now, OpenFlags::SQLITE_OPEN_CREATE)
}

/// The open database, or one opened anew: a file that was moved away takes no more messages.
pub(super) fn ready(held: Option<Opened>, place: &Place, now: Moment) -> Result<Opened, crate::error::Error> {
    let there = identity(&place.file());
    match held {
        Some(opened) if there == Some(opened.identity) => Ok(opened),
        // An empty folder where a disk is not mounted must not become a queue.
        _ if there.is_none() => Err(place.error(&Fault::Gone, false)),
        _ => open_as(place, now, OpenFlags::empty()).map_err(|fault| place.error(&fault, false)),
    }
}

fn identity(file: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(file).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn open_as(place: &Place, now: Moment, create: OpenFlags) -> Result<Opened, Fault> {
    let file = place.file();
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | create;
    let mut connection = Connection::open_with_flags(&file, flags)?;
    connection.busy_timeout(place.patience)?;
    let deadline = Instant::now() + place.patience;
    // Turning to WAL, and mending after a crash, answer "busy" without waiting.
    loop {
        match set_up(&mut connection, now) {
            Err(fault) if fault.is_busy() && Instant::now() < deadline => std::thread::sleep(PAUSE),
            result => break result?,
        }
    }
    Ok(Opened { connection, identity: identity(&file).ok_or(Fault::Gone)? })
}

fn set_up(connection: &mut Connection, now: Moment) -> Result<(), Fault> {
    connection.execute_batch("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;")?;
    let number = |connection: &Connection, query| connection.query_row(query, [], |row| row.get::<_, i64>(0));
    let tables = number(connection, "SELECT count(*) FROM sqlite_schema")?;
    let application = number(connection, "PRAGMA application_id")?;
    if application != APPLICATION && (tables > 0 || application != 0) {
        return Err(Fault::Foreign);
    }
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA journal_size_limit = 67108864;",
    )?;
    let transaction = begin(connection)?;
    match number(&transaction, "PRAGMA user_version")? {
        0 => {
            rows::make(&transaction, now)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.pragma_update(None, "user_version", VERSION)?;
        }
        VERSION => rows::settle(&transaction, now)?,
        newer => return Err(Fault::Newer(newer)),
    }
    Ok(transaction.commit()?)
}

/// Begins a transaction that writes, by taking the lock at once: a lock taken halfway could not be waited for.
pub(super) fn begin(connection: &mut Connection) -> Result<Transaction<'_>, Fault> {
    Ok(connection.transaction_with_behavior(TransactionBehavior::Immediate)?)
}
