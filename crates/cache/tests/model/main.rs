//! Random operations on the cache, held against a naive model.
//!
//! The model keeps whole token strings in sorted maps and searches them from end to end. It knows no
//! hash and no tree; what it knows is which beginnings can be found, in which tier, who holds which
//! page, in which order pages are given up, and what must be read back at each place of the arena.

mod check;
mod ops;

use std::collections::{BTreeMap, BTreeSet};

use nuthatch_cache::{
    Admission, Admitted, Cache, CachedPage, Config, ContentId, MissReason, Options, PinId, Prompt,
    Retention, Salt, Shortfall, Tier,
};
use nuthatch_types::{HostReads, KvSlots, SeqId, Slot, TokenId, Window};

/// A beginning of a whole number of pages under a salt.
type Path = (Salt, Vec<TokenId>);

/// What was computed at a place: the salt, all tokens up to this one, and how many were dropped.
type Computed = (Path, usize);

/// A full page, by a number that is never used again.
type Id = u64;

/// What an entry of a table that is never written again has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// Its page left the window.
    Out,
    /// A sink that was turned; the page is the sequence's own.
    Sink,
    Page(Id),
}

struct Seq {
    salt: Salt,
    tokens: Vec<TokenId>,
    window: Option<Window>,
    /// Tokens that have a place, or had one before the window.
    len: usize,
    /// Tokens of `tokens` that are computed.
    computed: usize,
    /// How many were dropped when each of those was computed.
    marks: Vec<usize>,
    dropped: usize,
    full: Vec<Entry>,
    /// What the sinks were before they were turned.
    pristine: Vec<Id>,
    may_spill: bool,
    is_swapped: bool,
    /// Whether each page of its own, a sink or one that is partly filled or not yet computed, is on
    /// the host.
    own: Vec<bool>,
}

impl Seq {
    fn ids(&self) -> impl DoubleEndedIterator<Item = Id> + '_ {
        let page = |entry: &Entry| match *entry {
            Entry::Page(id) => Some(id),
            Entry::Out | Entry::Sink => None,
        };
        self.pristine.iter().copied().chain(self.full.iter().filter_map(page))
    }

    fn n_out(&self) -> usize {
        self.full.iter().filter(|&&entry| entry == Entry::Out).count()
    }

    fn n_sinks(&self) -> usize {
        self.pristine.len()
    }

    /// Pages of its own.
    fn n_own(&self, page_len: usize) -> usize {
        let n_own = self.len.div_ceil(page_len) - self.full.len() + self.n_sinks();
        assert_eq!(self.own.len(), n_own);
        n_own
    }
}

/// What can be found.
#[derive(Clone, Copy)]
struct Cached {
    id: Id,
    last_use: u64,
}

struct Model {
    cache: Cache,
    page_len: usize,
    n_pages: u32,
    n_host: u32,
    demotion_depth: u32,
    max_pinned: u32,
    spill: bool,
    seqs: BTreeMap<SeqId, Seq>,
    pins: BTreeMap<PinId, Vec<Id>>,
    /// A page that is held while it is copied.
    guard: Option<Id>,
    cached: BTreeMap<Path, Cached>,
    /// Full pages that are held or can be found, and whether each is on the host.
    on_host: BTreeMap<Id, bool>,
    n_uses: u64,
    n_ids: u64,
    evicted: BTreeSet<Path>,
    /// `[slot][page_len]`
    arena: Vec<Vec<Option<Computed>>>,
    /// What somebody knows who only hears the events.
    heard: BTreeMap<(ContentId, Tier), CachedPage>,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    page_len: u32,
    n_pages: u32,
    n_host: u32,
    demotion_depth: u32,
    max_pinned: u32,
    spill: bool,
}

