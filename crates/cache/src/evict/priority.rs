//! The page of the lowest priority goes first; priorities run out.

use std::collections::BTreeSet;
use std::time::Duration;

use nuthatch_types::{FastMap, PageId};

use super::{Facts, Order, Ranked};

/// Lowest priority first, then least recently used.
#[derive(Debug, Default)]
pub(super) struct Priority {
    ranked: Ranked<(u8, u64)>,
    /// The rank of each page whose priority will run out, and when it does.
    running_out: FastMap<PageId, ((u8, u64), Duration)>,
    /// The same pages by that time.
    by_time: BTreeSet<(Duration, PageId)>,
}

impl Priority {
    /// Takes the priority from pages whose time has come. Each page is moved once, so the cost is
    /// O(log n) for each page offered.
    fn expire(&mut self, now: Duration) {
        while let Some(&(until, page)) = self.by_time.first()
            && until <= now
        {
            self.by_time.pop_first();
            let (rank, _) = self.running_out.remove(&page).expect("kept beside by_time");
            self.ranked.remove(rank, page);
            self.ranked.insert((0, rank.1), page);
        }
    }
}

impl Order for Priority {
    fn insert(&mut self, page: PageId, facts: &Facts) {
        let rank = (facts.retention.priority, facts.last_use);
        self.ranked.insert(rank, page);
        if let Some(until) = facts.retention.until
            && rank.0 > 0
        {
            self.running_out.insert(page, (rank, until));
            self.by_time.insert((until, page));
        }
    }

    fn remove(&mut self, page: PageId, facts: &Facts) {
        let may_run_out = facts.retention.priority > 0 && facts.retention.until.is_some();
        let rank = match self.running_out.remove(&page) {
            Some((rank, until)) => {
                self.by_time.remove(&(until, page));
                rank
            }
            // It has run out, and the page is ranked without it.
            None if may_run_out => (0, facts.last_use),
            None => (facts.retention.priority, facts.last_use),
        };
        self.ranked.remove(rank, page);
    }

    fn pop(&mut self, now: Duration) -> Option<PageId> {
        self.expire(now);
        let (_, page) = self.ranked.pop()?;
        if let Some((_, until)) = self.running_out.remove(&page) {
            self.by_time.remove(&(until, page));
        }
        Some(page)
    }

    fn len(&self) -> usize {
        self.ranked.len()
    }
}
