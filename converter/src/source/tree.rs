//! Everything below a checkpoint's folder: the files that may be published beside its tensors.
//!
//! Links to files are listed, and [`Source::file`](super::Source::file) checks where they lead; links to
//! folders are not followed, so the walk ends and stays inside. Pipes, sockets and devices are never opened.

use std::path::Path;

use weighbridge_schemas::limits;
use weighbridge_schemas::snapshot::path_fault;

use crate::error::{Class, ReadError, Result};

/// The files of a folder and its sub-folders that were wanted.
#[derive(Debug, Default)]
pub struct Tree {
    /// Their paths relative to the folder, with `/` between parts, sorted.
    pub files: Vec<String>,
    /// What was passed over, a line each, for people.
    pub notes: Vec<String>,
}

/// Lists the files below `folder` that `wanted` picks by their paths.
///
/// # Errors
/// [`Class::Unreadable`]; [`Class::LimitExceeded`] for a folder of more than [`limits::FILES`] entries, or more than
/// [`limits::ARTIFACTS`] files that are wanted.
pub(super) fn list(folder: &Path, wanted: &mut dyn FnMut(&str) -> bool) -> Result<Tree> {
    let mut walk = Walk { wanted, tree: Tree::default(), seen: 0, unnamed: 0, passed_over: 0 };
    walk.folder(folder, "", 1)?;
    Ok(walk.finish())
}

/// The files among `names`, all those below a prefix, that `wanted` picks by their paths.
///
/// # Errors
/// As [`list`].
pub(super) fn of_names(names: Vec<String>, wanted: &mut dyn FnMut(&str) -> bool) -> Result<Tree> {
    let mut walk = Walk { wanted, tree: Tree::default(), seen: 0, unnamed: 0, passed_over: 0 };
    for name in names {
        if (walk.wanted)(&name) {
            walk.file(name, true)?;
        }
    }
    Ok(walk.finish())
}

/// How many files and folders that are passed over are named.
const NOTES: usize = 20;

struct Walk<'w> {
    wanted: &'w mut dyn FnMut(&str) -> bool,
    tree: Tree,
    seen: usize,
    unnamed: u64,
    passed_over: usize,
}

impl Walk<'_> {
    /// Goes through one folder, whose path ends in a `/` where it has one; `parts` is how many parts the paths in it
    /// have, which bounds the depth of the recursion.
    fn folder(&mut self, folder: &Path, prefix: &str, parts: usize) -> Result<()> {
        let unreadable = |error: std::io::Error| {
            let error = ReadError::new(Class::Unreadable, format!("the folder cannot be read: {error}"));
            if prefix.is_empty() { error } else { error.in_file(prefix) }
        };
        for entry in std::fs::read_dir(folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            self.seen += 1;
            if self.seen > limits::FILES {
                let detail = format!("the folder and its sub-folders hold more than {} files", limits::FILES);
                return Err(ReadError::new(Class::LimitExceeded, detail));
            }
            let Ok(name) = entry.file_name().into_string() else {
                self.unnamed += 1;
                continue;
            };
            let (path, place) = (format!("{prefix}{name}"), entry.path());
            let kind = entry.file_type().map_err(unreadable)?;
            if kind.is_dir() && parts < limits::ARTIFACT_PATH_PARTS {
                self.folder(&place, &format!("{path}/"), parts + 1)?;
            } else if kind.is_dir() {
                self.pass_over(&path, "the folder lies too deep");
            } else if kind.is_symlink() && place.is_dir() {
                self.pass_over(&path, "a link to a folder is not followed");
            } else if (self.wanted)(&path) {
                self.file(path, kind.is_file() || kind.is_symlink())?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Tree {
        let Self { mut tree, unnamed, passed_over, .. } = self;
        if unnamed > 0 {
            tree.notes.push(format!("{unnamed} files or folders whose names are not UTF-8 were passed over"));
        }
        if passed_over > NOTES {
            tree.notes.push(format!("{} more were passed over", passed_over - NOTES));
        }
        tree.files.sort_unstable();
        tree
    }

    fn file(&mut self, path: String, regular: bool) -> Result<()> {
        if !regular {
            self.pass_over(&path, "it is no regular file");
        } else if let Some(why) = path_fault(&path) {
            self.pass_over(&path, why);
        } else if self.tree.files.len() < limits::ARTIFACTS {
            self.tree.files.push(path);
        } else {
            let detail = format!(
                "more than {} files match the policy's artifacts; exclude some, or pack them into one",
                limits::ARTIFACTS
            );
            return Err(ReadError::new(Class::LimitExceeded, detail));
        }
        Ok(())
    }

    fn pass_over(&mut self, path: &str, why: &str) {
        if self.passed_over < NOTES {
            self.tree.notes.push(format!("{path:?} was passed over: {why}"));
        }
        self.passed_over += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_are_listed_and_whatever_else_lies_there_is_passed_over() {
        let outside = tempfile::tempdir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("sub/deeper")).unwrap();
        for name in ["b", "a", "sub/c", "sub/deeper/.hidden", "not wanted", "back\\slash"] {
            std::fs::write(at(name), name).unwrap();
        }
        symlink("a", at("link")).unwrap();
        symlink(outside.path(), at("out")).unwrap();
        symlink(".", at("sub/around")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        std::fs::write(folder.path().join(std::ffi::OsStr::from_bytes(b"\xff")), "").unwrap();
        let tree = list(folder.path(), &mut |path| path != "not wanted").unwrap();
        assert_eq!(tree.files, ["a", "b", "link", "sub/c", "sub/deeper/.hidden"]);
        let mut notes = tree.notes;
        notes.sort();
        for (note, word) in
            notes.iter().zip(["\"back", "\"out\"", "\"pipe\"", "\"sub/around\"", "1 files or"])
        {
            assert!(note.starts_with(word), "{note}");
        }
        assert_eq!(notes.len(), 5, "{notes:?}");
    }

    #[test]
    fn depth_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let deep = vec!["d"; limits::ARTIFACT_PATH_PARTS + 3].join("/");
        std::fs::create_dir_all(folder.path().join(&deep)).unwrap();
        std::fs::write(folder.path().join(&deep).join("file"), "").unwrap();
        let tree = list(folder.path(), &mut |_| true).unwrap();
        assert!(tree.files.is_empty());
        assert!(tree.notes.len() == 1 && tree.notes[0].contains("too deep"), "{:?}", tree.notes);
    }
}
