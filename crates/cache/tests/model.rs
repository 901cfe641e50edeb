//! Random operations on the cache, held against a naive model.
//!
//! The model keeps whole token strings in sorted maps and searches them from end to end. It knows no
//! page, no hash and no tree; what it knows is which beginnings can be found, who uses them, in
//! which order they are given up, and what must be read back at each place of the arena.

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
}

struct Model {
    cache: Cache,
    page_len: usize,
    n_pages: u32,
    max_pinned: u32,
    seqs: BTreeMap<SeqId, Seq>,
    pins: BTreeMap<PinId, Path>,
    /// What can be found, and when it was last used.
    cached: BTreeMap<Path, u64>,
    n_uses: u64,
    evicted: BTreeSet<Path>,
    /// `[slot][page_len]` what was computed there: the salt, and all tokens up to this one.
    arena: Vec<Vec<Option<Path>>>,
}

impl Model {
    fn new(page_len: u32, n_pages: u32, max_pinned: u32) -> Self {
        let max_pinned = max_pinned.min(n_pages - 1);
        let options = Options { max_pinned, ..Options::default() };
        let cache = Cache::with_options(Config { page_len, n_pages }, options);
        Model {
            cache: cache.expect("valid sizes"),
            page_len: page_len as usize,
            n_pages,
            max_pinned,
            seqs: BTreeMap::new(),
            pins: BTreeMap::new(),
            cached: BTreeMap::new(),
            n_uses: 0,
            evicted: BTreeSet::new(),
            arena: vec![vec![None; page_len as usize]; n_pages as usize],
        }
    }

    fn is_used(&self, (salt, tokens): &Path) -> bool {
        let by_seq = |seq: &Seq| {
            let n_full = seq.computed / self.page_len * self.page_len;
            seq.salt == *salt && seq.tokens[..n_full].starts_with(tokens)
        };
        let by_pin = |pin: &Path| pin.0 == *salt && pin.1.starts_with(tokens);
        self.seqs.values().any(by_seq) || self.pins.values().any(by_pin)
    }

    fn n_idle(&self) -> u32 {
        self.cached.keys().filter(|path| !self.is_used(path)).count() as u32
    }

    fn n_open(&self) -> u32 {
        let open = |seq: &Seq| seq.len.div_ceil(self.page_len) - seq.computed / self.page_len;
        self.seqs.values().map(open).sum::<usize>() as u32
    }

    fn available(&self) -> u32 {
        let n_used = self.cached.keys().filter(|path| self.is_used(path)).count() as u32;
        self.n_pages - n_used - self.n_open()
    }

    fn use_now(&mut self, path: &Path) {
        self.n_uses += 1;
        self.cached.insert(path.clone(), self.n_uses);
    }

