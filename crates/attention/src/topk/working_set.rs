//! Rows that stay, by recency.

/// A set of bounded size whose least recently used members go first.
///
/// Members are places, or pages of them, kept in ascending order: rows of a working set are
/// attended in that order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Ascending.
    members: Vec<u32>,
    /// When each was last used.
    used: Vec<u32>,
    now: u32,
    /// Memory of the next merge.
    spare: (Vec<u32>, Vec<u32>),
}

impl WorkingSet {
    /// The members, ascending.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.members.clear();
        self.used.clear();
        self.now = 0;
    }

    /// Uses `wanted`, ascending and each once, and drops what was not used for longest until at most
    /// `capacity` are left, but never what is wanted now; of members that were used last at the
    /// same time, the first go. Returns how many of `wanted` were not there.
    ///
    /// This is done for each head at nearly each step, so no loop has a branch that depends on the
    /// members: half of them would be mispredicted.
    pub fn admit(&mut self, wanted: &[u32], capacity: usize) -> usize {
        self.now += 1;
        let (members, used) = &mut self.spare;
        let (n_old, n_wanted) = (self.members.len(), wanted.len());
        members.resize(n_old + n_wanted, 0);
        used.resize(n_old + n_wanted, 0);
        let (mut old, mut new, mut n) = (0, 0, 0);
        while old < n_old && new < n_wanted {
            let (a, b) = (self.members[old], wanted[new]);
            (members[n], used[n]) = (a.min(b), if b <= a { self.now } else { self.used[old] });
            old += usize::from(a <= b);
            new += usize::from(b <= a);
            n += 1;
        }
        let (n_more_old, n_more_new) = (n_old - old, n_wanted - new);
        members[n..n + n_more_old].copy_from_slice(&self.members[old..]);
        used[n..n + n_more_old].copy_from_slice(&self.used[old..]);
        members[n..n + n_more_new].copy_from_slice(&wanted[new..]);
        used[n..n + n_more_new].fill(self.now);
        n += n_more_old + n_more_new;
        members.truncate(n);
        used.truncate(n);
        std::mem::swap(&mut self.members, members);
        std::mem::swap(&mut self.used, used);
        self.shrink(capacity.max(n_wanted));
        // What is in both was counted once.
        n - n_old
    }

    fn shrink(&mut self, capacity: usize) {
        let n = self.members.len();
        let Some(n_excess) = n.checked_sub(capacity).filter(|&excess| excess > 0) else { return };
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
        for i in 0..n {
            let (member, time) = (self.members[i], self.used[i]);
            let goes = time == low && n_of_low > 0;
            n_of_low -= usize::from(goes);
            (self.members[kept], self.used[kept]) = (member, time);
            kept += usize::from(time >= low && !goes);
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
        assert_eq!(set.admit(&[1, 5, u32::MAX], 3), 3);
        assert_eq!(set.admit(&[2, 5, 9], 3), 2);
        assert_eq!(set.members(), [2, 5, 9]);
        set.clear();
        assert_eq!(set.admit(&[2], 3), 1);
    }
}
