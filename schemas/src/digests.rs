//! Partial digests `weighbridge.digests/v1`: what one reader of a part of a checkpoint knows of what is declared of its
//! bytes, so that whoever finishes the publish need not read them again.
//!
//! Two kinds of digests are declared: the BLAKE3 of whole files, and the CRC-32 of zip records. Of the first, a reader
//! that saw a part of a file has the chaining values of whole subtrees; of the second, the CRC-32s of runs of bytes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::ids::{ChainingValue, FileDigest};
use crate::json;
use crate::limits;

const DOCUMENT: &str = "document of partial digests";

/// The size of a page, the smallest subtree, in bytes.
pub const PAGE_BYTES: u64 = 64 << 10;

/// The `schema` field of partial digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum DigestsSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.digests/v1")]
    V1,
}

/// What a reader of a part of a checkpoint knows of its declared digests. What is not in it is read again.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct PartialDigests {
    /// Always `weighbridge.digests/v1`.
    pub schema: DigestsSchema,
    /// The files of which anything is known, in order of their names.
    pub files: Vec<PartialFile>,
}

/// What is known of one file. Every list is in ascending order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct PartialFile {
    /// Its name, relative to the checkpoint.
    pub name: String,
    /// The BLAKE3 of the whole file, where all of it was hashed; there are no subtrees then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<FileDigest>,
    /// The largest subtrees of which all bytes were hashed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subtrees: Vec<Subtree>,
    /// The torch.save archives within the file of which nothing is left to check.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<Item>,
    /// The records, where the file is one archive, that have the CRC-32 which its directory says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub records: Vec<Record>,
    /// What was read of other records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Run>,
}

/// `1 << level` whole pages from `first_page` on, a multiple of as many; the file's last page may be short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Subtree {
    /// The number of its first page, from 0.
    pub first_page: u64,
    /// 0 for a page, 1 for two of them, and so on.
    pub level: u32,
    /// The chaining value: that of a node which is not the root.
    pub value: ChainingValue,
}

/// A torch.save archive of one tensor within a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Item {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
}

/// A record of a zip archive, as its directory has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Record {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
    /// The CRC-32 that they have to have.
    pub crc32: u32,
}

/// A run of a record's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Run {
    /// The record.
    pub record: Record,
    /// The item that holds the record; absent where the file is one archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item: Option<Item>,
    /// The run's first byte in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
    /// The CRC-32 that they have.
    pub crc32: u32,
}

impl PartialDigests {
    /// Whether nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The bytes that are stored: JSON, fields in the order above.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // No field is a map with keys that are no strings, so this cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads partial digests. What they say of a checkpoint is checked by whoever has the checkpoint.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no such document, or more than [`limits::PARTIAL_DIGESTS_BYTES`].
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        if json.len() > limits::PARTIAL_DIGESTS_BYTES {
            let why = format!("{} bytes; at most {}", json.len(), limits::PARTIAL_DIGESTS_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        json::object(DOCUMENT, json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_digests_round_trip() {
        let record = Record { offset: 100, length: 50, crc32: u32::MAX };
        let item = Item { offset: 90, length: 80 };
        let digests = PartialDigests {
            schema: DigestsSchema::V1,
            files: vec![
                PartialFile {
                    name: "a".into(),
                    blake3: Some(FileDigest::of(b"a")),
                    records: vec![record],
                    ..PartialFile::default()
                },
                PartialFile {
                    name: "b".into(),
                    subtrees: vec![Subtree { first_page: 4, level: 2, value: ChainingValue::of(b"b") }],
                    items: vec![item],
                    runs: vec![Run { record, item: Some(item), offset: 100, length: 7, crc32: 1 }],
                    ..PartialFile::default()
                },
            ],
        };
        assert_eq!(PartialDigests::parse(&digests.to_bytes()).unwrap(), digests);
    }

    #[test]
    fn what_is_no_such_document_is_refused() {
        let long = vec![b' '; limits::PARTIAL_DIGESTS_BYTES + 1];
        assert!(matches!(PartialDigests::parse(&long), Err(DocumentError::OverLimit { .. })));
        for json in ["{}", "[]", r#"{"schema":"weighbridge.digests/v2","files":[]}"#] {
            assert!(PartialDigests::parse(json.as_bytes()).is_err(), "{json}");
        }
    }
}
