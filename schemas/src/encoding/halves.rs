//! binary16 to binary32: by F16C, eight at a time, where the processor has it.

use half::f16;

/// Decodes as many elements as there are of both; `half` makes the two bytes of one.
#[inline]
pub(super) fn decode<T>(row: &[T], half: impl Fn(&T) -> [u8; 2] + Copy, decoded: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("f16c") {
        #[expect(unsafe_code, reason = "what is compiled for a processor that has been asked is called so")]
        // SAFETY: the processor has been asked whether it has F16C.
        return unsafe { decode_by_f16c(row, half, decoded) };
    }
    decode_singly(row, half, decoded);
}

#[inline(always)]
fn decode_singly<T>(row: &[T], half: impl Fn(&T) -> [u8; 2], decoded: &mut [f32]) {
    for (value, element) in decoded.iter_mut().zip(row) {
        *value = f16::from_le_bytes(half(element)).to_f32();
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
fn decode_by_f16c<T>(row: &[T], half: impl Fn(&T) -> [u8; 2] + Copy, decoded: &mut [f32]) {
    use safe_unaligned_simd::x86_64::_mm256_storeu_ps;
    use std::arch::x86_64::{_mm_set_epi64x, _mm256_cvtph_ps};

    let whole = decoded.len().min(row.len()) / 8 * 8;
    for (values, elements) in decoded.as_chunks_mut::<8>().0.iter_mut().zip(row.as_chunks::<8>().0) {
        let [a, b, c, d, e, f, g, h] = elements.each_ref().map(half);
        let low = i64::from_le_bytes([a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]]);
        let high = i64::from_le_bytes([e[0], e[1], f[0], f[1], g[0], g[1], h[0], h[1]]);
        _mm256_storeu_ps(values, _mm256_cvtph_ps(_mm_set_epi64x(high, low)));
    }
    decode_singly(row.get(whole..).unwrap_or_default(), half, decoded.get_mut(whole..).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_binary16_decodes_alike_at_every_length() {
        let every: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
        for (elements, room) in
            [(65536, 65536), (17, 17), (17, 12), (9, 30), (24, 23), (7, 8), (8, 7), (3, 2)]
        {
            let (mut fast, mut singly) = (vec![7.0; room], vec![7.0; room]);
            decode(&every[..elements], |&bytes| bytes, &mut fast);
            decode_singly(&every[..elements], |&bytes| bytes, &mut singly);
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(fast.iter().zip(&singly).all(same), "{elements} {room}");
        }
    }
}
