//! In which order cached pages that nobody uses are given up.
//!
//! Only pages that no unused page follows are offered to an order, so that a page is never given up
//! before the unused pages after it: without its parent a page could not be found again. When the
//! last of those goes, the page itself is offered. Every operation of every order takes O(log n).

mod lfu;
mod lineage;
mod lru;
mod priority;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use nuthatch_types::PageId;

/// Which cached pages go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// The page that was used longest ago.
    #[default]
    Lru,
    /// The page that was found least often, with ageing, so that old fame fades.
    Lfu,
    /// The page of the lowest priority; among equals the one used longest ago. A page whose
    /// retention has run out has no priority.
    Priority,
    /// The page with the longest line of parents; among equals the one used longest ago. What many
    /// requests begin with stays.
    Lineage,
}

impl Eviction {
    /// An order of no pages.
    pub(crate) fn order(self) -> Box<dyn Order> {
        match self {
            Eviction::Lru => Box::new(lru::Lru::default()),
            Eviction::Lfu => Box::new(lfu::Lfu::default()),
            Eviction::Priority => Box::new(priority::Priority::default()),
            Eviction::Lineage => Box::new(lineage::Lineage::default()),
        }
    }
}

/// How long a request's pages should stay, and how much that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// 0 is ordinary; higher stays longer.
    pub priority: u8,
    /// When the priority runs out, on the clock of [`crate::Cache::set_now`]; `None` is never.
    pub until: Option<Duration>,
}

impl Retention {
    /// Whether the priority still counts.
    pub(crate) fn is_over(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// What holds for a page that two requests used: the higher priority, and of equal ones the
    /// longer.
    pub(crate) fn join(self, other: Self, now: Duration) -> Self {
        if self.is_over(now) || self.priority < other.priority {
            return other;
        }
        if other.is_over(now) || other.priority < self.priority {
            return self;
        }
        let until = self.until.zip(other.until).map(|(a, b)| a.max(b));
        Retention { priority: self.priority, until }
    }
}

/// What an order may look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// When the page was last used; no two pages have the same.
    pub(crate) last_use: u64,
    /// How often a later request found the page.
    pub(crate) n_hits: u32,
    /// Pages before it.
    pub(crate) depth: u32,
    /// What its users asked for.
    pub(crate) retention: Retention,
}

/// An order of unused pages.
pub(crate) trait Order: Debug + Send {
    /// Adds a page, which must not be there. Its facts stay as they are while it is there.
    fn insert(&mut self, page: PageId, facts: &Facts);
    /// Takes out a page, which must be there, with the facts it was added with.
    fn remove(&mut self, page: PageId, facts: &Facts);
    /// Takes out the page that goes first.
    fn pop(&mut self, now: Duration) -> Option<PageId>;
    /// Pages that are there.
    fn len(&self) -> usize;
}

/// Pages sorted by a rank that is made from their facts; the lowest goes first.
#[derive(Debug)]
struct Ranked<R>(BTreeSet<(R, PageId)>);

impl<R> Default for Ranked<R> {
    fn default() -> Self {
        Ranked(BTreeSet::new())
    }
}

impl<R: Ord + Debug> Ranked<R> {
    fn insert(&mut self, rank: R, page: PageId) {
        let is_new = self.0.insert((rank, page));
        assert!(is_new, "{page:?} is offered once");
    }

    fn remove(&mut self, rank: R, page: PageId) {
        let was_there = self.0.remove(&(rank, page));
        assert!(was_there, "{page:?} was offered with these facts");
    }

    fn pop(&mut self) -> Option<(R, PageId)> {
        self.0.pop_first()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests;
