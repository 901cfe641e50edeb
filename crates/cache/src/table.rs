//! A sequence's pages in order of position.
//!
//! ```text
//!   tokens   [0, sealed)             [sealed, len)              [len, n_pages * page_len)
//!   pages    full: never written     open: written by this      room of the last page:
//!            again, perhaps shared   sequence only              the only waste
//! ```
//!
//! Two kinds of tables do not hold all their tokens. In the first, the model sees no further back
//! than a window, and the pages before it are gone; positions stay as they are (`window`). In the
//! second, pages after the sinks were dropped, and the table closed up (`stream`).
//!
//! ```text
//!   windowed     out: no page      full              open
//!   streaming    sinks: rewritten  full              open
//!                with each drop
//! ```

use std::collections::VecDeque;

use nuthatch_types::{PageId, Window};

use crate::load::LoadId;
use crate::page::{FullPage, OpenPage, SharedPage};
use crate::{Retention, Salt};

/// A sequence's pages in order of position.
#[derive(Debug)]
pub(crate) struct Table {
    page_len: u32,
    pub(crate) salt: Salt,
    pub(crate) retention: Retention,
    pub(crate) window: Option<Window>,
    /// Whether it may run on pages of the host.
    pub(crate) may_spill: bool,
    /// Entries whose pages are on the host although it runs; 0 while it is swapped.
    pub(crate) n_spilled: u32,
    /// Whether its own pages are on the host. Nothing is computed meanwhile.
    pub(crate) is_swapped: bool,
    /// The load that brings its next pages, if there is one. It gets no others meanwhile.
    pub(crate) loading: Option<LoadId>,
    /// Pages at the front that left the window.
    n_out: u32,
    /// The first pages, turned to where they stand since pages after them were dropped; none before.
    sinks: Vec<OpenPage>,
    /// What `sinks` are made of: the same pages as they were computed.
    pristine: Vec<SharedPage>,
    full: VecDeque<SharedPage>,
    open: VecDeque<OpenPage>,
    len: u32,
    n_dropped: u32,
}

impl Table {
    /// A table of no pages.
    pub(crate) fn new(page_len: u32, salt: Salt, retention: Retention) -> Self {
        Table {
            page_len,
            salt,
            retention,
            window: None,
            may_spill: false,
            n_spilled: 0,
            is_swapped: false,
            loading: None,
            n_out: 0,
            sinks: Vec::new(),
            pristine: Vec::new(),
            full: VecDeque::new(),
            open: VecDeque::new(),
            len: 0,
            n_dropped: 0,
        }
    }

    /// Tokens that have a place, or had one before the window.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Entries of the table.
    pub(crate) fn n_pages(&self) -> u32 {
        self.n_full() + self.open.len() as u32
    }

    /// Entries at the front that have no page, because it left the window.
    pub(crate) fn n_out(&self) -> u32 {
        self.n_out
    }

    /// Entries that no token is written to any more.
    pub(crate) fn n_full(&self) -> u32 {
        self.n_out + (self.sinks.len() + self.full.len()) as u32
    }

    /// The last of the pages that are never written again.
    pub(crate) fn last_full(&self) -> Option<PageId> {
        self.full.back().map(SharedPage::id)
    }

    /// Tokens that were dropped.
    pub(crate) fn n_dropped(&self) -> u32 {
        self.n_dropped
    }

    /// Tokens that still find a place in the last page.
    pub(crate) fn room(&self) -> u32 {
        self.open.back().map_or(0, OpenPage::room)
    }

    /// New pages that `n_tokens` more tokens need.
    pub(crate) fn pages_needed(&self, n_tokens: u32) -> u32 {
        n_tokens.saturating_sub(self.room()).div_ceil(self.page_len)
    }

    /// Whether its tokens can be computed now.
    pub(crate) fn may_grow(&self) -> bool {
        !self.is_swapped && self.loading.is_none()
    }

