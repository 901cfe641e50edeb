//! A random stream that has no state: the number at a position depends on the seed and the position.
//!
//! A sequence that was preempted, resumed or batched with others draws the same numbers, because
//! there is nothing to lose or to advance. Not for cryptography.

/// A number in `[0, 1)` with 53 random bits, the same for the same seed and position.
pub(super) fn uniform(seed: u64, position: u32) -> f64 {
    // Two rounds, so that neighbouring seeds and neighbouring positions are equally unrelated.
    let key = mix(seed.wrapping_add(GOLDEN_GAMMA));
    let bits = mix(key ^ u64::from(position).wrapping_add(1).wrapping_mul(GOLDEN_GAMMA));
    // The upper bits of a multiplicative mix are the best ones.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// 2^64 divided by the golden ratio, odd: the step of Steele, Lea and Flood's SplitMix (2014).
const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix: a bijection in which every input bit moves half of the output bits.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chi-square of 16 bins; with 15 degrees of freedom a value above 45 has probability 1e-4.
    fn chi_square(draws: impl Iterator<Item = f64>) -> f64 {
        let mut bins = [0u32; 16];
        let mut n = 0u32;
        for u in draws {
            assert!((0.0..1.0).contains(&u));
            bins[(u * 16.0) as usize] += 1;
            n += 1;
        }
        let expected = f64::from(n) / 16.0;
        bins.iter().map(|&b| (f64::from(b) - expected).powi(2) / expected).sum()
    }

    #[test]
    fn is_uniform_along_positions_and_along_seeds() {
        for fixed in 0..8u32 {
            let positions = (0..16_384).map(|p| uniform(u64::from(fixed), p));
            assert!(chi_square(positions) < 45.0, "positions of seed {fixed}");
            let seeds = (0..16_384).map(|s| uniform(s, fixed));
            assert!(chi_square(seeds) < 45.0, "seeds at position {fixed}");
        }
    }

    #[test]
    fn neighbours_are_unrelated() {
        for lag in 1..5u32 {
            let n = 16_384;
            let product: f64 =
                (0..n).map(|p| (uniform(7, p) - 0.5) * (uniform(7, p + lag) - 0.5)).sum::<f64>()
                    / f64::from(n);
            // The standard deviation of the mean product is 1/12 / sqrt(n), about 6.5e-4.
            assert!(product.abs() < 2.6e-3, "lag {lag}: {product}");
        }
    }
}
