//! Running on pages of the host, when the device has no room for all of a sequence.
//!
//! ```text
//!   spilled   [ on the host: its first pages ][ on the device: the rest ]
//! ```
//!
//! Attention reads whichever slot a table names, so a spilled sequence has one table like every
//! other; only its pages of the host cost more to read. They are opened there, or were found there
//! and stay.
//!
//! The executor knows where the pages of running tables are. So a page of the host on which a table
//! runs is *stuck*: it moves by [`Cache::unspill`] alone, which says whose tables changed, and never
//! because another sequence finds it. Who finds it runs on it where it is, or, if it may not spill,
//! does not find it.

use nuthatch_types::{HostReads, KvSlots, PageId, SeqId};

use crate::admit::Admission;
use crate::cache::Cache;
use crate::pages::Tier;

impl Cache {
    /// Whether sequences may run on pages of the host.
    pub fn spills(&self) -> bool {
        self.host_reads() != HostReads::Never
    }

    /// What it costs to run on pages of the host; never without any.
    pub fn host_reads(&self) -> HostReads {
        if self.config.n_host_pages > 0 { self.options.host_reads } else { HostReads::Never }
    }

    /// Pages of the host on which an admitted sequence runs.
    pub fn n_spilled(&self, seq: SeqId) -> u32 {
        self.table(seq).n_spilled
    }

    /// The same decision for a sequence that may spill and for which only `room` can be had: as many
    /// pages as do not fit on the device stay on the host or will be opened there. `None` when that
    /// is not possible. Nothing is copied.
    pub fn spill(&self, admission: Admission, room: KvSlots) -> Option<Admission> {
        let mut admission = admission.without_copy();
        let n_over = admission.n_pages().saturating_sub(room.device);
        let away = admission.pages().iter().copied().filter(|&page| self.is_away(page));
        let stay: Vec<PageId> = away.take(n_over as usize).collect();
        let n_stay = stay.len() as u32;
        let n_idle = stay.into_iter().filter(|&page| self.pages.is_idle(page)).count() as u32;
        let n_fresh = n_over - n_stay;
        let fits = admission.may_spill() && n_idle + n_fresh <= room.host;
        admission.leave(n_stay);
        fits.then_some(admission)
    }

    /// Brings up to `n_pages` pages of the host on which a sequence runs to the device, the last
    /// first, where as many must be available. Returns each sequence, this one and others, whose
    /// table changed, with its first entry that did.
    pub fn unspill(&mut self, seq: SeqId, n_pages: u32) -> Vec<(SeqId, u32)> {
        assert!(!self.is_swapped(seq), "{seq:?} is swapped");
        self.version += 1;
        let table = self.table(seq);
        let page = |i: u32| Some((i, table.page(i as usize)?));
        let on_host = |&(_, page): &(u32, PageId)| self.pages.tier(page) == Tier::Host;
        let places = (table.n_out()..table.n_pages()).rev().filter_map(page).filter(on_host);
        let places: Vec<(u32, PageId)> = places.take(n_pages as usize).collect();
        let mut changed = Vec::new();
        for &(i, page) in &places {
            self.counters.pages_unspilled += 1;
            self.promote(page);
            // Whoever shares a page has it at the same place.
            for (&other, table) in &mut self.tables {
                if table.n_spilled > 0 && table.page(i as usize) == Some(page) {
                    table.n_spilled -= 1;
                    self.n_spilled -= 1;
                    changed.push((other, i));
                }
            }
        }
        // Of each table, the first entry.
        changed.sort_unstable();
        changed.dedup_by_key(|&mut (seq, _)| seq);
        changed
    }

    /// Whether a page is on the host and can come to the device.
    pub(crate) fn is_away(&self, page: PageId) -> bool {
        self.pages.tier(page) == Tier::Host && !self.pages.is_run_on(page)
    }

    /// Whether a page is on the host and stays there because a table runs on it.
    pub(crate) fn is_stuck(&self, page: PageId) -> bool {
        self.pages.tier(page) == Tier::Host && self.pages.is_run_on(page)
    }

    /// Counts that a running table has a page in the tier `to` in place of one in `from`.
    pub(crate) fn count_spilled(&mut self, seq: SeqId, from: Tier, to: Option<Tier>) {
        let (less, more) = (u32::from(from == Tier::Host), u32::from(to == Some(Tier::Host)));
        let table = self.table_mut(seq);
        table.n_spilled = table.n_spilled + more - less;
        self.n_spilled = self.n_spilled + more - less;
    }
}
