//! Slices, wherever and however they lie, put together into dense rows.
//!
//! An encoder wants rows: little-endian elements in row-major order, a bounded run of them at a time. A checkpoint
//! holds slices: by rows, by columns, in grids, transposed, or expanded from one number. Reading goes in three steps:
//!
//! 1. A slice that is a run of the tensor's elements itself, and dense in its file, is one read. So are whole tensors
//!    and shards by rows, however many there are.
//! 2. Else the run of elements is a few boxes of the tensor (whole rows, and what is left at both ends). What a box
//!    shares with a slice is a box again: a count, a step in the file and a step in the output for each dimension (an
//!    `Axis`). Neighbouring dimensions that are stepped through without a gap become one.
//! 3. One dimension that is dense on both sides is one read straight into the output. Everything else goes through a
//!    scratch buffer of at most 1 MiB, in the order of the file: the dimensions with the smallest steps
//!    are read in one go while the gaps between elements are small, and scattered from there.
//!
//! So a table that is stored by columns costs one read a slice and MiB, and a transposed one costs one read a column
//! and block of rows; only elements that lie more than 4 KiB apart are read one by one.

use std::ops::Range;
use std::sync::OnceLock;

use weighbridge_schemas::dtype::{Dtype, element_count};
use weighbridge_schemas::limits;

use crate::checkpoint::{Checkpoint, Item, Location, Slice, SliceRecord, Strided, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::read::torch_item;
use crate::read::unpack::Readable;
use crate::shape::transfer::{Axis, Transfer, outside, push_axis};

/// A buffer that reads share, so that it is allocated once. It grows to 1 MiB at most.
#[derive(Debug, Default)]
pub struct Scratch(Vec<u8>);

/// Fills `out` with the elements `first .. first + out.len() / size of an element` of `tensor`: dense, row-major,
/// little-endian. The slices of `tensor` have to tile it ([`super::tiling::check`]).
///
/// # Errors
/// [`Class::SizeMismatch`] where `out` is not a whole number of elements, or reaches beyond the tensor's end; what
/// [`torch_item::locate`] and [`Readable::read_exact_at`] say; [`Class::DcpChunkBounds`],
/// [`Class::DcpChunkMismatch`] or [`Class::DcpChunkGap`] where slices make no sense. What `out` then holds is of no
/// use.
pub fn read_elements(tensor: &Tensor, first: u64, out: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    read_boxes(tensor, first, out, scratch).map_err(|error| error.of_tensor(tensor.name.as_str()))
}

/// Finds out where every slice of `checkpoint` lies, and that its file reaches that far. It reads the framing of
/// every torch.save archive that is not packed, and no tensor's bytes.
///
/// # Errors
/// What [`torch_item::locate`] says, or [`Class::Truncated`]; the tensor and the file are named.
pub fn check_storages(checkpoint: &Checkpoint) -> Result<()> {
    for tensor in &checkpoint.tensors {
        for slice in &tensor.slices {
            check_storage(slice, tensor.dtype).map_err(|error| error.of_tensor(tensor.name.as_str()))?;
        }
    }
    Ok(())
}

fn check_storage(slice: &Slice, dtype: Dtype) -> Result<()> {
    // To look into a zstd frame takes as long as to read all of it.
    if matches!(slice.location, Location::ZstdItem { .. }) {
        return Ok(());
    }
    let place = Place::of(slice, dtype)?;
    let end = place.offset.checked_add(place.extent);
    if end.is_some_and(|end| end <= place.bytes.len()) {
        return Ok(());
    }
    let detail = format!(
        "the file ends at byte {}, but a slice of {} bytes lies at {}",
        place.bytes.len(),
        place.extent,
        place.offset
    );
    Err(ReadError::new(Class::Truncated, detail).in_file(place.bytes.name()))
}

/// Where the elements of a slice lie.
pub(super) struct Place<'s> {
    bytes: Readable<'s>,
    /// The byte of the first element.
    offset: u64,
    /// How many elements lie between neighbours, a number a dimension; `None` for dense, row-major elements.
    strides: Option<&'s [u64]>,
    /// How many bytes lie between the first element's first and the last element's last.
    extent: u64,
    /// The record that holds them, where it carries a checksum.
    pub(super) record: Option<SliceRecord>,
}

