//! From every crate's errors to what the command line promises: a kind, a stable class, one message, an exit code.

use std::fmt;

use weighbridge_converter::error::{Class as ReadClass, ReadError};
use weighbridge_converter::shape::select::SelectError;
use weighbridge_queue::error::Error as QueueError;
use weighbridge_schemas::error::{DocumentError, Kind};
use weighbridge_snapshots::error::{Class as StoreClass, StoreError};
use weighbridge_snapshots::sign::KeyError;

/// Exit codes of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// It failed.
    Failed = 1,
    /// The command line or a policy makes no sense.
    Usage = 2,
    /// A gate rejected the snapshot.
    Rejected = 3,
    /// The checkpoint is bad or not supported.
    BadCheckpoint = 4,
    /// Something outside cannot be reached or written.
    Unreachable = 5,
    /// There is no such thing.
    NotFound = 6,
    /// Bytes are not what their name says.
    Integrity = 7,
    /// Ctrl-C or SIGTERM.
    Interrupted = 130,
}

/// A command that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What the failure asks for.
    pub kind: Kind,
    /// The stable class.
    pub class: &'static str,
    /// What failed, at what, and the way out: one line.
    pub message: String,
    /// The exit code.
    pub exit: Exit,
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A permanent failure of the command line itself.
    #[must_use]
    pub fn usage(message: impl fmt::Display) -> Self {
        Self { kind: Kind::Permanent, class: "usage", message: message.to_string(), exit: Exit::Usage }
    }

    /// A failure inside: a task that did not come back.
    #[must_use]
    pub fn internal(what: &str, error: impl fmt::Display) -> Self {
        let message = format!("{what}: {error}");
        Self { kind: Kind::Transient, class: "internal", message, exit: Exit::Failed }
    }

    /// Says what was being done, in front of the message.
    #[must_use]
    pub fn while_doing(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What comes from outside must not steer a terminal, nor forge lines of a log.
        let mut rest = self.message.as_str();
        while let Some(at) = rest.find(char::is_control) {
            let (plain, behind) = rest.split_at(at);
            f.write_str(plain)?;
            let mut behind = behind.chars();
            if let Some(control) = behind.next() {
                write!(f, "{}", control.escape_default())?;
            }
            rest = behind.as_str();
        }
        f.write_str(rest)
    }
}

impl std::error::Error for Failure {}

/// The exit code for a checkpoint that cannot be read.
fn exit(class: ReadClass) -> Exit {
    match class {
        ReadClass::NotFound => Exit::NotFound,
        ReadClass::Scratch => Exit::Failed,
        ReadClass::Unreachable | ReadClass::AccessDenied => Exit::Unreachable,
        _ => Exit::BadCheckpoint,
    }
}

/// Whether `class`, as a document has it, says that a checkpoint is bad, or absent.
#[must_use]
pub fn is_of_checkpoint(class: &str) -> bool {
    let known = ReadClass::ALL.iter().find(|known| known.as_str() == class);
    known.is_some_and(|&known| matches!(exit(known), Exit::BadCheckpoint | Exit::NotFound))
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let exit = exit(error.class());
        Self { kind: error.kind(), class: error.class().as_str(), message: error.to_string(), exit }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let exit = match error.class() {
            StoreClass::NotFound => Exit::NotFound,
            StoreClass::Integrity => Exit::Integrity,
            StoreClass::DiskFull | StoreClass::Conflict | StoreClass::Refused | StoreClass::Hook => {
                Exit::Failed
            }
            StoreClass::ReadOnly
            | StoreClass::Unreachable
            | StoreClass::Host
            | StoreClass::AccessDenied
            | StoreClass::Unfit => Exit::Unreachable,
            StoreClass::BadLocation => Exit::Usage,
        };
        Self { kind: error.kind(), class: error.class().as_str(), message: error.to_string(), exit }
    }
}

impl From<SelectError> for Failure {
    fn from(error: SelectError) -> Self {
        let (class, exit) = match error {
            SelectError::Unreadable(error) | SelectError::BadRowList(error) => return error.into(),
            SelectError::BadName { .. }
            | SelectError::Collision { .. }
            | SelectError::OddWidth { .. }
            | SelectError::NotPrunable { .. } => ("policy_mismatch", Exit::Usage),
            SelectError::NothingLeft { .. } => (ReadClass::NoTensors.as_str(), Exit::BadCheckpoint),
            SelectError::RowTooWide { .. } => (ReadClass::LimitExceeded.as_str(), Exit::BadCheckpoint),
        };
        Self { kind: Kind::Permanent, class, message: error.to_string(), exit }
    }
}

impl From<DocumentError> for Failure {
    fn from(error: DocumentError) -> Self {
        Self { kind: Kind::Permanent, class: "bad_document", message: error.to_string(), exit: Exit::Usage }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        Self { kind: Kind::Permanent, class: "bad_key", message: error.to_string(), exit: Exit::Usage }
    }
}

impl From<QueueError> for Failure {
    fn from(error: QueueError) -> Self {
        let (class, exit) = match error {
            QueueError::LeaseLost { .. } => ("lease_lost", Exit::Failed),
            QueueError::TakenBack { .. } => ("taken_back", Exit::Failed),
            QueueError::Unreachable { .. } => ("queue_unreachable", Exit::Unreachable),
            QueueError::UnknownOutcome { .. } => ("queue_unknown_outcome", Exit::Unreachable),
            QueueError::Refused { .. } => ("queue_refused", Exit::Usage),
        };
        Self { kind: error.kind(), class, message: error.to_string(), exit }
    }
}
