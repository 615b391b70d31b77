//! The header of a safetensors file.
//!
//! The format (<https://github.com/huggingface/safetensors>): eight bytes, little-endian, give the header's length
//! N; N bytes of JSON follow, padded with spaces; then the tensors' bytes, with nothing between, before or after
//! them. The JSON is one object: a tensor's name gives `{"dtype", "shape", "data_offsets": [begin, end]}`, with
//! offsets counted from byte 8 + N, and `__metadata__` gives a map of strings. 8 + N need not be a multiple of
//! anything: the library pads to 8, other writers do not, so tensors may lie at odd bytes.
//!
//! PyTorch's distributed checkpoints write one such file a rank, which holds slices. Where a slice starts in its
//! tensor then stands in `__metadata__`, under `DCP_SHARDING_INFO`, as JSON in a string:
//! `{"TENSOR": {"saved_offsets": [row, column]}}`.
//!
//! Nothing here reads a file: these functions take bytes, and the file's length.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};
use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use crate::error::{Class, ReadError, Result};
use crate::read::detect;
use crate::read::json::{self, Failure, Numbers, PassedOver, Strings};

/// How many bytes give the header's length.
pub(crate) const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// A header, checked: the tensors' ranges tile the file's data exactly.
#[derive(Debug)]
pub(crate) struct Header {
    /// The tensors, sorted by name, each name once.
    pub(crate) entries: Vec<Entry>,
    /// Where the file's slices start in their tensors, by name; `None` for a file of whole tensors.
    pub(crate) sharding: Option<BTreeMap<String, Vec<u64>>>,
}

/// One tensor (or slice) of a file.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The name.
    pub(crate) name: TensorName,
    /// The element type.
    pub(crate) dtype: Dtype,
    /// The shape.
    pub(crate) shape: Vec<u64>,
    /// The first byte, counted from the end of the header.
    pub(crate) begin: u64,
    /// The byte behind the last one, counted likewise.
    pub(crate) end: u64,
}

/// The header's length, from the `first` bytes of a file of `file_bytes` bytes (eight of them, and a few more to
/// tell what else the file may be).
///
/// # Errors
/// [`Class::Truncated`], [`Class::HeaderTooLarge`]
pub(crate) fn length(first: &[u8], file_bytes: u64) -> Result<u64> {
    let Some(&declared) = first.first_chunk() else {
        let detail =
            format!("the file has {file_bytes} bytes; the header's length alone takes {LENGTH_BYTES}");
        return Err(ReadError::new(Class::Truncated, detail));
    };
    let length = u64::from_le_bytes(declared);
    if length > limits::SAFETENSORS_HEADER_BYTES {
        return Err(too_large(length, first, file_bytes));
    }
    let follow = file_bytes.saturating_sub(LENGTH_BYTES);
    if length > follow {
        let detail = format!(
            "the header takes {length} bytes, but only {follow} follow its length; the file was cut short, copy it \
             again"
        );
        return Err(ReadError::new(Class::Truncated, detail));
    }
    Ok(length)
}

fn too_large(length: u64, first: &[u8], file_bytes: u64) -> ReadError {
    let cap = limits::SAFETENSORS_HEADER_BYTES;
    let mut detail = format!("the header's length reads {length} bytes; at most {cap} are taken");
    if first.starts_with(detect::ZIP) {
        detail += "; the file begins with a zip archive: it is a torch.save file, or one of PyTorch's \
                   HuggingFaceStorageWriter, which puts a state dict's values that are not tensors in front of the \
                   header; save it again with tensors alone";
    } else if let Some(kind) = detect::foreign_kind(first) {
        detail += &format!("; the file begins like {kind}");
    } else if length.swap_bytes() <= file_bytes {
        detail += "; its bytes are in the order of a big-endian machine";
    } else if length <= file_bytes {
        detail += "; split the tensors over more files";
    } else {
        detail += &format!(", and the file has {file_bytes}; it is no safetensors file");
    }
    ReadError::new(Class::HeaderTooLarge, detail)
}

