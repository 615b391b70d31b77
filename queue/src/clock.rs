//! The one door to time: a clock that no setting of the machine's date moves.
//!
//! Leases and delays are counted on the kernel's clock since it booted, which all processes of a machine share and
//! which goes on while the machine sleeps; the boot's id tells one count from the next. The wall clock is asked only
//! for what people and names need.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Tells time.
pub trait Clock: std::fmt::Debug + Send + Sync {
    /// The time now.
    fn now(&self) -> Moment;
}

/// A point in time, as the machine's clocks tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Which boot of which machine.
    pub boot: u128,
    /// Since it booted. Comparable within one boot.
    pub since_boot: Duration,
    /// Since 1970, by the wall clock, which may jump.
    pub wall: Duration,
}

/// The machine's clocks.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    /// `None` where the kernel does not tell, as in some sandboxes.
    boot: Option<u128>,
}

impl SystemClock {
    /// Asks the kernel which boot this is.
    #[must_use]
    pub fn new() -> Self {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits = text.trim().replace('-', "");
        Self { boot: u128::from_str_radix(&digits, 16).ok() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        let wall = duration(clock_gettime(ClockId::Realtime));
        match self.boot {
            Some(boot) => Moment { boot, since_boot: duration(clock_gettime(ClockId::Boottime)), wall },
            // Without the boot's id, counts since boot could not be told apart: the wall clock has to do.
            None => Moment { boot: 0, since_boot: wall, wall },
        }
    }
}

/// Times before 1970 count as 1970.
fn duration(time: Timespec) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A clock for tests: it stands still until it is moved.
#[derive(Debug)]
pub struct ManualClock(Mutex<Moment>);

impl ManualClock {
    /// A clock of some boot, an hour after it.
    #[must_use]
    pub fn new() -> Self {
        let hour = Duration::from_secs(3600);
        Self(Mutex::new(Moment { boot: 1, since_boot: hour, wall: Duration::from_secs(1_800_000_000) }))
    }

    /// Lets time pass.
    pub fn pass(&self, time: Duration) {
        self.change(|moment| {
            moment.since_boot += time;
            moment.wall += time;
        });
    }

    /// Changes what the clock says: another boot, a wall clock that jumps.
    pub fn change(&self, change: impl FnOnce(&mut Moment)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Moment {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_clock_goes_forward_within_one_boot() {
        let clock = SystemClock::new();
        let (first, second) = (clock.now(), SystemClock::new().now());
        assert_eq!(first.boot, second.boot);
        assert!(second.since_boot >= first.since_boot);
        assert!(first.wall > Duration::from_secs(1_700_000_000));
    }

    #[test]
    fn without_a_boots_id_the_wall_clock_counts() {
        let moment = SystemClock { boot: None }.now();
        assert_eq!((moment.boot, moment.since_boot), (0, moment.wall));
    }
}