impl Model {
    fn new(sizes: Sizes) -> Self {
        let Sizes { page_len, n_pages, n_host, demotion_depth, max_pinned, spill } = sizes;
        let max_pinned = max_pinned.min(n_pages - 1);
        let host_reads = if spill { HostReads::Far } else { HostReads::Never };
        let options = Options { max_pinned, host_reads, ..Options::default() };
        let config = Config { page_len, n_pages, n_host_pages: n_host };
        let mut cache = Cache::with_options(config, options).expect("valid sizes");
        cache.set_demotion_depth(demotion_depth);
        cache.watch();
        Model {
            cache,
            page_len: page_len as usize,
            n_pages,
            n_host,
            demotion_depth,
            max_pinned,
            spill: spill && n_host > 0,
            seqs: BTreeMap::new(),
            pins: BTreeMap::new(),
            guard: None,
            cached: BTreeMap::new(),
            on_host: BTreeMap::new(),
            n_uses: 0,
            n_ids: 0,
            evicted: BTreeSet::new(),
            arena: vec![vec![None; page_len as usize]; (n_pages + n_host) as usize],
            heard: BTreeMap::new(),
        }
    }

    /// A new full page.
    fn new_page(&mut self, on_host: bool) -> Id {
        self.n_ids += 1;
        self.on_host.insert(self.n_ids, on_host);
        self.n_ids
    }

    /// Whether a page is on the host and a table that is not swapped has it.
    fn is_stuck(&self, id: Id) -> bool {
        let mut running = self.seqs.values().filter(|seq| !seq.is_swapped);
        self.on_host[&id] && running.any(|seq| seq.ids().any(|held| held == id))
    }

    /// Whether a page is on the host and can leave it.
    fn is_away(&self, id: Id) -> bool {
        self.on_host[&id] && !self.is_stuck(id)
    }

