//! Tables of which only some rows are kept: the list of those rows, reading them, and where each row went.
//!
//! A list of rows is a text file beside the checkpoint (one decimal number a line, from 0 on; blank lines, spaces
//! around a number and a byte order mark in front are tolerated), or an integer tensor of the checkpoint. Rows are
//! kept in ascending order, each once. Where a row went is told by the *remapping*: a 32-bit integer for every row
//! of the source, its number among the kept rows, or -1. That is the dense form that FBGEMM's lookups in pruned
//! tables take (`index_remappings` of `torch.ops.fbgemm.pruned_array_lookup`, where -1 is a pruned row). It is made
//! as needed, never held whole.
//!
//! Rows that lie close together are read in one go, gaps included; so a dense selection is read as fast as a whole
//! table, and a sparse one does not read what it does not need.

use std::ops::Range;
use std::sync::Arc;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::policy::KeepRows;

use super::gather::{Scratch, read_elements};
use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::source::SourceFile;

/// How much of a list is read at once, in bytes.
const LIST_BYTES: usize = 64 << 10;
/// Rows between kept ones are read and thrown away up to this size, since another read would cost more.
const GAP_BYTES: u64 = 4096;
/// What a text file may begin with: a byte order mark, in UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Most bytes that are read in one go where there are gaps between kept rows.
const SPAN_BYTES: u64 = 256 << 10;
/// What a row's number takes in memory.
const NUMBER_BYTES: u64 = 4;

/// The rows of one table that are kept.
#[derive(Debug, PartialEq, Eq)]
pub struct KeptRows {
    /// Ascending, each once; a 32-bit integer each, since remappings have no room for more.
    rows: Vec<u32>,
    source_rows: u64,
}

/// Buffers that reads share, so that they are allocated once.
#[derive(Debug, Default)]
pub struct Buffers {
    /// What the gathering of slices needs.
    pub scratch: Scratch,
    span: Vec<u8>,
}

impl KeptRows {
    /// How many rows are kept.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.rows.len() as u64
    }

    /// How many rows the table has in the checkpoint.
    #[must_use]
    pub const fn source_rows(&self) -> u64 {
        self.source_rows
    }

    /// What the list takes in memory, in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.count().saturating_mul(NUMBER_BYTES)
    }

    /// The number in the checkpoint of the kept row `row`; `None` behind the last one.
    #[must_use]
    pub fn source_row(&self, row: u64) -> Option<u64> {
        usize::try_from(row).ok().and_then(|row| self.rows.get(row)).copied().map(u64::from)
    }

    /// Fills `out` with the remapping of the source's rows from `first` on: little-endian I32.
    pub fn remapping(&self, first: u64, out: &mut [u8]) {
        out.fill(0xff);
        let (places, _) = out.as_chunks_mut::<4>();
        let from = self.rows.partition_point(|&row| u64::from(row) < first);
        for (new, &row) in self.rows.iter().enumerate().skip(from) {
            let place = usize::try_from(u64::from(row) - first).ok().and_then(|at| places.get_mut(at));
            let (Some(place), Ok(new)) = (place, i32::try_from(new)) else { return };
            *place = new.to_le_bytes();
        }
    }

    /// The kept rows `kept`, as runs of them that are read in one go for rows of `row_bytes` bytes each.
    fn spans(&self, kept: Range<usize>, row_bytes: u64) -> impl Iterator<Item = &[u32]> {
        let mut rest = self.rows.get(kept).unwrap_or_default();
        std::iter::from_fn(move || {
            let first = u64::from(*rest.first()?);
            let mut dense = true;
            let joins = |pair: &[u32]| {
                let &[before, after] = pair else { return false };
                let gap = u64::from(after.saturating_sub(before).saturating_sub(1));
                let span = (u64::from(after) - first).saturating_add(1).saturating_mul(row_bytes);
                dense &= gap == 0;
                dense || (gap.saturating_mul(row_bytes) <= GAP_BYTES && span <= SPAN_BYTES)
            };
            let joined = rest.windows(2).map(joins).take_while(|&joins| joins).count();
            let (span, behind) = rest.split_at_checked(joined + 1)?;
            rest = behind;
            Some(span)
        })
    }

    /// Fills `out` with the elements of the pruned `table` from element `first` on, as
    /// [`read_elements`] does of a whole one.
    ///
    /// # Errors
    /// [`Class::SizeMismatch`] where `out` reaches beyond the last kept row; else as [`read_elements`].
    pub fn read(&self, table: &Tensor, first: u64, out: &mut [u8], buffers: &mut Buffers) -> Result<()> {
        let beyond = || {
            let detail = format!("{} rows are kept, and more of them are read", self.count());
            ReadError::new(Class::SizeMismatch, detail).of_tensor(table.name.as_str())
        };
        let &[_, width] = table.shape.as_slice() else { return Err(beyond()) };
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| beyond());
        let (width, item) = (width.max(1), table.dtype.size());
        let row_bytes = width.saturating_mul(item);
        let (mut position, mut out) = (first, out);
        while !out.is_empty() {
            let (row, column) = (position / width, position % width);
            let whole_rows = if column == 0 { out.len() as u64 / row_bytes } else { 0 };
            let source_row = self.source_row(row).ok_or_else(beyond)?;
            let elements = if whole_rows > 0 {
                whole_rows.saturating_mul(width)
            } else {
                (width - column).min(out.len() as u64 / item)
            };
            let (now, behind) =
                out.split_at_mut_checked(size(elements.saturating_mul(item))?).ok_or_else(beyond)?;
            if whole_rows > 0 {
                let end = row.saturating_add(whole_rows);
                if end > self.count() {
                    return Err(beyond());
                }
                self.read_rows(table, size(row)?..size(end)?, width, now, buffers)?;
            } else if elements > 0 {
                let at = source_row.saturating_mul(width).saturating_add(column);
                read_elements(table, at, now, &mut buffers.scratch)?;
            } else {
                return Err(beyond());
            }
            (position, out) = (position.saturating_add(elements), behind);
        }
        Ok(())
    }

    /// Fills `out` with whole rows.
    fn read_rows(
        &self,
        table: &Tensor,
        kept: Range<usize>,
        width: u64,
        mut out: &mut [u8],
        buffers: &mut Buffers,
    ) -> Result<()> {
        let Ok(row_bytes) = usize::try_from(width.saturating_mul(table.dtype.size())) else { return Ok(()) };
        for span in self.spans(kept, row_bytes as u64) {
            let (Some(&first), Some(&last)) = (span.first(), span.last()) else { continue };
            let taken = std::mem::take(&mut out);
            let Some((now, behind)) = taken.split_at_mut_checked(span.len().saturating_mul(row_bytes)) else {
                return Ok(());
            };
            out = behind;
            let at = u64::from(first).saturating_mul(width);
            let rows = (last - first) as usize + 1;
            if rows == span.len() {
                read_elements(table, at, now, &mut buffers.scratch)?;
                continue;
            }
            buffers.span.resize(rows.saturating_mul(row_bytes), 0);
            read_elements(table, at, &mut buffers.span, &mut buffers.scratch)?;
            for (&row, place) in span.iter().zip(now.chunks_exact_mut(row_bytes)) {
                let from = (row - first) as usize * row_bytes;
                if let Some(bytes) = buffers.span.get(from..from + row_bytes) {
                    place.copy_from_slice(bytes);
                }
            }
        }
        Ok(())
    }
}

