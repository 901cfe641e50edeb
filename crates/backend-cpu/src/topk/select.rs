//! The best places: a sample says which scores may be among them, and of those the threshold is found
//! by halving. There is no sort, and equal scores go to the first.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::cell::RefCell;

use nuthatch_backend::Best;

use super::follow::follow;
#[cfg(target_arch = "x86_64")]
use super::follow::{combine_following, gather_following, probable_floor as floor_of_pieces};
use super::numbers::combine;
use crate::isa::Isa;
use crate::mem::lines;
use crate::versions::versions;

thread_local! {
    /// Places that may be among the best, and their scores. One thread's are near to it, as those of
    /// each head would not be.
    static CANDIDATES: RefCell<(Vec<u32>, Vec<u32>)> = RefCell::default();
    /// Scores that places have by those before them.
    static FOLLOWED: RefCell<Vec<u32>> = RefCell::default();
}

/// Scores of a sample.
const SAMPLE: usize = 512;

/// See [`nuthatch_backend::topk::select`].
pub(crate) fn select(isa: Isa, scores: &[u32], best: Best, chosen: &mut Vec<u32>) {
    chosen.clear();
    let Best { first, k, fade } = best;
    let middle = &scores[(first as usize).min(scores.len())..];
    if k >= middle.len() {
        chosen.extend(first..first + middle.len() as u32);
        return;
    }
    if k == 0 {
        return;
    }
    if fade == 0 {
        return select_middle(isa, middle, (first, k), chosen);
    }
    FOLLOWED.with_borrow_mut(|followed| {
        let followed = lines(followed, middle.len());
        follow(isa, middle, fade, followed);
        select_middle(isa, followed, (first, k), chosen);
    });
}

/// The same of scores that are sums of rows, each times its factor, by pieces with rows of their own; the
/// sums go to `scores`, or what follows from them does. If there are no pieces, the scores are there.
pub(super) fn select_combined<'a>(
    isa: Isa,
    pieces: impl Iterator<Item = (&'a [f32], &'a [f32])> + Clone,
    best: Best,
    scores: &mut [u32],
    chosen: &mut Vec<u32>,
) {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Amx)
        && best.fade > 0
        && (1..scores.len().saturating_sub(best.first as usize)).contains(&best.k)
    {
        // What is probably too little is not written.
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        let floor = unsafe { floor_of_pieces(isa, pieces.clone(), best, scores.len()) };
        let is_chosen = floor.is_some_and(|floor| {
            CANDIDATES.with_borrow_mut(|(places, left)| {
                let both = room(places, left, scores.len());
                #[expect(unsafe_code, reason = "target features")]
                // SAFETY: as above.
                let n = unsafe { gather_following(pieces.clone(), (best, floor), both) };
                if n >= best.k {
                    choose(isa, (places, &left[..n]), best.k, chosen);
                }
                n >= best.k
            })
        });
        if is_chosen {
            return;
        }
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: as above.
        let n = unsafe { combine_following(pieces, best, scores) };
        if n == 0 {
            return select(isa, scores, best, chosen);
        }
        let middle = &scores[best.first as usize..];
        return select_middle(isa, middle, (best.first, best.k), chosen);
    }
    let mut place = 0;
    for (rows, factors) in pieces {
        let n = rows.len() / factors.len();
        combine(isa, rows, factors, &mut scores[place..place + n]);
        place += n;
    }
    select(isa, scores, best, chosen);
}

/// The `k` best of the scores, of which there are more; they are of the places from `first` on.
fn select_middle(isa: Isa, middle: &[u32], (first, k): (u32, usize), chosen: &mut Vec<u32>) {
    let floor = probable_floor(isa, middle, k);
    CANDIDATES.with_borrow_mut(|(places, left)| {
        let (places, left) = room(places, left, middle.len());
        let mut n = gather(isa, middle, (first, floor), places, left);
        if n < k {
            // The sample was not like the rest.
            n = gather(isa, middle, (first, 0), places, left);
        }
        choose(isa, (places, &left[..n]), k, chosen);
    });
}

/// Room for `n` places and their scores, and for sixteen more, because vectors are written before it is known how
/// much of them counts.
fn room<'a>(
    places: &'a mut Vec<u32>,
    scores: &'a mut Vec<u32>,
    n: usize,
) -> (&'a mut [u32], &'a mut [u32]) {
    if places.len() < n + 16 {
        places.resize(n + 16, 0);
        scores.resize(n + 16, 0);
    }
    (places, scores)
}

/// Writes the `k` best of places, of which there are so many.
fn choose(isa: Isa, (places, scores): (&mut [u32], &[u32]), k: usize, chosen: &mut Vec<u32>) {
    let (threshold, n_above) = kth(isa, scores, k);
    write(isa, scores, Choice { threshold, n_equal: k - n_above }, places);
    chosen.clear();
    chosen.extend_from_slice(&places[..k]);
}

/// A score that is probably reached by k of many, and by not many more.
fn probable_floor(isa: Isa, scores: &[u32], k: usize) -> u32 {
    let stride = scores.len() / SAMPLE;
    if stride < 2 {
        return 0;
    }
    let mut sample = [0; SAMPLE];
    for (sample, &score) in sample.iter_mut().zip(scores.iter().step_by(stride)) {
        *sample = score;
    }
    // As many as there should be among them, and four standard deviations.
    let mean = (k * SAMPLE) as f32 / scores.len() as f32;
    let rank = (mean + 4.0 * mean.sqrt() + 2.0) as usize;
    if rank < SAMPLE { kth(isa, &sample, rank).0 } else { 0 }
}

