//! Encoded rows to binary32: a decoder for every encoding, with the rounding of FBGEMM's and PyTorch's own.

use half::f16;

use super::{Encoding, Form, Layout, RowSizes, halves};
use crate::dtype::Dtype;

/// How many elements are converted at once: enough for the processor's vector instructions, few enough for the stack.
const RUN: usize = 64;

impl Form {
    /// Decodes an encoded row into `decoded`, whose length is the row's logical width; `source` is the element type
    /// in the checkpoint. It gives false, and decodes nothing, where `row` has another size than such a row has, or
    /// where what is kept are no floating-point numbers.
    #[must_use]
    pub fn decode_row(&self, source: Dtype, row: &[u8], decoded: &mut [f32]) -> bool {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "the same code, compiled for a processor that has been asked")]
            // SAFETY: the processor has been asked whether it has AVX2 and FMA.
            return unsafe { self.decode_row_by_avx2(source, row, decoded) };
        }
        self.decode_row_anywhere(source, row, decoded)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn decode_row_by_avx2(&self, source: Dtype, row: &[u8], decoded: &mut [f32]) -> bool {
        self.decode_row_anywhere(source, row, decoded)
    }

    #[inline(always)]
    fn decode_row_anywhere(&self, source: Dtype, row: &[u8], decoded: &mut [f32]) -> bool {
        let sizes = u64::try_from(decoded.len()).ok().and_then(|width| self.row_sizes(width, source));
        let Some((codes, parameters)) = sizes.and_then(|sizes| self.split(sizes, row)) else { return false };
        match self.encoding {
            Encoding::Keep => return decode_kept(source, codes, decoded),
            Encoding::F32 => decode_f32(codes, decoded),
            Encoding::F16 => decode_f16(codes, decoded),
            Encoding::Bf16 => decode_bf16(codes, decoded),
            Encoding::F8E4m3fn => decode_f8_e4m3(codes, decoded),
            Encoding::F8E5m2 => decode_f8_e5m2(codes, decoded),
            Encoding::Hfp8E4b7Max240 => decode_hfp8(codes, decoded),
            Encoding::Int8Sbf32 | Encoding::Int8Sbf16 => Line::of(parameters).decode(codes, decoded),
            Encoding::Int4Sbf16 => Line::of(parameters).decode_packed(codes, decoded, unpack_4_bits),
            Encoding::Int2Sbf16 => Line::of(parameters).decode_packed(codes, decoded, unpack_2_bits),
        }
        true
    }

    /// Codes, and scale and bias; `None` where `row` is not of that size.
    fn split<'r>(&self, sizes: RowSizes, row: &'r [u8]) -> Option<(&'r [u8], &'r [u8])> {
        let of = |size: u64| usize::try_from(size).ok();
        let (codes, parameters, padding) = (of(sizes.codes)?, of(sizes.parameters)?, of(sizes.padding)?);
        if row.len() != codes.checked_add(parameters)?.checked_add(padding)? {
            return None;
        }
        match self.layout {
            Layout::Trailing => row.split_at_checked(codes),
            Layout::Leading => {
                let (parameters, behind) = row.split_at_checked(parameters)?;
                Some((behind.get(..codes)?, parameters))
            }
        }
    }
}

/// Kept numbers, as far as they are floating-point ones.
#[inline(always)]
fn decode_kept(source: Dtype, row: &[u8], decoded: &mut [f32]) -> bool {
    match source {
        Dtype::F64 => decode_f64(row, decoded),
        Dtype::F32 => decode_f32(row, decoded),
        Dtype::F16 => decode_f16(row, decoded),
        Dtype::Bf16 => decode_bf16(row, decoded),
        Dtype::F8E4m3 => decode_f8_e4m3(row, decoded),
        Dtype::F8E5m2 => decode_f8_e5m2(row, decoded),
        _ => return false,
    }
    true
}

/// Decodes binary64: eight bytes an element, rounded to the nearest binary32.
#[inline(always)]
pub fn decode_f64(row: &[u8], decoded: &mut [f32]) {
    for (value, &bytes) in decoded.iter_mut().zip(row.as_chunks::<8>().0) {
        *value = narrow(f64::from_le_bytes(bytes));
    }
}

/// Decodes binary32: four bytes an element.
#[inline(always)]
pub fn decode_f32(row: &[u8], decoded: &mut [f32]) {
    for (value, &bytes) in decoded.iter_mut().zip(row.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(bytes);
    }
}

/// Decodes binary16: two bytes an element. A signalling NaN may come out quiet.
pub fn decode_f16(row: &[u8], decoded: &mut [f32]) {
    halves::decode(row.as_chunks::<2>().0, |&bytes| bytes, decoded);
}

