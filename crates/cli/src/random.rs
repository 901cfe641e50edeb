//! A small seeded random stream, the same on every machine.

use std::f64::consts::TAU;

/// A stream of random numbers that its seed determines (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(n)) >> 32) as u32
    }

    /// A number from 0 to 1, neither of them included.
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.bits() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// The time between two events that come at random, `mean` apart.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// A positive number whose logarithm is normal with deviation `sigma`.
    pub(crate) fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        // Box and Muller; the second number that they give is not needed.
        let normal = (-2.0 * self.unit().ln()).sqrt() * (TAU * self.unit()).cos();
        (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_what_was_asked_for() {
        let mut random = Random::new(1);
        let mut mean = |draw: &mut dyn FnMut(&mut Random) -> f64| {
            (0..200_000).map(|_| draw(&mut random)).sum::<f64>() / 200_000.0
        };
        assert!((mean(&mut Random::unit) - 0.5).abs() < 0.005);
        assert!((mean(&mut |r| r.exponential(3.0)) - 3.0).abs() < 0.03);
        assert!((mean(&mut |r| r.log_normal(160.0, 1.0)) - 160.0).abs() < 3.0);
        assert!((mean(&mut |r| f64::from(r.below(11))) - 5.0).abs() < 0.05);
    }
}
