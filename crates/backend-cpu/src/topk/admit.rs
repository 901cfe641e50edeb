//! Working sets, sixteen members at a time.

use nuthatch_backend::WorkingSet;

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use {
    super::select::{count, span},
    nuthatch_backend::AGE_MAX,
    std::arch::x86_64::*,
    std::cell::RefCell,
    std::ops::Range,
};

/// See [`WorkingSet::admit`].
pub(crate) fn admit(isa: Isa, set: &mut WorkingSet, wanted: &[u32], capacity: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { vectors(isa, set, wanted, capacity) },
        _ => set.admit(wanted, capacity),
    }
}

#[cfg(target_arch = "x86_64")]
thread_local! {
    static MISSING: RefCell<Missing> = RefCell::default();
}

/// What is wanted and not there, ascending, and how many members are before each.
#[cfg(target_arch = "x86_64")]
#[derive(Default)]
struct Missing {
    places: Vec<u32>,
    before: Vec<u32>,
}

/// Mostly a selection is nearly the one before: members that are wanted are found where they are, and the few
/// that are missing are put between them at the end.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn vectors(isa: Isa, set: &mut WorkingSet, wanted: &[u32], capacity: usize) -> usize {
    set.now += 1;
    MISSING.with_borrow_mut(|Missing { places, before }| {
        let room = places.len().max(wanted.len() + 1);
        places.resize(room, 0);
        before.resize(room, 0);
        let n_missing = mark(set, wanted, (places, before));
        let (places, before) = (&places[..n_missing], &mut before[..n_missing]);
        let n_all = set.members.len() + n_missing;
        let n_excess = n_all.saturating_sub(capacity.max(wanted.len()));
        if n_excess > 0 {
            drop_oldest(isa, set, n_excess, before);
        }
        insert(set, (places, before));
        n_missing
    })
}

/// Uses the members that are wanted, writes what is missing and behind how many, and returns how many that are.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn mark(
    set: &mut WorkingSet,
    wanted: &[u32],
    (missing, before): (&mut [u32], &mut [u32]),
) -> usize {
    let now = _mm512_set1_epi32(set.now.cast_signed());
    let oldest = _mm512_set1_epi32(set.now.saturating_sub(AGE_MAX).cast_signed());
    let (mut n_missing, mut at, mut start) = (0, 0, 0);
    for (members, used) in set.members.chunks(16).zip(set.used.chunks_mut(16)) {
        let (mask, last) = (first_lanes(members.len()), members[members.len() - 1]);
        let here = load(members);
        let mut found = 0;
        while at < wanted.len() && wanted[at] <= last {
            let place = _mm512_set1_epi32(wanted[at].cast_signed());
            let equal = _mm512_mask_cmpeq_epi32_mask(mask, here, place);
            let less = _mm512_mask_cmplt_epu32_mask(mask, here, place);
            // Written always and counted if it counts: there is no branch to mispredict.
            (missing[n_missing], before[n_missing]) = (wanted[at], start + less.count_ones());
            n_missing += usize::from(equal == 0);
            found |= equal;
            at += 1;
        }
        let times = _mm512_max_epu32(load(used), oldest);
        store(used, _mm512_mask_mov_epi32(times, found, now));
        start += 16;
    }
    let (rest, all) = (&wanted[at..], n_missing + wanted.len() - at);
    missing[n_missing..all].copy_from_slice(rest);
    before[n_missing..all].fill(set.members.len() as u32);
    all
}

