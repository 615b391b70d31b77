//! The audit log: who moved which channel, pinned what, or published again; done or refused. One JSON object a line,
//! appended to a file where one is named, and logged in any case.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use weighbridge_schemas::time::Timestamp;

use crate::clock;
use crate::error::{Failure, Result};

/// Where what is done by way of the API is written down.
#[derive(Debug, Default)]
pub struct Audit {
    file: Option<(PathBuf, Mutex<File>)>,
}

/// What somebody did, or was refused.
#[derive(Debug, Clone, Serialize)]
pub struct Deed<'a> {
    /// The method, such as `promote`.
    pub action: &'a str,
    /// The token's name.
    pub caller: &'a str,
    /// What the caller says of themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub said: Option<&'a str>,
    /// Where the request came from.
    pub from: SocketAddr,
    /// The model, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
    /// The channel, job, snapshot or letter that it is about.
    pub object: &'a str,
    /// What the object was before: of a channel, its snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What it is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// The caller's id of the request.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub request_id: &'a str,
    /// `done`, `unchanged` where it was so already, `repeated` where it was done for an earlier request of the same id,
    /// `interrupted`, or the class of the error.
    pub outcome: &'a str,
}

#[derive(Serialize)]
struct Line<'a> {
    when: Timestamp,
    #[serde(flatten)]
    deed: &'a Deed<'a>,
}

impl Audit {
    /// Appends to the file at `path`, made where it is absent.
    ///
    /// # Errors
    /// Where it cannot be opened: exit code 2.
    pub fn open(path: &Path) -> Result<Self> {
        let file = append(path)
            .map_err(|error| Failure::usage(format!("{}: the audit log: {error}", path.display())))?;
        Ok(Self { file: Some((path.to_path_buf(), Mutex::new(file))) })
    }

    /// Writes one deed down.
    pub fn note(&self, deed: &Deed<'_>) {
        // Names and numbers alone: nothing in it can fail.
        let mut line = serde_json::to_string(&Line { when: clock::now(), deed }).unwrap_or_default();
        tracing::info!(target: "weighbridge::audit", "{line}");
        let Some((path, file)) = &self.file else { return };
        line.push('\n');
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = again(path, &mut file).and_then(|()| {
            // One write: lines of processes that share the file are not mixed.
            file.write_all(line.as_bytes())
        });
        if let Err(error) = written {
            tracing::error!(%error, line, "a line could not be written to the audit log");
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Opens the log again where another file, or none, is in its place: it was moved away to be kept.
fn again(path: &Path, file: &mut File) -> io::Result<()> {
    let known = file.metadata()?;
    let there = std::fs::metadata(path).ok();
    if there.is_none_or(|there| (there.dev(), there.ino()) != (known.dev(), known.ino())) {
        *file = append(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deed_is_a_line_whatever_its_names_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let deed = Deed {
            action: "promote",
            caller: "x\nforged",
            said: None,
            from: "127.0.0.1:1".parse().unwrap(),
            model: Some("dlrm"),
            object: "dlrm@prod",
            before: Some("a".into()),
            after: None,
            request_id: "",
            outcome: "done",
        };
        for _ in 0..2 {
            Audit::open(&path).unwrap().note(&deed);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((&lines[0]["caller"], &lines[1]["before"]), (&"x\nforged".into(), &"a".into()));
        assert!(lines[0].get("after").is_none() && lines[0]["when"].is_string());
    }

    #[test]
    fn a_log_that_was_moved_away_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (path, kept) = (folder.path().join("audit.jsonl"), folder.path().join("audit.1"));
        let audit = Audit::open(&path).unwrap();
        let deed = Deed {
            action: "hold",
            caller: "ops",
            said: None,
            from: "127.0.0.1:1".parse().unwrap(),
            model: None,
            object: "prod",
            before: None,
            after: None,
            request_id: "",
            outcome: "done",
        };
        audit.note(&deed);
        std::fs::rename(&path, &kept).unwrap();
        audit.note(&deed);
        audit.note(&deed);
        let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
        assert_eq!((lines(&kept), lines(&path)), (1, 2));
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o077, 0);
    }
}