/// Reads the list of the rows of `table` to keep, and gives a note where it names rows twice. `memory` is how many
/// bytes such lists may take yet, and is less afterwards.
///
/// # Errors
/// [`Class::RowListMissing`], [`Class::RowListBad`], [`Class::IndexPathEscape`], or [`Class::LimitExceeded`] where the
/// list takes too much memory; each names the table and the list.
pub fn read_list(
    checkpoint: &Checkpoint,
    table: &Tensor,
    list: &KeepRows,
    memory: &mut u64,
) -> Result<(KeptRows, Option<String>)> {
    let read = || {
        let list = List::open(checkpoint, list)?;
        let source_rows = table.shape.first().copied().unwrap_or(0);
        let mut count = 0u64;
        if let List::Tensor(tensor) = &list {
            check_memory(tensor.elements(), *memory)?;
        }
        list.each(&mut |place, row| {
            count += 1;
            if u64::try_from(row).is_ok_and(|row| row < source_rows) {
                return Ok(());
            }
            let detail =
                format!("{}: there is no row {row}; the table has {source_rows} rows", list.place(place));
            Err(ReadError::new(Class::RowListBad, detail))
        })?;
        if count == 0 && source_rows > 0 {
            let detail = "the list of rows to keep is empty; to leave the table out, drop it".to_owned();
            return Err(ReadError::new(Class::RowListBad, detail));
        }
        let taken = check_memory(count, *memory)?;
        let mut rows = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        list.each(&mut |_, row| {
            rows.extend(u32::try_from(row));
            Ok(())
        })?;
        Ok((KeptRows { rows, source_rows }, taken))
    };
    let (mut kept, taken) = read().map_err(|error: ReadError| {
        let error = error.of_tensor(table.name.as_str());
        if let KeepRows::File(path) = list { error.in_file(path) } else { error }
    })?;
    *memory = memory.saturating_sub(taken);
    if !kept.rows.is_sorted() {
        kept.rows.sort_unstable();
    }
    let named = kept.rows.len();
    kept.rows.dedup();
    let twice = named - kept.rows.len();
    let note = format!("{}: keep_rows names {twice} rows more than once; each is kept once", table.name);
    Ok((kept, (twice > 0).then_some(note)))
}

/// What the numbers of `count` rows take in memory, where `memory` suffices.
fn check_memory(count: u64, memory: u64) -> Result<u64> {
    let needed = count.saturating_mul(NUMBER_BYTES);
    if needed <= memory {
        return Ok(needed);
    }
    let detail = format!(
        "its list of {count} rows to keep takes {needed} bytes, and the memory budget has {memory} left for such \
         lists; raise --memory"
    );
    Err(ReadError::new(Class::LimitExceeded, detail))
}

