//! Rows that stay, by recency.

/// A set of bounded size whose least recently used members go first.
///
/// Members are places, or pages of them, kept in ascending order: rows of a working set are
/// attended in that order. Sets change for each head at nearly each step, so they are small in
/// memory, and no loop has a branch that depends on the members, of which half would be
/// mispredicted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Ascending.
    members: Vec<u32>,
    /// When each was last used.
    used: Vec<u32>,
    /// A bit for each place: whether it is a member.
    bits: Vec<u64>,
    now: u32,
    /// Memory of the next change.
    spare: (Vec<u32>, Vec<u32>, Vec<u64>),
}

/// What was used longer ago than this counts as used this long ago; `AGE_MAX` of the GPU's kernel.
const AGE_MAX: u32 = 2047;

impl WorkingSet {
    /// The members, ascending.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.members.clear();
        self.used.clear();
        self.bits.clear();
        self.now = 0;
    }

    /// Uses `wanted`, ascending and each once, and drops what was not used for longest until at most
    /// `capacity` are left, but never what is wanted now; of members that were used last at the
    /// same time, the first go. Returns how many of `wanted` were not there.
    pub fn admit(&mut self, wanted: &[u32], capacity: usize) -> usize {
        self.now += 1;
        let n_words = wanted.last().map_or(0, |&last| last as usize / 64 + 1).max(self.bits.len());
        self.bits.resize(n_words, 0);
        let (members, used, fresh) = &mut self.spare;
        fresh.clear();
        fresh.resize(n_words, 0);
        for &place in wanted {
            fresh[place as usize / 64] |= 1 << (place % 64);
        }
        let missing = fresh.iter().zip(&self.bits).map(|(new, old)| (new & !old).count_ones());
        let n_missing = missing.sum::<u32>() as usize;
        let n = self.members.len() + n_missing;
        members.clear();
        used.clear();
        if capacity <= wanted.len() {
            members.extend_from_slice(wanted);
            used.resize(wanted.len(), self.now);
            std::mem::swap(&mut self.bits, fresh);
        } else {
            // Written by place: a push would ask each time whether there is room.
            members.resize(n, 0);
            used.resize(n, 0);
            // Read, but not taken, after the last member.
            self.used.push(0);
            let oldest = self.now.saturating_sub(AGE_MAX);
            let (mut i, mut i_old) = (0, 0);
            for ((start, old), &new) in (0..).step_by(64).zip(&mut self.bits).zip(&*fresh) {
                let mut rest = *old | new;
                while rest != 0 {
                    let bit = rest.trailing_zeros();
                    rest &= rest - 1;
                    members[i] = start + bit;
                    let before = self.used[i_old].max(oldest);
                    used[i] = if new >> bit & 1 == 1 { self.now } else { before };
                    i += 1;
                    i_old += (*old >> bit & 1) as usize;
                }
                *old |= new;
            }
        }
        std::mem::swap(&mut self.members, members);
        std::mem::swap(&mut self.used, used);
        if let Some(n_excess) = self.members.len().checked_sub(capacity.max(wanted.len())) {
            self.drop_oldest(n_excess);
        }
        n_missing
    }

    fn drop_oldest(&mut self, n_excess: usize) {
        if n_excess == 0 {
            return;
        }
        // The last time of which anything goes, found by halving: at least `n_excess` members were
        // last used then or earlier.
        let count = |time: u32| self.used.iter().map(|&used| u32::from(used <= time)).sum::<u32>();
        let (mut low, mut high) = (0, self.now);
        while low < high {
            let middle = low.midpoint(high);
            if count(middle) as usize >= n_excess {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let n_older = if low == 0 { 0 } else { count(low - 1) as usize };
        let mut n_of_low = n_excess - n_older;
        let mut kept = 0;
        for i in 0..self.members.len() {
            let (place, time) = (self.members[i], self.used[i]);
            let is_last = time == low && n_of_low > 0;
            n_of_low -= usize::from(is_last);
            let goes = time < low || is_last;
            self.bits[place as usize / 64] &= !(u64::from(goes) << (place % 64));
            (self.members[kept], self.used[kept]) = (place, time);
            kept += usize::from(!goes);
        }
        self.members.truncate(kept);
        self.used.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same, said plainly: `(last use, member)`.
    #[derive(Default)]
    struct Naive(Vec<(u32, u32)>);

    impl Naive {
        fn admit(&mut self, now: u32, wanted: &[u32], capacity: usize) -> usize {
            let mut n_missing = 0;
            for &member in wanted {
                match self.0.iter_mut().find(|(_, m)| *m == member) {
                    Some((used, _)) => *used = now,
                    None => {
                        n_missing += 1;
                        self.0.push((now, member));
                    }
                }
            }
            self.0.sort_unstable();
            let n_excess = self.0.len().saturating_sub(capacity.max(wanted.len()));
            self.0.drain(..n_excess);
            n_missing
        }

        fn members(&self) -> Vec<u32> {
            let mut members: Vec<u32> = self.0.iter().map(|&(_, member)| member).collect();
            members.sort_unstable();
            members
        }
    }

    proptest! {
        #[test]
        fn the_least_recently_used_go_first(
            steps in prop::collection::vec(
                (prop::collection::btree_set(0u32..40, 0..12), 0usize..25), 1..30)
        ) {
            let (mut set, mut naive) = (WorkingSet::default(), Naive::default());
            for (now, (wanted, capacity)) in (1..).zip(steps) {
                let wanted: Vec<u32> = wanted.into_iter().collect();
                let before = set.members().to_vec();
                let n_missing = set.admit(&wanted, capacity);
                prop_assert_eq!(n_missing, naive.admit(now, &wanted, capacity));
                prop_assert_eq!(set.members(), naive.members());
                prop_assert!(wanted.iter().all(|member| set.members().contains(member)));
                let new = wanted.iter().filter(|member| !before.contains(member)).count();
                prop_assert_eq!(n_missing, new);
            }
        }
    }

    #[test]
    fn a_set_of_one_selection_is_the_selection() {
        let mut set = WorkingSet::default();
        assert_eq!(set.admit(&[1, 5, 700], 3), 3);
        assert_eq!(set.admit(&[2, 5, 9], 3), 2);
        assert_eq!(set.members(), [2, 5, 9]);
        set.clear();
        assert_eq!(set.admit(&[2], 3), 1);
    }
}