    /// Pages that are held, as often as they are, by all or only by those that are not swapped.
    fn holds(&self, active: bool) -> impl Iterator<Item = Id> + '_ {
        let seqs = self.seqs.values().filter(move |seq| !(active && seq.is_swapped));
        let pinned = self.pins.values().flatten().copied();
        seqs.flat_map(Seq::ids).chain(pinned).chain(self.guard)
    }

    fn n_holds(&self, id: Id, active: bool) -> usize {
        self.holds(active).filter(|&held| held == id).count()
    }

    fn is_used(&self, id: Id) -> bool {
        self.n_holds(id, false) > 0
    }

    /// What can be found, is in a tier and is held by nobody.
    fn idle(&self, on_host: bool) -> Vec<(&Path, Cached)> {
        let is_idle = |id: Id| self.on_host[&id] == on_host && !self.is_used(id);
        let entries = self.cached.iter().map(|(path, &entry)| (path, entry));
        entries.filter(|&(_, entry)| is_idle(entry.id)).collect()
    }

    /// Pages in a tier that are not free.
    fn n_taken(&self, on_host: bool) -> u32 {
        let full = self.on_host.values().filter(|&&on| on == on_host).count();
        let own = |seq: &Seq| seq.own.iter().filter(|&&on| on == on_host).count();
        (full + self.seqs.values().map(own).sum::<usize>()) as u32
    }

    fn available(&self) -> u32 {
        self.n_pages - self.n_taken(false) + self.idle(false).len() as u32
    }

    fn available_on_host(&self) -> u32 {
        self.n_host - self.n_taken(true) + self.idle(true).len() as u32
    }

    /// Records that a holder has left a page: when it was the last, the page was used just now, or
    /// goes if it cannot be found.
    fn leave(&mut self, id: Id) {
        if self.is_used(id) {
            return;
        }
        self.n_uses += 1;
        let n_uses = self.n_uses;
        match self.cached.values_mut().find(|entry| entry.id == id) {
            Some(entry) => entry.last_use = n_uses,
            None => drop(self.on_host.remove(&id)),
        }
    }

    /// The least recently used idle beginning of a tier that no idle page of the same tier follows
    /// right away.
    fn first_to_go(&self, on_host: bool) -> Option<Path> {
        let idle = self.idle(on_host);
        let is_last = |path: &Path| {
            let next = path.1.len() + self.page_len;
            !idle.iter().any(|(other, _)| other.1.len() == next && follows(other, path))
        };
        let offered = idle.iter().filter(|(path, _)| is_last(path));
        offered.min_by_key(|(_, entry)| entry.last_use).map(|(path, _)| (*path).clone())
    }

    /// Gives up a beginning. What follows it can no longer be found.
    fn give_up(&mut self, victim: &Path) {
        let gone: Vec<Path> = self
            .cached
            .keys()
            .filter(|path| *path == victim || follows(path, victim))
            .cloned()
            .collect();
        for path in gone {
            let entry = self.cached.remove(&path).expect("cached");
            if !self.is_used(entry.id) {
                self.on_host.remove(&entry.id);
            }
            self.evicted.insert(path);
        }
    }

    /// Lets idle beginnings leave the device until `n` more pages fit.
    fn make_room(&mut self, n: u32) {
        while self.n_taken(false) + n > self.n_pages {
            let victim = self.first_to_go(false).expect("counted as available");
            let depth = (victim.1.len() / self.page_len - 1) as u32;
            let is_followed = self.cached.keys().any(|path| follows(path, &victim));
            let is_worth = is_followed || depth >= self.demotion_depth;
            if !is_worth || self.available_on_host() == 0 {
                self.give_up(&victim);
                continue;
            }
            self.make_host_room(1);
            // It may have come after the one that went.
            if let Some(entry) = self.cached.get(&victim) {
                self.on_host.insert(entry.id, true);
            }
        }
    }

    /// Gives up idle beginnings of the host until `n` more pages fit there.
    fn make_host_room(&mut self, n: u32) {
        while self.n_taken(true) + n > self.n_host {
            let victim = self.first_to_go(true).expect("counted as available");
            self.give_up(&victim);
        }
    }

    /// Brings a page to the device.
    fn promote(&mut self, id: Id) {
        if self.on_host[&id] {
            self.make_room(1);
            self.on_host.insert(id, false);
        }
    }

    /// Moves the bytes as the cache says.
    fn copy(&mut self) {
        for copy in self.cache.take_copies() {
            assert_ne!(copy.source, copy.target);
            self.arena[copy.target.0 as usize] = self.arena[copy.source.0 as usize].clone();
        }
    }

    /// The longest cached beginning: whole pages, and the page to copy from with the count.
    fn find(&self, salt: Salt, tokens: &[TokenId]) -> (usize, Option<(Path, usize)>) {
        let limit = tokens.len().saturating_sub(1);
        let whole = |n: &usize| self.cached.contains_key(&(salt, tokens[..*n].to_vec()));
        let n_shared = (1..).map(|i| i * self.page_len).take_while(|n| *n <= limit);
        let n_shared = n_shared.take_while(whole).last().unwrap_or(0);
        let wanted = &tokens[..limit.min(n_shared + self.page_len)];
        let children = self.cached.keys().filter(|path| {
            path.0 == salt
                && path.1.len() == n_shared + self.page_len
                && path.1.starts_with(&tokens[..n_shared])
        });
        let common =
            |path: &Path| path.1.iter().zip(wanted).take_while(|(a, b)| a == b).count() - n_shared;
        // Of equally good ones, the next after the wanted tokens, or else the last before them.
        let (before, after): (Vec<&Path>, Vec<&Path>) =
            children.partition(|path| path.1.as_slice() < wanted);
        let candidates = before.last().into_iter().chain(after.first());
        let best = candidates.max_by_key(|path| common(path));
        let best = best.map(|path| ((*path).clone(), common(path)));
        // The sorted neighbours must be as good as any.
        let naive_best = before.iter().chain(&after).map(|path| common(path)).max();
        assert_eq!(best.as_ref().map(|&(_, n)| n), naive_best);
        (n_shared, best.filter(|&(_, n)| n > 0))
    }

    fn check_reason(&self, reason: MissReason, salt: Salt, tokens: &[TokenId], at: usize) {
        let n_pages = at / self.page_len;
        let next = (n_pages + 1) * self.page_len;
        let next = (next <= tokens.len()).then(|| tokens[..next].to_vec());
        let elsewhere = |(other, path): &Path| {
            *other != salt && path.len() == self.page_len && tokens.starts_with(path)
        };
        match reason {
            MissReason::Complete => assert!(at + 1 >= tokens.len()),
            MissReason::Evicted => {
                assert!(next.is_some_and(|next| self.evicted.contains(&(salt, next))));
            }
            MissReason::Salt => assert!(self.cached.keys().any(elsewhere)),
            MissReason::Diverged => assert!(at > 0),
            MissReason::NeverSeen => assert!(at + 1 < tokens.len()),
        }
    }

    fn n_out(&self, window: Option<Window>, n_full: usize) -> usize {
        let page_len = self.page_len;
        let out =
            |window: Window| window.pages_out((n_full * page_len) as u32, page_len as u32) as usize;
        window.map_or(0, out)
    }

    /// Pages that a sequence of `n_tokens` needs at most when its first `n_out` entries have none.
    fn most(&self, window: Option<Window>, n_tokens: usize, n_out: usize) -> usize {
        let all = n_tokens.div_ceil(self.page_len) - n_out;
        let page_len = self.page_len as u32;
        let most = |window: Window| window.pages_max(n_tokens as u32, page_len) as usize;
        window.map_or(all, |window| all.min(most(window)))
    }

    fn admit(&mut self, seq: SeqId, salt: Salt, tokens: Vec<TokenId>, op: Entering) {
        let Entering { window, may_spill, room } = op;
        let retention = Retention::default();
        let is_fresh = false;
        let prompt = Prompt { tokens: &tokens, salt, retention, window, may_spill, is_fresh };
        let mut admission = self.cache.plan_admit(seq, prompt);
        let (n_shared, mut copy) = self.find(salt, &tokens);
        let miss = admission.miss().expect("the prefix tree was asked");
        assert_eq!(miss.at as usize, n_shared + copy.as_ref().map_or(0, |&(_, n)| n));
        self.check_reason(miss.reason, salt, &tokens, miss.at as usize);

        let may_spill = may_spill && self.spill;
        let path = |n: usize| (salt, tokens[..(n + 1) * self.page_len].to_vec());
        let found = (0..n_shared / self.page_len).map(|n| self.cached[&path(n)].id);
        let mut ids: Vec<Id> = found.collect();
        if let Some(n) = ids.iter().position(|&id| !may_spill && self.is_stuck(id)) {
            ids.truncate(n);
            copy = None;
        }
        let n_out = self.n_out(window, ids.len());
        ids.drain(..n_out);
        let most = self.most(window, tokens.len(), n_out);
        let is_there = |id: &&Id| self.is_used(**id) && !self.is_away(**id);
        let n_there = ids.iter().filter(is_there).count();
        let needed = most.saturating_sub(n_there) as u32;
        let source = copy.as_ref().map(|(path, _)| self.cached[path].id);
        let takes_source = source.is_some_and(|id| !self.is_used(id) && !self.on_host[&id]);
        assert_eq!(admission.n_pages(), needed + u32::from(takes_source));
        let n_used = ids.iter().filter(|&&id| self.is_used(id)).count();
        let least =
            if may_spill { most.saturating_sub(n_used) as u32 } else { admission.n_pages() };
        assert_eq!(admission.n_pages_spilled(), least);
        let room = KvSlots { device: self.available().min(room), host: self.available_on_host() };
        if admission.n_pages() > room.device {
            admission = admission.without_copy();
            assert_eq!(admission.n_pages(), needed);
            copy = None;
        }
        let away: Vec<Id> = ids.iter().copied().filter(|&id| self.is_away(id)).collect();
        let mut n_stay = 0;
        if needed > room.device {
            let n_over = (needed - room.device) as usize;
            n_stay = if may_spill { n_over.min(away.len()) } else { 0 };
            let n_idle = away[..n_stay].iter().filter(|&&id| !self.is_used(id)).count();
            let fits = may_spill && n_idle + (n_over - n_stay) <= room.host as usize;
            // Who brings nothing from the host needs no page before it has tokens to compute.
            if !away.is_empty() || may_spill {
                let spilled = self.cache.spill(admission, room);
                assert_eq!(spilled.is_some(), fits);
                let Some(spilled) = spilled else { return };
                admission = spilled;
            }
        }
        let n_copied = copy.map_or(0, |(_, n)| n);
        let entries = vec![Entry::Out; n_out];
        let full = entries.into_iter().chain(ids.into_iter().map(Entry::Page)).collect();
        self.guard = source.filter(|_| n_copied > 0);
        let from = Beginning { salt, tokens, window, may_spill, full, n_copied, n_stay };
        self.take_admitted(seq, from, admission);
    }

    fn fork(&mut self, source: SeqId, seq: SeqId, n_shared: usize, more: &[TokenId]) {
        let from = &self.seqs[&source];
        let n_shared = n_shared.min(from.computed);
        let n_full = n_shared / self.page_len;
        let n_out = self.n_out(from.window, n_full);
        let mut can_fork = from.dropped == 0 && from.n_out() <= n_out;
        let is_page =
            |is: &dyn Fn(Id) -> bool, entry: &Entry| matches!(entry, Entry::Page(id) if is(*id));
        let count = |full: &[Entry], is: &dyn Fn(Id) -> bool| {
            full.iter().filter(|entry| is_page(is, entry)).count()
        };
        if can_fork && !from.may_spill {
            can_fork = count(&from.full[n_out..n_full], &|id| self.is_stuck(id)) == 0;
        }
        assert_eq!(self.cache.can_fork(source, n_shared as u32), can_fork);
        if !can_fork {
            return;
        }
        let tokens: Vec<_> = from.tokens[..n_shared].iter().chain(more).copied().collect();
        let (salt, window, may_spill) = (from.salt, from.window, from.may_spill);
        let n_tokens = tokens.len() as u32;
        let mut full = from.full[..n_full].to_vec();
        full[..n_out].fill(Entry::Out);
        let mut admission = self.cache.plan_fork(source, seq, n_shared as u32, n_tokens);
        let n_away = count(&full, &|id| self.is_away(id));
        let n_there = n_full - n_out - n_away;
        let needed = self.most(window, tokens.len(), n_out).saturating_sub(n_there);
        assert_eq!(admission.n_pages() as usize, needed);
        let mut n_copied = n_shared % self.page_len;
        if admission.n_pages() > self.available() {
            if n_away > 0 {
                return;
            }
            admission = admission.without_copy();
            n_copied = 0;
        }
        let from = Beginning { salt, tokens, window, may_spill, full, n_copied, n_stay: 0 };
        self.take_admitted(seq, from, admission);
    }

    fn take_admitted(&mut self, seq: SeqId, from: Beginning, admission: Admission) {
        let Beginning { salt, tokens, window, may_spill, full, n_copied, n_stay } = from;
        let admitted = self.cache.admit(admission);
        let len = full.len() * self.page_len;
        let expected = Admitted { n_found: (len + n_copied) as u32, n_copied: n_copied as u32 };
        assert_eq!(admitted, expected);
        let entry = Seq {
            salt,
            tokens,
            window,
            len,
            computed: len + n_copied,
            marks: vec![0; len + n_copied],
            dropped: 0,
            full,
            pristine: Vec::new(),
            may_spill,
            is_swapped: false,
            own: Vec::new(),
        };
        let away = entry.ids().filter(|&id| self.is_away(id));
        let to_promote: Vec<Id> = away.skip(n_stay).collect();
        self.seqs.insert(seq, entry);
        to_promote.into_iter().for_each(|id| self.promote(id));
        if n_copied > 0 {
            self.make_room(1);
            let entry = self.seqs.get_mut(&seq).expect("known");
            entry.len += n_copied;
            entry.own.push(false);
        }
        if let Some(source) = self.guard.take() {
            self.leave(source);
        }
        self.slide(seq);
    }

    fn swap_out(&mut self, seq: SeqId) {
        let entry = &self.seqs[&seq];
        let alone: Vec<Id> = entry.ids().filter(|&id| self.n_holds(id, true) == 1).collect();
        let n_full = alone.iter().filter(|id| !self.on_host[id]).count();
        let n_own = entry.own.iter().filter(|&&on_host| !on_host).count();
        let n = (n_full + n_own) as u32;
        let has_some = alone.len() + entry.own.len() > 0;
        let expected = (has_some && n <= self.available_on_host()).then_some(n);
        let swap = self.cache.plan_swap_out(seq);
        assert_eq!(swap.as_ref().map(nuthatch_cache::SwapOut::n_pages), expected);
        let Some(swap) = swap else { return };
        self.cache.swap_out(swap);
        self.make_host_room(n);
        for id in alone {
            self.on_host.insert(id, true);
        }
        let entry = self.seqs.get_mut(&seq).expect("known");
        entry.own.fill(true);
        entry.is_swapped = true;
    }

    fn swap_in(&mut self, seq: SeqId, n_stay: usize) {
        let entry = &self.seqs[&seq];
        let is_stopped = !entry.may_spill && entry.ids().any(|id| self.is_stuck(id));
        let swap = self.cache.plan_swap_in(seq);
        assert_eq!(swap.is_none(), is_stopped);
        let Some(swap) = swap else { return };
        // In the order of the table, after what the sinks are made of.
        let n_sinks = entry.n_sinks();
        let ids: Vec<Id> = entry.ids().collect();
        let (pristine, full) = ids.split_at(n_sinks);
        let own = |range: std::ops::Range<usize>| range.map(Own::Open);
        let all = pristine.iter().copied().map(Own::Full).chain(own(0..n_sinks));
        let all =
            all.chain(full.iter().copied().map(Own::Full)).chain(own(n_sinks..entry.own.len()));
        let is_away = |page: &Own| match *page {
            Own::Full(id) => self.is_away(id),
            Own::Open(_) => true,
        };
        let away: Vec<Own> = all.filter(is_away).collect();
        assert_eq!(swap.n_pages() as usize, away.len());
        let n_stay = if entry.may_spill { n_stay.min(away.len()) } else { 0 };
        let swap = swap.spill(n_stay as u32);
        if swap.n_pages() > self.available() {
            return;
        }
        self.cache.swap_in(swap);
        for &page in &away[n_stay..] {
            self.bring(seq, page);
        }
        self.seqs.get_mut(&seq).expect("known").is_swapped = false;
    }

    /// Brings a page of a sequence to the device.
    fn bring(&mut self, seq: SeqId, page: Own) {
        match page {
            Own::Full(id) => self.promote(id),
            Own::Open(i) => {
                self.make_room(1);
                self.seqs.get_mut(&seq).expect("known").own[i] = false;
            }
        }
    }

    /// Brings the last pages on which a sequence runs on the host to the device.
    fn unspill(&mut self, seq: SeqId, n: usize) {
        let n = n.min(self.available() as usize);
        let running = |model: &Model| -> BTreeMap<SeqId, Vec<Slot>> {
            let running = model.seqs.iter().filter(|(_, entry)| !entry.is_swapped);
            running.map(|(&seq, _)| (seq, model.cache.slots(seq, 0).collect())).collect()
        };
        let before = running(self);
        let changed = self.cache.unspill(seq, n as u32);
        let entry = &self.seqs[&seq];
        let n_sinks = entry.n_sinks();
        let open = (n_sinks..entry.own.len()).rev().filter(|&i| entry.own[i]).map(Own::Open);
        let full = entry.ids().rev().filter(|id| self.on_host[id]).map(Own::Full);
        let pages: Vec<Own> = open.chain(full).take(n).collect();
        pages.into_iter().for_each(|page| self.bring(seq, page));
        let after = running(self);
        let first_changed = |(&seq, slots): (&SeqId, &Vec<Slot>)| {
            let place = slots.iter().zip(&after[&seq]).position(|(a, b)| a != b)?;
            Some((seq, place as u32))
        };
        let expected: Vec<_> = before.iter().filter_map(first_changed).collect();
        assert_eq!(changed, expected);
    }

    fn extend(&mut self, seq: SeqId, more: &[TokenId], n_host: u32) {
        let entry = &self.seqs[&seq];
        // What it came with gets places first.
        let n = entry.tokens.len() - entry.dropped - entry.len + more.len();
        let pages = |len: usize| len.div_ceil(self.page_len);
        let all = (pages(entry.len + n) - pages(entry.len)) as u32;
        let most = if entry.may_spill { self.available_on_host() } else { 0 };
        let n_spilled = all.min(n_host).min(most);
        let needed = all - n_spilled;
        let available = self.available();
        match self.cache.plan_extend(seq, n as u32, n_host) {
            Ok(extend) => {
                assert!(needed <= available);
                assert_eq!((extend.n_pages(), extend.n_host()), (needed, n_spilled));
                self.cache.apply(extend);
                for i in 0..all {
                    let on_host = i < n_spilled;
                    if on_host {
                        self.make_host_room(1)
                    } else {
                        self.make_room(1)
                    }
                    self.seqs.get_mut(&seq).expect("known").own.push(on_host);
                }
                let entry = self.seqs.get_mut(&seq).expect("known");
                entry.tokens.extend(more);
                entry.len += n;
            }
            Err(shortfall) => {
                assert!(needed > available);
                assert_eq!(shortfall, Shortfall { needed, available });
            }
        }
    }

    fn seal(&mut self, seq: SeqId, n: usize) {
        let slots: Vec<Slot> = self.cache.slots(seq, 0).collect();
        let entry = self.seqs.get_mut(&seq).expect("known");
        let (before, dropped) = (entry.computed, entry.dropped);
        entry.computed = (before + n).min(entry.len + dropped);
        entry.marks.resize(entry.computed, dropped);
        let (salt, computed) = (entry.salt, entry.tokens[..entry.computed].to_vec());
        for i in before..computed.len() {
            let place = i - dropped;
            let slot = slots[place / self.page_len];
            let computed_here = ((salt, computed[..=i].to_vec()), dropped);
            self.arena[slot.0 as usize][place % self.page_len] = Some(computed_here);
        }
        let first_changed = self.cache.seal(seq, &computed);
        let after: Vec<Slot> = self.cache.slots(seq, 0).collect();
        let same = slots.iter().zip(&after).take_while(|(a, b)| a == b).count();
        assert_eq!(first_changed.map_or(slots.len(), |i| i as usize), same);
        while (self.seqs[&seq].full.len() + 1) * self.page_len + dropped <= computed.len() {
            let n_sinks = self.seqs[&seq].n_sinks();
            let on_host = self.seqs.get_mut(&seq).expect("known").own.remove(n_sinks);
            let id = self.publish(seq, salt, &computed, on_host);
            self.seqs.get_mut(&seq).expect("known").full.push(Entry::Page(id));
        }
    }

    /// The page that a sequence has for its next full page: its own, or the one that is known.
    fn publish(&mut self, seq: SeqId, salt: Salt, computed: &[TokenId], on_host: bool) -> Id {
        let entry = &self.seqs[&seq];
        let is_findable = |id: Id| self.cached.values().any(|found| found.id == id);
        let may_be_found = match entry.full.last() {
            _ if entry.dropped > 0 => false,
            None => true,
            Some(&Entry::Page(last)) => is_findable(last),
            Some(Entry::Out | Entry::Sink) => panic!("the last full page stays"),
        };
        let path = (salt, computed[..(entry.full.len() + 1) * self.page_len].to_vec());
        match self.cached.get(&path).copied() {
            // Others run on it where this one may not.
            Some(Cached { id, .. }) if may_be_found && !entry.may_spill && self.is_stuck(id) => {
                self.new_page(on_host)
            }
            Some(Cached { id, .. }) if may_be_found => {
                // One that was on the host takes over the place that was just computed.
                if !on_host && self.is_away(id) {
                    self.on_host.insert(id, false);
                }
                id
            }
            _ => {
                let id = self.new_page(on_host);
                if may_be_found {
                    self.cached.insert(path, Cached { id, last_use: 0 });
                }
                id
            }
        }
    }

    fn slide(&mut self, seq: SeqId) {
        let entry = &self.seqs[&seq];
        let computed = entry.computed as u32;
        self.cache.slide(seq, computed);
        let out = |window: Window| window.pages_out(computed, self.page_len as u32) as usize;
        let n_out = entry.window.map_or(0, out);
        for i in entry.n_out()..n_out {
            let entry = &mut self.seqs.get_mut(&seq).expect("known").full[i];
            let Entry::Page(id) = std::mem::replace(entry, Entry::Out) else {
                panic!("a page that left the window was full")
            };
            self.leave(id);
        }
    }

    /// Drops a page if the sequence may: it has no window, and every page is full.
    fn roll(&mut self, seq: SeqId, n_sinks: usize) {
        let entry = &self.seqs[&seq];
        let is_first = entry.dropped == 0;
        let n_sinks = if is_first { n_sinks } else { entry.n_sinks() };
        let is_full = entry.full.len() * self.page_len == entry.len;
        if entry.window.is_some() || entry.may_spill || !is_full || entry.full.len() <= n_sinks {
            return;
        }
        let Entry::Page(dropped) = entry.full[n_sinks] else { panic!("it is no sink") };
        let needed = if is_first { n_sinks as u32 + 1 } else { 1 };
        let is_alone = self.n_holds(dropped, false) == 1;
        let available = self.available() + u32::from(is_alone);
        let shifts = match self.cache.roll(seq, n_sinks as u32) {
            Ok(shifts) => shifts,
            Err(shortfall) => {
                assert!(needed > available);
                return assert_eq!(shortfall, Shortfall { needed, available });
            }
        };
        assert!(needed <= available);
        let page_len = self.page_len;
        let entry = self.seqs.get_mut(&seq).expect("known");
        entry.full.remove(n_sinks);
        entry.len -= page_len;
        entry.dropped += page_len;
        let by = entry.dropped as i32;
        self.leave(dropped);
        self.make_room(needed - 1);
        let entry = self.seqs.get_mut(&seq).expect("known");
        if is_first {
            entry.pristine = entry.ids().take(n_sinks).collect();
            entry.full[..n_sinks].fill(Entry::Sink);
            entry.own.splice(0..0, vec![false; n_sinks]);
        }
        assert_eq!(shifts.len(), n_sinks);
        self.copy();
        for shift in shifts {
            assert_eq!(shift.by, by);
            self.arena[shift.target.0 as usize] = self.arena[shift.source.0 as usize].clone();
        }
        assert!(self.cache.plan_extend(seq, page_len as u32, 0).is_ok(), "one page can be had");
    }

    fn release(&mut self, seq: SeqId) {
        self.cache.release(seq);
        let entry = self.seqs.remove(&seq).expect("known");
        // The last page first, so that it is given up first.
        entry.ids().rev().for_each(|id| self.leave(id));
    }

    fn pin(&mut self, pin: PinId, salt: Salt, tokens: &[TokenId]) {
        self.unpin(pin);
        let n_pinned: usize = self.pins.values().map(Vec::len).sum();
        let room = (self.max_pinned as usize - n_pinned) * self.page_len;
        let n = self.cache.pin(pin, salt, tokens) as usize;
        let padded: Vec<_> = tokens.iter().copied().chain([TokenId(0)]).collect();
        assert_eq!(n, self.find(salt, &padded).0.min(room));
        let path = |n: usize| (salt, tokens[..n].to_vec());
        let ends = (1..=n / self.page_len).map(|i| i * self.page_len);
        self.pins.insert(pin, ends.map(|n| self.cached[&path(n)].id).collect());
    }

    fn unpin(&mut self, pin: PinId) {
        let was_there = self.cache.unpin(pin);
        let ids = self.pins.remove(&pin);
        assert_eq!(was_there, ids.is_some());
        ids.into_iter().flatten().rev().for_each(|id| self.leave(id));
    }
}

/// Whether a beginning goes on after another.
fn follows(path: &Path, before: &Path) -> bool {
    path.0 == before.0 && path.1.len() > before.1.len() && path.1.starts_with(&before.1)
}

/// How a sequence comes in.
#[derive(Clone, Copy, Debug)]
struct Entering {
    window: Option<Window>,
    may_spill: bool,
    /// Pages of the device that are left to it.
    room: u32,
}

/// What a sequence begins with.
struct Beginning {
    salt: Salt,
    tokens: Vec<TokenId>,
    window: Option<Window>,
    may_spill: bool,
    full: Vec<Entry>,
    n_copied: usize,
    n_stay: usize,
}

/// A page of a sequence.
#[derive(Clone, Copy, Debug)]
enum Own {
    Full(Id),
    /// The place among the pages of its own.
    Open(usize),
}
