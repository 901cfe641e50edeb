//! Every invariant of the cache, one function each.

use std::fmt;

use nuthatch_types::{PageId, SeqId, Slot};

use crate::Cache;
use crate::load::Pending;
use crate::page::{OpenPage, SharedPage};
use crate::pages::{Record, State, Tier};
use crate::prefix::{Parent, Prefix};
use crate::table::Table;

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
    /// A table that is neither swapped nor spilled has a page on the host, or a page's parked handles
    /// are not those of swapped tables, or its pinned ones not those of pins.
    Parked {
        /// The page.
        page: PageId,
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
            Fault::Parked { page } => {
                write!(f, "{page:?} is on the host, parked or pinned, and no table or pin says so")
            }
            Fault::Path { seq } => write!(f, "the table of {seq:?} is no path of the tree"),
            Fault::Node { page } => write!(f, "{page:?} is not where the prefix tree says"),
            Fault::Counter { name, counted, found } => {
                write!(f, "the counter of {name} says {counted}, but {found} were found")
            }
        }
    }
}

impl std::error::Error for Fault {}

const TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

/// Checks everything; linear in pages and sequences.
pub(crate) fn verify(cache: &Cache) -> Result<(), Fault> {
    slots_are_conserved(cache)?;
    slots_are_unique(cache)?;
    tables_are_sound(cache)?;
    handles_are_counted(cache)?;
    only_swapped_tables_are_parked(cache)?;
    counters_are_true(cache)?;
    match &cache.prefix {
        Some(prefix) => {
            prefix.tree.pages().try_for_each(|page| node_is_linked(cache, prefix, page))?;
            tree_is_counted(prefix)?;
            tables_are_paths(cache, prefix)?;
            idle_pages_can_go(cache, prefix)
        }
        None => TIERS.iter().try_for_each(|&tier| count("idle pages", cache.pages.n_idle(tier), 0)),
    }
}

/// Checks one page, one table and the sums.
pub(crate) fn verify_sample(cache: &Cache, k: u64) -> Result<(), Fault> {
    let n_tables = cache.tables.len().max(1) as u64;
    if let Some((&seq, table)) = cache.tables.iter().nth((k % n_tables) as usize) {
        table_is_sound(cache, seq, table)?;
        table_is_placed(cache, table)?;
    }
    let page = PageId((k % u64::from(cache.config.slots().total())) as u32);
    let Some(record) = cache.pages.get(page) else { return Ok(()) };
    slot_is_used(cache, page, record.slot)?;
    if let Some(prefix) = &cache.prefix {
        page_is_cached_or_not(cache, prefix, page)?;
        if record.state == State::Cached {
            node_is_linked(cache, prefix, page)?;
        }
    }
    // With tables it would take all of them to count the handles.
    if cache.is_empty() && record.state != State::Open {
        let in_pins = cache.pins.values().flatten().filter(|handle| handle.id() == page);
        let found = in_pins.count() as u32;
        if found != record.n_refs || found != record.n_pinned || record.n_parked != 0 {
            return Err(Fault::Handles { page, counted: record.n_refs, found });
        }
    }
    Ok(())
}

fn slots_are_conserved(cache: &Cache) -> Result<(), Fault> {
    let is_sound = TIERS.iter().all(|&tier| cache.pages.pool(tier).is_sound());
    if is_sound { Ok(()) } else { Err(Fault::FreeList) }
}

fn slots_are_unique(cache: &Cache) -> Result<(), Fault> {
    let mut seen = vec![false; cache.config.slots().total() as usize];
    for (page, record) in cache.pages.living() {
        slot_is_used(cache, page, record.slot)?;
        let slot = record.slot;
        if std::mem::replace(&mut seen[slot.0 as usize], true) {
            return Err(Fault::SlotTwice { page, slot });
        }
    }
    let used = |tier: Tier| cache.pages.pool(tier).n_slots() - cache.pages.n_free(tier);
    count("living pages", TIERS.map(used).iter().sum(), cache.pages.living().count())
}

