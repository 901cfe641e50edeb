//! Keys and values in fewer bits, for pages that wait far away.
//!
//! ```text
//!   int8   [ scale f32 | D bytes ]                      a scale for each token and head
//!   fp8    [ scale f32 | D bytes, e4m3 ]                the same
//!   int4   [ scale f16 | 16 bytes ] for each 32 numbers
//! ```
//!
//! A vector is one token's key or value of one head. What is not a number becomes 0, as everywhere in
//! the cache.

use std::sync::OnceLock;

use half::f16;
use nuthatch_types::ColdDtype;

/// Numbers that share a scale in four bits.
const GROUP: usize = 32;
/// The largest number of e4m3.
const E4M3_MAX: f32 = 448.0;

/// Turns pages into fewer bytes and back, on any thread. What comes back is near what went in.
pub trait PageCodec: Send + Sync {
    /// Bytes of a page.
    fn page_bytes(&self) -> usize;
    /// Bytes of a coded page.
    fn coded_bytes(&self) -> usize;
    /// Codes a page.
    fn encode(&self, page: &[u8], coded: &mut [u8]);
    /// Makes a page of what [`PageCodec::encode`] gave.
    fn decode(&self, coded: &[u8], page: &mut [u8]);
    /// Bytes of a layer in a page and in a coded one, if both are nothing but layers that are alike.
    fn layer_bytes(&self) -> Option<(usize, usize)> {
        None
    }
    /// The same as [`PageCodec::decode`] for some layers, where they are alike.
    fn decode_layers(&self, coded: &[u8], layers: &mut [u8]) {
        self.decode(coded, layers);
    }
}

/// Bytes of a vector of `d` numbers.
pub fn vector_bytes(dtype: ColdDtype, d: usize) -> usize {
    match dtype {
        ColdDtype::Int8 | ColdDtype::Fp8 => 4 + d,
        ColdDtype::Int4 => d.div_ceil(GROUP) * (2 + GROUP / 2),
    }
}

/// Codes a vector; `coded` has [`vector_bytes`].
pub fn encode(dtype: ColdDtype, x: &[f32], coded: &mut [u8]) {
    assert_eq!(coded.len(), vector_bytes(dtype, x.len()), "room for one vector");
    match dtype {
        ColdDtype::Int8 | ColdDtype::Fp8 => {
            let top = if dtype == ColdDtype::Int8 { 127.0 } else { E4M3_MAX };
            let scale = largest(x) / top;
            let (head, codes) = coded.split_at_mut(4);
            head.copy_from_slice(&scale.to_le_bytes());
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let numbers = x.iter().map(|&x| finite(x) * inverse);
            let codes = codes.iter_mut().zip(numbers);
            if dtype == ColdDtype::Int8 {
                codes.for_each(|(code, x)| *code = (x.round_ties_even() as i8).cast_unsigned());
            } else {
                codes.for_each(|(code, x)| *code = to_e4m3(x));
            }
        }
        ColdDtype::Int4 => {
            for (x, coded) in x.chunks(GROUP).zip(coded.chunks_exact_mut(2 + GROUP / 2)) {
                // The scale as it will be read, so that its rounding is not felt twice.
                let scale = f16::from_f32((largest(x) / 7.0).min(f16::MAX.to_f32()));
                let (head, codes) = coded.split_at_mut(2);
                head.copy_from_slice(&scale.to_le_bytes());
                let scale = scale.to_f32();
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                let code = |x: f32| (finite(x) * inverse).round_ties_even().clamp(-7.0, 7.0) as i8;
                for (byte, pair) in codes.iter_mut().zip(x.chunks(2)) {
                    let high = pair.get(1).map_or(0, |&x| code(x));
                    *byte = (code(pair[0]) + 8) as u8 | ((high + 8) as u8) << 4;
                }
            }
        }
    }
}

/// Makes a vector of what [`encode`] gave.
pub fn decode(dtype: ColdDtype, coded: &[u8], x: &mut [f32]) {
    assert_eq!(coded.len(), vector_bytes(dtype, x.len()), "one vector");
    match dtype {
        ColdDtype::Int8 | ColdDtype::Fp8 => {
            let (head, codes) = coded.split_first_chunk::<4>().expect("its length was checked");
            // A scale is at most the largest number by 127, so that products are finite too; bytes
            // from elsewhere have any scale.
            let scale = f32::from_le_bytes(*head);
            let codes = x.iter_mut().zip(codes);
            if dtype == ColdDtype::Int8 {
                codes.for_each(|(x, code)| *x = finite(f32::from(code.cast_signed()) * scale));
            } else {
                let table = e4m3_table();
                codes.for_each(|(x, &code)| *x = finite(table[usize::from(code)] * scale));
            }
        }
        ColdDtype::Int4 => {
            for (x, coded) in x.chunks_mut(GROUP).zip(coded.chunks_exact(2 + GROUP / 2)) {
                let scale = finite(f16::from_le_bytes([coded[0], coded[1]]).to_f32());
                for (pair, byte) in x.chunks_mut(2).zip(&coded[2..]) {
                    for (x, code) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
                        *x = (f32::from(code) - 8.0) * scale;
                    }
                }
            }
        }
    }
}

