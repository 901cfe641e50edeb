//! What changes of what can be found by its tokens, told as plain values to whoever asked.
//!
//! ```text
//!   publish: Stored        moved to the other tier: Stored there, Removed here
//!   given up: Removed      all forgotten: Cleared
//! ```
//!
//! Applied in order to an empty table, the events give what [`Cache::cached_pages`] lists. Nothing is
//! kept unless somebody watches.

use nuthatch_types::{PageId, PageKey, TokenId};

use crate::Salt;
use crate::cache::Cache;
use crate::pages::{Pages, Tier};
use crate::prefix::{Parent, Prefix, Tree};

/// The name by which others know a page's content: half of its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentId(pub u64);

/// A full page that can be found by its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPage {
    /// Its own name.
    pub id: ContentId,
    /// The name of the page before it; `None` for a first page.
    pub parent: Option<ContentId>,
    /// `[page_len]`
    pub tokens: Box<[TokenId]>,
    /// Where it lies.
    pub tier: Tier,
    /// For a first page under a salt, something that is the same for the same salt and does not
    /// give it away.
    pub salt: Option<u64>,
}

/// A change of what can be found by its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A page can be found in a tier.
    Stored(CachedPage),
    /// A page can no longer be found in a tier.
    Removed {
        /// Its name.
        id: ContentId,
        /// The tier.
        tier: Tier,
    },
    /// Nothing can be found any more.
    Cleared,
}

impl Cache {
    /// Tells what changes from now on: see [`Cache::take_events`].
    pub fn watch(&mut self) {
        if let Some(prefix) = &mut self.prefix {
            prefix.events.get_or_insert_default();
        }
    }

    /// What changed since this was called last, in order. Nothing unless [`Cache::watch`] was called.
    pub fn take_events(&mut self) -> Vec<Event> {
        let events = self.prefix.as_mut().and_then(|prefix| prefix.events.as_mut());
        events.map(std::mem::take).unwrap_or_default()
    }

    /// Every page that can be found by its tokens, each after the one before it. Linear in pages.
    pub fn cached_pages(&self) -> Vec<CachedPage> {
        let Some(Prefix { tree, .. }) = &self.prefix else { return Vec::new() };
        let is_first = |page: &PageId| matches!(tree.node(*page).parent, Parent::Root(_));
        let all = tree.pages().filter(is_first).flat_map(|page| tree.subtree(page));
        all.map(|page| cached_page(tree, &self.pages, page)).collect()
    }
}

impl Prefix {
    /// Tells that a page has come into the tree.
    pub(crate) fn tell_stored(&mut self, page: PageId, pages: &Pages) {
        if let Some(events) = &mut self.events {
            events.push(Event::Stored(cached_page(&self.tree, pages, page)));
        }
    }

    /// Tells that a page has left a tier.
    pub(crate) fn tell_removed(&mut self, hash: PageKey, tier: Tier) {
        if let Some(events) = &mut self.events {
            events.push(Event::Removed { id: content_id(hash), tier });
        }
    }

    /// Says that everything is gone in place of the events since the `n_before` first ones, if they
    /// left nothing.
    pub(crate) fn tell_cleared(&mut self, n_before: usize) {
        if let Some(events) = &mut self.events
            && self.tree.len() == 0
            && events.len() > n_before
        {
            events.truncate(n_before);
            events.push(Event::Cleared);
        }
    }

    /// Events that nobody has taken yet.
    pub(crate) fn n_events(&self) -> usize {
        self.events.as_ref().map_or(0, Vec::len)
    }
}

fn cached_page(tree: &Tree, pages: &Pages, page: PageId) -> CachedPage {
    let node = tree.node(page);
    let (parent, salt) = match node.parent {
        Parent::Root(salt) => (None, (salt != Salt::default()).then(|| salt.mark())),
        Parent::Page(before) => (Some(content_id(tree.node(before).hash)), None),
    };
    let (id, tier) = (content_id(node.hash), pages.tier(page));
    CachedPage { id, parent, tokens: tree.tokens(page).into(), tier, salt }
}

fn content_id(hash: PageKey) -> ContentId {
    ContentId(hash.low())
}
