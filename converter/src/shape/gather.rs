//! Slices, wherever and however they lie, put together into dense rows.
//!
//! An encoder wants rows: little-endian elements in row-major order, a bounded run of them at a time. A checkpoint
//! holds slices: by rows, by columns, in grids, transposed, or expanded from one number. Reading goes in three steps:
//!
//! 1. The run of elements is a few boxes of the tensor (whole rows, and what is left at both ends).
//! 2. What a box shares with a slice is a box again: a count, a step in the file and a step in the output for each
//!    dimension (an `Axis`). Neighbouring dimensions that are stepped through without a gap become one.
//! 3. One dimension that is dense on both sides is one read straight into the output. Everything else goes through a
//!    scratch buffer of at most 1 MiB, in the order of the file: the dimensions with the smallest steps
//!    are read in one go while the gaps between elements are small, and scattered from there.
//!
//! So a table that is stored by columns costs one read a slice and MiB, and a transposed one costs one read a column
//! and block of rows; only elements that lie more than 4 KiB apart are read one by one.

use std::borrow::Cow;
use std::sync::OnceLock;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::limits;

use crate::checkpoint::{Checkpoint, Location, Record, Slice, Strided, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::read::torch_item;
use crate::read::unpack::Readable;
use crate::shape::scatter::scatter;

/// Largest scratch buffer, in bytes.
const SCRATCH_BYTES: usize = 1 << 20;
/// A gap in the file up to this size is read and thrown away, since another read would cost more.
const READ_THROUGH_BYTES: usize = 4096;
/// Runs of at least this size that are dense on both sides are read straight into the output.
const DIRECT_BYTES: usize = 64 << 10;

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
struct Place<'s> {
    bytes: Readable<'s>,
    /// The byte of the first element.
    offset: u64,
    /// How many elements lie between neighbours, a number a dimension.
    strides: Cow<'s, [u64]>,
    /// How many bytes lie between the first element's first and the last element's last.
    extent: u64,
    /// The record that holds them, where it carries a checksum.
    record: Option<Record>,
}

