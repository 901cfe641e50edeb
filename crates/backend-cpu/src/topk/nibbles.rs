//! Channels in four bits: a line of 64 bytes has eight channels of sixteen keys.
//!
//! ```text
//!   bytes 4 t .. 4 t + 4 of line b: token t,   low halves    channels 8 b     .. 8 b + 4
//!                                              high halves   channels 8 b + 4 .. 8 b + 8
//! ```
//!
//! Queries have eight bits, so sums are whole numbers and the same on every machine. Keys are stored with
//! eight added to them, which is taken off where a sum begins.

use nuthatch_backend::topk::{nibbles, query_codes};

use super::numbers::{fetch, largest};
use crate::isa::Isa;
use crate::kv::PAGE;
use crate::pack::f16_to_f32;
#[cfg(target_arch = "x86_64")]
use {crate::mem::fetch_line, crate::versions::powers_of_two, std::f32::consts::LOG2_E};

#[cfg(test)]
mod tests;

/// Channels of a line.
const LINE: usize = 8;

/// Writes a token's products, and what one stands for.
pub(super) fn write(products: &[f32], token: usize, page: &mut [u8]) {
    let (codes, unit) = nibbles(products);
    let (lines, _) = page.as_chunks_mut::<{ 4 * PAGE }>();
    for (line, codes) in lines.iter_mut().zip(codes.chunks(LINE)) {
        let code = |channel: usize| codes.get(channel).copied().unwrap_or(0);
        for (i, byte) in line[4 * token..4 * token + 4].iter_mut().enumerate() {
            *byte = code(i) | code(i + 4) << 4;
        }
    }
    let at = products.len().div_ceil(LINE) * 4 * PAGE + 2 * token;
    page[at..at + 2].copy_from_slice(&unit.to_le_bytes());
}

/// The queries of a group as they meet such keys.
pub(super) struct Codes {
    /// `[query][line][low|high]` four codes each, the first in the lowest bits.
    words: Vec<[i32; 2]>,
    /// `[query]` where sums begin, and what one of a sum stands for.
    of_queries: Vec<(i32, f32)>,
    n_lines: usize,
}

impl Codes {
    /// Of products with a frame, `[query][width]`; scores are multiplied by `scale`.
    pub(super) fn new(products: &[f32], width: usize, scale: f32) -> Self {
        let n_lines = width.div_ceil(LINE);
        let n_queries = products.len() / width;
        let mut words = Vec::with_capacity(n_queries * n_lines);
        let mut of_queries = Vec::with_capacity(n_queries);
        for products in products.chunks_exact(width) {
            let (mut codes, unit) = query_codes(products);
            let mut sum = 0;
            let mut word = || {
                let four = [(); 4].map(|()| codes.next().unwrap_or(0));
                sum += four.iter().map(|&code| i32::from(code)).sum::<i32>();
                i32::from_le_bytes(four.map(i8::cast_unsigned))
            };
            words.extend((0..n_lines).map(|_| [word(), word()]));
            of_queries.push((-8 * sum, unit * scale));
        }
        Codes { words, of_queries, n_lines }
    }

    fn query(&self, query: usize) -> Query<'_> {
        let (begin, factor) = self.of_queries[query];
        Query { words: &self.words[query * self.n_lines..][..self.n_lines], begin, factor }
    }
}

/// One query.
struct Query<'a> {
    /// `[line][low|high]`.
    words: &'a [[i32; 2]],
    /// Where sums begin.
    begin: i32,
    /// What one of a sum stands for.
    factor: f32,
}

/// Query heads that are scored at a time.
const GROUP_MAX: usize = 4;

/// Pages from the one that is scored to the one that is fetched meanwhile. Guessed.
pub(super) const AHEAD: usize = 12;

