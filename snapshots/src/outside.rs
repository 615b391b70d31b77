//! The one door to the environment and the clock: of nothing but buckets. Their clients find credentials in the
//! environment by themselves, and every request that they sign tells the time.

use std::time::{SystemTime, UNIX_EPOCH};

/// An environment variable; `None` where it is not set, or set to nothing.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Nanoseconds since 1970, by this machine's clock.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn nanoseconds() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i128::try_from(since.as_nanos()).unwrap_or(0)
}
