//! Random operations on the cache, held against a naive model.
//!
//! The model keeps whole token strings in sorted maps and searches them from end to end. It knows no
//! page, no hash and no tree; what it knows is which beginnings can be found, in which tier, who uses
//! them, in which order they are given up, and what must be read back at each place of the arena.

use std::collections::{BTreeMap, BTreeSet};

use nuthatch_cache::{
    Admitted, Cache, Config, MissReason, Options, PinId, Prompt, Retention, Salt, Shortfall,
};
use nuthatch_types::{SeqId, Slot, TokenId};
use proptest::prelude::*;

/// A beginning of a whole number of pages under a salt.
type Path = (Salt, Vec<TokenId>);

struct Seq {
    salt: Salt,
    tokens: Vec<TokenId>,
    /// Tokens of `tokens` that have a place.
    len: usize,
    computed: usize,
    is_swapped: bool,
    /// Pages of its own, partly filled or not yet computed, that are on the host.
    open_on_host: usize,
}

/// What can be found.
#[derive(Clone, Copy)]
struct Cached {
    last_use: u64,
    on_host: bool,
}

struct Model {
    cache: Cache,
    page_len: usize,
    n_pages: u32,
    n_host: u32,
    demotion_depth: u32,
    max_pinned: u32,
    seqs: BTreeMap<SeqId, Seq>,
    pins: BTreeMap<PinId, Path>,
    cached: BTreeMap<Path, Cached>,
    n_uses: u64,
    evicted: BTreeSet<Path>,
    /// `[slot][page_len]` what was computed there: the salt, and all tokens up to this one.
    arena: Vec<Vec<Option<Path>>>,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    page_len: u32,
    n_pages: u32,
    n_host: u32,
    demotion_depth: u32,
    max_pinned: u32,
}

impl Model {
    fn new(sizes: Sizes) -> Self {
        let Sizes { page_len, n_pages, n_host, demotion_depth, max_pinned } = sizes;
        let max_pinned = max_pinned.min(n_pages - 1);
        let options = Options { max_pinned, ..Options::default() };
        let config = Config { page_len, n_pages, n_host_pages: n_host };
        let mut cache = Cache::with_options(config, options).expect("valid sizes");
        cache.set_demotion_depth(demotion_depth);
        Model {
            cache,
            page_len: page_len as usize,
            n_pages,
            n_host,
            demotion_depth,
            max_pinned,
            seqs: BTreeMap::new(),
            pins: BTreeMap::new(),
            cached: BTreeMap::new(),
            n_uses: 0,
            evicted: BTreeSet::new(),
            arena: vec![vec![None; page_len as usize]; (n_pages + n_host) as usize],
        }
    }

