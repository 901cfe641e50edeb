//! Rows in eight bits, as they come from far: a token's key, and its value, of one head is a byte for each
//! number, and a power of two for all of them.
//!
//! ```text
//!   fp8    e4m3, and the least power of two by which the largest number is at most 448
//!   int8   whole numbers, the same for 127
//! ```
//!
//! With a power of two a number that comes back is exact in 16 bits, so rounding it again changes nothing.
//! What is not a number becomes 0, as everywhere in the cache.

use std::fmt;
use std::str::FromStr;

use half::bf16;

use crate::cold::{finite, from_e4m3, largest, to_e4m3};

/// How rows that come from far are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCode {
    /// Floats of four bits of exponent and three of mantissa.
    Fp8,
    /// Whole numbers.
    Int8,
}

impl RowCode {
    /// All of them.
    pub const ALL: [RowCode; 2] = [RowCode::Fp8, RowCode::Int8];

    /// The power of two of a vector, as the exponent of an f32 with its bias; 0 if all numbers are.
    pub fn scale(self, x: &[f32]) -> u8 {
        let bits = largest(x).to_bits();
        // The largest code, 1.75 times 2^8 or 127/64 times 2^6.
        let (top, exponent) = match self {
            RowCode::Fp8 => (0x60_0000, 8),
            RowCode::Int8 => (0x7E_0000, 6),
        };
        let is_above = u32::from(bits & 0x7F_FFFF > top);
        // Numbers that are smaller than any float of full length lose bits, and nobody sees it.
        let scale = ((bits >> 23) + is_above).saturating_sub(exponent).max(1);
        if bits == 0 { 0 } else { scale as u8 }
    }

    /// A vector as it comes back, in full width.
    pub fn round(self, x: &mut [f32]) {
        let scale = self.scale(x);
        let (factor, inverse) = (power(scale), power(254 - scale));
        for x in x {
            let y = finite(*x) * inverse;
            let code = match self {
                RowCode::Fp8 => from_e4m3(to_e4m3(y)),
                RowCode::Int8 => f32::from(y.round_ties_even().clamp(-127.0, 127.0) as i8),
            };
            // What is rounded up may be infinite in 16 bits.
            let most = bf16::MAX.to_f32();
            *x = (factor * code).clamp(-most, most);
        }
    }
}

/// The f32 with this exponent, bias and all, and nothing behind the point; 0 for 0.
fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23)
}

impl fmt::Display for RowCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RowCode::Fp8 => "fp8",
            RowCode::Int8 => "int8",
        })
    }
}

impl FromStr for RowCode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let code = Self::ALL.into_iter().find(|code| code.to_string() == text);
        code.ok_or_else(|| format!("{text:?} is neither fp8 nor int8"))
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn vectors() -> impl Iterator<Item = Vec<f32>> {
        let mut random: u32 = 7;
        let mut next = move || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let sizes = [1e-3, 0.02, 1.0, 1.76, 1.99, 447.0, 3e4];
        sizes.into_iter().map(move |size| (0..64).map(|_| next() * size).collect())
    }

    #[test]
    fn rows_come_back_as_near_as_the_bits_allow_and_then_stay() {
        for code in RowCode::ALL {
            for x in vectors() {
                let most = largest(&x);
                let mut back = x.clone();
                code.round(&mut back);
                for (&x, &y) in x.iter().zip(&back) {
                    let bound = match code {
                        // A sixteenth of the number, or half a step of the smallest ones.
                        RowCode::Fp8 => (x.abs() / 16.0).max(most / 224.0 / 1024.0),
                        RowCode::Int8 => most / 63.5 / 2.0,
                    };
                    assert!((x - y).abs() <= bound * 1.0001, "{code}: {x} {y}");
                    assert_eq!(bf16::from_f32(y).to_f32(), y, "{code}");
                    if most > 0.02 {
                        assert_eq!(f16::from_f32(y).to_f32(), y, "{code}");
                    }
                }
                let once = back.clone();
                code.round(&mut back);
                assert_eq!(back, once, "{code}");
            }
        }
    }

    #[test]
    fn powers_are_the_least_ones_and_any_number_is_met() {
        let scale = |code: RowCode, x: f32| i32::from(code.scale(&[x, 0.0])) - 127;
        assert_eq!(scale(RowCode::Fp8, 448.0), 0);
        assert_eq!(scale(RowCode::Fp8, -448.1), 1);
        assert_eq!(scale(RowCode::Fp8, 224.0), -1);
        assert_eq!(scale(RowCode::Int8, 127.0), 0);
        assert_eq!(scale(RowCode::Int8, 127.5), 1);
        for code in RowCode::ALL {
            for x in [0.0, f32::MIN_POSITIVE / 8.0, f32::MAX, f32::MIN] {
                let mut row = [x, f32::NAN, f32::INFINITY, -x / 2.0];
                code.round(&mut row);
                assert!(row.iter().all(|x| x.is_finite()), "{code} {x}: {row:?}");
                assert_eq!((row[1], row[2]), (0.0, 0.0), "{code}");
            }
            assert_eq!(code.to_string().parse(), Ok(code));
        }
        assert!("fp4".parse::<RowCode>().is_err());
    }
}
