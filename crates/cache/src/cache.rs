//! The facade: which sequence's tokens lie in which pages.
//!
//! A change that needs pages is a transaction: a method whose name begins with `plan` decides and
//! changes nothing; [`Cache::admit`] and [`Cache::apply`] carry the decision out and cannot fail.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use nuthatch_types::{FastMap, PageCopy, PageId, SeqId, Slot, TokenId};

use crate::hash::Chain;
use crate::load::{LoadId, Pending};
use crate::page::{FullPage, SharedPage};
use crate::pages::{Pages, Released, State, Tier};
use crate::pin::PinId;
use crate::prefix::{Parent, Prefix, Published};
use crate::table::Table;
use crate::verify::{self, Fault};
use crate::{Config, ConfigError, Counters, Options, Retention, Salt, Stats};

/// The bookkeeping of the KV cache. See the crate's documentation.
#[derive(Debug)]
pub struct Cache {
    pub(crate) config: Config,
    pub(crate) options: Options,
    pub(crate) pages: Pages,
    /// What can be found by its tokens; `None` when nothing can.
    pub(crate) prefix: Option<Prefix>,
    pub(crate) tables: FastMap<SeqId, Table>,
    pub(crate) pins: BTreeMap<PinId, Vec<SharedPage>>,
    /// Handles in `pins`.
    pub(crate) n_pinned: u32,
    /// Tokens that have a place in open pages.
    pub(crate) open_tokens: u32,
    /// Pages of the host on which sequences run, counted once for each of them.
    pub(crate) n_spilled: u32,
    pub(crate) counters: Counters,
    /// Loads that have not ended.
    pub(crate) loads: BTreeMap<LoadId, Pending>,
    /// Loads that were ever prepared.
    pub(crate) n_loads: u64,
    /// Copies that were decided and not yet handed out, in order.
    pub(crate) copies: Vec<PageCopy>,
    /// Idle pages with fewer pages before them are given up rather than taken to the host.
    pub(crate) demotion_depth: u32,
    /// See [`Cache::n_savings`].
    pub(crate) n_savings: u64,
    /// Counts changes, so that a decision made before another change is not carried out after it.
    pub(crate) version: u64,
    pub(crate) chain: Chain,
}

/// A decision to give places to more tokens of a sequence; valid until the cache changes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "carry the decision out with Cache::apply, or drop it: nothing has changed"]
pub struct Extend {
    seq: SeqId,
    n_tokens: u32,
    n_host: u32,
    n_pages: u32,
    version: u64,
}

impl Extend {
    /// Pages that will be taken from the available ones of the device.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }

    /// Pages that will be taken from those of the host.
    pub fn n_host(&self) -> u32 {
        self.n_host
    }
}

/// The pages that were asked for are not there. Not a fault: free some, or try later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// Pages that are needed at once.
    pub needed: u32,
    /// Pages that can be had.
    pub available: u32,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages are needed, {} are available", self.needed, self.available)
    }
}