impl<'s> Place<'s> {
    /// Finds it out, where it is not known yet.
    pub(super) fn of(slice: &'s Slice, dtype: Dtype) -> Result<Self> {
        let (bytes, offset, strides, record) = match &slice.location {
            Location::Dense { file, offset } => (Readable::File(file), *offset, None, None),
            Location::TorchItem { file, offset, length, storage } => {
                let item = Item { offset: *offset, length: *length };
                let storage = once(storage, || {
                    let found = torch_item::locate(file, *offset, *length, dtype, &slice.sizes)?;
                    if found.record.is_none() {
                        file.pass_item(item);
                    }
                    Ok(found)
                })?;
                let record = storage.record.map(|record| SliceRecord { record, item: Some(item) });
                (Readable::File(file), storage.offset, Some(storage.strides.as_slice()), record)
            }
            Location::ZstdItem { file, offset, length, storage, unpacker } => {
                let elements = slice.elements().saturating_mul(dtype.size());
                let most = elements.saturating_add(limits::ITEM_SLACK_BYTES);
                let item = Readable::Unpacked(unpacker.get(file, *offset, *length, most)?);
                let storage = once(storage, || torch_item::locate_unpacked(&item, dtype, &slice.sizes))?;
                (item, storage.offset, Some(storage.strides.as_slice()), None)
            }
            Location::Strided { file, storage } => {
                let record = storage.record.map(|record| SliceRecord { record, item: None });
                (Readable::File(file), storage.offset, Some(storage.strides.as_slice()), record)
            }
        };
        let strides = strides.filter(|strides| !is_dense(&slice.sizes, strides));
        let extent = match strides {
            None => element_count(&slice.sizes, dtype).and_then(|count| count.checked_mul(dtype.size())),
            Some(strides) if strides.len() == slice.sizes.len() => {
                extent(&slice.sizes, strides, dtype.size())
            }
            Some(_) => None,
        };
        match extent.filter(|&extent| offset.checked_add(extent).is_some()) {
            Some(extent) => Ok(Self { bytes, offset, strides, extent, record }),
            None => {
                let detail = format!("the slice's size {:?} makes no sense with its strides", slice.sizes);
                Err(ReadError::new(Class::DcpChunkMismatch, detail).in_file(bytes.name()))
            }
        }
    }

    /// Reads from the slice's byte `from` on, where its elements are dense.
    fn read(&self, from: u64, buffer: &mut [u8]) -> Result<()> {
        let at = self.offset.checked_add(from).ok_or_else(outside)?;
        self.bytes.read_in(self.record, buffer, at)
    }
}

/// What is known, or else is found out now.
fn once(known: &OnceLock<Strided>, find: impl FnOnce() -> Result<Strided>) -> Result<&Strided> {
    match known.get() {
        Some(known) => Ok(known),
        None => {
            let found = find()?;
            // Whoever else was here at the same time has found the same.
            Ok(known.get_or_init(|| found))
        }
    }
}

/// Whether elements with `strides` are dense and row-major. The stride of a dimension of one index means nothing.
fn is_dense(sizes: &[u64], strides: &[u64]) -> bool {
    let mut step = Some(1u64);
    let fits = sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size <= 1 || step == Some(stride);
        step = step.and_then(|step| step.checked_mul(size));
        fits
    });
    fits && sizes.len() == strides.len()
}

/// The strides of dense, row-major elements.
fn dense_strides(sizes: &[u64]) -> Option<Vec<u64>> {
    let mut strides = vec![1; sizes.len()];
    let mut step: u64 = 1;
    for (stride, &size) in strides.iter_mut().zip(sizes).rev() {
        *stride = step;
        step = step.checked_mul(size.max(1))?;
    }
    Some(strides)
}

