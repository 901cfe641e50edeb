//! Page handles: the type says which state a page is in.
//!
//! ```text
//!   Pages::open --> OpenPage --seal--> FullPage --make_shared--> SharedPage --release--> idle, free
//!                      |                   +---- drop_full ----> free
//!                      +--------------------- discard ---------> free
//! ```
//!
//! Handles are neither `Clone` nor `Copy`: an open page has one owner, and each handle to a shared
//! page is counted. They do not return themselves on
//! drop, because the pages are owned by one thread and there is no lock to take; a handle that is
//! dropped without being given back is a leak, which `Cache::verify` finds.

use nuthatch_types::PageId;

/// A page that still has room, or whose tokens are still being computed. Only its owner writes it.
#[derive(Debug)]
#[must_use = "give the page back with Pages::discard, or seal it"]
pub(crate) struct OpenPage {
    id: PageId,
    len: u32,
    capacity: u32,
}

/// A page whose tokens are all computed. It is never written again.
#[derive(Debug)]
#[must_use = "share the page with Pages::make_shared, or give it back with Pages::drop_full"]
pub(crate) struct FullPage {
    id: PageId,
}

/// One of the counted handles to a page that is never written again.
#[derive(Debug)]
#[must_use = "give the handle back with Pages::release"]
pub(crate) struct SharedPage {
    id: PageId,
}

impl OpenPage {
    /// An empty page.
    pub(crate) fn new(id: PageId, capacity: u32) -> Self {
        OpenPage { id, len: 0, capacity }
    }

    /// The page's identity.
    pub(crate) fn id(&self) -> PageId {
        self.id
    }

    /// Tokens that have their place here.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Tokens that still find a place here.
    pub(crate) fn room(&self) -> u32 {
        self.capacity - self.len
    }

    /// Gives places to `n` more tokens, and returns how many did not fit.
    pub(crate) fn advance(&mut self, n: u32) -> u32 {
        let taken = n.min(self.room());
        self.len += taken;
        n - taken
    }

    /// Turns a page with no room left into one that is never written again. A page that still has
    /// room comes back.
    pub(crate) fn seal(self) -> Result<FullPage, OpenPage> {
        if self.room() > 0 {
            return Err(self);
        }
        Ok(FullPage { id: self.id })
    }
}

impl FullPage {
    /// The page's identity.
    pub(crate) fn id(&self) -> PageId {
        self.id
    }
}

impl SharedPage {
    /// A handle that `Pages` has counted.
    pub(crate) fn new(id: PageId) -> Self {
        SharedPage { id }
    }

    /// The page's identity.
    pub(crate) fn id(&self) -> PageId {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_page_seals_and_an_open_one_comes_back() {
        let mut page = OpenPage::new(PageId(7), 4);
        assert_eq!(page.advance(3), 0);
        let mut page = page.seal().expect_err("one place is left");
        assert_eq!((page.id(), page.len(), page.room()), (PageId(7), 3, 1));
        assert_eq!(page.advance(3), 2);
        assert_eq!(page.seal().expect("no place is left").id(), PageId(7));
    }
}
