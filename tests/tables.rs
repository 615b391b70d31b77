//! Synthetic embedding tables of any size, and what is common to every format that they are written in: their values,
//! how they are cut into pieces, and safetensors files.
//!
//! Values are a function of the table's name and of the place in the table alone. So the same tables can be written in
//! every format, however they are cut, and a publish of any of them has to give the same chunks.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::{Value, json};

/// Values of a pattern: a prime, so that no row, block of rows or chunk comes again before billions of values.
const PERIOD: u64 = 4_194_301;
/// Values that are taken from a pattern at once.
const STEP: u64 = 1 << 18;

/// Values like those of a trained table: nearly normally distributed with deviation 0.05, the same in every run. They
/// are made once; tables repeat them from different places on, so that gigabytes cost no more than their copying.
#[derive(Debug)]
pub struct Pattern(Vec<u8>);

impl Pattern {
    /// Takes 16 MiB, and some milliseconds.
    #[must_use]
    pub fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::new();
        for _ in 0..PERIOD {
            // xorshift: cheap, and good enough to fill tables with.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend(nearly_normal(state).to_le_bytes());
        }
        Self(bytes)
    }

    /// The bytes of `count` values from the value `first` on, in slices.
    fn slices(&self, first: u64, count: u64) -> impl Iterator<Item = &[u8]> {
        let (mut at, mut left) = (first % PERIOD, count);
        std::iter::from_fn(move || {
            let step = left.min(PERIOD - at).min(STEP);
            let bytes = self.0.get(index(at * 4)..index((at + step) * 4))?;
            (at, left) = ((at + step) % PERIOD, left - step);
            (step > 0).then_some(bytes)
        })
    }

    /// The first `count` values as bytes, in memory.
    #[must_use]
    pub fn bytes(&self, count: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(index(count * 4));
        self.slices(0, count).for_each(|slice| bytes.extend(slice));
        bytes
    }
}

impl Default for Pattern {
    fn default() -> Self {
        Self::new()
    }
}

/// The sum of four uniform numbers, moved and scaled to mean 0 and deviation 0.05: exact in binary32.
#[expect(clippy::cast_precision_loss, reason = "18 bits fit")]
fn nearly_normal(bits: u64) -> f32 {
    let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
    (sum as f32 / 65_536.0 - 2.0) * 0.086_6
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A table of F32.
#[derive(Debug, Clone)]
pub struct Table<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The number of rows.
    pub rows: u64,
    /// The number of columns.
    pub width: u64,
    /// What it holds.
    pub values: Values<'a>,
}

/// What a table holds.
#[derive(Debug, Clone)]
pub enum Values<'a> {
    /// Row, column and value of what is not zero; in order, each place once. Files are sparse: gigabytes cost little.
    Sparse(&'a [(u64, u64, f32)]),
    /// The pattern, from a place on that depends on the table's name.
    Dense(&'a Pattern),
}

impl<'a> Table<'a> {
    /// A table full of values.
    #[must_use]
    pub fn dense(name: &'a str, rows: u64, width: u64, pattern: &'a Pattern) -> Self {
        Self { name, rows, width, values: Values::Dense(pattern) }
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows * self.width * 4
    }

    /// The table in one piece.
    #[must_use]
    pub fn whole(&self) -> Piece<'_> {
        Piece { table: self, rank: 0, offsets: [0, 0], sizes: [self.rows, self.width] }
    }

    /// The table in as many pieces as `cut` says, one a rank; without those in which nothing is left.
    #[must_use]
    pub fn pieces(&self, cut: Cut) -> Vec<Piece<'_>> {
        let (ranks, dimension) = match cut {
            Cut::Rows(ranks) => (ranks.max(1), 0),
            Cut::Columns(ranks) => (ranks.max(1), 1),
        };
        let whole = self.whole();
        let length = if dimension == 0 { self.rows } else { self.width };
        let step = length.div_ceil(ranks);
        let mut pieces = Vec::new();
        for rank in 0..ranks {
            let (begin, end) = ((rank * step).min(length), ((rank + 1) * step).min(length));
            let mut piece = Piece { rank, ..whole.clone() };
            (piece.offsets[dimension], piece.sizes[dimension]) = (begin, end - begin);
            pieces.extend((begin < end).then_some(piece));
        }
        pieces
    }
}

/// How tables are spread over the ranks of a training job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Each rank has some of the rows.
    Rows(u64),
    /// Each rank has some of the columns of every row.
    Columns(u64),
}

