//! The same bits as the plain code, for rows of all kinds.

use proptest::prelude::*;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form, Layout};

use crate::encode::any_rows;
use crate::encode::fuzzing::{encoders, same_bits};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn blocks_have_the_bits_of_the_plain_code((width, values) in any_rows::block(), alignment in 1..=3u64) {
        let rows: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for &encoding in Encoding::ALL {
            let form = Form::plain(encoding);
            for source in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                same_bits(form, source, width, &rows[..rows.len() / 4 * usize::try_from(source.size()).unwrap()]);
            }
            if encoding.is_row_wise() {
                let form = Form { layout: Layout::Leading, row_alignment: 1 << alignment, ..form };
                same_bits(form, Dtype::F32, width, &rows);
            }
        }
    }

    #[test]
    fn bytes_of_any_kind_have_them_too(input in proptest::collection::vec(any::<u8>(), 0..4000)) {
        encoders(&input);
    }
}

#[test]
fn widths_around_a_groups_and_a_runs_end() {
    for width in
        [1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2048, 2049]
    {
        for rows in [1, 7, 8, 9, 16, 17] {
            let values = (0..width * rows).map(|at| (at * 7919 % 1009) as f32 / 1009.0 - 0.4);
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            for &encoding in Encoding::ALL {
                same_bits(Form::plain(encoding), Dtype::F32, width, &bytes);
            }
        }
    }
}