/// The largest number without its sign.
pub(crate) fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most, &x| finite(x).abs().max(most))
}

pub(crate) fn finite(x: f32) -> f32 {
    if x.is_finite() { x } else { 0.0 }
}

/// The nearest number of e4m3: four bits of exponent, three of mantissa, no infinity.
pub(crate) fn to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let x = x.abs().min(E4M3_MAX);
    // Below 2^-6 the exponent stays, and so does the distance between numbers.
    let exponent = ((x.to_bits() >> 23) as i32 - 127).max(-6);
    let eighths = (x / f32::powi(2.0, exponent - 3)).round_ties_even() as u32;
    // Eighths from 8 to 15 have a leading bit that is not stored; 16 is the next exponent's 8.
    let code = match eighths {
        0..8 => eighths,
        _ => (((exponent + 7) as u32) << 3) + (eighths - 8),
    };
    sign | code.min(0x7e) as u8
}

fn e4m3_table() -> &'static [f32; 256] {
    static TABLE: OnceLock<[f32; 256]> = OnceLock::new();
    TABLE.get_or_init(|| std::array::from_fn(|code| from_e4m3(code as u8)))
}

pub(crate) fn from_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let number = match exponent {
        0 => mantissa * f32::powi(2.0, -9),
        15 if code & 7 == 7 => 0.0,
        _ => (8.0 + mantissa) * f32::powi(2.0, exponent - 10),
    };
    if code & 0x80 == 0 { number } else { -number }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far a vector is from itself after it was coded, as a share of its largest number.
    fn error(dtype: ColdDtype, x: &[f32]) -> f32 {
        let mut coded = vec![0; vector_bytes(dtype, x.len())];
        encode(dtype, x, &mut coded);
        let mut back = vec![f32::NAN; x.len()];
        decode(dtype, &coded, &mut back);
        let far = x.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        far / largest(x).max(f32::MIN_POSITIVE)
    }

    #[test]
    fn vectors_come_back_as_near_as_the_bits_allow() {
        let mut random: u32 = 1;
        let mut next = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as f32 / 8_388_608.0 - 1.0
        };
        for d in [1, 7, 32, 64, 80, 128] {
            for size in [1e-4, 1.0, 3e4] {
                let x: Vec<f32> = (0..d).map(|_| next() * size).collect();
                // Half a step, and what the scale's rounding adds.
                assert!(error(ColdDtype::Int8, &x) <= 0.51 / 127.0);
                assert!(error(ColdDtype::Fp8, &x) <= 0.51 / 8.0);
                assert!(error(ColdDtype::Int4, &x) <= 0.52 / 7.0, "{d} {size}");
            }
        }
        for dtype in ColdDtype::ALL {
            assert_eq!(error(dtype, &[0.0; 64]), 0.0);
        }
    }

    #[test]
    fn eight_bit_floats_are_the_nearest_ones() {
        let all: Vec<f32> = (0..=255).filter(|&code| code & 0x7f != 0x7f).map(from_e4m3).collect();
        assert_eq!(all.iter().copied().fold(0.0, f32::max), E4M3_MAX);
        for code in (0..=255).filter(|&code| code & 0x7f != 0x7f) {
            let x = from_e4m3(code);
            assert_eq!(from_e4m3(to_e4m3(x)), x, "{code:02x}");
        }
        for i in 0..20_000 {
            let x = (i as f32 - 10_000.0) * 0.0448 + 0.000_3;
            let nearest = all.iter().map(|y| (x - y).abs()).fold(f32::MAX, f32::min);
            assert!(((x - from_e4m3(to_e4m3(x))).abs() - nearest).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn what_is_no_number_spoils_nobody() {
        for dtype in ColdDtype::ALL {
            let mut x = [1.0; 64];
            (x[3], x[40]) = (f32::NAN, f32::INFINITY);
            let mut coded = vec![0; vector_bytes(dtype, 64)];
            encode(dtype, &x, &mut coded);
            let mut back = [0.0; 64];
            decode(dtype, &coded, &mut back);
            assert_eq!((back[3], back[40]), (0.0, 0.0));
            assert!((back[5] - 1.0f32).abs() < 0.01, "{dtype}: {}", back[5]);
            // Any bytes decode to numbers.
            coded.fill(0xff);
            decode(dtype, &coded, &mut back);
            assert!(back.iter().all(|x| x.is_finite()));
        }
    }
}
