//! Every invariant of the cache, one function each.

use std::fmt;

use nuthatch_types::{PageId, SeqId, Slot};

use crate::Cache;
use crate::page::SharedPage;
use crate::pages::State;
use crate::prefix::{Parent, Prefix};

/// A broken invariant: a bug in this crate, never the fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Free and used slots are not all slots, or a free slot is listed twice.
    FreeList,
    /// Two pages lie in one slot, or a page lies in a free one.
    SlotTwice {
        /// The page found second.
        page: PageId,
        /// The slot.
        slot: Slot,
    },
    /// A page's handles are not those that were counted.
    Handles {
        /// The page.
        page: PageId,
        /// What was counted.
        counted: u32,
        /// Handles that were found in tables and pins.
        found: u32,
    },
    /// A table's pages do not hold its tokens.
    Table {
        /// The sequence.
        seq: SeqId,
    },
    /// A table's full pages are not one path of the prefix tree.
    Path {
        /// The sequence.
        seq: SeqId,
    },
    /// A page of the prefix tree cannot be found, or its neighbours do not know it.
    Node {
        /// The page.
        page: PageId,
    },
    /// A counter differs from what it counts.
    Counter {
        /// What is counted.
        name: &'static str,
        /// What the counter says.
        counted: u32,
        /// What was found.
        found: u32,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Fault::FreeList => f.write_str("free and used slots are not all slots, each once"),
            Fault::SlotTwice { page, slot } => {
                write!(f, "{page:?} lies in {slot:?}, which is not its own")
            }
            Fault::Handles { page, counted, found } => {
                write!(f, "{counted} handles to {page:?} were counted, but {found} were found")
            }
            Fault::Table { seq } => write!(f, "the table of {seq:?} does not hold its tokens"),
            Fault::Path { seq } => write!(f, "the table of {seq:?} is no path of the tree"),
            Fault::Node { page } => write!(f, "{page:?} is not where the prefix tree says"),
            Fault::Counter { name, counted, found } => {
                write!(f, "the counter of {name} says {counted}, but {found} were found")
            }
        }
    }
}

impl std::error::Error for Fault {}

/// Checks everything; linear in pages and sequences.
pub(crate) fn verify(cache: &Cache) -> Result<(), Fault> {
    slots_are_conserved(cache)?;
    slots_are_unique(cache)?;
    tables_are_sound(cache)?;
    handles_are_counted(cache)?;
    counters_are_true(cache)?;
    match &cache.prefix {
        Some(prefix) => {
            nodes_are_linked(prefix)?;
            tables_are_paths(cache, prefix)?;
            idle_pages_can_go(cache, prefix)
        }
        None => count("idle pages", cache.pages.n_idle(), 0),
    }
}

fn slots_are_conserved(cache: &Cache) -> Result<(), Fault> {
    if cache.pages.device().is_sound() { Ok(()) } else { Err(Fault::FreeList) }
}

fn slots_are_unique(cache: &Cache) -> Result<(), Fault> {
    let pool = cache.pages.device();
    let mut seen = vec![false; pool.n_slots() as usize];
    for (page, record) in cache.pages.living() {
        let slot = record.slot;
        let seen_before = std::mem::replace(&mut seen[slot.0 as usize], true);
        if seen_before || !pool.is_used(slot) {
            return Err(Fault::SlotTwice { page, slot });
        }
    }
    let n_living = pool.n_slots() - pool.n_free();
    count("living pages", n_living, cache.pages.living().count())
}

fn tables_are_sound(cache: &Cache) -> Result<(), Fault> {
    for (&seq, table) in &cache.tables {
        let n_pages = table.len().div_ceil(cache.config.page_len);
        if !table.is_sound() || table.n_pages() != n_pages {
            return Err(Fault::Table { seq });
        }
    }
    Ok(())
}

