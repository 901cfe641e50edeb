//! Every page of the process: its identity, the slot in which it lies, and how many tables hold it.
//!
//! An identity lives as long as its page does and is used again afterwards. A page may change its
//! slot (and, with more tiers, its tier) without changing its identity.

use nuthatch_types::{PageId, Slot};

use crate::page::{FullPage, OpenPage, SharedPage};
use crate::pool::Pool;

/// Every page of the process.
#[derive(Debug)]
pub(crate) struct Pages {
    page_len: u32,
    device: Pool,
    /// `[n_pages]` the living pages.
    records: Vec<Option<Record>>,
    /// Identities without a page; the next one to be used is last.
    free_ids: Vec<PageId>,
    n_open: u32,
    n_idle: u32,
}

/// What is known of a living page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    /// Handles to the page.
    pub(crate) n_refs: u32,
    pub(crate) state: State,
}

/// How far a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It is written by its owner.
    Open,
    /// It is never written again, and goes when nobody holds it.
    Full,
    /// It is never written again, and stays in the prefix tree when nobody holds it.
    Cached,
}

/// What became of a page when a handle was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// Others hold it.
    InUse,
    /// Nobody holds it, and it stays in the prefix tree.
    Idle,
    /// It is free.
    Freed,
}

impl Pages {
    /// `n_pages` free pages of `page_len` tokens.
    pub(crate) fn new(n_pages: u32, page_len: u32) -> Self {
        Pages {
            page_len,
            device: Pool::new(n_pages),
            records: vec![None; n_pages as usize],
            free_ids: (0..n_pages).rev().map(PageId).collect(),
            n_open: 0,
            n_idle: 0,
        }
    }

    /// A page with no tokens, or `None` when no slot is free.
    pub(crate) fn open(&mut self) -> Option<OpenPage> {
        let slot = self.device.open()?;
        let id = self.free_ids.pop().expect("there are as many identities as slots");
        self.records[id.0 as usize] = Some(Record { slot, n_refs: 1, state: State::Open });
        self.n_open += 1;
        Some(OpenPage::new(id, self.page_len))
    }

    /// Frees a page that was never sealed.
    pub(crate) fn discard(&mut self, page: OpenPage) {
        self.n_open -= 1;
        self.free(page.id());
    }

    /// Frees a sealed page that nobody else has seen.
    pub(crate) fn drop_full(&mut self, page: FullPage) {
        self.n_open -= 1;
        self.free(page.id());
    }

    /// Makes a sealed page one that can be shared.
    pub(crate) fn make_shared(&mut self, page: FullPage, state: State) -> SharedPage {
        assert_ne!(state, State::Open, "a sealed page is never written again");
        self.n_open -= 1;
        self.record_mut(page.id()).state = state;
        SharedPage::new(page.id())
    }

    /// One more handle to a page that is never written again. Says whether it was idle before.
    pub(crate) fn share(&mut self, id: PageId) -> (SharedPage, bool) {
        let record = self.record_mut(id);
        assert_ne!(record.state, State::Open, "{id:?} is still written");
        record.n_refs += 1;
        let was_idle = record.n_refs == 1;
        self.n_idle -= u32::from(was_idle);
        (SharedPage::new(id), was_idle)
    }

    /// Gives a handle back.
    pub(crate) fn release(&mut self, page: SharedPage) -> Released {
        let record = self.record_mut(page.id());
        record.n_refs -= 1;
        match (record.n_refs, record.state) {
            (1.., _) => Released::InUse,
            (0, State::Cached) => {
                self.n_idle += 1;
                Released::Idle
            }
            (0, State::Full | State::Open) => {
                self.free(page.id());
                Released::Freed
            }
        }
    }

    /// Frees an idle page that has left the prefix tree.
    pub(crate) fn evict(&mut self, id: PageId) {
        assert!(self.is_idle(id), "{id:?} is held by a table");
        self.n_idle -= 1;
        self.free(id);
    }

    /// Where a living page lies.
    pub(crate) fn slot(&self, id: PageId) -> Slot {
        self.record(id).slot
    }

    /// Whether a living page is in the prefix tree and nobody holds it.
    pub(crate) fn is_idle(&self, id: PageId) -> bool {
        let record = self.record(id);
        record.n_refs == 0 && record.state == State::Cached
    }

    /// Whether a living page is still written.
    pub(crate) fn is_open(&self, id: PageId) -> bool {
        self.record(id).state == State::Open
    }

    /// Pages that some table holds.
    pub(crate) fn n_used(&self) -> u32 {
        self.device.n_slots() - self.device.n_free() - self.n_idle
    }

    /// Pages that their owners still write.
    pub(crate) fn n_open(&self) -> u32 {
        self.n_open
    }

    /// Pages of the prefix tree that nobody holds.
    pub(crate) fn n_idle(&self) -> u32 {
        self.n_idle
    }

    /// Pages that hold nothing.
    pub(crate) fn n_free(&self) -> u32 {
        self.device.n_free()
    }

    /// The slots, for `verify`.
    pub(crate) fn device(&self) -> &Pool {
        &self.device
    }

    /// The living pages, for `verify`.
    pub(crate) fn living(&self) -> impl Iterator<Item = (PageId, Record)> + '_ {
        let living = |(i, record): (usize, &Option<Record>)| record.map(|r| (PageId(i as u32), r));
        self.records.iter().enumerate().filter_map(living)
    }

    fn record(&self, id: PageId) -> &Record {
        self.records[id.0 as usize].as_ref().expect("the page is alive")
    }

    fn record_mut(&mut self, id: PageId) -> &mut Record {
        self.records[id.0 as usize].as_mut().expect("the page is alive")
    }

    fn free(&mut self, id: PageId) {
        let record = self.records[id.0 as usize].take().expect("the page is alive");
        self.device.free(record.slot);
        self.free_ids.push(id);
    }
}
