//! Exponentials over a whole vocabulary: the only part of sampling whose cost is worth counting.
//!
//! The loops work on fixed arrays of lanes without branches, so that the compiler turns them into
//! vector code on any machine. Sums are kept in `f32` inside a block and in `f64` across blocks.

/// Elements that one vector loop handles together: four registers of the smallest vector unit.
const LANES: usize = 16;

/// Elements whose sum is kept apart, so that a draw scans one block and not the vocabulary.
pub(super) const BLOCK: usize = 512;

/// Below this the result would not be a normal `f32`; it is taken as zero.
const EXP2_MIN: f32 = -126.0;

/// `ln(2)^k / k!` for k from 5 down to 0.
const SERIES: [f32; 6] =
    [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2, 1.0];

/// `e^x` for `x <= 0`: exact at 0, zero below -87, and between them with a relative error under
/// `3e-7 + 1e-7 |x|`. What is far from 0 counts little in a softmax, and its last bits not at all.
#[inline(always)]
pub(super) fn exp_neg(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let y = x * std::f32::consts::LOG2_E;
    let clamped = if y > EXP2_MIN { y } else { EXP2_MIN };
    let rounded = clamped + ROUND;
    // |r| <= 1/2, where seven terms of the series of 2^r, (r ln 2)^k / k!, are enough.
    let r = clamped - (rounded - ROUND);
    let mut p = 1.540_353e-4;
    for coefficient in SERIES {
        p = p * r + coefficient;
    }
    let two_to_n = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if y > EXP2_MIN { p * two_to_n } else { 0.0 }
}

/// The largest logit, or `None` if it is infinite or any logit is NaN. `-inf` marks a token that
/// cannot come; at least one must be able to.
pub(super) fn finite_max(logits: &[f32]) -> Option<f32> {
    let mut best = [f32::NEG_INFINITY; LANES];
    // As wide as a float, so that both arrays stay in vector registers.
    let mut nan = [0u32; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let x = chunk[lane];
            best[lane] = if x > best[lane] { x } else { best[lane] };
            nan[lane] |= u32::from(x.is_nan());
        }
    }
    let max = best.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let any_nan = nan.iter().any(|&n| n != 0) || rest.iter().any(|x| x.is_nan());
    (max.is_finite() && !any_nan).then_some(max)
}

/// `ln(sum(e^x))`, where `max` is the largest logit.
pub(super) fn log_sum_exp(logits: &[f32], max: f32) -> f64 {
    let sum: f64 = logits.chunks(BLOCK).map(|block| sum_exp(block, max)).sum();
    f64::from(max) + sum.ln()
}

/// Two plain loops over a buffer in the nearest cache: each becomes vector code by itself.
fn sum_exp(block: &[f32], max: f32) -> f64 {
    let mut buffer = [0.0f32; BLOCK];
    let powers = &mut buffer[..block.len()];
    for (power, &x) in powers.iter_mut().zip(block) {
        *power = exp_neg(x - max);
    }
    sum_lanes(powers)
}

/// Writes `e^((x - max) / temperature)` to `weights`, its sum per block to `sums`, and returns the
/// whole sum. Weights under `floor` become zero. The largest weight is exactly 1.
pub(super) fn fill_weights(
    logits: &[f32],
    max: f32,
    temperature: f32,
    floor: f32,
    weights: &mut Vec<f32>,
    sums: &mut Vec<f64>,
) -> f64 {
    let sharpness = inverse(temperature);
    weights.clear();
    weights.extend(logits.iter().map(|&x| {
        let w = exp_neg((x - max) * sharpness);
        if w >= floor { w } else { 0.0 }
    }));
    sums.clear();
    sums.extend(weights.chunks(BLOCK).map(sum_lanes));
    sums.iter().sum()
}

/// `1 / temperature`, kept finite so that the best token's `0 * inverse` is 0.
pub(super) fn inverse(temperature: f32) -> f32 {
    (1.0 / temperature).min(f32::MAX)
}

fn sum_lanes(block: &[f32]) -> f64 {
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
        }
    }
    f64::from(sums.iter().sum::<f32>() + rest.iter().sum::<f32>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_its_stated_error() {
        assert_eq!(exp_neg(0.0), 1.0);
        assert_eq!(exp_neg(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_neg(-1e30), 0.0);
        let mut worst = 0.0f64;
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_neg(x)) - exact).abs() / exact;
            worst = worst.max(error / (3e-7 + 1e-7 * f64::from(-x)));
        }
        assert!(worst < 1.0, "{worst}");
    }

    #[test]
    fn max_sees_every_place_and_refuses_what_is_not_a_number() {
        for n in [1, 15, 16, 17, 33, 100] {
            for at in 0..n {
                let mut x = vec![-3.0f32; n];
                x[at] = 2.5;
                assert_eq!(finite_max(&x), Some(2.5));
                x[at] = f32::NAN;
                assert_eq!(finite_max(&x), None);
                x[at] = f32::INFINITY;
                assert_eq!(finite_max(&x), None);
                x[at] = f32::NEG_INFINITY;
                assert_eq!(finite_max(&x), (n > 1).then_some(-3.0));
            }
        }
        assert_eq!(finite_max(&[]), None);
    }
}
