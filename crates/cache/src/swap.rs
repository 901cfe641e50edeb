//! Taking a sequence's pages to the host and back, so that nothing is computed again.
//!
//! ```text
//!   running   [ shared, on the device ][ its own, on the device ]
//!   swapped   [ shared, on the device ][ its own, on the host   ]
//! ```
//!
//! A swapped sequence keeps its table and all its handles, and with them its pages, the last and
//! partly filled one too. Those that a running sequence or a pin also holds stay where they are.

use nuthatch_types::{PageId, SeqId};

use crate::cache::Cache;
use crate::pages::Tier;

/// A decision to take a sequence's pages to the host; valid until the cache changes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "carry the decision out with Cache::swap_out, or drop it: nothing has changed"]
pub struct SwapOut {
    seq: SeqId,
    n_pages: u32,
    version: u64,
}

impl SwapOut {
    /// Pages that will be copied to the host.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }
}

/// A decision to bring a swapped sequence's pages back; valid until the cache changes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "carry the decision out with Cache::swap_in, or drop it: nothing has changed"]
pub struct SwapIn {
    seq: SeqId,
    n_pages: u32,
    version: u64,
}

impl SwapIn {
    /// Pages of [`Cache::n_available`] that will be taken, and copied to from the host.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }
}

impl Cache {
    /// Decides whether a sequence's own pages, all of them, can go to the host. `None` when it has
    /// none or some are loading, or when the host has no room. Changes nothing.
    pub fn plan_swap_out(&self, seq: SeqId) -> Option<SwapOut> {
        let table = self.table(seq);
        assert!(!table.is_swapped, "{seq:?} is swapped out once");
        if table.loading.is_some() {
            return None;
        }
        let n_pages = table.held().filter(|&page| self.pages.n_active(page) == 1).count() as u32;
        let fits = n_pages > 0 && n_pages <= self.pages.n_available(Tier::Host);
        fits.then_some(SwapOut { seq, n_pages, version: self.version })
    }

    /// Carries out a decision: the sequence's own pages are on the host, and idle pages there have
    /// made room for them. Nothing may have changed since the decision was made.
    pub fn swap_out(&mut self, swap: SwapOut) {
        assert_eq!(swap.version, self.version, "the cache changed after the decision");
        self.version += 1;
        self.counters.pages_swapped_out += u64::from(swap.n_pages);
        let table = self.table_mut(swap.seq);
        table.is_swapped = true;
        let pages: Vec<PageId> = table.held().collect();
        for &page in &pages {
            self.pages.park(page);
        }
        // Those that a running sequence or a pin also holds stay.
        for page in pages.into_iter().rev() {
            if self.pages.n_active(page) > 0 {
                continue;
            }
            let has_moved = self.demote(page);
            assert!(has_moved, "a page that is held is not given up");
        }
    }

    /// Decides what it takes to bring a swapped sequence's pages back. Changes nothing.
    pub fn plan_swap_in(&self, seq: SeqId) -> SwapIn {
        let table = self.table(seq);
        assert!(table.is_swapped, "{seq:?} is not swapped");
        let on_host = table.held().filter(|&page| self.pages.tier(page) == Tier::Host);
        SwapIn { seq, n_pages: on_host.count() as u32, version: self.version }
    }

    /// Carries out a decision: all the sequence's pages are on the device. Nothing may have changed
    /// since the decision was made, and [`SwapIn::n_pages`] pages must be available.
    pub fn swap_in(&mut self, swap: SwapIn) {
        assert_eq!(swap.version, self.version, "the cache changed after the decision");
        self.version += 1;
        self.counters.pages_swapped_in += u64::from(swap.n_pages);
        let table = self.table_mut(swap.seq);
        table.is_swapped = false;
        let pages: Vec<PageId> = table.held().collect();
        for page in pages {
            self.pages.unpark(page);
            if self.pages.tier(page) == Tier::Host {
                self.promote(page);
            }
        }
    }

    /// Whether a swapped sequence holds pages of the device that nobody runs on.
    pub fn blocks_device(&self, seq: SeqId) -> bool {
        let is_blocked =
            |page| self.pages.tier(page) == Tier::Device && self.pages.n_active(page) == 0;
        self.table(seq).held().any(is_blocked)
    }

    /// Whether a sequence is swapped out.
    pub fn is_swapped(&self, seq: SeqId) -> bool {
        self.table(seq).is_swapped
    }
}
