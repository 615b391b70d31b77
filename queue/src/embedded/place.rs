//! The folder of an embedded queue: made, and refused on file systems of a network.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::statfs;

use super::file::Fault;
use crate::error::Error;

/// The database within its folder.
const FILE: &str = "queue.sqlite3";

/// File systems that several machines share, or may share, by the number that `statfs` gives them. A database in WAL
/// mode needs memory that all its processes share, and locks that hold.
const NETWORK: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x0102_1997, "9P"),
    (0x6573_5546, "FUSE"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x00C3_6400, "CephFS"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "AFS"),
    (0x7461_636F, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x7375_7245, "Coda"),
    (0x564C, "NCP"),
    (0x786F_4256, "VirtualBox's shared folders"),
    (0xBACB_ACBC, "VMware's shared folders"),
    (0x2003_0528, "OrangeFS"),
    (0xAAD7_AAEA, "PanFS"),
    (0x1983_0326, "BeeGFS"),
];

/// Where an embedded queue lies.
#[derive(Debug, Clone)]
pub(super) struct Place {
    folder: PathBuf,
    /// For how long a call waits for another process.
    pub(super) patience: Duration,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue embedded:{}", self.folder.display())
    }
}

impl Place {
    /// Makes the folder where it is absent.
    pub(super) fn make(folder: &Path, patience: Duration) -> Result<Self, Error> {
        // The working folder may change; the queue stays.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let place = Self { folder, patience };
        make_durably(&place.folder)
            .map_err(|error| place.unreachable(format!("cannot make its folder: {error}")))?;
        place.check_local()?;
        Ok(place)
    }

    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    fn check_local(&self) -> Result<(), Error> {
        let kind = statfs(&self.folder)
            .map_err(|error| self.unreachable(format!("cannot read its folder: {error}")))?;
        let Some(name) = network(i128::from(kind.f_type)) else { return Ok(()) };
        Err(self.refused(format!(
            "its folder lies on a file system of a network ({name}), where an embedded queue is not safe; \
             put it on a disk of this machine"
        )))
    }

    pub(super) fn refused(&self, why: String) -> Error {
        Error::Refused { what: self.to_string(), why }
    }

    fn unreachable(&self, why: String) -> Error {
        Error::Unreachable { what: self.to_string(), why }
    }

    /// What a fault means to whoever uses the queue; `writes`: something may have been changed.
    pub(super) fn error(&self, fault: &Fault, writes: bool) -> Error {
        use rusqlite::ErrorCode as Code;
        let error = match fault {
            Fault::Gone => return self.unreachable("its file is gone; is its disk mounted?".to_owned()),
            Fault::Row(why) => return self.damaged(why),
            Fault::Newer(version) => {
                return self.refused(format!(
                    "its file is of version {version}, which a newer Weighbridge wrote; use that one, or another folder"
                ));
            }
            Fault::Foreign => {
                return self
                    .refused(format!("its {FILE} is a database of something else; use another folder"));
            }
            Fault::Sqlite(error) => error,
        };
        match error.sqlite_error_code() {
            Some(Code::DatabaseBusy | Code::DatabaseLocked) => self.unreachable(format!(
                "another process has been writing to it for more than {:?}; try again, and see that none is stopped \
                 while it writes",
                self.patience
            )),
            Some(Code::DatabaseCorrupt | Code::NotADatabase) => self.damaged(&error.to_string()),
            Some(Code::DiskFull) => self.unreachable("its disk is full; make room".to_owned()),
            Some(Code::ReadOnly | Code::PermissionDenied | Code::CannotOpen) => {
                self.unreachable(format!("{error}; is it there, and may it be written by this user?"))
            }
            Some(Code::SystemIoFailure) if writes => {
                let why = format!("its disk fails ({error})");
                Error::UnknownOutcome { what: self.to_string(), why }
            }
            Some(Code::ConstraintViolation | Code::TypeMismatch | Code::TooBig) => self.damaged(&error.to_string()),
            Some(_) => self.unreachable(error.to_string()),
            // Not SQLite's own: a table or a value that is not as it was made.
            None => self.damaged(&error.to_string()),
        }
    }

    fn damaged(&self, why: &str) -> Error {
        self.refused(format!(
            "its file is damaged, or no queue ({why}); stop what uses it, move {FILE}* out of the folder, and hand \
             over again what was on it"
        ))
    }
}

/// Whether a database lies in `folder`.
pub(super) fn is_there(folder: &Path) -> Result<bool, Error> {
    folder.join(FILE).try_exists().map_err(|error| Error::Unreachable {
        what: format!("queue embedded:{}", folder.display()),
        why: format!("cannot look into its folder: {error}"),
    })
}

/// The name of a file system of a network. `statfs` gives 32 bits, which some machines extend by their sign.
fn network(kind: i128) -> Option<&'static str> {
    NETWORK.iter().find(|(magic, _)| i128::from(*magic) == kind & 0xFFFF_FFFF).map(|(_, name)| *name)
}

/// Makes a folder, its parents too, for its owner and, where the umask lets it, its group; each is there after a power
/// cut.
pub(crate) fn make_durably(folder: &Path) -> io::Result<()> {
    match make(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).ok_or(error)?;
            make_durably(parent)?;
            make(folder)
        }
        made => made,
    }
}

fn make(folder: &Path) -> io::Result<()> {
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match DirBuilder::new().mode(0o770).create(folder) {
        Ok(()) => File::open(parent)?.sync_all(),
        Err(_) if std::fs::metadata(folder).is_ok_and(|there| there.is_dir()) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_networks_are_known_by_number() {
        assert_eq!(network(0x6969), Some("NFS"));
        // CIFS on a machine that extends the sign.
        assert_eq!(network(-11_317_950), Some("CIFS"));
        for local in [0xEF53, 0x9123_683E, 0x5846_5342, 0x0102_1994, 0x794C_7630, 0x2FC1_2FC1] {
            assert_eq!(network(local), None);
        }
    }

    #[test]
    fn folders_are_made_for_their_owner_and_group() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a b").join("c");
        make_durably(&deep).unwrap();
        make_durably(&deep).unwrap();
        assert_eq!(std::fs::metadata(&deep).unwrap().permissions().mode() & 0o707, 0o700);
        // Where nothing can be made, although the parent is there.
        assert!(make_durably(Path::new("/proc/queue/of/ours")).is_err());
        std::fs::write(deep.join("f"), "").unwrap();
        assert!(make_durably(&deep.join("f")).is_err());
        assert!(make_durably(&deep.join("f").join("g")).is_err());
    }
}