    /// The beginning of a sequence that it holds as full pages.
    fn full<'a>(&self, seq: &'a Seq) -> &'a [TokenId] {
        &seq.tokens[..seq.computed / self.page_len * self.page_len]
    }

    fn is_used(&self, path: &Path) -> bool {
        self.seqs.values().any(|seq| self.holds(seq, path)) || self.is_pinned(path)
    }

    fn holds(&self, seq: &Seq, (salt, tokens): &Path) -> bool {
        seq.salt == *salt && self.full(seq).starts_with(tokens)
    }

    fn is_pinned(&self, (salt, tokens): &Path) -> bool {
        self.pins.values().any(|pin| pin.0 == *salt && pin.1.starts_with(tokens))
    }

    /// Whether anything cached goes on after `path`, in any tier or only on the device.
    fn is_followed(&self, path: &Path, on_device: bool) -> bool {
        let follows = |other: &Path| {
            other.0 == path.0 && other.1.len() > path.1.len() && other.1.starts_with(&path.1)
        };
        self.cached.iter().any(|(other, entry)| follows(other) && !(on_device && entry.on_host))
    }

    fn n_idle(&self, on_host: bool) -> u32 {
        let idle =
            |(path, entry): &(&Path, &Cached)| entry.on_host == on_host && !self.is_used(path);
        self.cached.iter().filter(idle).count() as u32
    }

    fn n_open(&self, seq: &Seq) -> usize {
        seq.len.div_ceil(self.page_len) - seq.computed / self.page_len
    }

    /// Pages in a tier that are not free.
    fn n_taken(&self, on_host: bool) -> u32 {
        let cached = self.cached.values().filter(|entry| entry.on_host == on_host).count();
        let open = |seq: &Seq| {
            if on_host { seq.open_on_host } else { self.n_open(seq) - seq.open_on_host }
        };
        (cached + self.seqs.values().map(open).sum::<usize>()) as u32
    }

    fn available(&self) -> u32 {
        self.n_pages - self.n_taken(false) + self.n_idle(false)
    }

    fn use_now(&mut self, path: &Path) {
        self.n_uses += 1;
        self.cached.get_mut(path).expect("cached").last_use = self.n_uses;
    }

    /// The least recently used idle beginning that can leave a tier.
    fn first_to_go(&self, on_host: bool, guarded: Option<&Path>) -> Option<Path> {
        let may_go = |(path, entry): &(&Path, &Cached)| {
            entry.on_host == on_host
                && !self.is_used(path)
                && !self.is_followed(path, !on_host)
                && Some(*path) != guarded
        };
        let idle = self.cached.iter().filter(may_go);
        idle.min_by_key(|(_, entry)| entry.last_use).map(|(path, _)| path.clone())
    }

    fn give_up(&mut self, path: Path) {
        self.cached.remove(&path);
        self.evicted.insert(path);
    }

    /// Lets idle beginnings leave the device until `n` more pages fit.
    fn make_room(&mut self, n: u32, guarded: Option<&Path>) {
        while self.n_taken(false) + n > self.n_pages {
            let victim = self.first_to_go(false, guarded).expect("counted as available");
            let depth = (victim.1.len() / self.page_len - 1) as u32;
            let first_on_host = self.first_to_go(true, guarded);
            let has_room = self.n_taken(true) < self.n_host || first_on_host.is_some();
            if self.is_followed(&victim, false) || (depth >= self.demotion_depth && has_room) {
                if self.n_taken(true) == self.n_host {
                    self.give_up(first_on_host.expect("what follows is idle too"));
                }
                self.cached.get_mut(&victim).expect("cached").on_host = true;
            } else {
                self.give_up(victim);
            }
        }
    }

    /// Brings a beginning to the device.
    fn promote(&mut self, path: &Path, guarded: Option<&Path>) {
        if self.cached[path].on_host {
            self.make_room(1, guarded);
            self.cached.get_mut(path).expect("cached").on_host = false;
        }
    }

    /// The beginnings of whole pages that a sequence's full pages hold, shortest first.
    fn paths(&self, salt: Salt, tokens: &[TokenId]) -> Vec<Path> {
        let ends = (self.page_len..=tokens.len()).step_by(self.page_len);
        ends.map(|n| (salt, tokens[..n].to_vec())).collect()
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

    fn admit(&mut self, seq: SeqId, salt: Salt, tokens: Vec<TokenId>) {
        let prompt = Prompt { tokens: &tokens, salt, retention: Retention::default() };
        let mut admission = self.cache.plan_admit(seq, prompt);
        let (n_shared, mut copy) = self.find(salt, &tokens);
        let miss = admission.miss().expect("the prefix tree was asked");
        assert_eq!(miss.at as usize, n_shared + copy.as_ref().map_or(0, |&(_, n)| n));
        self.check_reason(miss.reason, salt, &tokens, miss.at as usize);

        let found = self.paths(salt, &tokens[..n_shared]);
        let is_held = |path: &&Path| !self.cached[*path].on_host && self.is_used(path);
        let all = tokens.len().div_ceil(self.page_len);
        let needed = (all - found.iter().filter(is_held).count()) as u32;
        let is_idle = |path: &Path| !self.is_used(path);
        let source_idle = copy.as_ref().is_some_and(|(path, _)| is_idle(path));
        let takes_source =
            copy.as_ref().is_some_and(|(path, _)| is_idle(path) && !self.cached[path].on_host);
        assert_eq!(admission.n_pages(), needed + u32::from(takes_source));
        if admission.n_pages() > self.available() {
            admission = admission.without_copy();
            assert_eq!(admission.n_pages(), needed);
            copy = None;
        }
        let on_host = |path: &Path| self.cached[path].on_host;
        if needed > self.available() && found.iter().any(on_host) {
            return;
        }
        let admitted = self.cache.admit(admission);
        let n_copied = copy.as_ref().map_or(0, |&(_, n)| n);
        assert_eq!(
            admitted,
            Admitted { n_found: (n_shared + n_copied) as u32, n_copied: n_copied as u32 }
        );
        self.start(seq, salt, tokens, n_shared);
        let guarded = copy.as_ref().map(|(source, _)| source);
        found.iter().for_each(|path| self.promote(path, guarded));
        if let Some((source, n)) = copy {
            self.make_room(1, Some(&source));
            self.count_copied(seq, n);
            if source_idle {
                self.use_now(&source);
            }
        }
    }

    fn fork(&mut self, source: SeqId, seq: SeqId, n_shared: usize, more: &[TokenId]) {
        let from = &self.seqs[&source];
        let n_shared = n_shared.min(from.computed);
        let tokens: Vec<_> = from.tokens[..n_shared].iter().chain(more).copied().collect();
        let (salt, n_tokens) = (from.salt, tokens.len() as u32);
        let mut admission = self.cache.plan_fork(source, seq, n_shared as u32, n_tokens);
        let n_full = n_shared / self.page_len * self.page_len;
        let found = self.paths(salt, &tokens[..n_full]);
        let on_host = found.iter().filter(|path| self.cached[*path].on_host).count();
        let needed = tokens.len().div_ceil(self.page_len) - found.len() + on_host;
        assert_eq!(admission.n_pages() as usize, needed);
        let mut n_copied = n_shared - n_full;
        if admission.n_pages() > self.available() {
            if on_host > 0 {
                return;
            }
            admission = admission.without_copy();
            n_copied = 0;
        }
        let admitted = self.cache.admit(admission);
        assert_eq!(
            admitted,
            Admitted { n_found: (n_full + n_copied) as u32, n_copied: n_copied as u32 }
        );
        self.start(seq, salt, tokens, n_full);
        found.iter().for_each(|path| self.promote(path, None));
        if n_copied > 0 {
            self.make_room(1, None);
            self.count_copied(seq, n_copied);
        }
    }

    fn start(&mut self, seq: SeqId, salt: Salt, tokens: Vec<TokenId>, len: usize) {
        let entry = Seq { salt, tokens, len, computed: len, is_swapped: false, open_on_host: 0 };
        self.seqs.insert(seq, entry);
    }

    fn count_copied(&mut self, seq: SeqId, n: usize) {
        let entry = self.seqs.get_mut(&seq).expect("known");
        entry.len += n;
        entry.computed += n;
    }

    fn swap_out(&mut self, seq: SeqId) {
        let entry = &self.seqs[&seq];
        let n_open = self.n_open(entry);
        let others = |path: &Path| {
            let other = |(&id, other): (&SeqId, &Seq)| {
                id != seq && !other.is_swapped && self.holds(other, path)
            };
            self.seqs.iter().any(other) || self.is_pinned(path)
        };
        let paths = self.paths(entry.salt, self.full(entry));
        let own: Vec<Path> = paths.iter().filter(|path| !others(path)).cloned().collect();
        let is_foreign = |path: &Path| {
            let follows = |other: &Path| other.0 == path.0 && other.1.starts_with(&path.1);
            let mut after = self.cached.iter().filter(|(other, _)| follows(other));
            after.any(|(other, entry)| !entry.on_host && !paths.contains(other))
        };
        let n = (own.len() + n_open) as u32;
        let room = self.n_host - self.n_taken(true) + self.n_idle(true);
        let expected = (n > 0 && n <= room && !own.iter().any(is_foreign)).then_some(n);
        let swap = self.cache.plan_swap_out(seq);
        assert_eq!(swap.as_ref().map(nuthatch_cache::SwapOut::n_pages), expected);
        let Some(swap) = swap else { return };
        self.cache.swap_out(swap);
        while self.n_taken(true) + n > self.n_host {
            let victim = self.first_to_go(true, None).expect("counted as available");
            self.give_up(victim);
        }
        for path in own {
            self.cached.get_mut(&path).expect("cached").on_host = true;
        }
        let entry = self.seqs.get_mut(&seq).expect("known");
        (entry.is_swapped, entry.open_on_host) = (true, n_open);
    }

    fn swap_in(&mut self, seq: SeqId) {
        let entry = &self.seqs[&seq];
        let paths = self.paths(entry.salt, self.full(entry));
        let n_open = entry.open_on_host;
        let on_host = paths.iter().filter(|path| self.cached[*path].on_host).count();
        let swap = self.cache.plan_swap_in(seq);
        assert_eq!(swap.n_pages() as usize, on_host + n_open);
        if swap.n_pages() > self.available() {
            return;
        }
        self.cache.swap_in(swap);
        paths.iter().for_each(|path| self.promote(path, None));
        for _ in 0..n_open {
            self.make_room(1, None);
            self.seqs.get_mut(&seq).expect("known").open_on_host -= 1;
        }
        self.seqs.get_mut(&seq).expect("known").is_swapped = false;
    }

    fn extend(&mut self, seq: SeqId, more: &[TokenId]) {
        let entry = &self.seqs[&seq];
        // What it came with gets places first.
        let n = entry.tokens.len() - entry.len + more.len();
        let pages = |len: usize| len.div_ceil(self.page_len);
        let needed = (pages(entry.len + n) - pages(entry.len)) as u32;
        let available = self.available();
        match self.cache.plan_extend(seq, n as u32) {
            Ok(extend) => {
                assert!(needed <= available);
                assert_eq!(extend.n_pages(), needed);
                self.cache.apply(extend);
                self.make_room(needed, None);
                let entry = self.seqs.get_mut(&seq).expect("known");
                entry.tokens.extend(more);
                entry.len = entry.tokens.len();
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
        let before = entry.computed;
        entry.computed = (before + n).min(entry.len);
        let (salt, computed) = (entry.salt, entry.tokens[..entry.computed].to_vec());
        for position in before..computed.len() {
            let slot = slots[position / self.page_len];
            let place = &mut self.arena[slot.0 as usize][position % self.page_len];
            *place = Some((salt, computed[..=position].to_vec()));
        }
        let first_changed = self.cache.seal(seq, &computed);
        let after: Vec<Slot> = self.cache.slots(seq, 0).collect();
        let same = slots.iter().zip(&after).take_while(|(a, b)| a == b).count();
        assert_eq!(first_changed.map_or(slots.len(), |i| i as usize), same);
        for path in self.paths(salt, &computed) {
            // One that was on the host takes over the place that was just computed.
            self.cached.entry(path).or_insert(Cached { last_use: 0, on_host: false }).on_host =
                false;
        }
    }

    fn release(&mut self, seq: SeqId) {
        self.cache.release(seq);
        let Seq { salt, tokens, computed, .. } = self.seqs.remove(&seq).expect("known");
        self.use_path(salt, &tokens[..computed]);
    }

    /// Everything on a path that nobody uses any more was used just now, the last page first.
    fn use_path(&mut self, salt: Salt, tokens: &[TokenId]) {
        for n_pages in (1..=tokens.len() / self.page_len).rev() {
            let path = (salt, tokens[..n_pages * self.page_len].to_vec());
            if !self.is_used(&path) {
                self.use_now(&path);
            }
        }
    }

    fn pin(&mut self, pin: PinId, salt: Salt, tokens: &[TokenId]) {
        self.unpin(pin);
        let n_pinned: usize = self.pins.values().map(|path| path.1.len() / self.page_len).sum();
        let room = (self.max_pinned as usize - n_pinned) * self.page_len;
        let n = self.cache.pin(pin, salt, tokens) as usize;
        let padded: Vec<_> = tokens.iter().copied().chain([TokenId(0)]).collect();
        assert_eq!(n, self.find(salt, &padded).0.min(room));
        self.pins.insert(pin, (salt, tokens[..n].to_vec()));
    }

    fn unpin(&mut self, pin: PinId) {
        let was_there = self.cache.unpin(pin);
        let path = self.pins.remove(&pin);
        assert_eq!(was_there, path.is_some());
        if let Some((salt, tokens)) = path {
            self.use_path(salt, &tokens);
        }
    }

    fn check(&self) {
        self.cache.verify().expect("every invariant holds");
        let stats = self.cache.stats();
        assert_eq!((stats.pages_idle, stats.host_idle), (self.n_idle(false), self.n_idle(true)));
        assert_eq!(stats.pages_free, self.n_pages - self.n_taken(false));
        assert_eq!(stats.host_free, self.n_host - self.n_taken(true));
        assert_eq!(stats.pages_free + stats.pages_used + stats.pages_idle, self.n_pages);
        assert_eq!(stats.host_free + stats.host_used + stats.host_idle, self.n_host);
        let n_used = (stats.pages_used + stats.host_used) as usize;
        let n_open: usize = self.seqs.values().map(|seq| self.n_open(seq)).sum();
        let open = |seq: &Seq| seq.len - self.full(seq).len();
        let stored =
            (n_used - n_open) * self.page_len + self.seqs.values().map(open).sum::<usize>();
        assert_eq!(stats.tokens_stored as usize, stored);
        assert_eq!(stats.tokens_wasted as usize, n_used * self.page_len - stored);
        for (&id, seq) in &self.seqs {
            assert_eq!(self.cache.len(id) as usize, seq.len);
            for position in 0..seq.computed {
                let (page, offset) = self.cache.locate(id, position as u32).expect("has a place");
                let slot = self.cache.slot(page);
                assert!(seq.is_swapped || slot.0 < self.n_pages, "{id:?} runs on the device");
                let read = self.arena[slot.0 as usize][offset as usize].as_ref();
                let expected = (seq.salt, seq.tokens[..=position].to_vec());
                assert_eq!(read, Some(&expected), "{id:?} at {position}");
            }
            assert_eq!(self.cache.locate(id, seq.len as u32), None);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Admit {
        seq: u64,
        salted: bool,
        tokens: Vec<TokenId>,
    },
    /// A whole request that leaves its pages behind.
    Run {
        seq: u64,
        salted: bool,
        tokens: Vec<TokenId>,
    },
    Fork {
        source: u64,
        seq: u64,
        n_shared: usize,
        more: Vec<TokenId>,
    },
    Extend(u64, Vec<TokenId>),
    Seal(u64, usize),
    Release(u64),
    SwapOut(u64),
    SwapIn(u64),
    Pin {
        pin: u64,
        salted: bool,
        tokens: Vec<TokenId>,
    },
    Unpin(u64),
}

/// Few different tokens, so that many sequences begin alike.
fn tokens(n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<TokenId>> {
    prop::collection::vec((0..2_u32).prop_map(TokenId), n)
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..5_u64;
    let salted = prop::bool::weighted(0.2);
    prop_oneof![
        4 => (seq.clone(), salted, tokens(1..24))
            .prop_map(|(seq, salted, tokens)| Op::Admit { seq, salted, tokens }),
        6 => (seq.clone(), salted, tokens(1..24))
            .prop_map(|(seq, salted, tokens)| Op::Run { seq, salted, tokens }),
        1 => (seq.clone(), seq.clone(), 0..30_usize, tokens(1..4))
            .prop_map(|(source, seq, n_shared, more)| Op::Fork { source, seq, n_shared, more }),
        6 => (seq.clone(), tokens(0..4)).prop_map(|(seq, more)| Op::Extend(seq, more)),
        6 => (seq.clone(), 0..30_usize).prop_map(|(seq, n)| Op::Seal(seq, n)),
        3 => seq.clone().prop_map(Op::SwapOut),
        3 => seq.clone().prop_map(Op::SwapIn),
        4 => seq.prop_map(Op::Release),
        1 => (0..2_u64, salted, tokens(1..24))
            .prop_map(|(pin, salted, tokens)| Op::Pin { pin, salted, tokens }),
        1 => (0..2_u64).prop_map(Op::Unpin),
    ]
}

fn step(model: &mut Model, op: Op) {
    let salt = |model: &Model, salted: bool| {
        if salted { model.cache.salt(b"other", b"") } else { Salt::default() }
    };
    let has = |model: &Model, seq: u64| model.seqs.contains_key(&SeqId(seq));
    let is = |model: &Model, seq: u64, swapped: bool| {
        model.seqs.get(&SeqId(seq)).is_some_and(|seq| seq.is_swapped == swapped)
    };
    match op {
        Op::Admit { seq, salted, tokens } if !has(model, seq) => {
            model.admit(SeqId(seq), salt(model, salted), tokens);
        }
        Op::Run { seq, salted, tokens } if !has(model, seq) => {
            let n_tokens = tokens.len();
            model.admit(SeqId(seq), salt(model, salted), tokens);
            if !has(model, seq) {
                return;
            }
            model.copy();
            model.extend(SeqId(seq), &[]);
            model.copy();
            model.seal(SeqId(seq), n_tokens);
            model.check();
            model.release(SeqId(seq));
        }
        Op::Fork { source, seq, n_shared, more } if has(model, source) && !has(model, seq) => {
            model.fork(SeqId(source), SeqId(seq), n_shared, &more);
        }
        Op::Extend(seq, more) if is(model, seq, false) => model.extend(SeqId(seq), &more),
        Op::Seal(seq, n) if is(model, seq, false) => model.seal(SeqId(seq), n),
        Op::SwapOut(seq) if is(model, seq, false) => model.swap_out(SeqId(seq)),
        Op::SwapIn(seq) if is(model, seq, true) => model.swap_in(SeqId(seq)),
        Op::Release(seq) if has(model, seq) => model.release(SeqId(seq)),
        Op::Pin { pin, salted, tokens } => model.pin(PinId(pin), salt(model, salted), &tokens),
        Op::Unpin(pin) => model.unpin(PinId(pin)),
        Op::Admit { .. } | Op::Run { .. } | Op::Fork { .. } => {}
        Op::Extend(..) | Op::Seal(..) | Op::Release(_) | Op::SwapOut(_) | Op::SwapIn(_) => {}
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    // One in a few worlds has no host tier.
    let n_host = (0..14_u32).prop_map(|n| n.saturating_sub(2));
    (1..5_u32, 1..16_u32, n_host, 0..3_u32, 0..4_u32).prop_map(
        |(page_len, n_pages, n_host, demotion_depth, max_pinned)| Sizes {
            page_len,
            n_pages,
            n_host,
            demotion_depth,
            max_pinned,
        },
    )
}

proptest! {
    #[test]
    fn cache_behaves_like_the_model(
        sizes in sizes(),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut model = Model::new(sizes);
        for op in ops {
            step(&mut model, op);
            model.copy();
            model.check();
        }
        for seq in model.seqs.keys().copied().collect::<Vec<_>>() {
            model.release(seq);
        }
        model.check();
        model.cache.clear();
        model.cache.verify().expect("every invariant holds");
        prop_assert_eq!(model.cache.stats().pages_free, sizes.n_pages);
        prop_assert_eq!(model.cache.stats().host_free, sizes.n_host);
    }
}
