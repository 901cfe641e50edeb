//! Two tiers: making room on the device, and moving pages to the host and back.
//!
//! ```text
//!             demote, swap: copy device -> host
//!   device -------------------------------------> host ----------> gone
//!      ^ \                                          |     drop
//!      |  +------------------ drop -----------> gone|
//!      +--------------------------------------------+
//!             promote: copy host -> device
//! ```
//!
//! A move changes the page's place at once, here; the bytes follow by a copy. Copies are collected
//! in the order of these decisions and carried out in that order before the next pass, so that a
//! slot which a page has left may at once be the target of another one.

use nuthatch_types::{PageCopy, PageId};

use crate::cache::Cache;
use crate::page::OpenPage;
use crate::pages::Tier;
use crate::prefix::{Prefix, Removed};

impl Cache {
    /// The copies that were decided since this was called last. They must be carried out in order,
    /// before anything is computed and before later ones.
    pub fn take_copies(&mut self) -> Vec<PageCopy> {
        std::mem::take(&mut self.copies)
    }

    /// Copies that were decided and that [`Cache::take_copies`] has not handed out.
    pub fn n_copies(&self) -> u32 {
        self.copies.len() as u32
    }

    /// Sets which idle pages go to the host when the device needs their room: those with at least
    /// `depth` pages before them, for which coming back costs less than being computed again. The
    /// others are given up. 0 at first; without a host tier it means nothing.
    pub fn set_demotion_depth(&mut self, depth: u32) {
        self.demotion_depth = depth;
    }

    /// A page with no tokens on the device. One must be available.
    pub(crate) fn open_page(&mut self) -> OpenPage {
        self.make_room();
        self.pages.open(Tier::Device).expect("a page was free, or has just been given up")
    }

    /// A page with no tokens on the host. One must be available.
    pub(crate) fn open_host_page(&mut self) -> OpenPage {
        self.make_host_room(None);
        self.pages.open(Tier::Host).expect("a page was free, or has just been given up")
    }

    /// Brings a held page of the host to the device, where one must be available.
    pub(crate) fn promote(&mut self, page: PageId) {
        self.make_room();
        self.relocate(page, Tier::Device);
    }

    /// Takes a page, which no running table holds and which is not offered, to the host, where room
    /// must be available. False when it was given up instead, because it is idle and comes after the
    /// page that made room.
    pub(crate) fn demote(&mut self, page: PageId) -> bool {
        self.make_host_room(Some(page));
        if self.pages.get(page).is_none() {
            return false;
        }
        self.relocate(page, Tier::Host);
        true
    }

    /// Gives up every idle page of both tiers.
    pub(crate) fn drop_all_idle(&mut self) {
        let n_events = self.prefix.as_ref().map_or(0, Prefix::n_events);
        for tier in [Tier::Host, Tier::Device] {
            while let Some(page) = self.prefix.as_mut().and_then(|prefix| prefix.pop(tier)) {
                self.drop_idle(page, None);
            }
        }
        if let Some(prefix) = &mut self.prefix {
            prefix.tell_cleared(n_events);
        }
    }

    /// Makes a slot of the device free if none is: the idle page whose turn it is leaves.
    fn make_room(&mut self) {
        if self.pages.n_free(Tier::Device) > 0 {
            return;
        }
        let prefix = self.prefix.as_mut().expect("the decision counted the available pages");
        let page = prefix.pop(Tier::Device).expect("the decision counted the available pages");
        let node = prefix.tree.node(page);
        // What follows would be lost with it.
        let is_followed = !node.children.is_empty();
        let is_dear = node.facts.depth >= self.demotion_depth;
        if (is_followed || is_dear) && self.pages.n_available(Tier::Host) > 0 {
            let has_moved = self.demote(page);
            self.counters.pages_demoted += u64::from(has_moved);
        } else {
            self.drop_idle(page, None);
        }
    }

    /// Makes a slot of the host free if none is: the idle page whose turn it is goes. `popped` is
    /// another idle page, which is not offered; it goes too if it comes after that one.
    fn make_host_room(&mut self, popped: Option<PageId>) {
        if self.pages.n_free(Tier::Host) > 0 {
            return;
        }
        let prefix = self.prefix.as_mut().expect("only the prefix tree keeps idle pages");
        let last = prefix.pop(Tier::Host).expect("room on the host was counted");
        self.drop_idle(last, popped);
    }

    /// Gives up an idle page that is not offered, and with it what follows it: idle pages go, held
    /// ones stay with their holders. `popped` is another idle page that is not offered.
    fn drop_idle(&mut self, page: PageId, popped: Option<PageId>) {
        let prefix = self.prefix.as_mut().expect("only the prefix tree keeps idle pages");
        let Removed { idle, held } = prefix.remove(page, popped, &self.pages);
        self.counters.pages_evicted += idle.len() as u64;
        idle.into_iter().for_each(|page| self.pages.evict(page));
        held.into_iter().for_each(|page| self.pages.hide(page));
    }

    fn relocate(&mut self, page: PageId, to: Tier) {
        let from = self.pages.tier(page);
        let copy = self.pages.relocate(page, to);
        self.copies.push(copy);
        self.n_savings += u64::from(to == Tier::Device);
        if let Some(prefix) = &mut self.prefix
            && prefix.tree.get(page).is_some()
        {
            prefix.moved(page, from, &self.pages);
        }
    }
}
