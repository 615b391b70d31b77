//! What requests say, read and checked before it is used. Nothing here asks the store.

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName, TensorName};
use weighbridge_snapshots::reference::Reference;

use super::answers::Refusal;
use super::proto::{ChunkRange, LookUpRowsRequest, RowForm};

/// Most chunks of one request.
pub const CHUNKS: usize = 10_000;
/// Most rows of one request.
pub const ROWS: usize = 100_000;
/// Longest id that a caller gives a request, in bytes.
pub const REQUEST_ID_BYTES: usize = 128;

fn bad(field: &str, why: impl std::fmt::Display) -> Refusal {
    Refusal::bad_request(format!("{field}: {why}"))
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
