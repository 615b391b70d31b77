//! What goes wrong between us and a store, or a folder that snapshots are fetched into.

use std::error::Error as _;
use std::fmt;
use std::io;

use rustix::io::Errno;

use weighbridge_schemas::error::Kind;

/// A stable class of failure; the names are part of the command line's contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// An object, snapshot, channel or store that is not there.
    NotFound,
    /// Bytes that do not have the hash or form they must have.
    Integrity,
    /// The disk is full.
    DiskFull,
    /// The store, or folder, may not be written.
    ReadOnly,
    /// The store does not answer, or fails.
    Unreachable,
    /// The disk, or the system, of the machine that snapshots are fetched to fails.
    Host,
    /// The store does not let these credentials in, or not from here, or not with this clock.
    AccessDenied,
    /// The store cannot do what has to be relied on.
    Unfit,
    /// Somebody else moved the channel at the same time, again and again.
    Conflict,
    /// The store's URL makes no sense, or names a kind that is not supported.
    BadLocation,
    /// The request contradicts what the store holds.
    Refused,
    /// A command that a serving host runs around a swap failed.
    Hook,
}

impl Class {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Integrity => "integrity",
            Self::DiskFull => "disk_full",
            Self::ReadOnly => "read_only",
            Self::Unreachable => "store_unreachable",
            Self::Host => "host_failed",
            Self::AccessDenied => "store_access_denied",
            Self::Unfit => "store_unfit",
            Self::Conflict => "conflict",
            Self::BadLocation => "bad_location",
            Self::Refused => "refused",
            Self::Hook => "hook_failed",
        }
    }
}

/// A failure: its class, the object or path, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreError {
    class: Class,
    object: String,
    why: String,
}

/// The result of working with a store.
pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    /// A failure of `class` at `object` (a key, path or name), with the reason and the way out.
    #[must_use]
    pub fn new(class: Class, object: impl fmt::Display, why: impl Into<String>) -> Self {
        Self { class, object: object.to_string(), why: why.into() }
    }

    /// The same, and what went wrong beside it.
    pub(crate) fn and(mut self, beside: &Self) -> Self {
        self.why = format!("{}; and {beside}", self.why);
        self
    }

    /// The stable class.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.class
    }

    /// The key, path or name at fault.
    #[must_use]
    pub fn object(&self) -> &str {
        &self.object
    }

    /// What the failure asks for.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self.class {
            Class::DiskFull | Class::Unreachable | Class::Host | Class::Hook => Kind::Transient,
            Class::Conflict => Kind::Conflict,
            Class::NotFound
            | Class::Integrity
            | Class::ReadOnly
            | Class::AccessDenied
            | Class::Unfit
            | Class::BadLocation
            | Class::Refused => Kind::Permanent,
        }
    }

    /// From a failed store request about `object`.
    pub(crate) fn store(object: impl fmt::Display, error: &object_store::Error) -> Self {
        if matches!(error, object_store::Error::NotFound { .. }) {
            return Self::new(Class::NotFound, object, "there is no such object in the store");
        }
        if matches!(
            error,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }
        ) {
            return Self::new(Class::ReadOnly, object, format!("the store denies it: {error}"));
        }
        let mut cause = error.source();
        while let Some(source) = cause {
            if let Some(io) = source.downcast_ref::<io::Error>() {
                return Self::io(object, io);
            }
            cause = source.source();
        }
        Self::new(Class::Unreachable, object, error.to_string())
    }

    /// From a failed file operation at `object`, which is this machine's own, and no store's.
    pub(crate) fn own(object: impl fmt::Display, error: &io::Error) -> Self {
        let failed = Self::io(object, error);
        if failed.class != Class::Unreachable {
            return failed;
        }
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        let way_out = match errno {
            Some(Errno::MFILE | Errno::NFILE) => "raise the limit on open files (ulimit -n)",
            Some(Errno::NOMEM | Errno::AGAIN) => "see the limits on this process's memory and threads",
            Some(Errno::STALE) => "mount the file system anew, or name another folder",
            _ => "the disk, or its file system, fails: see the system's log, or name another folder",
        };
        Self::new(Class::Host, failed.object, format!("{error}; {way_out}"))
    }

    /// From a failed file operation at `object`.
    pub(crate) fn io(object: impl fmt::Display, error: &io::Error) -> Self {
        use io::ErrorKind as K;
        let (class, way_out) = match error.kind() {
            K::NotFound => (Class::NotFound, ""),
            K::StorageFull | K::QuotaExceeded => (Class::DiskFull, "; free some space and run it again"),
            K::FileTooLarge => (Class::DiskFull, "; raise the limit (ulimit -f) and run it again"),
            K::ReadOnlyFilesystem => (Class::ReadOnly, "; it has to be writable, or name another place"),
            K::PermissionDenied => (Class::ReadOnly, "; see to it that this user may read and write there"),
            K::NotADirectory
            | K::IsADirectory
            | K::DirectoryNotEmpty
            | K::AlreadyExists
            | K::CrossesDevices
            | K::InvalidFilename
            | K::InvalidInput => (Class::Refused, "; something else is in the way there"),
            _ => (Class::Unreachable, ""),
        };
        Self::new(class, object, format!("{error}{way_out}"))
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.object.as_str() {
            "" => write!(f, "\"\": {}", self.why),
            object => write!(f, "{object}: {}", self.why),
        }
    }
}

impl std::error::Error for StoreError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_on_the_host_itself_is_not_said_of_the_store() {
        let of = |errno: Errno| StoreError::own("DIR", &errno.into());
        for (errno, way_out) in [(Errno::IO, "log"), (Errno::STALE, "mount"), (Errno::MFILE, "ulimit -n")] {
            let error = of(errno);
            assert_eq!((error.class(), error.kind()), (Class::Host, Kind::Transient));
            assert!(error.to_string().contains(way_out), "{error}");
        }
        assert_eq!((of(Errno::NOSPC).class(), of(Errno::ROFS).class()), (Class::DiskFull, Class::ReadOnly));
        assert_eq!(StoreError::io("key", &Errno::IO.into()).class(), Class::Unreachable);
    }
}
