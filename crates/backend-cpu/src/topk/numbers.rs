//! Scores by numbers: products of channels, bounds of pages, and the parts of a softmax.

use crate::isa::Isa;
use crate::kv::PAGE;
use crate::mem::fetch_line;
use crate::pack::f16_to_f32;
#[cfg(target_arch = "x86_64")]
use crate::versions::exps_to_88;
use crate::versions::{exp_to_88, fma, sum16, versions};

/// Query heads that are scored at a time.
const GROUP_MAX: usize = 4;

/// Pages that are scored at a time: with more sums than one page has, a product need not wait for
/// the one before it.
#[cfg(target_arch = "x86_64")]
const PAGES: usize = 2;

/// Pages from the one that is scored to the one that is fetched meanwhile.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 6;

/// Channels of sixteen keys in a line of the cache.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64 / PAGE;

/// `raw[g][j]`: products of the channels of key `j` with those of query `g`; `q` is
/// `[group][width]`. The largest of each query go to `maxima`.
pub(super) fn channel_scores<'a>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    width: usize,
    q: &[f32],
    raw: &mut [f32],
    maxima: &mut [f32],
) {
    let n = raw.len() / maxima.len();
    let queries = q.chunks(GROUP_MAX * width).zip(raw.chunks_mut(GROUP_MAX * n));
    for ((q, raw), maxima) in queries.zip(maxima.chunks_mut(GROUP_MAX)) {
        few_scores(isa, pages.clone(), (width, q), (raw, n), maxima);
    }
}

/// The same for up to `GROUP_MAX` queries.
fn few_scores<'a>(
    isa: Isa,
    mut pages: impl Iterator<Item = &'a [u8]> + Clone,
    (width, q): (usize, &[f32]),
    (raw, n): (&mut [f32], usize),
    maxima: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Amx) {
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        return unsafe {
            match maxima.len() {
                4 => vectors::<4>(pages, (width, q), (raw, n), maxima),
                3 => vectors::<3>(pages, (width, q), (raw, n), maxima),
                2 => vectors::<2>(pages, (width, q), (raw, n), maxima),
                _ => vectors::<1>(pages, (width, q), (raw, n), maxima),
            }
        };
    }
    for start in (0..n).step_by(PAGE) {
        let Some(page) = pages.next() else { break };
        let mut out = [0.0; GROUP_MAX * PAGE];
        channel_page(isa, page, width, q, &mut out, PAGE);
        let n_places = PAGE.min(n - start);
        for (row, out) in raw.chunks_exact_mut(n).zip(out.chunks_exact(PAGE)) {
            row[start..start + n_places].copy_from_slice(&out[..n_places]);
        }
    }
    for (row, max) in raw.chunks_exact(n).zip(maxima) {
        *max = largest(isa, row);
    }
}

/// Lets the first cache fetch a page: digests are read once, and a page is too short for the
/// machine to see where the next one lies.
pub(super) fn fetch(page: &[u8]) {
    page.chunks(64).for_each(|line| fetch_line::<true>(line.as_ptr()));
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

/// The same for `N` queries: one register holds a channel of sixteen keys.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn vectors<'a, const N: usize>(
    mut pages: impl Iterator<Item = &'a [u8]> + Clone,
    (width, q): (usize, &[f32]),
    (raw, n): (&mut [f32], usize),
    maxima: &mut [f32],
) {
    use std::arch::x86_64::*;
    assert!(q.len() == N * width && raw.len() == N * n && maxima.len() == N);
    let mut most = [_mm512_set1_ps(f32::NEG_INFINITY); N];
    let mut ahead = pages.clone();
    ahead.by_ref().take(AHEAD).for_each(fetch);
    for start in (0..n).step_by(PAGES * PAGE) {
        let Some(page) = pages.next() else { break };
        // A last page without a partner is its own.
        let pages = [page, pages.next().unwrap_or(page)];
        let next = [ahead.next().unwrap_or(page), ahead.next().unwrap_or(page)];
        let totals = products::<N>(pages, next, width, q);
        for (i, (totals, most)) in totals.iter().zip(&mut most).enumerate() {
            for (page, &total) in totals.iter().enumerate() {
                let at = start + page * PAGE;
                let places = n.saturating_sub(at).min(PAGE);
                let mask = ((1u32 << places) - 1) as __mmask16;
                // A number that is none is not larger than any.
                *most = _mm512_mask_max_ps(*most, mask, total, *most);
                #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
                // SAFETY: the mask has as many bits as the row has places from here on, sixteen at most,
                // and there are as many rows (asserted).
                unsafe {
                    let out = raw.as_mut_ptr().wrapping_add(i * n + at);
                    _mm512_mask_storeu_ps(out, mask, total);
                }
            }
        }
    }
    for (max, most) in maxima.iter_mut().zip(most) {
        *max = _mm512_reduce_max_ps(most);
    }
}

