//! What is on a queue: a small body with an id, a class and a device. Tensor bytes never pass through here.

use std::time::Duration;

use crate::error::Error;

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

impl Message {
    /// Whether every queue can take it.
    ///
    /// # Errors
    /// [`Error::Refused`] where the id is empty or too long, or the body too large.
    pub fn check(&self) -> Result<(), Error> {
        let refused = |why| {
            let what = format!("message {:?}", weighbridge_schemas::error::shorten(&self.id));
            Err(Error::Refused { what, why })
        };
        if !(1..=ID_BYTES).contains(&self.id.len()) {
            return refused(format!("its id has {} bytes; send it with 1 to {ID_BYTES}", self.id.len()));
        }
        if self.body.len() > BODY_BYTES {
            return refused(format!("its body has {} bytes; at most {BODY_BYTES}", self.body.len()));
        }
        Ok(())
    }
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

impl Priority {
    /// The class of a checkpoint manifest's priority.
    #[must_use]
    pub const fn of(priority: u8) -> Self {
        match priority {
            0..=2 => Self::Low,
            3..=6 => Self::Normal,
            7.. => Self::High,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: &str, body: usize) -> Message {
        let (kind, priority) = (Kind::Step, Priority::Low);
        Message { id: id.to_owned(), kind, body: vec![0; body], priority, device: Device::Any }
    }

    #[test]
    fn what_is_too_large_is_refused() {
        assert_eq!(message(&"x".repeat(ID_BYTES), BODY_BYTES).check(), Ok(()));
        assert_eq!(message("é\n'", 0).check(), Ok(()));
        for wrong in [message("", 0), message(&"x".repeat(ID_BYTES + 1), 0), message("x", BODY_BYTES + 1)] {
            assert!(matches!(wrong.check(), Err(Error::Refused { .. })));
        }
    }

    #[test]
    fn a_manifests_priorities_are_three_classes() {
        let classes = (0..=9).map(Priority::of).collect::<Vec<_>>();
        let [low, normal, high] = [Priority::Low, Priority::Normal, Priority::High];
        assert_eq!(classes, [low, low, low, normal, normal, normal, normal, high, high, high]);
    }
}
