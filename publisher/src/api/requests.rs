//! What requests say, read and checked before it is used. Nothing here asks the store.

use std::fmt::Display;
use std::str::FromStr;

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName, TensorName};
use weighbridge_snapshots::reference::{PREFIX_DIGITS, Reference};

use super::answers::Refusal;
use super::proto::{ChunkRange, LookUpRowsRequest, RowForm};

/// Most chunks of one request.
pub const CHUNKS: usize = 10_000;
/// Most rows of one request.
pub const ROWS: usize = 100_000;
/// Longest id that a caller gives a request, in bytes.
pub const REQUEST_ID_BYTES: usize = 128;

/// Longest place in a list, in bytes.
const TOKEN_BYTES: usize = 16 << 10;
/// Digits of a snapshot's id.
const ID_DIGITS: usize = 64;

fn bad(field: &'static str, why: impl Display) -> Refusal {
    Refusal::bad_field(field, why)
}

/// A field's value, or what is wrong with it.
///
/// # Errors
/// Where something is.
pub fn field<T, E: Display>(name: &'static str, value: Result<T, E>) -> Result<T, Refusal> {
    value.map_err(|why| bad(name, why))
}

/// A field that is text of a kind of its own.
///
/// # Errors
/// Where it is not.
pub fn parsed<T: FromStr<Err: Display>>(name: &'static str, text: &str) -> Result<T, Refusal> {
    field(name, text.parse())
}

/// As [`parsed`]; empty text is none.
///
/// # Errors
/// As [`parsed`].
pub fn optional<T: FromStr<Err: Display>>(name: &'static str, text: &str) -> Result<Option<T>, Refusal> {
    if text.is_empty() { Ok(None) } else { parsed(name, text).map(Some) }
}

/// Where a list goes on; `None` at its beginning.
///
/// # Errors
/// Where no answer gave it.
pub fn page_token<T: FromStr<Err: Display>>(text: &str) -> Result<Option<T>, Refusal> {
    if text.len() > TOKEN_BYTES {
        return Err(bad("page_token", "give what the answer before gave, as it was"));
    }
    optional("page_token", text)
}

/// A snapshot's id, or the first digits of it.
///
/// # Errors
/// Where it is neither.
pub fn digits(name: &'static str, text: &str) -> Result<String, Refusal> {
    let is_digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if is_digits && (PREFIX_DIGITS..=ID_DIGITS).contains(&text.len()) {
        return Ok(text.to_owned());
    }
    let why = format!(
        "it is no snapshot: give its id, {ID_DIGITS} lower-case hexadecimal digits, or the first {PREFIX_DIGITS} or \
         more of them"
    );
    Err(bad(name, why))
}

/// A model's name.
///
/// # Errors
/// Where it is none.
pub fn model(text: &str) -> Result<ModelName, Refusal> {
    text.parse().map_err(|error| bad("model", error))
}

/// A channel's name; empty: `prod`.
///
/// # Errors
/// Where it is none.
pub fn channel(text: &str) -> Result<ChannelName, Refusal> {
    let text = if text.is_empty() { "prod" } else { text };
    text.parse().map_err(|error| bad("channel", error))
}

/// A snapshot's whole id.
///
/// # Errors
/// Where it is none.
pub fn snapshot(text: &str) -> Result<SnapshotId, Refusal> {
    text.parse().map_err(|error| bad("snapshot", error))
}

/// What a model's name and what stands behind its `@` point at.
///
/// # Errors
/// Where they are no names.
pub fn reference(model_text: &str, at: &str) -> Result<Reference, Refusal> {
    let at = if at.is_empty() { None } else { Some(at.to_owned()) };
    if let Some(at) = &at {
        at.parse::<ChannelName>().map_err(|error| bad("at", error))?;
    }
    Ok(Reference { model: model(model_text)?, at })
}

/// How many items an answer has: as asked, from 1 to `most`; `default` for 0.
///
/// # Errors
/// Where it is more than `most`.
pub fn page_size(asked: u32, default: usize, most: usize) -> Result<usize, Refusal> {
    match usize::try_from(asked).unwrap_or(usize::MAX) {
        0 => Ok(default),
        asked if asked <= most => Ok(asked),
        asked => Err(bad("page_size", format!("{asked} is not 1 to {most}, or 0 for {default}"))),
    }
}

/// An id that a caller gives a request; `None` where it is empty.
///
/// # Errors
/// Where it is too long, or has control characters.
pub fn request_id(text: &str) -> Result<Option<&str>, Refusal> {
    if text.len() > REQUEST_ID_BYTES || text.chars().any(char::is_control) {
        let why = format!("it has more than {REQUEST_ID_BYTES} bytes, or control characters");
        return Err(bad("request_id", why));
    }
    Ok((!text.is_empty()).then_some(text))
}

