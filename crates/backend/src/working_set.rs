//! Rows that stay, by recency.

/// A set of bounded size whose least recently used members go first.
///
/// Members are places, or pages of them, kept in ascending order: rows of a working set are
/// attended in that order. Sets change for each head at nearly each step and are far from the
/// processor then, so they are small and change where they are, and no loop has a branch that depends
/// on the members, of which half would be mispredicted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Ascending.
    pub members: Vec<u32>,
    /// When each was last used.
    pub used: Vec<u32>,
    /// How often something was admitted.
    pub now: u32,
}

/// What was used longer ago than this counts as used this long ago; `AGE_MAX` of the GPU's kernel.
pub const AGE_MAX: u32 = 2047;

impl WorkingSet {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.members.clear();
        self.used.clear();
        self.now = 0;
    }

    /// Uses `wanted`, ascending and each once, and drops what was not used for longest until at most
    /// `capacity` are left, but never what is wanted now; of members that were used last at the
    /// same time, the first go. Returns how many of `wanted` were not there.
    pub fn admit(&mut self, wanted: &[u32], capacity: usize) -> usize {
        self.now += 1;
        let n_before = self.members.len();
        self.merge(wanted);
        let n_missing = self.members.len() - n_before;
        let n_most = capacity.max(wanted.len());
        if self.members.len() > n_most {
            self.drop_oldest(self.members.len() - n_most);
        }
        n_missing
    }

    fn merge(&mut self, wanted: &[u32]) {
        let (now, oldest) = (self.now, self.now.saturating_sub(AGE_MAX));
        let (n_old, n_new) = (self.members.len(), wanted.len());
        // Members move back, so that the union has room before them: it never reaches what is not
        // merged yet.
        let end = n_old + n_new;
        self.members.resize(end, 0);
        self.used.resize(end, 0);
        self.members.copy_within(..n_old, n_new);
        self.used.copy_within(..n_old, n_new);
        let (members, used) = (&mut self.members[..end], &mut self.used[..end]);
        let (mut n, mut i, mut i_new) = (0, n_new, 0);
        while i < end && i_new < n_new {
            let (old, new) = (members[i], wanted[i_new]);
            let (is_old, is_new) = (old <= new, new <= old);
            members[n] = old.min(new);
            // Nothing is later than now, and a choice between the two would be a branch.
            used[n] = used[i].max(oldest).max(now * u32::from(is_new));
            i += usize::from(is_old);
            i_new += usize::from(is_new);
            n += 1;
        }
        while i < end {
            (members[n], used[n]) = (members[i], used[i].max(oldest));
            (n, i) = (n + 1, i + 1);
        }
        let rest = &wanted[i_new..];
        members[n..n + rest.len()].copy_from_slice(rest);
        used[n..n + rest.len()].fill(now);
        self.members.truncate(n + rest.len());
        self.used.truncate(n + rest.len());
    }

    fn drop_oldest(&mut self, n_excess: usize) {
        // The last time of which anything goes, found by halving: at least `n_excess` members were
        // last used then or earlier.
        let count = |time: u32| self.used.iter().map(|&used| u32::from(used <= time)).sum::<u32>();
        let (mut low, mut high) = (self.used.iter().copied().min().unwrap_or(0), self.now);
        let mut n_older = 0;
        while low < high {
            let middle = low.midpoint(high);
            let n = count(middle) as usize;
            if n >= n_excess {
                high = middle;
            } else {
                (low, n_older) = (middle + 1, n);
            }
        }
        let mut n_of_low = n_excess - n_older;
        let mut kept = 0;
        for i in 0..self.members.len() {
            let (place, time) = (self.members[i], self.used[i]);
            let is_last = time == low && n_of_low > 0;
            n_of_low -= usize::from(is_last);
            (self.members[kept], self.used[kept]) = (place, time);
            kept += usize::from(time > low || (time == low && !is_last));
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
                let before = set.members.clone();
                let n_missing = set.admit(&wanted, capacity);
                prop_assert_eq!(n_missing, naive.admit(now, &wanted, capacity));
                prop_assert_eq!(&set.members, &naive.members());
                prop_assert!(wanted.iter().all(|member| set.members.contains(member)));
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
        assert_eq!(set.members, [2, 5, 9]);
        set.clear();
        assert_eq!(set.admit(&[2], 3), 1);
    }
}
