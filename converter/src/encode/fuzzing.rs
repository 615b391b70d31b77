//! What must hold of every row: the fastest code gives the bits of the plain code. The fuzz target `encoders` calls
//! this, and tests with rows of their own.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form, Layout};

use super::{Code, make};
use crate::statistics::{BlockStatistics, Statistics};

/// Encodes an input's bytes in a form of the input's choosing: its first five bytes say encoding, source, layout
/// and width.
///
/// # Panics
/// Where the two differ.
pub fn encoders(input: &[u8]) {
    let Some((&[encoding, source, layout, low, high], rows)) = input.split_first_chunk() else { return };
    let sources = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64, Dtype::F8E4m3];
    let source = sources[usize::from(source) % sources.len()];
    let form = Form::plain(Encoding::ALL[usize::from(encoding) % Encoding::ALL.len()]);
    let form = match layout % 3 {
        1 if form.encoding.is_row_wise() => Form { layout: Layout::Leading, row_alignment: 16, ..form },
        _ => form,
    };
    let width = 1 + usize::from(u16::from_le_bytes([low, high]) % 1500);
    same_bits(form, source, width, rows);
}

/// Encodes `rows` by both.
///
/// # Panics
/// Where the two differ.
pub fn same_bits(form: Form, source: Dtype, width: usize, rows: &[u8]) {
    let encode = |code: Code, before: u8| -> Option<(Vec<u8>, Statistics)> {
        let encoder = make(form, source, width, code)?;
        let mut out = vec![before; encoder.encoded_bytes(rows.len())];
        let mut statistics = BlockStatistics::new(1000);
        encoder.encode(rows, &mut out, &mut statistics);
        Some((out, statistics.finish()))
    };
    let described = || format!("{form} of {source:?}, {width} wide");
    let Some((plain, by_plain)) = encode(Code::Plain, 0x5A) else { return };
    let made = encode(Code::Fastest, 0xA5);
    assert!(made.is_some(), "{}", described());
    let (encoded, statistics) = made.unwrap_or_default();
    assert_eq!(encoded, plain, "{}", described());
    // Debug tells bits apart that compare equal, and finds NaN equal to itself.
    assert_eq!(format!("{statistics:?}"), format!("{by_plain:?}"), "{}", described());
}