/// Bytes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The chunk.
    pub chunk: ChunkId,
    /// The first byte.
    pub offset: u64,
    /// How many; `None`: all that follow.
    pub length: Option<u64>,
}

/// What is read of which chunks.
///
/// # Errors
/// Where there are none or too many, one has no chunk's name, or begins behind where any chunk ends.
pub fn ranges(asked: &[ChunkRange]) -> Result<Vec<Range>, Refusal> {
    if asked.is_empty() || asked.len() > CHUNKS {
        return Err(bad("chunks", format!("{} are not 1 to {CHUNKS}", asked.len())));
    }
    let range = |asked: &ChunkRange| {
        let chunk = asked.chunk.parse().map_err(|error| bad("chunks.chunk", error))?;
        let most = limits::LARGEST_CHUNK_BYTES;
        if asked.offset > most || asked.length > most {
            return Err(bad("chunks", format!("no chunk has more than {most} bytes")));
        }
        let length = (asked.length > 0).then_some(asked.length);
        Ok(Range { chunk, offset: asked.offset, length })
    };
    asked.iter().map(range).collect()
}

/// Which rows are looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookUp {
    /// Of which snapshot.
    pub reference: Reference,
    /// Of which table.
    pub tensor: TensorName,
    /// Their numbers.
    pub rows: Vec<u64>,
    /// Whether they are given as they are stored.
    pub encoded: bool,
}

/// Reads a request for rows.
///
/// # Errors
/// Where a name is none, or there are no rows or too many, or their form is not known.
pub fn look_up(asked: LookUpRowsRequest) -> Result<LookUp, Refusal> {
    let reference = reference(&asked.model, &asked.at)?;
    let tensor: TensorName = asked
        .tensor
        .parse()
        .map_err(|error| bad("tensor", format!("{}: {error}", shorten(&asked.tensor))))?;
    if asked.rows.is_empty() || asked.rows.len() > ROWS {
        return Err(bad("rows", format!("{} are not 1 to {ROWS}", asked.rows.len())));
    }
    let encoded = match RowForm::try_from(asked.form) {
        Ok(RowForm::Unspecified | RowForm::Decoded) => false,
        Ok(RowForm::Encoded) => true,
        Err(_) => return Err(bad("form", format!("{} is no form of rows", asked.form))),
    };
    Ok(LookUp { reference, tensor, rows: asked.rows, encoded })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_checked_before_they_are_used() {
        assert_eq!(channel("").unwrap().as_str(), "prod");
        assert!(model("../x").is_err() && channel("a/b").is_err() && snapshot("12").is_err());
        assert_eq!(page_size(0, 20, 100).unwrap(), 20);
        assert_eq!(page_size(100, 20, 100).unwrap(), 100);
        assert!(page_size(101, 20, 100).is_err());
        assert_eq!(request_id("").unwrap(), None);
        assert!(request_id("a\nb").is_err() && request_id(&"x".repeat(129)).is_err());
        assert!(reference("m", "a@b").is_err() && reference("m", "").unwrap().at.is_none());
    }

    #[test]
    fn digits_of_ids_and_places_in_lists_are_bounded() {
        for right in ["abcdef", &"0".repeat(ID_DIGITS)] {
            assert_eq!(digits("to", right).unwrap(), right);
        }
        for wrong in ["", "abcde", "ABCDEF", "prod", &"0".repeat(ID_DIGITS + 1)] {
            assert!(digits("to", wrong).unwrap_err().status().message().starts_with("to: "), "{wrong}");
        }
        assert!(page_token::<u64>("x").is_err() && page_token::<u64>(&"1".repeat(TOKEN_BYTES + 1)).is_err());
        assert_eq!((page_token::<u64>("").unwrap(), page_token("7").unwrap()), (None, Some(7u64)));
    }

    #[test]
    fn ranges_and_rows_have_bounds() {
        let chunk = ChunkId::of(b"c").to_string();
        let range = |offset, length| ChunkRange { chunk: chunk.clone(), offset, length };
        assert_eq!(ranges(&[range(5, 0)]).unwrap()[0].length, None);
        assert!(ranges(&[]).is_err() && ranges(&[range(u64::MAX, 0)]).is_err());
        assert!(ranges(&[range(0, u64::MAX)]).is_err());
        assert!(ranges(&vec![range(0, 0); CHUNKS + 1]).is_err());
        let asked = |rows: Vec<u64>, form| LookUpRowsRequest {
            model: "m".into(),
            at: String::new(),
            tensor: "t".into(),
            rows,
            form,
        };
        assert!(!look_up(asked(vec![1], 0)).unwrap().encoded && look_up(asked(vec![1], 2)).unwrap().encoded);
        assert!(look_up(asked(vec![], 0)).is_err() && look_up(asked(vec![1], 7)).is_err());
        assert!(look_up(asked(vec![0; ROWS + 1], 0)).is_err());
    }
}
