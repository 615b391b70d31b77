//! Processes of this machine, so that one that died can be told from one that is slow.

use std::fs;

use weighbridge_schemas::retention::GcProcess;

/// The place of the first field behind the name in a process's `stat`, and of when it was started.
const FIRST_FIELD: usize = 3;
const STARTED_FIELD: usize = 22;

/// This process; `None` where the system does not tell.
#[must_use]
pub fn own() -> Option<GcProcess> {
    let (boot, namespace) = here()?;
    let number = std::process::id();
    Some(GcProcess { boot, namespace, number, started: started(number)? })
}

/// Whether a process is there; `None` where that cannot be told: it is of another machine, or of a container that this
/// one cannot look into.
#[must_use]
pub fn is_there(process: &GcProcess) -> Option<bool> {
    let (boot, namespace) = here()?;
    if boot != process.boot || namespace != process.namespace {
        return None;
    }
    match started(process.number) {
        Some(started) => Some(started == process.started),
        None if fs::metadata(format!("/proc/{}", process.number)).is_ok() => None,
        // Where others' processes are hidden, the first one is too.
        None => started(1).map(|_| false),
    }
}

/// What this machine's start is called, and what its processes are counted in.
fn here() -> Option<(String, String)> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some((boot.trim().to_owned(), namespace.to_str()?.to_owned()))
}

fn started(number: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name stands in parentheses, and may have any in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    // What has ended with all its threads, and is not waited for, does nothing any more.
    if matches!(fields.clone().next(), Some("Z" | "X")) {
        let threads = fs::read_dir(format!("/proc/{number}/task")).map_or(0, Iterator::count);
        if threads <= 1 {
            return Some(0);
        }
    }
    fields.nth(STARTED_FIELD - FIRST_FIELD)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn who_is_there_and_who_is_not() {
        let own = own().unwrap();
        assert_eq!(is_there(&own), Some(true));
        assert_eq!(is_there(&GcProcess { started: own.started + 1, ..own.clone() }), Some(false));
        assert_eq!(is_there(&GcProcess { boot: "other".into(), ..own.clone() }), None);
        assert_eq!(is_there(&GcProcess { namespace: "other".into(), ..own.clone() }), None);
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let other = GcProcess { number: child.id(), started: started(child.id()).unwrap(), ..own };
        assert_eq!(is_there(&other), Some(true));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is_there(&other), Some(false));
    }
}
