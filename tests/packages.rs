//! Programs of others that tests use, installed once into cargo's target folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Says that something is not checked here. What a test prints by a macro is shown only where it fails.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// The folder with a Python package and what it needs; `None`, and a line that says so, where it cannot be had.
#[must_use]
pub fn python_package(package: &str) -> Option<PathBuf> {
    installed(package, |folder| {
        let mut install = Command::new("python3");
        install.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"]);
        install.arg(folder).arg(package);
        install
    })
}

/// The folder with a package of npm's and what it needs; `None`, and a line that says so, where it cannot be had.
#[must_use]
pub fn node_package(package: &str) -> Option<PathBuf> {
    installed(package, |folder| {
        let mut install = Command::new("npm");
        install.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]);
        install.arg(folder).arg(package);
        install
    })
}

/// A folder of cargo's target folder that `install` fills, once for all tests and runs; `None`, and a line that says
/// so, where it cannot.
///
/// # Panics
/// Where the target folder cannot be found, or not be written.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
pub fn installed(name: &str, install: impl Fn(&Path) -> Command) -> Option<PathBuf> {
    // target/PROFILE/deps/TEST-HASH
    let test = std::env::current_exe().unwrap();
    let servers = test.ancestors().nth(3).unwrap().join("servers");
    std::fs::create_dir_all(&servers).unwrap();
    let lock = File::create(servers.join(format!("{name}.lock"))).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let folder = servers.join(name);
    if !folder.is_dir() {
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
