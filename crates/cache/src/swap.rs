//! Taking a sequence's pages to the host and back, so that nothing is computed again.
//!
//! ```text
//!   running   [ shared, on the device ][ its own, on the device ]
//!   swapped   [ shared, on the device ][ its own, on the host   ]
//! ```
//!
//! A swapped sequence keeps its table and all its handles, and with them its pages, the last and
//! partly filled one too. Those that a running sequence or a pin also holds stay where they are. If
//! the device has no room for all of them, a sequence that may spill comes back with some left there.

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
    /// How many of the pages that can leave the host, the first ones, do not.
    n_stay: u32,
    version: u64,
}

impl SwapIn {
    /// Pages of [`Cache::n_available`] that will be taken, and copied to from the host.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }

    /// The same decision for a sequence that may spill, with `n_stay` of these pages, the first ones,
    /// left on the host.
    pub fn spill(self, n_stay: u32) -> Self {
        SwapIn { n_pages: self.n_pages - n_stay, n_stay: self.n_stay + n_stay, ..self }
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
        let own = table.held().filter(|&page| self.pages.n_active(page) == 1);
        let (n_pages, n_there) = own.fold((0, 0), |(n_pages, n_there), page| {
            let is_there = u32::from(self.pages.tier(page) == Tier::Host);
            (n_pages + 1 - is_there, n_there + is_there)
        });
        let fits = n_pages + n_there > 0 && n_pages <= self.n_host_available();
        fits.then_some(SwapOut { seq, n_pages, version: self.version })
    }

    /// Carries out a decision: the sequence's own pages are on the host, and idle pages there have
    /// made room for them. Nothing may have changed since the decision was made.
    pub fn swap_out(&mut self, swap: SwapOut) {
        assert_eq!(swap.version, self.version, "the cache changed after the decision");
        self.version += 1;
        self.counters.pages_swapped_out += u64::from(swap.n_pages);
        self.n_spilled -= self.table(swap.seq).n_spilled;
        let table = self.table_mut(swap.seq);
        (table.is_swapped, table.n_spilled) = (true, 0);
        let pages: Vec<PageId> = table.held().collect();
        for &page in &pages {
            self.pages.park(page);
        }
        // Those that a running sequence or a pin also holds stay, and so do those that are there.
        for page in pages.into_iter().rev() {
            if self.pages.n_active(page) > 0 || self.pages.tier(page) == Tier::Host {
                continue;
            }
            let has_moved = self.demote(page);
            assert!(has_moved, "a page that is held is not given up");
        }
    }

    /// Decides what it takes to bring a swapped sequence's pages back. `None` when it may not spill
    /// and another one runs on a page that is on the host: it must wait for that one. Changes
    /// nothing.
    pub fn plan_swap_in(&self, seq: SeqId) -> Option<SwapIn> {
        let table = self.table(seq);
        assert!(table.is_swapped, "{seq:?} is not swapped");
        if !table.may_spill && table.held().any(|page| self.is_stuck(page)) {
            return None;
        }
        let n_pages = table.held().filter(|&page| self.is_away(page)).count() as u32;
        Some(SwapIn { seq, n_pages, n_stay: 0, version: self.version })
    }

    /// Carries out a decision: all the sequence's pages are on the device unless it is spilled.
    /// Nothing may have changed since the decision was made, and [`SwapIn::n_pages`] pages must be
    /// available.
    pub fn swap_in(&mut self, swap: SwapIn) {
        assert_eq!(swap.version, self.version, "the cache changed after the decision");
        self.version += 1;
        self.counters.pages_swapped_in += u64::from(swap.n_pages);
        let table = self.table_mut(swap.seq);
        table.is_swapped = false;
        let pages: Vec<PageId> = table.held().collect();
        let away = pages.iter().copied().filter(|&page| self.is_away(page));
        let to_promote: Vec<PageId> = away.skip(swap.n_stay as usize).collect();
        pages.iter().for_each(|&page| self.pages.unpark(page));
        to_promote.into_iter().for_each(|page| self.promote(page));
        let on_host = |page: &&PageId| self.pages.tier(**page) == Tier::Host;
        let n_spilled = pages.iter().filter(on_host).count() as u32;
        self.table_mut(swap.seq).n_spilled = n_spilled;
        self.n_spilled += n_spilled;
        self.counters.pages_spilled += u64::from(n_spilled);
    }

    /// Whether a swapped sequence holds pages that nobody runs on and on which others could: of the
    /// device, or, where they may spill, of either tier.
    pub fn blocks_others(&self, seq: SeqId) -> bool {
        let is_wanted = |page| self.spills() || self.pages.tier(page) == Tier::Device;
        let is_blocked = |page| is_wanted(page) && self.pages.n_active(page) == 0;
        self.table(seq).held().any(is_blocked)
    }

    /// Whether a sequence is swapped out.
    pub fn is_swapped(&self, seq: SeqId) -> bool {
        self.table(seq).is_swapped
    }
}
