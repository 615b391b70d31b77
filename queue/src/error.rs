//! What goes wrong with a queue or a spool.

use weighbridge_schemas::error::Kind;

/// A failure of a queue or a spool: what happened, to what, and the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The lease has ended, and somebody else may have the message.
    #[error("message {id}: the lease has ended; somebody else may have the message now")]
    LeaseLost {
        /// The message.
        id: String,
    },
    /// The broker took the message back though its lease had not ended: the connection was lost, or it was held for
    /// longer than the broker allows. Whoever is at it may go on: it comes again, to whoever asks.
    #[error("message {id}: the broker took it back: {why}")]
    TakenBack {
        /// The message.
        id: String,
        /// Why.
        why: String,
    },
    /// The queue or spool cannot be reached or written at the moment.
    #[error("{what}: {why}")]
    Unreachable {
        /// Which queue or spool.
        what: String,
        /// Why, and the way out.
        why: String,
    },
    /// It may have been done or not.
    #[error("{what}: {why}; it may have been done or not")]
    UnknownOutcome {
        /// Which queue.
        what: String,
        /// Why that is not known.
        why: String,
    },
    /// It is not taken, now or later: too large, no such place, a damaged file.
    #[error("{what}: {why}")]
    Refused {
        /// The queue, spool or message.
        what: String,
        /// Why, and the way out.
        why: String,
    },
}

impl Error {
    /// What the failure asks for.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::LeaseLost { .. } | Self::TakenBack { .. } => Kind::Conflict,
            Self::Unreachable { .. } => Kind::Transient,
            Self::UnknownOutcome { .. } => Kind::UnknownOutcome,
            Self::Refused { .. } => Kind::Permanent,
        }
    }
}
