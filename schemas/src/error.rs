//! What goes wrong when a document is parsed, and the four kinds of failure that every crate maps its errors to.

/// What a failure asks of whoever meets it. Every error of every Weighbridge crate has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Trying again later may succeed.
    Transient,
    /// Trying again with the same input fails again.
    Permanent,
    /// Somebody else won a race: read, then decide.
    Conflict,
    /// It may or may not have happened: read back and recognise one's own.
    UnknownOutcome,
}

impl Kind {
    /// The stable name, as it stands in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::Permanent => "permanent",
            Self::Conflict => "conflict",
            Self::UnknownOutcome => "unknown_outcome",
        }
    }
}

/// A document, name or id that is not what it should be. Always [`Kind::Permanent`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// A name holds characters, or a length, that names may not have.
    #[error(
        "{what} {name:?} is not a valid name: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot"
    )]
    BadName {
        /// What the name is of: "model", "channel", ...
        what: &'static str,
        /// The name as given, shortened.
        name: String,
    },
    /// A tensor name that could mislead a reader of file names or logs.
    #[error("tensor name {name:?} is refused: {why}")]
    UnsafeTensorName {
        /// The name as given, shortened.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An id that is not 64 lower-case hexadecimal digits.
    #[error("{what} {text:?} is not 64 lower-case hexadecimal digits")]
    BadId {
        /// What the id is of.
        what: &'static str,
        /// The text as given, shortened.
        text: String,
    },
    /// A document that does not parse, or says something impossible.
    #[error("{document}: {why}")]
    Malformed {
        /// Which document: "policy", "snapshot manifest", ...
        document: &'static str,
        /// What is wrong, and where.
        why: String,
    },
    /// A document beyond a documented limit (see [`crate::limits`]).
    #[error("{document} is over a limit: {why}")]
    OverLimit {
        /// Which document.
        document: &'static str,
        /// Which limit, with both figures.
        why: String,
    },
}

impl DocumentError {
    /// A malformed `document`, with the reason.
    pub(crate) fn malformed(document: &'static str, why: impl std::fmt::Display) -> Self {
        Self::Malformed { document, why: why.to_string() }
    }
}

/// Shortens untrusted text for a message: at most 80 characters.
#[must_use]
pub fn shorten(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text.to_owned(),
    }
}
