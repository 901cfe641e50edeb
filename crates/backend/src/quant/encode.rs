//! Encoders: round to nearest, with scales taken from the extremes of a block or run.
//!
//! Scales are rounded up where they are stored, so that the codes reach the extremes and no weight
//! is further than half a step from its code. Non-finite weights are not supported: they have no
//! code.

use half::f16;

use super::K_LEN;

/// The smallest f16 that is not below `x >= 0`.
///
/// A step that the format can hold must be normal, or its rounding would be too coarse; below
/// that, weights are zero for all purposes.
fn step_up(x: f32) -> f16 {
    let near = f16::from_f32(x).max(f16::MIN_POSITIVE);
    if near.to_f32() >= x { near } else { f16::from_bits(near.to_bits() + 1) }
}

/// The code nearest to `x / step`, within `0..=max`.
fn code(x: f32, step: f32, max: u8) -> u8 {
    if step == 0.0 { 0 } else { (x / step).round().clamp(0.0, f32::from(max)) as u8 }
}

/// The smallest multiple of `step` that is not below `x >= 0`, as a code within `0..=max`.
fn code_up(x: f32, step: f32, max: u8) -> u8 {
    if step == 0.0 { 0 } else { (x / step).ceil().clamp(0.0, f32::from(max)) as u8 }
}

/// Least and greatest of the weights and zero.
fn range_with_zero(weights: &[f32]) -> (f32, f32) {
    weights.iter().fold((0.0, 0.0), |(lo, hi), &w| (lo.min(w), hi.max(w)))
}

/// Sixteen bytes of nibbles: code `j` below, code `j + 16` above.
fn push_nibbles(codes: &[u8; 32], out: &mut Vec<u8>) {
    out.extend((0..16).map(|j| (codes[j] & 15) | (codes[j + 16] & 15) << 4));
}

/// Four bytes with the fifth bit of each code.
fn push_fifth_bits(codes: &[u8; 32], out: &mut Vec<u8>) {
    out.extend((0..4).map(|b| (0..8).fold(0, |byte, bit| byte | (codes[8 * b + bit] >> 4) << bit)));
}

/// The f16 step and the codes of `q - zero`, for codes up to `max`.
fn symmetric(block: &[f32], zero: u8, max: u8) -> (f16, [u8; 32]) {
    let (lo, hi) = range_with_zero(block);
    let d = step_up((-lo / f32::from(zero)).max(hi / f32::from(max - zero)));
    let offset = f32::from(zero) * d.to_f32();
    (d, std::array::from_fn(|i| code(block[i] + offset, d.to_f32(), max)))
}

/// The f16 step and offset, and the codes, for codes up to `max`.
fn with_offset(block: &[f32], max: u8) -> (f16, f16, [u8; 32]) {
    let lo = block.iter().copied().fold(f32::INFINITY, f32::min);
    let hi = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let m = f16::from_f32(lo);
    let d = step_up((hi - m.to_f32()).max(0.0) / f32::from(max));
    (d, m, std::array::from_fn(|i| code(block[i] - m.to_f32(), d.to_f32(), max)))
}

pub(super) fn q4_0(block: &[f32], out: &mut Vec<u8>) {
    let (d, codes) = symmetric(block, 8, 15);
    out.extend_from_slice(&d.to_le_bytes());
    push_nibbles(&codes, out);
}

pub(super) fn q4_1(block: &[f32], out: &mut Vec<u8>) {
    let (d, m, codes) = with_offset(block, 15);
    out.extend_from_slice(&d.to_le_bytes());
    out.extend_from_slice(&m.to_le_bytes());
    push_nibbles(&codes, out);
}

pub(super) fn q5_0(block: &[f32], out: &mut Vec<u8>) {
    let (d, codes) = symmetric(block, 16, 31);
    out.extend_from_slice(&d.to_le_bytes());
    push_fifth_bits(&codes, out);
    push_nibbles(&codes, out);
}

pub(super) fn q5_1(block: &[f32], out: &mut Vec<u8>) {
    let (d, m, codes) = with_offset(block, 31);
    out.extend_from_slice(&d.to_le_bytes());
    out.extend_from_slice(&m.to_le_bytes());
    push_fifth_bits(&codes, out);
    push_nibbles(&codes, out);
}

pub(super) fn q8_0(block: &[f32], out: &mut Vec<u8>) {
    let (lo, hi) = range_with_zero(block);
    let d = step_up(hi.max(-lo) / 127.0);
    out.extend_from_slice(&d.to_le_bytes());
    out.extend(block.iter().map(|w| (w / d.to_f32()).round().clamp(-127.0, 127.0) as i8 as u8));
}

/// A `_K` block with offsets, before packing.
struct OffsetRuns {
    d: f16,
    dmin: f16,
    scales: Vec<u8>,
    mins: Vec<u8>,
    codes: [u8; K_LEN],
}