/// How many bytes elements of `item` bytes reach over; `None` where it does not fit 64 bits.
fn extent(sizes: &[u64], strides: &[u64], item: u64) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let last = sizes.iter().zip(strides).filter(|&(&size, _)| size > 1);
    let last = last.map(|(&size, &stride)| (size - 1).checked_mul(stride));
    let last = last.into_iter().try_fold(0u64, |sum, step| sum.checked_add(step?))?;
    last.checked_add(1)?.checked_mul(item)
}

fn read_boxes(tensor: &Tensor, first: u64, out: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    let item = tensor.dtype.size();
    let bytes = u64::try_from(out.len()).unwrap_or(u64::MAX);
    let end =
        first.checked_add(bytes / item).filter(|&end| end <= tensor.elements() && bytes.is_multiple_of(item));
    let end = end.ok_or_else(|| {
        let detail =
            format!("{bytes} bytes from element {first} on do not fit {} elements", tensor.elements());
        ReadError::new(Class::SizeMismatch, detail)
    })?;
    let width =
        tensor.shape.iter().skip(1).fold(1, |product: u64, &size| product.saturating_mul(size)).max(1);
    let rows = first / width..end.div_ceil(width);
    let mut run = None;
    let mut filled: u64 = 0;
    for slice in tensor.slices.iter().filter(|slice| crosses(slice, &rows)) {
        let read = match dense_part(slice, tensor, first, end)? {
            Some((place, part, from)) => {
                let to = |element: u64| usize::try_from((element - first).saturating_mul(item)).ok();
                let part_of_out =
                    to(part.start).zip(to(part.end)).and_then(|(start, end)| out.get_mut(start..end));
                place.read(from.saturating_mul(item), part_of_out.ok_or_else(outside)?)?;
                part.end - part.start
            }
            None => {
                let run = run.get_or_insert_with(|| Run::new(&tensor.shape, first, end));
                run.read(slice, tensor.dtype, out, scratch)?
            }
        };
        filled = filled.saturating_add(read);
    }
    if filled == end - first {
        return Ok(());
    }
    let detail = format!("its slices hold {filled} of the {} elements {first}..{end}", end - first);
    Err(ReadError::new(Class::DcpChunkGap, detail))
}

/// Whether `slice` has any of `rows`. There may be thousands of slices, most of which have none.
fn crosses(slice: &Slice, rows: &Range<u64>) -> bool {
    let own = slice.offsets.first().zip(slice.sizes.first());
    own.is_none_or(|(&offset, &size)| offset < rows.end && offset.saturating_add(size) > rows.start)
}

/// Where a slice that is a run of elements, here and in its file, lies; which of `first..end` it holds; and how many of
/// its elements lie in front of them. `None` for any other slice.
fn dense_part<'s>(
    slice: &'s Slice,
    tensor: &Tensor,
    first: u64,
    end: u64,
) -> Result<Option<(Place<'s>, Range<u64>, u64)>> {
    let Some(own) = slice_run(slice, &tensor.shape) else { return Ok(None) };
    let part = own.start.max(first)..own.end.min(end);
    if part.is_empty() {
        return Ok(None);
    }
    let place = Place::of(slice, tensor.dtype)?;
    let from = part.start - own.start;
    Ok(place.strides.is_none().then_some((place, part, from)))
}

/// The tensor's elements that `slice` holds, where they are a run: it spans all dimensions but the first.
fn slice_run(slice: &Slice, shape: &[u64]) -> Option<Range<u64>> {
    if slice.offsets.len() != shape.len() {
        return None;
    }
    let (Some((&offset, _)), Some((&size, inner))) = (slice.offsets.split_first(), slice.sizes.split_first())
    else {
        return (slice.sizes.is_empty()).then_some(0..1);
    };
    let all = shape.get(1..)?;
    if inner != all {
        return None;
    }
    let width = all.iter().try_fold(1u64, |product, &size| product.checked_mul(size))?;
    Some(offset.checked_mul(width)?..offset.checked_add(size)?.checked_mul(width)?)
}

