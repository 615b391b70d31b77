//! From the scratch buffer, which holds elements in the order of the file, to their places in the rows.
//!
//! What a merge of columns comes to is short pieces (a row of one rank) at a fixed step, tens of millions a gigabyte.
//! So the two innermost dimensions are copied by loops that know the size of a piece when they are compiled.

use super::transfer::{Axis, outside, walk};
use crate::error::Result;

/// Copies elements of `item` bytes from the scratch buffer to their places from byte `to` of `out` on. What `axes`
/// then holds is of no use.
pub(super) fn scatter(
    scratch: &[u8],
    axes: &mut Vec<Axis>,
    item: usize,
    to: usize,
    out: &mut [u8],
) -> Result<()> {
    axes.retain(|axis| axis.count > 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.to));
    let mut piece = item;
    while let Some(dense) = axes.pop_if(|axis| axis.is_dense(piece)) {
        piece = piece.saturating_mul(dense.count);
    }
    let inner = axes.pop().unwrap_or(Axis::SINGLE);
    let transposer: Option<Transposer> = match piece {
        1 => Some(transpose::<1>),
        2 => Some(transpose::<2>),
        4 => Some(transpose::<4>),
        8 => Some(transpose::<8>),
        _ => None,
    };
    if let Some(transpose) = transposer
        && let Some(outer) = axes.pop_if(|outer| outer.from == piece && inner.to == piece)
    {
        return walk(axes, 0, to, &mut |from, to| {
            let (read, written) = regions(scratch, out, [outer, inner], piece, from, to)?;
            transpose(read, written, outer, inner).ok_or_else(outside)
        });
    }
    let copy = copier(piece);
    walk(axes, 0, to, &mut |from, to| {
        let (read, written) = regions(scratch, out, [Axis::SINGLE, inner], piece, from, to)?;
        copy(read, written, inner, piece).ok_or_else(outside)
    })
}

/// The parts of both buffers that pieces of two axes lie in, from these places on.
fn regions<'b>(
    scratch: &'b [u8],
    out: &'b mut [u8],
    axes: [Axis; 2],
    piece: usize,
    from: usize,
    to: usize,
) -> Result<(&'b [u8], &'b mut [u8])> {
    let reach = |step: fn(Axis) -> usize| {
        let last = |axis: Axis| (axis.count - 1).saturating_mul(step(axis));
        axes.into_iter().fold(piece, |sum, axis| sum.saturating_add(last(axis)))
    };
    let read = scratch.get(from..).and_then(|rest| rest.get(..reach(|axis| axis.from)));
    let written = out.get_mut(to..).and_then(|rest| rest.get_mut(..reach(|axis| axis.to)));
    read.zip(written).ok_or_else(outside)
}

/// Copies the pieces of one axis; `None` where they reach outside.
type Copier = fn(&[u8], &mut [u8], Axis, usize) -> Option<()>;

fn copier(piece: usize) -> Copier {
    match piece {
        1 => copy_pieces::<1>,
        2..4 => copy_pieces::<2>,
        4..8 => copy_pieces::<4>,
        8..16 => copy_pieces::<8>,
        16..32 => copy_pieces::<16>,
        32..64 => copy_pieces::<32>,
        64..128 => copy_pieces::<64>,
        128..256 => copy_pieces::<128>,
        256..512 => copy_pieces::<256>,
        _ => copy_long,
    }
}

/// Copies pieces of at least `SIZE` and less than twice as many bytes: their first `SIZE` and their last, which
/// overlap.
fn copy_pieces<const SIZE: usize>(read: &[u8], written: &mut [u8], axis: Axis, piece: usize) -> Option<()> {
    if piece == SIZE {
        for index in 0..axis.count {
            let from = read.get(index * axis.from..)?.first_chunk::<SIZE>()?;
            *written.get_mut(index * axis.to..)?.first_chunk_mut::<SIZE>()? = *from;
        }
        return Some(());
    }
    for index in 0..axis.count {
        let from = read.get(index * axis.from..)?.get(..piece)?;
        let to = written.get_mut(index * axis.to..)?.get_mut(..piece)?;
        *to.first_chunk_mut::<SIZE>()? = *from.first_chunk::<SIZE>()?;
        *to.last_chunk_mut::<SIZE>()? = *from.last_chunk::<SIZE>()?;
    }
    Some(())
}

fn copy_long(read: &[u8], written: &mut [u8], axis: Axis, piece: usize) -> Option<()> {
    for index in 0..axis.count {
        let from = read.get(index * axis.from..)?.get(..piece)?;
        written.get_mut(index * axis.to..)?.get_mut(..piece)?.copy_from_slice(from);
    }
    Some(())
}

/// Copies elements of two axes; `None` where they reach outside.
type Transposer = fn(&[u8], &mut [u8], Axis, Axis) -> Option<()>;

/// How many rows and columns are transposed at a time.
const SIDE: usize = 8;