impl OffsetRuns {
    /// Splits `block` into runs of `run` weights with codes up to `max` and scales up to
    /// `scale_max`.
    fn new(block: &[f32], run: usize, max: u8, scale_max: u8) -> Self {
        let ranges: Vec<(f32, f32)> = block.chunks_exact(run).map(range_with_zero).collect();
        let deepest = ranges.iter().fold(0.0f32, |deepest, &(lo, _)| deepest.max(-lo));
        let dmin = step_up(deepest / f32::from(scale_max));
        let mins: Vec<u8> =
            ranges.iter().map(|&(lo, _)| code_up(-lo, dmin.to_f32(), scale_max)).collect();
        // Scales reach from the stored offset, not from the wished one, to the run's maximum.
        let steps: Vec<f32> = ranges
            .iter()
            .zip(&mins)
            .map(|(&(_, hi), &min)| (hi + dmin.to_f32() * f32::from(min)) / f32::from(max))
            .collect();
        let d = step_up(steps.iter().copied().fold(0.0, f32::max) / f32::from(scale_max));
        let scales: Vec<u8> =
            steps.iter().map(|&step| code_up(step, d.to_f32(), scale_max)).collect();
        let codes = std::array::from_fn(|i| {
            let offset = dmin.to_f32() * f32::from(mins[i / run]);
            code(block[i] + offset, d.to_f32() * f32::from(scales[i / run]), max)
        });
        OffsetRuns { d, dmin, scales, mins, codes }
    }

    /// Eight scales and offsets of six bits in twelve bytes, the inverse of `scale_and_min`.
    fn push_scales_and_mins(&self, out: &mut Vec<u8>) {
        let (scales, mins) = (&self.scales, &self.mins);
        out.extend((0..4).map(|j| scales[j] | (scales[j + 4] >> 4) << 6));
        out.extend((0..4).map(|j| mins[j] | (mins[j + 4] >> 4) << 6));
        out.extend((0..4).map(|j| (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4));
    }
}

/// A `_K` block without offsets, before packing; codes are `q + zero`.
struct SymmetricRuns {
    d: f16,
    scales: Vec<u8>,
    codes: [u8; K_LEN],
}

impl SymmetricRuns {
    /// Splits `block` into runs of 16 with codes `-zero..zero` and scales up to `scale_max`.
    fn new(block: &[f32], zero: u8, scale_max: u8) -> Self {
        let steps: Vec<f32> = block
            .chunks_exact(16)
            .map(|run| {
                let (lo, hi) = range_with_zero(run);
                (-lo / f32::from(zero)).max(hi / f32::from(zero - 1))
            })
            .collect();
        let d = step_up(steps.iter().copied().fold(0.0, f32::max) / f32::from(scale_max));
        let scales: Vec<u8> =
            steps.iter().map(|&step| code_up(step, d.to_f32(), scale_max)).collect();
        let codes = std::array::from_fn(|i| {
            let step = d.to_f32() * f32::from(scales[i / 16]);
            // A run of zeros has scale zero, and any code serves.
            code(block[i] + f32::from(zero) * step, step, 2 * zero - 1)
        });
        SymmetricRuns { d, scales, codes }
    }
}

/// Packs the low `bits` of each code, shifted down by `from`, into planes of 32 weights.
fn push_planes(codes: &[u8; K_LEN], from: usize, bits: usize, out: &mut Vec<u8>) {
    let planes = 8 / bits;
    let mask = (1u8 << bits) - 1;
    for group in codes.chunks_exact(32 * planes) {
        out.extend((0..32).map(|j| {
            (0..planes).fold(0, |byte, p| byte | ((group[32 * p + j] >> from) & mask) << (p * bits))
        }));
    }
}

pub(super) fn q2_k(block: &[f32], out: &mut Vec<u8>) {
    let runs = OffsetRuns::new(block, 16, 3, 15);
    out.extend(runs.scales.iter().zip(&runs.mins).map(|(scale, min)| scale | min << 4));
    push_planes(&runs.codes, 0, 2, out);
    out.extend_from_slice(&runs.d.to_le_bytes());
    out.extend_from_slice(&runs.dmin.to_le_bytes());
}

pub(super) fn q3_k(block: &[f32], out: &mut Vec<u8>) {
    let runs = SymmetricRuns::new(block, 4, 31);
    let stored: Vec<u8> = runs.scales.iter().map(|scale| scale + 32).collect();
    push_planes(&runs.codes, 2, 1, out);
    push_planes(&runs.codes, 0, 2, out);
    out.extend((0..8).map(|j| (stored[j] & 15) | (stored[j + 8] & 15) << 4));
    out.extend((0..4).map(|j| (0..4).fold(0, |b, p| b | (stored[4 * p + j] >> 4) << (2 * p))));
    out.extend_from_slice(&runs.d.to_le_bytes());
}

pub(super) fn q4_k(block: &[f32], out: &mut Vec<u8>) {
    let runs = OffsetRuns::new(block, 32, 15, 63);
    out.extend_from_slice(&runs.d.to_le_bytes());
    out.extend_from_slice(&runs.dmin.to_le_bytes());
    runs.push_scales_and_mins(out);
    push_planes(&runs.codes, 0, 4, out);
}

pub(super) fn q5_k(block: &[f32], out: &mut Vec<u8>) {
    let runs = OffsetRuns::new(block, 32, 31, 63);
    out.extend_from_slice(&runs.d.to_le_bytes());
    out.extend_from_slice(&runs.dmin.to_le_bytes());
    runs.push_scales_and_mins(out);
    push_planes(&runs.codes, 4, 1, out);
    push_planes(&runs.codes, 0, 4, out);
}

pub(super) fn q6_k(block: &[f32], out: &mut Vec<u8>) {
    let runs = SymmetricRuns::new(block, 32, 127);
    for half in runs.codes.chunks_exact(128) {
        out.extend((0..64).map(|j| (half[j] & 15) | (half[j + 64] & 15) << 4));
    }
    push_planes(&runs.codes, 4, 2, out);
    out.extend_from_slice(&runs.scales);
    out.extend_from_slice(&runs.d.to_le_bytes());
}
