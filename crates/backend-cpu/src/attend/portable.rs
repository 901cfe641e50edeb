//! The products of attention in plain Rust, for machines without AVX2 and odd head widths.

#![expect(unsafe_code, reason = "pages are addressed by pointers")]

use std::ops::Range;

use nuthatch_types::KvDtype;

use super::Pages;
use super::element::load;
use crate::isa::Isa;
use crate::kv::PAGE;
use crate::plan::CHUNK;
use crate::versions::{fma, versions};

pub(super) fn scores(isa: Isa, pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) {
    scores_of(isa, pages, rows, q, scores);
}

versions! {
    fn scores_of(pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) = scores_inner;
}

#[inline(always)]
fn scores_inner<const FUSED: bool>(pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) {
    let d = pages.d;
    for (i, &page) in pages.keys.iter().enumerate() {
        for row in 0..rows {
            let mut sums = [0.0; PAGE];
            for (e, &q) in q[row * d..(row + 1) * d].iter().enumerate() {
                // SAFETY: a page's keys are `D * 16` elements.
                let key = unsafe { load16(pages.dtype, page, e) };
                for (sum, k) in sums.iter_mut().zip(key) {
                    *sum = fma::<FUSED>(q, k, *sum);
                }
            }
            scores[row * CHUNK + i * PAGE..][..PAGE].copy_from_slice(&sums);
        }
    }
}

pub(super) fn mix(
    isa: Isa,
    pages: &Pages<'_>,
    visible: Range<usize>,
    rows: usize,
    p: &[f32],
    out: &mut [f32],
) {
    mix_of(isa, pages, visible, rows, p, out);
}

versions! {
    fn mix_of(pages: &Pages<'_>, visible: Range<usize>, rows: usize, p: &[f32], out: &mut [f32]) = mix_inner;
}

#[inline(always)]
fn mix_inner<const FUSED: bool>(
    pages: &Pages<'_>,
    visible: Range<usize>,
    rows: usize,
    p: &[f32],
    out: &mut [f32],
) {
    let d = pages.d;
    for row in 0..rows {
        let out = &mut out[row * d..(row + 1) * d];
        out.fill(0.0);
        for j in visible.clone() {
            let p = p[row * CHUNK + j];
            let page = pages.values[j / PAGE];
            for (e, out) in out.iter_mut().enumerate() {
                // SAFETY: a page's values are `16 * D` elements.
                let v = unsafe { load(pages.dtype, page, j % PAGE * d + e) };
                *out = fma::<FUSED>(p, v, *out);
            }
        }
    }
}

/// Element `e` of a page's sixteen keys.
#[inline(always)]
unsafe fn load16(dtype: KvDtype, page: *const u8, e: usize) -> [f32; PAGE] {
    // SAFETY: promised by the caller.
    std::array::from_fn(|lane| unsafe { load(dtype, page, e * PAGE + lane) })
}
