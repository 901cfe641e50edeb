//! Which full pages can be found by their tokens, and which of them go when pages are short.
//!
//! ```text
//!              publish              idle                demote              drop
//!   full page ---------> in use ------------> idle -----------------> idle ------> gone, a ghost
//!                          ^              on the device   |        on the host
//!                          |                    |         +-- drop --> gone        |
//!                          +------- reuse ------+---------- reuse, promote --------+
//! ```
//!
//! A page that some table holds is in use; so are all pages before it, because a table holds its
//! whole path. Pages that no table holds stay as long as there is room: they are idle.
//!
//! The page before one on the device is on the device too: pages leave it from the last one on. So
//! the device is offered those idle pages that no page of the device follows, and the host those
//! that no page follows at all.

mod ghosts;
mod node;
mod tree;
mod walk;

use std::time::Duration;

use nuthatch_types::{PageId, TokenId};

use self::ghosts::Ghosts;
pub(crate) use self::node::{Node, Parent};
pub(crate) use self::tree::Tree;
pub(crate) use self::walk::Found;
pub use self::walk::{Miss, MissReason};
use crate::evict::{Eviction, Order, Retention};
use crate::hash::Chain;
use crate::pages::{Pages, Tier};

/// The pages that can be found by their tokens.
#[derive(Debug)]
pub(crate) struct Prefix {
    page_len: u32,
    pub(crate) tree: Tree,
    /// `[tier]` the idle pages that may leave it.
    pub(crate) orders: [Box<dyn Order>; 2],
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
            orders: [eviction.order(), eviction.order()],
            ghosts: Ghosts::new(n_pages),
            n_uses: 0,
            now: Duration::ZERO,
        }
    }

    /// Moves the clock that retention is measured by. It never runs backwards.
    pub(crate) fn set_now(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// Makes a full page of the device, which a table holds, findable after `parent`, which the same table holds.
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

    /// Records that an idle page of `tier` is held by a table again.
    pub(crate) fn reuse(&mut self, page: PageId, tier: Tier) {
        if self.tree.is_last(page, tier) {
            self.orders[tier as usize].remove(page, &self.tree.node(page).facts);
        }
    }

    /// Records that a page in use was found by a request.
    pub(crate) fn hit(&mut self, page: PageId) {
        let facts = self.tree.facts_mut(page);
        facts.n_hits = facts.n_hits.saturating_add(1);
    }

    /// Records that no table holds a page of `tier` any more.
    pub(crate) fn idle(&mut self, page: PageId, tier: Tier) {
        self.n_uses += 1;
        self.tree.facts_mut(page).last_use = self.n_uses;
        self.offer(page, tier);
    }

    /// Records how long a page in use should stay.
    pub(crate) fn retain(&mut self, page: PageId, retention: Retention) {
        let now = self.now;
        let facts = self.tree.facts_mut(page);
        facts.retention = facts.retention.join(retention, now);
    }

    /// The idle page that leaves a tier first, which is no longer offered, or `None` when no page of
    /// the tier is idle.
    pub(crate) fn pop(&mut self, tier: Tier) -> Option<PageId> {
        self.orders[tier as usize].pop(self.now)
    }

    /// Takes a page that [`Prefix::pop`] gave and that nothing follows out of the tree.
    pub(crate) fn remove(&mut self, page: PageId, pages: &Pages) {
        let node = self.tree.remove(page);
        self.ghosts.push(node.hash);
        if pages.tier(page) == Tier::Device {
            self.tree.count_off_device(node.parent);
        }
        self.offer_parent(node.parent, pages.tier(page), pages);
    }

    /// Records that a page, which is not offered, has changed its tier to `to`.
    pub(crate) fn moved(&mut self, page: PageId, to: Tier, pages: &Pages) {
        match to {
            Tier::Device => self.tree.count_on_device(page),
            Tier::Host => {
                let parent = self.tree.node(page).parent;
                self.tree.count_off_device(parent);
                self.offer_parent(parent, Tier::Device, pages);
            }
        }
        if pages.is_idle(page) {
            self.offer(page, to);
        }
    }

    /// Forgets which pages were given up.
    pub(crate) fn clear_ghosts(&mut self) {
        self.ghosts.clear();
    }

    /// Offers an idle page of `tier` if it may leave it.
    fn offer(&mut self, page: PageId, tier: Tier) {
        if self.tree.is_last(page, tier) {
            self.orders[tier as usize].insert(page, &self.tree.node(page).facts);
        }
    }

    /// Offers the page before one that has left `tier`, if it lies there and nobody holds it.
    fn offer_parent(&mut self, parent: Parent, tier: Tier, pages: &Pages) {
        if let Parent::Page(parent) = parent
            && pages.is_idle(parent)
            && pages.tier(parent) == tier
        {
            self.offer(parent, tier);
        }
    }
}