/// Parses `header`, the bytes between the length and the data of a file of `file_bytes` bytes in all.
///
/// # Errors
/// A class for each thing that can be wrong with a header, naming the tensor where there is one.
pub(crate) fn parse(header: &[u8], file_bytes: u64) -> Result<Header> {
    let text = std::str::from_utf8(header).map_err(|error| {
        let detail =
            format!("the header is not UTF-8 at byte {} of the file", error.valid_up_to().saturating_add(8));
        ReadError::new(Class::HeaderNotUtf8, detail)
    })?;
    let failure = Failure::default();
    let (mut entries, metadata) =
        json::parse(object_of(text)?, Class::HeaderNotJson, &failure, Tensors(&failure))?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some([first, _]) = entries.array_windows().find(|[a, b]| a.name == b.name) {
        let detail = "the header names the tensor twice";
        return Err(ReadError::new(Class::DuplicateKey, detail).of_tensor(first.name.as_str()));
    }
    let header_bytes = u64::try_from(header.len()).unwrap_or(u64::MAX);
    check_layout(&entries, file_bytes.saturating_sub(LENGTH_BYTES).saturating_sub(header_bytes))?;
    let sharding = metadata.get(SHARDING_INFO).map(|text| sharding(text)).transpose()?;
    Ok(Header { entries, sharding })
}

/// The JSON object of a header, without its padding.
fn object_of(text: &str) -> Result<&str> {
    let not_json = |detail: String| Err(ReadError::new(Class::HeaderNotJson, detail));
    if !text.starts_with('{') {
        return not_json(match text.chars().next() {
            Some(first) => format!("the header begins with {first:?}, not with '{{'"),
            None => "the header is empty".to_owned(),
        });
    }
    let object = text.trim_end_matches(' ');
    if object.ends_with('}') {
        return Ok(object);
    }
    let content = object.trim_end_matches(|c: char| c == '\0' || c.is_ascii_whitespace());
    match text.get(content.len()..).and_then(|padding| padding.char_indices().find(|&(_, c)| c != ' ')) {
        Some((place, padding)) => {
            let offset = content.len().saturating_add(place).saturating_add(8);
            let what = if padding == '\0' { "a zero byte".to_owned() } else { format!("{padding:?}") };
            not_json(format!(
                "the header is padded with {what} at byte {offset} of the file; only spaces are allowed"
            ))
        }
        None => not_json("the header does not end with '}'".to_owned()),
    }
}

/// Checks that the ranges of `entries` tile `data_bytes` bytes: no hole, no overlap, nothing left over.
fn check_layout(entries: &[Entry], data_bytes: u64) -> Result<()> {
    let mut in_order: Vec<&Entry> = entries.iter().collect();
    in_order.sort_by_key(|entry| (entry.begin, entry.end));
    let mut reached = 0;
    let mut last = None;
    for entry in in_order {
        if entry.begin != reached {
            return Err(misplaced(entry, reached, last));
        }
        reached = entry.end;
        last = Some(entry.name.as_str());
    }
    let over = |class, detail: String| {
        let error = ReadError::new(class, detail);
        Err(match last {
            Some(last) => error.of_tensor(last),
            None => error,
        })
    };
    match data_bytes.checked_sub(reached) {
        Some(0) => Ok(()),
        Some(left) => over(
            Class::TrailingBytes,
            format!("{left} bytes follow the last tensor; nothing may stand there"),
        ),
        None => over(
            Class::Truncated,
            format!(
                "its data ends at byte {reached}, but the file holds {data_bytes} bytes of data; it was cut short, \
                 copy it again"
            ),
        ),
    }
}

fn misplaced(entry: &Entry, reached: u64, last: Option<&str>) -> ReadError {
    let range = format!("its data_offsets are [{}, {}]", entry.begin, entry.end);
    let before = last.map_or_else(
        || "the data begins at 0".to_owned(),
        |last| format!("tensor {last:?} ends at {reached}"),
    );
    let what = if entry.begin < reached { "they overlap" } else { "there is a hole between" };
    ReadError::new(Class::BadOffsets, format!("{range}, but {before}: {what}")).of_tensor(entry.name.as_str())
}

/// The whole header: its tensors in the order of the file, and `__metadata__`.
struct Tensors<'f>(&'f Failure);

