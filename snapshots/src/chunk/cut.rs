//! Where a tensor's encoded bytes are cut into chunks.
//!
//! A block is the largest power of two of rows whose encoded bytes fit 8 MiB, and at least one row. The cut depends
//! on the row's size alone, never on parts, budgets, devices or workers: so a block that no training step touched
//! keeps its hash from snapshot to snapshot.

use weighbridge_schemas::limits;

/// The number of rows in a block, for rows of `row_bytes` encoded bytes.
#[must_use]
pub fn rows_a_block(row_bytes: u64) -> u64 {
    let fitting = limits::CHUNK_BYTES / row_bytes.max(1);
    fitting.checked_ilog2().map_or(1, |power| 1 << power)
}

/// The blocks of a tensor of `rows` rows: first row and number of rows of each.
pub fn blocks(rows: u64, row_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = rows_a_block(row_bytes);
    (0..rows.div_ceil(step)).map(move |block| {
        let first = block * step;
        (first, step.min(rows - first))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_largest_power_of_two_that_fits() {
        assert_eq!(rows_a_block(72), 65_536);
        assert_eq!(rows_a_block(1), limits::CHUNK_BYTES);
        assert_eq!(rows_a_block(limits::CHUNK_BYTES), 1);
        assert_eq!(rows_a_block(limits::CHUNK_BYTES + 1), 1);
        assert_eq!(rows_a_block(limits::CHUNK_BYTES / 2), 2);
        assert_eq!(rows_a_block(limits::CHUNK_BYTES / 3), 2);
        assert_eq!(rows_a_block(u64::MAX), 1);
    }

    proptest! {
        #[test]
        fn blocks_tile_the_rows_and_fit(rows in 0u64..10_000_000, row_bytes in 1u64..100_000_000) {
            let mut next = 0;
            for (first, count) in blocks(rows, row_bytes).take(100_000) {
                prop_assert_eq!(first, next);
                prop_assert!(count >= 1);
                prop_assert!(count == 1 || count * row_bytes <= limits::CHUNK_BYTES);
                next += count;
            }
            prop_assert!(next == rows || rows.div_ceil(rows_a_block(row_bytes)) > 100_000);
        }
    }
}
