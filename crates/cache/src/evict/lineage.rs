//! The page with the longest line of parents goes first.

use std::cmp::Reverse;
use std::time::Duration;

use nuthatch_types::PageId;

use super::{Facts, Order, Ranked};

/// Deepest first, then least recently used.
#[derive(Debug, Default)]
pub(super) struct Lineage(Ranked<(Reverse<u32>, u64)>);

fn rank(facts: &Facts) -> (Reverse<u32>, u64) {
    (Reverse(facts.depth), facts.last_use)
}

impl Order for Lineage {
    fn insert(&mut self, page: PageId, facts: &Facts) {
        self.0.insert(rank(facts), page);
    }

    fn remove(&mut self, page: PageId, facts: &Facts) {
        self.0.remove(rank(facts), page);
    }

    fn pop(&mut self, _now: Duration) -> Option<PageId> {
        self.0.pop().map(|(_, page)| page)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}