impl<'de> DeserializeSeed<'de> for Tensors<'_> {
    type Value = (Vec<Entry>, BTreeMap<String, String>);

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Tensors<'_> {
    type Value = (Vec<Entry>, BTreeMap<String, String>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Self::Value, A::Error> {
        let failure = self.0;
        let mut entries = Vec::new();
        let mut metadata = None;
        while let Some(key) = members.next_key::<String>()? {
            if key == METADATA {
                if metadata.is_some() {
                    return Err(failure.twice(METADATA));
                }
                let strings = members.next_value_seed(Strings { failure, most: json::MEMBERS });
                metadata = Some(failure.classify(strings, Class::BadMetadata, METADATA)?);
                continue;
            }
            if entries.len() == limits::TENSORS {
                return Err(failure.too_many(limits::TENSORS));
            }
            let name: TensorName = key.parse().map_err(|error| failure.stop(unsafe_name(&error)))?;
            let entry = members.next_value_seed(Fields(failure));
            let entry = failure.classify(entry, Class::BadEntry, "its entry");
            let (dtype, shape, [begin, end]) = failure.of_tensor(entry, name.as_str())?;
            entries.push(Entry { name, dtype, shape, begin, end });
        }
        Ok((entries, metadata.unwrap_or_default()))
    }
}

fn unsafe_name(error: &weighbridge_schemas::error::DocumentError) -> ReadError {
    ReadError::new(Class::UnsafeName, error.to_string())
}

/// One tensor's entry, checked on its own: element type, shape and byte range.
struct Fields<'f>(&'f Failure);

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = (Dtype, Vec<u64>, [u64; 2]);

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = (Dtype, Vec<u64>, [u64; 2]);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Self::Value, A::Error> {
        let failure = self.0;
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = members.next_key::<String>()? {
            let again = match key.as_str() {
                "dtype" => {
                    let name = failure.classify(members.next_value::<String>(), Class::BadEntry, "dtype")?;
                    dtype.replace(name).is_some()
                }
                "shape" => {
                    let numbers = members.next_value_seed(Numbers { failure, class: Class::BadShape });
                    shape.replace(failure.classify(numbers, Class::BadEntry, "shape")?).is_some()
                }
                "data_offsets" => {
                    let numbers = members.next_value_seed(Numbers { failure, class: Class::BadOffsets });
                    offsets.replace(failure.classify(numbers, Class::BadEntry, "data_offsets")?).is_some()
                }
                unknown => {
                    let detail = format!("its entry has an unknown field {:?}", shorten(unknown));
                    return Err(failure.stop(ReadError::new(Class::BadEntry, detail)));
                }
            };
            if again {
                return Err(failure.twice(&key));
            }
        }
        check_entry(dtype, shape, offsets).map_err(|error| failure.stop(error))
    }
}

/// Checks one entry's fields against each other.
fn check_entry(
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
    offsets: Option<Vec<u64>>,
) -> Result<(Dtype, Vec<u64>, [u64; 2])> {
    let lacks = |field: &str| ReadError::new(Class::BadEntry, format!("its entry lacks {field}"));
    let dtype = dtype.ok_or_else(|| lacks("dtype"))?;
    let shape = shape.ok_or_else(|| lacks("shape"))?;
    let offsets = offsets.ok_or_else(|| lacks("data_offsets"))?;
    let dtype = Dtype::from_name(&dtype).ok_or_else(|| unknown_dtype(&dtype))?;
    let [begin, end] = offsets.try_into().map_err(|offsets: Vec<u64>| {
        ReadError::new(Class::BadEntry, format!("its data_offsets have {} numbers, not 2", offsets.len()))
    })?;
    let range = end.checked_sub(begin).ok_or_else(|| {
        ReadError::new(Class::BadOffsets, format!("its data_offsets run backwards, from {begin} to {end}"))
    })?;
    let elements = element_count(&shape, dtype).ok_or_else(|| {
        ReadError::new(
            Class::ShapeOverflow,
            format!("its shape {shape:?} of {} does not fit 64 bits", dtype.as_str()),
        )
    })?;
    let bytes = elements.saturating_mul(dtype.size());
    if range != bytes {
        let detail = format!(
            "its shape {shape:?} of {} takes {bytes} bytes, but its data_offsets [{begin}, {end}] hold {range}",
            dtype.as_str()
        );
        return Err(ReadError::new(Class::SizeMismatch, detail));
    }
    Ok((dtype, shape, [begin, end]))
}