/// `raw[g][j]`: what stands for the product of key `j` and query `g`; `pages` are those of the keys. The largest
/// of each query go to `maxima`.
pub(super) fn nibble_scores<'a>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    codes: &Codes,
    raw: &mut [f32],
    maxima: &mut [f32],
) {
    let n = raw.len() / maxima.len();
    let queries = raw.chunks_mut(GROUP_MAX * n).zip(maxima.chunks_mut(GROUP_MAX));
    for (i, (raw, maxima)) in queries.enumerate() {
        let (pages, first) = (pages.clone(), i * GROUP_MAX);
        match maxima.len() {
            4 => few_queries::<4>(isa, pages, (codes, first), raw, maxima),
            3 => few_queries::<3>(isa, pages, (codes, first), raw, maxima),
            2 => few_queries::<2>(isa, pages, (codes, first), raw, maxima),
            _ => few_queries::<1>(isa, pages, (codes, first), raw, maxima),
        }
    }
}

fn few_queries<'a, const N: usize>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    (codes, first): (&Codes, usize),
    raw: &mut [f32],
    maxima: &mut [f32],
) {
    let queries: [Query<'_>; N] = std::array::from_fn(|i| codes.query(first + i));
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            #[expect(unsafe_code, reason = "target features")]
            // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
            maxima.copy_from_slice(&unsafe {
                avx512::<N>(pages, &queries, raw, Take::Scores(usize::MAX))
            });
            return;
        }
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2::<N>(pages, &queries, raw) },
        _ => each_page(pages, raw, N, |page, query| plain(page, &queries[query])),
    }
    for (row, max) in raw.chunks_exact(raw.len() / N).zip(maxima) {
        *max = largest(isa, row);
    }
}

/// Pages whose scores say what is subtracted from all of a piece before its exponentials are taken,
#[cfg(target_arch = "x86_64")]
const FIRST: usize = 4;
/// and how large a sum may be: if it is larger, so may be exponentials than a number can.
#[cfg(target_arch = "x86_64")]
const MOST: f32 = 1e26;

/// What [`nibble_scores`] does, with exponentials of the scores instead, and for each query what was subtracted from its scores, and
/// the sum. In one pass: exponentials are taken of some pages while others come. False, and nothing done, on
/// machines that have no vectors for it.
pub(super) fn nibble_exponentials<'a>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    codes: &Codes,
    raw: &mut [f32],
    sums: &mut [(f32, f32)],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Amx) {
        let n = raw.len() / sums.len();
        let queries = raw.chunks_mut(GROUP_MAX * n).zip(sums.chunks_mut(GROUP_MAX));
        for (i, (raw, sums)) in queries.enumerate() {
            let (pages, first) = (pages.clone(), i * GROUP_MAX);
            match sums.len() {
                4 => few_exponentials::<4>(pages, (codes, first), raw, sums),
                3 => few_exponentials::<3>(pages, (codes, first), raw, sums),
                2 => few_exponentials::<2>(pages, (codes, first), raw, sums),
                _ => few_exponentials::<1>(pages, (codes, first), raw, sums),
            }
        }
        return true;
    }
    false
}

/// The machine has AVX-512.
#[cfg(target_arch = "x86_64")]
fn few_exponentials<'a, const N: usize>(
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    (codes, first): (&Codes, usize),
    raw: &mut [f32],
    sums: &mut [(f32, f32)],
) {
    let queries: [Query<'_>; N] = std::array::from_fn(|i| codes.query(first + i));
    let mut score = |take| {
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: the caller has seen that the machine has them.
        unsafe {
            avx512::<N>(pages.clone(), &queries, raw, take)
        }
    };
    // All are no numbers: whatever is subtracted, they stay so.
    let or_zero = |max| if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut from = score(Take::Scores(FIRST)).map(or_zero);
    let mut totals = score(Take::Exponentials(from));
    if totals.iter().any(|&total| total > MOST) {
        from = score(Take::Scores(usize::MAX)).map(or_zero);
        totals = score(Take::Exponentials(from));
    }
    for (sum, of_query) in sums.iter_mut().zip(from.into_iter().zip(totals)) {
        *sum = of_query;
    }
}

/// Writes what `score` gives for each page and query, `[query][n]`.
#[inline(always)]
fn each_page<'a>(
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    raw: &mut [f32],
    n_queries: usize,
    score: impl Fn(&[u8], usize) -> [f32; PAGE],
) {
    let n = raw.len() / n_queries;
    let mut ahead = pages.clone().skip(AHEAD);
    for (i, page) in pages.enumerate() {
        if let Some(page) = ahead.next() {
            fetch(page);
        }
        for query in 0..n_queries {
            let row = &mut raw[query * n + i * PAGE..(query + 1) * n];
            let scores = score(page, query);
            match row.first_chunk_mut() {
                Some(row) => *row = scores,
                None => row.copy_from_slice(&scores[..row.len()]),
            }
        }
    }
}

