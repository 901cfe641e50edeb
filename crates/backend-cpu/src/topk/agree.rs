//! Bits that agree: codes of keys against codes of queries.
//!
//! A page is `[words][16 tokens]` of 64 bits. Three versions count bits: by `vpopcntq`, by looking up
//! half bytes with `vpshufb`, and one number at a time.

use crate::isa::Isa;
use crate::kv::PAGE;

/// For each key of the pages, how many of its bits agree with the codes of all queries of the group,
/// `[group][n_words]`; `out` has a number for each key, and perhaps fewer than the last page has.
pub(super) fn agreements<'a>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]>,
    codes: &[u64],
    n_words: usize,
    out: &mut [u32],
) {
    let pages = pages.zip(out.chunks_mut(PAGE));
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512 {
            #[expect(unsafe_code, reason = "target features")]
            // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have, and the
            // machine was asked for the rest.
            unsafe {
                if is_x86_feature_detected!("avx512vpopcntdq") {
                    by_vectors(pages, codes, n_words);
                } else {
                    by_half_bytes(pages, codes, n_words);
                }
            }
            return;
        }
        if isa >= Isa::Avx2 && is_x86_feature_detected!("popcnt") {
            #[expect(unsafe_code, reason = "target features")]
            // SAFETY: the machine was asked.
            unsafe {
                by_numbers(pages, codes, n_words);
            }
            return;
        }
    }
    let _ = isa;
    all_pages(pages, codes, n_words);
}

/// Pages, and where their answers go.
trait PagePairs<'a, 'b>: Iterator<Item = (&'a [u8], &'b mut [u32])> {}
impl<'a, 'b, T: Iterator<Item = (&'a [u8], &'b mut [u32])>> PagePairs<'a, 'b> for T {}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512vpopcntdq")]
fn by_vectors<'a, 'b>(pages: impl PagePairs<'a, 'b>, codes: &[u64], n_words: usize) {
    all_pages(pages, codes, n_words);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "popcnt")]
fn by_numbers<'a, 'b>(pages: impl PagePairs<'a, 'b>, codes: &[u64], n_words: usize) {
    all_pages(pages, codes, n_words);
}

