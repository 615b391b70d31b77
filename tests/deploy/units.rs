//! The systemd units, read by systemd itself.

use std::process::Command;

use crate::tools::{check_command_line, has, root, skipped, succeeds, text};

/// Where the units look for the binary.
const BINARY: &str = "/usr/bin/weighbridge";

/// Every unit by its name, with its text.
fn units() -> Vec<(String, String)> {
    let folder = root().join("deploy/systemd");
    let names =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let units = names.filter(|name| name.ends_with(".service"));
    units.map(|name| (name.clone(), text(&format!("deploy/systemd/{name}")))).collect()
}

#[test]
fn systemd_reads_the_units() {
    if !has("systemd-analyze") {
        skipped("no systemd-analyze here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut verify = Command::new("systemd-analyze");
    verify.arg("verify").arg("--man=no");
    for (name, unit) in units() {
        assert!(unit.contains(BINARY), "{name}");
        let path = folder.path().join(name.replace('@', "@1"));
        std::fs::write(&path, unit.replace(BINARY, "/bin/true")).unwrap();
        verify.arg(path);
    }
    let output = succeeds(&mut verify);
    // What it does not know it says, and goes on.
    assert_eq!(crate::tools::said(&output), "");
}

#[test]
fn units_start_what_there_is() {
    let units = units();
    assert_eq!(units.len(), 3);
    for (name, unit) in units {
        let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let line = start.strip_prefix(BINARY).unwrap().replace("$WORKER_OPTIONS", "--listen 127.0.0.1:7461");
        check_command_line(&line.split_whitespace().collect::<Vec<_>>());
        assert!(unit.contains("\nEnvironmentFile=-/etc/weighbridge/environment\n"), "{name}");
        assert!(unit.contains("\nAfter=network-online.target"), "{name}");
    }
}

#[test]
fn the_units_environment_names_variables_that_there_are() {
    let environment = text("deploy/systemd/environment.example");
    let reference = text("docs/command-line.md");
    let variables = environment.lines().map(|line| line.trim_start_matches("# "));
    let variables: Vec<_> = variables.filter(|line| line.starts_with("WEIGHBRIDGE_")).collect();
    assert!(!variables.is_empty());
    for line in variables {
        let (variable, _) = line.split_once('=').unwrap();
        assert!(reference.contains(&format!("[env: {variable}")), "{variable}");
    }
}
