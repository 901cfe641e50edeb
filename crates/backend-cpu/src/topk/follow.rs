//! Scores that places have by those before them: what follows a place that fits is chosen with it.

#[cfg(target_arch = "x86_64")]
use std::{arch::x86_64::*, cell::Cell};

#[cfg(target_arch = "x86_64")]
use nuthatch_backend::Best;
use nuthatch_backend::topk::N_FOLLOWERS;

#[cfg(target_arch = "x86_64")]
use super::select::{kth, lanes, load, store};
use crate::isa::Isa;
use crate::versions::versions;

/// See [`nuthatch_backend::topk::follow`]. What is the best of a place and of the one before it, is the
/// best of four with that of two places before, and so on: three steps for seven places.
pub(super) fn follow(isa: Isa, scores: &[u32], fade: u32, out: &mut [u32]) {
    const { assert!(N_FOLLOWERS == 7, "1 + 2 + 4 places") };
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { follow_avx512(scores, fade, out) },
        _ => follow_steps(isa, scores, fade, out),
    }
}

versions! {
    fn follow_steps(scores: &[u32], fade: u32, out: &mut [u32]) = follow_inner;
}

#[inline(always)]
fn follow_inner<const FUSED: bool>(scores: &[u32], fade: u32, out: &mut [u32]) {
    const BLOCK: usize = 64;
    // The last places before the block, then the block, of each step.
    let (mut x, mut next) = ([0; BLOCK + N_FOLLOWERS], [0; BLOCK + N_FOLLOWERS]);
    for (scores, out) in scores.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        x[N_FOLLOWERS..][..scores.len()].copy_from_slice(scores);
        let kept = x;
        for step in [1, 2, 4] {
            let lost = fade.saturating_mul(step as u32);
            next = x;
            for (next, &before) in next[step..].iter_mut().zip(&x) {
                *next = (*next).max(before.max(lost) - lost);
            }
            x = next;
        }
        out.copy_from_slice(&next[N_FOLLOWERS..][..out.len()]);
        x[..N_FOLLOWERS].copy_from_slice(&kept[BLOCK..]);
    }
}

/// The same in one pass, in which all steps are in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn follow_avx512(scores: &[u32], fade: u32, out: &mut [u32]) {
    let mut following = Following::new(fade);
    let (blocks, rest) = scores.as_chunks::<16>();
    for (block, out) in blocks.iter().zip(out.chunks_mut(16)) {
        store(out, following.pass(load(block)));
    }
    let mut block = [0; 16];
    block[..rest.len()].copy_from_slice(rest);
    let four = following.pass(load(&block));
    store(&mut block, four);
    out[scores.len() - rest.len()..].copy_from_slice(&block[..rest.len()]);
}

/// What is known of the places before a block of sixteen.
#[cfg(target_arch = "x86_64")]
struct Following {
    /// What scores lose by one, two and four steps.
    lost: [u32; 3],
    /// Of the block before: its scores, and those after one step and after two.
    last: [__m512i; 3],
}

#[cfg(target_arch = "x86_64")]
impl Following {
    #[target_feature(enable = "avx512f")]
    fn new(fade: u32) -> Self {
        let lost = [1, 2, 4].map(|step| fade.saturating_mul(step));
        Following { lost, last: [_mm512_setzero_si512(); 3] }
    }

    /// Sixteen scores, and what places have by them.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn pass(&mut self, x: __m512i) -> __m512i {
        let lost = self.lost.map(|lost| _mm512_set1_epi32(lost.cast_signed()));
        let better = |x, before, lost| {
            _mm512_max_epu32(x, _mm512_sub_epi32(_mm512_max_epu32(before, lost), lost))
        };
        let one = better(x, _mm512_alignr_epi32::<15>(x, self.last[0]), lost[0]);
        let two = better(one, _mm512_alignr_epi32::<14>(one, self.last[1]), lost[1]);
        let four = better(two, _mm512_alignr_epi32::<12>(two, self.last[2]), lost[2]);
        self.last = [x, one, two];
        four
    }

    /// Sixteen scores that are not looked at, nor are those before them.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn pass_by(&mut self, x: __m512i) {
        self.last = [x; 3];
    }

    /// [`combine`](super::numbers::combine) and what follows from it; the first `n_none` places count nothing.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn combine(&mut self, rows: &[f32], factors: &[f32], n_none: usize, out: &mut [u32]) {
        let n = out.len();
        let whole = n / 64 * 64;
        for at in (0..whole).step_by(64) {
            let sums = sums::<4>(rows, factors, (n, at));
            for (i, x) in sums.into_iter().enumerate() {
                let x = self.pass(after(x, n_none.saturating_sub(at + 16 * i)));
                store(&mut out[at + 16 * i..], x);
            }
        }
        for at in (whole..n).step_by(16) {
            let [x] = sums::<1>(rows, factors, (n, at));
            let mut block = [0; 16];
            store(&mut block, self.pass(after(x, n_none.saturating_sub(at))));
            let out = &mut out[at..n.min(at + 16)];
            out.copy_from_slice(&block[..out.len()]);
        }
    }
}

