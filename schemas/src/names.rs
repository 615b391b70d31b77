//! Names from outside: of models, runs, channels and policies (which become object keys), and of tensors (which
//! never become file names).

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{DocumentError, shorten};
use crate::limits;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = DocumentError;

            fn from_str(text: &str) -> Result<Self, DocumentError> {
                if is_name(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(DocumentError::BadName { what: $what, name: shorten(text) })
                }
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
                schemars::json_schema!({
                    "type": "string",
                    "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$",
                })
            }
        }
    };
}

name!(
    /// A model's name: 1 to 128 of `A-Z a-z 0-9 . _ -`, not starting with a dot.
    ModelName,
    "model"
);
name!(
    /// A training run's name; the same rule as [`ModelName`].
    RunName,
    "run"
);
name!(
    /// A channel's name; the same rule as [`ModelName`].
    ChannelName,
    "channel"
);
name!(
    /// A stored policy's name; the same rule as [`ModelName`].
    PolicyName,
    "policy"
);

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= limits::NAME_BYTES
        && !text.starts_with('.')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// A tensor's name: any UTF-8 of at most 1,024 bytes (the empty string too) but for control characters,
/// absolute paths and `..` parts. It never becomes a file name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct TensorName(String);

impl TensorName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for TensorName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The key of a safetensors header that is no tensor.
const SAFETENSORS_METADATA: &str = "__metadata__";

impl FromStr for TensorName {
    type Err = DocumentError;

    fn from_str(text: &str) -> Result<Self, DocumentError> {
        let why = if text.len() > limits::TENSOR_NAME_BYTES {
            "it is longer than 1024 bytes"
        } else if text.chars().any(char::is_control) {
            "it holds a control character"
        } else if text.starts_with(['/', '\\']) || has_drive(text) {
            "it looks like an absolute path"
        } else if text.split(['/', '\\']).any(|part| part == "..") {
            "it has a '..' part"
        } else if text == SAFETENSORS_METADATA {
            "safetensors files keep their own metadata under it; rename the tensor before it is saved"
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(DocumentError::UnsafeTensorName { name: shorten(text), why })
    }
}

/// Whether `text` begins like `C:\` or `C:/`.
fn has_drive(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() >= 3 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && matches!(bytes[2], b'/' | b'\\')
}

impl<'de> Deserialize<'de> for TensorName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_folder_are_refused() {
        for text in ["", ".", "..", "../x", "a/b", ".hidden", "a b", "é", "a\0", &"x".repeat(129)] {
            assert!(text.parse::<ModelName>().is_err(), "{text:?}");
        }
        for text in ["a", "dlrm-v2", "A.b_c-9", &"x".repeat(128)] {
            assert_eq!(text.parse::<ModelName>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn tensor_names_may_be_anything_but_paths_and_control_characters() {
        for text in ["", "a b", "模型.表", "a/b", "..a", "a..b", "c:d"] {
            assert!(text.parse::<TensorName>().is_ok(), "{text:?}");
        }
        for text in [
            "/etc/x",
            "../x",
            "a/../b",
            "a\\..\\b",
            "a\0b",
            "a\nb",
            "C:/x",
            "__metadata__",
            &"x".repeat(1025),
        ] {
            assert!(text.parse::<TensorName>().is_err(), "{text:?}");
        }
    }
}