    /// Begins with `n_pages` entries whose pages left the window.
    pub(crate) fn begin_out(&mut self, n_pages: u32) {
        assert_eq!(self.len, 0, "they come before everything");
        self.n_out = n_pages;
        self.len = n_pages * self.page_len;
    }

    /// Appends a full page. No page may be open.
    pub(crate) fn push_full(&mut self, page: SharedPage) {
        assert!(self.open.is_empty(), "full pages come before open ones");
        self.full.push_back(page);
        self.len += self.page_len;
    }

    /// Appends an open page that already has tokens. No page may be open.
    pub(crate) fn push_open(&mut self, page: OpenPage) {
        assert!(self.open.is_empty(), "only the last page has room");
        self.len += page.len();
        self.open.push_back(page);
    }

    /// Gives places in the last page to the first of `n_tokens` more tokens, and says how many are
    /// left.
    pub(crate) fn fill(&mut self, n_tokens: u32) -> u32 {
        let left = self.open.back_mut().map_or(n_tokens, |last| last.advance(n_tokens));
        self.len += n_tokens - left;
        left
    }

    /// Appends an empty page, for the first of `n_tokens` more tokens, and says how many are left. No
    /// page may have room.
    pub(crate) fn append(&mut self, mut page: OpenPage, n_tokens: u32) -> u32 {
        assert!(n_tokens > 0 && self.room() == 0, "a page without a token is not needed");
        let left = page.advance(n_tokens);
        self.len += n_tokens - left;
        self.open.push_back(page);
        left
    }

    /// Takes the last page away, which is open.
    pub(crate) fn pop_open(&mut self) -> OpenPage {
        let page = self.open.pop_back().expect("the last page is open");
        self.len -= page.len();
        page
    }

    /// Takes out the first open page if it lies wholly in the first `n_computed` tokens. The caller
    /// puts a page with the same tokens in its place by [`Table::put_full`].
    pub(crate) fn take_full(&mut self, n_computed: u32) -> Option<FullPage> {
        assert!(n_computed <= self.len, "a computed token has a place");
        if self.n_full() >= n_computed / self.page_len {
            return None;
        }
        let page = self.open.pop_front().expect("every page is full or open");
        Some(page.seal().expect("a page before the last has no room"))
    }

    /// See [`Table::take_full`].
    pub(crate) fn put_full(&mut self, page: SharedPage) {
        self.full.push_back(page);
    }

    /// Takes the first page out if it is among the first `n_out`. Its entry stays, without a page.
    pub(crate) fn take_out(&mut self, n_out: u32) -> Option<SharedPage> {
        if self.n_out >= n_out {
            return None;
        }
        let page = self.full.pop_front().expect("a page that left the window is full");
        self.n_out += 1;
        Some(page)
    }

    /// Takes the oldest page after the first `n_sinks` out, and its entry. Every page must be full.
    pub(crate) fn drop_after(&mut self, n_sinks: u32) -> SharedPage {
        assert!(self.open.is_empty() && self.n_out == 0, "a table of full pages, from the start");
        let place = n_sinks as usize - self.sinks.len();
        let page = self.full.remove(place).expect("a page follows the sinks");
        self.len -= self.page_len;
        self.n_dropped += self.page_len;
        page
    }

    /// Puts pages of its own in the place of the first ones, which are kept beside the table.
    pub(crate) fn put_sinks(&mut self, sinks: Vec<OpenPage>) {
        assert!(self.sinks.is_empty(), "sinks are put once");
        assert!(sinks.iter().all(|page| page.room() == 0), "sinks are full");
        self.pristine = self.full.drain(..sinks.len()).collect();
        self.sinks = sinks;
    }

