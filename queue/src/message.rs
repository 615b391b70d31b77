//! What is on a queue: a small body with an id, a class and a device. Tensor bytes never pass through here.

use std::time::Duration;

/// Longest id of a message, in bytes.
pub const ID_BYTES: usize = 200;

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Its own id, at most [`ID_BYTES`] long: sending again carries the same one.
    pub id: String,
    /// What the body is.
    pub kind: Kind,
    /// At most 1 MiB and a little ([`BODY_BYTES`]).
    pub body: Vec<u8>,
    /// Who goes first.
    pub priority: Priority,
    /// Who may take it.
    pub device: Device,
}

/// Largest body, in bytes: a checkpoint manifest, within another document.
pub const BODY_BYTES: usize = 3 << 20;

/// What a message's body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A checkpoint manifest, as a trainer wrote it: it may be anything.
    Checkpoint,
    /// An operator's request to publish a checkpoint again.
    Republish,
    /// The next step of a job.
    Step,
}

/// Who goes first: three classes, since not every broker has priorities of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Of priorities 0 to 2.
    Low,
    /// Of priorities 3 to 6.
    Normal,
    /// Of priorities 7 to 9.
    High,
}

/// Who may take a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Every worker.
    Any,
    /// Workers without a GPU.
    Cpu,
    /// Workers with a GPU; and when it has waited for so long since it was sent, every worker.
    Gpu {
        /// How long it waits.
        wait: Duration,
    },
}

impl Priority {
    /// The class of a manifest's priority, 0 to 9.
    #[must_use]
    pub const fn of(priority: u8) -> Self {
        match priority {
            0..=2 => Self::Low,
            3..=6 => Self::Normal,
            _ => Self::High,
        }
    }
}
