//! The formats with 32 weights a block.
//!
//! Where a format has nibbles, byte `j` of `qs` holds weight `j` in its low four bits and weight
//! `j + 16` in its high four. Where it has fifth bits, bit `i` of the little-endian `qh` belongs
//! to weight `i`.

use super::f16_at;

/// Four-bit code of weight `i`.
fn nibble(qs: &[u8], i: usize) -> u8 {
    if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 }
}

/// Five-bit code of weight `i`.
fn five_bits(qh: &[u8], qs: &[u8], i: usize) -> u8 {
    let high = (qh[i / 8] >> (i % 8)) & 1;
    nibble(qs, i) | high << 4
}

/// `w = d * (q - 8)`
///
/// ```text
///   byte 0    2                18
///        | d  | qs 16 nibbles  |
/// ```
pub(super) fn decode_q4_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let qs = &block[2..18];
    for (i, w) in out.iter_mut().enumerate() {
        *w = d * (f32::from(nibble(qs, i)) - 8.0);
    }
}

/// `w = d * q + m`
///
/// ```text
///   byte 0    2    4                20
///        | d  | m  | qs 16 nibbles  |
/// ```
pub(super) fn decode_q4_1(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let m = f16_at(block, 2);
    let qs = &block[4..20];
    for (i, w) in out.iter_mut().enumerate() {
        *w = d * f32::from(nibble(qs, i)) + m;
    }
}

/// `w = d * (q - 16)`
///
/// ```text
///   byte 0    2           6                22
///        | d  | qh 32 bit | qs 16 nibbles  |
/// ```
pub(super) fn decode_q5_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let qh = &block[2..6];
    let qs = &block[6..22];
    for (i, w) in out.iter_mut().enumerate() {
        *w = d * (f32::from(five_bits(qh, qs, i)) - 16.0);
    }
}

/// `w = d * q + m`
///
/// ```text
///   byte 0    2    4           8                24
///        | d  | m  | qh 32 bit | qs 16 nibbles  |
/// ```
pub(super) fn decode_q5_1(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let m = f16_at(block, 2);
    let qh = &block[4..8];
    let qs = &block[8..24];
    for (i, w) in out.iter_mut().enumerate() {
        *w = d * f32::from(five_bits(qh, qs, i)) + m;
    }
}

/// `w = d * q`, where `q` is a signed byte. Files hold -127 to 127; -128 is legal.
///
/// ```text
///   byte 0    2                34
///        | d  | qs 32 x i8     |
/// ```
pub(super) fn decode_q8_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (w, &q) in out.iter_mut().zip(&block[2..34]) {
        *w = d * f32::from(q as i8);
    }
}
