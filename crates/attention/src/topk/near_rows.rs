//! Where the members of a working set are near.

/// The rows of near memory that a head's working set has, and what changes when the set does. Rows
/// of members that go are used again for those that come, so that a set never has more of them than
/// it has members at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NearRows {
    /// Ascending, and where each of them is.
    members: Vec<u32>,
    rows: Vec<u32>,
    free: Vec<u32>,
    /// Rows from here on were never used.
    n_used: u32,
    /// Members that are not there yet, ascending, and where they go.
    missing: (Vec<u32>, Vec<u32>),
    /// Whether that is all of them, because pages that they came from were replaced.
    is_stale: bool,
    spare: Vec<u32>,
}

impl NearRows {
    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = NearRows::default();
    }

    /// Where the members are, in their order.
    pub(super) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Where some of the members are; both ascend.
    pub(super) fn find(&self, places: &[u32], rows: &mut Vec<u32>) {
        rows.clear();
        let mut members = self.members.iter().zip(&self.rows);
        rows.extend(places.iter().map(|place| {
            let (_, &row) = members.find(|(member, _)| *member == place).expect("a member");
            row
        }));
    }

    /// Members that must be brought, and where to.
    pub(super) fn missing(&self) -> (&[u32], &[u32]) {
        (&self.missing.0, &self.missing.1)
    }

    /// Everything that was missing is there.
    pub(super) fn settle(&mut self) {
        self.missing.0.clear();
        self.missing.1.clear();
        self.is_stale = false;
    }

    /// All members must be brought again.
    pub(super) fn bring_again(&mut self) {
        self.missing = (self.members.clone(), self.rows.clone());
        self.is_stale = true;
    }

    /// The set has these members now, ascending. Those that are new must be brought, and so must
    /// those of `again`, which are members.
    pub(super) fn change(&mut self, members: &[u32], again: &[u32]) {
        /// Of a member that has no row yet.
        const NONE: u32 = u32::MAX;
        self.spare.clear();
        let mut old = self.members.iter().zip(&self.rows).peekable();
        for &member in members {
            while let Some((_, &row)) = old.next_if(|&(&place, _)| place < member) {
                self.free.push(row);
            }
            let same = old.next_if(|&(&place, _)| place == member);
            self.spare.push(same.map_or(NONE, |(_, &row)| row));
        }
        self.free.extend(old.map(|(_, &row)| row));
        std::mem::swap(&mut self.rows, &mut self.spare);
        let is_stale = self.is_stale;
        self.settle();
        let mut again = again.iter().peekable();
        for (&member, row) in members.iter().zip(&mut self.rows) {
            let is_again = again.next_if(|&&place| place == member).is_some();
            if *row == NONE {
                *row = self.free.pop().unwrap_or(self.n_used);
                self.n_used = self.n_used.max(*row + 1);
            } else if !is_again && !is_stale {
                continue;
            }
            self.missing.0.push(member);
            self.missing.1.push(*row);
        }
        self.members.clear();
        self.members.extend_from_slice(members);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Near memory as a map: what a row holds must be what attention expects there.
        #[test]
        fn members_are_where_they_were_put(
            steps in prop::collection::vec(
                (prop::collection::btree_set(0u32..60, 0..20), any::<bool>()), 1..30)
        ) {
            let mut near = NearRows::default();
            let mut memory: BTreeMap<u32, u32> = BTreeMap::new();
            let mut last: Vec<u32> = Vec::new();
            let mut most = 0;
            for (members, is_whole) in steps {
                let members: Vec<u32> = members.into_iter().collect();
                let again = if is_whole { &members[..] } else { &[] };
                near.change(&members, again);
                let (places, rows) = near.missing();
                for (&place, &row) in places.iter().zip(rows) {
                    memory.insert(row, place);
                }
                let new = members.iter().filter(|place| is_whole || !last.contains(place)).count();
                prop_assert_eq!(places.len(), new);
                let found: Vec<u32> = near.rows().iter().map(|row| memory[row]).collect();
                prop_assert_eq!(&found, &members);
                let some: Vec<u32> = members.iter().copied().step_by(3).collect();
                let mut rows = vec![7];
                near.find(&some, &mut rows);
                let found: Vec<u32> = rows.iter().map(|row| memory[row]).collect();
                prop_assert_eq!(&found, &some);
                most = most.max(members.len());
                prop_assert!(near.rows().iter().all(|&row| (row as usize) < most));
                last = members;
            }
        }
    }

    #[test]
    fn what_is_forgotten_must_be_brought_again() {
        let mut near = NearRows::default();
        near.change(&[3, 9], &[]);
        near.settle();
        assert!(near.missing().0.is_empty());
        near.change(&[3, 9], &[]);
        assert_eq!((near.missing().0, near.rows()), (&[][..], &[0, 1][..]));
        near.clear();
        near.change(&[3, 9], &[]);
        assert_eq!(near.missing(), (&[3, 9][..], &[0, 1][..]));
    }
}