impl<'s> Place<'s> {
    fn of(slice: &'s Slice, dtype: Dtype) -> Result<Self> {
        let (bytes, offset, strides, record) = match &slice.location {
            Location::Dense { file, offset } => {
                (Readable::File(file), *offset, dense_strides(&slice.sizes).map(Cow::Owned), None)
            }
            Location::TorchItem { file, offset, length, storage } => {
                let storage =
                    once(storage, || torch_item::locate(file, *offset, *length, dtype, &slice.sizes))?;
                (
                    Readable::File(file),
                    storage.offset,
                    Some(Cow::Borrowed(storage.strides.as_slice())),
                    storage.record,
                )
            }
            Location::ZstdItem { file, offset, length, storage, unpacker } => {
                let elements = slice.elements().saturating_mul(dtype.size());
                let most = elements.saturating_add(limits::ITEM_SLACK_BYTES);
                let item = Readable::Unpacked(unpacker.get(file, *offset, *length, most)?);
                let storage = once(storage, || torch_item::locate_unpacked(&item, dtype, &slice.sizes))?;
                (item, storage.offset, Some(Cow::Borrowed(storage.strides.as_slice())), None)
            }
            Location::Strided { file, storage } => (
                Readable::File(file),
                storage.offset,
                Some(Cow::Borrowed(storage.strides.as_slice())),
                storage.record,
            ),
        };
        let strides = strides.filter(|strides| strides.len() == slice.sizes.len());
        let place = strides.and_then(|strides| {
            let extent = extent(&slice.sizes, &strides, dtype.size())?;
            offset.checked_add(extent)?;
            Some(Self { bytes: bytes.clone(), offset, strides, extent, record })
        });
        place.ok_or_else(|| {
            let detail = format!("the slice's size {:?} makes no sense with its strides", slice.sizes);
            ReadError::new(Class::DcpChunkMismatch, detail).in_file(bytes.name())
        })
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
    let run = Run::new(&tensor.shape, first, end);
    let mut filled: u64 = 0;
    for slice in &tensor.slices {
        for part in run.boxes.iter().filter_map(|block| block.shared_with(slice)) {
            filled = filled.saturating_add(part.sizes.iter().product());
            let place = Place::of(slice, tensor.dtype)?;
            let transfer = run.transfer(&part, slice, &place, item).ok_or_else(outside)?;
            transfer.run(out, &mut scratch.0)?;
        }
    }
    if filled == end - first {
        return Ok(());
    }
    let detail = format!("its slices hold {filled} of the {} elements {first}..{end}", end - first);
    Err(ReadError::new(Class::DcpChunkGap, detail))
}

/// What only slices that do not tile their tensor can lead to.
pub(super) fn outside() -> ReadError {
    ReadError::new(Class::DcpChunkBounds, "a slice reaches outside its tensor")
}

/// A part of a tensor: `sizes` elements from `offsets` on, a number a dimension.
struct Block {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}

impl Block {
    /// What the block and `slice` have in common. Most slices have nothing, so that is found out first.
    fn shared_with(&self, slice: &Slice) -> Option<Self> {
        let rank = self.offsets.len();
        let theirs = || slice.offsets.iter().zip(&slice.sizes);
        let shared = || {
            self.offsets.iter().zip(&self.sizes).zip(theirs()).map(
                |((&offset, &size), (&other, &other_size))| {
                    let end = offset.saturating_add(size).min(other.saturating_add(other_size));
                    (offset.max(other), end.saturating_sub(offset.max(other)))
                },
            )
        };
        if slice.offsets.len() != rank || slice.sizes.len() != rank || shared().any(|(_, size)| size == 0) {
            return None;
        }
        let (offsets, sizes) = shared().unzip();
        Some(Self { offsets, sizes })
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

    /// How `part` gets from `place`, where all of `slice` lies, to its place in the run.
    fn transfer<'s>(
        &self,
        part: &Block,
        slice: &Slice,
        place: &Place<'s>,
        item: u64,
    ) -> Option<Transfer<'s>> {
        let (mut from, mut to) = (0u64, 0u64);
        let mut axes = Vec::new();
        let steps = place.strides.iter().zip(&self.widths);
        let starts = part.offsets.iter().zip(&slice.offsets).zip(&part.sizes);
        for ((&stride, &width), ((&offset, &slice_offset), &count)) in steps.zip(starts) {
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

/// A dimension of a copy: `count` indices, and how many bytes lie between neighbours on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) count: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Axis {
    /// One index.
    pub(super) const SINGLE: Self = Self { count: 1, from: 0, to: 0 };

    fn new(count: u64, from: u64, to: u64) -> Option<Self> {
        Some(Self { count: count.try_into().ok()?, from: from.try_into().ok()?, to: to.try_into().ok()? })
    }

    /// How many bytes of the file lie between its first and its last index.
    pub(super) const fn reach(self) -> usize {
        (self.count - 1).saturating_mul(self.from)
    }

    /// Whether neighbours touch on both sides.
    pub(super) const fn is_dense(self, item: usize) -> bool {
        self.from == item && self.to == item
    }
}

/// Adds the next inner `axis`; where it fills the steps of the one before, the two become one.
fn push_axis(axes: &mut Vec<Axis>, axis: Axis) {
    match axes.last_mut() {
        Some(outer)
            if axis.count.checked_mul(axis.from) == Some(outer.from)
                && axis.count.checked_mul(axis.to) == Some(outer.to) =>
        {
            *outer = Axis { count: outer.count.saturating_mul(axis.count), ..axis };
        }
        _ => axes.push(axis),
    }
}

/// Calls `visit` with both byte positions of every index of `axes`, the last axis fastest.
pub(super) fn walk(
    axes: &[Axis],
    from: usize,
    to: usize,
    visit: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<()> {
    let Some((outer, inner)) = axes.split_first() else { return visit(from, to) };
    (0..outer.count)
        .try_for_each(|index| walk(inner, from + index * outer.from, to + index * outer.to, visit))
}

/// A copy out of one slice.
struct Transfer<'s> {
    bytes: Readable<'s>,
    record: Option<Record>,
    /// The size of an element, in bytes.
    item: usize,
    /// The byte of the file where the first element lies.
    at: u64,
    /// The byte of the output where it goes.
    to: usize,
    /// In the order of the output, the innermost last.
    axes: Vec<Axis>,
}

impl Transfer<'_> {
    fn run(&self, out: &mut [u8], scratch: &mut Vec<u8>) -> Result<()> {
        match self.axes.split_last() {
            None => self.read_runs(self.item, &[], out),
            Some((inner, outer)) => {
                let bytes = inner.count.saturating_mul(self.item);
                if inner.is_dense(self.item) && (outer.is_empty() || bytes >= DIRECT_BYTES) {
                    self.read_runs(bytes, outer, out)
                } else {
                    self.read_staged(out, scratch)
                }
            }
        }
    }

