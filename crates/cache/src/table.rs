//! A sequence's pages in order of position.
//!
//! ```text
//!   tokens   [0, sealed)             [sealed, len)              [len, n_pages * page_len)
//!   pages    full: never written     open: written by this      room of the last page:
//!            again, perhaps shared   sequence only              the only waste
//! ```

use std::collections::VecDeque;

use nuthatch_types::PageId;

use crate::load::LoadId;
use crate::page::{FullPage, OpenPage, SharedPage};
use crate::{Retention, Salt};

/// A sequence's pages in order of position.
#[derive(Debug)]
pub(crate) struct Table {
    page_len: u32,
    pub(crate) salt: Salt,
    pub(crate) retention: Retention,
    /// Whether its own pages are on the host. Nothing is computed meanwhile.
    pub(crate) is_swapped: bool,
    /// The load that brings its next pages, if there is one. It gets no others meanwhile.
    pub(crate) loading: Option<LoadId>,
    full: Vec<SharedPage>,
    open: VecDeque<OpenPage>,
    len: u32,
}

impl Table {
    /// A table of no pages.
    pub(crate) fn new(page_len: u32, salt: Salt, retention: Retention) -> Self {
        let (full, open) = (Vec::new(), VecDeque::new());
        Table { page_len, salt, retention, is_swapped: false, loading: None, full, open, len: 0 }
    }

    /// Tokens that have a place.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Pages of the table.
    pub(crate) fn n_pages(&self) -> u32 {
        (self.full.len() + self.open.len()) as u32
    }

    /// Pages that are never written again.
    pub(crate) fn n_full(&self) -> u32 {
        self.full.len() as u32
    }

    /// The last of the pages that are never written again.
    pub(crate) fn last_full(&self) -> Option<PageId> {
        self.full.last().map(SharedPage::id)
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

    /// Appends a full page. No page may be open.
    pub(crate) fn push_full(&mut self, page: SharedPage) {
        assert!(self.open.is_empty(), "full pages come before open ones");
        self.full.push(page);
        self.len += self.page_len;
    }

    /// Appends an open page that already has tokens. No page may be open.
    pub(crate) fn push_open(&mut self, page: OpenPage) {
        assert!(self.open.is_empty(), "only the last page has room");
        self.len += page.len();
        self.open.push_back(page);
    }

    /// Gives places to `n_tokens` more tokens, first in the last page, then in `fresh` ones, which
    /// must be exactly as many as [`Table::pages_needed`] said.
    pub(crate) fn extend(&mut self, n_tokens: u32, fresh: impl Iterator<Item = OpenPage>) {
        let mut left = n_tokens;
        if let Some(last) = self.open.back_mut() {
            left = last.advance(left);
        }
        for mut page in fresh {
            assert!(left > 0, "a page without a token is not needed");
            left = page.advance(left);
            self.open.push_back(page);
        }
        assert_eq!(left, 0, "every token has a place");
        self.len += n_tokens;
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
        self.full.push(page);
    }

    /// The page and the place in it of the token at `position`, or `None` when it has none.
    pub(crate) fn locate(&self, position: u32) -> Option<(PageId, u32)> {
        if position >= self.len {
            return None;
        }
        let page = self.page((position / self.page_len) as usize)?;
        Some((page, position % self.page_len))
    }

    /// The pages from the `start`-th on.
    pub(crate) fn pages(&self, start: usize) -> impl DoubleEndedIterator<Item = PageId> + '_ {
        (start..self.n_pages() as usize).filter_map(|i| self.page(i))
    }

    /// Takes the table apart.
    pub(crate) fn into_pages(self) -> (Vec<SharedPage>, VecDeque<OpenPage>) {
        (self.full, self.open)
    }

    /// Tokens in open pages, for `verify`.
    pub(crate) fn open_tokens(&self) -> u32 {
        self.open.iter().map(OpenPage::len).sum()
    }

    /// Whether the pages hold exactly `len` tokens and only the last has room, for `verify`.
    pub(crate) fn is_sound(&self) -> bool {
        let held = self.n_full() * self.page_len + self.open_tokens();
        let mut before_last = self.open.iter().rev().skip(1);
        held == self.len && before_last.all(|page| page.room() == 0)
    }

    fn page(&self, idx: usize) -> Option<PageId> {
        match self.full.get(idx) {
            Some(page) => Some(page.id()),
            None => self.open.get(idx - self.full.len()).map(OpenPage::id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_where_they_were_put() {
        let mut table = Table::new(4, Salt::default(), Retention::default());
        assert_eq!([0, 4, 5].map(|n| table.pages_needed(n)), [0, 1, 2]);
        table.extend(6, [9, 5].map(|i| OpenPage::new(PageId(i), 4)).into_iter());
        assert_eq!(table.room(), 2);
        table.extend(2, std::iter::empty());
        let full = table.take_full(7).expect("four tokens are computed");
        table.put_full(SharedPage::new(full.id()));
        assert!(table.take_full(7).is_none());
        table.extend(1, std::iter::once(OpenPage::new(PageId(6), 4)));
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