/// Writes what follows from sums of pieces, and returns of how many places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(super) fn combine_following<'a>(
    pieces: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    best: Best,
    scores: &mut [u32],
) -> usize {
    let (mut following, mut place) = (Following::new(best.fade), 0);
    for (rows, factors) in pieces {
        let n = rows.len() / factors.len();
        let n_none = (best.first as usize).saturating_sub(place);
        following.combine(rows, factors, n_none, &mut scores[place..place + n]);
        place += n;
    }
    place
}

/// Blocks of sixteen of a sample, about, and at most.
#[cfg(target_arch = "x86_64")]
const SAMPLE: (usize, usize) = (32, 48);

/// A score that is probably reached by `k` of many and by not many more, from blocks of what [`combine_following`]
/// would write; nothing where that is not known.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(super) fn probable_floor<'a>(
    isa: Isa,
    pieces: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    best: Best,
    n_all: usize,
) -> Option<u32> {
    let stride = n_all / (16 * SAMPLE.0);
    let mut sample = [0; 16 * SAMPLE.1];
    let (mut n_blocks, mut place, mut next) = (0, 0, 16);
    for (rows, factors) in pieces.take(if stride < 2 { 0 } else { usize::MAX }) {
        let n = rows.len() / factors.len();
        let n_none = (best.first as usize).saturating_sub(place);
        while next + 16 <= place + n && n_blocks < SAMPLE.1 {
            let at = next - place;
            next += 16 * stride;
            // What comes before a piece is in another.
            if at >= 16 {
                let mut following = Following::new(best.fade);
                let [before] = sums::<1>(rows, factors, (n, at - 16));
                following.pass(after(before, n_none.saturating_sub(at - 16)));
                let [x] = sums::<1>(rows, factors, (n, at));
                let x = following.pass(after(x, n_none.saturating_sub(at)));
                store(&mut sample[16 * n_blocks..], x);
                n_blocks += 1;
            }
        }
        place += n;
    }
    // As many as there should be among them, and eight standard deviations: what follows a place is near to it.
    let mean = (best.k * 16 * n_blocks) as f32 / n_all as f32;
    let rank = (mean + 8.0 * mean.sqrt() + 2.0) as usize;
    (rank < 16 * n_blocks).then(|| kth(isa, &sample[..16 * n_blocks], rank).0)
}

/// Writes the places that reach `floor` of those that [`combine_following`] would write, and their scores, and
/// returns how many there are. There is room for all, and for sixteen more.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
pub(super) fn gather_following<'a>(
    pieces: impl Iterator<Item = (&'a [f32], &'a [f32])>,
    (best, floor): (Best, u32),
    (places, scores): (&mut [u32], &mut [u32]),
) -> usize {
    let (mut following, least) =
        (Following::new(best.fade), _mm512_set1_epi32(floor.cast_signed()));
    // Whether a place of the block before reaches it.
    let (mut n_found, mut place, any_before) = (0, 0, Cell::new(0));
    for (rows, factors) in pieces {
        let n = rows.len() / factors.len();
        let n_none = (best.first as usize).saturating_sub(place);
        let mut write = |x: __m512i, at: usize| {
            let n_not = n_none.saturating_sub(at).min(16);
            let x = after(x, n_not);
            let any = _mm512_cmpge_epu32_mask(x, least);
            if any | any_before.replace(any) == 0 {
                // Nothing follows from places that do not reach the floor.
                return following.pass_by(x);
            }
            let x = following.pass(x);
            let counts = (0xffff_u32 >> (16 - 16.min(n - at))) & (0xffff << n_not);
            let mask = _mm512_mask_cmpge_epu32_mask(counts as u16, x, least);
            let at = _mm512_add_epi32(_mm512_set1_epi32((place + at) as i32), lanes());
            store(&mut places[n_found..], _mm512_maskz_compress_epi32(mask, at));
            store(&mut scores[n_found..], _mm512_maskz_compress_epi32(mask, x));
            n_found += mask.count_ones() as usize;
        };
        let whole = n / 64 * 64;
        for at in (0..whole).step_by(64) {
            let [a, b, c, d] = sums::<4>(rows, factors, (n, at));
            let most = _mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d));
            // Mostly there is none among them.
            if any_before.get() == 0 && _mm512_cmpge_epu32_mask(most, least) == 0 {
                write(d, at + 48);
                continue;
            }
            for (i, x) in [a, b, c, d].into_iter().enumerate() {
                write(x, at + 16 * i);
            }
        }
        for at in (whole..n).step_by(16) {
            let [x] = sums::<1>(rows, factors, (n, at));
            write(x, at);
        }
        place += n;
    }
    n_found
}

