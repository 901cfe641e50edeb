//! First come, first served. One who was preempted came before those who never ran.

use nuthatch_types::SeqId;

use super::sorted::Sorted;
use super::{Arrival, Ask, Queue, Rank, Waiter};
use crate::Hints;

/// First come, first served.
#[derive(Debug, Default)]
pub(super) struct Fcfs(Sorted);

impl Queue for Fcfs {
    fn rank(&self, arrival: Arrival, _hints: &Hints, _n_prompt: u32) -> Rank {
        Rank { class: 0, arrival }
    }

    fn push(&mut self, waiter: Waiter) {
        self.0.push(waiter);
    }

    fn remove(&mut self, waiter: &Waiter) {
        self.0.remove(waiter);
    }

    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId> {
        self.0.first(ask.may_start)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}
