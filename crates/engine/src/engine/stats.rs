//! What can be seen of an engine, as plain values.

use std::time::Duration;

use nuthatch_cache::{Branch, CachedPage, SlotUse};

use nuthatch_attention::topk::Counts;
use nuthatch_backend::NearCounts;

use super::Engine;
use crate::executor::Execute;
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
    /// Top-k attention, if there is such.
    pub topk: Option<TopKStats>,
    /// Why the engine does no more work, if it does not.
    pub error: Option<String>,
}

/// What top-k attention did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TopKStats {
    /// What all policies did together.
    pub counts: Counts,
    /// Rows that came from pages that are far.
    pub near: NearCounts,
    /// Bytes of a row: a token's key and value of one head.
    pub row_bytes: u64,
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

impl<E: Execute> Engine<E> {
    /// A picture of the cache with the `n_branches` best beginnings and up to `n_tokens` tokens of
    /// each. Linear in pages.
    pub fn cache_picture(&self, n_branches: usize, n_tokens: usize) -> CachePicture {
        let cache = self.scheduler.cache();
        let mut device = cache.slot_uses();
        let host = device.split_off(cache.config().n_pages as usize);
        CachePicture { device, host, branches: cache.hottest(n_branches, n_tokens) }
    }

    /// Everything that can be found by its tokens. Linear in pages.
    pub fn cached_pages(&self) -> Vec<CachedPage> {
        self.scheduler.cache().cached_pages()
    }
}
