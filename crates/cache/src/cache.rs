//! The facade: which sequence's tokens lie in which pages.
//!
//! A change that needs pages is a transaction. [`Cache::plan_extend`] decides and changes nothing;
//! [`Cache::apply`] carries the decision out and cannot fail.

use std::fmt;

use nuthatch_types::{FastMap, PageId, SeqId, Slot};

use crate::pages::Pages;
use crate::table::Table;
use crate::verify::{self, Fault};
use crate::{Config, ConfigError, Stats};

/// The bookkeeping of the KV cache. See the crate's documentation.
#[derive(Debug)]
pub struct Cache {
    pub(crate) config: Config,
    pub(crate) pages: Pages,
    pub(crate) tables: FastMap<SeqId, Table>,
    pub(crate) tokens_stored: u32,
    /// Counts changes, so that a decision made before another change is not carried out after it.
    version: u64,
}

/// A decision to give places to more tokens of a sequence; valid until the cache changes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "carry the decision out with Cache::apply, or drop it: nothing has changed"]
pub struct Extend {
    seq: SeqId,
    n_tokens: u32,
    n_pages: u32,
    version: u64,
}

impl Extend {
    /// Pages that will be taken from the free ones.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }
}

/// The pages that were asked for are not there. Not a fault: free some, or try later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// Pages that are needed at once.
    pub needed: u32,
    /// Pages that are free.
    pub free: u32,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages are needed, {} are free", self.needed, self.free)
    }
}

impl Cache {
    /// An empty cache of the given sizes.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Cache {
            config,
            pages: Pages::new(config.n_pages, config.page_len),
            tables: FastMap::default(),
            tokens_stored: 0,
            version: 0,
        })
    }

    /// The sizes of the cache.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Gives a new sequence a table of no pages. The sequence must not have one.
    pub fn admit(&mut self, seq: SeqId) {
        self.version += 1;
        let before = self.tables.insert(seq, Table::new(self.config.page_len));
        assert!(before.is_none(), "{seq:?} was admitted twice");
    }

    /// Decides whether `n_tokens` more tokens of an admitted sequence find places: all of them, or
    /// none. Changes nothing.
    pub fn plan_extend(&self, seq: SeqId, n_tokens: u32) -> Result<Extend, Shortfall> {
        let n_pages = self.table(seq).pages_needed(n_tokens);
        let free = self.pages.n_free();
        if n_pages > free {
            return Err(Shortfall { needed: n_pages, free });
        }
        Ok(Extend { seq, n_tokens, n_pages, version: self.version })
    }

    /// Carries out a decision. The new tokens' places follow those the sequence has; no entry of
    /// its table before them changes. Nothing may have changed since the decision was made.
    pub fn apply(&mut self, extend: Extend) {
        assert_eq!(extend.version, self.version, "the cache changed after the decision");
        self.version += 1;
        let Cache { pages, tables, .. } = self;
        let table = tables.get_mut(&extend.seq).expect("the decision named an admitted sequence");
        let fresh =
            (0..extend.n_pages).map(|_| pages.open().expect("the decision counted the pages"));
        table.extend(extend.n_tokens, fresh);
        self.tokens_stored += extend.n_tokens;
    }

    /// Records that the first `n_computed` tokens of a sequence are computed: the pages that they
    /// fill are never written again.
    pub fn seal(&mut self, seq: SeqId, n_computed: u32) {
        self.version += 1;
        self.table_mut(seq).seal(n_computed);
    }

    /// Takes a sequence's table away and frees all its pages.
    pub fn release(&mut self, seq: SeqId) {
        self.version += 1;
        let table = self.tables.remove(&seq).expect("only an admitted sequence is released");
        self.tokens_stored -= table.len();
        let (full, open) = table.into_pages();
        // Last page first, so that a fresh sequence gets the slots in the order they had here.
        for page in open.into_iter().rev() {
            self.pages.discard(page);
        }
        for page in full.into_iter().rev() {
            self.pages.release(page);
        }
    }

    /// Tokens of an admitted sequence that have a place.
    pub fn len(&self, seq: SeqId) -> u32 {
        self.table(seq).len()
    }

    /// Pages in the table of an admitted sequence.
    pub fn n_pages(&self, seq: SeqId) -> u32 {
        self.table(seq).n_pages()
    }

    /// Pages that can be had at once.
    pub fn n_free(&self) -> u32 {
        self.pages.n_free()
    }

    /// Whether no sequence has a table.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Whether a sequence has a table.
    pub fn contains(&self, seq: SeqId) -> bool {
        self.tables.contains_key(&seq)
    }

    /// The slots of an admitted sequence's pages in order, from the `start`-th page on.
    pub fn slots(&self, seq: SeqId, start: u32) -> impl Iterator<Item = Slot> + '_ {
        self.table(seq).pages(start as usize).map(|page| self.pages.slot(page))
    }

    /// The page that holds the token at `position` of an admitted sequence and the token's place in
    /// it, or `None` when the token has no place.
    pub fn locate(&self, seq: SeqId, position: u32) -> Option<(PageId, u32)> {
        self.table(seq).locate(position)
    }

    /// The slot in which a living page lies.
    pub fn slot(&self, page: PageId) -> Slot {
        self.pages.slot(page)
    }

    /// What the cache holds now; constant time.
    pub fn stats(&self) -> Stats {
        let used = self.pages.n_used();
        Stats {
            page_len: self.config.page_len,
            pages_total: self.config.n_pages,
            pages_free: self.pages.n_free(),
            pages_used: used,
            seqs: self.tables.len() as u32,
            tokens_stored: self.tokens_stored,
            tokens_wasted: used * self.config.page_len - self.tokens_stored,
        }
    }

    /// Checks every invariant; linear in pages and sequences.
    pub fn verify(&self) -> Result<(), Fault> {
        verify::verify(self)
    }

    fn table(&self, seq: SeqId) -> &Table {
        self.tables.get(&seq).expect("the sequence is admitted")
    }

    fn table_mut(&mut self, seq: SeqId) -> &mut Table {
        self.tables.get_mut(&seq).expect("the sequence is admitted")
    }
}
