//! Random operations, and the test that plays them.

use nuthatch_cache::{Event, PinId, Salt};
use nuthatch_types::{SeqId, TokenId, Window};
use proptest::prelude::*;

use super::{Entering, Model, Sizes};

#[derive(Clone, Debug)]
enum Op {
    Admit {
        seq: u64,
        salted: bool,
        tokens: Vec<TokenId>,
        entering: Entering,
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
    Extend(u64, Vec<TokenId>, u32),
    Seal(u64, usize),
    Slide(u64),
    Roll(u64, usize),
    Release(u64),
    SwapOut(u64),
    SwapIn(u64, usize),
    Unspill(u64, usize),
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
    let window = prop::option::weighted(0.4, (1..12_u32, 1..6_u32))
        .prop_map(|window| window.map(|(n_tokens, max_chunk)| Window { n_tokens, max_chunk }));
    let entering = (window, prop::bool::weighted(0.7), 0..20_u32)
        .prop_map(|(window, may_spill, room)| Entering { window, may_spill, room });
    prop_oneof![
        4 => (seq.clone(), salted, tokens(1..24), entering).prop_map(
            |(seq, salted, tokens, entering)| Op::Admit { seq, salted, tokens, entering }
        ),
        6 => (seq.clone(), salted, tokens(1..24))
            .prop_map(|(seq, salted, tokens)| Op::Run { seq, salted, tokens }),
        1 => (seq.clone(), seq.clone(), 0..30_usize, tokens(1..4))
            .prop_map(|(source, seq, n_shared, more)| Op::Fork { source, seq, n_shared, more }),
        6 => (seq.clone(), tokens(0..4), 0..6_u32)
            .prop_map(|(seq, more, n_host)| Op::Extend(seq, more, n_host)),
        6 => (seq.clone(), 0..30_usize).prop_map(|(seq, n)| Op::Seal(seq, n)),
        4 => seq.clone().prop_map(Op::Slide),
        4 => (seq.clone(), 0..3_usize).prop_map(|(seq, n_sinks)| Op::Roll(seq, n_sinks)),
        3 => seq.clone().prop_map(Op::SwapOut),
        3 => (seq.clone(), 0..6_usize).prop_map(|(seq, n_stay)| Op::SwapIn(seq, n_stay)),
        3 => (seq.clone(), 0..4_usize).prop_map(|(seq, n)| Op::Unspill(seq, n)),
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
        Op::Admit { seq, salted, tokens, entering } if !has(model, seq) => {
            model.admit(SeqId(seq), salt(model, salted), tokens, entering);
        }
        Op::Run { seq, salted, tokens } if !has(model, seq) => {
            let n_tokens = tokens.len();
            let entering = Entering { window: None, may_spill: true, room: u32::MAX };
            model.admit(SeqId(seq), salt(model, salted), tokens, entering);
            if !has(model, seq) {
                return;
            }
            model.copy();
            model.extend(SeqId(seq), &[], 1);
            model.copy();
            model.seal(SeqId(seq), n_tokens);
            model.check();
            model.release(SeqId(seq));
        }
        Op::Fork { source, seq, n_shared, more } if has(model, source) && !has(model, seq) => {
            model.fork(SeqId(source), SeqId(seq), n_shared, &more);
        }
        Op::Extend(seq, more, n_host) if is(model, seq, false) => {
            model.extend(SeqId(seq), &more, n_host);
        }
        Op::Seal(seq, n) if is(model, seq, false) => model.seal(SeqId(seq), n),
        Op::Slide(seq) if is(model, seq, false) => model.slide(SeqId(seq)),
        Op::Roll(seq, n_sinks) if is(model, seq, false) => model.roll(SeqId(seq), n_sinks),
        Op::SwapOut(seq) if is(model, seq, false) => model.swap_out(SeqId(seq)),
        Op::SwapIn(seq, n_stay) if is(model, seq, true) => model.swap_in(SeqId(seq), n_stay),
        Op::Unspill(seq, n) if is(model, seq, false) => model.unspill(SeqId(seq), n),
        Op::Release(seq) if has(model, seq) => model.release(SeqId(seq)),
        Op::Pin { pin, salted, tokens } => model.pin(PinId(pin), salt(model, salted), &tokens),
        Op::Unpin(pin) => model.unpin(PinId(pin)),
        Op::Admit { .. } | Op::Run { .. } | Op::Fork { .. } => {}
        Op::Extend(..) | Op::Seal(..) | Op::Release(_) | Op::SwapOut(_) | Op::SwapIn(..) => {}
        Op::Slide(_) | Op::Roll(..) | Op::Unspill(..) => {}
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    // One in a few worlds has no host tier.
    let n_host = (0..14_u32).prop_map(|n| n.saturating_sub(2));
    let spill = prop::bool::weighted(0.8);
    (1..5_u32, 1..16_u32, n_host, 0..3_u32, 0..4_u32, spill).prop_map(
        |(page_len, n_pages, n_host, demotion_depth, max_pinned, spill)| Sizes {
            page_len,
            n_pages,
            n_host,
            demotion_depth,
            max_pinned,
            spill,
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
            model.hear();
            model.check_heard();
        }
        for seq in model.seqs.keys().copied().collect::<Vec<_>>() {
            model.release(seq);
        }
        model.check();
        model.hear();
        let n_heard = model.heard.len();
        model.cache.clear();
        let expected: &[Event] = if n_heard > 0 { &[Event::Cleared] } else { &[] };
        prop_assert_eq!(&model.cache.take_events()[..], expected);
        model.cache.verify().expect("every invariant holds");
        prop_assert_eq!(model.cache.stats().pages_free, sizes.n_pages);
        prop_assert_eq!(model.cache.stats().host_free, sizes.n_host);
    }
}