/// Drops the members that were not used for longest; of those that were last used at the same time, the first.
/// Of members up to some, of which `before` has the numbers, so many are left then.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn drop_oldest(isa: Isa, set: &mut WorkingSet, n_excess: usize, before: &mut [u32]) {
    let WorkingSet { members, used, now } = set;
    // The last time of which anything goes, found by halving.
    let (mut low, mut high, mut n_older) = (span(isa, used).0, *now, 0);
    while low < high {
        let middle = low.midpoint(high);
        let n = used.len() - count(isa, used, middle + 1);
        if n >= n_excess {
            high = middle;
        } else {
            (low, n_older) = (middle + 1, n);
        }
    }
    let last = _mm512_set1_epi32(low.cast_signed());
    let (mut n_of_last, mut n_kept) = ((n_excess - n_older) as u32, 0);
    let mut before = before.iter_mut().peekable();
    for start in (0..members.len()).step_by(16) {
        let mask = first_lanes(members.len() - start);
        let (places, times) = (load(&members[start..]), load(&used[start..]));
        let mut equal = _mm512_mask_cmpeq_epi32_mask(mask, times, last);
        let n_dropped = equal.count_ones().min(n_of_last);
        n_of_last -= n_dropped;
        (0..n_dropped).for_each(|_| equal &= equal - 1);
        let kept = equal | _mm512_mask_cmpgt_epu32_mask(mask, times, last);
        while let Some(n) = before.next_if(|n| (**n as usize) < start + 16) {
            *n = n_kept as u32 + (kept & first_lanes(*n as usize - start)).count_ones();
        }
        // What is overwritten was read: no more are kept than there were.
        let to = n_kept..n_kept + kept.count_ones() as usize;
        store(&mut members[to.clone()], _mm512_maskz_compress_epi32(kept, places));
        store(&mut used[to.clone()], _mm512_maskz_compress_epi32(kept, times));
        n_kept = to.end;
    }
    before.for_each(|n| *n = n_kept as u32);
    members.truncate(n_kept);
    used.truncate(n_kept);
}

/// Puts places that are no members, ascending, each behind so many of those that are.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn insert(set: &mut WorkingSet, (places, before): (&[u32], &[u32])) {
    let WorkingSet { members, used, now } = set;
    let (mut n_left, mut end) = (members.len(), members.len() + places.len());
    members.resize(end, 0);
    used.resize(end, *now);
    for (&place, &before) in places.iter().zip(before).rev() {
        let before = before as usize;
        let by = end - n_left;
        move_up(members, before..n_left, by);
        move_up(used, before..n_left, by);
        (n_left, end) = (before, before + by - 1);
        (members[end], used[end]) = (place, *now);
    }
}

/// Moves some numbers up, the last first: they are too few to call for it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn move_up(values: &mut [u32], from: Range<usize>, by: usize) {
    let mut end = from.end;
    while end > from.start {
        let start = end.saturating_sub(16).max(from.start);
        let x = load(&values[start..end]);
        store(&mut values[start + by..end + by], x);
        end = start;
    }
}

/// A mask of up to sixteen lanes.
#[cfg(target_arch = "x86_64")]
fn first_lanes(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// The first sixteen, or as many as there are.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn load(source: &[u32]) -> __m512i {
    #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
    // SAFETY: lanes that the mask leaves out are not read.
    unsafe {
        _mm512_maskz_loadu_epi32(first_lanes(source.len()), source.as_ptr().cast())
    }
}

/// Writes as many lanes as there is room for, sixteen at most.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn store(target: &mut [u32], x: __m512i) {
    #[expect(unsafe_code, reason = "vector stores write through raw pointers")]
    // SAFETY: lanes that the mask leaves out are not written.
    unsafe {
        _mm512_mask_storeu_epi32(target.as_mut_ptr().cast(), first_lanes(target.len()), x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_keeps_what_the_reference_does() {
        let mut state = 3u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
            for (n_places, share, capacity) in
                [(40, 3, 0), (300, 8, 70), (3000, 20, 400), (9, 1, 5)]
            {
                let (mut set, mut expected) = (WorkingSet::default(), WorkingSet::default());
                for step in 0..60 {
                    // Later selections are mostly the one before.
                    let first = if step % 7 == 0 { next(n_places) } else { 0 };
                    let wanted: Vec<u32> = (0..n_places)
                        .filter(|place| next(share) == 0 || (place + first) % (2 * share) == 0)
                        .map(|place| place as u32)
                        .collect();
                    let n_missing = admit(isa, &mut set, &wanted, capacity);
                    assert_eq!(n_missing, expected.admit(&wanted, capacity), "{isa}");
                    assert_eq!(set, expected, "{isa}, step {step}");
                }
                (set.now, expected.now) = (5000, 5000);
                assert_eq!(admit(isa, &mut set, &[1], capacity), expected.admit(&[1], capacity));
                assert_eq!(set, expected, "{isa}: what was used long ago");
            }
        }
    }
}
