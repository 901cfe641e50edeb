//! Working sets, sixteen members at a time.

use nuthatch_backend::WorkingSet;

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use {super::select::count, nuthatch_backend::AGE_MAX, std::arch::x86_64::*, std::cell::RefCell};

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
    static ROOM: RefCell<Room> = RefCell::default();
}

/// What is wanted and not there, ascending, and how many members are before each; and the next set, with room for
/// sixteen more, because vectors are written before it is known how much of them counts.
#[cfg(target_arch = "x86_64")]
#[derive(Default)]
struct Room {
    missing: Vec<u32>,
    before: Vec<u32>,
    members: Vec<u32>,
    used: Vec<u32>,
}

/// Who goes: what was last used before a time, and the first few of those that were just then.
#[cfg(target_arch = "x86_64")]
#[derive(Default)]
struct Leaving {
    last: u32,
    n_of_last: u32,
}

/// Mostly a selection is nearly the one before: members that are wanted are found where they are, and then the set is
/// written once, without those that go and with the few that are missing between the others.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn vectors(isa: Isa, set: &mut WorkingSet, wanted: &[u32], capacity: usize) -> usize {
    set.now += 1;
    ROOM.with_borrow_mut(|Room { missing, before, members, used }| {
        let room = missing.len().max(wanted.len() + 1);
        missing.resize(room, 0);
        before.resize(room, 0);
        let (n_missing, least) = mark(set, wanted, (missing, before));
        let n_all = set.members.len() + n_missing;
        let n_excess = n_all.saturating_sub(capacity.max(wanted.len()));
        if n_all + 16 > members.len() {
            members.resize(n_all + 16, 0);
            used.resize(n_all + 16, 0);
        }
        let leaving =
            if n_excess > 0 { oldest(isa, set, n_excess, least) } else { Leaving::default() };
        if n_missing + n_excess > 0 {
            let missing = (&missing[..n_missing], &before[..n_missing]);
            let n = rebuild(set, missing, leaving, (members, used));
            set.members.clear();
            set.members.extend_from_slice(&members[..n]);
            set.used.clear();
            set.used.extend_from_slice(&used[..n]);
        }
        n_missing
    })
}

/// Uses the members that are wanted, writes what is missing and behind how many, and returns how many that are, and
/// when the one was used that was not for longest.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn mark(
    set: &mut WorkingSet,
    wanted: &[u32],
    (missing, before): (&mut [u32], &mut [u32]),
) -> (usize, u32) {
    let now = _mm512_set1_epi32(set.now.cast_signed());
    let oldest = _mm512_set1_epi32(set.now.saturating_sub(AGE_MAX).cast_signed());
    let (mut n_missing, mut at, mut start, mut least) = (0, 0, 0, now);
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
        let times = _mm512_mask_mov_epi32(_mm512_max_epu32(load(used), oldest), found, now);
        least = _mm512_mask_min_epu32(least, mask, least, times);
        store(used, times);
        start += 16;
    }
    let (rest, all) = (&wanted[at..], n_missing + wanted.len() - at);
    missing[n_missing..all].copy_from_slice(rest);
    before[n_missing..all].fill(set.members.len() as u32);
    (all, _mm512_reduce_min_epu32(least))
}

/// The members that were not used for longest; of those that were last used at the same time, the first. `low` is
/// the least time.
#[cfg(target_arch = "x86_64")]
fn oldest(isa: Isa, set: &WorkingSet, n_excess: usize, mut low: u32) -> Leaving {
    // The last time of which anything goes, found by halving.
    let (mut high, mut n_older) = (set.now, 0);
    while low < high {
        let middle = low.midpoint(high);
        let n = set.used.len() - count(isa, &set.used, middle + 1);
        if n >= n_excess {
            high = middle;
        } else {
            (low, n_older) = (middle + 1, n);
        }
    }
    Leaving { last: low, n_of_last: (n_excess - n_older) as u32 }
}

/// Writes who stays, and places that are no members, ascending, each behind so many of those that are; returns how
/// many that are together.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
fn rebuild(
    set: &WorkingSet,
    (missing, before): (&[u32], &[u32]),
    Leaving { last, mut n_of_last }: Leaving,
    (members, used): (&mut [u32], &mut [u32]),
) -> usize {
    let last = _mm512_set1_epi32(last.cast_signed());
    let mut missing = missing.iter().zip(before).peekable();
    let mut n = 0;
    for start in (0..set.members.len()).step_by(16) {
        let mask = first_lanes(set.members.len() - start);
        let (places, times) = (load(&set.members[start..]), load(&set.used[start..]));
        let mut equal = _mm512_mask_cmpeq_epi32_mask(mask, times, last);
        let n_gone = equal.count_ones().min(n_of_last);
        n_of_last -= n_gone;
        (0..n_gone).for_each(|_| equal &= equal - 1);
        let mut left = equal | _mm512_mask_cmpgt_epu32_mask(mask, times, last);
        // With a place behind them, which may be written over.
        let mut write = |mask: __mmask16, place: u32, n: usize| {
            store(&mut members[n..n + 16], _mm512_maskz_compress_epi32(mask, places));
            store(&mut used[n..n + 16], _mm512_maskz_compress_epi32(mask, times));
            let n = n + mask.count_ones() as usize;
            (members[n], used[n]) = (place, set.now);
            n
        };
        while let Some((&place, &n_before)) =
            missing.next_if(|next| (*next.1 as usize) < start + 16)
        {
            let first = left & first_lanes(n_before as usize - start);
            left ^= first;
            n = write(first, place, n) + 1;
        }
        n = write(left, 0, n);
    }
    for (&place, _) in missing {
        (members[n], used[n]) = (place, set.now);
        n += 1;
    }
    n
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
