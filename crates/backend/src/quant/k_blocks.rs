//! The formats with 256 weights a block, in runs of 16 or 32 that have their own scales.
//!
//! Two packings recur. *Planes*: the codes of weights `i`, `i + 32`, `i + 64`, ... lie in one byte,
//! one above the other, so that 32 bytes hold 32 weights of each plane. *Six-bit scales*: eight
//! pairs of scale and offset in twelve bytes, see [`scale_and_min`].

use super::{K_LEN, f16_at};

/// The `bits` wide code of weight `i`, from planes of 32 weights, `8 / bits` planes to 32 bytes.
fn plane(bytes: &[u8], bits: usize, i: usize) -> u8 {
    let planes = 8 / bits;
    let byte = bytes[i / (32 * planes) * 32 + i % 32];
    let shift = i / 32 % planes * bits;
    (byte >> shift) & ((1 << bits) - 1)
}

/// `w = d * scale[run] * q - dmin * min[run]`; 16 runs of 16.
///
/// ```text
///   byte 0                        16                            80   82     84
///        | 16 x (min:4 scale:4)   | qs: 2-bit planes, 4 deep    | d  | dmin |
/// ```
pub(super) fn decode_q2_k(block: &[u8], out: &mut [f32]) {
    let qs = &block[16..80];
    let d = f16_at(block, 80);
    let dmin = f16_at(block, 82);
    for (i, w) in out.iter_mut().enumerate().take(K_LEN) {
        let both = block[i / 16];
        let scale = d * f32::from(both & 15);
        let min = dmin * f32::from(both >> 4);
        *w = scale * f32::from(plane(qs, 2, i)) - min;
    }
}

/// `w = d * (scale[run] - 32) * (q - 4)`; 16 runs of 16. The third bit of `q` is in `hmask`.
///
/// ```text
///   byte 0                             32                           96         108  110
///        | hmask: 1-bit planes, 8 deep | qs: 2-bit planes, 4 deep   | scales   | d  |
/// ```
pub(super) fn decode_q3_k(block: &[u8], out: &mut [f32]) {
    let hmask = &block[..32];
    let qs = &block[32..96];
    let scales = &block[96..108];
    let d = f16_at(block, 108);
    for (i, w) in out.iter_mut().enumerate().take(K_LEN) {
        let scale = d * (f32::from(q3_scale(scales, i / 16)) - 32.0);
        let q = plane(qs, 2, i) | plane(hmask, 1, i) << 2;
        *w = scale * (f32::from(q) - 4.0);
    }
}

/// Six-bit scale of run `j` of 16, from the twelve bytes of a Q3_K block.
///
/// ```text
///   byte 0..8    low four bits of runs 0..8 below, of runs 8..16 above
///   byte 8..12   high two bits of run j in byte 8 + j % 4, at bit 2 (j / 4)
/// ```
fn q3_scale(scales: &[u8], j: usize) -> u8 {
    let low = if j < 8 { scales[j] & 15 } else { scales[j - 8] >> 4 };
    let high = (scales[8 + j % 4] >> (j / 4 * 2)) & 3;
    low | high << 4
}

/// `w = d * scale[run] * q - dmin * min[run]`; 8 runs of 32.
///
/// ```text
///   byte 0    2      4                     16                           144
///        | d  | dmin | scales and mins     | qs: 4-bit planes, 2 deep   |
/// ```
pub(super) fn decode_q4_k(block: &[u8], out: &mut [f32]) {
    let qs = &block[16..144];
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scaled_by_d(block, run);
        for (j, w) in out.iter_mut().enumerate() {
            *w = scale * f32::from(plane(qs, 4, 32 * run + j)) - min;
        }
    }
}

/// `w = d * scale[run] * q - dmin * min[run]`; 8 runs of 32. The fifth bit of `q` is in `qh`.
///
/// ```text
///   byte 0    2      4                  16                         48                         176
///        | d  | dmin | scales and mins  | qh: 1-bit planes, 8 deep | qs: 4-bit planes, 2 deep |
/// ```
pub(super) fn decode_q5_k(block: &[u8], out: &mut [f32]) {
    let qh = &block[16..48];
    let qs = &block[48..176];
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scaled_by_d(block, run);
        for (j, w) in out.iter_mut().enumerate() {
            let i = 32 * run + j;
            *w = scale * f32::from(plane(qs, 4, i) | plane(qh, 1, i) << 4) - min;
        }
    }
}

/// A run's scale and offset as floats, from the head of a Q4_K or Q5_K block.
fn scaled_by_d(block: &[u8], run: usize) -> (f32, f32) {
    let (scale, min) = scale_and_min(&block[4..16], run);
    (f16_at(block, 0) * f32::from(scale), f16_at(block, 2) * f32::from(min))
}

/// Six-bit scale and offset of run `j` of 8, from twelve bytes.
///
/// ```text
///   byte 0..4    scale of run j < 4 below; above, the high two bits of scale j + 4
///   byte 4..8    min   of run j < 4 below; above, the high two bits of min   j + 4
///   byte 8..12   low four bits of run j + 4: scale below, min above
/// ```
fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        return (packed[j] & 63, packed[j + 4] & 63);
    }
    let low = packed[j + 4];
    ((low & 15) | (packed[j - 4] >> 6) << 4, (low >> 4) | (packed[j] >> 6) << 4)
}

/// `w = d * scale[run] * (q - 32)`; 16 runs of 16, scales are signed bytes.
///
/// The low four bits of `q` are planes of 64 weights, two deep; the high two planes of 32, four
/// deep.
///
/// ```text
///   byte 0                          128                         192             208  210
///        | ql: 4 low bits           | qh: 2-bit planes, 4 deep  | 16 x i8 scale | d  |
/// ```
pub(super) fn decode_q6_k(block: &[u8], out: &mut [f32]) {
    let ql = &block[..128];
    let qh = &block[128..192];
    let scales = &block[192..208];
    let d = f16_at(block, 208);
    for (i, w) in out.iter_mut().enumerate().take(K_LEN) {
        let low = (ql[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4)) & 15;
        let q = low | plane(qh, 2, i) << 4;
        let scale = d * f32::from(scales[i / 16] as i8);
        *w = scale * (f32::from(q) - 32.0);
    }
}
