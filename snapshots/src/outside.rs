//! The one door to the environment and the clock. Clients of buckets find credentials in the environment by themselves,
//! and every request that they sign tells the time; ages, and for how long a claim is good, are told by the clock.

use std::ffi::OsString;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An environment variable; `None` where it is not set, or set to nothing.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The names of all environment variables.
pub(crate) fn variables() -> impl Iterator<Item = OsString> {
    std::env::vars_os().map(|(name, _)| name)
}

/// Nanoseconds since 1970, by this machine's clock.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn nanoseconds() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i128::try_from(since.as_nanos()).unwrap_or(0)
}

/// For how long this machine has been running, the time that it slept included.
pub(crate) fn running() -> Duration {
    let told = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(told.tv_sec.cast_unsigned(), u32::try_from(told.tv_nsec).unwrap_or(0))
}
