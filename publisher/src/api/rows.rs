//! Rows of a table by number, out of chunks that were checked.

use std::sync::Arc;

use bytes::Bytes;

use weighbridge_schemas::encoding::Form;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotManifest, SnapshotTensor};
use weighbridge_snapshots::error::{Class, StoreError};

use super::answers::Refusal;
use super::objects::Objects;
use super::requests::LookUp;

/// Most bytes of rows in an answer.
const ANSWER_BYTES: u64 = 3 << 20;
/// Most chunks that one request may need.
const MOST_CHUNKS: usize = 256;
/// Bytes of a number in a remapping.
const NUMBER: u64 = 4;

/// Rows, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// The rows' bytes.
    pub data: Vec<u8>,
    /// Values a row.
    pub width: u32,
    /// Bytes a row.
    pub row_bytes: u32,
    /// The places in the request of rows that were pruned.
    pub pruned: Vec<u32>,
    /// How they are stored.
    pub form: Form,
}

/// A tensor's place.
struct Table<'m> {
    tensor: &'m SnapshotTensor,
    rows: u64,
    width: u64,
    row_bytes: u64,
}

/// Looks rows up.
///
/// # Errors
/// Where there is no such table, it has no such row, or too much is asked for; else as the store fails.
pub async fn look_up(
    objects: &Objects,
    model: &ModelName,
    manifest: &Arc<SnapshotManifest>,
    asked: &LookUp,
) -> Result<Rows, Refusal> {
    let name = asked.tensor.as_str();
    let table = table(manifest, name)?;
    let row_bytes = if asked.encoded { table.row_bytes } else { table.width.saturating_mul(NUMBER) };
    let most = ANSWER_BYTES / row_bytes.max(1);
    if asked.rows.len() as u64 > most {
        let why =
            format!("rows: {} are too many: an answer has room for {most} of this table", asked.rows.len());
        return Err(Refusal::bad_request(why));
    }
    let source_rows = table.tensor.pruned.as_ref().map_or(table.rows, |pruned| pruned.source_rows);
    if let Some(row) = asked.rows.iter().find(|&&row| row >= source_rows) {
        let why = format!(
            "rows: {row} is not 0 to {}, which are the rows of {name:?}",
            source_rows.saturating_sub(1)
        );
        return Err(Refusal::bad_request(why));
    }
    let places = match &table.tensor.pruned {
        None => asked.rows.iter().map(|&row| Some(row)).collect(),
        Some(pruned) => {
            let remapping = find(manifest, pruned.index_remapping.as_str())?;
            remapped(objects, model, manifest, remapping, &asked.rows, table.rows).await?
        }
    };
    let size = usize::try_from(row_bytes).unwrap_or(0);
    let mut data = vec![0; asked.rows.len() * size];
    let spans: Vec<_> = places
        .iter()
        .enumerate()
        .filter_map(|(place, row)| Some((place, table.tensor.begin + row.as_ref()? * table.row_bytes)))
        .collect();
    let form = table.tensor.form();
    let mut values = vec![0f32; if asked.encoded { 0 } else { size / 4 }];
    let mut undecodable = false;
    gather(objects, model, file(manifest, table.tensor)?, spans, table.row_bytes, |place, row| {
        let Some(into) = data.get_mut(place * size..(place + 1) * size) else { return };
        if asked.encoded {
            into.copy_from_slice(row);
        } else if form.decode_row(table.tensor.source_dtype, row, &mut values) {
            for (bytes, value) in into.as_chunks_mut::<4>().0.iter_mut().zip(&values) {
                *bytes = value.to_le_bytes();
            }
        } else {
            undecodable = true;
        }
    })
    .await?;
    if undecodable {
        let why = format!("tensor: {name:?} holds no floating-point numbers; ask for its encoded rows");
        return Err(Refusal::bad_request(why));
    }
    let pruned = (0u32..).zip(&places).filter(|(_, row)| row.is_none()).map(|(place, _)| place).collect();
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(Rows { data, width: narrow(table.width), row_bytes: narrow(row_bytes), pruned, form })
}

fn find<'m>(manifest: &'m SnapshotManifest, name: &str) -> Result<&'m SnapshotTensor, Refusal> {
    manifest.tensors.iter().find(|tensor| tensor.name.as_str() == name).ok_or_else(|| {
        let why = "the snapshot has no such tensor; its manifest lists them";
        StoreError::new(Class::NotFound, name, why).into()
    })
}

fn table<'m>(manifest: &'m SnapshotManifest, name: &str) -> Result<Table<'m>, Refusal> {
    let tensor = find(manifest, name)?;
    let [rows, width] = tensor.shape[..] else {
        return Err(Refusal::bad_request(format!("tensor: {name:?} is no table of rows")));
    };
    let row_bytes = tensor.form().row_bytes(width, tensor.source_dtype).filter(|&bytes| bytes > 0);
    let row_bytes =
        row_bytes.ok_or_else(|| Refusal::bad_request(format!("tensor: the rows of {name:?} are empty")))?;
    Ok(Table { tensor, rows, width, row_bytes })
}

