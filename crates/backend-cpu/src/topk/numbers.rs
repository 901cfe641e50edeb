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

/// Products of a few queries with the keys of a few pages.
type Sums = [[[f32; PAGE]; PAGES]; GROUP_MAX];

/// `raw[g][j]`: products of the channels of key `j` with those of query `g`; `q` is
/// `[group][width]`.
pub(super) fn channel_scores<'a>(
    isa: Isa,
    mut pages: impl Iterator<Item = &'a [u8]>,
    width: usize,
    q: &[f32],
    raw: &mut [f32],
) {
    let n = raw.len() / (q.len() / width);
    let mut start = 0;
    while let Some(page) = pages.next() {
        // A last page without a partner is its own.
        let pages = [page, pages.next().unwrap_or(page)];
        let places = start..n.min(start + PAGES * PAGE);
        start = places.end;
        let groups = q.chunks(GROUP_MAX * width).zip(raw.chunks_mut(GROUP_MAX * n));
        for (q, raw) in groups {
            let mut sums = [[[0.0; PAGE]; PAGES]; GROUP_MAX];
            match isa {
                #[cfg(target_arch = "x86_64")]
                #[expect(unsafe_code, reason = "target features")]
                // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
                Isa::Avx512 | Isa::Amx => unsafe {
                    match q.len() / width {
                        4 => vectors::<4>(pages, width, q, &mut sums),
                        3 => vectors::<3>(pages, width, q, &mut sums),
                        2 => vectors::<2>(pages, width, q, &mut sums),
                        _ => vectors::<1>(pages, width, q, &mut sums),
                    }
                },
                isa => {
                    for (i, page) in pages.into_iter().enumerate() {
                        channel_page(isa, i, page, width, q, &mut sums);
                    }
                }
            }
            for (row, sums) in raw.chunks_exact_mut(n).zip(&sums) {
                let (row, sums) = (&mut row[places.clone()], sums.as_flattened());
                // A copy whose length is known is no call.
                match row.as_mut_array::<{ PAGES * PAGE }>() {
                    Some(row) => row.copy_from_slice(sums),
                    None => row.copy_from_slice(&sums[..row.len()]),
                }
            }
        }
    }
}

versions! {
    /// Products of sixteen keys' channels with those of a few queries; `i` is the page's number.
    fn channel_page(i: usize, page: &[u8], width: usize, q: &[f32], sums: &mut Sums) = channel_page_inner;
}

#[inline(always)]
fn channel_page_inner<const FUSED: bool>(
    i: usize,
    page: &[u8],
    width: usize,
    q: &[f32],
    sums: &mut Sums,
) {
    let (rows, units) = page.as_chunks::<PAGE>().0.split_at(width);
    for (channel, row) in rows.iter().enumerate() {
        let key = row.map(|x| f32::from(x.cast_signed()));
        for (q, sums) in q.chunks_exact(width).zip(&mut *sums) {
            for (sum, key) in sums[i].iter_mut().zip(key) {
                *sum = fma::<FUSED>(q[channel], key, *sum);
            }
        }
    }
    let (units, _) = units.as_flattened().as_chunks::<2>();
    for sums in &mut *sums {
        for (sum, &unit) in sums[i].iter_mut().zip(units) {
            *sum *= f16_to_f32(u16::from_le_bytes(unit));
        }
    }
}

/// The same for `N` queries and all pages: one register holds a channel of sixteen keys.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn vectors<const N: usize>(pages: [&[u8]; PAGES], width: usize, q: &[f32], sums: &mut Sums) {
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
        for (sums, totals) in sums.iter_mut().zip(totals) {
            #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
            // SAFETY: sixteen numbers.
            unsafe {
                _mm512_storeu_ps(sums[i].as_mut_ptr(), _mm512_mul_ps(totals[i], units));
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
    out.fill(0);
    for (row, &factor) in rows.chunks_exact(n).zip(factors) {
        for (out, &x) in out.iter_mut().zip(row) {
            let sum = fma::<FUSED>(x, factor, f32::from_bits(*out));
            // Positive floats are ordered as their bits are; what is no number is worth nothing.
            *out = if sum > 0.0 { sum.to_bits() } else { 0 };
        }
    }
}