/// Where the numbers stand.
enum List<'c> {
    File(Arc<SourceFile>),
    Tensor(&'c Tensor),
}

impl<'c> List<'c> {
    fn open(checkpoint: &'c Checkpoint, list: &KeepRows) -> Result<Self> {
        match list {
            KeepRows::File(path) => match checkpoint.source.file(path) {
                Ok(file) => Ok(Self::File(file)),
                Err(error) if error.class() == Class::NotFound => {
                    let detail = "the list of rows to keep is not there, relative to the checkpoint's folder";
                    Err(ReadError::new(Class::RowListMissing, detail))
                }
                Err(error) => Err(error),
            },
            KeepRows::Tensor(name) => checkpoint.tensor(name).map(Self::Tensor).ok_or_else(|| {
                ReadError::new(
                    Class::RowListMissing,
                    format!("the list of rows, tensor {name:?}, is not there"),
                )
            }),
        }
    }

    /// Calls `visit` with every number and its place: a line from 1 on, or an index from 0 on.
    fn each(&self, visit: &mut dyn FnMut(u64, i128) -> Result<()>) -> Result<()> {
        match self {
            Self::File(file) => each_line(file, visit),
            Self::Tensor(tensor) => each_element(tensor, visit),
        }
    }

    fn place(&self, place: u64) -> String {
        match self {
            Self::File(_) => format!("line {place}"),
            Self::Tensor(tensor) => format!("element {place} of {:?}", tensor.name.as_str()),
        }
    }
}

fn each_line(file: &SourceFile, visit: &mut dyn FnMut(u64, i128) -> Result<()>) -> Result<()> {
    let mut lines = Lines { line: 1, number: None, ended: false };
    let mut buffer = vec![0; usize::try_from(file.len()).map_or(LIST_BYTES, |length| length.min(LIST_BYTES))];
    let mut offset = 0;
    while offset < file.len() {
        let left = usize::try_from(file.len() - offset).unwrap_or(usize::MAX).min(buffer.len());
        buffer.truncate(left);
        file.read_exact_at(&mut buffer, offset)?;
        let text =
            if offset == 0 { buffer.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&buffer) } else { &buffer };
        for (at, &byte) in text.iter().enumerate() {
            lines.take(byte, text.get(at..).unwrap_or_default(), visit)?;
        }
        offset += buffer.len() as u64;
    }
    // The last line may end without a line's end.
    lines.take(b'\n', b"\n", visit)
}

/// The line of a list that is being read.
struct Lines {
    line: u64,
    number: Option<u64>,
    /// Whether a space stood behind the number.
    ended: bool,
}

impl Lines {
    /// Takes `byte`, with which `text` begins.
    fn take(&mut self, byte: u8, text: &[u8], visit: &mut dyn FnMut(u64, i128) -> Result<()>) -> Result<()> {
        match byte {
            b'\n' => {
                if let Some(number) = self.number.take() {
                    visit(self.line, number.into())?;
                }
                self.line += 1;
                self.ended = false;
            }
            b' ' | b'\t' | b'\r' => self.ended = self.number.is_some(),
            b'0'..=b'9' if !self.ended => {
                // Too large a number is no row of any table, whichever it is.
                let before = self.number.unwrap_or(0).saturating_mul(10);
                self.number = Some(before.saturating_add((byte - b'0').into()));
            }
            _ => {
                // Cut off at a read's end, or no text at all: the byte itself is shown.
                let letter = text.utf8_chunks().next().and_then(|text| text.valid().chars().next());
                let shown =
                    letter.map_or_else(|| format!("byte {byte:#04x}"), |letter| format!("{letter:?}"));
                let detail = format!(
                    "line {}: {shown} where only a row's number may stand, a decimal number a line",
                    self.line
                );
                return Err(ReadError::new(Class::RowListBad, detail));
            }
        }
        Ok(())
    }
}

fn each_element(tensor: &Tensor, visit: &mut dyn FnMut(u64, i128) -> Result<()>) -> Result<()> {
    let (dtype, elements) = (tensor.dtype, tensor.elements());
    let at_once = LIST_BYTES as u64 / dtype.size();
    let mut scratch = Scratch::default();
    let mut buffer = Vec::new();
    let mut first = 0;
    while first < elements {
        let count = at_once.min(elements - first);
        buffer.resize(usize::try_from(count * dtype.size()).unwrap_or(0), 0);
        read_elements(tensor, first, &mut buffer, &mut scratch)?;
        for (place, number) in (first..).zip(numbers(dtype, &buffer)) {
            visit(place, number)?;
        }
        first += count;
    }
    Ok(())
}

/// The integers in `bytes`.
fn numbers(dtype: Dtype, bytes: &[u8]) -> impl Iterator<Item = i128> {
    let signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    bytes.chunks_exact(usize::try_from(dtype.size()).unwrap_or(1)).map(move |number| {
        let negative = signed && number.last().is_some_and(|&byte| byte > 0x7f);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        if let Some(low) = wide.get_mut(..number.len()) {
            low.copy_from_slice(number);
        }
        i128::from_le_bytes(wide)
    })
}

#[cfg(test)]
mod tests;
