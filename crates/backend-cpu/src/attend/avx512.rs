//! The two products of attention for AVX-512: blocks of rows by pages (or by slices of the head)
//! that keep 24 sums in registers.

#![expect(unsafe_code, reason = "vector loads read through raw pointers")]

use std::arch::x86_64::*;
use std::ops::Range;

use nuthatch_types::KvDtype;

use super::Pages;
use crate::kv::PAGE;
use crate::plan::CHUNK;

/// An element type that sixteen of are loaded as floats.
pub(super) trait Element {
    const BYTES: usize;
    /// Bytes of the scale before a row's elements.
    const SCALE_BYTES: usize = 0;
    /// # Safety
    ///
    /// `source` points to 16 elements.
    unsafe fn load(source: *const u8) -> __m512;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
/// Codes, which are loaded as the numbers that their scale is for.
pub(super) struct Int8;
pub(super) struct Fp8;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: promised by the caller.
        unsafe { _mm512_loadu_ps(source.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: promised by the caller.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(source.cast()) })
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: promised by the caller.
        let half = unsafe { _mm256_loadu_si256(source.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
    }
}

impl Element for Int8 {
    const BYTES: usize = 1;
    const SCALE_BYTES: usize = size_of::<f32>();
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: promised by the caller.
        let codes = unsafe { _mm_loadu_si128(source.cast()) };
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
    }
}

impl Element for Fp8 {
    const BYTES: usize = 1;
    const SCALE_BYTES: usize = size_of::<f32>();
    /// By way of `e4m3_as_half`: the sign is copied to two bits by the conversion, and one goes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: promised by the caller.
        let codes = unsafe { _mm_loadu_si128(source.cast()) };
        let moved = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
        _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(0xbf80_u16.cast_signed())))
    }
}

/// Cuts `n` rows into blocks of the sizes that kernels are compiled for.
pub(super) fn next_block(n: usize, sizes: &[usize]) -> usize {
    *sizes.iter().find(|&&size| size <= n).expect("1 is among the sizes")
}

/// See `Attention::scores`, which checks the sizes.
pub(super) fn scores(pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) {
    match pages.dtype {
        KvDtype::F32 => all_scores::<F32>(pages, rows, q, scores),
        KvDtype::F16 => all_scores::<F16>(pages, rows, q, scores),
        KvDtype::Bf16 => all_scores::<Bf16>(pages, rows, q, scores),
        KvDtype::Int8(_) => all_scores::<Int8>(pages, rows, q, scores),
        KvDtype::Fp8(_) => all_scores::<Fp8>(pages, rows, q, scores),
    }
}

fn all_scores<E: Element>(pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) {
    let d = pages.d;
    let mut row = 0;
    while row < rows {
        let n = next_block(rows - row, &[12, 6, 4, 3, 2, 1]);
        let q = &q[row * d..(row + n) * d];
        let scores = &mut scores[row * CHUNK..(row + n) * CHUNK];
        let step = if n == 12 { 2 } else { 4 };
        let mut page = 0;
        while page < pages.keys.len() {
            let n_pages = if page + step <= pages.keys.len() { step } else { 1 };
            let keys = &pages.keys[page..];
            let out = &mut scores[page * PAGE..];
            // SAFETY: the machine has AVX-512; `q` holds `n` rows of `d`, `out` reaches
            // `(n - 1) * CHUNK + n_pages * 16`, and each of the first `n_pages` keys points to
            // `16 d` elements.
            unsafe {
                match (n, n_pages) {
                    (12, 2) => block_scores::<E, 12, 2>(keys, d, q, out),
                    (12, _) => block_scores::<E, 12, 1>(keys, d, q, out),
                    (6, 4) => block_scores::<E, 6, 4>(keys, d, q, out),
                    (6, _) => block_scores::<E, 6, 1>(keys, d, q, out),
                    (4, 4) => block_scores::<E, 4, 4>(keys, d, q, out),
                    (4, _) => block_scores::<E, 4, 1>(keys, d, q, out),
                    (3, 4) => block_scores::<E, 3, 4>(keys, d, q, out),
                    (3, _) => block_scores::<E, 3, 1>(keys, d, q, out),
                    (2, 4) => block_scores::<E, 2, 4>(keys, d, q, out),
                    (2, _) => block_scores::<E, 2, 1>(keys, d, q, out),
                    (_, 4) => block_scores::<E, 1, 4>(keys, d, q, out),
                    (_, _) => block_scores::<E, 1, 1>(keys, d, q, out),
                }
            }
            page += n_pages;
        }
        row += n;
    }
}

