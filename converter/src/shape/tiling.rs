//! Whether the slices of a tensor tile it exactly: none outside, none over another, nothing missing.
//!
//! A distributed checkpoint says for every tensor which boxes of it lie where. Whoever wrote it may have been killed
//! half-way, or have had two ranks write one row; a snapshot of such a tensor would mix rows or hold zeros that
//! nobody trained. So the boxes are checked, from metadata alone, before a byte is read.
//!
//! Overlaps are looked for by cutting: boxes that some plane parts from the others cannot overlap them, so every
//! group is cut along its dimensions until a group is one box (a grid, however fine, takes one cut a dimension) or no
//! plane parts it, and only then are boxes compared, in a sweep. Without overlaps the volumes tell whether anything is
//! missing, and a sweep over the rows finds out what.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use weighbridge_schemas::dtype::element_count;
use weighbridge_schemas::limits;

use crate::checkpoint::{Slice, Tensor};
use crate::error::{Class, ReadError, Result};

/// How many comparisons of two boxes a tensor may take. Slices in rows, columns and grids take next to none; thousands
/// that no plane parts still fit.
const MOST_COMPARISONS: usize = 50_000_000;
/// How many times a group of boxes is cut before its boxes are compared one by one: each dimension once, and then
/// again for boxes within boxes. More would let a spiral of boxes be peeled one box a cut.
const MOST_CUTS: usize = 2 * limits::DIMENSIONS;

/// Checks that the slices of `tensor` tile it exactly. Slices without elements count for nothing, but lie inside
/// the tensor too.
///
/// # Errors
/// [`Class::BadShape`] for too many dimensions, [`Class::ShapeOverflow`] for too many elements,
/// [`Class::LimitExceeded`] for more than [`limits::SLICES_A_TENSOR`] slices, [`Class::DcpChunkBounds`],
/// [`Class::DcpChunkOverlap`], [`Class::DcpChunkGap`].
pub fn check(tensor: &Tensor) -> Result<()> {
    check_slices(tensor).map_err(|error| error.of_tensor(tensor.name.as_str()))
}

fn check_slices(tensor: &Tensor) -> Result<()> {
    let elements = check_limits(tensor)?;
    for slice in &tensor.slices {
        check_bounds(slice, &tensor.shape)?;
    }
    let boxes: Vec<&Slice> = tensor.slices.iter().filter(|slice| !slice.sizes.contains(&0)).collect();
    if let Some((first, second)) = find_overlap(boxes.clone(), tensor.shape.len())? {
        return Err(overlap(first, second));
    }
    if boxes.iter().map(|slice| volume(&slice.sizes)).sum::<u128>() < u128::from(elements) {
        return Err(ReadError::new(Class::DcpChunkGap, missing(boxes, &tensor.shape)));
    }
    Ok(())
}

/// The number of elements, where the tensor is within the limits.
fn check_limits(tensor: &Tensor) -> Result<u64> {
    let (dimensions, slices) = (tensor.shape.len(), tensor.slices.len());
    if dimensions > limits::DIMENSIONS {
        let detail = format!("it has {dimensions} dimensions; at most {} are supported", limits::DIMENSIONS);
        return Err(ReadError::new(Class::BadShape, detail));
    }
    if slices > limits::SLICES_A_TENSOR {
        let detail = format!("it has {slices} slices; at most {} are supported", limits::SLICES_A_TENSOR);
        return Err(ReadError::new(Class::LimitExceeded, detail));
    }
    element_count(&tensor.shape, tensor.dtype).ok_or_else(|| {
        let detail = format!("the size of shape {:?} does not fit 64 bits", tensor.shape);
        ReadError::new(Class::ShapeOverflow, detail)
    })
}

fn check_bounds(slice: &Slice, shape: &[u64]) -> Result<()> {
    let Slice { offsets, sizes, .. } = slice;
    let same_rank = offsets.len() == shape.len() && sizes.len() == shape.len();
    let inside = offsets
        .iter()
        .zip(sizes)
        .zip(shape)
        .all(|((&offset, &size), &extent)| offset.checked_add(size).is_some_and(|end| end <= extent));
    if same_rank && inside {
        return Ok(());
    }
    let why = if same_rank { "lies outside the shape" } else { "has another rank than the shape" };
    // Untrusted lists: enough of them to recognise the slice.
    let most = limits::DIMENSIONS;
    let shown = |numbers: &[u64]| format!("{:?}", numbers.get(..most).unwrap_or(numbers));
    let detail = format!("the slice at {} of size {} {why} {shape:?}", shown(offsets), shown(sizes));
    Err(ReadError::new(Class::DcpChunkBounds, detail).in_file(file_name(slice)))
}