/// A part of a tensor: `sizes` elements from `offsets` on, a number a dimension.
struct Block {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}

impl Block {
    /// What the block and `slice` have in common: where it starts and how many indices it has, a pair a dimension.
    fn shared_with<'b>(&'b self, slice: &'b Slice) -> impl Iterator<Item = (u64, u64)> + 'b {
        let theirs = slice.offsets.iter().zip(&slice.sizes);
        self.offsets.iter().zip(&self.sizes).zip(theirs).map(|((&offset, &size), (&other, &other_size))| {
            let end = offset.saturating_add(size).min(other.saturating_add(other_size));
            (offset.max(other), end.saturating_sub(offset.max(other)))
        })
    }

    /// Whether they have anything in common. Most slices have nothing with most boxes.
    fn meets(&self, slice: &Slice) -> bool {
        let rank = self.offsets.len();
        let same_rank = slice.offsets.len() == rank && slice.sizes.len() == rank;
        same_rank && self.shared_with(slice).all(|(_, size)| size > 0)
    }
}

/// A run of a tensor's elements in row-major order, as the few boxes that it is.
struct Run {
    first: u64,
    /// How many elements lie under one index of each dimension.
    widths: Vec<u64>,
    boxes: Vec<Block>,
}

impl Run {
    /// The elements `first..end` of a tensor of `shape`, which has them.
    fn new(shape: &[u64], first: u64, end: u64) -> Self {
        let widths = dense_strides(shape).unwrap_or_default();
        let mut run = Self { first, widths, boxes: Vec::new() };
        let mut position = first;
        while position < end {
            let (block, elements) = run.next_box(shape, position, end - position);
            run.boxes.push(block);
            position = position.saturating_add(elements.max(1));
        }
        run
    }

    /// The largest box that starts at element `position`, has at most `left` elements, and is dense in the tensor;
    /// and how many elements it has.
    fn next_box(&self, shape: &[u64], position: u64, left: u64) -> (Block, u64) {
        let mut block = Block { offsets: Vec::new(), sizes: Vec::new() };
        let mut elements = None;
        for (&size, &width) in shape.iter().zip(&self.widths) {
            let index = position / width % size.max(1);
            block.offsets.push(index);
            block.sizes.push(match elements {
                Some(_) => size,
                None if position.is_multiple_of(width) && left >= width => {
                    let count = (left / width).min(size - index);
                    elements = Some(count.saturating_mul(width));
                    count
                }
                None => 1,
            });
        }
        (block, elements.unwrap_or(1))
    }

    /// Reads what the run shares with `slice` into `out`; says how many elements that is.
    fn read(&self, slice: &Slice, dtype: Dtype, out: &mut [u8], scratch: &mut Scratch) -> Result<u64> {
        let mut filled: u64 = 0;
        for block in self.boxes.iter().filter(|block| block.meets(slice)) {
            let place = Place::of(slice, dtype)?;
            let dense = if place.strides.is_none() { dense_strides(&slice.sizes) } else { None };
            let strides = place.strides.or(dense.as_deref()).unwrap_or_default();
            let transfer = self.transfer(block, slice, &place, strides, dtype.size()).ok_or_else(outside)?;
            transfer.run(out, &mut scratch.0)?;
            filled = filled.saturating_add(block.shared_with(slice).map(|(_, count)| count).product());
        }
        Ok(filled)
    }