fn unknown_dtype(name: &str) -> ReadError {
    let known: Vec<&str> = Dtype::ALL.iter().map(|dtype| dtype.as_str()).collect();
    let detail = format!("the dtype {:?} is not supported; these are: {}", shorten(name), known.join(", "));
    ReadError::new(Class::BadDtype, detail)
}

/// Parses `DCP_SHARDING_INFO`: where each slice of a file starts in its tensor.
fn sharding(text: &str) -> Result<BTreeMap<String, Vec<u64>>> {
    let failure = Failure::default();
    json::parse(text, Class::BadMetadata, &failure, Sharding(&failure)).map_err(|error| {
        let detail = format!("in {SHARDING_INFO}: {error}");
        ReadError::new(error.class(), detail)
    })
}

struct Sharding<'f>(&'f Failure);

impl<'de> DeserializeSeed<'de> for Sharding<'_> {
    type Value = BTreeMap<String, Vec<u64>>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Sharding<'_> {
    type Value = BTreeMap<String, Vec<u64>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Self::Value, A::Error> {
        let failure = self.0;
        let mut starts = BTreeMap::new();
        while let Some(name) = members.next_key::<String>()? {
            let offsets = members.next_value_seed(SavedOffsets(failure));
            let offsets = failure.classify(offsets, Class::BadMetadata, "the slice's place");
            let offsets = failure.of_tensor(offsets, &shorten(&name))?;
            if starts.contains_key(&name) {
                return Err(failure.twice(&name));
            }
            starts.insert(name, offsets);
        }
        Ok(starts)
    }
}

struct SavedOffsets<'f>(&'f Failure);

