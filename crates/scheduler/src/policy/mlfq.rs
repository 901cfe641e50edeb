//! Least attained service first, in levels, with skip-join.
//!
//! ```text
//!   level 0   quantum       new: the level whose quantum covers the prompt (skip-join)
//!   level 1   2 * quantum   sinks when the quantum is used up
//!   level 2   4 * quantum   rises to level 0 after max_wait steps of waiting
//! ```
//!
//! A long prompt does not hold up short ones by passing through the upper levels first, and a long
//! answer gives way to short ones that come later.

use std::collections::BTreeSet;

use nuthatch_types::SeqId;

use super::sorted::Sorted;
use super::{Arrival, Ask, Queue, Rank, Service, Waiter};
use crate::Hints;

/// See [`super::Policy::Mlfq`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    pub(super) levels: u8,
    pub(super) quantum: u32,
    pub(super) max_wait: u32,
    pub(super) max_running: u32,
}

/// Least attained service first.
#[derive(Debug)]
pub(super) struct Mlfq {
    config: Config,
    sorted: Sorted,
    /// Those who wait, by the step since which they do; those whom the executor knows apart.
    by_wait: [BTreeSet<(u64, SeqId)>; 2],
}

impl Mlfq {
    pub(super) fn new(config: Config) -> Self {
        let config =
            Config { levels: config.levels.clamp(1, 32), quantum: config.quantum.max(1), ..config };
        let by_wait = [BTreeSet::new(), BTreeSet::new()];
        Mlfq { config, sorted: Sorted::default(), by_wait }
    }

    fn quantum(&self, level: i64) -> u64 {
        u64::from(self.config.quantum) << level
    }

    fn last_level(&self) -> i64 {
        i64::from(self.config.levels) - 1
    }

    fn has_waited(&self, since: u64, step: u64) -> bool {
        step.saturating_sub(since) >= u64::from(self.config.max_wait)
    }
}

impl Queue for Mlfq {
    fn rank(&self, arrival: Arrival, _hints: &Hints, n_prompt: u32) -> Rank {
        let covers = |&level: &i64| self.quantum(level) >= u64::from(n_prompt);
        let class = (0..self.last_level()).find(covers).unwrap_or(self.last_level());
        Rank { class, arrival }
    }

    fn push(&mut self, waiter: Waiter) {
        self.sorted.push(waiter);
        self.by_wait[usize::from(waiter.is_started)].insert((waiter.since, waiter.seq));
    }

    fn remove(&mut self, waiter: &Waiter) {
        self.sorted.remove(waiter);
        self.by_wait[usize::from(waiter.is_started)].remove(&(waiter.since, waiter.seq));
    }

    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId> {
        let fresh = self.by_wait[0].first().filter(|_| ask.may_start);
        let longest = fresh.into_iter().chain(self.by_wait[1].first()).min();
        let starving = longest.filter(|&&(since, _)| self.has_waited(since, ask.step));
        starving.map(|&(_, seq)| seq).or_else(|| self.sorted.first(ask.may_start))
    }

    fn len(&self) -> usize {
        self.sorted.len()
    }

    fn counts_service(&self) -> bool {
        true
    }

    fn serve(&mut self, waiter: &Waiter, service: Service) -> Option<Rank> {
        let Rank { class, arrival } = waiter.rank;
        let sinks = service.n_since_rank >= self.quantum(class) && class < self.last_level();
        sinks.then_some(Rank { class: class + 1, arrival })
    }

    fn rank_to_run(&self, waiter: &Waiter, step: u64) -> Rank {
        let is_risen = self.has_waited(waiter.since, step);
        Rank { class: if is_risen { 0 } else { waiter.rank.class }, ..waiter.rank }
    }

    fn displaces(&self) -> bool {
        true
    }

    fn max_running(&self) -> u32 {
        self.config.max_running.max(1)
    }
}
