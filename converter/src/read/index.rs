//! The index of a sharded Hugging Face checkpoint: `NAME.safetensors.index.json`.
//!
//! The format (as huggingface_hub writes it): `{"metadata": {...}, "weight_map": {"TENSOR": "FILE"}}`, with files
//! named `NAME-00001-of-00003.safetensors`. `weight_map` decides which file a tensor is read from. Nothing else
//! in it is relied on: `metadata.total_size` is absent, or wrong, in files from the wild.
//!
//! Stale indexes are common: one left over from another sharding names files that are gone, or leaves out files
//! that are there. Neither is guessed around. Every file that the index names has to be there, and every file that
//! looks as if it belonged to the checkpoint has to be named.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};
use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};
use crate::read::json::{self, Failure, PassedOver, Strings};
use crate::source::{Source, SourceFile};

/// Most names in one message.
const NAMES_SHOWN: usize = 5;

/// A parsed index.
#[derive(Debug)]
pub(crate) struct Index {
    /// Which file each tensor is in.
    pub(crate) weight_map: BTreeMap<String, String>,
}

/// Whether a file that begins with `first` is an index, not a safetensors file: JSON text has no zero bytes, and
/// a header length that is not absurd has some.
pub(crate) fn is_json(first: &[u8]) -> bool {
    let length = first.get(..8).unwrap_or(first);
    first.trim_ascii_start().starts_with(b"{") && !length.contains(&0)
}

/// Whether `name` is what an index is called.
pub(crate) fn is_index_name(name: &str) -> bool {
    name.contains(".safetensors.index") && name.ends_with(".json")
}

/// The bytes of the index `file`.
///
/// # Errors
/// [`Class::LimitExceeded`], or what reading gives.
pub(crate) fn read(file: &SourceFile) -> Result<Vec<u8>> {
    if file.len() > limits::INDEX_BYTES {
        let detail = format!("the index has {} bytes; at most {} are taken", file.len(), limits::INDEX_BYTES);
        return Err(ReadError::new(Class::LimitExceeded, detail).in_file(file.name()));
    }
    file.read_metadata_at(0, file.len())
}

/// Parses the bytes of an index.
///
/// # Errors
/// [`Class::IndexBad`], [`Class::DuplicateKey`], [`Class::LimitExceeded`]
pub(crate) fn parse(bytes: &[u8]) -> Result<Index> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        ReadError::new(Class::IndexBad, format!("the index is not UTF-8 at byte {}", error.valid_up_to()))
    })?;
    let failure = Failure::default();
    let weight_map = json::parse(text, Class::IndexBad, &failure, Members(&failure))?;
    Ok(Index { weight_map })
}

struct Members<'f>(&'f Failure);

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Self::Value, A::Error> {
        let failure = self.0;
        let mut weight_map = None;
        let mut others = BTreeSet::new();
        while let Some(key) = members.next_key::<String>()? {
            let again = if key == "weight_map" {
                let strings = members.next_value_seed(Strings { failure, most: limits::TENSORS });
                weight_map.replace(failure.classify(strings, Class::IndexBad, "weight_map")?).is_some()
            } else {
                if others.len() == json::MEMBERS {
                    return Err(failure.too_many(json::MEMBERS));
                }
                members.next_value_seed(PassedOver(failure))?;
                !others.insert(key.clone())
            };
            if again {
                return Err(failure.twice(&key));
            }
        }
        weight_map.ok_or_else(|| de::Error::missing_field("weight_map"))
    }
}

impl Index {
    /// The names of the shards.
    fn shard_names(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    /// The shards, sorted by name.
    ///
    /// # Errors
    /// [`Class::IndexPathEscape`]; [`Class::IndexMissingShard`] naming all that are absent, and how many of the
    /// folder's `.safetensors` files the index does not name.
    pub(crate) fn shards(&self, source: &Source) -> Result<Vec<Arc<SourceFile>>> {
        let mut shards = Vec::new();
        let mut missing = Vec::new();
        for name in self.shard_names() {
            match source.file(name) {
                Ok(shard) => shards.push(shard),
                Err(error) if error.class() == Class::NotFound || !can_be_a_name(name) => {
                    missing.push(error.to_string());
                }
                Err(error) => return Err(ReadError::new(error.class(), format!("the index names {error}"))),
            }
        }
        if missing.is_empty() {
            return Ok(shards);
        }
        let mut detail = format!("the index names files that are not there: {}", list(&missing));
        let unnamed = self.unnamed(source)?;
        if !unnamed.is_empty() {
            detail += &format!(
                "; {} safetensors files here are not in the index: {}; the index may be of another sharding",
                unnamed.len(),
                list(&unnamed)
            );
        }
        Err(ReadError::new(Class::IndexMissingShard, detail))
    }

    /// The `.safetensors` files directly in the folder that the index does not name.
    pub(crate) fn unnamed(&self, source: &Source) -> Result<Vec<String>> {
        let named = self.shard_names();
        let mut names = source.names()?;
        names.retain(|name| name.ends_with(".safetensors") && !named.contains(name.as_str()));
        Ok(names)
    }

    /// Those of `names` that are numbered like the index's own shards: the same name and the same total.
    pub(crate) fn numbered_alike<'n>(&self, names: &'n [String]) -> Vec<&'n str> {
        let own: BTreeSet<_> = self.shard_names().into_iter().filter_map(numbering).collect();
        let alike = names
            .iter()
            .map(String::as_str)
            .filter(|name| numbering(name).is_some_and(|it| own.contains(&it)));
        alike.collect()
    }
}

