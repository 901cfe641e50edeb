//! The page that was found least often goes first, with ageing.
//!
//! A page's score is its number of hits plus the score of the page given up last before it was
//! offered. So a page that was famous long ago is overtaken by pages that are found now, without
//! any pass over all pages.

use std::time::Duration;

use nuthatch_types::{FastMap, PageId};

use super::{Facts, Order, Ranked};

/// Least frequently used, with ageing.
#[derive(Debug, Default)]
pub(super) struct Lfu {
    ranked: Ranked<(u64, u64)>,
    /// The score with which each page was offered.
    scores: FastMap<PageId, u64>,
    /// The score of the page given up last.
    age: u64,
}

impl Order for Lfu {
    fn insert(&mut self, page: PageId, facts: &Facts) {
        let score = self.age + u64::from(facts.n_hits);
        self.ranked.insert((score, facts.last_use), page);
        self.scores.insert(page, score);
    }

    fn remove(&mut self, page: PageId, facts: &Facts) {
        let score = self.scores.remove(&page).expect("the page was offered");
        self.ranked.remove((score, facts.last_use), page);
    }

    fn pop(&mut self, _now: Duration) -> Option<PageId> {
        let ((score, _), page) = self.ranked.pop()?;
        self.scores.remove(&page);
        self.age = score;
        Some(page)
    }

    fn len(&self) -> usize {
        self.ranked.len()
    }
}
