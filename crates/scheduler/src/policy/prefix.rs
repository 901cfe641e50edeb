//! The longest cached prefix first, with ageing.
//!
//! Of the oldest requests, the one with the most cached tokens is next, so that requests that begin
//! alike run one after the other while their beginning is cached. Whoever is passed over gains
//! `ageing` tokens; as no more tokens can be found than a context has, everyone is passed over a
//! bounded number of times.

use std::cmp::Reverse;

use nuthatch_types::{FastMap, SeqId};

use super::sorted::Sorted;
use super::{Arrival, Ask, Queue, Rank, Waiter};
use crate::Hints;

/// Steps for which a choice stands: long enough that looking every waiting prompt up costs little,
/// short enough that one whose beginning was cached meanwhile is seen.
const CHOICE_STEPS: u64 = 16;

/// The longest cached prefix first.
#[derive(Debug)]
pub(super) struct Prefix {
    sorted: Sorted,
    /// How often each of those who wait was passed over.
    n_passed: FastMap<SeqId, u32>,
    /// Who was chosen and is not admitted yet, and in which step. The choice stands for a while, so
    /// that it is not made again in every step in which there is no room.
    chosen: Option<(SeqId, u64)>,
    ageing: u64,
    window: usize,
}

impl Prefix {
    pub(super) fn new(ageing: u32, window: u32) -> Self {
        Prefix {
            sorted: Sorted::default(),
            n_passed: FastMap::default(),
            chosen: None,
            ageing: u64::from(ageing),
            window: window.max(1) as usize,
        }
    }
}

impl Queue for Prefix {
    fn rank(&self, arrival: Arrival, _hints: &Hints, _n_prompt: u32) -> Rank {
        Rank { class: 0, arrival }
    }

    fn push(&mut self, waiter: Waiter) {
        self.sorted.push(waiter);
    }

    fn remove(&mut self, waiter: &Waiter) {
        self.sorted.remove(waiter);
        self.n_passed.remove(&waiter.seq);
        self.chosen.take_if(|(chosen, _)| *chosen == waiter.seq);
    }

    /// One who was preempted is next: much of what it had may still be cached.
    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId> {
        let started = self.sorted.first_started();
        if started.is_some() || !ask.may_start {
            return started;
        }
        if let Some((chosen, _)) = self.chosen.filter(|(_, step)| ask.step < step + CHOICE_STEPS) {
            return Some(chosen);
        }
        let score = |seq: SeqId| {
            let n_passed = self.n_passed.get(&seq).copied().unwrap_or(0);
            u64::from((ask.n_found)(seq)) + self.ageing * u64::from(n_passed)
        };
        let window = self.sorted.fresh().take(self.window);
        // Of equals, the oldest.
        let (_, chosen) = window.min_by_key(|&(rank, seq)| (Reverse(score(seq)), rank))?;
        self.chosen = Some((chosen, ask.step));
        Some(chosen)
    }

    fn admitted(&mut self, waiter: &Waiter) {
        for (rank, seq) in self.sorted.fresh().take(self.window) {
            if rank < waiter.rank {
                *self.n_passed.entry(seq).or_default() += 1;
            }
        }
    }

    fn len(&self) -> usize {
        self.sorted.len()
    }
}
