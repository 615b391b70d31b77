//! The repository's files, and programs of others that read some of them: installed once into cargo's target folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

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

/// Says that something is not checked here. What a test prints by a macro is shown only where it fails.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
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

/// The folder with a Python package and what it needs; `None`, and a line that says so, where it cannot be had.
pub(crate) fn python_package(package: &str) -> Option<PathBuf> {
    installed(package, |folder| {
        let mut install = Command::new("python3");
        install.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"]);
        install.arg(folder).arg(package);
        install
    })
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

/// A folder of cargo's target folder that `install` fills, once for all tests and runs.
fn installed(name: &str, install: impl Fn(&Path) -> Command) -> Option<PathBuf> {
    // target/PROFILE/deps/deploy-HASH
    let test = std::env::current_exe().unwrap();
    let servers = test.ancestors().nth(3).unwrap().join("servers");
    std::fs::create_dir_all(&servers).unwrap();
    let lock = File::create(servers.join(format!("{name}.lock"))).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let folder = servers.join(name);
    if !folder.exists() {
        // One that was interrupted is begun anew.
        let unfinished = servers.join(format!("{name}.unfinished"));
        let _ = std::fs::remove_dir_all(&unfinished);
        let done = install(&unfinished).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !done.is_ok_and(|status| status.success()) {
            let _ = std::fs::remove_dir_all(&unfinished);
            skipped(&format!("{name} cannot be installed here"));
            return None;
        }
        std::fs::rename(unfinished, &folder).unwrap();
    }
    Some(folder)
}
