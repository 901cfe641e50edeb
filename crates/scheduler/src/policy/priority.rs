//! The highest priority first, without starvation.
//!
//! A request's class is its place in the order of arrival, less `boost` for each step of priority.
//! So a class never changes, and a request is overtaken only by those that come soon enough after
//! it.

use nuthatch_types::SeqId;

use super::sorted::Sorted;
use super::{Arrival, Ask, Queue, Rank, Waiter};
use crate::Hints;

/// The highest priority first.
#[derive(Debug)]
pub(super) struct Priority {
    sorted: Sorted,
    boost: i64,
}

impl Priority {
    pub(super) fn new(boost: u32) -> Self {
        Priority { sorted: Sorted::default(), boost: i64::from(boost) }
    }
}

impl Queue for Priority {
    fn rank(&self, arrival: Arrival, hints: &Hints, _n_prompt: u32) -> Rank {
        let class = arrival.request as i64 - self.boost * i64::from(hints.priority);
        Rank { class, arrival }
    }

    fn push(&mut self, waiter: Waiter) {
        self.sorted.push(waiter);
    }

    fn remove(&mut self, waiter: &Waiter) {
        self.sorted.remove(waiter);
    }

    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId> {
        self.sorted.first(ask.may_start)
    }

    fn len(&self) -> usize {
        self.sorted.len()
    }

    fn displaces(&self) -> bool {
        true
    }
}