/// The units of a page's tokens, behind its lines.
fn units_of(page: &[u8], n_lines: usize) -> &[u8; 2 * PAGE] {
    page[n_lines * 4 * PAGE..].first_chunk().expect("units behind the lines")
}

/// Scores of the sixteen keys of a page.
fn plain(page: &[u8], query: &Query<'_>) -> [f32; PAGE] {
    let mut sums = [query.begin; PAGE];
    let (lines, _) = page.as_chunks::<{ 4 * PAGE }>();
    for (line, words) in lines.iter().zip(query.words) {
        let [low, high] = words.map(|word| word.to_le_bytes().map(u8::cast_signed));
        for (sum, bytes) in sums.iter_mut().zip(line.as_chunks::<4>().0) {
            for (i, byte) in bytes.iter().enumerate() {
                *sum += i32::from(byte & 15) * i32::from(low[i]);
                *sum += i32::from(byte >> 4) * i32::from(high[i]);
            }
        }
    }
    let (units, _) = units_of(page, query.words.len()).as_chunks::<2>();
    std::array::from_fn(|token| {
        let unit = f16_to_f32(u16::from_le_bytes(units[token]));
        sums[token] as f32 * unit * query.factor
    })
}

/// The same with vectors of eight tokens: bytes are multiplied in pairs, then pairs are added.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn avx2<'a, const N: usize>(
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    queries: &[Query<'_>; N],
    raw: &mut [f32],
) {
    use std::arch::x86_64::*;
    let half = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    each_page(pages, raw, N, |page, query| {
        let query = &queries[query];
        let mut sums = [_mm256_set1_epi32(query.begin); 2];
        let (lines, _) = page.as_chunks::<{ 4 * PAGE }>();
        for (line, words) in lines.iter().zip(query.words) {
            let words = words.map(|word| _mm256_set1_epi32(word));
            for (sum, eight) in sums.iter_mut().zip(line.as_chunks::<32>().0) {
                #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
                // SAFETY: the array has 32 bytes.
                let bytes = unsafe { _mm256_loadu_si256(eight.as_ptr().cast()) };
                let keys = [bytes, _mm256_srli_epi16::<4>(bytes)];
                for (keys, word) in keys.into_iter().zip(words) {
                    // Two products of up to 15 * 127 are within 16 bits.
                    let pairs = _mm256_maddubs_epi16(_mm256_and_si256(keys, half), word);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        let (units, _) = units_of(page, query.words.len()).as_chunks::<16>();
        let factor = _mm256_set1_ps(query.factor);
        let mut scores = [0.0; PAGE];
        for ((out, sum), units) in scores.as_chunks_mut::<8>().0.iter_mut().zip(sums).zip(units) {
            #[expect(unsafe_code, reason = "vector loads and stores use raw pointers")]
            // SAFETY: eight halves are read and eight floats written, of arrays of that length.
            unsafe {
                let units = _mm256_cvtph_ps(_mm_loadu_si128(units.as_ptr().cast()));
                let scores = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), units), factor);
                _mm256_storeu_ps(out.as_mut_ptr(), scores);
            }
        }
        scores
    });
}