/// A number that no more than k scores are above and at least k reach, and how many are above it; k is from
/// 1 to the number of scores.
pub(super) fn kth(isa: Isa, scores: &[u32], k: usize) -> (u32, usize) {
    // At least k scores reach `low`, and `n_above`, fewer than k, are above `high`.
    let ((mut low, mut high), mut n_above) = (span(isa, scores), 0);
    while low < high {
        let half = low + (high - low).div_ceil(2);
        let n = count(isa, scores, half);
        if n == k {
            // Whatever the k-th largest is: those are the best.
            return (half - 1, k);
        }
        if n > k {
            low = half;
        } else {
            (high, n_above) = (half - 1, n);
        }
    }
    (low, n_above)
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
    pub(super) fn count(scores: &[u32], threshold: u32) -> usize = count_inner;
}

#[inline(always)]
fn count_inner<const FUSED: bool>(scores: &[u32], threshold: u32) -> usize {
    // Sums of 32 bits have as many lanes as the scores.
    let n: u32 = scores.iter().map(|&score| u32::from(score >= threshold)).sum();
    n as usize
}

/// Writes the places of the scores that reach `floor`, and the scores, and returns how many there are.
/// There is room for all, and for sixteen more.
fn gather(
    isa: Isa,
    scores: &[u32],
    (first, floor): (u32, u32),
    places: &mut [u32],
    left: &mut [u32],
) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { gather_avx512(scores, (first, floor), places, left) },
        _ => gather_plain(scores, (first, floor), places, left),
    }
}

fn gather_plain(
    scores: &[u32],
    (first, floor): (u32, u32),
    places: &mut [u32],
    left: &mut [u32],
) -> usize {
    let mut n = 0;
    for (place, &score) in (first..).zip(scores) {
        // Written always and counted if it counts: there is no branch to mispredict.
        (places[n], left[n]) = (place, score);
        n += usize::from(score >= floor);
    }
    n
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn gather_avx512(
    scores: &[u32],
    (first, floor): (u32, u32),
    places: &mut [u32],
    left: &mut [u32],
) -> usize {
    let (blocks, rest) = scores.as_chunks::<16>();
    let least = _mm512_set1_epi32(floor.cast_signed());
    let mut at = _mm512_add_epi32(_mm512_set1_epi32(first.cast_signed()), lanes());
    let mut n = 0;
    for block in blocks {
        let scores = load(block);
        let mask = _mm512_cmpge_epu32_mask(scores, least);
        store(&mut places[n..], _mm512_maskz_compress_epi32(mask, at));
        store(&mut left[n..], _mm512_maskz_compress_epi32(mask, scores));
        n += mask.count_ones() as usize;
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    let first = first + 16 * blocks.len() as u32;
    n + gather_plain(rest, (first, floor), &mut places[n..], &mut left[n..])
}

/// What is chosen: all above the threshold, and the first few that reach it.
#[derive(Clone, Copy)]
struct Choice {
    threshold: u32,
    n_equal: usize,
}

/// Moves the chosen ones of `places`, to which the scores belong, to the front.
fn write(isa: Isa, scores: &[u32], choice: Choice, places: &mut [u32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { write_avx512(scores, choice, places) },
        _ => write_plain(scores, choice, places, (0, 0)),
    }
}

/// Goes on with the scores of the places from the `at`-th on, when `n` were chosen.
fn write_plain(scores: &[u32], choice: Choice, places: &mut [u32], (at, mut n): (usize, usize)) {
    let mut n_equal = choice.n_equal;
    for (i, &score) in scores.iter().enumerate() {
        let is_equal = score == choice.threshold && n_equal > 0;
        n_equal -= usize::from(is_equal);
        places[n] = places[at + i];
        n += usize::from(score > choice.threshold || is_equal);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn write_avx512(scores: &[u32], mut choice: Choice, places: &mut [u32]) {
    let (blocks, rest) = scores.as_chunks::<16>();
    let threshold = _mm512_set1_epi32(choice.threshold.cast_signed());
    let mut n = 0;
    for (i, block) in blocks.iter().enumerate() {
        let scores = load(block);
        let above = _mm512_cmpgt_epu32_mask(scores, threshold);
        let mut equal = _mm512_cmpeq_epu32_mask(scores, threshold);
        while equal.count_ones() as usize > choice.n_equal {
            // Drops the last: of equal scores the first are chosen.
            equal &= !(1 << (15 - equal.leading_zeros()));
        }
        choice.n_equal -= equal.count_ones() as usize;
        let mask = above | equal;
        // What is overwritten was read: no more are chosen than there were.
        let (read, _) = places[16 * i..].as_chunks::<16>();
        let chosen = _mm512_maskz_compress_epi32(mask, load(&read[0]));
        store(&mut places[n..], chosen);
        n += mask.count_ones() as usize;
    }
    write_plain(rest, choice, places, (16 * blocks.len(), n));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn lanes() -> __m512i {
    _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load(block: &[u32; 16]) -> __m512i {
    #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
    // SAFETY: the block has sixteen numbers.
    unsafe {
        _mm512_loadu_si512(block.as_ptr().cast())
    }
}

/// Writes the first sixteen of `target`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn store(target: &mut [u32], x: __m512i) {
    let target = &mut target[..16];
    #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
    // SAFETY: there is room for sixteen.
    unsafe {
        _mm512_storeu_si512(target.as_mut_ptr().cast(), x);
    }
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
                    for (first, fade) in [(0, 0), (1, 1), (16, 0), (16, spread / 4), (20, 1 << 23)]
                    {
                        let best = Best { first, k, fade };
                        topk::select(&scores, best, &mut expected);
                        for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
                            select(isa, &scores, best, &mut got);
                            assert_eq!(got, expected, "{isa}: {best:?} of {scores:?}");
                        }
                    }
                }
            }
        }
    }
}
