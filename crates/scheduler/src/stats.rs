//! What the scheduler did and holds, as plain numbers.

use crate::sequence::Loss;

/// What the scheduler holds at one moment, and what it did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that wait, preempted and swapped ones included.
    pub waiting: u32,
    /// Requests of those whose pages are on the host.
    pub swapped: u32,
    /// Sequences that have their pages on the device, or run on some of the host.
    pub running: u32,
    /// Sequences without pages that wait for the caller to choose their next token.
    pub parked: u32,
    /// What the cache holds.
    pub cache: nuthatch_cache::Stats,
    /// What was done since the scheduler was made.
    pub counters: Counters,
}

/// What was done since the scheduler was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Plans made.
    pub steps: u64,
    /// Requests accepted.
    pub submitted: u64,
    /// Sequences forked from ones that were paused.
    pub forks: u64,
    /// Requests refused.
    pub refused: u64,
    /// Sequences that ended by themselves.
    pub finished: u64,
    /// Sequences that the caller let go because it follows others.
    pub discarded: u64,
    /// Sequences that were cancelled.
    pub cancelled: u64,
    /// Sequences that ended with a device fault, or because their logits were no numbers.
    pub failed: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
    /// Tokens computed again after a preemption, for whatever cause.
    pub recomputed_tokens: u64,
    /// Tokens of those that were lost because pages were short.
    pub recomputed_short: u64,
    /// Tokens of those that were lost to a sequence of a lower class.
    pub recomputed_displaced: u64,
    /// Tokens of those that were lost because a swapped sequence had to be dropped.
    pub recomputed_dropped: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Sequences whose pages were taken for another one, for whatever cause.
    pub preemptions: u64,
    /// Preemptions whose pages went to the host.
    pub preemptions_swap: u64,
    /// Preemptions whose pages were released, to be computed again.
    pub preemptions_recompute: u64,
    /// Preemptions because pages were short.
    pub preemptions_short: u64,
    /// Preemptions of a sequence that had made no progress, because nothing else could run.
    pub forced_preemptions: u64,
    /// Preemptions for a sequence that waited, as the policy wants it.
    pub displacements: u64,
    /// Swapped sequences whose pages were released all the same, because nothing else could run.
    pub swaps_dropped: u64,
    /// Admissions of sequences for which the device had no room, so that some of their pages are on
    /// the host.
    pub admissions_spilled: u64,
    /// Spilled sequences that were swapped out after their first token, because pages would have had
    /// to be read over a link for each further one.
    pub rests: u64,
    /// Admissions that computed what something slower holds, because that takes less time.
    pub loads_declined: u64,
    /// Turns in which a running sequence found no pages and nobody to preempt.
    pub stalls: u64,
}

impl Counters {
    pub(crate) fn count_preemption(&mut self, cause: Loss, is_swap: bool) {
        self.preemptions += 1;
        let kind =
            if is_swap { &mut self.preemptions_swap } else { &mut self.preemptions_recompute };
        *kind += 1;
        match cause {
            Loss::PagesShort => self.preemptions_short += 1,
            Loss::Displaced => self.displacements += 1,
            Loss::SwapDropped => {}
        }
    }

    pub(crate) fn count_recomputed(&mut self, cause: Loss, n_tokens: u32) {
        let n_tokens = u64::from(n_tokens);
        self.recomputed_tokens += n_tokens;
        let counter = match cause {
            Loss::PagesShort => &mut self.recomputed_short,
            Loss::Displaced => &mut self.recomputed_displaced,
            Loss::SwapDropped => &mut self.recomputed_dropped,
        };
        *counter += n_tokens;
    }
}
