//! Who gives way when pages are short, and how.
//!
//! The last sequence in order of rank gives way, and its tokens stay with it. Its pages either go to
//! the host and come back with it (*swap*), or they are released, and what the cache no longer has
//! of them when all its tokens fit again is computed once more (*recompute*): whichever costs less
//! by the measured rates. A sequence that was preempted is spared until it has sampled a token, so
//! that nobody computes the same prompt again and again. If sparing leaves nothing that can run, the
//! last gives way all the same; one that is left alone spills; and then swapped sequences lose what
//! they still hold: the first always runs, so every sequence finishes.

use nuthatch_cache::SwapOut;
use nuthatch_types::SeqId;

use crate::Scheduler;
use crate::sequence::{Loss, Place};
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
        self.preempt(position, Loss::PagesShort, step);
        true
    }

    /// Makes room although everybody is spared: the last paused sequence gives way, else the last
    /// running one if it is not the only one, which else spills, and else the last swapped one that
    /// holds pages. False when there is nobody.
    pub(crate) fn preempt_by_force(&mut self, step: &mut Step) -> bool {
        if self.park_last(step) {
            return true;
        }
        match self.running.len() {
            0 => false,
            1 => self.spill_alone() || self.drop_swapped(None),
            n_running => {
                self.counters.forced_preemptions += 1;
                self.preempt(n_running - 1, Loss::PagesShort, step);
                true
            }
        }
    }

    /// Preempts a running sequence for one of a lower class.
    pub(crate) fn displace_seq(&mut self, seq: SeqId, step: &mut Step) {
        let position = self.running.iter().position(|&running| running == seq);
        self.preempt(position.expect("a victim is running"), Loss::Displaced, step);
    }

    /// Releases what the last swapped sequence but `keep` holds that keeps pages from others; it will be computed again. False when there is none.
    pub(crate) fn drop_swapped(&mut self, keep: Option<SeqId>) -> bool {
        let holds = |&&(_, seq): &&(_, SeqId)| Some(seq) != keep && self.cache.blocks_others(seq);
        let Some(&(rank, seq)) = self.swapped.iter().rev().find(holds) else { return false };
        self.swapped.remove(&(rank, seq));
        self.cache.release(seq);
        self.counters.swaps_dropped += 1;
        self.n_spare -= self.seq(seq).n_spare;
        let sequence = self.seq_mut(seq);
        sequence.reset(Loss::SwapDropped);
        sequence.place = Place::Waiting;
        true
    }

    pub(crate) fn preempt(&mut self, position: usize, cause: Loss, step: &mut Step) {
        let seq = self.running[position];
        step.n_preempted += 1;
        step.surplus = None;
        if self.seq(seq).pending() == 0 {
            self.running.remove(position);
            self.park(seq, cause);
            self.counters.count_preemption(cause, false);
            return;
        }
        let swap = self.cheaper_swap(seq);
        self.counters.count_preemption(cause, swap.is_some());
        self.give_way(position, swap, cause);
    }

    /// Lets a running sequence wait again, with its pages on the host or without any.
    pub(crate) fn give_way(&mut self, position: usize, swap: Option<SwapOut>, cause: Loss) {
        let seq = self.running.remove(position);
        let n_step = self.counters.steps;
        let is_swap = swap.is_some();
        match swap {
            Some(swap) => self.cache.swap_out(swap),
            None => {
                self.n_spare -= self.seq(seq).n_spare;
                self.cache.release(seq);
            }
        }
        let sequence = self.seq_mut(seq);
        if is_swap {
            sequence.place = Place::Swapped;
            sequence.table_known = 0;
        } else {
            sequence.place = Place::Waiting;
            sequence.reset(cause);
        }
        sequence.protected = true;
        sequence.since = n_step;
        let waiter = sequence.waiter();
        self.n_unstarted -= u32::from(!waiter.is_started);
        if is_swap {
            self.swapped.insert((waiter.rank, seq));
        }
        self.queue.push(waiter);
    }

    /// The decision to swap a sequence out, if that is possible and costs less than computing again
    /// what only it holds.
    fn cheaper_swap(&self, seq: SeqId) -> Option<SwapOut> {
        let swap = self.cache.plan_swap_out(seq)?;
        let rates = self.meter.rates();
        let computed = self.seq(seq).computed;
        let start = if self.keeps_all(seq) {
            let n_kept = self.cache.n_pages(seq) - swap.n_pages();
            computed.min(n_kept * self.cache.config().page_len)
        } else {
            // What is not there any more would be computed again too.
            0
        };
        (rates.swap(swap.n_pages()) < rates.compute(start..computed)).then_some(swap)
    }
}