fn slot_is_used(cache: &Cache, page: PageId, slot: Slot) -> Result<(), Fault> {
    let pool = cache.pages.pool(cache.pages.tier_of(slot));
    if pool.is_used(slot) { Ok(()) } else { Err(Fault::SlotTwice { page, slot }) }
}

fn tables_are_sound(cache: &Cache) -> Result<(), Fault> {
    let mut n_loading = 0;
    for (&seq, table) in &cache.tables {
        table_is_sound(cache, seq, table)?;
        n_loading += u32::from(table.loading.is_some());
    }
    let n_awaited = cache.loads.values().filter(|load| load.seq().is_some()).count();
    count("sequences that load", n_loading, n_awaited)
}

fn table_is_sound(cache: &Cache, seq: SeqId, table: &Table) -> Result<(), Fault> {
    let n_pages = table.len().div_ceil(cache.config.page_len);
    let is_awaited = table.loading.is_none_or(|load| cache.waits_for(load) == Some(seq));
    let spills = table.may_spill && !table.is_swapped && cache.spills();
    let may_be_spilled = table.n_spilled == 0 || spills;
    if table.is_sound() && table.n_pages() == n_pages && is_awaited && may_be_spilled {
        Ok(())
    } else {
        Err(Fault::Table { seq })
    }
}