impl<'de> DeserializeSeed<'de> for SavedOffsets<'_> {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Vec<u64>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SavedOffsets<'_> {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with saved_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Vec<u64>, A::Error> {
        let mut offsets = None;
        while let Some(key) = members.next_key::<String>()? {
            if key != "saved_offsets" {
                members.next_value_seed(PassedOver(self.0))?;
                continue;
            }
            let numbers = Numbers { failure: self.0, class: Class::BadMetadata };
            if offsets.replace(members.next_value_seed(numbers)?).is_some() {
                return Err(self.0.twice(&key));
            }
        }
        offsets.ok_or_else(|| de::Error::missing_field("saved_offsets"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file of `header` and `data`.
    pub(in crate::read) fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let length = u64::try_from(header.len()).unwrap();
        [&length.to_le_bytes(), header.as_bytes(), data].concat()
    }

    /// Reads the header of a whole file in memory.
    fn read(bytes: &[u8]) -> Result<Header> {
        let file_bytes = u64::try_from(bytes.len()).unwrap();
        let end = usize::try_from(length(bytes, file_bytes)?).unwrap() + 8;
        parse(&bytes[8..end], file_bytes)
    }

    fn refused(bytes: &[u8]) -> ReadError {
        read(bytes).unwrap_err()
    }

    /// The refusal of a file whose one entry, of tensor `t`, is `entry`; with eight bytes of data.
    fn refused_entry(entry: &str) -> ReadError {
        refused(&file(&format!("{{\"t\":{entry}}}"), &[0; 8]))
    }

    fn entry(shape: &str, offsets: &str) -> String {
        format!("{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}")
    }

    #[test]
    fn a_header_lists_its_tensors_by_name() {
        let text = format!(
            "{{\"b\":{},\"__metadata__\":{{\"format\":\"pt\"}},\"a\":{},\"\":{}}}   ",
            entry("[1,1]", "[0,4]"),
            entry("[]", "[4,8]"),
            entry("[0,9]", "[4,4]")
        );
        let header = read(&file(&text, &[0; 8])).unwrap();
        let listed: Vec<_> = header.entries.iter().map(|e| (e.name.as_str(), e.begin, e.end)).collect();
        assert_eq!(listed, [("", 4, 4), ("a", 4, 8), ("b", 0, 4)]);
        assert!(header.sharding.is_none());
    }

    #[test]
    fn lengths_are_checked_before_anything_else() {
        assert_eq!(refused(b"").class(), Class::Truncated);
        assert_eq!(refused(b"1234567").class(), Class::Truncated);
        assert_eq!(refused(&99_000_000u64.to_le_bytes()).class(), Class::Truncated);
        for length in [u64::MAX, u64::MAX - 7, 100_000_001] {
            assert_eq!(refused(&length.to_le_bytes()).class(), Class::HeaderTooLarge);
        }
        let zip = refused(b"PK\x03\x04\0\0\x08\x08\0\0").to_string();
        assert!(zip.contains("zip archive") && zip.contains("HuggingFaceStorageWriter"), "{zip}");
        let swapped = refused(&[[0, 0, 0, 0, 0, 0, 0, 2].as_slice(), b"{}"].concat()).to_string();
        assert!(swapped.contains("big-endian"), "{swapped}");
    }

    #[test]
    fn a_header_is_one_object_padded_with_spaces() {
        for header in [
            "",
            " {}",
            "[]",
            "{",
            "{}x}",
            "{}{}",
            "{} {}",
            "\u{feff}{}",
            "{}\n",
            "{\"a\"}",
            "{1:2}",
            "{'a':1}",
            "x",
        ] {
            assert_eq!(refused(&file(header, &[])).class(), Class::HeaderNotJson, "{header:?}");
        }
        let padded = refused(&file("{}  \0\0", &[]));
        assert_eq!(padded.class(), Class::HeaderNotJson);
        assert!(
            padded.to_string().contains("a zero byte at byte 12")
                && padded.to_string().contains("only spaces")
        );
        let mut bytes = file("{\"é\":1}", &[]);
        bytes[11] = 0xFF;
        assert_eq!(refused(&bytes).class(), Class::HeaderNotUtf8);
        assert!(read(&file("{}      ", &[])).is_ok());
    }

    #[test]
    fn no_key_stands_twice() {
        let good = entry("[2]", "[0,8]");
        for header in [
            format!("{{\"t\":{good},\"t\":{good}}}"),
            format!("{{\"t\":{good},\"u\":{},\"t\":{good}}}", entry("[0]", "[8,8]")),
            format!("{{\"t\":{good},\"\\u0074\":{good}}}"),
            format!("{{\"t\":{{\"dtype\":\"F32\",{}}}", &good[1..]),
            format!("{{\"__metadata__\":{{}},\"__metadata__\":{{}},\"t\":{good}}}"),
            format!("{{\"__metadata__\":{{\"a\":\"1\",\"a\":\"1\"}},\"t\":{good}}}"),
        ] {
            assert_eq!(refused(&file(&header, &[0; 8])).class(), Class::DuplicateKey, "{header}");
        }
    }

    #[test]
    fn metadata_is_a_map_of_strings() {
        for metadata in ["1", "null", "[]", "\"x\"", "{\"a\":1}", "{\"a\":null}", "{\"a\":{\"b\":\"c\"}}"] {
            let error = refused(&file(&format!("{{\"__metadata__\":{metadata}}}"), &[]));
            assert_eq!(error.class(), Class::BadMetadata, "{metadata}");
            assert!(error.to_string().contains("__metadata__"), "{error}");
        }
        let many: Vec<String> = (0..=json::MEMBERS).map(|key| format!("\"{key}\":\"\"")).collect();
        let error = refused(&file(&format!("{{\"__metadata__\":{{{}}}}}", many.join(",")), &[]));
        assert_eq!(error.class(), Class::LimitExceeded);
    }

    #[test]
    fn entries_are_checked_field_by_field() {
        let deep = format!("{}1{}", "[".repeat(200), "]".repeat(200));
        for (text, class) in [
            ("1".to_owned(), Class::BadEntry),
            ("null".to_owned(), Class::BadEntry),
            (deep, Class::BadEntry),
            ("{}".to_owned(), Class::BadEntry),
            ("{\"dtype\":\"F32\",\"shape\":[2]}".to_owned(), Class::BadEntry),
            ("{\"dtype\":\"F32\",\"data_offsets\":[0,8]}".to_owned(), Class::BadEntry),
            ("{\"shape\":[2],\"data_offsets\":[0,8]}".to_owned(), Class::BadEntry),
            ("{\"dtype\":32,\"shape\":[2],\"data_offsets\":[0,8]}".to_owned(), Class::BadEntry),
            ("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}".to_owned(), Class::BadEntry),
            ("{\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]}".to_owned(), Class::BadDtype),
            ("{\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]}".to_owned(), Class::BadDtype),
            (entry("2", "[0,8]"), Class::BadEntry),
            (entry("[\"2\"]", "[0,8]"), Class::BadEntry),
            (entry("[null]", "[0,8]"), Class::BadEntry),
            (entry("[true]", "[0,8]"), Class::BadEntry),
            (entry("[-2]", "[0,8]"), Class::BadShape),
            (entry("[2.0]", "[0,8]"), Class::BadShape),
            (entry("[18446744073709551616]", "[0,8]"), Class::BadShape),
            (entry("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]"), Class::LimitExceeded),
            (entry("[4294967296,4294967296]", "[0,0]"), Class::ShapeOverflow),
            (entry("[4611686018427387904]", "[0,0]"), Class::ShapeOverflow),
            (entry("[18446744073709551615,0]", "[0,0]"), Class::ShapeOverflow),
            (entry("[2]", "[0]"), Class::BadEntry),
            (entry("[2]", "[0,8,8]"), Class::BadEntry),
            (entry("[2]", "\"0,8\""), Class::BadEntry),
            (entry("[2]", "[-8,0]"), Class::BadOffsets),
            (entry("[2]", "[8,0]"), Class::BadOffsets),
            (entry("[2]", "[4,12]"), Class::BadOffsets),
            (entry("[2]", "[18446744073709551608,0]"), Class::BadOffsets),
            (entry("[3]", "[0,8]"), Class::SizeMismatch),
            (entry("[1000,1000]", "[0,8]"), Class::SizeMismatch),
            (entry("[3]", "[0,12]"), Class::Truncated),
            (entry("[1]", "[0,4]"), Class::TrailingBytes),
        ] {
            let error = refused_entry(&text);
            assert_eq!(error.class(), class, "{text}: {error}");
            assert_eq!(error.tensor(), Some("t"), "{text}: {error}");
        }
    }

    #[test]
    fn ranges_tile_the_data() {
        let two = |first: &str, second: &str| {
            refused(&file(&format!("{{\"a\":{first},\"b\":{second}}}"), &[0; 16])).class()
        };
        assert_eq!(two(&entry("[2]", "[0,8]"), &entry("[2]", "[4,12]")), Class::BadOffsets);
        assert_eq!(two(&entry("[2]", "[0,8]"), &entry("[2]", "[0,8]")), Class::BadOffsets);
        assert_eq!(two(&entry("[2]", "[8,16]"), &entry("[1]", "[0,4]")), Class::BadOffsets);
        assert_eq!(two(&entry("[4]", "[0,16]"), &entry("[0]", "[4,4]")), Class::BadOffsets);
        assert_eq!(refused(&file("{}", &[0])).class(), Class::TrailingBytes);
    }

    #[test]
    fn misleading_names_are_refused() {
        for name in ["/etc/x", "../x", "a\\u0000", &"x".repeat(1025)] {
            let header = format!("{{\"{name}\":{}}}", entry("[2]", "[0,8]"));
            assert_eq!(refused(&file(&header, &[0; 8])).class(), Class::UnsafeName, "{name}");
        }
    }

    #[test]
    fn messages_do_not_repeat_a_whole_header() {
        let error = refused_entry(&format!("{:?}", "x".repeat(1 << 20)));
        assert!(error.to_string().len() < 1000);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = read(&bytes);
            let _ = parse(&bytes, 100);
        }

        #[test]
        fn a_changed_header_is_read_or_refused(
            changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
            cut in any::<proptest::sample::Index>(),
            is_cut in any::<bool>(),
        ) {
            let text = format!(
                concat!(
                    r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{\"b\":{{\"saved_offsets\":[0,4]}}}}"}},"#,
                    r#""b":{},"a":{}}}   "#
                ),
                entry("[1,1]", "[0,4]"),
                entry("[2,3]", "[4,28]")
            );
            let mut bytes = file(&text, &[0; 28]);
            for (place, value) in changes {
                // Often digits and punctuation, which keep the JSON whole.
                let value = if value < 128 { b"0123456789-.eE[]{},:\" "[usize::from(value % 22)] } else { value };
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
            if is_cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(header) = read(&bytes) {
                let data: u64 = header.entries.iter().map(|entry| entry.end - entry.begin).sum();
                prop_assert!(data <= u64::try_from(bytes.len()).unwrap());
            }
        }
    }
}
