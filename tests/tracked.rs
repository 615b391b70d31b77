//! The files of the repository, as a list of paths.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The files that git tracks, and those it would track, relative to the root and with `/` between parts; where
/// there is no git, all files that no build wrote.
pub(crate) fn files() -> Vec<String> {
    let mut files = from_git().unwrap_or_else(from_folders);
    files.retain(|file| root().join(file).is_file());
    files.sort_unstable();
    files
}

fn from_git() -> Option<Vec<String>> {
    let listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").arg("-C").arg(root()).args(listing).output().ok()?;
    let text =
        String::from_utf8(output.stdout).ok().filter(|text| output.status.success() && !text.is_empty())?;
    Some(text.split_terminator('\0').map(str::to_owned).collect())
}

fn from_folders() -> Vec<String> {
    const BUILT: [&str; 5] = [".git", "target", "weighbridge-data", "served", "__pycache__"];
    let mut folders = vec![PathBuf::new()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).into_iter().flatten().flatten() {
            let path = folder.join(entry.file_name());
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            match path.to_str() {
                // `.git` may be a file.
                Some(_) if BUILT.iter().any(|built| path.ends_with(built)) => {}
                Some(_) if is_folder => folders.push(path),
                Some(name) => files.push(name.to_owned()),
                None => {}
            }
        }
    }
    files
}

/// The text of `file`; `None` where it is not UTF-8.
pub(crate) fn text(file: &str) -> Option<String> {
    std::fs::read_to_string(root().join(file)).ok()
}
