//! Rows, looked up and decoded.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::Form;

use super::error::LookupError;
use super::tensor::Tensor;

/// What stands in a pruned table's remapping for a row that was pruned.
const PRUNED: i32 = -1;
/// Rows of a batch that are on their way from memory while one is decoded.
const AHEAD: usize = 8;
/// A line of the processor's cache, in bytes.
const LINE: usize = 64;
/// Lines of a row that are called for; the processor itself sees to the rest of a long one.
const LINES: usize = 5;

/// A table of a version that is open. Rows are numbered as in the checkpoint's table, those of a pruned table too.
#[derive(Debug, Clone, Copy)]
pub struct Table<'v> {
    tensor: Tensor<'v>,
    form: Form,
    source: Dtype,
    width: usize,
    row_bytes: usize,
    stored_rows: u64,
    /// Of a pruned table, the number in it of each row of the checkpoint's.
    remapping: Option<&'v [[u8; 4]]>,
}

/// Whether a row is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    /// It is.
    Kept,
    /// It was pruned when the snapshot was published, and counts as zeros.
    Pruned,
}

impl<'v> Table<'v> {
    pub(super) fn new(tensor: Tensor<'v>, remapping: Option<Tensor<'v>>) -> Result<Self, LookupError> {
        let described = tensor.described();
        let (form, source) = (described.form(), described.source_dtype);
        let sizes = match described.shape[..] {
            [rows, width] => form.row_bytes(width, source).map(|row_bytes| (rows, width, row_bytes)),
            _ => None,
        };
        let sizes = sizes.and_then(|(rows, width, row_bytes)| {
            Some((rows, usize::try_from(width).ok()?, usize::try_from(row_bytes).ok()?))
        });
        let Some((stored_rows, width, row_bytes)) = sizes else {
            let (name, shape) = (described.name.to_string(), described.shape.clone());
            return Err(LookupError::NotATable { name, shape });
        };
        // The manifest has been checked: a remapping has four bytes for every row of the checkpoint's table.
        let remapping = remapping.map(|remapping| remapping.bytes().as_chunks().0);
        Ok(Self { tensor, form, source, width, row_bytes, stored_rows, remapping })
    }

    /// The tensor that it is.
    #[must_use]
    pub const fn tensor(&self) -> Tensor<'v> {
        self.tensor
    }

    /// How many rows can be looked up: as many as the checkpoint's table has.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        match self.remapping {
            Some(remapping) => remapping.len() as u64,
            None => self.stored_rows,
        }
    }

    /// The elements of a row.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// A row as it is stored; `None` where it was pruned.
    ///
    /// # Errors
    /// [`LookupError::RowOutOfRange`], [`LookupError::DamagedRemapping`].
    #[inline]
    pub fn row(&self, row: u64) -> Result<Option<&'v [u8]>, LookupError> {
        let Some(stored) = self.stored_number(row)? else { return Ok(None) };
        let begin = usize::try_from(stored).ok().and_then(|stored| stored.checked_mul(self.row_bytes));
        let bytes =
            begin.and_then(|begin| self.tensor.bytes().get(begin..begin.checked_add(self.row_bytes)?));
        bytes.map(Some).ok_or_else(|| self.out_of_range(row))
    }

    /// Decodes a row into `decoded`, which has the table's width; zeros where it was pruned.
    ///
    /// # Errors
    /// As [`Self::decode_rows`].
    pub fn decode_row(&self, row: u64, decoded: &mut [f32]) -> Result<Row, LookupError> {
        let pruned = self.decode_rows(&[row], decoded)?;
        Ok(if pruned == 0 { Row::Kept } else { Row::Pruned })
    }

    /// Decodes rows into `decoded`, one behind the other, and tells how many of them were pruned: those are zeros, as
    /// lookups in pruned tables have it. Where it fails, `decoded` may hold some of the rows.
    ///
    /// # Errors
    /// [`LookupError::WrongBuffer`] where `decoded` has not exactly the room that the rows need,
    /// [`LookupError::NotFloats`], [`LookupError::RowOutOfRange`], [`LookupError::DamagedRemapping`].
    pub fn decode_rows(&self, rows: &[u64], decoded: &mut [f32]) -> Result<usize, LookupError> {
        if rows.len().checked_mul(self.width) != Some(decoded.len()) {
            let (table, found) = (self.name(), decoded.len());
            return Err(LookupError::WrongBuffer { table, found, rows: rows.len(), width: self.width });
        }
        let mut pruned = 0;
        let mut left = decoded;
        for (at, &row) in rows.iter().enumerate() {
            if let Some(&later) = rows.get(at + AHEAD) {
                self.call_for(later);
            }
            let (room, behind) = left.split_at_mut(self.width);
            left = behind;
            match self.row(row)? {
                Some(stored) => {
                    if !self.form.decode_row(self.source, stored, room) {
                        return Err(self.no_floats());
                    }
                }
                None => {
                    room.fill(0.0);
                    pruned += 1;
                }
            }
        }
        Ok(pruned)
    }

    /// Bids the processor bring a row's bytes from memory, and waits for nothing. A row that is none is left alone.
    #[inline]
    fn call_for(&self, row: u64) {
        let Ok(Some(bytes)) = self.row(row) else { return };
        bytes.chunks(LINE).take(LINES).filter_map(<[u8]>::first).for_each(prefetch);
    }

    /// A row's number in the table as it is stored; `None` where it was pruned.
    #[inline]
    fn stored_number(&self, row: u64) -> Result<Option<u64>, LookupError> {
        let Some(remapping) = self.remapping else {
            return if row < self.stored_rows { Ok(Some(row)) } else { Err(self.out_of_range(row)) };
        };
        let to = usize::try_from(row).ok().and_then(|row| remapping.get(row));
        let to = i32::from_le_bytes(*to.ok_or_else(|| self.out_of_range(row))?);
        match u64::try_from(to) {
            Ok(stored) if stored < self.stored_rows => Ok(Some(stored)),
            Err(_) if to == PRUNED => Ok(None),
            _ => Err(LookupError::DamagedRemapping { table: self.name(), row, to }),
        }
    }

    #[cold]
    fn out_of_range(&self, row: u64) -> LookupError {
        LookupError::RowOutOfRange { table: self.name(), row, rows: self.rows() }
    }

    /// A row of the right size that does not decode.
    #[cold]
    fn no_floats(&self) -> LookupError {
        LookupError::NotFloats { table: self.name(), dtype: self.source }
    }

    fn name(&self) -> String {
        self.tensor.described().name.to_string()
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch(byte: &u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the address is that of a byte; and what a prefetch does is seen by no program.
    #[expect(unsafe_code, reason = "there is no safe way to say so")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast());
    }
}

/// Other processors are left to their own ways.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn prefetch(_: &u8) {}