/// Whether a file system would take `name`; no file can have another.
fn can_be_a_name(name: &str) -> bool {
    name.len() < 4096 && name.split('/').all(|part| part.len() < 256)
}

/// The first file that is missing among those of `names` that are numbered, such as `model-00002-of-00003.safetensors`
/// beside the other two.
pub(crate) fn missing_number(names: &[String]) -> Option<String> {
    let mut groups: BTreeMap<(&str, &str), BTreeMap<u64, usize>> = BTreeMap::new();
    // PyTorch's writer numbers the files of each rank on its own, and a rank may have nothing for one of them: whether
    // their slices are complete is checked tensor by tensor.
    for name in names.iter().filter(|name| !name.starts_with("shard-")) {
        if let (Some(group), Some((number, digits))) = (numbering(name), number(name)) {
            groups.entry(group).or_default().insert(number, digits);
        }
    }
    groups.into_iter().find_map(|((name, total), numbers)| {
        let last: u64 = total.parse().ok()?;
        let width = numbers.values().next().copied()?;
        let first = u64::from(!numbers.contains_key(&0));
        // A total beyond what is there is found at the first number that is missing, however large it is.
        let missing = (first..last.saturating_add(first)).find(|number| !numbers.contains_key(number))?;
        Some(format!("{name}-{missing:0width$}-of-{total}.safetensors"))
    })
}

/// How many files there are of the kind that `file` is numbered as; 1 for a file without a number.
pub(crate) fn total_of(file: &str) -> u64 {
    numbering(file).and_then(|(_, total)| total.parse().ok()).unwrap_or(1)
}

/// The number 2 of `NAME-00002-of-00003.safetensors`, and how many digits it is written with.
fn number(file: &str) -> Option<(u64, usize)> {
    let digits = file.rsplit_once("-of-")?.0.rsplit_once('-')?.1;
    Some((digits.parse().ok()?, digits.len()))
}

/// Name and total of `NAME-00001-of-00003.safetensors`.
fn numbering(file: &str) -> Option<(&str, &str)> {
    let (rest, total) = file.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(total)).then_some((name, total))
}

/// A few of `names`, and how many more there are.
pub(crate) fn list<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_SHOWN).map(AsRef::as_ref).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(NAMES_SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn class(text: &str) -> Class {
        parse(text.as_bytes()).unwrap_err().class()
    }

    #[test]
    fn only_the_weight_map_counts() {
        let text = r#" {"metadata": {"total_size": "x", "format": null, "n": [1, -1, 1.5, true]},
            "weight_map": {"a": "f"}, "y": {}}
            "#;
        let index = parse(text.as_bytes()).unwrap();
        assert_eq!(index.weight_map, BTreeMap::from([("a".to_owned(), "f".to_owned())]));
    }

    #[test]
    fn what_is_no_index_is_refused() {
        for text in [
            "",
            "[]",
            "null",
            "{}",
            "{",
            "{\"weight_map\":{}}x",
            "{\"weight_map\":{\"a\":\"f\"",
            "{\"weight_map\":[]}",
            "{\"weight_map\":null}",
            "{\"weight_map\":{\"a\":1}}",
            "{\"weight_map\":{\"a\":[\"f\"]}}",
            "{\"metadata\":{}}",
            "\u{feff}{\"weight_map\":{}}",
        ] {
            assert_eq!(class(text), Class::IndexBad, "{text}");
        }
        assert_eq!(class(&format!("{{\"metadata\":{}", "[".repeat(1000))), Class::IndexBad);
        assert_eq!(parse(b"{\"\xFF\":1}").unwrap_err().class(), Class::IndexBad);
    }

    #[test]
    fn no_key_stands_twice() {
        for text in [
            "{\"weight_map\":{\"a\":\"f\",\"a\":\"f\"}}",
            "{\"weight_map\":{},\"weight_map\":{}}",
            "{\"metadata\":1,\"metadata\":1,\"weight_map\":{}}",
            "{\"metadata\":[{\"a\":1,\"a\":1}],\"weight_map\":{}}",
        ] {
            assert_eq!(class(text), Class::DuplicateKey, "{text}");
        }
    }

    #[test]
    fn shards_are_told_by_name_and_total() {
        assert_eq!(numbering("model-00001-of-00003.safetensors"), Some(("model", "00003")));
        assert_eq!(numbering("a-b-1-of-2.safetensors"), Some(("a-b", "2")));
        for name in [
            "model.safetensors",
            "model-1-of-x.safetensors",
            "model-of-3.safetensors",
            "model-1-of-3.bin",
            "-of-.safetensors",
        ] {
            assert_eq!(numbering(name), None, "{name}");
        }
    }

    #[test]
    fn an_index_is_told_from_a_header() {
        assert!(is_json(b"{}"));
        assert!(is_json(b" \n{\"metadata\""));
        // A header of 123 bytes: its length begins with '{'.
        assert!(!is_json(b"{\0\0\0\0\0\0\0{\"a\""));
        assert!(!is_json(b""));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[{}\\[\\]:,\"awe0-9 .-]{0,60}") {
            let _ = parse(text.as_bytes());
        }

        #[test]
        fn a_changed_index_is_read_or_refused(
            place in any::<proptest::sample::Index>(),
            value in any::<u8>(),
            cut in any::<bool>(),
        ) {
            let map = r#"{"a":"m-1-of-2.safetensors","b":"m-2-of-2.safetensors"}"#;
            let mut bytes = format!(r#"{{"metadata":{{"total_size":12}},"weight_map":{map}}}"#).into_bytes();
            let place = place.index(bytes.len());
            bytes[place] = value;
            if cut {
                bytes.truncate(place);
            }
            let _ = parse(&bytes);
        }
    }
}