fn handles_are_counted(cache: &Cache) -> Result<(), Fault> {
    let mut found = vec![0; cache.config.n_pages as usize];
    let in_tables = cache.tables.values().flat_map(|table| table.pages(0));
    let in_pins = cache.pins.values().flatten().map(SharedPage::id);
    for page in in_tables.chain(in_pins) {
        found[page.0 as usize] += 1;
    }
    for (page, record) in cache.pages.living() {
        let found = std::mem::take(&mut found[page.0 as usize]);
        let may_be_idle = record.state == State::Cached;
        let may_be_many = record.state != State::Open;
        let is_sane = (found > 0 || may_be_idle) && (found <= 1 || may_be_many);
        if found != record.n_refs || !is_sane {
            return Err(Fault::Handles { page, counted: record.n_refs, found });
        }
    }
    // What is left was found for pages that are not alive.
    match found.iter().position(|&n| n > 0) {
        Some(i) => Err(Fault::Handles { page: PageId(i as u32), counted: 0, found: found[i] }),
        None => Ok(()),
    }
}

fn counters_are_true(cache: &Cache) -> Result<(), Fault> {
    let pages = &cache.pages;
    let tokens: u32 = cache.tables.values().map(|table| table.open_tokens()).sum();
    let n_open = pages.living().filter(|(_, record)| record.state == State::Open).count();
    let n_idle = pages.living().filter(|&(page, _)| pages.is_idle(page)).count();
    count("tokens in open pages", cache.open_tokens, tokens as usize)?;
    count("open pages", pages.n_open(), n_open)?;
    count("idle pages", pages.n_idle(), n_idle)?;
    count("pinned pages", cache.n_pinned, cache.pins.values().map(Vec::len).sum())
}

fn nodes_are_linked(prefix: &Prefix) -> Result<(), Fault> {
    let tree = &prefix.tree;
    let mut n_children = 0;
    let mut n_first = 0;
    for page in tree.pages() {
        let node = tree.node(page);
        let hash = tree.hash(node.parent, &node.tokens);
        let is_findable = tree.find(hash, node.parent, &node.tokens) == Some(page);
        let is_listed = tree.children(node.parent).iter().filter(|&&child| child == page).count();
        let tokens = |child: &PageId| &tree.node(*child).tokens;
        let is_sorted = node.children.is_sorted_by(|a, b| tokens(a) < tokens(b));
        let knows_children =
            node.children.iter().all(|&child| tree.node(child).parent == Parent::Page(page));
        if hash != node.hash || !is_findable || is_listed != 1 || !is_sorted || !knows_children {
            return Err(Fault::Node { page });
        }
        n_children += node.children.len();
        n_first += usize::from(matches!(node.parent, Parent::Root(_)));
    }
    count("cached pages", tree.len(), n_children + n_first)?;
    count("salts without a page", 0, tree.n_roots().saturating_sub(n_first))
}

fn tables_are_paths(cache: &Cache, prefix: &Prefix) -> Result<(), Fault> {
    for (&seq, table) in &cache.tables {
        let mut parent = Parent::Root(table.salt);
        for page in table.pages(0).take(table.n_full() as usize) {
            // A page that could not be published ends the path.
            let Some(node) = prefix.tree.get(page) else { break };
            if node.parent != parent {
                return Err(Fault::Path { seq });
            }
            parent = Parent::Page(page);
        }
    }
    Ok(())
}

/// Every idle page can be given up, after the pages that follow it: none of those is in use.
fn idle_pages_can_go(cache: &Cache, prefix: &Prefix) -> Result<(), Fault> {
    let mut n_offered = 0;
    for (page, record) in cache.pages.living() {
        let node = prefix.tree.get(page);
        if node.is_some() != (record.state == State::Cached) {
            return Err(Fault::Node { page });
        }
        let Some(node) = node.filter(|_| cache.pages.is_idle(page)) else { continue };
        if !node.children.iter().all(|&child| cache.pages.is_idle(child)) {
            return Err(Fault::Node { page });
        }
        n_offered += u32::from(node.children.is_empty());
    }
    count("pages offered for eviction", n_offered, prefix.order.len())
}

fn count(name: &'static str, counted: u32, found: usize) -> Result<(), Fault> {
    if counted as usize == found {
        Ok(())
    } else {
        Err(Fault::Counter { name, counted, found: found as u32 })
    }
}
