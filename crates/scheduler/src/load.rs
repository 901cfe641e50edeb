//! Pages that a slower tier holds: asked for when a sequence is admitted, awaited, or computed.
//!
//! A sequence whose beginning is loading has its place among the running ones and is left out of
//! the steps. When the load has ended, or is too late, the steps compute what did not come.

use std::ops::Range;

use nuthatch_cache::{Load, LoadId, Outcome, Salt};
use nuthatch_types::{PageId, SeqId, StepPlan, TokenId};

use crate::Scheduler;
use crate::cost::{Source, StoredPages};
use crate::sequence::Sequence;
use crate::step::Flight;

impl Scheduler {
    /// The loads that can begin now, to be asked for after each plan, or its commit. Each must be
    /// completed by [`Scheduler::complete_load`] some time, also when its sequence has ended
    /// meanwhile.
    ///
    /// [`Scheduler::plan`] gives `None` while there is nothing to do but to wait for them.
    pub fn take_loads(&mut self) -> Vec<Load> {
        // The page that was in a slot before may still have to be copied to the host.
        if self.in_flight.is_some() || self.cache.n_copies() > 0 {
            return Vec::new();
        }
        std::mem::take(&mut self.loads)
    }

    /// Takes in what became of a load. The sequence that waited for it goes on with what came.
    pub fn complete_load(&mut self, id: LoadId, outcome: Outcome) {
        let seq = self.cache.waits_for(id);
        let sequence = seq.and_then(|seq| self.seqs.get_mut(&seq));
        let tokens = sequence.as_ref().map_or(&[][..], |sequence| sequence.tokens.settled());
        self.cache.complete_load(id, outcome, tokens);
        let Some(sequence) = sequence else { return };
        sequence.computed = self.cache.len(sequence.id);
        sequence.cached = sequence.computed.min(sequence.n_prompt);
        sequence.n_loading = 0;
        let (seq, computed) = (sequence.id, sequence.computed);
        if self.config.window.is_some() {
            self.cache.slide(seq, computed);
        }
    }

    /// The tokens that are computed next if the sequence that waits for a load goes on before it has
    /// ended; `None` where it may not: there must be nobody else who could be computed meanwhile, or
    /// would have to wait with it.
    pub fn early_tokens(&self, id: LoadId) -> Option<Range<u32>> {
        let seq = self.cache.waits_for(id)?;
        let is_alone = self.running == [seq]
            && self.queue.len() == 0
            && self.held.is_empty()
            && self.swapped.is_empty()
            && self.in_flight.is_none()
            && self.loads.is_empty()
            && self.cache.n_copies() == 0;
        let sequence = self.seq(seq);
        let is_plain = sequence.stream.is_none() && !sequence.is_spilled && !sequence.is_guided;
        if !is_alone || !is_plain || self.config.window.is_some() {
            return None;
        }
        let page_len = self.cache.config().page_len;
        let start = self.cache.len(seq) + sequence.n_loading * page_len;
        let end = sequence.tokens.len().min(start + self.config.max_batched_tokens);
        // Slots may be held by loads that nobody waits for.
        let has_room = self.cache.n_available() >= (end - start).div_ceil(page_len);
        has_room.then_some(start..end)
    }

    /// Plans the step of a sequence that may go on before its load has ended. What is loaded must have
    /// come when the step ends, or [`Scheduler::undo`] must follow instead of a commit.
    pub fn plan_early(&mut self, id: LoadId) -> Option<StepPlan> {
        self.complete_load(id, Outcome::Coming);
        self.plan()
    }

    /// Takes in that nothing was computed in the step planned last, because of the pages that its only
    /// sequence loads the last `n_lost` did not come. They are computed.
    pub fn undo(&mut self, n_lost: u32) {
        let in_flight = self.in_flight.take().expect("a plan was made and not yet committed");
        let page_len = self.cache.config().page_len;
        for Flight { seq, .. } in in_flight.flights {
            let sequence = self.seqs.get_mut(&seq).expect("nothing happened meanwhile");
            let n_pages = sequence.computed / page_len - n_lost;
            self.cache.cut(seq, n_pages, n_lost);
            self.n_spare -= sequence.n_spare;
            sequence.n_spare = 0;
            sequence.computed = n_pages * page_len;
            sequence.cached = sequence.computed.min(sequence.n_prompt);
            sequence.table_known = sequence.table_known.min(n_pages);
            let computed = &sequence.tokens.settle()[..sequence.computed as usize];
            if let Some(first_changed) = self.cache.seal(seq, computed) {
                sequence.table_known = sequence.table_known.min(first_changed);
            }
        }
    }