/// Copies elements that lie side by side along the first axis in `read`, and along the second in `written`.
fn transpose<const SIZE: usize>(read: &[u8], written: &mut [u8], rows: Axis, columns: Axis) -> Option<()> {
    let (whole_rows, whole_columns) = (rows.count / SIDE * SIDE, columns.count / SIDE * SIDE);
    for row in (0..whole_rows).step_by(SIDE) {
        for column in (0..whole_columns).step_by(SIDE) {
            let mut block = [[[0u8; SIZE]; SIDE]; SIDE];
            for (index, line) in block.iter_mut().enumerate() {
                let from = read.get((column + index) * columns.from + row * SIZE..)?.get(..SIZE * SIDE)?;
                for (element, bytes) in line.iter_mut().zip(from.as_chunks::<SIZE>().0) {
                    *element = *bytes;
                }
            }
            for index in 0..SIDE {
                let to =
                    written.get_mut((row + index) * rows.to + column * SIZE..)?.get_mut(..SIZE * SIDE)?;
                for (bytes, line) in to.as_chunks_mut::<SIZE>().0.iter_mut().zip(&block) {
                    *bytes = line[index];
                }
            }
        }
    }
    for row in 0..rows.count {
        let column = if row < whole_rows { whole_columns } else { 0 };
        let axis = Axis { count: columns.count - column, ..columns };
        if axis.count > 0 {
            let from = read.get(column * columns.from + row * SIZE..)?;
            let to = written.get_mut(row * rows.to + column * SIZE..)?;
            copy_pieces::<SIZE>(from, to, axis, SIZE)?;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    /// Steps of dimensions that are stored in some order, with so many unused elements behind each.
    fn steps(counts: &[usize], order: &[Index], gap: usize, item: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..counts.len()).collect();
        let mut steps = vec![0; counts.len()];
        let mut step = item;
        for pick in order.iter().take(counts.len()) {
            let dimension = left.remove(pick.index(left.len()));
            steps[dimension] = step;
            step = step * counts[dimension] + gap * item;
        }
        steps
    }

    fn reach(axes: &[Axis], item: usize, step: fn(&Axis) -> usize) -> usize {
        axes.iter().map(|axis| (axis.count - 1) * step(axis)).sum::<usize>() + item
    }

    fn one_by_one(scratch: &[u8], axes: &[Axis], item: usize, to: usize, out: &mut [u8]) {
        walk(axes, 0, to, &mut |from, to| {
            out[to..to + item].copy_from_slice(&scratch[from..from + item]);
            Ok(())
        })
        .unwrap();
    }

    /// Copies of all kinds: counts, and the orders and gaps of both sides.
    fn axes() -> impl Strategy<Value = (usize, Vec<Axis>)> {
        let counts = prop::collection::vec(prop_oneof![1..5usize, 6..40usize], 1..4);
        let side = || (prop::collection::vec(any::<Index>(), 4), 0..3usize);
        let expanded = prop::option::weighted(0.1, any::<Index>());
        let item = prop::sample::select(vec![1, 2, 4, 8]);
        (item, counts, side(), side(), expanded).prop_map(|(item, counts, read, written, expanded)| {
            let (from, to) =
                (steps(&counts, &read.0, read.1, item), steps(&counts, &written.0, written.1, item));
            let steps = from.into_iter().zip(to);
            let mut axes: Vec<_> =
                counts.iter().zip(steps).map(|(&count, (from, to))| Axis { count, from, to }).collect();
            if let Some(expanded) = expanded {
                let place = expanded.index(axes.len());
                axes[place].from = 0;
            }
            (item, axes)
        })
    }

    fn scratch_of(axes: &[Axis], item: usize) -> Vec<u8> {
        let count = reach(axes, item, |axis| axis.from);
        (0u32..).take(count).map(|index| index.wrapping_mul(40503).to_be_bytes()[2]).collect()
    }

    proptest! {
        #[test]
        fn every_copy_is_what_copying_one_by_one_gives((item, axes) in axes(), to in 0..9usize) {
            let scratch = scratch_of(&axes, item);
            let length = to + reach(&axes, item, |axis| axis.to);
            let (mut out, mut expected) = (vec![0xAA; length], vec![0xAA; length]);
            one_by_one(&scratch, &axes, item, to, &mut expected);
            scatter(&scratch, &mut axes.clone(), item, to, &mut out).unwrap();
            prop_assert!(out == expected);
        }

        #[test]
        fn what_reaches_outside_is_an_error((item, axes) in axes()) {
            let scratch = scratch_of(&axes, item);
            let mut out = vec![0; reach(&axes, item, |axis| axis.to)];
            let (short, shorter) = (scratch.len() - 1, out.len() - 1);
            prop_assert!(scatter(&scratch[..short], &mut axes.clone(), item, 0, &mut out).is_err());
            prop_assert!(scatter(&scratch, &mut axes.clone(), item, 1, &mut out).is_err());
            prop_assert!(scatter(&scratch, &mut axes.clone(), item, 0, &mut out[..shorter]).is_err());
        }
    }

    #[test]
    fn pieces_of_every_length_are_whole() {
        for columns in (1..1100).step_by(3) {
            for item in [1, 2, 4] {
                let (piece, rows) = (columns * item, 5);
                let axes = [
                    Axis { count: rows, from: piece, to: piece + 12 },
                    Axis { count: columns, from: item, to: item },
                ];
                let scratch = scratch_of(&axes, item);
                let length = reach(&axes, item, |axis| axis.to);
                let (mut out, mut expected) = (vec![0xAA; length], vec![0xAA; length]);
                one_by_one(&scratch, &axes, item, 0, &mut expected);
                scatter(&scratch, &mut axes.to_vec(), item, 0, &mut out).unwrap();
                assert!(out == expected, "{columns} columns of {item} bytes");
            }
        }
    }
}