fn overlap(first: &Slice, second: &Slice) -> ReadError {
    let mut detail = format!(
        "the slice at {:?} of size {:?} overlaps the one at {:?} of size {:?}",
        first.offsets, first.sizes, second.offsets, second.sizes
    );
    if file_name(first) != file_name(second) {
        detail.push_str(&format!(" in {}", file_name(second)));
    }
    ReadError::new(Class::DcpChunkOverlap, detail).in_file(file_name(first))
}

fn file_name(slice: &Slice) -> &str {
    slice.location.file().name()
}

/// The product of `sizes`, which fits 128 bits for sizes that lie in a tensor.
fn volume(sizes: &[u64]) -> u128 {
    sizes.iter().fold(1, |product: u128, &size| product.saturating_mul(u128::from(size)))
}

/// Where `slice`, which lies inside its tensor, starts and ends along `dimension`.
fn interval(slice: &Slice, dimension: usize) -> (u64, u64) {
    let start = slice.offsets.get(dimension).copied().unwrap_or(0);
    (start, start.saturating_add(slice.sizes.get(dimension).copied().unwrap_or(1)))
}

/// Two of `boxes` that share an element, if there are any.
fn find_overlap(boxes: Vec<&Slice>, dimensions: usize) -> Result<Option<(&Slice, &Slice)>> {
    let mut comparisons = MOST_COMPARISONS;
    let mut groups = vec![(boxes, 0)];
    while let Some((group, cuts)) = groups.pop() {
        if group.len() < 2 {
            continue;
        }
        match cut(group, if cuts < MOST_CUTS { dimensions } else { 0 }) {
            Ok(parts) => groups.extend(parts.into_iter().map(|part| (part, cuts + 1))),
            Err(group) => match sweep(group, dimensions, &mut comparisons)? {
                None => {}
                found => return Ok(found),
            },
        }
    }
    Ok(None)
}

/// Cuts `group` into groups that cannot overlap each other, along the first of the `dimensions` in which planes part
/// it; gives it back where none does.
fn cut(mut group: Vec<&Slice>, dimensions: usize) -> std::result::Result<Vec<Vec<&Slice>>, Vec<&Slice>> {
    for dimension in 0..dimensions {
        group.sort_by_key(|slice| interval(slice, dimension).0);
        let mut reached = 0;
        let parts = group.chunk_by(|left, right| {
            reached = interval(left, dimension).1.max(reached);
            interval(right, dimension).0 < reached
        });
        let parts: Vec<Vec<&Slice>> = parts.map(<[_]>::to_vec).collect();
        if parts.len() > 1 {
            return Ok(parts);
        }
    }
    Err(group)
}

/// Compares the boxes of `group` in the order of their starts along the dimension with the most different starts,
/// each with those before it that have not ended.
fn sweep<'s>(
    mut group: Vec<&'s Slice>,
    dimensions: usize,
    comparisons: &mut usize,
) -> Result<Option<(&'s Slice, &'s Slice)>> {
    let dimension = (0..dimensions).max_by_key(|&dimension| starts(&group, dimension)).unwrap_or(0);
    group.sort_by_key(|slice| interval(slice, dimension).0);
    let mut open: Vec<&Slice> = Vec::new();
    for slice in group {
        let start = interval(slice, dimension).0;
        *comparisons = comparisons.checked_sub(open.len()).ok_or_else(|| {
            ReadError::new(Class::LimitExceeded, "its slices lie too irregularly to be checked")
        })?;
        open.retain(|other| interval(other, dimension).1 > start);
        if let Some(other) = open.iter().find(|other| meet(other, slice)) {
            return Ok(Some((other, slice)));
        }
        open.push(slice);
    }
    Ok(None)
}

/// How many different starts the boxes of `group` have along `dimension`.
fn starts(group: &[&Slice], dimension: usize) -> usize {
    group.iter().map(|slice| interval(slice, dimension).0).collect::<HashSet<_>>().len()
}

fn meet(left: &Slice, right: &Slice) -> bool {
    (0..left.offsets.len()).all(|dimension| {
        let ((left_start, left_end), (right_start, right_end)) =
            (interval(left, dimension), interval(right, dimension));
        left_start < right_end && right_start < left_end
    })
}

