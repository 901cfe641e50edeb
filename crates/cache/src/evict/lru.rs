//! The page that was used longest ago goes first.

use std::time::Duration;

use nuthatch_types::PageId;

use super::{Facts, Order, Ranked};

/// Least recently used.
#[derive(Debug, Default)]
pub(super) struct Lru(Ranked<u64>);

impl Order for Lru {
    fn insert(&mut self, page: PageId, facts: &Facts) {
        self.0.insert(facts.last_use, page);
    }

    fn remove(&mut self, page: PageId, facts: &Facts) {
        self.0.remove(facts.last_use, page);
    }

    fn pop(&mut self, _now: Duration) -> Option<PageId> {
        self.0.pop().map(|(_, page)| page)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}
