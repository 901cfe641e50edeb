//! Scores by numbers: products of channels, bounds of pages, and the parts of a softmax.

use crate::isa::Isa;
use crate::kv::PAGE;
use crate::pack::f16_to_f32;
use crate::versions::{exp, fma, sum16, versions};

/// Query heads that are scored at a time.
const GROUP_MAX: usize = 4;

/// Pages that are scored at a time: with more sums than one page has, a product need not wait for
/// the one before it.
const PAGES: usize = 2;

/// Pages from the one that is scored to the one that is fetched meanwhile.
const AHEAD: usize = 6;

/// `raw[g][j]`: products of the channels of key `j` with those of query `g`; `q` is
/// `[group][width]`.
pub(super) fn channel_scores<'a>(
    isa: Isa,
    mut pages: impl Iterator<Item = &'a [u8]> + Clone,
    width: usize,
    q: &[f32],
    raw: &mut [f32],
) {
    let n = raw.len() / (q.len() / width);
    let mut ahead = pages.clone().skip(AHEAD);
    let mut start = 0;
    while let Some(page) = pages.next() {
        // A last page without a partner is its own.
        let pages = [page, pages.next().unwrap_or(page)];
        ahead.by_ref().take(PAGES).for_each(fetch);
        let n_places = (PAGES * PAGE).min(n - start);
        let groups = q.chunks(GROUP_MAX * width).zip(raw.chunks_mut(GROUP_MAX * n));
        for (q, raw) in groups {
            if n_places == PAGES * PAGE {
                pages_scores(isa, pages, width, q, (&mut raw[start..], n));
                continue;
            }
            let mut last = [0.0; GROUP_MAX * PAGES * PAGE];
            pages_scores(isa, pages, width, q, (&mut last, PAGES * PAGE));
            for (row, last) in raw.chunks_exact_mut(n).zip(last.chunks_exact(PAGES * PAGE)) {
                row[start..].copy_from_slice(&last[..n_places]);
            }
        }
        start += n_places;
    }
}

/// Scores of a few queries and the keys of a few pages; a query's begin `stride` after those of the
/// query before.
fn pages_scores(
    isa: Isa,
    pages: [&[u8]; PAGES],
    width: usize,
    q: &[f32],
    (out, stride): (&mut [f32], usize),
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe {
            match q.len() / width {
                4 => vectors::<4>(pages, width, q, out, stride),
                3 => vectors::<3>(pages, width, q, out, stride),
                2 => vectors::<2>(pages, width, q, out, stride),
                _ => vectors::<1>(pages, width, q, out, stride),
            }
        },
        isa => {
            for (i, page) in pages.into_iter().enumerate() {
                channel_page(isa, page, width, q, &mut out[i * PAGE..], stride);
            }
        }
    }
}

/// Lets the first cache fetch a page: digests are read once, and a page is too short for the
/// machine to see where the next one lies.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing to do it with"))]
pub(super) fn fetch(page: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in page.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "a prefetch takes a raw pointer")]
        // SAFETY: a prefetch changes nothing and cannot fault, and every x86-64 has it.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
        }
    }
}

versions! {
    /// Products of sixteen keys' channels with those of a few queries.
    fn channel_page(page: &[u8], width: usize, q: &[f32], out: &mut [f32], stride: usize) = channel_page_inner;
}

#[inline(always)]
fn channel_page_inner<const FUSED: bool>(
    page: &[u8],
    width: usize,
    q: &[f32],
    out: &mut [f32],
    stride: usize,
) {
    let (rows, units) = page.as_chunks::<PAGE>().0.split_at(width);
    let mut sums = [[0.0; PAGE]; GROUP_MAX];
    for (channel, row) in rows.iter().enumerate() {
        let key = row.map(|x| f32::from(x.cast_signed()));
        for (q, sums) in q.chunks_exact(width).zip(&mut sums) {
            for (sum, key) in sums.iter_mut().zip(key) {
                *sum = fma::<FUSED>(q[channel], key, *sum);
            }
        }
    }
    let (units, _) = units.as_flattened().as_chunks::<2>();
    for (out, sums) in out.chunks_mut(stride).zip(&sums[..q.len() / width]) {
        for ((out, sum), &unit) in out.iter_mut().zip(sums).zip(units) {
            *out = sum * f16_to_f32(u16::from_le_bytes(unit));
        }
    }
}