impl Cache {
    /// An empty cache of the given sizes in which nothing is found by its tokens.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Cache::with_options(config, Options { prefix: false, ..Options::default() })
    }

    /// An empty cache of the given sizes.
    pub fn with_options(config: Config, options: Options) -> Result<Self, ConfigError> {
        config.validate()?;
        let Config { page_len, n_pages, .. } = config;
        let slots = config.slots();
        if options.max_pinned >= n_pages {
            return Err(ConfigError::AllPinned { max_pinned: options.max_pinned, n_pages });
        }
        let chain = Chain::new(options.hash_key);
        let prefix =
            options.prefix.then(|| Prefix::new(chain, options.eviction, slots.total(), page_len));
        Ok(Cache {
            config,
            options,
            pages: Pages::new(slots, page_len),
            prefix,
            tables: FastMap::default(),
            pins: BTreeMap::new(),
            n_pinned: 0,
            open_tokens: 0,
            n_spilled: 0,
            counters: Counters::default(),
            loads: BTreeMap::new(),
            n_loads: 0,
            copies: Vec::new(),
            demotion_depth: 0,
            n_savings: 0,
            version: 0,
            chain,
        })
    }

    /// The sizes of the cache.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tokens that one sequence may have when it is alone, on both tiers if it may spill.
    pub fn capacity(&self) -> u32 {
        let n_host = if self.spills() { self.config.n_host_pages } else { 0 };
        self.device_capacity() + self.config.page_len * n_host
    }

    /// Tokens that one sequence may have on the device when it is alone.
    pub fn device_capacity(&self) -> u32 {
        self.config.page_len * (self.config.n_pages - self.options.max_pinned)
    }

    /// The salt of a string that a user chose and of the adapter that the request runs with.
    pub fn salt(&self, user: &[u8], adapter: &[u8]) -> Salt {
        self.chain.salt(user, adapter)
    }

    /// Tells the time by which retention is measured. It never runs backwards.
    pub fn set_now(&mut self, now: Duration) {
        if let Some(prefix) = &mut self.prefix {
            prefix.set_now(now);
        }
    }

    /// Decides whether `n_tokens` more tokens of an admitted sequence, which is not swapped, find
    /// places: all of them, or none. Changes nothing.
    ///
    /// The first `n_host` of the new pages are on the host, or as many as there are needed and can
    /// be had there if the sequence may spill.
    pub fn plan_extend(&self, seq: SeqId, n_tokens: u32, n_host: u32) -> Result<Extend, Shortfall> {
        let table = self.table(seq);
        assert!(table.may_grow(), "{seq:?} is swapped, or loading");
        let all = table.pages_needed(n_tokens);
        let most = if table.may_spill { self.n_host_available() } else { 0 };
        let n_host = n_host.min(all).min(most);
        let (n_pages, available) = (all - n_host, self.n_available());
        if n_pages > available {
            return Err(Shortfall { needed: n_pages, available });
        }
        Ok(Extend { seq, n_tokens, n_host, n_pages, version: self.version })
    }

    /// Carries out a decision. The new tokens' places follow those the sequence has; no entry of
    /// its table before them changes. Nothing may have changed since the decision was made.
    pub fn apply(&mut self, extend: Extend) {
        assert_eq!(extend.version, self.version, "the cache changed after the decision");
        self.version += 1;
        self.open_tokens += extend.n_tokens;
        self.n_spilled += extend.n_host;
        self.counters.pages_spilled += u64::from(extend.n_host);
        let table = self.table_mut(extend.seq);
        table.n_spilled += extend.n_host;
        let mut left = table.fill(extend.n_tokens);
        for i in 0..extend.n_host + extend.n_pages {
            let page = if i < extend.n_host { self.open_host_page() } else { self.open_page() };
            left = self.table_mut(extend.seq).append(page, left);
        }
        assert_eq!(left, 0, "every token has a place");
    }

    /// [`Cache::plan_extend`] and [`Cache::apply`] in one: all of the tokens find places, or nothing
    /// changes. Returns the number of pages in the table.
    pub fn extend(&mut self, seq: SeqId, n_tokens: u32, n_host: u32) -> Result<u32, Shortfall> {
        let table = self.tables.get_mut(&seq).expect("the sequence is admitted");
        if table.room() >= n_tokens && table.may_grow() {
            // The way of nearly every decoded token.
            self.version += 1;
            self.open_tokens += n_tokens;
            table.fill(n_tokens);
            return Ok(table.n_pages());
        }
        let extend = self.plan_extend(seq, n_tokens, n_host)?;
        self.apply(extend);
        Ok(self.n_pages(seq))
    }

    /// Records that `computed`, the first tokens of a sequence, are computed: the pages that they
    /// fill are never written again and can be found.
    ///
    /// When another page already holds the same tokens, the sequence uses that one from now on.
    /// Returns the first entry of the table whose slot changed because of that, if any.
    pub fn seal(&mut self, seq: SeqId, computed: &[TokenId]) -> Option<u32> {
        assert!(!self.table(seq).is_swapped, "{seq:?} is swapped");
        self.version += 1;
        let page_len = self.config.page_len as usize;
        let mut first_changed = None;
        let n_dropped = self.table(seq).n_dropped();
        let n_stored = computed.len() as u32 - n_dropped;
        while let Some(page) = self.table_mut(seq).take_full(n_stored) {
            let idx = self.table(seq).n_full();
            let start = idx as usize * page_len;
            let last = self.table(seq).last_full();
            let (slot, tier) = (self.pages.slot(page.id()), self.pages.tier(page.id()));
            self.open_tokens -= page_len as u32;
            // What was computed without the dropped tokens is not what their successors find.
            let handle = match n_dropped {
                0 => self.publish(page, seq, last, &computed[start..start + page_len]),
                _ => self.pages.make_shared(page, State::Full),
            };
            self.count_spilled(seq, tier, Some(self.pages.tier(handle.id())));
            if self.pages.slot(handle.id()) != slot {
                first_changed = first_changed.or(Some(idx));
            }
            self.table_mut(seq).put_full(handle);
        }
        first_changed
    }

    /// Takes a sequence's table away. Its pages are free, but for those that others hold, those that
    /// can be found by their tokens, which stay until their turn comes, and those that a load still
    /// writes.
    pub fn release(&mut self, seq: SeqId) {
        self.version += 1;
        let table = self.tables.remove(&seq).expect("only an admitted sequence is released");
        let retention = table.retention;
        self.n_spilled -= table.n_spilled;
        if table.is_swapped {
            table.held().for_each(|page| self.pages.unpark(page));
        }
        if let Some(load) = table.loading {
            self.abandon_load(load);
        }
        let (full, open) = table.into_pages();
        // Last page first, so that it is given up first and a fresh sequence gets the slots in the
        // order they had here.
        for page in open.into_iter().rev() {
            self.open_tokens -= page.len();
            self.pages.discard(page);
        }
        for page in full.into_iter().rev() {
            self.leave_page(page, retention);
        }
    }

    /// Forgets everything that nobody holds, in both tiers, because the bytes are lost. No sequence may be
    /// admitted. Pins are taken away. The slots of loads stay taken until these have ended.
    pub fn clear(&mut self) {
        assert!(self.is_empty(), "sequences are released before everything is forgotten");
        let pins: Vec<PinId> = self.pins.keys().copied().collect();
        for pin in pins {
            self.unpin(pin);
        }
        self.version += 1;
        self.drop_all_idle();
        self.copies.clear();
        if let Some(prefix) = &mut self.prefix {
            prefix.clear_ghosts();
        }
    }

    /// Gives up every page that nobody holds, in both tiers, and forgets that it was there. What
    /// sequences and pins hold stays, and can still be found. Returns how many pages became free.
    pub fn forget_idle(&mut self) -> u32 {
        self.version += 1;
        let n_idle = self.pages.n_idle(Tier::Device) + self.pages.n_idle(Tier::Host);
        self.drop_all_idle();
        if let Some(prefix) = &mut self.prefix {
            prefix.clear_ghosts();
        }
        n_idle
    }

    /// Tokens of an admitted sequence that have a place.
    pub fn len(&self, seq: SeqId) -> u32 {
        self.table(seq).len()
    }

    /// Entries in the table of an admitted sequence, those before its window included.
    pub fn n_pages(&self, seq: SeqId) -> u32 {
        self.table(seq).n_pages()
    }

    /// Pages of the device that can be had at once: free ones, and idle ones that leave it for that.
    pub fn n_available(&self) -> u32 {
        self.pages.n_available(Tier::Device)
    }

    /// The same for the host: free ones, and idle ones that are given up for that.
    pub fn n_host_available(&self) -> u32 {
        self.pages.n_available(Tier::Host)
    }

    /// Grows by one for each page of which an admission, or the return of a swapped sequence, may
    /// need one less than before. So what needed `n` pages then and is not there now needs at least
    /// `n` less the growth.
    pub fn n_savings(&self) -> u64 {
        self.n_savings
    }

    /// Whether no sequence has a table.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Whether a sequence has a table.
    pub fn contains(&self, seq: SeqId) -> bool {
        self.tables.contains_key(&seq)
    }

    /// The slots of an admitted sequence's pages in order, from the `start`-th page on. A page that
    /// left the window has slot 0: nobody reads it.
    pub fn slots(&self, seq: SeqId, start: u32) -> impl Iterator<Item = Slot> + '_ {
        let table = self.table(seq);
        let gone = (start..table.n_out()).map(|_| Slot(0));
        gone.chain(table.pages(start as usize).map(|page| self.pages.slot(page)))
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

    /// What the cache holds now and did so far; constant time.
    pub fn stats(&self) -> Stats {
        let page_len = self.config.page_len;
        let used_on = |tier| self.pages.n_used(tier);
        let (used, open) = (used_on(Tier::Device) + used_on(Tier::Host), self.pages.n_open());
        Stats {
            page_len,
            pages_total: self.config.n_pages,
            pages_free: self.pages.n_free(Tier::Device),
            pages_used: used_on(Tier::Device),
            pages_idle: self.pages.n_idle(Tier::Device),
            host_total: self.config.n_host_pages,
            host_free: self.pages.n_free(Tier::Host),
            host_used: used_on(Tier::Host),
            host_idle: self.pages.n_idle(Tier::Host),
            spilled: self.n_spilled,
            seqs: self.tables.len() as u32,
            tokens_stored: (used - open) * page_len + self.open_tokens,
            tokens_wasted: open * page_len - self.open_tokens,
            counters: self.counters,
        }
    }

    /// Checks every invariant; linear in pages and sequences.
    pub fn verify(&self) -> Result<(), Fault> {
        verify::verify(self)
    }

    /// One more handle to a page that is never written again.
    pub(crate) fn share(&mut self, page: PageId) -> SharedPage {
        let (handle, was_idle) = self.pages.share(page);
        if let Some(prefix) = &mut self.prefix
            && was_idle
        {
            prefix.reuse(page, &self.pages);
        }
        self.n_savings += 1;
        handle
    }

    /// Gives a handle back.
    pub(crate) fn release_page(&mut self, handle: SharedPage) {
        let page = handle.id();
        let released = self.pages.release(handle);
        if released == Released::Idle {
            let prefix = self.prefix.as_mut().expect("only the prefix tree keeps idle pages");
            prefix.idle(page, &self.pages);
        }
    }

    /// Gives a table's handle back, and says how long the page should stay.
    pub(crate) fn leave_page(&mut self, handle: SharedPage, retention: Retention) {
        if let Some(prefix) = &mut self.prefix
            && prefix.tree.get(handle.id()).is_some()
        {
            prefix.retain(handle.id(), retention);
        }
        self.release_page(handle);
    }

    /// Checks one page, one table and the sums, in about constant time: which ones, `k` says, so that
    /// rising numbers check everything in turn.
    pub fn verify_sample(&self, k: u64) -> Result<(), Fault> {
        verify::verify_sample(self, k)
    }

    /// The table of an admitted sequence.
    pub(crate) fn table(&self, seq: SeqId) -> &Table {
        self.tables.get(&seq).expect("the sequence is admitted")
    }

    pub(crate) fn table_mut(&mut self, seq: SeqId) -> &mut Table {
        self.tables.get_mut(&seq).expect("the sequence is admitted")
    }

    /// Makes a full page of a sequence findable, or finds the one with the same tokens. `last` is the
    /// page before it in the table.
    fn publish(
        &mut self,
        page: FullPage,
        seq: SeqId,
        last: Option<PageId>,
        tokens: &[TokenId],
    ) -> SharedPage {
        let Table { salt, may_spill, .. } = *self.table(seq);
        self.n_savings += 1;
        let Some(prefix) = &mut self.prefix else {
            return self.pages.make_shared(page, State::Full);
        };
        let parent = last.map_or(Parent::Root(salt), Parent::Page);
        // After a page that cannot be found, nothing can.
        let is_hidden = last.is_some_and(|last| prefix.tree.get(last).is_none());
        let published = if is_hidden {
            Published::Hidden
        } else {
            prefix.publish(parent, tokens, page.id(), &self.pages)
        };
        match published {
            Published::New => {
                self.counters.pages_published += 1;
                self.pages.make_shared(page, State::Cached)
            }
            // A page of the host on which others run stays there, and who may not run on it keeps
            // its own.
            Published::Known(known) if !may_spill && self.is_stuck(known) => {
                self.pages.make_shared(page, State::Full)
            }
            Published::Known(known) => self.merge(page, known),
            Published::Hidden => self.pages.make_shared(page, State::Full),
        }
    }

    /// Ends a page that holds the same tokens as a known one, which serves instead. If that one is on
    /// the host and can move, it takes the place on the device, which saves bringing it back.
    fn merge(&mut self, page: FullPage, known: PageId) -> SharedPage {
        self.counters.pages_merged += 1;
        let is_away = self.pages.tier(known) == Tier::Host && !self.is_stuck(known);
        let handle = self.share(known);
        if is_away && self.pages.tier(page.id()) == Tier::Device {
            self.pages.take_over(known, page);
            if let Some(prefix) = &mut self.prefix {
                prefix.moved(known, Tier::Host, &self.pages);
            }
            self.n_savings += 1;
        } else {
            self.pages.drop_full(page);
        }
        handle
    }
}