/// Sums of the rows of `[group][n]` from place `at` on, each times its factor, as [`combine`](super::numbers::combine) has
/// them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn sums<const N: usize>(rows: &[f32], factors: &[f32], (n, at): (usize, usize)) -> [__m512i; N] {
    assert!(at + 16 * (N - 1) < n && rows.len() == n * factors.len());
    let mask = if n - at < 16 { (1 << (n - at)) - 1 } else { u16::MAX };
    let mut sums = [_mm512_setzero_ps(); N];
    for (row, &factor) in factors.iter().enumerate() {
        for (i, sum) in sums.iter_mut().enumerate() {
            #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
            // SAFETY: the row has as many numbers from here on as the mask has bits: only a single block may
            // be cut (all callers).
            let x =
                unsafe { _mm512_maskz_loadu_ps(mask, rows.as_ptr().add(row * n + at + 16 * i)) };
            let next = _mm512_fmadd_ps(x, _mm512_set1_ps(factor), *sum);
            // What is no number is worth nothing.
            *sum = _mm512_max_ps(next, _mm512_setzero_ps());
        }
    }
    sums.map(|sum| _mm512_castps_si512(sum))
}

/// Without the first `n` of sixteen.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn after(x: __m512i, n: usize) -> __m512i {
    if n == 0 { x } else { _mm512_maskz_mov_epi32((0xffff_u32 << n.min(16)) as u16, x) }
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::{Best, topk};

    use super::super::numbers::combine;
    use super::super::select::select_combined;
    use super::*;

    #[test]
    fn sums_of_pieces_are_chosen_from_as_scores_are() {
        let mut state = 5u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        let many = vec![2048, 2048, 2048, 1899];
        for (sizes, group) in
            [(vec![64, 128, 30], 3), (vec![2048, 77], 1), (vec![5], 2), (many, 3), (vec![4096], 1)]
        {
            let mut pieces = sizes.iter().map(|n| {
                let mut rows: Vec<f32> = (0..n * group).map(|_| next().powi(9)).collect();
                rows.iter_mut().step_by(13).for_each(|x| *x = f32::NAN);
                (rows, (0..group).map(|_| next()).collect::<Vec<f32>>())
            });
            let pieces: Vec<_> = pieces.by_ref().collect();
            let pieces = || pieces.iter().map(|(rows, factors)| (&rows[..], &factors[..]));
            let n: usize = sizes.iter().sum();
            for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
                let mut scores = vec![7; n];
                let mut place = 0;
                for (rows, factors) in pieces() {
                    let n = rows.len() / group;
                    combine(isa, rows, factors, &mut scores[place..place + n]);
                    place += n;
                }
                let few =
                    [(0, 9, 0), (3, 20, 1 << 23), (40, 50, 99), (16, n, 1), (16, n / 25, 1 << 23)];
                for (first, k, fade) in few {
                    let best = Best { first, k, fade };
                    topk::select(&scores, best, &mut expected);
                    select_combined(isa, pieces(), best, &mut vec![8; n], &mut got);
                    assert_eq!(got, expected, "{isa}: {best:?} of {sizes:?}");
                }
            }
        }
    }
}
