//! The parts of attention between the two products.

use crate::kv::PAGE;
use crate::versions::{exp, exp_to_88, fma, sum16, versions};

versions! {
    /// Turns scores into `exp(s - max)` in place, zero outside `start..end`, and returns the
    /// maximum and the sum. `scores` is whole pages; `start..end` is not empty.
    pub(super) fn softmax_row(scores: &mut [f32], start: usize, end: usize) -> (f32, f32) = softmax_inner;
}

#[inline(always)]
fn softmax_inner<const FUSED: bool>(scores: &mut [f32], start: usize, end: usize) -> (f32, f32) {
    scores[..start].fill(f32::NEG_INFINITY);
    scores[end..].fill(f32::NEG_INFINITY);
    let (pages, _) = scores.as_chunks_mut::<PAGE>();
    let mut maxima = [f32::NEG_INFINITY; PAGE];
    for page in &*pages {
        for (max, &s) in maxima.iter_mut().zip(page) {
            *max = if s > *max { s } else { *max };
        }
    }
    let max = maxima.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    // All scores NaN: keep going with zeros instead of poisoning other rows' sums.
    let max = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut sums = [0.0; PAGE];
    for page in pages {
        for (s, sum) in page.iter_mut().zip(&mut sums) {
            *s = exp_to_88::<FUSED>(*s - max);
            *sum += *s;
        }
    }
    (max, sum16(&sums))
}

/// Adds a chunk's output `(o, m, l)` to what came before it.
pub(super) fn merge_row(
    isa: crate::isa::Isa,
    sum: &mut [f32],
    total: &mut (f32, f32),
    chunk: &[f32],
    (chunk_max, chunk_sum): (f32, f32),
) {
    if total.0 == f32::NEG_INFINITY {
        sum.copy_from_slice(chunk);
        *total = (chunk_max, chunk_sum);
        return;
    }
    let max = total.0.max(chunk_max);
    // The scalar exponential of one row is the same code on every path.
    let old = exp::<false>(total.0 - max);
    let new = exp::<false>(chunk_max - max);
    *total = (max, total.1 * old + chunk_sum * new);
    add_scaled(isa, sum, old, chunk, new);
}

versions! {
    fn add_scaled(sum: &mut [f32], old: f32, chunk: &[f32], new: f32) = add_scaled_inner;
}

#[inline(always)]
fn add_scaled_inner<const FUSED: bool>(sum: &mut [f32], old: f32, chunk: &[f32], new: f32) {
    for (sum, &chunk) in sum.iter_mut().zip(chunk) {
        *sum = fma::<FUSED>(chunk, new, *sum * old);
    }
}