/// What is made of sums.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Take<const N: usize> {
    /// Scores of so many pages, of which the largest are found.
    Scores(usize),
    /// Exponentials of scores, less one number for each query, which are added up; pages are on their way.
    Exponentials([f32; N]),
}

/// Pages that are scored at a time: with more sums than one page has, a product need not wait for the one
/// before it.
#[cfg(target_arch = "x86_64")]
const PAGES: usize = 4;

/// The same with vectors of sixteen tokens: one instruction multiplies a line's half and adds it up. Returns what
/// was found of each query.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
fn avx512<'a, const N: usize>(
    mut pages: impl Iterator<Item = &'a [u8]> + Clone,
    queries: &[Query<'_>; N],
    raw: &mut [f32],
    take: Take<N>,
) -> [f32; N] {
    use std::arch::x86_64::*;
    let n = raw.len() / N;
    let n_lines = queries[0].words.len();
    assert!(queries.iter().all(|query| query.words.len() == n_lines));
    let (n_pages, nothing) = match take {
        Take::Scores(n_pages) => (n_pages, f32::NEG_INFINITY),
        Take::Exponentials(_) => (usize::MAX, 0.0),
    };
    let (mut found, mut ahead) = ([_mm512_set1_ps(nothing); N], pages.clone());
    match take {
        Take::Scores(_) => ahead.by_ref().take(AHEAD).for_each(fetch),
        Take::Exponentials(_) => drop(ahead.nth(AHEAD - 1)),
    }
    let (mut pages, n_whole, mut at) = ((&mut pages, &mut ahead), (n / PAGE).min(n_pages), 0);
    while at + PAGES <= n_whole {
        step::<N, PAGES>(&mut pages, queries, (raw, at * PAGE, u16::MAX), take, &mut found);
        at += PAGES;
    }
    while at < n_whole {
        step::<N, 1>(&mut pages, queries, (raw, at * PAGE, u16::MAX), take, &mut found);
        at += 1;
    }
    if at < n_pages && !n.is_multiple_of(PAGE) {
        let mask = (1 << (n % PAGE)) - 1;
        step::<N, 1>(&mut pages, queries, (raw, at * PAGE, mask), take, &mut found);
    }
    let mut all = [0.0; N];
    for q in 0..N {
        all[q] = match take {
            Take::Scores(_) => _mm512_reduce_max_ps(found[q]),
            Take::Exponentials(_) => _mm512_reduce_add_ps(found[q]),
        };
    }
    all
}

