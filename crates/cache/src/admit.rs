//! Giving a sequence its first pages: those found by its tokens, or those of a sequence it forks.
//!
//! Both are decisions of the same kind: some full pages are shared, and at most one page is copied,
//! because its first tokens are the sequence's next ones and the rest is not. Pages that are on the
//! host come to the device, unless the sequence is spilled; the one that is copied need not, as its
//! copy goes there.

use nuthatch_types::{PageCopy, PageId, SeqId, TokenId, Window};

use crate::cache::Cache;
use crate::pages::Tier;
use crate::prefix::{Found, Miss};
use crate::table::Table;
use crate::{Retention, Salt};

/// What a sequence comes with.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Its tokens so far.
    pub tokens: &'a [TokenId],
    /// Whose pages it may share.
    pub salt: Salt,
    /// How long its pages should stay when it is gone.
    pub retention: Retention,
    /// How far back its model sees; `None` is everything.
    pub window: Option<Window>,
    /// Whether it may run on pages of the host, where [`crate::Options::host_reads`] allows that.
    pub may_spill: bool,
    /// Whether nothing that is cached is of use to it, because it has to compute all its tokens.
    pub is_fresh: bool,
}

/// A decision which pages a new sequence starts with; valid until the cache changes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "carry the decision out with Cache::admit, or drop it: nothing has changed"]
pub struct Admission {
    seq: SeqId,
    salt: Salt,
    retention: Retention,
    window: Option<Window>,
    may_spill: bool,
    n_tokens: u32,
    /// Full pages that were found, but lie before the window.
    n_out: u32,
    /// Full pages to share.
    pages: Vec<PageId>,
    /// A page to copy, and how many of its tokens count.
    copy: Option<(PageId, u32)>,
    miss: Option<Miss>,
    n_pages: u32,
    /// How much of `n_pages` is there for the copy's sake.
    n_pages_copy: u32,
    n_pages_spilled: u32,
    /// How many of the pages that can leave the host, the first ones, do not.
    n_stay: u32,
    version: u64,
}

/// What an admitted sequence starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Tokens that need not be computed.
    pub n_found: u32,
    /// Tokens of those that are copied from another page: see [`Cache::take_copies`].
    pub n_copied: u32,
}

impl Admission {
    /// Pages of [`Cache::n_available`] that go when the sequence is admitted and all its tokens get
    /// places.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }

    /// The fewest pages of both tiers that go for that, if the sequence may spill: all but those that
    /// somebody holds. Otherwise pages of the device, and a copy's source counts too.
    pub fn n_pages_spilled(&self) -> u32 {
        self.n_pages_spilled
    }

    /// Where the cached beginning of the tokens ends, and why. `None` for a fork.
    pub fn miss(&self) -> Option<Miss> {
        self.miss
    }

    /// The same decision without the copy, for when pages are so short that the page to be copied
    /// from must itself be given up.
    pub fn without_copy(mut self) -> Self {
        self.copy = None;
        self.n_pages -= self.n_pages_copy;
        self.n_pages_copy = 0;
        self
    }

    /// The full pages to share, in order.
    pub(crate) fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Whether the sequence may run on pages of the host.
    pub(crate) fn may_spill(&self) -> bool {
        self.may_spill
    }

    /// Leaves the first `n_stay` of the pages that can come from the host where they are.
    pub(crate) fn leave(&mut self, n_stay: u32) {
        self.n_stay = n_stay;
    }
}

impl Cache {
    /// Decides which cached pages a new sequence starts with: the longest cached beginning of its
    /// tokens, always without the last token, which must be computed to give logits. Changes
    /// nothing.
    pub fn plan_admit(&self, seq: SeqId, prompt: Prompt<'_>) -> Admission {
        let Prompt { tokens, salt, retention, window, may_spill, is_fresh } = prompt;
        let n_tokens = tokens.len() as u32;
        let (mut pages, copy, miss) = match &self.prefix {
            Some(prefix) if !is_fresh => {
                let Found { pages, copy, miss } = prefix.walk(salt, tokens);
                (pages, copy, Some(miss))
            }
            Some(_) | None => (Vec::new(), None, None),
        };
        let (may_spill, mut copy) = (may_spill && self.spills(), copy);
        if !may_spill
            && self.n_spilled > 0
            && let Some(n_usable) = pages.iter().position(|&page| self.is_stuck(page))
        {
            pages.truncate(n_usable);
            copy = None;
        }
        let n_out = self.n_out(window, pages.len() as u32);
        pages.drain(..n_out as usize);
        self.admission(Admission {
            seq,
            salt,
            retention,
            window,
            may_spill,
            n_tokens,
            n_out,
            pages,
            copy,
            miss,
            n_pages: 0,
            n_pages_copy: 0,
            n_pages_spilled: 0,
            n_stay: 0,
            version: self.version,
        })
    }

