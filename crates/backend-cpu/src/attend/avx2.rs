//! The two products of attention for AVX2: blocks of rows by pages (or by slices of the head) that keep up to
//! twelve sums in registers, each of eight tokens or elements.

#![expect(unsafe_code, reason = "vector loads read through raw pointers")]

use std::arch::x86_64::*;
use std::ops::Range;

use nuthatch_types::KvDtype;

use super::Pages;
use super::avx512::next_block;
use crate::kv::PAGE;
use crate::plan::CHUNK;

/// Floats of a register.
const LANES: usize = 8;

/// An element type that eight of are loaded as floats.
trait Element {
    const BYTES: usize;
    /// # Safety
    ///
    /// `source` points to 8 elements.
    unsafe fn load(source: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;
/// Codes, which are loaded as the numbers that their scale is for.
struct Int8;
struct Fp8;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: promised by the caller.
        unsafe { _mm256_loadu_ps(source.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: promised by the caller.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(source.cast()) })
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: promised by the caller.
        let half = unsafe { _mm_loadu_si128(source.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }
}

impl Element for Int8 {
    const BYTES: usize = 1;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: promised by the caller.
        let codes = unsafe { _mm_loadl_epi64(source.cast()) };
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
    }
}

impl Element for Fp8 {
    const BYTES: usize = 1;
    /// By way of `e4m3_as_half`: the sign is copied to two bits by the conversion, and one goes.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: promised by the caller.
        let codes = unsafe { _mm_loadl_epi64(source.cast()) };
        let moved = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(codes));
        _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(0xbf80_u16.cast_signed())))
    }
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
        let n = next_block(rows - row, &[6, 4, 3, 2, 1]);
        let q = &q[row * d..(row + n) * d];
        let scores = &mut scores[row * CHUNK..(row + n) * CHUNK];
        let step = if n > 3 { 1 } else { 2 };
        let mut page = 0;
        while page < pages.keys.len() {
            let n_pages = if page + step <= pages.keys.len() { step } else { 1 };
            let keys = &pages.keys[page..];
            let out = &mut scores[page * PAGE..];
            // SAFETY: the machine has AVX2; `q` holds `n` rows of `d`, `out` reaches
            // `(n - 1) * CHUNK + n_pages * 16`, and each of the first `n_pages` keys points to
            // `16 d` elements.
            unsafe {
                match (n, n_pages) {
                    (6, _) => block_scores::<E, 6, 1>(keys, d, q, out),
                    (4, _) => block_scores::<E, 4, 1>(keys, d, q, out),
                    (3, 2) => block_scores::<E, 3, 2>(keys, d, q, out),
                    (3, _) => block_scores::<E, 3, 1>(keys, d, q, out),
                    (2, 2) => block_scores::<E, 2, 2>(keys, d, q, out),
                    (2, _) => block_scores::<E, 2, 1>(keys, d, q, out),
                    (_, 2) => block_scores::<E, 1, 2>(keys, d, q, out),
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
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn block_scores<E: Element, const R: usize, const P: usize>(
    keys: &[*const u8],
    d: usize,
    q: &[f32],
    out: &mut [f32],
) {
    let mut sums = [[[_mm256_setzero_ps(); 2]; P]; R];
    for e in 0..d {
        let mut key = [[_mm256_setzero_ps(); 2]; P];
        for (p, key) in key.iter_mut().enumerate() {
            for (half, key) in key.iter_mut().enumerate() {
                let at = (e * PAGE + half * LANES) * E::BYTES;
                // SAFETY: page `p` has element `e` of 16 keys.
                *key = unsafe { E::load(keys.get_unchecked(p).add(at)) };
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `q` has `R` rows of `d`.
            let q = _mm256_set1_ps(unsafe { *q.get_unchecked(r * d + e) });
            for (sums, key) in sums.iter_mut().zip(key) {
                for (sum, key) in sums.iter_mut().zip(key) {
                    *sum = _mm256_fmadd_ps(q, key, *sum);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (p, sums) in sums.iter().enumerate() {
            for (half, &sum) in sums.iter().enumerate() {
                let at = r * CHUNK + p * PAGE + half * LANES;
                // SAFETY: `out` reaches that far.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(at), sum) };
            }
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
        let n = next_block(rows - row, &[6, 3, 2, 1]);
        let p = &p[row * CHUNK..(row + n) * CHUNK];
        let out = &mut out[row * d..(row + n) * d];
        let mut e = 0;
        while e < d {
            let width = if n < 6 && e + 4 * LANES <= d { 4 } else { 2 };
            let slice = Slice { values: pages.values, d, e, visible: visible.clone() };
            // SAFETY: the machine has AVX2; `p` has `n` rows of `CHUNK` with `visible` inside,
            // `out` `n` rows of `d`, elements `e..e + 8 width` exist, and each page holds 16
            // values of `d`.
            unsafe {
                match (n, width) {
                    (6, _) => block_mix::<E, 6, 2>(&slice, p, out),
                    (3, 4) => block_mix::<E, 3, 4>(&slice, p, out),
                    (3, _) => block_mix::<E, 3, 2>(&slice, p, out),
                    (2, 4) => block_mix::<E, 2, 4>(&slice, p, out),
                    (2, _) => block_mix::<E, 2, 2>(&slice, p, out),
                    (_, 4) => block_mix::<E, 1, 4>(&slice, p, out),
                    (_, _) => block_mix::<E, 1, 2>(&slice, p, out),
                }
            }
            e += width * LANES;
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
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn block_mix<E: Element, const R: usize, const W: usize>(
    slice: &Slice<'_>,
    p: &[f32],
    out: &mut [f32],
) {
    let Slice { values, d, e, .. } = *slice;
    let mut sums = [[_mm256_setzero_ps(); W]; R];
    for j in slice.visible.clone() {
        // SAFETY: `j` is visible, so its page exists; token `j % 16` of it has elements
        // `e..e + 8 W`; `p` has it in each row.
        unsafe {
            let source = values.get_unchecked(j / PAGE).add((j % PAGE * d + e) * E::BYTES);
            let mut value = [_mm256_setzero_ps(); W];
            for (w, value) in value.iter_mut().enumerate() {
                *value = E::load(source.add(w * LANES * E::BYTES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let p = _mm256_set1_ps(*p.get_unchecked(r * CHUNK + j));
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum = _mm256_fmadd_ps(p, value, *sum);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, &sum) in sums.iter().enumerate() {
            // SAFETY: `out` has `R` rows of `d`.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(r * d + e + w * LANES), sum) };
        }
    }
}