/// What one rank has of a table.
#[derive(Debug, Clone)]
pub struct Piece<'a> {
    /// The table.
    pub table: &'a Table<'a>,
    /// The rank, from 0 on.
    pub rank: u64,
    /// Its first row and column.
    pub offsets: [u64; 2],
    /// Its rows and columns.
    pub sizes: [u64; 2],
}

impl Piece<'_> {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sizes[0] * self.sizes[1] * 4
    }

    /// Writes it at the file's position, row by row, and gives the CRC-32 of what it wrote.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn write(&self, file: &mut File) -> io::Result<u32> {
        match self.table.values {
            Values::Sparse(values) => self.write_sparse(values, file),
            Values::Dense(pattern) => self.write_dense(pattern, file),
        }
    }

    fn write_dense(&self, pattern: &Pattern, file: &mut File) -> io::Result<u32> {
        let shift = u64::from(crc32fast::hash(self.table.name.as_bytes()));
        let [rows, columns] = self.sizes;
        // Whole rows follow each other without a gap.
        let (runs, length) = if columns == self.table.width { (1, rows * columns) } else { (rows, columns) };
        let mut hasher = crc32fast::Hasher::new();
        let mut buffer = Vec::new();
        for run in 0..runs {
            let first = (self.offsets[0] + run) * self.table.width + self.offsets[1];
            for slice in pattern.slices(shift + first, length) {
                buffer.extend(slice);
                if buffer.len() >= index(STEP * 4) {
                    hasher.update(&buffer);
                    file.write_all(&buffer)?;
                    buffer.clear();
                }
            }
        }
        hasher.update(&buffer);
        file.write_all(&buffer)?;
        Ok(hasher.finalize())
    }

    fn write_sparse(&self, values: &[(u64, u64, f32)], file: &mut File) -> io::Result<u32> {
        let begin = file.stream_position()?;
        let ([row, column], [rows, columns]) = (self.offsets, self.sizes);
        let (mut hasher, mut at) = (crc32fast::Hasher::new(), 0);
        let inside = values
            .iter()
            .filter(|&&(r, c, _)| (row..row + rows).contains(&r) && (column..column + columns).contains(&c));
        for &(r, c, value) in inside {
            let place = ((r - row) * columns + c - column) * 4;
            hash_zeros(&mut hasher, place - at);
            hasher.update(&value.to_le_bytes());
            file.seek(SeekFrom::Start(begin + place))?;
            file.write_all(&value.to_le_bytes())?;
            at = place + 4;
        }
        hash_zeros(&mut hasher, self.bytes() - at);
        file.seek(SeekFrom::Start(begin + self.bytes()))?;
        Ok(hasher.finalize())
    }
}

fn hash_zeros(hasher: &mut crc32fast::Hasher, mut count: u64) {
    let zeros = vec![0; index(count.min(1 << 20))];
    while count > 0 {
        let step = count.min(1 << 20);
        hasher.update(zeros.get(..index(step)).unwrap_or_default());
        count -= step;
    }
}

/// Writes a safetensors file of `tables`, without holding them in memory.
///
/// # Errors
/// Where the file cannot be written.
pub fn safetensors(path: &Path, tables: &[Table<'_>]) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for table in tables {
        let offsets = [at, at + table.bytes()];
        at += table.bytes();
        let entry = json!({ "dtype": "F32", "shape": [table.rows, table.width], "data_offsets": offsets });
        header.insert(table.name.to_owned(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for table in tables {
        table.whole().write(&mut file)?;
    }
    file.set_len(8 + header.len() as u64 + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_look_like_those_of_a_trained_table_and_rows_differ() {
        let bytes = Pattern::new().bytes(1 << 16);
        let values: Vec<_> =
            bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let square: f32 = values.iter().map(|value| value * value).sum::<f32>() / 65_536.0;
        assert!((square.sqrt() - 0.05).abs() < 0.001, "{square}");
        let rows: std::collections::BTreeSet<_> = bytes.chunks(16).collect();
        assert_eq!(rows.len(), 1 << 14);
    }

    #[test]
    fn pieces_cover_a_table_and_none_is_empty() {
        let pattern = Pattern::new();
        let table = Table::dense("t", 5, 3, &pattern);
        for cut in [Cut::Rows(2), Cut::Rows(8), Cut::Columns(2), Cut::Columns(8)] {
            let pieces = table.pieces(cut);
            assert_eq!(pieces.iter().map(Piece::bytes).sum::<u64>(), table.bytes(), "{cut:?}");
            assert!(pieces.iter().all(|piece| piece.bytes() > 0));
        }
    }
}