/// Decodes bfloat16: two bytes an element, the upper half of a binary32.
#[inline(always)]
pub fn decode_bf16(row: &[u8], decoded: &mut [f32]) {
    for (value, &bytes) in decoded.iter_mut().zip(row.as_chunks::<2>().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16);
    }
}

/// Decodes torch's `float8_e4m3fn`: 4 exponent bits with a bias of 7, 3 bits of mantissa, no infinity, one NaN of
/// each sign.
#[inline(always)]
pub fn decode_f8_e4m3(row: &[u8], decoded: &mut [f32]) {
    for (value, &byte) in decoded.iter_mut().zip(row) {
        let magnitude = if byte & 0x7F == 0x7F { f32::NAN } else { e4_bias_7(byte & 0x7F) };
        *value = signed(magnitude, byte);
    }
}

/// Decodes FBGEMM's `hfp8` with 4 exponent bits: as [`decode_f8_e4m3`], but every code is a number.
#[inline(always)]
fn decode_hfp8(row: &[u8], decoded: &mut [f32]) {
    for (value, &byte) in decoded.iter_mut().zip(row) {
        *value = signed(e4_bias_7(byte & 0x7F), byte);
    }
}

#[inline(always)]
fn e4_bias_7(magnitude: u8) -> f32 {
    if magnitude < 8 {
        // Below 2^-6 the unit is 2^-9.
        f32::from(magnitude) * 0.001_953_125
    } else {
        // The three bits of mantissa move to the front of 23, the exponent's bias goes from 7 to 127.
        f32::from_bits((u32::from(magnitude) << 20) + (120 << 23))
    }
}

#[inline(always)]
fn signed(magnitude: f32, byte: u8) -> f32 {
    f32::from_bits(magnitude.to_bits() | u32::from(byte & 0x80) << 24)
}

/// Decodes torch's `float8_e5m2`: 5 exponent bits, 2 bits of mantissa, the upper half of a binary16.
pub fn decode_f8_e5m2(row: &[u8], decoded: &mut [f32]) {
    halves::decode(row, |&byte| [0, byte], decoded);
}

/// Scale and bias of a row.
struct Line {
    scale: f32,
    bias: f32,
}

impl Line {
    /// Of eight bytes in binary32, or of four in binary16.
    fn of(parameters: &[u8]) -> Self {
        let (scale, bias) = match *parameters {
            [s0, s1, s2, s3, b0, b1, b2, b3] => {
                (f32::from_le_bytes([s0, s1, s2, s3]), f32::from_le_bytes([b0, b1, b2, b3]))
            }
            [s0, s1, b0, b1] => {
                (f16::from_le_bytes([s0, s1]).to_f32(), f16::from_le_bytes([b0, b1]).to_f32())
            }
            _ => (f32::NAN, f32::NAN),
        };
        Self { scale, bias }
    }

    #[inline(always)]
    fn decode(&self, codes: &[u8], decoded: &mut [f32]) {
        for (value, &code) in decoded.iter_mut().zip(codes) {
            *value = f32::from(code).mul_add(self.scale, self.bias);
        }
    }

    /// Codes of less than a byte: `unpack` makes `N` codes of a byte.
    #[inline(always)]
    fn decode_packed<const N: usize>(
        &self,
        packed: &[u8],
        decoded: &mut [f32],
        unpack: impl Fn(u8) -> [u8; N],
    ) {
        let mut codes = [[0; N]; RUN];
        for (values, packed) in decoded.chunks_mut(RUN * N).zip(packed.chunks(RUN)) {
            for (codes, &byte) in codes.iter_mut().zip(packed) {
                *codes = unpack(byte);
            }
            self.decode(codes.as_flattened(), values);
        }
    }
}

/// The codes in the low and the high half.
#[inline(always)]
fn unpack_4_bits(byte: u8) -> [u8; 2] {
    let spread = u16::from(byte) | u16::from(byte) << 4;
    (spread & 0x0F0F).to_le_bytes()
}

/// Four codes, from the low bits up.
#[inline(always)]
fn unpack_2_bits(byte: u8) -> [u8; 4] {
    let byte = u32::from(byte);
    let spread = byte | byte << 6 | byte << 12 | byte << 18;
    (spread & 0x0303_0303).to_le_bytes()
}

