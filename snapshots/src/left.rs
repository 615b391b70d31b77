//! Folders of a store that `gc` has emptied.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

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

/// Removes folders below `folder` without anything in them in which nothing was done since `before` (nanoseconds since
/// 1970).
pub(crate) fn drop_empty(folder: &Path, before: i128) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let path = entry.path();
            // By when it was before anything in it went.
            let old = is_old(&path, before);
            drop_empty(&path, before)?;
            if old {
                // One that has something in it stays.
                let _ = fs::remove_dir(&path);
            }
        }
    }
    Ok(())
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
    fn what_is_empty_goes_once_it_is_old() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let is = |name: &str| fs::symlink_metadata(at(name)).is_ok();
        for name in ["a/b", "c/d", "e/f"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("c/d/x"), "").unwrap();
        assert!(!holds_a_file(&at("e")) && holds_a_file(&at("c")) && holds_a_file(&at("absent")));
        drop_empty(folder.path(), 0).unwrap();
        assert!(is("e/f"));
        drop_empty(folder.path(), i128::MAX).unwrap();
        assert!(!is("e") && !is("a") && is("c/d/x"));
        drop_empty(&at("absent"), i128::MAX).unwrap();
    }
}
