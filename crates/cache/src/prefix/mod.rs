//! Which full pages can be found by their tokens, and which of them go when pages are short.
//!
//! ```text
//!              publish                 idle                  evict
//!   full page ---------> in use ----------------> idle leaf --------> gone, a ghost
//!                          ^                          |
//!                          +--------- reuse ----------+
//! ```
//!
//! A page that some table holds is in use; so are all pages before it, because a table holds its
//! whole path. Pages that no table holds stay as long as there is room: they are idle, and the idle
//! leaves are offered for eviction.

mod ghosts;
mod node;
mod tree;
mod walk;

use std::time::Duration;

use nuthatch_types::{PageId, TokenId};

use self::ghosts::Ghosts;
pub(crate) use self::node::Parent;
pub(crate) use self::tree::Tree;
pub(crate) use self::walk::Found;
pub use self::walk::{Miss, MissReason};
use crate::evict::{Eviction, Order, Retention};
use crate::hash::Chain;
use crate::pages::Pages;

/// The pages that can be found by their tokens.
#[derive(Debug)]
pub(crate) struct Prefix {
    page_len: u32,
    pub(crate) tree: Tree,
    /// The idle leaves.
    pub(crate) order: Box<dyn Order>,
    ghosts: Ghosts,
    /// Counts uses, so that no two are at the same time.
    n_uses: u64,
    now: Duration,
}

/// What became of a page that was offered to the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// It is now in the tree.
    New,
    /// Another page holds the same tokens after the same parent.
    Known(PageId),
    /// Another page has its hash by chance, so that it cannot be found.
    Hidden,
}

impl Prefix {
    pub(crate) fn new(chain: Chain, eviction: Eviction, n_pages: u32, page_len: u32) -> Self {
        Prefix {
            page_len,
            tree: Tree::new(chain, n_pages),
            order: eviction.order(),
            ghosts: Ghosts::new(n_pages),
            n_uses: 0,
            now: Duration::ZERO,
        }
    }

    /// Moves the clock that retention is measured by. It never runs backwards.
    pub(crate) fn set_now(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// Makes a full page, which a table holds, findable after `parent`, which the same table holds.
    pub(crate) fn publish(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
    ) -> Published {
        let hash = self.tree.hash(parent, tokens);
        if let Some(known) = self.tree.find(hash, parent, tokens) {
            return Published::Known(known);
        }
        let is_new = self.tree.insert(hash, parent, tokens, page);
        if is_new { Published::New } else { Published::Hidden }
    }

    /// Records that an idle page is held by a table again.
    pub(crate) fn reuse(&mut self, page: PageId) {
        if self.tree.is_leaf(page) {
            self.order.remove(page, &self.tree.node(page).facts);
        }
    }

    /// Records that a page in use was found by a request.
    pub(crate) fn hit(&mut self, page: PageId) {
        let facts = self.tree.facts_mut(page);
        facts.n_hits = facts.n_hits.saturating_add(1);
    }

    /// Records that no table holds a page any more.
    pub(crate) fn idle(&mut self, page: PageId) {
        self.n_uses += 1;
        self.tree.facts_mut(page).last_use = self.n_uses;
        if self.tree.is_leaf(page) {
            self.order.insert(page, &self.tree.node(page).facts);
        }
    }

    /// Records how long a page in use should stay.
    pub(crate) fn retain(&mut self, page: PageId, retention: Retention) {
        let now = self.now;
        let facts = self.tree.facts_mut(page);
        facts.retention = facts.retention.join(retention, now);
    }

    /// Takes the idle page that goes first out of the tree, or `None` when no page is idle.
    pub(crate) fn evict(&mut self, pages: &Pages) -> Option<PageId> {
        let page = self.order.pop(self.now)?;
        let node = self.tree.remove(page);
        self.ghosts.push(node.hash);
        if let Parent::Page(parent) = node.parent
            && self.tree.is_leaf(parent)
            && pages.is_idle(parent)
        {
            self.order.insert(parent, &self.tree.node(parent).facts);
        }
        Some(page)
    }

    /// Forgets which pages were given up.
    pub(crate) fn clear_ghosts(&mut self) {
        self.ghosts.clear();
    }
}