    /// Decides which pages a new sequence of `n_tokens` tokens starts with whose first `n_shared`
    /// tokens are those of `source` and are computed there. At most one page will be copied.
    /// [`Cache::can_fork`] must hold. Changes nothing.
    pub fn plan_fork(&self, source: SeqId, seq: SeqId, n_shared: u32, n_tokens: u32) -> Admission {
        let table = self.table(source);
        assert!(n_shared <= table.len(), "shared tokens have places in {source:?}");
        assert!(n_shared <= n_tokens, "shared tokens are the fork's own");
        assert!(self.can_fork(source, n_shared), "{source:?} holds what the fork sees");
        let page_len = self.config.page_len;
        let n_full = n_shared / page_len;
        assert!(n_full <= table.n_full(), "shared tokens are computed in {source:?}");
        let rest = n_shared % page_len;
        let n_out = self.n_out(table.window, n_full);
        let copy = table.page(n_full as usize).filter(|_| rest > 0).map(|page| (page, rest));
        self.admission(Admission {
            seq,
            salt: table.salt,
            retention: table.retention,
            window: table.window,
            may_spill: table.may_spill,
            n_tokens,
            n_out,
            pages: (n_out..n_full).filter_map(|i| table.page(i as usize)).collect(),
            copy,
            miss: None,
            n_pages: 0,
            n_pages_copy: 0,
            n_pages_spilled: 0,
            n_stay: 0,
            version: self.version,
        })
    }

    /// Carries out a decision: the sequence has a table with the pages that were found, all of them
    /// on the device unless it is spilled. Nothing may have changed since the decision was made, and
    /// [`Admission::n_pages`] pages must be available if it copies one or if there is a host tier.
    pub fn admit(&mut self, admission: Admission) -> Admitted {
        assert_eq!(admission.version, self.version, "the cache changed after the decision");
        let Admission { seq, salt, retention, n_tokens, pages, copy, miss, .. } = admission;
        self.version += 1;
        let mut table = Table::new(self.config.page_len, salt, retention);
        table.window = admission.window;
        table.may_spill = admission.may_spill;
        table.begin_out(admission.n_out);
        let away = pages.iter().copied().filter(|&page| self.is_away(page));
        let to_promote: Vec<PageId> = away.skip(admission.n_stay as usize).collect();
        for &page in &pages {
            let handle = self.share(page);
            table.push_full(handle);
            if let Some(prefix) = &mut self.prefix
                && miss.is_some()
            {
                prefix.hit(page);
            }
        }
        // The page that is copied must not be given up to make room for the others.
        let source = copy.map(|(source, _)| source).filter(|&page| !self.pages.is_open(page));
        let guard = source.map(|source| self.share(source));
        for page in to_promote {
            self.counters.pages_promoted += 1;
            self.promote(page);
        }
        let on_host = |page: &&PageId| self.pages.tier(**page) == Tier::Host;
        table.n_spilled = pages.iter().filter(on_host).count() as u32;
        self.n_spilled += table.n_spilled;
        self.counters.pages_spilled += u64::from(table.n_spilled);
        let n_copied = copy.map_or(0, |(_, n)| n);
        if let Some((source, n_tokens)) = copy {
            self.copy_page(source, n_tokens, &mut table);
        }
        if let Some(guard) = guard {
            self.release_page(guard);
        }
        self.counters.tokens_shared += u64::from(table.len() - n_copied);
        self.counters.tokens_copied += u64::from(n_copied);
        self.counters.tokens_asked += u64::from(n_tokens);
        if let Some(miss) = miss {
            self.counters.count(miss);
        }
        let n_found = table.len();
        let before = self.tables.insert(seq, table);
        assert!(before.is_none(), "{seq:?} was admitted twice");
        // A copied part may have moved the window past one more page.
        self.slide(seq, n_found);
        Admitted { n_found, n_copied }
    }

    /// Opens a page for the first `n_tokens` tokens of `source`, which somebody holds.
    fn copy_page(&mut self, source: PageId, n_tokens: u32, table: &mut Table) {
        let mut page = self.open_page();
        let left = page.advance(n_tokens);
        assert_eq!(left, 0, "a copied part is no longer than a page");
        self.open_tokens += n_tokens;
        let copy = PageCopy { source: self.pages.slot(source), target: self.pages.slot(page.id()) };
        self.copies.push(copy);
        table.push_open(page);
    }

    /// How many of the first `n_full` pages lie before the window of what comes next.
    fn n_out(&self, window: Option<Window>, n_full: u32) -> u32 {
        let page_len = self.config.page_len;
        window.map_or(0, |window| window.pages_out(n_full * page_len, page_len))
    }

    /// Counts the pages that a decision takes from the available ones.
    fn admission(&self, mut admission: Admission) -> Admission {
        let Admission { n_tokens, n_out, window, .. } = admission;
        let page_len = self.config.page_len;
        let all = n_tokens.div_ceil(page_len) - n_out;
        let most = window.map_or(all, |window| all.min(window.pages_max(n_tokens, page_len)));
        let count = |is: &dyn Fn(PageId) -> bool| {
            admission.pages.iter().filter(|&&page| is(page)).count() as u32
        };
        let is_on_device = |page: PageId| self.pages.tier(page) == Tier::Device;
        let is_held = |page: PageId| !self.pages.is_idle(page);
        let n_held = count(&is_held);
        // Whoever comes to a page on which others run takes nothing, wherever it is.
        let n_there = count(&|page| is_held(page) && !self.is_away(page));
        let takes_source = |page: PageId| is_on_device(page) && self.pages.is_idle(page);
        admission.n_pages_copy =
            u32::from(admission.copy.is_some_and(|(page, _)| takes_source(page)));
        admission.n_pages = most.saturating_sub(n_there) + admission.n_pages_copy;
        admission.n_pages_spilled =
            if admission.may_spill { most.saturating_sub(n_held) } else { admission.n_pages };
        admission
    }
}