/// The next `P` pages, while others are fetched; their places are those from `start` on, of the last page only those
/// of the mask.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
#[inline]
fn step<'a, const N: usize, const P: usize>(
    (pages, ahead): &mut (impl Iterator<Item = &'a [u8]>, impl Iterator<Item = &'a [u8]>),
    queries: &[Query<'_>; N],
    (raw, start, mask): (&mut [f32], usize, u16),
    take: Take<N>,
    found: &mut [std::arch::x86_64::__m512; N],
) {
    use std::arch::x86_64::*;
    let (n, n_lines) = (raw.len() / N, queries[0].words.len());
    assert!(start + (P - 1) * PAGE + mask.count_ones() as usize <= n, "places of the row");
    let (mut at, mut next) = ([std::ptr::null(); P], [std::ptr::null(); P]);
    for (at, next) in at.iter_mut().zip(&mut next) {
        let page = pages.next().unwrap_or(&[]);
        assert!(page.len() >= n_lines * 4 * PAGE + 2 * PAGE, "units behind the lines");
        (*at, *next) = (page.as_ptr(), ahead.next().unwrap_or(page).as_ptr());
    }
    #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
    // SAFETY: pages have so many lines (asserted), and so have queries (asserted by the caller).
    let sums = unsafe { products::<N, P>(at, next, n_lines, queries) };
    let mut units = [_mm512_setzero_ps(); P];
    for (units, at) in units.iter_mut().zip(at) {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: sixteen halves follow the lines of a page (asserted).
        let halves = unsafe { _mm256_loadu_si256(at.add(n_lines * 4 * PAGE).cast()) };
        *units = _mm512_cvtph_ps(halves);
    }
    let mask_of = |i: usize| if i + 1 < P { u16::MAX } else { mask };
    for q in 0..N {
        let (sums, found) = (&sums[q], &mut found[q]);
        let mut out = [_mm512_setzero_ps(); P];
        match take {
            Take::Scores(_) => {
                let factor = _mm512_set1_ps(queries[q].factor);
                for (i, out) in out.iter_mut().enumerate() {
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i]), units[i]);
                    *out = _mm512_mul_ps(sum, factor);
                    // A number that is none is not larger than any.
                    *found = _mm512_mask_max_ps(*found, mask_of(i), *out, *found);
                }
            }
            Take::Exponentials(from) => {
                let factor = _mm512_set1_ps(queries[q].factor * LOG2_E);
                let less = _mm512_set1_ps(-from[q] * LOG2_E);
                for (i, out) in out.iter_mut().enumerate() {
                    let unit = _mm512_mul_ps(units[i], factor);
                    *out = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i]), unit, less);
                }
                out = powers_of_two(out);
                for (i, &out) in out.iter().enumerate() {
                    *found = _mm512_mask_add_ps(*found, mask_of(i), *found, out);
                }
            }
        }
        for (i, x) in out.into_iter().enumerate() {
            #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
            // SAFETY: the row has places for all lanes (asserted), and there are `N` rows of `n`.
            unsafe {
                let at = raw.as_mut_ptr().add(q * n + start + i * PAGE);
                _mm512_mask_storeu_ps(at, mask_of(i), x);
            }
        }
    }
}

/// Products of the keys of a few pages with a few queries, while other pages are fetched.
///
/// # Safety
///
/// The pages and each query have `n_lines` lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
#[expect(unsafe_code, reason = "vector loads read through raw pointers")]
unsafe fn products<const N: usize, const P: usize>(
    pages: [*const u8; P],
    next: [*const u8; P],
    n_lines: usize,
    queries: &[Query<'_>; N],
) -> [[std::arch::x86_64::__m512i; P]; N] {
    use std::arch::x86_64::*;
    let half = _mm512_set1_epi8(15);
    let mut sums = [[_mm512_setzero_si512(); P]; N];
    // Loops, because an array's own functions would be called, with vectors that go through memory.
    for q in 0..N {
        sums[q] = [_mm512_set1_epi32(queries[q].begin); P];
    }
    for b in 0..n_lines {
        let (mut low, mut high) = ([half; P], [half; P]);
        for i in 0..P {
            fetch_line::<true>(next[i].wrapping_add(b * 4 * PAGE));
            // SAFETY: there are so many lines (the caller's duty).
            let bytes = unsafe { _mm512_loadu_si512(pages[i].add(b * 4 * PAGE).cast()) };
            low[i] = _mm512_and_si512(bytes, half);
            high[i] = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), half);
        }
        for q in 0..N {
            // SAFETY: as above.
            let [of_low, of_high] = unsafe { *queries[q].words.as_ptr().add(b) };
            let (of_low, of_high) = (_mm512_set1_epi32(of_low), _mm512_set1_epi32(of_high));
            for i in 0..P {
                sums[q][i] = _mm512_dpbusd_epi32(sums[q][i], low[i], of_low);
            }
            for i in 0..P {
                sums[q][i] = _mm512_dpbusd_epi32(sums[q][i], high[i], of_high);
            }
        }
    }
    (0..P).for_each(|i| fetch_line::<true>(next[i].wrapping_add(n_lines * 4 * PAGE)));
    sums
}