    /// Takes in that something slower than the host brought `n_pages` in this time.
    pub fn loaded(&mut self, source: Source, n_pages: u32, nanos: u64) {
        if n_pages > 0 {
            self.meter.loaded(source, n_pages, nanos);
        }
    }

    /// Whether it takes less time to bring pages after the first `n_before` than to compute their
    /// tokens, as far as it was measured.
    pub fn is_worth_loading(&self, n_before: u32, pages: StoredPages) -> bool {
        let page_len = self.cache.config().page_len;
        let n_pages = pages.n_disk + pages.n_remote;
        let (start, end) = (n_before * page_len, (n_before + n_pages) * page_len);
        let rates = self.meter.rates();
        rates.load(pages) < rates.compute(start..end)
    }

    /// The tokens of the sequence that waits for a load, and whose pages it may share; `None` when
    /// nobody waits for it.
    pub fn load_tokens(&self, id: LoadId) -> Option<(Salt, &[TokenId])> {
        let sequence = self.seq(self.cache.waits_for(id)?);
        Some((sequence.hints.salt, sequence.tokens.settled()))
    }

    /// There is something slower than the host: from now on what it could save is remembered
    /// ([`Scheduler::take_published`]), and what it costs to compute tokens is measured.
    pub fn expect_loads(&mut self) {
        self.has_slow_tier = true;
        self.cache.note_published();
    }

    /// The pages that became findable since this was called last. See [`nuthatch_cache::Cache::take_published`].
    pub fn take_published(&mut self) -> Vec<PageId> {
        self.cache.take_published()
    }

    /// Mixes a secret into the names of contents. See [`nuthatch_cache::Cache::mix_key`].
    pub fn mix_key(&mut self, secret: u128) {
        self.cache.mix_key(secret);
    }

    /// Asks for the pages of a sequence, which was just admitted, that a slower tier holds and the
    /// cache did not find. False when there are none, when computing them takes less time, or when it
    /// is spilled: what is loaded comes to the device, where it has no room. The pages of all its
    /// tokens are available.
    pub(crate) fn load_stored(&mut self, seq: SeqId) -> bool {
        let (n_stored, n_before) = (self.n_stored(self.seq(seq)), self.cache.n_pages(seq));
        let n_pages = n_stored.saturating_sub(n_before);
        if n_pages == 0 || self.seq(seq).is_spilled {
            return false;
        }
        let n_remote = self.seq(seq).hints.n_remote.min(n_pages);
        if !self.is_worth_loading(n_before, StoredPages { n_disk: n_pages - n_remote, n_remote }) {
            self.counters.loads_declined += 1;
            self.seq_mut(seq).hints.n_stored = 0;
            return false;
        }
        // What a window has passed is loaded too, and given back at once; only what it sees
        // was counted.
        let is_counted = self.config.window.is_none();
        if !is_counted && self.cache.n_available() < n_pages + self.outstanding() {
            self.counters.loads_declined += 1;
            self.seq_mut(seq).hints.n_stored = 0;
            return false;
        }
        let load = self.cache.prepare_load(seq, n_pages).expect("the pages were counted");
        self.loads.push(load);
        let sequence = self.seq_mut(seq);
        sequence.n_loading = n_pages;
        // What does not come is not asked for again.
        sequence.hints.n_stored = 0;
        true
    }

    /// Full pages at a sequence's beginning that a slower tier holds, without the last token, which
    /// is always computed.
    pub(crate) fn n_stored(&self, sequence: &Sequence) -> u32 {
        if sequence.stream.is_some() || sequence.computes_all() {
            return 0;
        }
        let limit = sequence.n_prompt.min(sequence.tokens.len() - 1);
        sequence.hints.n_stored.min(limit) / self.cache.config().page_len
    }
}