/// Says which region of the tensor is the first that none of `boxes` covers. They do not overlap.
fn missing(mut boxes: Vec<&Slice>, shape: &[u64]) -> String {
    let mut region = String::new();
    for (dimension, &extent) in shape.iter().enumerate() {
        let (gap, across) = first_gap(&boxes, dimension, shape);
        let noun = match dimension {
            0 if shape.len() == 1 => "elements".to_owned(),
            0 => "rows".to_owned(),
            1 => "columns".to_owned(),
            _ => format!("indices of dimension {dimension}"),
        };
        let inner = format!("{noun} {}..{}", gap.start, gap.end);
        region = if dimension == 0 { inner } else { format!("{inner} of {region}") };
        if across.is_empty() {
            let whole = if dimension == 0 { format!(" of {extent}") } else { String::new() };
            return format!("{region}{whole} are missing");
        }
        boxes = across;
    }
    "its only element is missing".to_owned()
}

/// The first interval along `dimension` in which `boxes` do not fill the cross-section, and those of them that lie
/// across it.
fn first_gap<'s>(boxes: &[&'s Slice], dimension: usize, shape: &[u64]) -> (Range<u64>, Vec<&'s Slice>) {
    let section = |sizes: &[u64]| volume(sizes.get(dimension + 1..).unwrap_or_default());
    let extent = shape.get(dimension).copied().unwrap_or(0);
    // What begins and what ends at a position: elements of the cross-section.
    let mut changes: BTreeMap<u64, (u128, u128)> = BTreeMap::from([(0, (0, 0)), (extent, (0, 0))]);
    for slice in boxes {
        let (start, end) = interval(slice, dimension);
        changes.entry(start).or_default().0 += section(&slice.sizes);
        changes.entry(end).or_default().1 += section(&slice.sizes);
    }
    let mut filled: u128 = 0;
    let mut gap = None;
    for ((&start, &(begun, ended)), &end) in changes.iter().zip(changes.keys().skip(1)) {
        filled = filled.saturating_add(begun).saturating_sub(ended);
        gap = match gap {
            None if filled < section(shape) => Some((start..end, filled == 0)),
            // Where nothing at all lies across, the gap goes on until something does.
            Some((gap, true)) if filled == 0 => Some((gap.start..end, true)),
            None => None,
            Some(_) => break,
        };
    }
    let gap = gap.map_or(0..extent, |(gap, _)| gap);
    let across = boxes.iter().copied().filter(|slice| {
        let (start, end) = interval(slice, dimension);
        start <= gap.start && gap.start < end
    });
    let across = across.collect();
    (gap, across)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use proptest::sample::Index;
    use weighbridge_schemas::dtype::Dtype;

    use super::*;
    use crate::checkpoint::Location;
    use crate::source::{Source, SourceFile};

    fn file() -> Arc<SourceFile> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), "x").unwrap();
        Source::open(folder.path()).unwrap().file("f").unwrap()
    }

    type Part<'p> = (&'p [u64], &'p [u64]);
    type OwnedPart = (Vec<u64>, Vec<u64>);

    fn tensor(shape: &[u64], parts: &[Part<'_>]) -> Tensor {
        let file = file();
        let slices = parts.iter().map(|&(offsets, sizes)| Slice {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
            location: Location::Dense { file: Arc::clone(&file), offset: 0 },
        });
        Tensor {
            name: "t".parse().unwrap(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            slices: slices.collect(),
        }
    }

    fn fails(shape: &[u64], parts: &[Part<'_>]) -> (Class, String) {
        let error = check(&tensor(shape, parts)).unwrap_err();
        assert_eq!(error.tensor(), Some("t"));
        (error.class(), error.to_string())
    }

    #[track_caller]
    fn assert_gap(shape: &[u64], parts: &[Part<'_>], detail: &str) {
        assert_eq!(fails(shape, parts), (Class::DcpChunkGap, format!("tensor \"t\": {detail}")));
    }

    #[test]
    fn whole_tilings_pass() {
        check(&tensor(&[], &[(&[], &[])])).unwrap();
        check(&tensor(&[0, 4], &[])).unwrap();
        check(&tensor(&[0, 4], &[(&[0, 0], &[0, 4])])).unwrap();
        check(&tensor(&[4], &[(&[2], &[2]), (&[2], &[0]), (&[0], &[2]), (&[4], &[0])])).unwrap();
        // No straight cut parts these five: four around one in the middle.
        let pinwheel: [Part<'_>; 5] = [
            (&[0, 0], &[1, 2]),
            (&[0, 2], &[2, 1]),
            (&[2, 1], &[1, 2]),
            (&[1, 0], &[2, 1]),
            (&[1, 1], &[1, 1]),
        ];
        check(&tensor(&[3, 3], &pinwheel)).unwrap();
        assert_gap(&[3, 3], &pinwheel[..4], "columns 1..2 of rows 1..2 are missing");
    }

    #[test]
    fn the_first_missing_region_is_named() {
        assert_gap(&[], &[], "its only element is missing");
        assert_gap(&[10], &[(&[0], &[3]), (&[5], &[2])], "elements 3..5 of 10 are missing");
        assert_gap(&[256, 4], &[(&[0, 0], &[128, 4])], "rows 128..256 of 256 are missing");
        assert_gap(&[256, 4], &[(&[128, 0], &[128, 4])], "rows 0..128 of 256 are missing");
        assert_gap(&[4, 8], &[(&[0, 4], &[4, 4])], "columns 0..4 of rows 0..4 are missing");
        let grid: [Part<'_>; 3] = [(&[0, 0], &[2, 4]), (&[0, 4], &[2, 4]), (&[2, 4], &[2, 4])];
        assert_gap(&[4, 8], &grid, "columns 0..4 of rows 2..4 are missing");
        assert_gap(
            &[2, 2, 2],
            &[(&[0, 0, 0], &[2, 2, 1]), (&[0, 0, 1], &[2, 1, 1])],
            "indices of dimension 2 1..2 of columns 1..2 of rows 0..2 are missing",
        );
    }

    #[test]
    fn overlaps_name_both_slices() {
        for (shape, first, second) in [
            (&[8, 4][..], (&[0, 0][..], &[5, 4][..]), (&[4, 0][..], &[4, 4][..])),
            (&[8, 4], (&[0, 0], &[8, 4]), (&[2, 2], &[1, 1])),
            (&[8], (&[0], &[8]), (&[0], &[8])),
            (&[], (&[], &[]), (&[], &[])),
        ] {
            let (class, message) = fails(shape, &[second, first]);
            assert_eq!(class, Class::DcpChunkOverlap);
            for (offsets, sizes) in [first, second] {
                assert!(message.contains(&format!("at {offsets:?} of size {sizes:?}")), "{message}");
            }
        }
    }

    #[test]
    fn slices_stay_inside_and_within_the_limits() {
        for (offsets, sizes) in [
            (&[0, 0][..], &[9, 4][..]),
            (&[8, 0], &[1, 4]),
            (&[9, 0], &[0, 4]),
            (&[u64::MAX, 0], &[2, 4]),
            (&[0], &[8]),
            (&[0, 0], &[8]),
            (&[0, 0, 0], &[8, 4, 1]),
            (&[0; 100], &[0; 100]),
        ] {
            assert_eq!(fails(&[8, 4], &[(offsets, sizes)]).0, Class::DcpChunkBounds, "{offsets:?} {sizes:?}");
        }
        assert_eq!(fails(&[1; 17], &[]).0, Class::BadShape);
        assert_eq!(fails(&[1 << 40, 1 << 40], &[]).0, Class::ShapeOverflow);
        let part: Part<'_> = (&[0], &[1]);
        assert_eq!(fails(&[1], &vec![part; limits::SLICES_A_TENSOR + 1]).0, Class::LimitExceeded);
    }

    #[test]
    fn lines_that_no_plane_parts_are_not_compared_for_ever() {
        // Lines in three directions, none of which meet: every plane cuts some of them.
        let side = 2 * 140;
        let mut parts: Vec<OwnedPart> = Vec::new();
        for (a, b) in (0..140).flat_map(|a| (0..140).map(move |b| (a, b))) {
            parts.push((vec![0, 2 * a, 2 * b + 1], vec![side, 1, 1]));
            parts.push((vec![2 * a + 1, 0, 2 * b], vec![1, side, 1]));
            parts.push((vec![2 * a, 2 * b + 1, 0], vec![1, 1, side]));
        }
        let error = check(&tensor_of(&[side; 3], &parts)).unwrap_err();
        assert!(matches!(error.class(), Class::LimitExceeded | Class::DcpChunkGap), "{error}");
    }

    #[test]
    fn the_largest_grids_are_checked_at_once() {
        let largest = limits::SLICES_A_TENSOR as u64;
        let grid = |shape: &[u64]| -> Vec<OwnedPart> {
            let number_of = |mut index: u64| {
                shape.iter().map(|size| (index % size, index /= size).0).collect::<Vec<u64>>()
            };
            (0..largest).map(|index| (number_of(index), vec![1; shape.len()])).collect()
        };
        for shape in [&[largest][..], &[1, largest], &[256, 256], &[16; 4], &[2; 16]] {
            let mut parts = grid(shape);
            check(&tensor_of(shape, &parts)).unwrap();
            parts[7] = parts[8].clone();
            assert_eq!(check(&tensor_of(shape, &parts)).unwrap_err().class(), Class::DcpChunkOverlap);
            parts.swap_remove(7);
            assert_eq!(check(&tensor_of(shape, &parts)).unwrap_err().class(), Class::DcpChunkGap);
        }
    }

    /// Boxes made by cutting a tensor, and then some of the boxes, in two.
    fn tiling() -> impl Strategy<Value = (Vec<u64>, Vec<OwnedPart>)> {
        let shape = prop::collection::vec(1..9u64, 1..4);
        let cuts = prop::collection::vec((any::<Index>(), any::<Index>(), any::<Index>()), 0..12);
        (shape, cuts).prop_map(|(shape, cuts)| {
            let mut parts = vec![(vec![0; shape.len()], shape.clone())];
            for (part, dimension, at) in cuts {
                let dimension = dimension.index(shape.len());
                let place = part.index(parts.len());
                let (offsets, sizes) = &mut parts[place];
                let at = at.index(usize::try_from(sizes[dimension]).unwrap()) as u64;
                if at > 0 {
                    let mut rest = (offsets.clone(), sizes.clone());
                    sizes[dimension] = at;
                    rest.0[dimension] += at;
                    rest.1[dimension] -= at;
                    parts.push(rest);
                }
            }
            (shape, parts)
        })
    }

    fn tensor_of(shape: &[u64], parts: &[OwnedPart]) -> Tensor {
        let parts: Vec<Part<'_>> = parts.iter().map(|(o, s)| (o.as_slice(), s.as_slice())).collect();
        tensor(shape, &parts)
    }

    /// How often each element is covered, by counting.
    fn covered(shape: &[u64], parts: &[OwnedPart]) -> Vec<usize> {
        let elements: u64 = shape.iter().product();
        let at = |mut index: u64| {
            let mut place: Vec<u64> =
                shape.iter().rev().map(|size| (index % size, index /= size).0).collect();
            place.reverse();
            place
        };
        let holds = |(offsets, sizes): &OwnedPart, place: &[u64]| {
            (0..place.len()).all(|d| offsets[d] <= place[d] && place[d] < offsets[d] + sizes[d])
        };
        (0..elements).map(|index| parts.iter().filter(|part| holds(part, &at(index))).count()).collect()
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_counting_finds(
            (shape, mut parts) in tiling(),
            change in prop::option::of((any::<Index>(), 0..4u8, any::<Index>())),
        ) {
            if let Some((part, what, dimension)) = change {
                let (part, dimension) = (part.index(parts.len()), dimension.index(shape.len()));
                match what {
                    0 => drop(parts.remove(part)),
                    1 => parts[part].1[dimension] += 1,
                    2 => parts[part].0[dimension] += 1,
                    _ => parts.push(parts[part].clone()),
                }
            }
            let inside = parts.iter().all(|(o, s)| (0..shape.len()).all(|d| o[d] + s[d] <= shape[d]));
            let found = check(&tensor_of(&shape, &parts)).map_err(|error| error.class());
            let covered = covered(&shape, &parts);
            let expected = if !inside {
                Err(Class::DcpChunkBounds)
            } else if covered.iter().any(|&times| times > 1) {
                Err(Class::DcpChunkOverlap)
            } else if covered.contains(&0) {
                Err(Class::DcpChunkGap)
            } else {
                Ok(())
            };
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn a_lost_block_of_rows_is_named(cuts in prop::collection::btree_set(1..200u64, 1..10), lost: Index) {
            let edges: Vec<u64> = [0].into_iter().chain(cuts).chain([200]).collect();
            let mut parts: Vec<_> =
                edges.windows(2).map(|pair| (vec![pair[0], 0], vec![pair[1] - pair[0], 3])).collect();
            let (offsets, sizes) = parts.remove(lost.index(parts.len()));
            let error = check(&tensor_of(&[200, 3], &parts)).unwrap_err().to_string();
            let rows = format!("rows {}..{} of 200 are missing", offsets[0], offsets[0] + sizes[0]);
            prop_assert!(error.ends_with(&rows), "{}", error);
        }
    }
}