    /// Each sink as it was computed, and as it stands in the table.
    pub(crate) fn sinks(&self) -> impl Iterator<Item = (PageId, PageId)> + '_ {
        self.pristine.iter().map(SharedPage::id).zip(self.sinks.iter().map(OpenPage::id))
    }

    /// The page and the place in it of the token at `position`, or `None` when it has none.
    pub(crate) fn locate(&self, position: u32) -> Option<(PageId, u32)> {
        if position >= self.len {
            return None;
        }
        let page = self.page((position / self.page_len) as usize)?;
        Some((page, position % self.page_len))
    }

    /// The pages from the `start`-th entry on, without those that left the window.
    pub(crate) fn pages(&self, start: usize) -> impl DoubleEndedIterator<Item = PageId> + '_ {
        (start.max(self.n_out as usize)..self.n_pages() as usize).filter_map(|i| self.page(i))
    }

    /// The page of an entry, or `None` when it left the window.
    pub(crate) fn page(&self, idx: usize) -> Option<PageId> {
        let held = idx.checked_sub(self.n_out as usize)?;
        if let Some(sink) = self.sinks.get(held) {
            return Some(sink.id());
        }
        let after_sinks = held - self.sinks.len();
        match self.full.get(after_sinks) {
            Some(page) => Some(page.id()),
            None => self.open.get(after_sinks - self.full.len()).map(OpenPage::id),
        }
    }

    /// Takes the table apart: pages that are never written again, and pages of its own.
    pub(crate) fn into_pages(self) -> (Vec<SharedPage>, Vec<OpenPage>) {
        let full = self.pristine.into_iter().chain(self.full).collect();
        (full, self.sinks.into_iter().chain(self.open).collect())
    }

    /// Every page that it holds, also those from which the sinks are made.
    pub(crate) fn held(&self) -> impl DoubleEndedIterator<Item = PageId> + '_ {
        self.pristine.iter().map(SharedPage::id).chain(self.pages(0))
    }

    /// Every handle to a page that is never written again, for `verify`.
    pub(crate) fn full(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pristine.iter().chain(&self.full).map(SharedPage::id)
    }

    /// Tokens in pages of its own, for `verify`.
    pub(crate) fn open_tokens(&self) -> u32 {
        self.sinks.iter().chain(&self.open).map(OpenPage::len).sum()
    }

    /// Whether the pages hold exactly `len` tokens, only the last has room, and none is missing
    /// that the window shows; for `verify`.
    pub(crate) fn is_sound(&self) -> bool {
        let held = (self.n_out + self.full.len() as u32) * self.page_len + self.open_tokens();
        let mut before_last = self.open.iter().rev().skip(1);
        let may_be_out = self.window.map_or(0, |window| window.pages_out(self.len, self.page_len));
        held == self.len
            && before_last.all(|page| page.room() == 0)
            && self.n_out <= may_be_out
            && self.sinks.len() == self.pristine.len()
            && (self.sinks.is_empty() || self.n_dropped > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_where_they_were_put() {
        let mut table = Table::new(4, Salt::default(), Retention::default());
        assert_eq!([0, 4, 5].map(|n| table.pages_needed(n)), [0, 1, 2]);
        assert_eq!(table.fill(6), 6);
        assert_eq!(table.append(OpenPage::new(PageId(9), 4), 6), 2);
        assert_eq!(table.append(OpenPage::new(PageId(5), 4), 2), 0);
        assert_eq!(table.room(), 2);
        assert_eq!(table.fill(2), 0);
        let full = table.take_full(7).expect("four tokens are computed");
        table.put_full(SharedPage::new(full.id()));
        assert!(table.take_full(7).is_none());
        assert_eq!(table.append(OpenPage::new(PageId(6), 4), 1), 0);
        assert!(table.is_sound());
        assert_eq!(table.locate(0), Some((PageId(9), 0)));
        assert_eq!(table.locate(7), Some((PageId(5), 3)));
        assert_eq!(table.locate(8), Some((PageId(6), 0)));
        assert_eq!(table.locate(9), None);
        assert_eq!(table.pages(1).collect::<Vec<_>>(), [PageId(5), PageId(6)]);
        let (full, open) = table.into_pages();
        assert_eq!((full.len(), open.len()), (1, 2));
    }
}
