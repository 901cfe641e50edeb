//! Who gives way when pages are short.
//!
//! The youngest sequence gives way: its pages are freed, its tokens stay, and it waits at its old
//! place in the queue until all of them fit again; then they are computed once more. A sequence
//! that was preempted is spared until it has sampled a token, so that nobody computes the same
//! prompt again and again. If sparing leaves nothing that can run, the youngest gives way all the
//! same: the oldest sequence always runs, so every sequence is the oldest one day and finishes.

use nuthatch_types::SeqId;

use crate::Scheduler;
use crate::step::Step;

impl Scheduler {
    /// Preempts the youngest sequence that is younger than `seq`, has no tokens in this step and is
    /// not spared. False when there is none.
    pub(crate) fn preempt_for(&mut self, seq: SeqId, step: &mut Step) -> bool {
        let arrival = self.seq(seq).arrival;
        let victim = self.running.iter().rposition(|&other| {
            let other = self.seq(other);
            other.arrival > arrival && other.last_step != self.counters.steps && !other.protected
        });
        let Some(position) = victim else { return false };
        self.preempt(position, step);
        true
    }

    /// Preempts the youngest sequence although it is spared. False when at most one is running.
    pub(crate) fn preempt_by_force(&mut self, step: &mut Step) -> bool {
        if self.running.len() < 2 {
            return false;
        }
        self.counters.forced_preemptions += 1;
        self.preempt(self.running.len() - 1, step);
        true
    }

    fn preempt(&mut self, position: usize, step: &mut Step) {
        let seq = self.running.remove(position);
        self.cache.release(seq);
        let sequence = self.seq_mut(seq);
        sequence.reset();
        sequence.protected = true;
        let arrival = sequence.arrival;
        self.waiting.insert(arrival, seq);
        self.counters.preemptions += 1;
        step.n_preempted += 1;
    }
}
