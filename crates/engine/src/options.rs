//! How an engine behaves, where its sizes do not say it.

use nuthatch_cache::Eviction;
use nuthatch_scheduler::Policy;

/// How an engine behaves. The default serves first come, first, shares the pages of equal
/// beginnings, and gives up the least recently used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Who is next.
    pub policy: Policy,
    /// Whether sequences share the pages of equal beginnings, which stay until others need the
    /// room. What is answered is the same either way.
    pub prefix_caching: bool,
    /// Whether sequences share pages at all. Where they cannot, each answer to a prompt computes it, and
    /// what depends on sharing or moving pages is refused.
    pub shares_pages: bool,
    /// Which cached pages go first when pages are short.
    pub eviction: Eviction,
    /// Most requests that wait; more are refused. `None` is the scheduler's own number.
    pub max_waiting: Option<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            policy: Policy::default(),
            prefix_caching: true,
            shares_pages: true,
            eviction: Eviction::default(),
            max_waiting: None,
        }
    }
}
