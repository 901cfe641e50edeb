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
//! A page that some table holds is in use. Pages that no table holds stay as long as there is room:
//! they are idle. A tier is offered those of its idle pages that no idle page of the same tier
//! follows right away, so that of a line of idle pages the last leaves first.
//!
//! Most tables hold their whole path, so that what follows an idle page is idle too. But a table
//! whose first pages left its window holds the end of a path only:
//!
//! ```text
//!   root --> idle --> idle, offered --> held --> held
//! ```
//!
//! When an idle page is given up, what follows it can no longer be found and leaves the tree with it;
//! what is held then belongs to its holders alone.

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
use crate::event::Event;
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
    /// What nobody has been told yet; `None` when nobody wants to know.
    pub(crate) events: Option<Vec<Event>>,
    /// Pages that came into the tree since somebody asked; `None` when nobody wants to know.
    pub(crate) published: Option<Vec<PageId>>,
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

/// Pages that have left the tree.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    /// Pages that nobody holds.
    pub(crate) idle: Vec<PageId>,
    /// Pages that tables hold and that nobody else can find any more.
    pub(crate) held: Vec<PageId>,
}

impl Prefix {
    pub(crate) fn new(chain: Chain, eviction: Eviction, n_pages: u32, page_len: u32) -> Self {
        Prefix {
            page_len,
            tree: Tree::new(chain, n_pages, page_len),
            orders: [eviction.order(), eviction.order()],
            ghosts: Ghosts::new(n_pages),
            events: None,
            published: None,
            n_uses: 0,
            now: Duration::ZERO,
        }
    }

    /// Moves the clock that retention is measured by. It never runs backwards.
    pub(crate) fn set_now(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// Makes a full page, which a table holds, findable after `parent`, which the same
    /// table holds.
    pub(crate) fn publish(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
        pages: &Pages,
    ) -> Published {
        let hash = self.tree.hash(parent, tokens);
        if let Some(known) = self.tree.find(hash, parent, tokens) {
            return Published::Known(known);
        }
        if !self.tree.insert(hash, parent, tokens, page) {
            return Published::Hidden;
        }
        self.tell_stored(page, pages);
        if let Some(published) = &mut self.published {
            published.push(page);
        }
        Published::New
    }

    /// Records that an idle page is held by a table again.
    pub(crate) fn reuse(&mut self, page: PageId, pages: &Pages) {
        let tier = pages.tier(page);
        let node = self.tree.node(page);
        if self.tree.is_last(page, tier) {
            self.orders[tier as usize].remove(page, &node.facts);
        }
        self.one_idle_less(node.parent, tier, pages);
    }

    /// Records that a page in use was found by a request.
    pub(crate) fn hit(&mut self, page: PageId) {
        let facts = self.tree.facts_mut(page);
        facts.n_hits = facts.n_hits.saturating_add(1);
    }

    /// Records that no table holds a page any more.
    pub(crate) fn idle(&mut self, page: PageId, pages: &Pages) {
        self.n_uses += 1;
        self.tree.facts_mut(page).last_use = self.n_uses;
        self.add_idle(page, pages);
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

    /// Takes an idle page that [`Prefix::pop`] gave out of the tree, and all that follow it. `popped`
    /// is another one that it gave and that may be among them.
    pub(crate) fn remove(
        &mut self,
        first: PageId,
        popped: Option<PageId>,
        pages: &Pages,
    ) -> Removed {
        self.one_idle_less(self.tree.node(first).parent, pages.tier(first), pages);
        let mut removed = Removed::default();
        for page in self.tree.subtree(first).into_iter().rev() {
            let node = self.tree.remove(page);
            self.ghosts.push(node.hash);
            self.tell_removed(node.hash, pages.tier(page));
            if !pages.is_idle(page) {
                removed.held.push(page);
                continue;
            }
            let tier = pages.tier(page) as usize;
            let is_offered = node.n_idle[tier] == 0 && page != first && Some(page) != popped;
            if is_offered {
                self.orders[tier].remove(page, &node.facts);
            }
            removed.idle.push(page);
        }
        removed
    }

    /// Records that a page has come from the tier `from`. An idle one is not offered.
    pub(crate) fn moved(&mut self, page: PageId, from: Tier, pages: &Pages) {
        // First where it is, then where it is not: nobody is to think that it is gone.
        self.tell_stored(page, pages);
        self.tell_removed(self.tree.node(page).hash, from);
        if pages.is_idle(page) {
            self.one_idle_less(self.tree.node(page).parent, from, pages);
            self.add_idle(page, pages);
        }
    }

    /// Forgets which pages were given up.
    pub(crate) fn clear_ghosts(&mut self) {
        self.ghosts.clear();
    }

    /// Offers an idle page if it may leave its tier, and tells the page before it.
    fn add_idle(&mut self, page: PageId, pages: &Pages) {
        let tier = pages.tier(page);
        let node = self.tree.node(page);
        if self.tree.is_last(page, tier) {
            self.orders[tier as usize].insert(page, &node.facts);
        }
        let Parent::Page(parent) = node.parent else { return };
        let n_idle = self.tree.n_idle_mut(parent, tier);
        *n_idle += 1;
        if *n_idle == 1 && pages.is_idle(parent) && pages.tier(parent) == tier {
            self.orders[tier as usize].remove(parent, &self.tree.node(parent).facts);
        }
    }

    /// Records that one page less is idle of those of a tier that follow.
    fn one_idle_less(&mut self, parent: Parent, tier: Tier, pages: &Pages) {
        let Parent::Page(parent) = parent else { return };
        let n_idle = self.tree.n_idle_mut(parent, tier);
        *n_idle -= 1;
        if *n_idle == 0 && pages.is_idle(parent) && pages.tier(parent) == tier {
            self.orders[tier as usize].insert(parent, &self.tree.node(parent).facts);
        }
    }
}