/// # Safety
///
/// See `all_scores`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
unsafe fn block_scores<E: Element, const R: usize, const P: usize>(
    keys: &[*const u8],
    d: usize,
    q: &[f32],
    out: &mut [f32],
) {
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    for e in 0..d {
        let mut key = [_mm512_setzero_ps(); P];
        for (p, key) in key.iter_mut().enumerate() {
            // SAFETY: page `p` has element `e` of 16 keys.
            *key = unsafe { E::load(keys.get_unchecked(p).add(e * PAGE * E::BYTES)) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `q` has `R` rows of `d`.
            let q = _mm512_set1_ps(unsafe { *q.get_unchecked(r * d + e) });
            for (sum, key) in sums.iter_mut().zip(key) {
                *sum = _mm512_fmadd_ps(q, key, *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (p, &sum) in sums.iter().enumerate() {
            // SAFETY: `out` reaches that far.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(r * CHUNK + p * PAGE), sum) };
        }
    }
}

/// See `Attention::mix`, which checks the sizes; `d` is a multiple of 16.
pub(super) fn mix(
    pages: &Pages<'_>,
    visible: Range<usize>,
    rows: usize,
    p: &[f32],
    out: &mut [f32],
) {
    match pages.dtype {
        KvDtype::F32 => mix_all::<F32>(pages, visible, rows, p, out),
        KvDtype::F16 => mix_all::<F16>(pages, visible, rows, p, out),
        KvDtype::Bf16 => mix_all::<Bf16>(pages, visible, rows, p, out),
        KvDtype::Int8(_) => mix_all::<Int8>(pages, visible, rows, p, out),
        KvDtype::Fp8(_) => mix_all::<Fp8>(pages, visible, rows, p, out),
    }
}

fn mix_all<E: Element>(
    pages: &Pages<'_>,
    visible: Range<usize>,
    rows: usize,
    p: &[f32],
    out: &mut [f32],
) {
    let d = pages.d;
    let mut row = 0;
    while row < rows {
        let n = next_block(rows - row, &[6, 4, 3, 2, 1]);
        let p = &p[row * CHUNK..(row + n) * CHUNK];
        let out = &mut out[row * d..(row + n) * d];
        let mut e = 0;
        while e < d {
            let width = if e + 64 <= d { 4 } else { 1 };
            let slice = Slice { values: pages.values, d, e, visible: visible.clone() };
            // SAFETY: the machine has AVX-512; `p` has `n` rows of `CHUNK` with `visible` inside,
            // `out` `n` rows of `d`, elements `e..e + 16 width` exist, and each page holds 16
            // values of `d`.
            unsafe {
                match (n, width) {
                    (6, 4) => block_mix::<E, 6, 4>(&slice, p, out),
                    (6, _) => block_mix::<E, 6, 1>(&slice, p, out),
                    (4, 4) => block_mix::<E, 4, 4>(&slice, p, out),
                    (4, _) => block_mix::<E, 4, 1>(&slice, p, out),
                    (3, 4) => block_mix::<E, 3, 4>(&slice, p, out),
                    (3, _) => block_mix::<E, 3, 1>(&slice, p, out),
                    (2, 4) => block_mix::<E, 2, 4>(&slice, p, out),
                    (2, _) => block_mix::<E, 2, 1>(&slice, p, out),
                    (_, 4) => block_mix::<E, 1, 4>(&slice, p, out),
                    (_, _) => block_mix::<E, 1, 1>(&slice, p, out),
                }
            }
            e += width * PAGE;
        }
        row += n;
    }
}

/// Elements `e..` of the values of some pages.
struct Slice<'a> {
    values: &'a [*const u8],
    d: usize,
    e: usize,
    visible: Range<usize>,
}

/// # Safety
///
/// See `mix_all`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
unsafe fn block_mix<E: Element, const R: usize, const W: usize>(
    slice: &Slice<'_>,
    p: &[f32],
    out: &mut [f32],
) {
    let Slice { values, d, e, .. } = *slice;
    let mut sums = [[_mm512_setzero_ps(); W]; R];
    let mut j = slice.visible.start;
    while j < slice.visible.end {
        let end = slice.visible.end.min((j / PAGE + 1) * PAGE);
        // SAFETY: `j` is visible, so its page exists.
        let page = unsafe { *values.get_unchecked(j / PAGE) };
        while j < end {
            // SAFETY: token `j % 16` of the page has elements `e..e + 16 W`; `p` has it in each row.
            unsafe {
                let source = page.add((j % PAGE * d + e) * E::BYTES);
                let mut value = [_mm512_setzero_ps(); W];
                for (w, value) in value.iter_mut().enumerate() {
                    *value = E::load(source.add(w * PAGE * E::BYTES));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let p = _mm512_set1_ps(*p.get_unchecked(r * CHUNK + j));
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum = _mm512_fmadd_ps(p, value, *sum);
                    }
                }
            }
            j += 1;
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, &sum) in sums.iter().enumerate() {
            // SAFETY: `out` has `R` rows of `d`.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(r * d + e + w * PAGE), sum) };
        }
    }
}
