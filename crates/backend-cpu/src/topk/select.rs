//! The best places, by counting: a threshold is found by halving, then the places are written in
//! order. There is no sort, and equal scores go to the first.

use crate::isa::Isa;
use crate::versions::versions;

/// Scores that are copied to be counted; a copy of this size stays in the first cache.
const FEW_MAX: usize = 1024;

/// See [`nuthatch_backend::topk::select`].
pub(crate) fn select(isa: Isa, scores: &[u32], first: u32, k: usize, chosen: &mut Vec<u32>) {
    chosen.clear();
    let middle = &scores[(first as usize).min(scores.len())..];
    if k >= middle.len() {
        chosen.extend(first..first + middle.len() as u32);
        return;
    }
    if k == 0 {
        return;
    }
    // `n_reach` scores, at least k, reach `low`, and `n_above`, fewer than k, are above `high`.
    let (mut low, mut high) = span(isa, middle);
    let (mut n_reach, mut n_above) = (middle.len(), 0);
    // Once few scores are left that may be the threshold, only they are counted.
    let (mut few, mut n_few, mut n_above_few) = ([0; FEW_MAX + 16], 0, 0);
    while low < high {
        let half = low + (high - low).div_ceil(2);
        let left = if n_few > 0 { &few[..n_few] } else { middle };
        let n = n_above_few + count(isa, left, half);
        if n >= k {
            (low, n_reach) = (half, n);
        } else {
            (high, n_above) = (half - 1, n);
        }
        if n_few == 0 && n_reach - n_above <= FEW_MAX.min(middle.len() / 4) {
            n_few = gather(isa, middle, (low, high), &mut few);
            n_above_few = n_above;
        }
    }
    // Sixteen more, because places are written before it is known which of them are chosen.
    chosen.resize(k + 16, 0);
    write(isa, middle, Choice { first, threshold: low, n_equal: k - n_above }, chosen);
    chosen.truncate(k);
}

versions! {
    /// The least and the largest.
    fn span(scores: &[u32]) -> (u32, u32) = span_inner;
}

#[inline(always)]
fn span_inner<const FUSED: bool>(scores: &[u32]) -> (u32, u32) {
    scores.iter().fold((u32::MAX, 0), |(a, b), &score| (a.min(score), b.max(score)))
}

versions! {
    /// Scores of at least `threshold`.
    fn count(scores: &[u32], threshold: u32) -> usize = count_inner;
}

#[inline(always)]
fn count_inner<const FUSED: bool>(scores: &[u32], threshold: u32) -> usize {
    // Sums of 32 bits have as many lanes as the scores.
    let n: u32 = scores.iter().map(|&score| u32::from(score >= threshold)).sum();
    n as usize
}

/// Copies the scores from `low` to `high`, for all of which there is room, and says how many they are.
fn gather(
    isa: Isa,
    scores: &[u32],
    (low, high): (u32, u32),
    few: &mut [u32; FEW_MAX + 16],
) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { gather_avx512(scores, (low, high), few) },
        _ => gather_plain(scores, (low, high), few, 0),
    }
}

fn gather_plain(
    scores: &[u32],
    (low, high): (u32, u32),
    few: &mut [u32; FEW_MAX + 16],
    mut n: usize,
) -> usize {
    for &score in scores.iter().filter(|score| (low..=high).contains(score)) {
        few[n] = score;
        n += 1;
    }
    n
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn gather_avx512(scores: &[u32], (low, high): (u32, u32), few: &mut [u32; FEW_MAX + 16]) -> usize {
    use std::arch::x86_64::*;
    let (blocks, rest) = scores.as_chunks::<16>();
    let least = _mm512_set1_epi32(low.cast_signed());
    let most = _mm512_set1_epi32(high.cast_signed());
    let mut n = 0;
    for block in blocks {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: the block has sixteen scores.
        let scores = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        let reach = _mm512_cmpge_epu32_mask(scores, least);
        let mask = _mm512_mask_cmple_epu32_mask(reach, scores, most);
        let target = &mut few[n..n + 16];
        #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
        // SAFETY: there is room for sixteen.
        unsafe {
            _mm512_storeu_si512(
                target.as_mut_ptr().cast(),
                _mm512_maskz_compress_epi32(mask, scores),
            );
        }
        n += mask.count_ones() as usize;
    }
    gather_plain(rest, (low, high), few, n)
}

/// What is chosen: all above the threshold, and the first few that reach it.
#[derive(Clone, Copy)]
struct Choice {
    first: u32,
    threshold: u32,
    n_equal: usize,
}

/// Writes the chosen places; `chosen` has room for sixteen more.
fn write(isa: Isa, scores: &[u32], choice: Choice, chosen: &mut [u32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { write_avx512(scores, choice, chosen) },
        _ => write_plain(scores, choice, chosen, 0),
    }
}

fn write_plain(scores: &[u32], choice: Choice, chosen: &mut [u32], mut n: usize) {
    let mut n_equal = choice.n_equal;
    for (place, &score) in (choice.first..).zip(scores) {
        let is_equal = score == choice.threshold && n_equal > 0;
        n_equal -= usize::from(is_equal);
        // Written always and counted if chosen: there is no branch to mispredict.
        chosen[n] = place;
        n += usize::from(score > choice.threshold || is_equal);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn write_avx512(scores: &[u32], mut choice: Choice, chosen: &mut [u32]) {
    use std::arch::x86_64::*;
    let (blocks, rest) = scores.as_chunks::<16>();
    let threshold = _mm512_set1_epi32(choice.threshold.cast_signed());
    let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let mut n = 0;
    for (i, block) in blocks.iter().enumerate() {
        #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
        // SAFETY: the block has sixteen scores.
        let scores = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        let above = _mm512_cmpgt_epu32_mask(scores, threshold);
        let mut equal = _mm512_cmpeq_epu32_mask(scores, threshold);
        while equal.count_ones() as usize > choice.n_equal {
            // Drops the last: of equal scores the first are chosen.
            equal &= !(1 << (15 - equal.leading_zeros()));
        }
        choice.n_equal -= equal.count_ones() as usize;
        let mask = above | equal;
        let base = _mm512_set1_epi32((choice.first + 16 * i as u32).cast_signed());
        let places = _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(base, lanes));
        let target = &mut chosen[n..n + 16];
        #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
        // SAFETY: there is room for sixteen.
        unsafe {
            _mm512_storeu_si512(target.as_mut_ptr().cast(), places);
        }
        n += mask.count_ones() as usize;
    }
    choice.first += 16 * blocks.len() as u32;
    write_plain(rest, choice, chosen, n)
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::topk;

    use super::*;

    #[test]
    fn every_instruction_set_chooses_as_the_reference_does() {
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        let mut state = 3u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32
        };
        for n in [0, 1, 15, 16, 17, 100, 1000, 5000] {
            for spread in [1, 3, 700, u32::MAX] {
                let mut scores: Vec<u32> = (0..n).map(|_| next() % spread).collect();
                scores.extend([u32::MAX, 0, u32::MAX]);
                for k in [0, 1, 2, 5, 16, n / 2, n, n + 2, n + 3, 2 * n] {
                    for first in [0, 1, 16, 20] {
                        topk::select(&scores, first, k, &mut expected);
                        for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
                            select(isa, &scores, first, k, &mut got);
                            assert_eq!(got, expected, "{isa}: {k} of {scores:?} from {first}");
                        }
                    }
                }
            }
        }
    }
}