    /// Reads runs of `bytes` straight into their places.
    fn read_runs(&self, bytes: usize, axes: &[Axis], out: &mut [u8]) -> Result<()> {
        walk(axes, 0, self.to, &mut |from, to| {
            let place = out.get_mut(to..).and_then(|rest| rest.get_mut(..bytes)).ok_or_else(outside)?;
            self.read(place, self.at_byte(from)?)
        })
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        match (&self.bytes, self.record) {
            (Readable::File(file), Some(record)) => file.read_record_at(record, buffer, at),
            _ => self.bytes.read_exact_at(buffer, at),
        }
    }

    fn at_byte(&self, from: usize) -> Result<u64> {
        u64::try_from(from).ok().and_then(|from| self.at.checked_add(from)).ok_or_else(outside)
    }

    fn read_staged(&self, out: &mut [u8], scratch: &mut Vec<u8>) -> Result<()> {
        let stage = Stage::plan(&self.axes, self.item);
        walk(&stage.outer, 0, self.to, &mut |from, to| {
            for index in (0..stage.split.count).step_by(stage.at_once) {
                let count = stage.at_once.min(stage.split.count - index);
                self.fill(&stage, count, from + index * stage.split.from, scratch)?;
                let split = Axis { count, from: stage.scratch_step, to: stage.split.to };
                let axes = [stage.inner.as_slice(), &[split]].concat();
                scatter(scratch, axes, self.item, to + index * stage.split.to, out)?;
            }
            Ok(())
        })
    }

    /// Reads what `count` indices of the stage's split axis hold, from byte `from` on.
    fn fill(&self, stage: &Stage, count: usize, from: usize, scratch: &mut Vec<u8>) -> Result<()> {
        scratch.resize((count - 1).saturating_mul(stage.scratch_step).saturating_add(stage.span), 0);
        if stage.scratch_step == stage.split.from {
            return self.read(scratch, self.at_byte(from)?);
        }
        for (index, piece) in scratch.chunks_mut(stage.scratch_step).enumerate() {
            let piece = piece.get_mut(..stage.span).ok_or_else(outside)?;
            self.read(piece, self.at_byte(from + index * stage.split.from)?)?;
        }
        Ok(())
    }
}

/// How a copy goes through the scratch buffer: `inner` axes whole, so many indices of the `split` axis at once, and
/// that for every index of the `outer` axes.
struct Stage {
    inner: Vec<Axis>,
    /// How many bytes of the file the inner axes reach over.
    span: usize,
    split: Axis,
    at_once: usize,
    /// How many bytes of the scratch buffer lie between indices of the split axis: as in the file where what lies
    /// between is read through, else just the span (and a little, see [`Stage::plan`]).
    scratch_step: usize,
    outer: Vec<Axis>,
}

impl Stage {
    fn plan(axes: &[Axis], item: usize) -> Self {
        // A cache line more than the span, so that pieces of a power of two do not all fall on the same lines of the
        // processor's cache.
        const CACHE_LINE: usize = 64;
        let mut outer = axes.to_vec();
        outer.sort_by_key(|axis| std::cmp::Reverse(axis.from));
        let mut inner = Vec::new();
        let mut span = item;
        let near = |axis: &Axis, span: usize| axis.from <= span.saturating_add(READ_THROUGH_BYTES);
        let fits = |axis: &Axis, span: usize| span.saturating_add(axis.reach()) <= SCRATCH_BYTES;
        while let Some(axis) = outer.pop_if(|axis| near(axis, span) && fits(axis, span)) {
            span += axis.reach();
            inner.push(axis);
        }
        let split = outer.pop().unwrap_or(Axis::SINGLE);
        let scratch_step = if near(&split, span) { split.from } else { span + CACHE_LINE };
        let at_once = 1 + (SCRATCH_BYTES - span) / scratch_step.max(1);
        Self { inner, span, split, at_once, scratch_step, outer }
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
    use crate::checkpoint::Others;
    use crate::shape::records::check_records;
    use crate::shape::tiling;
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
