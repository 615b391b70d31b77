//! What a process takes: time, processor time and memory.

use std::io;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// What a process took.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    /// From its start to its end.
    pub time: Duration,
    /// Processor time, the kernel's on its behalf too.
    pub processor: Duration,
    /// The peak of its resident memory in bytes, as the kernel counts it (`VmHWM`). It is looked at every 2 ms: what
    /// came in the last 2 ms may be missing.
    pub peak: u64,
}

/// Runs `command` to its end, its standard output thrown away: how it ended, and what it took.
///
/// # Errors
/// Where the process cannot be started.
pub fn measure(command: &mut Command) -> io::Result<(ExitStatus, Taken)> {
    let started = Instant::now();
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let folder = format!("/proc/{}", child.id());
    let ended = AtomicBool::new(false);
    let (time, peak) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch_peak(&folder, &ended));
        // It stays a zombie, so that its processor time can be read.
        let wait = WaitId::Pid(Pid::from_child(&child));
        while waitid(wait.clone(), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            .is_err_and(|error| error == rustix::io::Errno::INTR)
        {}
        let time = started.elapsed();
        ended.store(true, Ordering::Relaxed);
        (time, watcher.join().unwrap_or_default())
    });
    let processor = processor_time(child.id());
    Ok((child.wait()?, Taken { time, processor, peak }))
}

/// How `command` ended, and the peak of its memory: see [`measure`].
///
/// # Errors
/// Where the process cannot be started.
pub fn peak_memory(command: &mut Command) -> io::Result<(ExitStatus, u64)> {
    let (status, taken) = measure(command)?;
    Ok((status, taken.peak))
}

fn watch_peak(folder: &str, ended: &AtomicBool) -> u64 {
    let status = format!("{folder}/status");
    let mut peak = 0;
    while !ended.load(Ordering::Relaxed) {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = kibibytes.map_or(peak, |kibibytes| peak.max(kibibytes << 10));
        std::thread::sleep(Duration::from_millis(2));
    }
    peak
}

/// Processor time that a process has taken so far, the kernel's on its behalf too; nothing where it is gone.
#[must_use]
pub fn processor_time(process: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The program's name in parentheses may hold anything; behind it follow numbers, the 12th and 13th of them ticks.
    let fields = text.rsplit_once(')').map(|(_, fields)| fields).unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok());
    let ticks_a_second = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_millis(ticks.sum::<u64>() * 1000 / ticks_a_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_memory_and_how_it_ended_are_told() {
        let mut busy = Command::new("sh");
        let (status, taken) =
            measure(busy.args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; exit 3"])).unwrap();
        assert_eq!(status.code(), Some(3));
        assert!(taken.peak > 100 << 10 && taken.processor > Duration::ZERO, "{taken:?}");
    }
}
