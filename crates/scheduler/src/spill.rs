//! Running on pages of the host, when the device has no room for a request whose turn it is.
//!
//! ```text
//!   waiting --admit: fits on both tiers--> running, spilled --unspill--> running on the device
//!                                            |                            ^
//!                                            +-- rest --> swapped --admit-+
//! ```
//!
//! A spilled sequence opens its next pages on the host as long as the device has no room for all that
//! it still needs beside what others need; so the last ones are on the device.
//!
//! How freely that is done depends on what it costs to read a page of the host ([`HostReads`]). If no
//! more than one of the device, every sequence spills before anybody gives way.
//!
//! Over a link, pages that every step of an answer reads would slow down everybody. There a request
//! spills for its prompt, and gets its first token. While it is computed, its pages come to the
//! device as others leave it, a few in each step; when it has its token and the rest has no room
//! there, it *rests*, swapped out, until it has. Only the first of the running sequences goes on as
//! it is, or what the device alone cannot hold would never end.

use nuthatch_cache::Cache;
use nuthatch_types::{HostReads, SeqId};

use crate::Scheduler;
use crate::sequence::{Loss, Sequence};
use crate::step::Step;

/// The share of the time of passes that may be spent on bringing pages to the device.
const UNSPILL_SHARE: f64 = 0.1;

impl Scheduler {
    /// Whether a waiting sequence may get pages of the host.
    ///
    /// Over a link, one that was swapped out waits for room on the device, unless nobody else runs.
    pub(crate) fn may_spill(&self, seq: SeqId) -> bool {
        let is_new = !self.cache.contains(seq);
        let may_now = match self.cache.host_reads() {
            HostReads::Never => false,
            HostReads::Near => true,
            HostReads::Far => is_new || self.running.is_empty(),
        };
        may_now && self.can_spill(self.seq(seq))
    }

    /// Pages of the host that can be had beside those that running sequences still need there.
    pub(crate) fn host_room(&self) -> u32 {
        let promised = match self.cache.host_reads() {
            HostReads::Near => self.outstanding().saturating_sub(self.cache.n_available()),
            HostReads::Never | HostReads::Far => {
                let spilled = self.running.iter().filter(|&&seq| self.seq(seq).is_spilled);
                spilled.map(|&seq| self.pages_outstanding(seq)).sum()
            }
        };
        self.cache.n_host_available().saturating_sub(promised)
    }

    /// How many of the next pages of a running sequence are on the host.
    pub(crate) fn n_to_spill(&self, seq: SeqId, step: &mut Step) -> u32 {
        let sequence = self.seq(seq);
        let is_near = self.cache.host_reads() == HostReads::Near && self.can_spill(sequence);
        if !sequence.is_spilled && !is_near {
            return 0;
        }
        let surplus = *step.surplus.get_or_insert_with(|| self.surplus());
        debug_assert_eq!(surplus, self.surplus(), "who gets a page needs one less");
        let n_short = u32::try_from(-surplus).unwrap_or(0);
        n_short.min(self.pages_outstanding(seq))
    }

    /// Pages of the device that can be had beyond those that running sequences still need.
    fn surplus(&self) -> i64 {
        i64::from(self.cache.n_available()) - i64::from(self.outstanding())
    }

    /// Lets the only running sequence, for which the device is too small, go on to the host. False
    /// when it does already, or may not.
    pub(crate) fn spill_alone(&mut self) -> bool {
        let [seq] = self.running[..] else { return false };
        let may_begin = !self.seq(seq).is_spilled && self.can_spill(self.seq(seq));
        self.seq_mut(seq).is_spilled |= may_begin;
        may_begin
    }

    /// Over a link, brings pages of spilled sequences to the device, and lets those rest that have
    /// their first token and no room.
    ///
    /// This comes before everything else in a step, because a page must not move once it is decided
    /// who reads it where.
    pub(crate) fn settle_spilled(&mut self) {
        if self.cache.host_reads() != HostReads::Far || self.cache.stats().spilled == 0 {
            self.unspill_nanos = 0.0;
            return;
        }
        // What running ones need now, and one page more for each.
        let promised: u32 = self.running.iter().map(|&seq| self.pages_outstanding(seq) + 1).sum();
        let room = |cache: &Cache| cache.n_available().saturating_sub(promised);
        let page_nanos = self.meter.rates().page_nanos.max(1.0);
        for i in 0..self.running.len() {
            let seq = self.running[i];
            let n_affordable = (self.unspill_nanos / page_nanos) as u32;
            let n_pages = room(&self.cache).min(n_affordable);
            let n_before = self.cache.n_copies();
            self.unspill(seq, n_pages);
            // Idle pages that make room for them are copied too.
            let n_copies = self.cache.n_copies() - n_before;
            self.unspill_nanos -= page_nanos * f64::from(n_copies);
        }
        // The last first, because those that rest leave the list.
        for i in (1..self.running.len()).rev() {
            let seq = self.running[i];
            if !self.seq(seq).is_spilled || !self.seq(seq).is_decoding() {
                continue;
            }
            let n_spilled = self.cache.n_spilled(seq);
            if n_spilled <= room(&self.cache) {
                self.unspill(seq, n_spilled);
            } else if let Some(swap) = self.cache.plan_swap_out(seq) {
                self.counters.rests += 1;
                self.give_way(i, Some(swap), Loss::PagesShort);
            } else {
                continue;
            }
            self.seq_mut(seq).is_spilled = false;
        }
    }

    fn unspill(&mut self, seq: SeqId, n_pages: u32) {
        if n_pages == 0 || self.cache.n_spilled(seq) == 0 {
            return;
        }
        for (seq, first_changed) in self.cache.unspill(seq, n_pages) {
            let sequence = self.seq_mut(seq);
            sequence.table_known = sequence.table_known.min(first_changed);
        }
    }

    /// Takes in that a pass took this long. What was not used before is lost, but for one page.
    pub(crate) fn passed(&mut self, pass_nanos: f64) {
        let share = UNSPILL_SHARE * pass_nanos;
        let most = share.max(self.meter.rates().page_nanos);
        self.unspill_nanos = (self.unspill_nanos + share).min(most);
    }

    /// Whether a sequence may ever run on pages of the host. One that streams keeps little, and turns
    /// its pages, which those of the host are not made for.
    pub(crate) fn can_spill(&self, sequence: &Sequence) -> bool {
        self.cache.spills() && sequence.stream.is_none()
    }
}
