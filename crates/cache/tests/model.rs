//! Random operations on the cache, held against a naive model that counts tokens only.

use std::collections::{BTreeMap, BTreeSet};

use nuthatch_cache::{Cache, Config, Shortfall};
use nuthatch_types::SeqId;
use proptest::prelude::*;

/// What the cache promises, without pages: a length and a computed length for each sequence.
struct Model {
    page_len: u32,
    n_pages: u32,
    seqs: BTreeMap<SeqId, (u32, u32)>,
}

impl Model {
    fn pages(&self, len: u32) -> u32 {
        len.div_ceil(self.page_len)
    }

    fn free(&self) -> u32 {
        self.n_pages - self.seqs.values().map(|&(len, _)| self.pages(len)).sum::<u32>()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Admit(u64),
    Extend(u64, u32),
    Seal(u64, u32),
    Release(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..6_u64;
    prop_oneof![
        1 => seq.clone().prop_map(Op::Admit),
        6 => (seq.clone(), 0..40_u32).prop_map(|(seq, n)| Op::Extend(seq, n)),
        3 => (seq.clone(), 0..40_u32).prop_map(|(seq, n)| Op::Seal(seq, n)),
        1 => seq.prop_map(Op::Release),
    ]
}

fn extend(cache: &mut Cache, model: &mut Model, seq: SeqId, n: u32) {
    let (len, computed) = model.seqs[&seq];
    let needed = model.pages(len + n) - model.pages(len);
    let before: Vec<_> = cache.slots(seq, 0).collect();
    match cache.plan_extend(seq, n) {
        Ok(extend) => {
            assert!(needed <= model.free());
            assert_eq!(extend.n_pages(), needed);
            cache.apply(extend);
            model.seqs.insert(seq, (len + n, computed));
        }
        Err(shortfall) => {
            assert!(needed > model.free());
            assert_eq!(shortfall, Shortfall { needed, free: model.free() });
        }
    }
    let after: Vec<_> = cache.slots(seq, 0).collect();
    assert_eq!(after[..before.len()], before, "earlier entries stay");
}

fn step(cache: &mut Cache, model: &mut Model, op: &Op) {
    let (Op::Admit(seq) | Op::Extend(seq, _) | Op::Seal(seq, _) | Op::Release(seq)) = *op;
    let seq = SeqId(seq);
    let known = model.seqs.contains_key(&seq);
    match *op {
        Op::Admit(_) if !known => {
            cache.admit(seq);
            model.seqs.insert(seq, (0, 0));
        }
        Op::Extend(_, n) if known => extend(cache, model, seq, n),
        Op::Seal(_, n) if known => {
            let (len, computed) = model.seqs[&seq];
            let computed = (computed + n).min(len);
            cache.seal(seq, computed);
            model.seqs.insert(seq, (len, computed));
        }
        Op::Release(_) if known => {
            cache.release(seq);
            model.seqs.remove(&seq);
        }
        Op::Admit(_) | Op::Extend(..) | Op::Seal(..) | Op::Release(_) => {}
    }
}

fn check(cache: &Cache, model: &Model) {
    cache.verify().expect("every invariant holds");
    let stats = cache.stats();
    let tokens: u32 = model.seqs.values().map(|&(len, _)| len).sum();
    assert_eq!(stats.pages_free, model.free());
    assert_eq!(stats.pages_used + stats.pages_free, stats.pages_total);
    assert_eq!(stats.tokens_stored, tokens);
    assert_eq!(stats.tokens_wasted, stats.pages_used * model.page_len - tokens);
    assert_eq!(stats.seqs as usize, model.seqs.len());

    let mut places = BTreeSet::new();
    for (&seq, &(len, _)) in &model.seqs {
        assert_eq!(cache.len(seq), len);
        assert_eq!(cache.n_pages(seq), model.pages(len));
        let slots: Vec<_> = cache.slots(seq, 0).collect();
        for position in 0..len {
            let (page, offset) = cache.locate(seq, position).expect("the token has a place");
            assert_eq!(cache.slot(page), slots[(position / model.page_len) as usize]);
            assert_eq!(offset, position % model.page_len);
            assert!(places.insert((cache.slot(page), offset)), "two tokens in one place");
        }
        assert_eq!(cache.locate(seq, len), None);
    }
}

proptest! {
    #[test]
    fn cache_behaves_like_the_model(
        page_len in 1..9_u32,
        n_pages in 1..24_u32,
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut cache = Cache::new(Config { page_len, n_pages }).unwrap();
        let mut model = Model { page_len, n_pages, seqs: BTreeMap::new() };
        for op in &ops {
            step(&mut cache, &mut model, op);
            check(&cache, &model);
        }
        for seq in std::mem::take(&mut model.seqs).into_keys() {
            cache.release(seq);
        }
        prop_assert!(cache.is_empty());
        check(&cache, &model);
    }
}