    /// How what `block` and `slice` have in common gets from `place`, where all of the slice lies with `strides`, to
    /// its place in the run.
    fn transfer<'s>(
        &self,
        block: &Block,
        slice: &Slice,
        place: &Place<'s>,
        strides: &[u64],
        item: u64,
    ) -> Option<Transfer<'s>> {
        let (mut from, mut to) = (0u64, 0u64);
        let mut axes = Vec::with_capacity(strides.len());
        let steps = strides.iter().zip(&self.widths);
        let starts = block.shared_with(slice).zip(&slice.offsets);
        for ((&stride, &width), ((offset, count), &slice_offset)) in steps.zip(starts) {
            from = from.checked_add(offset.checked_sub(slice_offset)?.checked_mul(stride)?)?;
            to = to.checked_add(offset.checked_mul(width)?)?;
            if count > 1 {
                push_axis(&mut axes, Axis::new(count, stride.checked_mul(item)?, width.checked_mul(item)?)?);
            }
        }
        Some(Transfer {
            bytes: place.bytes.clone(),
            record: place.record,
            item: usize::try_from(item).ok()?,
            at: place.offset.checked_add(from.checked_mul(item)?)?,
            to: usize::try_from(to.checked_sub(self.first)?.checked_mul(item)?).ok()?,
            axes,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use proptest::sample::Index;
    use tempfile::TempDir;
    use weighbridge_schemas::checkpoint::Format;
    use weighbridge_schemas::ids::Fingerprint;

    use super::*;
    use crate::checkpoint::{Others, Record};
    use crate::shape::records::check_records;
    use crate::shape::tiling;
    use crate::shape::transfer::SCRATCH_BYTES;
    use crate::source::{Source, SourceFile};

    /// How a slice is stored.
    #[derive(Debug, Clone)]
    enum Stored {
        Dense,
        /// Dimensions in this order, the last one fastest, with so many unused elements after each run of it.
        Permuted(Vec<Index>, usize),
    }

    fn stored() -> impl Strategy<Value = Stored> {
        let permuted = (prop::collection::vec(any::<Index>(), 4), 0..4usize);
        prop_oneof![Just(Stored::Dense), permuted.prop_map(|(order, gap)| Stored::Permuted(order, gap))]
    }

    /// A tensor's bytes, its shape, and points where each dimension is cut.
    #[derive(Debug, Clone)]
    struct Case {
        dtype: Dtype,
        shape: Vec<usize>,
        cuts: Vec<Vec<usize>>,
        stored: Vec<Stored>,
        order: Vec<Index>,
    }

    fn case() -> impl Strategy<Value = Case> {
        let dtype = prop::sample::select(vec![Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::I64]);
        let dimension = (1..7usize).prop_flat_map(|size| (Just(size), prop::collection::vec(0..=size, 0..3)));
        let dimensions = prop::collection::vec(dimension, 0..5);
        let stored = prop::collection::vec(stored(), 1..5);
        let order = prop::collection::vec(any::<Index>(), 8);
        (dtype, dimensions, stored, order).prop_map(|(dtype, dimensions, stored, order)| {
            let (shape, cuts) = dimensions.into_iter().unzip();
            Case { dtype, shape, cuts, stored, order }
        })
    }

    /// Every combination of one of each list.
    fn product<T: Clone>(lists: &[Vec<T>]) -> Vec<Vec<T>> {
        let longer = |row: &Vec<T>, item: &T| row.iter().chain([item]).cloned().collect();
        lists.iter().fold(vec![Vec::new()], |rows, list| {
            rows.iter().flat_map(|row| list.iter().map(|item| longer(row, item))).collect()
        })
    }

    /// The bytes of a dense tensor: no two elements alike, as far as their size allows.
    fn dense_bytes(elements: usize, item: usize) -> Vec<u8> {
        let element = |index: usize| (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes();
        (0..elements).flat_map(|index| element(index)[..item].to_vec()).collect()
    }

    fn row_major(sizes: &[usize]) -> Vec<usize> {
        (0..sizes.len()).map(|dimension| sizes[dimension + 1..].iter().product()).collect()
    }

    /// The bytes of a slice that is stored with `strides`, and the junk between its elements.
    fn slice_bytes(
        case: &Case,
        dense: &[u8],
        offsets: &[usize],
        sizes: &[usize],
        strides: &[usize],
    ) -> Vec<u8> {
        let item = usize::try_from(case.dtype.size()).unwrap();
        let widths = row_major(&case.shape);
        let indices: Vec<Vec<usize>> = sizes.iter().map(|&size| (0..size).collect()).collect();
        let mut bytes = Vec::new();
        for index in product(&indices) {
            let dot =
                |steps: &[usize]| index.iter().zip(steps).map(|(index, step)| index * step).sum::<usize>();
            let from = (dot(&widths) + offsets.iter().zip(&widths).map(|(o, w)| o * w).sum::<usize>()) * item;
            let to = dot(strides) * item;
            bytes.resize(bytes.len().max(to + item), 0xEE);
            bytes[to..to + item].copy_from_slice(&dense[from..from + item]);
        }
        bytes
    }

    fn permuted_strides(sizes: &[usize], order: &[Index], gap: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..sizes.len()).collect();
        let mut strides = vec![0; sizes.len()];
        let mut step = 1;
        for pick in order.iter().take(sizes.len()) {
            let dimension = left.remove(pick.index(left.len()));
            // The stride of a dimension of one index means nothing, so it may as well be absurd.
            strides[dimension] = if sizes[dimension] == 1 { usize::MAX / 2 } else { step };
            step = step * sizes[dimension] + gap;
        }
        strides
    }

    fn wide(numbers: &[usize]) -> Vec<u64> {
        numbers.iter().map(|&number| number as u64).collect()
    }

    /// Writes the slices of `case` to files, and gives the tensor.
    fn write(case: &Case, dense: &[u8], folder: &TempDir) -> Tensor {
        let intervals: Vec<Vec<(usize, usize)>> = case
            .shape
            .iter()
            .zip(&case.cuts)
            .map(|(&size, cuts)| {
                let mut points = [cuts.as_slice(), &[0, size]].concat();
                points.sort_unstable();
                points.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
            })
            .collect();
        let source = Source::open(folder.path()).unwrap();
        let mut slices = Vec::new();
        for (number, part) in product(&intervals).into_iter().enumerate() {
            let (offsets, sizes): (Vec<_>, Vec<_>) = part.into_iter().unzip();
            let stored = &case.stored[number % case.stored.len()];
            let strides = match stored {
                Stored::Dense => row_major(&sizes),
                Stored::Permuted(order, gap) => permuted_strides(&sizes, order, *gap),
            };
            let start = number % 5;
            let name = format!("{number}");
            let of_one =
                sizes.iter().zip(&strides).map(|(&size, &stride)| if size == 1 { 0 } else { stride });
            let bytes = slice_bytes(case, dense, &offsets, &sizes, &of_one.collect::<Vec<_>>());
            std::fs::write(folder.path().join(&name), [&vec![0xDD; start], bytes.as_slice()].concat())
                .unwrap();
            let file = source.file(&name).unwrap();
            let offset = start as u64;
            let location = match stored {
                Stored::Dense => Location::Dense { file, offset },
                Stored::Permuted(..) => strided(file, offset, wide(&strides)),
            };
            slices.push(Slice { offsets: wide(&offsets), sizes: wide(&sizes), location });
        }
        for pick in &case.order {
            let slice = slices.remove(pick.index(slices.len()));
            slices.push(slice);
        }
        Tensor { name: "t".parse().unwrap(), dtype: case.dtype, shape: wide(&case.shape), slices }
    }

    fn strided(file: Arc<SourceFile>, offset: u64, strides: Vec<u64>) -> Location {
        // A record that holds the elements, what lies between them, and a byte more in front where there is one.
        let length = file.len();
        let start = offset.saturating_sub(1).min(length);
        let bytes = file.read_vec_at(start, length - start).unwrap();
        let record = Record { offset: start, length: length - start, crc32: crc32fast::hash(&bytes) };
        Location::Strided { file, storage: Strided { offset, strides, record: Some(record) } }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn any_run_of_any_tiling_reads_as_the_dense_tensor(
            case in case(), runs in prop::collection::vec((any::<Index>(), any::<Index>()), 6),
        ) {
            let item = usize::try_from(case.dtype.size()).unwrap();
            let elements: usize = case.shape.iter().product();
            let dense = dense_bytes(elements, item);
            let folder = tempfile::tempdir().unwrap();
            let tensor = write(&case, &dense, &folder);
            tiling::check(&tensor).unwrap();
            let mut scratch = Scratch::default();
            let runs = runs.iter().map(|(start, length)| {
                let start = start.index(elements);
                (start, start + 1 + length.index(elements - start))
            });
            for (start, end) in runs.chain([(0, elements), (elements, elements)]) {
                let mut out = vec![0xAA; (end - start) * item];
                read_elements(&tensor, start as u64, &mut out, &mut scratch).unwrap();
                prop_assert_eq!(&out, &dense[start * item..end * item], "{}..{}", start, end);
            }
            check_records(std::iter::once(&tensor), 2).unwrap();
        }

        #[test]
        fn a_wrong_checksum_is_found_however_the_slice_is_read(
            case in case(), number in any::<Index>(),
            runs in prop::collection::vec((any::<Index>(), any::<Index>()), 4),
        ) {
            let item = usize::try_from(case.dtype.size()).unwrap();
            let elements: usize = case.shape.iter().product();
            let folder = tempfile::tempdir().unwrap();
            let mut tensor = write(&case, &dense_bytes(elements, item), &folder);
            let wrong = number.index(tensor.slices.len());
            if !damage(&mut tensor.slices[wrong]) {
                return Ok(());
            }
            let mut scratch = Scratch::default();
            let mut read = |start: usize, end: usize| {
                read_elements(&tensor, start as u64, &mut vec![0; (end - start) * item], &mut scratch)
            };
            let mut found = Ok(());
            for (start, length) in &runs {
                let start = start.index(elements);
                found = found.and(read(start, start + 1 + length.index(elements - start)));
            }
            found = found.and(read(0, elements));
            found = found.and_then(|()| check_records(std::iter::once(&tensor), 2));
            prop_assert_eq!(class(found), Class::ZipCrc);
        }
    }

    /// Gives a slice's record another checksum, where it has a record.
    fn damage(slice: &mut Slice) -> bool {
        let has_elements = slice.elements() > 0;
        let Location::Strided { storage, .. } = &mut slice.location else { return false };
        let record = storage.record.as_mut().filter(|_| has_elements);
        record.map(|record| record.crc32 ^= 1).is_some()
    }

    /// A table of `F32` in one slice with `strides`, over a file of `bytes`.
    fn table(folder: &TempDir, shape: [u64; 2], strides: [u64; 2], bytes: &[u8]) -> Tensor {
        std::fs::write(folder.path().join("f"), bytes).unwrap();
        let file = Source::open(folder.path()).unwrap().file("f").unwrap();
        let slice = Slice {
            offsets: vec![0, 0],
            sizes: shape.to_vec(),
            location: strided(file, 0, strides.to_vec()),
        };
        Tensor { name: "t".parse().unwrap(), dtype: Dtype::F32, shape: shape.to_vec(), slices: vec![slice] }
    }

    /// Reads a table block by block and compares it with the elements of the file that its strides say.
    fn check_table(shape: [u64; 2], strides: [u64; 2], block_rows: u64) {
        let reach = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1;
        let bytes = dense_bytes(usize::try_from(reach).unwrap(), 4);
        let folder = tempfile::tempdir().unwrap();
        let tensor = table(&folder, shape, strides, &bytes);
        let mut scratch = Scratch::default();
        for first in (0..shape[0]).step_by(usize::try_from(block_rows).unwrap()) {
            let rows = block_rows.min(shape[0] - first);
            let mut out = vec![0; usize::try_from(rows * shape[1] * 4).unwrap()];
            read_elements(&tensor, first * shape[1], &mut out, &mut scratch).unwrap();
            for (index, element) in out.chunks(4).enumerate() {
                let (row, column) = (first + index as u64 / shape[1], index as u64 % shape[1]);
                let at = usize::try_from(row * strides[0] + column * strides[1]).unwrap() * 4;
                assert_eq!(element, &bytes[at..at + 4], "row {row}, column {column}");
            }
            assert!(scratch.0.capacity() <= 2 * SCRATCH_BYTES, "{}", scratch.0.capacity());
        }
    }

    #[test]
    fn large_tables_go_through_a_bounded_buffer() {
        check_table([70_000, 16], [1, 70_000], 70_000); // transposed, at once
        check_table([70_000, 16], [1, 70_000], 30_000); // transposed, by blocks
        check_table([600_000, 2], [1, 600_000], 600_000); // columns longer than the buffer
        check_table([3_000, 200], [300, 1], 2_000); // rows with a little between them
        check_table([40, 2_000], [3_000, 1], 40); // rows with much between them
        check_table([50, 20], [4_000, 200], 50); // sparse both ways
        check_table([3, 40_000], [50_000, 1], 3); // rows that are read straight into place
        check_table([5_000, 300], [0, 1], 5_000); // one row, expanded
        check_table([5_000, 300], [1, 0], 5_000); // one column, expanded
        check_table([5_000, 300], [2, 1], 5_000); // rows that share elements
        check_table([30, 40], [0, 0], 30); // one number, expanded
    }

    fn class(result: Result<()>) -> Class {
        let error = result.unwrap_err();
        assert_eq!(error.tensor(), Some("t"));
        error.class()
    }

    #[test]
    fn impossible_runs_and_slices_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let read = |tensor: &Tensor, first: u64, bytes: usize| {
            class(read_elements(tensor, first, &mut vec![0; bytes], &mut Scratch::default()))
        };
        let mut tensor = table(&folder, [4, 2], [2, 1], &[7; 32]);
        for (first, bytes) in [(0, 36), (8, 4), (u64::MAX, 4), (0, 3)] {
            assert_eq!(read(&tensor, first, bytes), Class::SizeMismatch, "{bytes} bytes at {first}");
        }
        for strides in [vec![1 << 63, 1], vec![u64::MAX / 4, u64::MAX / 4], vec![1]] {
            let file = Source::open(folder.path()).unwrap().file("f").unwrap();
            tensor.slices[0].location = strided(file, u64::MAX / 2, strides);
            assert_eq!(read(&tensor, 0, 32), Class::DcpChunkMismatch);
        }
        let far = table(&folder, [4, 2], [2, 1 << 40], &[7; 32]);
        assert_eq!(read(&far, 0, 32), Class::Truncated);
        for (offsets, sizes) in [(vec![0], vec![4]), (vec![4, 0], vec![4, 2]), (vec![1, 0], vec![3, 2])] {
            let mut tensor = table(&folder, [4, 2], [2, 1], &[7; 32]);
            tensor.slices[0].offsets = offsets;
            tensor.slices[0].sizes = sizes;
            assert_eq!(read(&tensor, 0, 32), Class::DcpChunkGap);
        }
    }

    #[test]
    fn storages_reach_no_farther_than_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let check = |shape, strides, bytes: &[u8]| {
            let tensor = table(&folder, shape, strides, bytes);
            check_storages(&Checkpoint {
                source: Source::open(folder.path()).unwrap(),
                format: Format::Dcp,
                fingerprint: Fingerprint::of(b""),
                tensors: vec![tensor],
                unreadable: Vec::new(),
                others: Others::default(),
                notes: Vec::new(),
            })
        };
        check([4, 2], [2, 1], &[7; 32]).unwrap();
        check([4, 2], [0, 1], &[7; 8]).unwrap();
        let error = check([4, 2], [2, 1], &[7; 31]).unwrap_err();
        assert_eq!((error.class(), error.file(), error.tensor()), (Class::Truncated, Some("f"), Some("t")));
    }
}
