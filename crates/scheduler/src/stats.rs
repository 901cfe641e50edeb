//! What the scheduler did and holds, as plain numbers.

/// What the scheduler holds at one moment, and what it did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that wait, preempted ones included.
    pub waiting: u32,
    /// Sequences that have pages.
    pub running: u32,
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
    /// Requests refused.
    pub refused: u64,
    /// Sequences that ended by themselves.
    pub finished: u64,
    /// Sequences that were cancelled.
    pub cancelled: u64,
    /// Sequences that ended with a device fault.
    pub failed: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
    /// Tokens computed again after a preemption.
    pub recomputed_tokens: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Sequences whose pages were taken for another one.
    pub preemptions: u64,
    /// Preemptions of a sequence that had made no progress, because nothing else could run.
    pub forced_preemptions: u64,
    /// Preemptions for a sequence that waited, as the policy wants it.
    pub displacements: u64,
    /// Turns in which a running sequence found no pages and nobody to preempt.
    pub stalls: u64,
}