    /// Gives up idle beginnings, least recently used first, until everything fits.
    fn make_room(&mut self, guarded: Option<&Path>) {
        while self.n_open() + self.cached.len() as u32 > self.n_pages {
            let is_leaf = |path: &Path| {
                let longer = |other: &Path| other.0 == path.0 && other.1.len() > path.1.len();
                !self.cached.keys().any(|other| longer(other) && other.1.starts_with(&path.1))
            };
            let idle = self
                .cached
                .iter()
                .filter(|(path, _)| !self.is_used(path) && is_leaf(path) && Some(*path) != guarded);
            let victim = idle.min_by_key(|&(_, last_use)| last_use).map(|(path, _)| path.clone());
            let victim = victim.expect("pages were counted as available");
            self.cached.remove(&victim);
            self.evicted.insert(victim);
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

        let path = |n: usize| (salt, tokens[..n].to_vec());
        let pages = (self.page_len..=n_shared).step_by(self.page_len).map(path);
        let n_idle = pages.filter(|path| !self.is_used(path)).count();
        let all = tokens.len().div_ceil(self.page_len);
        let needed = (all - n_shared / self.page_len + n_idle) as u32;
        let source_idle = copy.as_ref().is_some_and(|(path, _)| !self.is_used(path));
        assert_eq!(admission.n_pages(), needed + u32::from(source_idle));
        if admission.n_pages() > self.available() {
            admission = admission.without_copy();
            assert_eq!(admission.n_pages(), needed);
            copy = None;
        }
        let admitted = self.cache.admit(admission);
        let n_copied = copy.as_ref().map_or(0, |&(_, n)| n);
        self.take_admitted(seq, salt, tokens, (n_shared, n_copied), admitted);
        if let Some((source, _)) = copy {
            self.make_room(Some(&source));
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
        let n_full = n_shared / self.page_len;
        assert_eq!(admission.n_pages() as usize, tokens.len().div_ceil(self.page_len) - n_full);
        let mut n_copied = n_shared % self.page_len;
        if admission.n_pages() > self.available() {
            admission = admission.without_copy();
            n_copied = 0;
        }
        let admitted = self.cache.admit(admission);
        self.take_admitted(seq, salt, tokens, (n_full * self.page_len, n_copied), admitted);
        self.make_room(None);
    }

    fn take_admitted(
        &mut self,
        seq: SeqId,
        salt: Salt,
        tokens: Vec<TokenId>,
        (n_shared, n_copied): (usize, usize),
        admitted: Admitted,
    ) {
        let n_found = n_shared + n_copied;
        assert_eq!(admitted.n_found as usize, n_found);
        assert_eq!(admitted.copy.is_some(), n_copied > 0);
        if let Some(copy) = admitted.copy {
            assert_ne!(copy.source, copy.target);
            self.arena[copy.target.0 as usize] = self.arena[copy.source.0 as usize].clone();
        }
        self.seqs.insert(seq, Seq { salt, tokens, len: n_found, computed: n_found });
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
                let entry = self.seqs.get_mut(&seq).expect("known");
                entry.tokens.extend(more);
                entry.len = entry.tokens.len();
                self.make_room(None);
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
        for n in (self.page_len..=computed.len()).step_by(self.page_len) {
            self.cached.entry((salt, computed[..n].to_vec())).or_insert(0);
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
        let n_used = self.n_pages - self.available();
        assert_eq!((stats.pages_idle, stats.pages_used), (self.n_idle(), n_used));
        assert_eq!(stats.pages_free + stats.pages_used + stats.pages_idle, self.n_pages);
        let full = (n_used - self.n_open()) as usize * self.page_len;
        let open = |seq: &Seq| seq.len - seq.computed / self.page_len * self.page_len;
        let stored = full + self.seqs.values().map(open).sum::<usize>();
        assert_eq!(stats.tokens_stored as usize, stored);
        assert_eq!(stats.tokens_wasted as usize, n_used as usize * self.page_len - stored);
        for (&id, seq) in &self.seqs {
            assert_eq!(self.cache.len(id) as usize, seq.len);
            for position in 0..seq.computed {
                let (page, offset) = self.cache.locate(id, position as u32).expect("has a place");
                let slot = self.cache.slot(page);
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
    match op {
        Op::Admit { seq, salted, tokens } if !has(model, seq) => {
            model.admit(SeqId(seq), salt(model, salted), tokens);
        }
        Op::Run { seq, salted, tokens } if !has(model, seq) => {
            let n_tokens = tokens.len();
            model.admit(SeqId(seq), salt(model, salted), tokens);
            model.extend(SeqId(seq), &[]);
            model.seal(SeqId(seq), n_tokens);
            model.check();
            model.release(SeqId(seq));
        }
        Op::Fork { source, seq, n_shared, more } if has(model, source) && !has(model, seq) => {
            model.fork(SeqId(source), SeqId(seq), n_shared, &more);
        }
        Op::Extend(seq, more) if has(model, seq) => model.extend(SeqId(seq), &more),
        Op::Seal(seq, n) if has(model, seq) => model.seal(SeqId(seq), n),
        Op::Release(seq) if has(model, seq) => model.release(SeqId(seq)),
        Op::Pin { pin, salted, tokens } => model.pin(PinId(pin), salt(model, salted), &tokens),
        Op::Unpin(pin) => model.unpin(PinId(pin)),
        Op::Admit { .. } | Op::Run { .. } | Op::Fork { .. } => {}
        Op::Extend(..) | Op::Seal(..) | Op::Release(_) => {}
    }
}

proptest! {
    #[test]
    fn cache_behaves_like_the_model(
        page_len in 1..5_u32,
        n_pages in 1..16_u32,
        max_pinned in 0..4_u32,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut model = Model::new(page_len, n_pages, max_pinned);
        for op in ops {
            step(&mut model, op);
            model.check();
        }
        for seq in model.seqs.keys().copied().collect::<Vec<_>>() {
            model.release(seq);
        }
        model.check();
        model.cache.clear();
        model.cache.verify().expect("every invariant holds");
        prop_assert_eq!(model.cache.stats().pages_free, n_pages);
    }
}
