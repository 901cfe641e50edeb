//! Pages that something slower fills: prepared now, completed later, or never.
//!
//! ```text
//!            prepare_load               complete: ended
//!   admitted -------------> loading ----------------------> its pages are in the table, as many as
//!                              |                            came; the rest is computed
//!                              +-- complete: late, release --> nobody waits; the slots stay taken
//!                              |                              until the load has ended
//!                              +-- complete: coming --> its pages are in the table and come while the
//!                                                       next step runs, with which they are sealed;
//!                                                       what does not come is cut off
//! ```
//!
//! Moves between device and host keep the same protocol in the small: a decision takes the target
//! slot and hands out the copy ([`Cache::take_copies`]), and the end of the step that carries it out
//! completes it. Copies come before everything that reads their targets, so nobody waits for them,
//! and a copy that fails is a fault of the device, after which the cache is cleared.

use nuthatch_types::{SeqId, Slot, TokenId};

use crate::cache::{Cache, Shortfall};
use crate::page::OpenPage;

/// The name of a load, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadId(u64);

/// Slots to be filled with the KV of a sequence's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Its name, to be completed by.
    pub id: LoadId,
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first token.
    pub start: u32,
    /// One slot of the device for each page, in order.
    pub slots: Vec<Slot>,
}

/// What became of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has ended: nothing is written to its slots any more. Pages after the first that did not
    /// come do not count.
    Ended {
        /// The first pages, which hold what they should.
        n_pages: u32,
    },
    /// It goes on, but for too long: its sequence waits no more. Its end must still be told.
    Late,
    /// All its pages come while the next step computes with them. Nobody else finds them before that
    /// step has ended; if some do not come, it is undone and [`Cache::cut`] takes them away.
    Coming,
}

/// A load that has not ended.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Who waits for it.
    seq: Option<SeqId>,
    pages: Vec<OpenPage>,
}

impl Pending {
    /// The pages whose slots are taken.
    pub(crate) fn pages(&self) -> &[OpenPage] {
        &self.pages
    }

    /// Who waits for it.
    pub(crate) fn seq(&self) -> Option<SeqId> {
        self.seq
    }
}

impl Cache {
    /// Takes slots for the next `n_pages` full pages of an admitted sequence, whose last page must be
    /// full: all of them, or none. The sequence gets no other page until the load is completed.
    pub fn prepare_load(&mut self, seq: SeqId, n_pages: u32) -> Result<Load, Shortfall> {
        let table = self.table(seq);
        assert!(table.loading.is_none() && !table.is_swapped, "{seq:?} can load");
        assert_eq!(table.n_pages(), table.n_full(), "a loaded page follows a full one");
        let start = table.len();
        let available = self.n_available();
        if n_pages > available {
            return Err(Shortfall { needed: n_pages, available });
        }
        self.version += 1;
        self.n_loads += 1;
        let id = LoadId(self.n_loads);
        let pages: Vec<OpenPage> = (0..n_pages).map(|_| self.open_page()).collect();
        let slots = pages.iter().map(|page| self.pages.slot(page.id())).collect();
        self.loads.insert(id, Pending { seq: Some(seq), pages });
        self.table_mut(seq).loading = Some(id);
        Ok(Load { id, seq, start, slots })
    }

    /// Who waits for a load; `None` when nobody does.
    pub fn waits_for(&self, id: LoadId) -> Option<SeqId> {
        self.loads.get(&id)?.seq
    }

    /// Takes in what became of a load. `tokens` are those of the sequence that waits for it; without
    /// one they are not looked at. Pages that came are in its table and can be found.
    pub fn complete_load(&mut self, id: LoadId, outcome: Outcome, tokens: &[TokenId]) {
        self.version += 1;
        let load = self.loads.get_mut(&id).expect("a load ends once");
        let seq = load.seq.take();
        if let Some(seq) = seq {
            self.table_mut(seq).loading = None;
        }
        if outcome == Outcome::Late {
            return;
        }
        let load = self.loads.remove(&id).expect("a load ends once");
        let n_pages = match outcome {
            Outcome::Ended { n_pages } => n_pages,
            Outcome::Late | Outcome::Coming => load.pages.len() as u32,
        };
        assert!(n_pages as usize <= load.pages.len(), "no more pages come than were asked for");
        let page_len = self.config.page_len;
        for (i, page) in load.pages.into_iter().enumerate() {
            match seq {
                Some(seq) if i < n_pages as usize => {
                    self.table_mut(seq).append(page, page_len);
                    self.open_tokens += page_len;
                    self.counters.pages_loaded += 1;
                }
                Some(_) | None => {
                    self.counters.pages_not_loaded += 1;
                    self.pages.discard(page);
                }
            }
        }
        if let Some(seq) = seq
            && outcome != Outcome::Coming
        {
            let computed = &tokens[..self.len(seq) as usize];
            self.seal(seq, computed);
        }
    }

    /// Takes the pages of a sequence after its first `n_pages` away, of which `n_lost` were loaded and
    /// did not come. None of them is sealed.
    pub fn cut(&mut self, seq: SeqId, n_pages: u32, n_lost: u32) {
        self.version += 1;
        self.counters.pages_loaded -= u64::from(n_lost);
        self.counters.pages_not_loaded += u64::from(n_lost);
        while self.table(seq).n_pages() > n_pages {
            let page = self.table_mut(seq).pop_open();
            self.open_tokens -= page.len();
            self.pages.discard(page);
        }
    }

    /// Loads that have not ended.
    pub fn n_loads(&self) -> u32 {
        self.loads.len() as u32
    }

    /// Lets the load of a released sequence go on without it.
    pub(crate) fn abandon_load(&mut self, id: LoadId) {
        self.loads.get_mut(&id).expect("a table's load has not ended").seq = None;
    }
}