fn handles_are_counted(cache: &Cache) -> Result<(), Fault> {
    let mut found = vec![0; cache.config.slots().total() as usize];
    let in_tables = cache.tables.values().flat_map(|table| table.held());
    let in_pins = cache.pins.values().flatten().map(SharedPage::id);
    let in_loads = cache.loads.values().flat_map(Pending::pages).map(OpenPage::id);
    for page in in_tables.chain(in_pins).chain(in_loads) {
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

/// A table that is not swapped lies on the device, but for the pages that are counted as spilled.
fn table_is_placed(cache: &Cache, table: &Table) -> Result<(), Fault> {
    if table.is_swapped {
        return Ok(());
    }
    let on_host: Vec<PageId> =
        table.held().filter(|&page| cache.pages.tier(page) == Tier::Host).collect();
    match on_host.first() {
        Some(&page) if table.n_spilled == 0 => Err(Fault::Parked { page }),
        _ => count("spilled pages of a table", table.n_spilled, on_host.len()),
    }
}

/// Running tables lie where they may, the parked handles are those of swapped tables, and the pinned
/// ones those of pins.
fn only_swapped_tables_are_parked(cache: &Cache) -> Result<(), Fault> {
    let mut n_parked = vec![0; cache.config.slots().total() as usize];
    let mut n_pinned = n_parked.clone();
    for table in cache.tables.values() {
        table_is_placed(cache, table)?;
        for page in table.held() {
            n_parked[page.0 as usize] += u32::from(table.is_swapped);
        }
    }
    for handle in cache.pins.values().flatten() {
        n_pinned[handle.id().0 as usize] += 1;
    }
    let is_wrong = |&(page, record): &(PageId, Record)| {
        let i = page.0 as usize;
        n_parked[i] != record.n_parked || n_pinned[i] != record.n_pinned
    };
    let wrong = cache.pages.living().find(is_wrong);
    wrong.map_or(Ok(()), |(page, _)| Err(Fault::Parked { page }))
}

fn counters_are_true(cache: &Cache) -> Result<(), Fault> {
    let pages = &cache.pages;
    let tokens: u32 = cache.tables.values().map(|table| table.open_tokens()).sum();
    let n_open = pages.living().filter(|(_, record)| record.state == State::Open).count();
    count("tokens in open pages", cache.open_tokens, tokens as usize)?;
    count("open pages", pages.n_open(), n_open)?;
    let n_spilled: u32 = cache.tables.values().map(|table| table.n_spilled).sum();
    count("spilled pages", cache.n_spilled, n_spilled as usize)?;
    for tier in TIERS {
        let is_idle =
            |&(page, _): &(PageId, Record)| pages.is_idle(page) && pages.tier(page) == tier;
        count("idle pages", pages.n_idle(tier), pages.living().filter(is_idle).count())?;
    }
    count("pinned pages", cache.n_pinned, cache.pins.values().map(Vec::len).sum())
}

/// A page of the tree can be found, and its neighbours know it.
fn node_is_linked(cache: &Cache, prefix: &Prefix, page: PageId) -> Result<(), Fault> {
    let tree = &prefix.tree;
    let node = tree.node(page);
    let hash = tree.hash(node.parent, tree.tokens(page));
    let is_findable = tree.find(hash, node.parent, tree.tokens(page)) == Some(page);
    let is_listed = tree.children(node.parent).iter().filter(|&&child| child == page).count();
    let is_sorted = node.children.is_sorted_by(|&a, &b| tree.tokens(a) < tree.tokens(b));
    let knows_children =
        node.children.iter().all(|&child| tree.node(child).parent == Parent::Page(page));
    if hash != node.hash || !is_findable || is_listed != 1 || !is_sorted || !knows_children {
        return Err(Fault::Node { page });
    }
    for tier in TIERS {
        let is_idle =
            |&&child: &&PageId| cache.pages.is_idle(child) && cache.pages.tier(child) == tier;
        let n_idle = node.children.iter().filter(is_idle).count();
        count("idle children", node.n_idle[tier as usize], n_idle)?;
    }
    Ok(())
}

fn tree_is_counted(prefix: &Prefix) -> Result<(), Fault> {
    let tree = &prefix.tree;
    let n_children: usize = tree.pages().map(|page| tree.node(page).children.len()).sum();
    let is_first = |page: &PageId| matches!(tree.node(*page).parent, Parent::Root(_));
    let n_first = tree.pages().filter(is_first).count();
    count("cached pages", tree.len(), n_children + n_first)?;
    count("salts without a page", 0, tree.n_roots().saturating_sub(n_first))
}

fn tables_are_paths(cache: &Cache, prefix: &Prefix) -> Result<(), Fault> {
    for (&seq, table) in &cache.tables {
        // What came before the first page is not known if that left the window.
        let mut parent = (table.n_out() == 0).then_some(Parent::Root(table.salt));
        for (i, page) in table.full().enumerate() {
            // A page that is not in the tree ends the path.
            let Some(node) = prefix.tree.get(page) else { break };
            let after_dropped = table.n_dropped() > 0 && i == table.sinks().count();
            if parent.is_some_and(|parent| node.parent != parent) && !after_dropped {
                return Err(Fault::Path { seq });
            }
            parent = Some(Parent::Page(page));
        }
    }
    Ok(())
}

/// Every idle page can leave its tier, after the idle pages of the same tier that follow it.
fn idle_pages_can_go(cache: &Cache, prefix: &Prefix) -> Result<(), Fault> {
    let mut n_offered = [0; 2];
    for (page, _) in cache.pages.living() {
        page_is_cached_or_not(cache, prefix, page)?;
        if !cache.pages.is_idle(page) {
            continue;
        }
        let tier = cache.pages.tier(page);
        n_offered[tier as usize] += u32::from(prefix.tree.is_last(page, tier));
    }
    let count_of = |tier: Tier| prefix.orders[tier as usize].len();
    TIERS.iter().try_for_each(|&tier| {
        count("pages offered for eviction", n_offered[tier as usize], count_of(tier))
    })
}

/// A page is in the tree if it says so.
fn page_is_cached_or_not(cache: &Cache, prefix: &Prefix, page: PageId) -> Result<(), Fault> {
    let says_so = cache.pages.get(page).is_some_and(|record| record.state == State::Cached);
    if prefix.tree.get(page).is_some() == says_so { Ok(()) } else { Err(Fault::Node { page }) }
}

fn count(name: &'static str, counted: u32, found: usize) -> Result<(), Fault> {
    if counted as usize == found {
        Ok(())
    } else {
        Err(Fault::Counter { name, counted, found: found as u32 })
    }
}
