//! A copy out of one slice: read straight into place, or through a scratch buffer in the order of the file.

use super::scatter::scatter;
use crate::checkpoint::SliceRecord;
use crate::error::{Class, ReadError, Result};
use crate::read::unpack::Readable;

/// Largest scratch buffer, in bytes.
pub(super) const SCRATCH_BYTES: usize = 1 << 20;
/// A gap in the file up to this size is read and thrown away, since another read would cost more.
const READ_THROUGH_BYTES: usize = 4096;
/// Runs of at least this size that are dense on both sides are read straight into the output.
const DIRECT_BYTES: usize = 64 << 10;

/// What only slices that do not tile their tensor can lead to.
pub(super) fn outside() -> ReadError {
    ReadError::new(Class::DcpChunkBounds, "a slice reaches outside its tensor")
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

    pub(super) fn new(count: u64, from: u64, to: u64) -> Option<Self> {
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
pub(super) fn push_axis(axes: &mut Vec<Axis>, axis: Axis) {
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
pub(super) struct Transfer<'s> {
    pub(super) bytes: Readable<'s>,
    /// The record that the elements lie in, where it has a checksum.
    pub(super) record: Option<SliceRecord>,
    /// The size of an element, in bytes.
    pub(super) item: usize,
    /// The byte of the file where the first element lies.
    pub(super) at: u64,
    /// The byte of the output where it goes.
    pub(super) to: usize,
    /// In the order of the output, the innermost last.
    pub(super) axes: Vec<Axis>,
}

impl Transfer<'_> {
    pub(super) fn run(&self, out: &mut [u8], scratch: &mut Vec<u8>) -> Result<()> {
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
        self.bytes.read_in(self.record, buffer, at)
    }

    fn at_byte(&self, from: usize) -> Result<u64> {
        u64::try_from(from).ok().and_then(|from| self.at.checked_add(from)).ok_or_else(outside)
    }

    fn read_staged(&self, out: &mut [u8], scratch: &mut Vec<u8>) -> Result<()> {
        let stage = Stage::plan(&self.axes, self.item);
        let mut axes = Vec::with_capacity(stage.inner.len() + 1);
        walk(&stage.outer, 0, self.to, &mut |from, to| {
            for index in (0..stage.split.count).step_by(stage.at_once) {
                let count = stage.at_once.min(stage.split.count - index);
                let staged = self.fill(&stage, count, from + index * stage.split.from, scratch)?;
                stage.inner.clone_into(&mut axes);
                axes.push(Axis { count, from: stage.scratch_step, to: stage.split.to });
                scatter(staged, &mut axes, self.item, to + index * stage.split.to, out)?;
            }
            Ok(())
        })
    }

    /// Reads what `count` indices of the stage's split axis hold, from byte `from` on.
    fn fill<'b>(
        &self,
        stage: &Stage,
        count: usize,
        from: usize,
        scratch: &'b mut Vec<u8>,
    ) -> Result<&'b [u8]> {
        let length = (count - 1).saturating_mul(stage.scratch_step).saturating_add(stage.span);
        // It never shrinks, so that no byte is set twice.
        if scratch.len() < length {
            scratch.resize(length, 0);
        }
        let staged = scratch.get_mut(..length).ok_or_else(outside)?;
        if stage.scratch_step == stage.split.from {
            self.read(staged, self.at_byte(from)?)?;
            return Ok(staged);
        }
        for (index, piece) in staged.chunks_mut(stage.scratch_step).enumerate() {
            let piece = piece.get_mut(..stage.span).ok_or_else(outside)?;
            self.read(piece, self.at_byte(from + index * stage.split.from)?)?;
        }
        Ok(staged)
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
