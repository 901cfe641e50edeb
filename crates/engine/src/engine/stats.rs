//! What can be seen of an engine, as plain values.

use std::time::Duration;

use nuthatch_cache::{Branch, SlotUse};

use crate::tier::TierStats;

/// What the engine holds and what it did, as plain numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// The scheduler's and the cache's own numbers.
    pub scheduler: nuthatch_scheduler::Stats,
    /// Time spent in steps.
    pub step_time: Duration,
    /// The executor's part of `step_time`; the rest is planning, bookkeeping and streaming.
    pub execute_time: Duration,
    /// The tiers that are slower than the host, if there are any.
    pub tier: Option<TierStats>,
    /// Why the engine does no more work, if it does not.
    pub error: Option<String>,
}

/// A picture of the cache at one moment, for people who watch it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachePicture {
    /// What each slot of the device holds.
    pub device: Vec<SlotUse>,
    /// What each slot of the host holds.
    pub host: Vec<SlotUse>,
    /// The beginnings that saved most tokens, best first.
    pub branches: Vec<Branch>,
}
