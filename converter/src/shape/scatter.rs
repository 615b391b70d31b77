//! From the scratch buffer, which holds elements in the order of the file, to their places in the rows.

use super::gather::{Axis, outside, walk};
use crate::error::{Class, ReadError, Result};

/// Copies elements of `item` bytes from the scratch buffer to their places from byte `to` of `out` on.
pub(super) fn scatter(
    scratch: &[u8],
    mut axes: Vec<Axis>,
    item: usize,
    to: usize,
    out: &mut [u8],
) -> Result<()> {
    axes.retain(|axis| axis.count > 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.to));
    match item {
        1 => scatter_items::<1>(scratch, &axes, to, out),
        2 => scatter_items::<2>(scratch, &axes, to, out),
        4 => scatter_items::<4>(scratch, &axes, to, out),
        8 => scatter_items::<8>(scratch, &axes, to, out),
        _ => Err(ReadError::new(Class::BadDtype, format!("elements of {item} bytes are not supported"))),
    }
}

fn scatter_items<const ITEM: usize>(scratch: &[u8], axes: &[Axis], to: usize, out: &mut [u8]) -> Result<()> {
    let (inner, outer) = match axes.split_last() {
        Some((inner, outer)) => (*inner, outer),
        None => (Axis::SINGLE, axes),
    };
    let reach = (inner.count - 1).saturating_mul(inner.to).saturating_add(ITEM);
    walk(outer, 0, to, &mut |from, to| {
        let read = scratch.get(from..).and_then(|rest| rest.get(..inner.reach().saturating_add(ITEM)));
        let written = out.get_mut(to..).and_then(|rest| rest.get_mut(..reach));
        let (Some(read), Some(written)) = (read, written) else { return Err(outside()) };
        if inner.is_dense(ITEM) {
            written.copy_from_slice(read);
        } else {
            copy_items::<ITEM>(read, written, inner);
        }
        Ok(())
    })
}

/// Copies the elements of one axis between buffers that hold just them and what lies between.
fn copy_items<const ITEM: usize>(read: &[u8], written: &mut [u8], axis: Axis) {
    for index in 0..axis.count {
        let element = read.get(index * axis.from..).and_then(|rest| rest.first_chunk::<ITEM>());
        let place = written.get_mut(index * axis.to..).and_then(|rest| rest.first_chunk_mut::<ITEM>());
        if let (Some(element), Some(place)) = (element, place) {
            *place = *element;
        }
    }
}
