//! The operations that treat each row by itself: norm, rotation, activation, gathering.

use crate::versions::{exp, fma, sum16, versions};

versions! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`; in place when `out` is the copy of `x`.
    pub(crate) fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = norm_row_inner;
}

#[inline(always)]
fn norm_row_inner<const FUSED: bool>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = norm_scale::<FUSED>(x, eps);
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn norm_scale<const FUSED: bool>(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum = fma::<FUSED>(x, x, *sum);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum = fma::<FUSED>(x, x, *sum);
    }
    1.0 / (sum16(&sums) / x.len() as f32 + eps).sqrt()
}

versions! {
    /// `out[i] = silu(gate[i]) * up[i]`.
    pub(crate) fn swiglu_row(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_row_inner;
}

#[inline(always)]
fn swiglu_row_inner<const FUSED: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        // For large negative gates `exp(-g)` is clamped near 2^127, and the quotient is 0.
        *out = g / (1.0 + exp::<FUSED>(-g)) * u;
    }
}

/// How a head is prepared before it is used or stored.
pub(crate) struct Prepare<'a> {
    /// Weights of the head's norm, if it has one.
    pub(crate) norm: Option<&'a [f32]>,
    pub(crate) eps: f32,
    /// `[rotated width / 2]` each.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    /// Whether element `i` turns with `i + half` (else `2 i` with `2 i + 1`).
    pub(crate) halves: bool,
}

versions! {
    /// Normalises and rotates one head in place.
    pub(crate) fn prepare_head(head: &mut [f32], prepare: &Prepare<'_>) = prepare_head_inner;
}

#[inline(always)]
fn prepare_head_inner<const FUSED: bool>(head: &mut [f32], prepare: &Prepare<'_>) {
    if let Some(weight) = prepare.norm {
        let scale = norm_scale::<FUSED>(head, prepare.eps);
        for (x, &w) in head.iter_mut().zip(weight) {
            *x = *x * scale * w;
        }
    }
    let half = prepare.cos.len();
    let turns = prepare.cos.iter().zip(prepare.sin);
    if prepare.halves {
        let (low, high) = head[..2 * half].split_at_mut(half);
        for ((a, b), (&cos, &sin)) in low.iter_mut().zip(high).zip(turns) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    } else {
        for (pair, (&cos, &sin)) in head[..2 * half].as_chunks_mut::<2>().0.iter_mut().zip(turns) {
            let [a, b] = *pair;
            *pair = [a * cos - b * sin, b * cos + a * sin];
        }
    }
}
