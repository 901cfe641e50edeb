//! What must hold after every operation.

use std::collections::{BTreeMap, BTreeSet};

use nuthatch_cache::{CachedPage, ContentId, Event, Salt, Tier};
use nuthatch_types::SeqId;

use super::{Cached, Entry, Model, Path, Seq};

impl Model {
    pub(super) fn check(&self) {
        self.cache.verify().expect("every invariant holds");
        let stats = self.cache.stats();
        let idle = |on_host| self.idle(on_host).len() as u32;
        assert_eq!((stats.pages_idle, stats.host_idle), (idle(false), idle(true)));
        assert_eq!(stats.pages_free, self.n_pages - self.n_taken(false));
        assert_eq!(stats.host_free, self.n_host - self.n_taken(true));
        assert_eq!(stats.pages_free + stats.pages_used + stats.pages_idle, self.n_pages);
        assert_eq!(stats.host_free + stats.host_used + stats.host_idle, self.n_host);
        let n_used = (stats.pages_used + stats.host_used) as usize;
        let n_own: usize = self.seqs.values().map(|seq| seq.n_own(self.page_len)).sum();
        let own = |seq: &Seq| seq.len - (seq.full.len() - seq.n_sinks()) * self.page_len;
        let stored = (n_used - n_own) * self.page_len + self.seqs.values().map(own).sum::<usize>();
        assert_eq!(stats.tokens_stored as usize, stored);
        assert_eq!(stats.tokens_wasted as usize, n_used * self.page_len - stored);
        for (&id, seq) in &self.seqs {
            self.check_seq(id, seq);
        }
        let n_spilled = self.seqs.keys().map(|&seq| self.cache.n_spilled(seq)).sum();
        assert_eq!(stats.spilled, n_spilled);
    }

    /// Takes in the events: nothing is stored twice, and only what was stored is removed.
    pub(super) fn hear(&mut self) {
        for event in self.cache.take_events() {
            match event {
                Event::Stored(page) => {
                    let before = self.heard.insert((page.id, page.tier), page);
                    assert_eq!(before, None, "stored twice");
                }
                Event::Removed { id, tier } => {
                    assert!(self.heard.remove(&(id, tier)).is_some(), "removed, but never stored");
                }
                Event::Cleared => self.heard.clear(),
            }
        }
    }

    /// Who hears the events knows what can be found, and where.
    pub(super) fn check_heard(&self) {
        let listed = self.cache.cached_pages();
        assert_eq!(listed.len(), self.heard.len());
        assert!(listed.iter().all(|page| self.heard.get(&(page.id, page.tier)) == Some(page)));
        let by_id: BTreeMap<ContentId, &CachedPage> =
            self.heard.values().map(|page| (page.id, page)).collect();
        assert_eq!(by_id.len(), self.heard.len(), "a page is in one tier");
        let path = |page: &CachedPage| {
            let (mut tokens, mut at) = (page.tokens.to_vec(), page);
            while let Some(parent) = at.parent {
                at = by_id[&parent];
                tokens.splice(0..0, at.tokens.iter().copied());
            }
            (at.salt.is_some(), tokens, page.tier == Tier::Host)
        };
        let heard: BTreeSet<_> = self.heard.values().map(path).collect();
        let known = |((salt, tokens), cached): (&Path, &Cached)| {
            (*salt != Salt::default(), tokens.clone(), self.on_host[&cached.id])
        };
        assert_eq!(heard, self.cached.iter().map(known).collect());
    }

    /// Every token of a sequence is where it should be, as it was computed.
    fn check_seq(&self, id: SeqId, seq: &Seq) {
        assert_eq!(self.cache.len(id) as usize, seq.len);
        assert_eq!(self.cache.n_dropped(id) as usize, seq.dropped);
        let n_full = seq.ids().filter(|id| self.on_host[id]).count();
        let n_own = seq.own.iter().filter(|&&on_host| on_host).count();
        let n_spilled = if seq.is_swapped { 0 } else { n_full + n_own };
        assert_eq!(self.cache.n_spilled(id) as usize, n_spilled);
        assert!(n_spilled == 0 || seq.may_spill, "{id:?} runs on the device");
        for place in 0..seq.computed - seq.dropped {
            let located = self.cache.locate(id, place as u32);
            if seq.full.get(place / self.page_len) == Some(&Entry::Out) {
                assert_eq!(located, None);
                continue;
            }
            let (page, offset) = located.expect("has a place");
            let slot = self.cache.slot(page);
            assert_eq!(self.cache.slots(id, 0).nth(place / self.page_len), Some(slot));
            let read = self.arena[slot.0 as usize][offset as usize].as_ref();
            let is_sink = place < seq.n_sinks() * self.page_len;
            let token = if is_sink { place } else { place + seq.dropped };
            let expected = ((seq.salt, seq.tokens[..=token].to_vec()), seq.marks[token]);
            assert_eq!(read, Some(&expected), "{id:?} at {place}");
        }
        assert_eq!(self.cache.locate(id, seq.len as u32), None);
    }
}
