//! The one door to time and randomness; everything else takes them by parameter.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use weighbridge_schemas::time::Timestamp;

/// The time now.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub fn now() -> Timestamp {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_nanoseconds(i128::try_from(since_epoch.as_nanos()).unwrap_or(i128::MAX))
}

/// A new random id for an operation.
#[must_use]
pub fn operation_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// A random number from 0 to 1.
#[must_use]
pub fn fraction() -> f64 {
    let bytes = uuid::Uuid::new_v4().into_bytes();
    f64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])) / f64::from(u32::MAX)
}

/// From one time to a later one; nothing where the clocks of two machines say that it is not later.
#[must_use]
pub fn between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::from_nanos(to.nanoseconds().saturating_sub(from.nanoseconds()))
}