/// Scores of the keys of a few pages, while others are fetched.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn products<const N: usize>(
    pages: [&[u8]; PAGES],
    next: [&[u8]; PAGES],
    width: usize,
    q: &[f32],
) -> [[std::arch::x86_64::__m512; PAGES]; N] {
    use std::arch::x86_64::*;
    assert!(q.len() == N * width && pages.iter().all(|page| page.len() >= (width + 2) * PAGE));
    let mut totals = [[_mm512_setzero_ps(); PAGES]; N];
    let mut add = |channel: usize| {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: a page has sixteen bytes for each channel, and so many channels has each query
        // (asserted; channels are counted up to the width below).
        unsafe {
            let keys = pages.map(|page| {
                let bytes = _mm_loadu_si128(page.as_ptr().add(channel * PAGE).cast());
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
            });
            for (row, totals) in totals.iter_mut().enumerate() {
                let q = _mm512_set1_ps(*q.as_ptr().add(row * width + channel));
                for (total, keys) in totals.iter_mut().zip(keys) {
                    *total = _mm512_fmadd_ps(q, keys, *total);
                }
            }
        }
    };
    // A line at a time: all at once they would wait for each other, and the products for them.
    let fetch = |channel: usize| {
        next.iter().for_each(|page| fetch_line::<true>(page.as_ptr().wrapping_add(channel * PAGE)));
    };
    let whole = width / LINE * LINE;
    for line in (0..whole).step_by(LINE) {
        fetch(line);
        // Counted by hand, because a loop of four would stay a loop.
        add(line);
        add(line + 1);
        add(line + 2);
        add(line + 3);
    }
    (whole..width).for_each(&mut add);
    fetch(width);
    for (i, page) in pages.into_iter().enumerate() {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: sixteen halves follow (asserted).
        let units = unsafe { _mm256_loadu_si256(page.as_ptr().add(width * PAGE).cast()) };
        let units = _mm512_cvtph_ps(units);
        for totals in &mut totals {
            totals[i] = _mm512_mul_ps(totals[i], units);
        }
    }
    totals
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
    /// The largest of a row; what is no number is not larger than any.
    pub(super) fn largest(row: &[f32]) -> f32 = largest_inner;
}

#[inline(always)]
fn largest_inner<const FUSED: bool>(row: &[f32]) -> f32 {
    let (pages, rest) = row.as_chunks::<PAGE>();
    let mut maxima = [f32::NEG_INFINITY; PAGE];
    for page in pages {
        for (max, &x) in maxima.iter_mut().zip(page) {
            *max = if x > *max { x } else { *max };
        }
    }
    maxima.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// Turns a row into `exp(x - max)`, and returns what was subtracted and the sum.
pub(super) fn exponentials(isa: Isa, row: &mut [f32], max: f32) -> (f32, f32) {
    // All are NaN: whatever is subtracted, they stay so.
    let max = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut sums = [0.0; PAGE];
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Amx) {
        let (blocks, rest) = row.as_chunks_mut::<{ BLOCK * PAGE }>();
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        unsafe {
            block_exponentials(blocks, max, &mut sums);
        }
        row_exponentials(isa, rest, max, &mut sums);
        return (max, sum16(&sums));
    }
    row_exponentials(isa, row, max, &mut sums);
    (max, sum16(&sums))
}

/// Vectors whose exponentials are taken at a time.
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 4;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn block_exponentials(blocks: &mut [[f32; BLOCK * PAGE]], max: f32, sums: &mut [f32; PAGE]) {
    use std::arch::x86_64::*;
    let most = _mm512_set1_ps(max);
    #[expect(unsafe_code, reason = "vector loads and stores use raw pointers")]
    // SAFETY: sixteen sums are read and written, and each block has as many numbers as vectors of it.
    unsafe {
        let mut total = _mm512_loadu_ps(sums.as_ptr());
        for block in blocks {
            let x: [__m512; BLOCK] = std::array::from_fn(|i| {
                _mm512_sub_ps(_mm512_loadu_ps(block.as_ptr().add(i * PAGE)), most)
            });
            for (i, x) in exps_to_88(x).into_iter().enumerate() {
                _mm512_storeu_ps(block.as_mut_ptr().add(i * PAGE), x);
                total = _mm512_add_ps(total, x);
            }
        }
        _mm512_storeu_ps(sums.as_mut_ptr(), total);
    }
}

versions! {
    /// The same, with the sums of sixteen lanes.
    fn row_exponentials(row: &mut [f32], max: f32, sums: &mut [f32; PAGE]) = row_exponentials_inner;
}

#[inline(always)]
fn row_exponentials_inner<const FUSED: bool>(row: &mut [f32], max: f32, sums: &mut [f32; PAGE]) {
    for page in row.chunks_mut(PAGE) {
        for (x, sum) in page.iter_mut().zip(&mut *sums) {
            *x = exp_to_88::<FUSED>(*x - max);
            *sum += *x;
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_takes_the_same_exponentials() {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            100.0 * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        for n in [0, 1, 16, 63, 64, 65, 200, 2048] {
            let mut row: Vec<f32> = (0..n).map(|_| next()).collect();
            row.iter_mut().step_by(37).for_each(|x| *x = f32::NAN);
            row.iter_mut().skip(5).step_by(29).for_each(|x| *x = f32::NEG_INFINITY);
            let max = row.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            let bits = |isa| {
                let mut row = row.clone();
                let (_, sum) = exponentials(isa, &mut row, max);
                (row.iter().map(|x| x.to_bits()).collect::<Vec<u32>>(), sum.to_bits())
            };
            let fused: Vec<Isa> = Isa::ALL
                .into_iter()
                .filter(|&isa| isa != Isa::Scalar && isa <= Isa::detect())
                .collect();
            assert!(fused.windows(2).all(|pair| bits(pair[0]) == bits(pair[1])), "{n} numbers");
            let (mut one, mut all) = (row.clone(), row.clone());
            exponentials(Isa::Scalar, &mut all, max);
            let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
            one.iter_mut().for_each(|x| *x = (*x - shift).exp());
            for (a, b) in all.iter().zip(&one) {
                assert!(a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-6, "{a} {b}");
            }
        }
    }
}
