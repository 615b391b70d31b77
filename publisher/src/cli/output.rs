//! What goes where: results to standard output, the telling of them to standard error.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use weighbridge_schemas::job::Why;

pub(super) use crate::clock::between;
use crate::error::Failure;

/// Where a command's results go, and in which form.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output {
    json: bool,
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(super) fn is_json(self) -> bool {
        self.json
    }

    /// The one JSON document.
    pub(super) fn document(self, document: &Value) {
        print(&format!("{document:#}\n"));
    }

    /// One of many JSON documents, a line each.
    pub(super) fn line(self, document: &impl Serialize) {
        if let Ok(line) = serde_json::to_string(document) {
            print(&format!("{line}\n"));
        }
    }

    /// A listing: the document, or text for people.
    pub(super) fn listing(self, document: &Value, text: impl FnOnce() -> String) {
        if self.json {
            self.document(document);
        } else {
            print(&text());
        }
    }

    /// What was done: the document, or text for people, which goes to standard error.
    pub(super) fn done(self, document: &Value, text: impl FnOnce() -> String) {
        if self.json {
            self.document(document);
        } else {
            let _ = io::stderr().write_all(text().as_bytes());
        }
    }

    /// Tells people something beside the result.
    pub(super) fn tell(self, text: &str) {
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// A failure, as one line; with `--json` also as the document.
    pub(super) fn failure(self, failure: &Failure) {
        self.failure_line(failure);
        if self.json {
            self.document(&json!({ "error": error_object(failure) }));
        }
    }

    /// A failure's line alone.
    pub(super) fn failure_line(self, failure: &Failure) {
        let line = failure.message.split_whitespace().collect::<Vec<_>>().join(" ");
        // Nobody is left to tell that standard error is closed.
        let _ = io::stderr().write_all(format!("error: {}\n", plain(&line)).as_bytes());
    }
}

/// A failure as it stands in JSON.
pub(super) fn error_object(failure: &Failure) -> Value {
    json!({ "kind": failure.kind.as_str(), "class": failure.class, "message": failure.message })
}

/// Whether something that belongs on standard output did not get there.
static LOST: AtomicBool = AtomicBool::new(false);

/// Whether something that belongs on standard output did not get there.
pub(super) fn lost() -> bool {
    LOST.load(Ordering::Relaxed)
}

/// Writes to standard output. A reader that has gone away (`weighbridge ... | head`) is no failure; a full disk is.
fn print(text: &str) {
    let mut stdout = io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            LOST.store(true, Ordering::Relaxed);
            let _ = io::stderr().write_all(format!("error: standard output: {error}\n").as_bytes());
        }
        _ => {}
    }
}

/// The widest that a column is made, in characters; a wider cell pushes the rest of its line to the right. Without
/// a bound, one long name would fill up every other line.
const WIDEST_COLUMN: usize = 120;

/// A table: columns as wide as their widest cell, numbers to the right.
pub(super) fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let length = |cell: &str| cell.chars().count();
    let mut widths: Vec<usize> = heading.iter().map(|cell| length(cell)).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = length(cell).min(WIDEST_COLUMN).max(*width);
        }
    }
    let numeric: Vec<bool> = (0..heading.len())
        .map(|column| {
            let mut cells = rows.iter().filter_map(|row| row.get(column)).peekable();
            cells.peek().is_some() && cells.all(|cell| is_number(cell))
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let mut line = String::new();
        for (column, cell) in cells.into_iter().enumerate() {
            let fill = " ".repeat(widths[column].saturating_sub(length(cell)));
            let (before, behind) =
                if numeric[column] { (fill, String::new()) } else { (String::new(), fill) };
            line.push_str(&format!("{before}{cell}{behind}  "));
        }
        format!("{}\n", line.trim_end())
    };
    let mut text = line(heading.to_vec());
    for row in rows {
        text.push_str(&line(row.iter().take(heading.len()).map(String::as_str).collect()));
    }
    text
}

/// A number, with or without a unit behind it, or a dash for none.
fn is_number(cell: &str) -> bool {
    let (number, unit) = cell.split_once(' ').unwrap_or((cell, ""));
    cell == "-" || (number.parse::<f64>().is_ok() && unit.chars().all(char::is_alphabetic))
}

/// `1 snapshot`, `2 snapshots`.
pub(super) fn count(number: u64, what: &str) -> String {
    if number == 1 {
        return format!("1 {what}");
    }
    match what.strip_suffix('y') {
        Some(stem) => format!("{number} {stem}ies"),
        None => format!("{number} {what}s"),
    }
}

/// Control characters, which a name from outside may not bring to a terminal, as escapes.
pub(super) fn plain(text: &str) -> String {
    let steers = |c: char| {
        // Directions, line and paragraph ends: what is shown would not be what was written.
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().flat_map(|c| if steers(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

/// A size for people.
pub(super) fn bytes(size: u64) -> String {
    indicatif::BinaryBytes(size).to_string()
}

/// The first digits of an id, as people say it.
pub(super) fn short(id: &impl ToString) -> String {
    id.to_string().chars().take(12).collect()
}

/// How long something has lasted, for people.
pub(super) fn ago(time: Duration) -> String {
    indicatif::HumanDuration(time).to_string()
}

/// A failure in a document, on one line of a table.
pub(super) fn error_cell(error: &Why) -> String {
    const MOST: usize = 60;
    let message = error.message.split_whitespace().collect::<Vec<_>>().join(" ");
    let cut: String = message.chars().take(MOST).collect();
    let more = if cut.len() < message.len() { "..." } else { "" };
    format!("{}: {}{more}", plain(&error.class), plain(&cut))
}

/// What is known of one thing, a line each.
pub(super) fn lines(known: &[(&str, String)]) -> String {
    known.iter().map(|(what, value)| format!("{what:>14}  {value}\n")).collect()
}

/// A shape as `[2000, 16]`.
pub(super) fn shape(shape: &[u64]) -> String {
    format!("{shape:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align() {
        let rows = vec![vec!["t1".into(), "12".into()], vec!["table".into(), "7".into()]];
        assert_eq!(table(&["name", "rows"], &rows), "name   rows\nt1       12\ntable     7\n");
    }

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
    }
}
