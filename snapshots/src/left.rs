//! What processes that were killed leave in a store's folder: files that never got their name, and folders that `gc`
//! has emptied.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Whether there is a file in `folder`, or below it. What cannot be read may hold one.
pub(crate) fn holds_a_file(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return true };
    let mut folders = Vec::new();
    for entry in entries {
        match entry.and_then(|entry| Ok((entry.file_type()?, entry.path()))) {
            Ok((kind, path)) if kind.is_dir() => folders.push(path),
            _ => return true,
        }
    }
    folders.iter().any(|folder| holds_a_file(folder))
}

/// The files below `folder` that never got their name, `NAME#1` and so on, and that were written last before `before`
/// (nanoseconds since 1970). Where `remove` says so they are removed, and so are folders without anything in them.
pub(crate) fn files(folder: &Path, before: i128, remove: bool) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    look(folder, before, remove, &mut found)?;
    Ok(found)
}

fn look(folder: &Path, before: i128, remove: bool, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            // By when it was before anything in it went.
            let old = is_old(&path, before);
            look(&path, before, remove, found)?;
            if remove && old {
                // One that has something in it stays.
                let _ = fs::remove_dir(&path);
            }
        } else if is_staged(&path) && is_old(&path, before) {
            if remove {
                fs::remove_file(&path)?;
            }
            found.push(path);
        }
    }
    Ok(())
}

fn is_staged(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let number = name.rsplit_once('#').map_or("", |(_, number)| number);
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_old(path: &Path, before: i128) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| {
        i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec()) < before
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_name_goes_once_it_is_old_and_what_is_empty_too() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let is = |name: &str| fs::metadata(at(name)).is_ok();
        for name in ["a/b", "c/d", "e/f"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        for name in ["a/b/x#1", "a/b/x#y", "a/x#", "c/d/x"] {
            fs::write(at(name), "").unwrap();
        }
        assert!(!holds_a_file(&at("e")) && holds_a_file(&at("c")) && holds_a_file(&at("absent")));
        let (past, future) = (0, i128::MAX);
        assert!(files(folder.path(), past, true).unwrap().is_empty());
        assert_eq!(files(folder.path(), future, false).unwrap(), [at("a/b/x#1")]);
        assert!(is("a/b/x#1") && is("e/f"));
        assert_eq!(files(folder.path(), future, true).unwrap(), [at("a/b/x#1")]);
        assert!(!is("a/b/x#1") && !is("e"));
        assert!(is("a/b/x#y") && is("a/x#") && is("c/d/x"));
        assert!(files(&at("absent"), future, true).unwrap().is_empty());
    }
}
