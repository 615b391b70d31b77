//! The repository's files, and programs of others that read some of them: installed once into cargo's target folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use weighbridge_tests::packages::installed;
pub(crate) use weighbridge_tests::packages::{python_package, skipped};

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The text of a file of the repository.
#[track_caller]
pub(crate) fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The documents of a YAML text.
#[track_caller]
pub(crate) fn yaml(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
}

/// The strings of a list.
#[track_caller]
pub(crate) fn strings(list: &Value) -> Vec<&str> {
    list.as_array()
        .unwrap_or_else(|| panic!("{list} is no list"))
        .iter()
        .map(|item| item.as_str().unwrap())
        .collect()
}

/// Reads a command line of weighbridge's as the program itself does.
#[track_caller]
pub(crate) fn check_command_line(arguments: &[&str]) {
    let line = ["weighbridge"].iter().chain(arguments);
    if let Err(error) = weighbridge::cli::definition().try_get_matches_from(line) {
        panic!("{arguments:?}: {error}");
    }
}

/// Whether a program is there.
pub(crate) fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// What a program said; it has to end well.
#[track_caller]
pub(crate) fn succeeds(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    output
}

/// All that a program said.
pub(crate) fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A program out of a Debian package, which is not installed; `None`, and a line that says so, where it cannot be had.
pub(crate) fn debian_program(package: &str, program: &str) -> Option<PathBuf> {
    let folder = installed(package, |folder| {
        let mut install = Command::new("sh");
        install.arg("-euc").arg(format!(
            "mkdir {0}; cd {0}; apt-get download --quiet {package}; \
             dpkg-deb --fsys-tarfile ./*.deb | tar --extract ./{program}; rm ./*.deb",
            folder.display()
        ));
        install
    });
    folder.map(|folder| folder.join(program))
}
