//! Who gives way when pages are short.
//!
//! The last sequence in order of rank gives way: its pages are freed, its tokens stay, and it waits
//! until all of them fit again; then what the cache no longer has of them is computed once more. A
//! sequence that was preempted is spared until it has sampled a token, so that nobody computes the
//! same prompt again and again. If sparing leaves nothing that can run, the last gives way all the
//! same: the first always runs, so every sequence finishes.

use nuthatch_types::SeqId;

use crate::Scheduler;
use crate::sequence::Place;
use crate::step::Step;

impl Scheduler {
    /// Preempts the last sequence that comes after `seq`, has no tokens in this step and is not
    /// spared. False when there is none.
    pub(crate) fn preempt_for(&mut self, seq: SeqId, step: &mut Step) -> bool {
        let rank = self.seq(seq).rank;
        let victim = self.running.iter().rposition(|&other| {
            let other = self.seq(other);
            other.rank > rank && other.last_step != self.counters.steps && !other.protected
        });
        let Some(position) = victim else { return false };
        self.preempt(position, step);
        true
    }

    /// Preempts the last sequence although it is spared. False when at most one is running.
    pub(crate) fn preempt_by_force(&mut self, step: &mut Step) -> bool {
        if self.running.len() < 2 {
            return false;
        }
        self.counters.forced_preemptions += 1;
        self.preempt(self.running.len() - 1, step);
        true
    }

    /// Preempts a running sequence for one of a lower class.
    pub(crate) fn displace_seq(&mut self, seq: SeqId, step: &mut Step) {
        let position = self.running.iter().position(|&running| running == seq);
        self.counters.displacements += 1;
        self.preempt(position.expect("a victim is running"), step);
    }

    fn preempt(&mut self, position: usize, step: &mut Step) {
        let seq = self.running.remove(position);
        self.cache.release(seq);
        let n_step = self.counters.steps;
        let sequence = self.seq_mut(seq);
        sequence.reset();
        sequence.protected = true;
        sequence.place = Place::Waiting;
        sequence.since = n_step;
        let waiter = sequence.waiter();
        self.queue.push(waiter);
        self.counters.preemptions += 1;
        step.n_preempted += 1;
    }
}
