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
    pub fn admit(&mut self, wanted: &[u32], capacity: usize) -> usize {
        self.now += 1;
        let (members, used) = &mut self.spare;
        members.clear();
        used.clear();
        let mut n_missing = 0;
        let (mut old, mut new) = (0, 0);
        while old < self.members.len() || new < wanted.len() {
            let next_old = self.members.get(old).copied().unwrap_or(u32::MAX);
            let next_new = wanted.get(new).copied();
            match next_new {
                Some(next) if next <= next_old => {
                    members.push(next);
                    used.push(self.now);
                    let is_known = old < self.members.len() && next == next_old;
                    old += usize::from(is_known);
                    n_missing += usize::from(!is_known);
                    new += 1;
                }
                _ => {
                    members.push(next_old);
                    used.push(self.used[old]);
                    old += 1;
                }
            }
        }
        std::mem::swap(&mut self.members, members);
        std::mem::swap(&mut self.used, used);
        self.shrink(capacity.max(wanted.len()));
        n_missing
    }

    fn shrink(&mut self, capacity: usize) {
        let mut n_excess = self.members.len().saturating_sub(capacity);
        if n_excess == 0 {
            return;
        }
        if capacity == 0 {
            self.members.clear();
            self.used.clear();
            return;
        }
        // The oldest time that anything of stays, and how many of just that time go.
        let times = &mut self.spare.1;
        times.clear();
        times.extend_from_slice(&self.used);
        let (older, &mut border, _) = times.select_nth_unstable(n_excess);
        let n_older = older.iter().filter(|&&time| time < border).count();
        n_excess -= n_older;
        let mut kept = 0;
        for i in 0..self.members.len() {
            let time = self.used[i];
            if time < border {
                continue;
            }
            if time == border && n_excess > 0 {
                n_excess -= 1;
                continue;
            }
            (self.members[kept], self.used[kept]) = (self.members[i], time);
            kept += 1;
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