/// The same for `N` queries and all pages: one register holds a channel of sixteen keys.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn vectors<const N: usize>(
    pages: [&[u8]; PAGES],
    width: usize,
    q: &[f32],
    out: &mut [f32],
    stride: usize,
) {
    use std::arch::x86_64::*;
    assert!(q.len() == N * width && pages.iter().all(|page| page.len() >= (width + 2) * PAGE));
    let mut totals = [[_mm512_setzero_ps(); PAGES]; N];
    for channel in 0..width {
        let keys = pages.map(|page| {
            #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
            // SAFETY: a page has sixteen bytes for each channel (asserted).
            let bytes = unsafe { _mm_loadu_si128(page.as_ptr().add(channel * PAGE).cast()) };
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        });
        for (row, totals) in totals.iter_mut().enumerate() {
            let q = _mm512_set1_ps(q[row * width + channel]);
            for (total, keys) in totals.iter_mut().zip(keys) {
                *total = _mm512_fmadd_ps(q, keys, *total);
            }
        }
    }
    for (i, page) in pages.into_iter().enumerate() {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: sixteen halves follow (asserted).
        let units = unsafe { _mm256_loadu_si256(page.as_ptr().add(width * PAGE).cast()) };
        let units = _mm512_cvtph_ps(units);
        for (row, totals) in totals.iter().enumerate() {
            let out = &mut out[row * stride + i * PAGE..][..PAGE];
            #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
            // SAFETY: sixteen numbers.
            unsafe {
                _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(totals[i], units));
            }
        }
    }
}

/// The largest product with `q` that a key within the page's bounds could have.
pub(super) fn bound(page: &[u8], q: &[f32]) -> f32 {
    let (halves, _) = page.as_chunks::<2>();
    let (least, most) = halves.split_at(q.len());
    let value = |half: [u8; 2]| f16_to_f32(u16::from_le_bytes(half));
    let pairs = least.iter().zip(most).zip(q);
    pairs.map(|((&least, &most), &q)| (q * value(least)).max(q * value(most))).sum()
}

versions! {
    /// Turns a row into `exp(x - max)` and returns the maximum and the sum.
    pub(super) fn exponentials(row: &mut [f32]) -> (f32, f32) = exponentials_inner;
}

#[inline(always)]
fn exponentials_inner<const FUSED: bool>(row: &mut [f32]) -> (f32, f32) {
    let (pages, rest) = row.as_chunks_mut::<PAGE>();
    let mut maxima = [f32::NEG_INFINITY; PAGE];
    for page in &*pages {
        for (max, &x) in maxima.iter_mut().zip(page) {
            *max = if x > *max { x } else { *max };
        }
    }
    let max =
        maxima.iter().chain(&*rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    // All are NaN: whatever is subtracted, they stay so.
    let max = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut sums = [0.0; PAGE];
    for page in pages {
        for (x, sum) in page.iter_mut().zip(&mut sums) {
            *x = exp::<FUSED>(*x - max);
            *sum += *x;
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = exp::<FUSED>(*x - max);
        *sum += *x;
    }
    (max, sum16(&sums))
}

versions! {
    /// The sums of the rows of `[group][n]`, each times its factor, as bits that are ordered as the
    /// numbers are.
    pub(super) fn combine(rows: &[f32], factors: &[f32], out: &mut [u32]) = combine_inner;
}

#[inline(always)]
fn combine_inner<const FUSED: bool>(rows: &[f32], factors: &[f32], out: &mut [u32]) {
    let n = out.len();
    let (blocks, rest) = out.as_chunks_mut::<PAGE>();
    let n_whole = n - rest.len();
    let add = |sum: f32, x: f32, factor: f32| {
        let sum = fma::<FUSED>(x, factor, sum);
        // What is no number is worth nothing.
        if sum > 0.0 { sum } else { 0.0 }
    };
    for (i, block) in blocks.iter_mut().enumerate() {
        let mut sums = [0.0; PAGE];
        for (row, &factor) in rows.chunks_exact(n).zip(factors) {
            let (row, _) = row.as_chunks::<PAGE>();
            for (sum, &x) in sums.iter_mut().zip(&row[i]) {
                *sum = add(*sum, x, factor);
            }
        }
        // Positive floats are ordered as their bits are.
        *block = sums.map(f32::to_bits);
    }
    for (place, out) in (n_whole..).zip(rest) {
        let terms = rows.chunks_exact(n).zip(factors);
        *out = terms.fold(0.0, |sum, (row, &factor)| add(sum, row[place], factor)).to_bits();
    }
}
