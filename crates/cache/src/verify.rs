//! Every invariant of the cache, one function each.

use std::fmt;

use nuthatch_types::{PageId, SeqId, Slot};

use crate::Cache;

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
    /// A page is alive but in no table, or in two.
    Owners {
        /// The page.
        page: PageId,
        /// Tables in which it was found.
        n_tables: u32,
    },
    /// A table's pages do not hold its tokens.
    Table {
        /// The sequence.
        seq: SeqId,
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
            Fault::Owners { page, n_tables } => write!(f, "{page:?} is in {n_tables} tables"),
            Fault::Table { seq } => write!(f, "the table of {seq:?} does not hold its tokens"),
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
    pages_have_one_owner(cache)?;
    counters_are_true(cache)
}

fn slots_are_conserved(cache: &Cache) -> Result<(), Fault> {
    if cache.pages.device().is_sound() { Ok(()) } else { Err(Fault::FreeList) }
}

fn slots_are_unique(cache: &Cache) -> Result<(), Fault> {
    let pool = cache.pages.device();
    let mut seen = vec![false; pool.n_slots() as usize];
    for (page, slot) in cache.pages.living() {
        let seen_before = std::mem::replace(&mut seen[slot.0 as usize], true);
        if seen_before || !pool.is_used(slot) {
            return Err(Fault::SlotTwice { page, slot });
        }
    }
    count("living pages", cache.pages.n_used(), cache.pages.living().count())
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

fn pages_have_one_owner(cache: &Cache) -> Result<(), Fault> {
    let mut owners = vec![0; cache.config.n_pages as usize];
    for page in cache.tables.values().flat_map(|table| table.pages(0)) {
        owners[page.0 as usize] += 1;
    }
    for (page, _) in cache.pages.living() {
        let n_tables = std::mem::take(&mut owners[page.0 as usize]);
        if n_tables != 1 {
            return Err(Fault::Owners { page, n_tables });
        }
    }
    // What is left was counted for pages that are not alive.
    match owners.iter().position(|&n_tables| n_tables > 0) {
        Some(i) => Err(Fault::Owners { page: PageId(i as u32), n_tables: owners[i] }),
        None => Ok(()),
    }
}

fn counters_are_true(cache: &Cache) -> Result<(), Fault> {
    let tokens = cache.tables.values().map(|table| table.len() as usize).sum();
    count("tokens", cache.tokens_stored, tokens)
}

fn count(name: &'static str, counted: u32, found: usize) -> Result<(), Fault> {
    if counted as usize == found {
        Ok(())
    } else {
        Err(Fault::Counter { name, counted, found: found as u32 })
    }
}
