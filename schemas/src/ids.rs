//! Content-addressed ids: 32 bytes of BLAKE3, written as 64 lower-case hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{DocumentError, shorten};

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 32]);

        impl $name {
            /// The id with these 32 bytes.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The id of `content`: its BLAKE3.
            #[must_use]
            pub fn of(content: &[u8]) -> Self {
                Self(*blake3::hash(content).as_bytes())
            }

            /// The 32 bytes.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = DocumentError;

            fn from_str(text: &str) -> Result<Self, DocumentError> {
                parse_hex(text)
                    .map(Self)
                    .ok_or_else(|| DocumentError::BadId { what: $what, text: shorten(text) })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "pattern": "^[0-9a-f]{64}$" })
            }
        }
    };
}

digest!(
    /// A chunk's id: the BLAKE3 of its bytes.
    ChunkId,
    "chunk id"
);
digest!(
    /// A snapshot's id: the BLAKE3 of its manifest's canonical bytes.
    SnapshotId,
    "snapshot id"
);
digest!(
    /// A channel entry's id: the BLAKE3 of the operation (job or operator request) and the channel, so that
    /// whoever takes over an unknown outcome recognises its own entry.
    EntryId,
    "channel entry id"
);
digest!(
    /// A checkpoint's fingerprint: the BLAKE3 of its metadata bytes and file sizes. It names no path or time.
    Fingerprint,
    "checkpoint fingerprint"
);
digest!(
    /// The digest of a policy's parsed rules (not of its gates, channel or retention).
    RulesDigest,
    "rules digest"
);
digest!(
    /// The BLAKE3 of a validation report's bytes as they are stored.
    ReportDigest,
    "report digest"
);
digest!(
    /// The BLAKE3 of a whole file, as a checkpoint manifest may declare it.
    FileDigest,
    "file digest"
);
digest!(
    /// The BLAKE3 chaining value of a part of a file: of a node of its tree that is not the root.
    ChainingValue,
    "chaining value"
);

digest!(
    /// The digest of what a checkpoint's files looked like, names and sizes: one that is still written looks different
    /// from time to time.
    ObservationId,
    "observation"
);

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_round_trip() {
        let id = ChunkId::of(b"rows");
        assert_eq!(id.to_string().parse::<ChunkId>().unwrap(), id);
        assert_eq!(id.to_string(), blake3::hash(b"rows").to_hex().to_string());
    }

    #[test]
    fn only_64_lower_case_digits_are_an_id() {
        for text in ["", "ab", &"A".repeat(64), &"g".repeat(64), &"a".repeat(65), &"é".repeat(32)] {
            assert!(text.parse::<SnapshotId>().is_err(), "{text}");
        }
    }
}
