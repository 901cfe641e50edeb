//! A small seeded random stream, the same on every machine and in every version.

use std::ops::Range;

/// A stream of random numbers that its seed determines (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number of a range that is not empty.
    pub fn range(&mut self, range: Range<u32>) -> u32 {
        assert!(range.start < range.end, "{range:?} is empty");
        let width = u64::from(range.end - range.start);
        range.start + (((self.bits() >> 32) * width) >> 32) as u32
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.range(0..n) == 0
    }
}

/// A bijection of 64-bit numbers that scatters them.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_hit_evenly_and_never_left() {
        let mut rng = Rng::new(7);
        let mut counts = [0; 5];
        for _ in 0..5000 {
            counts[rng.range(10..15) as usize - 10] += 1;
        }
        assert!(counts.iter().all(|&n| (900..1100).contains(&n)), "{counts:?}");
    }
}