fn file<'m>(manifest: &'m SnapshotManifest, tensor: &SnapshotTensor) -> Result<&'m SnapshotFile, Refusal> {
    // A manifest that was read has the file of each of its tensors.
    manifest
        .files
        .iter()
        .find(|file| file.name == tensor.file)
        .ok_or_else(|| damaged(&tensor.file, "no such file"))
}

fn damaged(file: &str, why: &str) -> Refusal {
    StoreError::new(Class::Integrity, file, why).into()
}

/// Where the rows of a pruned table went; `None` for one that was pruned.
async fn remapped(
    objects: &Objects,
    model: &ModelName,
    manifest: &SnapshotManifest,
    remapping: &SnapshotTensor,
    rows: &[u64],
    kept: u64,
) -> Result<Vec<Option<u64>>, Refusal> {
    let spans = rows.iter().enumerate().map(|(place, row)| (place, remapping.begin + row * NUMBER)).collect();
    let mut places = vec![None; rows.len()];
    gather(objects, model, file(manifest, remapping)?, spans, NUMBER, |place, number| {
        let number = number.try_into().map_or(-1, i32::from_le_bytes);
        if let Some(into) = places.get_mut(place) {
            *into = u64::try_from(number).ok().filter(|&row| row < kept);
        }
    })
    .await?;
    Ok(places)
}

/// Hands `length` bytes of `file` from each of the offsets to `take`, with the place that stands before it. Chunks are
/// read once each, in their order.
async fn gather(
    objects: &Objects,
    model: &ModelName,
    file: &SnapshotFile,
    mut spans: Vec<(usize, u64)>,
    length: u64,
    mut take: impl FnMut(usize, &[u8]),
) -> Result<(), Refusal> {
    spans.sort_unstable_by_key(|&(_, offset)| offset);
    let mut chunks = Chunks { objects, model, file, next: 0, end: 0, last: Vec::new() };
    check_chunks(file, &spans, length)?;
    let mut row = Vec::new();
    for (place, offset) in spans {
        row.clear();
        chunks.append(offset, offset + length, &mut row).await?;
        if row.len() as u64 != length {
            return Err(damaged(&file.name, "it ends within a row"));
        }
        take(place, &row);
    }
    Ok(())
}

/// Refuses what would need too many chunks.
fn check_chunks(file: &SnapshotFile, spans: &[(usize, u64)], length: u64) -> Result<(), Refusal> {
    let (mut needed, mut end) = (0, 0);
    let mut left = spans.iter().peekable();
    for chunk in &file.chunks {
        end += chunk.size;
        let before = left.len();
        while left.next_if(|(_, offset)| offset + length <= end).is_some() {}
        let begins_here = left.peek().is_some_and(|(_, offset)| *offset < end);
        needed += usize::from(left.len() < before || begins_here);
    }
    if needed <= MOST_CHUNKS {
        return Ok(());
    }
    let why = format!(
        "rows: they lie in {needed} chunks, and at most {MOST_CHUNKS} are read for one request; ask for fewer, or for \
         rows that lie closer together"
    );
    Err(Refusal::bad_request(why))
}

/// A file's chunks, read in their order.
struct Chunks<'a> {
    objects: &'a Objects,
    model: &'a ModelName,
    file: &'a SnapshotFile,
    /// The first chunk that has not been passed.
    next: usize,
    /// Where the chunks before it end.
    end: u64,
    /// Chunks that were read last, by number; a row may begin in one and end in the next.
    last: Vec<(usize, Bytes)>,
}

impl Chunks<'_> {
    /// Appends the file's bytes from `begin` to `end`; no call begins before the one before it.
    async fn append(&mut self, begin: u64, end: u64, into: &mut Vec<u8>) -> Result<(), Refusal> {
        while let Some(chunk) = self.file.chunks.get(self.next).filter(|chunk| self.end + chunk.size <= begin)
        {
            self.end += chunk.size;
            self.next += 1;
        }
        let (mut at, mut number, mut chunk_begin) = (begin, self.next, self.end);
        while at < end {
            let Some(&chunk) = self.file.chunks.get(number) else { break };
            let bytes = self.chunk(number, chunk).await?;
            let from = usize::try_from(at - chunk_begin).unwrap_or(usize::MAX);
            let to = usize::try_from(end.min(chunk_begin + chunk.size) - chunk_begin).unwrap_or(0);
            into.extend_from_slice(bytes.get(from..to).unwrap_or_default());
            chunk_begin += chunk.size;
            (at, number) = (chunk_begin, number + 1);
        }
        Ok(())
    }

    async fn chunk(&mut self, number: usize, chunk: Chunk) -> Result<Bytes, Refusal> {
        if let Some((_, bytes)) = self.last.iter().find(|(known, _)| *known == number) {
            return Ok(bytes.clone());
        }
        let bytes = self.objects.chunk(self.model, chunk).await?;
        self.last.retain(|(known, _)| known + 1 == number);
        self.last.push((number, bytes.clone()));
        Ok(bytes)
    }
}