/// Rounds to the nearest binary32, ties to even.
#[expect(clippy::cast_possible_truncation, reason = "rounding to binary32 is the point")]
const fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(form: Form, row: &[u8], width: usize) -> Vec<f32> {
        let mut decoded = vec![0.0; width];
        assert!(form.decode_row(Dtype::F32, row, &mut decoded), "{form}");
        decoded
    }

    #[test]
    fn a_row_decodes_with_its_scale_and_bias() {
        let parameters = [0.5f32.to_le_bytes(), (-1.0f32).to_le_bytes()].concat();
        let form = Form::plain(Encoding::Int8Sbf32);
        let trailing = [&[0, 1, 255][..], &parameters].concat();
        assert_eq!(decoded(form, &trailing, 3), [-1.0, -0.5, 126.5]);
        let leading = [&parameters[..], &[0, 1, 255], &[9; 5]].concat();
        let form = Form { layout: Layout::Leading, row_alignment: 16, ..form };
        assert_eq!(decoded(form, &leading, 3), [-1.0, -0.5, 126.5]);
    }

    #[test]
    fn packed_codes_are_taken_from_the_low_bits_up_and_the_scale_has_a_sign() {
        let parameters = [f16::from_f32(-0.5).to_le_bytes(), f16::ONE.to_le_bytes()].concat();
        let row = |codes: &[u8]| [codes, &parameters].concat();
        let int8 = decoded(Form::plain(Encoding::Int8Sbf16), &row(&[0, 1, 2]), 3);
        assert_eq!(int8, [1.0, 0.5, 0.0]);
        assert_eq!(decoded(Form::plain(Encoding::Int4Sbf16), &row(&[0x10, 0x02]), 3), int8);
        assert_eq!(decoded(Form::plain(Encoding::Int2Sbf16), &row(&[0b10_0100]), 3), int8);
        let wide: Vec<u8> = (0..200).collect();
        let values = decoded(Form::plain(Encoding::Int4Sbf16), &row(&wide), 399);
        assert_eq!(values[398], 1.0 - 0.5 * f32::from(199u8 % 16));
        let padded = Form { stored_width: Some(4), ..Form::plain(Encoding::Int4Sbf16) };
        assert_eq!(decoded(padded, &row(&[0x10, 0x02]), 3), int8);
    }

    #[test]
    fn rows_of_another_size_and_integers_are_not_decoded() {
        for &encoding in Encoding::ALL {
            for layout in [Layout::Trailing, Layout::Leading] {
                let form = Form { layout, ..Form::plain(encoding) };
                let size = form.row_bytes(5, Dtype::F32).map(|size| usize::try_from(size).unwrap());
                for length in 0..40 {
                    let good = form.decode_row(Dtype::F32, &vec![0; length], &mut [0.0; 5]);
                    assert_eq!(good, Some(length) == size, "{form} {length}");
                }
            }
        }
        assert!(!Form::plain(Encoding::Keep).decode_row(Dtype::I64, &[0; 8], &mut [0.0]));
        assert!(Form::plain(Encoding::Keep).decode_row(Dtype::F64, &1.5f64.to_le_bytes(), &mut [0.0]));
    }

    #[test]
    fn every_8_bit_float_has_its_value() {
        let every: Vec<u8> = (0..=255).collect();
        for (encoding, mantissa_bits, bias) in
            [(Encoding::F8E4m3fn, 3, 7), (Encoding::F8E5m2, 2, 15), (Encoding::Hfp8E4b7Max240, 3, 7)]
        {
            for (byte, value) in every.iter().zip(decoded(Form::plain(encoding), &every, 256)) {
                let magnitude = i32::from(byte & 0x7F);
                let (exponent, mantissa) =
                    (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
                let unit = 2f32.powi(exponent.max(1) - bias - mantissa_bits);
                let whole = if exponent == 0 { mantissa } else { mantissa + (1 << mantissa_bits) };
                let expected = whole as f32 * unit;
                match (encoding, magnitude) {
                    (Encoding::F8E4m3fn, 0x7F) | (Encoding::F8E5m2, 0x7D..) => assert!(value.is_nan()),
                    (Encoding::F8E5m2, 0x7C) => assert_eq!(value.abs(), f32::INFINITY),
                    _ => assert_eq!(value.abs().to_bits(), expected.to_bits(), "{encoding:?} {byte:#x}"),
                }
                assert_eq!(value.is_sign_negative(), *byte >= 0x80);
            }
        }
    }

    #[test]
    fn every_half_has_its_value() {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (encoding, to_f32) in [
            (Encoding::F16, (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
            (Encoding::Bf16, |bits| half::bf16::from_bits(bits).to_f32()),
        ] {
            for (bits, value) in (0..=u16::MAX).zip(decoded(Form::plain(encoding), &every, 1 << 16)) {
                let expected = to_f32(bits);
                let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                assert!(same, "{encoding:?} {bits:#x}");
            }
        }
    }
}
