//! Every page of the process: its identity and the slot in which it lies.
//!
//! An identity lives as long as its page does and is used again afterwards. A page may change its
//! slot (and, with more tiers, its tier) without changing its identity.

use nuthatch_types::{PageId, Slot};

use crate::page::{FullPage, OpenPage};
use crate::pool::Pool;

/// Every page of the process.
#[derive(Debug)]
pub(crate) struct Pages {
    page_len: u32,
    device: Pool,
    /// `[n_pages]` the slot of each living page.
    places: Vec<Option<Slot>>,
    /// Identities without a page; the next one to be used is last.
    free_ids: Vec<PageId>,
}

impl Pages {
    /// `n_pages` free pages of `page_len` tokens.
    pub(crate) fn new(n_pages: u32, page_len: u32) -> Self {
        Pages {
            page_len,
            device: Pool::new(n_pages),
            places: vec![None; n_pages as usize],
            free_ids: (0..n_pages).rev().map(PageId).collect(),
        }
    }

    /// A page with no tokens, or `None` when no slot is free.
    pub(crate) fn open(&mut self) -> Option<OpenPage> {
        let slot = self.device.open()?;
        let id = self.free_ids.pop().expect("there are as many identities as slots");
        self.places[id.0 as usize] = Some(slot);
        Some(OpenPage::new(id, self.page_len))
    }

    /// Frees a page that was never sealed.
    pub(crate) fn discard(&mut self, page: OpenPage) {
        self.free(page.id());
    }

    /// Frees a sealed page.
    pub(crate) fn release(&mut self, page: FullPage) {
        self.free(page.id());
    }

    /// Where a living page lies.
    pub(crate) fn slot(&self, id: PageId) -> Slot {
        self.places[id.0 as usize].expect("a page with a handle is alive")
    }

    /// Pages in use.
    pub(crate) fn n_used(&self) -> u32 {
        self.device.n_slots() - self.device.n_free()
    }

    /// Pages that can be opened.
    pub(crate) fn n_free(&self) -> u32 {
        self.device.n_free()
    }

    /// The slots, for `verify`.
    pub(crate) fn device(&self) -> &Pool {
        &self.device
    }

    /// The living pages and their slots, for `verify`.
    pub(crate) fn living(&self) -> impl Iterator<Item = (PageId, Slot)> + '_ {
        let living = |(i, slot): (usize, &Option<Slot>)| slot.map(|slot| (PageId(i as u32), slot));
        self.places.iter().enumerate().filter_map(living)
    }

    fn free(&mut self, id: PageId) {
        let slot = self.places[id.0 as usize].take().expect("a page with a handle is alive");
        self.device.free(slot);
        self.free_ids.push(id);
    }
}
