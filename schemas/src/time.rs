//! Time stamps: RFC 3339 in UTC.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{DocumentError, shorten};

/// A point in time, written as RFC 3339 in UTC (`2026-11-29T16:10:04Z`). It comes in by parameter: nothing here
/// asks a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(jiff::Timestamp);

impl Timestamp {
    /// The time this many nanoseconds after 1970; clamped to the years that RFC 3339 can write.
    #[must_use]
    pub fn from_nanoseconds(nanoseconds: i128) -> Self {
        let clamped = nanoseconds.clamp(0, jiff::Timestamp::MAX.as_nanosecond());
        Self(jiff::Timestamp::from_nanosecond(clamped).unwrap_or(jiff::Timestamp::UNIX_EPOCH))
    }

    /// Nanoseconds since 1970; 0 for a time before, and the largest number for one after the year 2554.
    #[must_use]
    pub fn nanoseconds(self) -> u64 {
        u64::try_from(self.0.as_nanosecond().max(0)).unwrap_or(u64::MAX)
    }

    /// The time of an HTTP `Date` header (RFC 9110, section 5.6.7), such as `Mon, 30 Nov 2026 08:37:30 GMT`.
    #[must_use]
    pub fn of_http_date(text: &str) -> Option<Self> {
        jiff::fmt::rfc2822::parse(text).ok().map(|zoned| Self(zoned.timestamp()))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Timestamp {
    type Err = DocumentError;

    fn from_str(text: &str) -> Result<Self, DocumentError> {
        text.parse().map(Self).map_err(|_| {
            DocumentError::malformed("time stamp", format!("{:?} is not RFC 3339", shorten(text)))
        })
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl schemars::JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "date-time" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_in_utc() {
        let time: Timestamp = "2026-11-29T18:10:04+02:00".parse().unwrap();
        assert_eq!(time.to_string(), "2026-11-29T16:10:04Z");
        assert!("yesterday".parse::<Timestamp>().is_err());
        let date = Timestamp::of_http_date("Mon, 30 Nov 2026 08:37:30 GMT").unwrap();
        assert_eq!(date.to_string(), "2026-11-30T08:37:30Z");
        assert_eq!(Timestamp::of_http_date("soon"), None);
        assert_eq!(Timestamp::from_nanoseconds(i128::MAX).to_string().get(..4), Some("9999"));
    }
}