#[inline(always)]
fn all_pages<'a, 'b>(pages: impl PagePairs<'a, 'b>, codes: &[u64], n_words: usize) {
    for (page, out) in pages {
        let (words, _) = page.as_chunks::<8>();
        let (rows, _) = words.as_chunks::<PAGE>();
        let mut sums = [0u64; PAGE];
        for query in codes.chunks_exact(n_words) {
            for (&query, row) in query.iter().zip(rows) {
                for (sum, &key) in sums.iter_mut().zip(row) {
                    *sum += u64::from((u64::from_le_bytes(key) ^ !query).count_ones());
                }
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as u32);
    }
}

/// Each byte counts its own bits, until sums of eight bytes are taken.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
fn by_half_bytes<'a, 'b>(pages: impl PagePairs<'a, 'b>, codes: &[u64], n_words: usize) {
    use std::arch::x86_64::*;
    /// `(a ^ b) & c`.
    const DIFFERENT: i32 = 0b0010_1000;
    /// Bits that a byte can count, in words.
    const WORDS_MAX: usize = 31;
    /// Codes are fetched this far ahead: the next pages mostly lie behind this one.
    const AHEAD_BYTES: usize = 4096;
    let low = _mm512_set1_epi8(0x0f);
    // How many of four bits are not set: bits that differ count nothing.
    let counts =
        _mm512_broadcast_i32x4(_mm_setr_epi8(4, 3, 3, 2, 3, 2, 2, 1, 3, 2, 2, 1, 2, 1, 1, 0));
    let zero = _mm512_setzero_si512();
    // `[word][group]`, each as it is and moved by half a byte.
    let group = codes.len() / n_words;
    let mut queries = Vec::with_capacity(codes.len());
    for word in 0..n_words {
        let column = codes.iter().skip(word).step_by(n_words);
        queries.extend(column.map(|&code| [code.cast_signed(), (code >> 4).cast_signed()]));
    }
    for (page, out) in pages {
        assert!(page.len() >= n_words * PAGE * 8);
        for line in (0..n_words * PAGE * 8).step_by(64) {
            let ahead = page.as_ptr().wrapping_add(AHEAD_BYTES + line);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
        let (mut totals, mut sums, mut n_counted) = ([zero; 2], [zero; 2], 0);
        for (word, queries) in queries.chunks_exact(group).enumerate() {
            #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
            // SAFETY: the page has sixteen numbers for each word (asserted).
            let keys = unsafe {
                let start = page.as_ptr().add(word * PAGE * 8);
                [_mm512_loadu_si512(start.cast()), _mm512_loadu_si512(start.add(64).cast())]
            };
            let keys_high = keys.map(|keys| _mm512_srli_epi64::<4>(keys));
            for queries in queries.chunks(WORDS_MAX) {
                if n_counted + queries.len() > WORDS_MAX {
                    for (total, sums) in totals.iter_mut().zip(&mut sums) {
                        *total = _mm512_add_epi64(*total, _mm512_sad_epu8(*sums, zero));
                        *sums = zero;
                    }
                    n_counted = 0;
                }
                n_counted += queries.len();
                for &[query, query_high] in queries {
                    let (q, q_high) = (_mm512_set1_epi64(query), _mm512_set1_epi64(query_high));
                    for half in 0..2 {
                        let a = _mm512_ternarylogic_epi64::<DIFFERENT>(keys[half], q, low);
                        let b =
                            _mm512_ternarylogic_epi64::<DIFFERENT>(keys_high[half], q_high, low);
                        let both = _mm512_add_epi8(
                            _mm512_shuffle_epi8(counts, a),
                            _mm512_shuffle_epi8(counts, b),
                        );
                        sums[half] = _mm512_add_epi8(sums[half], both);
                    }
                }
            }
        }
        let mut answers = [0u32; PAGE];
        for (half, answers) in answers.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let total = _mm512_add_epi64(totals[half], _mm512_sad_epu8(sums[half], zero));
            #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
            // SAFETY: eight numbers of 32 bits.
            unsafe {
                _mm256_storeu_si256(answers.as_mut_ptr().cast(), _mm512_cvtepi64_epi32(total));
            }
        }
        out.copy_from_slice(&answers[..out.len()]);
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::topk;

    use super::*;

    #[test]
    fn every_version_counts_as_the_reference_does() {
        let mut state = 5u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state ^ (state >> 29)
        };
        for (n_words, group, n) in [
            (1usize, 1usize, 16usize),
            (2, 3, 40),
            (4, 3, 100),
            (4, 9, 33),
            (16, 4, 16),
            (2, 40, 20),
        ] {
            let codes: Vec<u64> = (0..group * n_words).map(|_| next()).collect();
            let mut keys: Vec<Vec<u64>> =
                (0..n).map(|_| (0..n_words).map(|_| next()).collect()).collect();
            // The extremes: all bits agree with all queries, or none.
            keys[0] = vec![0; n_words];
            keys[1] = vec![u64::MAX; n_words];
            let mut bytes = vec![0u8; n.div_ceil(PAGE) * n_words * PAGE * 8];
            for (i, key) in keys.iter().enumerate() {
                for (word, bits) in key.iter().enumerate() {
                    let at = ((i / PAGE * n_words + word) * PAGE + i % PAGE) * 8;
                    bytes[at..at + 8].copy_from_slice(&bits.to_le_bytes());
                }
            }
            let agreement = |key: &Vec<u64>| {
                codes.chunks_exact(n_words).map(|query| topk::agreement(key, query)).sum::<u32>()
            };
            let expected: Vec<u32> = keys.iter().map(agreement).collect();
            for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
                let mut got = vec![0; n];
                let pages = bytes.chunks_exact(n_words * PAGE * 8);
                agreements(isa, pages, &codes, n_words, &mut got);
                assert_eq!(got, expected, "{isa}: {n_words} words, group {group}");
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::detect() >= Isa::Avx512 {
                let mut got = vec![0; n];
                let pages = bytes.chunks_exact(n_words * PAGE * 8).zip(got.chunks_mut(PAGE));
                #[expect(unsafe_code, reason = "target features")]
                // SAFETY: the machine was asked.
                unsafe {
                    by_half_bytes(pages, &codes, n_words);
                }
                assert_eq!(got, expected, "half bytes: {n_words} words, group {group}");
            }
        }
    }
}
