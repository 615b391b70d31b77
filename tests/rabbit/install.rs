//! Where RabbitMQ's programs are; they are installed where they are missing and that can be done without harm.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The package's programs themselves; those on the path become another user first.
const PROGRAMS: &str = "/usr/lib/rabbitmq/bin";
const PACKAGE: &str = "rabbitmq-server";
/// The folder whose lock says that another process installs already; only Debian and its kin have it.
const PACKAGES: &str = "/var/lib/dpkg";
/// What says whether an installed service may start.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// The folder of the programs; `None`, and a line that says so, where there are none and none can be installed.
pub(super) fn programs() -> Option<PathBuf> {
    let programs = PathBuf::from(PROGRAMS);
    let there = || programs.join("rabbitmq-server").is_file();
    // One that is being installed is there before it is complete: a lock tells, which only root needs.
    if rustix::process::geteuid().is_root()
        && let Ok(lock) = File::open(PACKAGES)
    {
        let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive);
        if locked.is_ok() && !there() && !Path::new("/run/systemd/system").is_dir() {
            install();
        }
    }
    if !there() {
        // What a test prints by a macro is shown only where it fails.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no RabbitMQ in {PROGRAMS}: install the package {PACKAGE}, or name a broker in {}",
            super::GIVEN
        );
        return None;
    }
    Some(programs)
}

/// Installs the package, and lets no service start by that.
fn install() {
    let policy = File::create_new(POLICY).and_then(|mut file| {
        file.write_all(b"#!/bin/sh\nexit 101\n")?;
        file.set_permissions(std::fs::Permissions::from_mode(0o755))
    });
    if !apt_get(&["install", "--no-install-recommends", PACKAGE]) && apt_get(&["update"]) {
        apt_get(&["install", "--no-install-recommends", PACKAGE]);
    }
    if policy.is_ok() {
        let _ = std::fs::remove_file(POLICY);
    }
}

fn apt_get(arguments: &[&str]) -> bool {
    let mut command = Command::new("apt-get");
    command.args(["--yes", "--quiet", "-o", "DPkg::Lock::Timeout=300"]).args(arguments);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
