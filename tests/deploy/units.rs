//! The systemd units, read by systemd itself.

use std::process::Command;

use crate::tools::{check_command_line, has, root, skipped, succeeds, text};

/// Where the units look for the binary.
const BINARY: &str = "/usr/bin/weighbridge";

/// Every unit of a kind by its name, with its text.
fn units(kind: &str) -> Vec<(String, String)> {
    let folder = root().join("deploy/systemd");
    let names =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let units = names.filter(|name| name.ends_with(kind));
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
    let timers = units(".timer");
    for (name, unit) in units(".service") {
        assert!(unit.contains(BINARY), "{name}");
        let path = folder.path().join(name.replace('@', "@1"));
        std::fs::write(&path, unit.replace(BINARY, "/bin/true")).unwrap();
        verify.arg(path);
    }
    assert_eq!(timers.len(), 1);
    for (name, timer) in timers {
        let path = folder.path().join(name);
        std::fs::write(&path, timer).unwrap();
        verify.arg(path);
    }
    let output = succeeds(&mut verify);
    // What it does not know it says, and goes on.
    assert_eq!(crate::tools::said(&output), "");
}

#[test]
fn units_start_what_there_is() {
    let units = units(".service");
    assert_eq!(units.len(), 6);
    for (name, unit) in units {
        let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let mut line = start.strip_prefix(BINARY).unwrap().to_owned();
        // As the unit's own example of a file beside it has it.
        for (variable, said) in [
            ("$WORKER_OPTIONS", "--listen 127.0.0.1:9461"),
            ("$FOLLOW_OPTIONS", "--listen 127.0.0.1:7462 --exec /etc/weighbridge/check.sh"),
            ("$FOLLOW", "dlrm@prod"),
        ] {
            assert!(!line.contains(variable) || unit.contains(said), "{name}: {said}");
            line = line.replace(variable, said);
        }
        assert!(!line.contains('$'), "{name}: {line}");
        check_command_line(&line.split_whitespace().collect::<Vec<_>>());
        assert!(unit.contains("\nEnvironmentFile=-/etc/weighbridge/environment\n"), "{name}");
        assert!(unit.contains("\nAfter=network-online.target"), "{name}");
    }
}

#[test]
fn garbage_is_collected_by_a_timer_of_its_own() {
    let timers = units(".timer");
    let (name, timer) = &timers[0];
    let service = text(&format!("deploy/systemd/{}.service", name.strip_suffix(".timer").unwrap()));
    assert!(service.contains("\nType=oneshot\n") && !service.contains("\n[Install]"), "a timer starts it");
    assert!(timer.contains("\nOnCalendar=") && timer.contains("\nPersistent=true\n"));
    assert!(timer.contains("\n[Install]\nWantedBy=timers.target\n"));
    // What goes before what the units share.
    let (shared, own) = service.split_once("\nEnvironmentFile=-/etc/weighbridge/environment\n").unwrap();
    assert!(!shared.contains("EnvironmentFile=") && own.contains("\nEnvironmentFile=-/etc/weighbridge/gc\n"));
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
