//! Every page of the process: its identity, the slot in which it lies, and how many tables hold it.
//!
//! An identity lives as long as its page does and is used again afterwards. A page may change its
//! slot, and with it its tier, without changing its identity.

use nuthatch_types::{KvSlots, PageCopy, PageId, Slot};

use crate::page::{FullPage, OpenPage, SharedPage};
use crate::pool::Pool;

/// Where a page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// On the device: every sequence can run on it.
    Device,
    /// On the host: it must come back first, unless the sequence is spilled.
    Host,
}

/// Every page of the process.
#[derive(Debug)]
pub(crate) struct Pages {
    page_len: u32,
    slots: KvSlots,
    /// `[tier]`
    pools: [Pool; 2],
    /// `[n_slots of both tiers]` the living pages.
    records: Vec<Option<Record>>,
    /// Identities without a page; the next one to be used is last.
    free_ids: Vec<PageId>,
    n_open: u32,
    /// `[tier]`
    n_idle: [u32; 2],
}

/// What is known of a living page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    /// Handles to the page.
    pub(crate) n_refs: u32,
    /// Handles of those that belong to swapped tables, which do not care where the page lies.
    pub(crate) n_parked: u32,
    /// Handles of those that belong to pins, which do not care either.
    pub(crate) n_pinned: u32,
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
    /// Free pages of `page_len` tokens in both tiers.
    pub(crate) fn new(slots: KvSlots, page_len: u32) -> Self {
        let KvSlots { device, .. } = slots;
        let n_all = slots.total();
        Pages {
            page_len,
            slots,
            pools: [Pool::new(0..device), Pool::new(device..n_all)],
            records: vec![None; n_all as usize],
            free_ids: (0..n_all).rev().map(PageId).collect(),
            n_open: 0,
            n_idle: [0; 2],
        }
    }

    /// A page with no tokens in a tier, or `None` when no slot is free there.
    pub(crate) fn open(&mut self, tier: Tier) -> Option<OpenPage> {
        let slot = self.pools[tier as usize].open()?;
        let id = self.free_ids.pop().expect("there are as many identities as slots");
        let record = Record { slot, n_refs: 1, n_parked: 0, n_pinned: 0, state: State::Open };
        self.records[id.0 as usize] = Some(record);
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
        let tier = self.tier(id);
        let record = self.record_mut(id);
        assert_ne!(record.state, State::Open, "{id:?} is still written");
        record.n_refs += 1;
        let was_idle = record.n_refs == 1;
        self.n_idle[tier as usize] -= u32::from(was_idle);
        (SharedPage::new(id), was_idle)
    }

    /// Gives a handle back, which neither a swapped table nor a pin holds.
    pub(crate) fn release(&mut self, page: SharedPage) -> Released {
        let tier = self.tier(page.id());
        let record = self.record_mut(page.id());
        record.n_refs -= 1;
        let n_others = record.n_parked + record.n_pinned;
        assert!(n_others <= record.n_refs, "{:?} has only parked and pinned handles", page.id());
        match (record.n_refs, record.state) {
            (1.., _) => Released::InUse,
            (0, State::Cached) => {
                self.n_idle[tier as usize] += 1;
                Released::Idle
            }
            (0, State::Full | State::Open) => {
                self.free(page.id());
                Released::Freed
            }
        }
    }

    /// Records that one of the handles belongs to a swapped table from now on.
    pub(crate) fn park(&mut self, id: PageId) {
        let record = self.record_mut(id);
        record.n_parked += 1;
        assert!(record.n_parked <= record.n_refs, "{id:?} has no handle to park");
    }

    /// The opposite of [`Pages::park`].
    pub(crate) fn unpark(&mut self, id: PageId) {
        self.record_mut(id).n_parked -= 1;
    }

    /// Records that one of the handles belongs to a pin from now on.
    pub(crate) fn pin(&mut self, id: PageId) {
        self.record_mut(id).n_pinned += 1;
    }

    /// The opposite of [`Pages::pin`].
    pub(crate) fn unpin(&mut self, id: PageId) {
        self.record_mut(id).n_pinned -= 1;
    }

    /// Frees an idle page that has left the prefix tree.
    pub(crate) fn evict(&mut self, id: PageId) {
        assert!(self.is_idle(id), "{id:?} is held by a table");
        self.n_idle[self.tier(id) as usize] -= 1;
        self.free(id);
    }

    /// Gives a page a place in the other tier, where a slot must be free, and frees its old one. The
    /// bytes follow by the copy that is returned.
    pub(crate) fn relocate(&mut self, id: PageId, to: Tier) -> PageCopy {
        let from = self.tier(id);
        assert_ne!(from, to, "{id:?} is there already");
        let target = self.pools[to as usize].open().expect("a slot is free");
        let source = std::mem::replace(&mut self.record_mut(id).slot, target);
        self.pools[from as usize].free(source);
        if self.is_idle(id) {
            self.n_idle[from as usize] -= 1;
            self.n_idle[to as usize] += 1;
        }
        PageCopy { source, target }
    }

    /// Lets a held page of the host take over the place of a sealed one on the device that holds the
    /// same tokens, whose identity ends.
    pub(crate) fn take_over(&mut self, id: PageId, page: FullPage) {
        assert!(!self.is_idle(id) && self.tier(id) == Tier::Host, "{id:?} is a held host page");
        let gone = self.records[page.id().0 as usize].take().expect("the page is alive");
        let source = std::mem::replace(&mut self.record_mut(id).slot, gone.slot);
        self.pools[Tier::Host as usize].free(source);
        self.free_ids.push(page.id());
        self.n_open -= 1;
    }

    /// Makes a page that tables hold go when nobody holds it any more, because it has left the
    /// prefix tree.
    pub(crate) fn hide(&mut self, id: PageId) {
        let record = self.record_mut(id);
        assert!(record.n_refs > 0 && record.state == State::Cached, "{id:?} is held and cached");
        record.state = State::Full;
    }

    /// Handles to a living page.
    pub(crate) fn n_refs(&self, id: PageId) -> u32 {
        self.record(id).n_refs
    }

    /// Where a living page lies.
    pub(crate) fn slot(&self, id: PageId) -> Slot {
        self.record(id).slot
    }

    /// The tier in which a living page lies.
    pub(crate) fn tier(&self, id: PageId) -> Tier {
        self.tier_of(self.slot(id))
    }

    /// The tier of a slot.
    pub(crate) fn tier_of(&self, slot: Slot) -> Tier {
        if slot.0 < self.slots.device { Tier::Device } else { Tier::Host }
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

    /// Handles to a living page that do not belong to swapped tables.
    pub(crate) fn n_active(&self, id: PageId) -> u32 {
        let record = self.record(id);
        record.n_refs - record.n_parked
    }

    /// Whether a table that is not swapped holds a living page, so that its place is known to the
    /// executor.
    pub(crate) fn is_run_on(&self, id: PageId) -> bool {
        self.n_active(id) > self.record(id).n_pinned
    }

    /// Pages of a tier that some table or pin holds.
    pub(crate) fn n_used(&self, tier: Tier) -> u32 {
        let pool = self.pool(tier);
        pool.n_slots() - pool.n_free() - self.n_idle(tier)
    }

    /// Pages that their owners still write.
    pub(crate) fn n_open(&self) -> u32 {
        self.n_open
    }

    /// Pages of the prefix tree in a tier that nobody holds.
    pub(crate) fn n_idle(&self, tier: Tier) -> u32 {
        self.n_idle[tier as usize]
    }

    /// Slots of a tier that hold nothing.
    pub(crate) fn n_free(&self, tier: Tier) -> u32 {
        self.pool(tier).n_free()
    }

    /// Slots of a tier that can be had: free ones, and those of idle pages.
    pub(crate) fn n_available(&self, tier: Tier) -> u32 {
        self.n_free(tier) + self.n_idle(tier)
    }

    /// The slots of a tier, for `verify`.
    pub(crate) fn pool(&self, tier: Tier) -> &Pool {
        &self.pools[tier as usize]
    }

    /// What is known of a page, if it is alive.
    pub(crate) fn get(&self, id: PageId) -> Option<&Record> {
        self.records.get(id.0 as usize)?.as_ref()
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
        let tier = self.tier_of(record.slot);
        self.pools[tier as usize].free(record.slot);
        self.free_ids.push(id);
    }
}
