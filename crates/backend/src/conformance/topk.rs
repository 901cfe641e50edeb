//! Top-k attention: digests follow their pages, scores are what they say, and a head sees what is
//! picked for it and nothing else. These checks are for devices that have it.

use nuthatch_types::{KvDtype, LayerIdx, PageCopy, PageShift, Slot};

use crate::topk::{agreement, channels, nibble_product, nibbles, query_codes, select, signs};
use crate::{Ask, Backend, Best, Choosing, Digest, DigestKind, Pick, RopeStyle, ScoreBy};

use super::at_most;
use super::compare::same_bits;
use super::inputs::Random;
use super::rig::{
    Case, FP8, INT8, LAYER, N_LAYERS, PAGE_LEN, Part, Rig, Room, Sequence, shuffled_slots,
};
use super::truth::store_floats;

/// Heads of odd shapes and of usual ones.
fn cases() -> Vec<Case> {
    let cases = [
        Case::new(KvDtype::F16, 3, 2, 64),
        Case::new(KvDtype::Bf16, 1, 1, 24),
        Case::new(KvDtype::F32, 5, 1, 32),
        Case::new(KvDtype::F16, 8, 2, 80),
    ];
    cases.into_iter().take(at_most(2, 4)).collect()
}

/// The same in eight bits, which do not hold all whole numbers.
fn coded_cases<B: Backend>(b: &B) -> Vec<Case> {
    let cases = [
        Case::new(INT8, 3, 2, 64),
        Case::new(INT8, 1, 1, 24),
        Case::new(FP8, 5, 1, 32),
        Case::new(FP8, 2, 1, 40),
    ];
    let few = cases.into_iter().take(at_most(1, 4));
    few.filter(|case| b.holds_rows(case.kv.dtype)).collect()
}

/// A sequence of small whole numbers: sums of their products are exact in any order.
fn whole_numbers(random: &mut Random, case: &Case, rows: usize) -> Sequence {
    let n = rows * case.qkv_width();
    let qkv = (0..n).map(|_| random.below(7) as f32 - 3.0).collect();
    Sequence { first: 0, turn: 0, qkv, rows }
}

/// A digest of each kind, of whole numbers.
fn digests(random: &mut Random, case: &Case) -> Vec<Digest> {
    let (d, heads) = (case.d(), N_LAYERS as usize * case.n_kv_heads());
    let mut numbers = |n: usize| (0..n).map(|_| random.below(5) as f32 - 2.0).collect::<Vec<_>>();
    // Few products in a sum, so that its softmax is not all on one place.
    let sparse = |mut frame: Vec<f32>| {
        frame.iter_mut().enumerate().filter(|(i, _)| i % 5 > 0).for_each(|(_, x)| *x = 0.0);
        frame
    };
    let of = |kind, width, frame, mean| {
        let weights = Vec::new();
        Digest { kind, width, frame, mean, weights }
    };
    let signs = |width, frame, mean| of(DigestKind::Signs, width, frame, mean);
    let channels = |kind, width, frame| of(kind, width, frame, Vec::new());
    // Powers of two, so that products stay exact.
    let weights = |width: usize| (0..heads * width).map(|i| [0.25, 1.0, 2.0][i % 3]).collect();
    let weighted = |digest: Digest| Digest { weights: weights(digest.width), ..digest };
    vec![
        signs(128, numbers(heads * 128 * d), numbers(heads * d)),
        signs(64, numbers(64 * d), vec![0.5; heads * d]),
        channels(DigestKind::Channels, 7, sparse(numbers(heads * 7 * d))),
        of(DigestKind::Bounds, 0, Vec::new(), Vec::new()),
        weighted(channels(DigestKind::Nibbles, 5, sparse(numbers(heads * 5 * d)))),
        channels(DigestKind::Nibbles, 24, sparse(numbers(heads * 24 * d))),
    ]
}

fn room(rows: usize) -> Room {
    Room { n_slots: rows.div_ceil(PAGE_LEN) + 2, n_tables: 2, max_rows: rows, max_context: rows }
}

/// Attention to everything gives the same bits whether an arena keeps digests or not.
pub fn row_pages_agree<B: Backend>(b: &B) {
    let mut random = Random::new(71);
    for case in cases().into_iter().chain(coded_cases(b)) {
        let width = case.d() / 2 * 2;
        let case = case.rotated(RopeStyle::Halves, width);
        let rows = 600;
        let seq = Sequence::new(&mut random, &case, rows);
        let slots = shuffled_slots(&mut random, rows.div_ceil(PAGE_LEN));
        let run = |digests: Option<&[Digest]>| {
            let mut rig = Rig::with_digests(b, &case, room(rows), digests);
            rig.write_table(0, 0, &slots);
            let mut out = Vec::new();
            for (start, end) in [(0, 300), (300, 301), (301, 599), (599, 600)] {
                out.extend(rig.step(&[Part { seq: &seq, table: 0, start, end }]));
            }
            out.concat()
        };
        let (plain, kept) = (run(None), run(Some(&digests(&mut random, &case))));
        same_bits(&kept, &plain, &|| format!("with digests, {}", case.name()));
    }
}

/// The key of one head at one place, as whole numbers that every type holds.
fn key<'a>(case: &Case, seq: &'a Sequence, head: usize, place: usize) -> &'a [f32] {
    let start = place * case.qkv_width() + (case.n_heads + head) * case.d();
    &seq.qkv[start..start + case.d()]
}

fn value(case: &Case, seq: &Sequence, head: usize, place: usize) -> Vec<f64> {
    let start = place * case.qkv_width() + (case.n_heads + case.n_kv_heads() + head) * case.d();
    seq.qkv[start..start + case.d()].iter().map(|&x| f64::from(x)).collect()
}

fn query<'a>(case: &Case, seq: &'a Sequence, head: usize, place: usize) -> &'a [f32] {
    let start = place * case.qkv_width() + head * case.d();
    &seq.qkv[start..start + case.d()]
}

fn product(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// Scores by every digest and by keys are those of the definition, wherever pages have been.
pub fn scores_match<B: Backend>(b: &B) {
    let mut random = Random::new(72);
    for case in cases() {
        let rows = 165;
        let seq = whole_numbers(&mut random, &case, rows);
        let digests = digests(&mut random, &case);
        let mut rig = Rig::with_digests(b, &case, room(rows), Some(&digests));
        let n_pages = rows.div_ceil(PAGE_LEN);
        let mut slots = shuffled_slots(&mut random, n_pages);
        rig.write_table(0, 0, &slots);
        // In uneven steps, so that pages are filled by and by.
        for (start, end) in [(0, 50), (50, 51), (51, 55), (55, rows - 1)] {
            rig.rotate(&[Part { seq: &seq, table: 0, start, end }], LAYER);
        }
        // One page is copied, another written anew at the same positions.
        let (spare, other) = (Slot(n_pages as u32), Slot(n_pages as u32 + 1));
        let copy = PageCopy { source: slots[2], target: spare };
        b.copy_pages(&mut rig.kv, &[copy]).expect("copy_pages runs");
        rig.shift(&[PageShift { source: slots[3], target: other, by: 0 }]);
        let gone = [slots[2], slots[3]];
        (slots[2], slots[3]) = (spare, other);
        rig.poison(&gone);
        rig.write_table(0, 0, &slots);
        let last = [Part { seq: &seq, table: 0, start: rows - 1, end: rows }];
        let qkv = rig.rotate(&last, LAYER);
        for n in [rows, rows - 5, 16, 1] {
            let mut asks = Vec::new();
            let by = (0..digests.len()).map(ScoreBy::Digest).chain([ScoreBy::Keys]);
            for (i, by) in by.enumerate() {
                for head in 0..case.n_kv_heads() {
                    let at = (i * case.n_kv_heads() + head) * n;
                    asks.push(Ask { seq: 0, head: head as u32, by, n: n as u32, at });
                }
            }
            let scores = rig.score(&qkv, &asks, asks.len() * n);
            for ask in &asks {
                let got = &scores[ask.at..ask.at + n];
                check_scores(&case, &seq, &digests, ask, got);
            }
        }
    }
}

fn check_scores(case: &Case, seq: &Sequence, digests: &[Digest], ask: &Ask, got: &[u32]) {
    let (d, head, n) = (case.d(), ask.head as usize, ask.n as usize);
    let number = LAYER.0 as usize * case.n_kv_heads() + head;
    let last = seq.rows - 1;
    let group = head * case.group()..(head + 1) * case.group();
    let queries: Vec<&[f32]> = group.map(|head| query(case, seq, head, last)).collect();
    let digest = match ask.by {
        ScoreBy::Keys => None,
        ScoreBy::Digest(i) => Some(&digests[i]),
    };
    if let Some(digest) = digest.filter(|digest| digest.kind == DigestKind::Signs) {
        let (frame, mean) = (digest.frame_of(number, d), digest.mean_of(number, d));
        for (place, &got) in got.iter().enumerate() {
            let code = signs(frame, Some(mean), key(case, seq, head, place));
            let expected: u32 =
                queries.iter().map(|q| agreement(&signs(frame, None, q), &code)).sum();
            assert_eq!(got, expected, "{ask:?}, place {place}, {}", case.name());
        }
        return;
    }
    let mut expected = vec![0.0f64; n];
    for q in &queries {
        let raw: Vec<f64> = (0..n)
            .map(|place| {
                let scale = f64::from(case.scale());
                scale * raw_score(case, seq, digest, (head, number, n), (q, place))
            })
            .collect();
        let max = raw.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = raw.iter().map(|x| (x - max).exp()).sum();
        expected.iter_mut().zip(&raw).for_each(|(sum, x)| *sum += (x - max).exp() / total);
    }
    for (place, (&got, expected)) in got.iter().zip(expected).enumerate() {
        let off = (f64::from(f32::from_bits(got)) - expected).abs();
        assert!(off <= 1e-3 * expected + 1e-9, "{ask:?}, place {place}: {off} of {expected}");
    }
}

/// What stands for the product of a query and the key at one place.
fn raw_score(
    case: &Case,
    seq: &Sequence,
    digest: Option<&Digest>,
    (head, number, _n): (usize, usize, usize),
    (q, place): (&[f32], usize),
) -> f64 {
    let d = case.d();
    let Some(digest) = digest else { return product(q, key(case, seq, head, place)) };
    match digest.kind {
        DigestKind::Channels => {
            let rows = digest.frame_of(number, d).chunks_exact(d);
            let key = key(case, seq, head, place);
            let products: Vec<f32> = rows.clone().map(|row| product(row, key) as f32).collect();
            let (kept, unit) = channels(&products);
            let kept = kept.into_iter().map(|x| f64::from(x) * unit.to_f64());
            rows.zip(kept).map(|(row, kept)| product(row, q) * kept).sum()
        }
        DigestKind::Nibbles => {
            let rows = digest.frame_of(number, d).chunks_exact(d);
            let key = key(case, seq, head, place);
            let products: Vec<f32> = rows.clone().map(|row| product(row, key) as f32).collect();
            let mut queries: Vec<f32> = rows.map(|row| product(row, q) as f32).collect();
            queries.iter_mut().zip(digest.weights_of(number)).for_each(|(x, w)| *x *= w);
            let ((kept, unit), (codes, of_query)) = (nibbles(&products), query_codes(&queries));
            let codes: Vec<i8> = codes.collect();
            f64::from(nibble_product(&kept, &codes)) * unit.to_f64() * f64::from(of_query)
        }
        DigestKind::Bounds => {
            let first = place / PAGE_LEN * PAGE_LEN;
            // The page's tokens that were written, asked for or not.
            let tokens = first..seq.rows.min(first + PAGE_LEN);
            (0..d)
                .map(|e| {
                    let products =
                        tokens.clone().map(|t| f64::from(q[e] * key(case, seq, head, t)[e]));
                    products.fold(f64::NEG_INFINITY, f64::max)
                })
                .sum()
        }
        DigestKind::Signs => unreachable!("signs are compared exactly"),
    }
}

/// Each head sees its own picks and nothing else, beside a sequence that sees everything.
pub fn picks_match<B: Backend>(b: &B) {
    let mut random = Random::new(73);
    for case in cases().into_iter().chain(coded_cases(b)) {
        let rows = 700;
        let mut seq = Sequence::new(&mut random, &case, rows);
        for head in seq.qkv.chunks_exact_mut(case.d()) {
            head.iter_mut().for_each(|x| *x = x.clamp(-4.0, 4.0));
            store_floats(case.kv.dtype, head);
        }
        let mut rig = Rig::with_digests(b, &case, room(rows + 40), Some(&[]));
        let slots = shuffled_slots(&mut random, rows.div_ceil(PAGE_LEN));
        rig.write_table(0, 0, &slots);
        rig.append(&seq, 0, rows - 1, LAYER);
        let part = Part { seq: &seq, table: 0, start: rows - 1, end: rows };
        let qkv = rig.rotate(&[part], LAYER);
        for (n_first, share, tail) in [(16, 2, 640), (0, 9, 699), (0, 1000, 700), (300, 3, 301)] {
            let places: Vec<Vec<u32>> = (0..case.n_kv_heads())
                .map(|_| (n_first..tail).filter(|_| random.below(share) == 0).collect())
                .collect();
            let picks: Vec<Pick<'_>> = (0u32..)
                .zip(&places)
                .map(|(head, places)| Pick { seq: 0, head, n_first, places, tail, rows: &[] })
                .collect();
            if picks.iter().any(|pick| pick.places.is_empty() && n_first == 0 && tail == 700) {
                continue;
            }
            let got = rig.attend_picks(&qkv, &picks, 1);
            for head in 0..case.n_heads {
                let pick = &picks[head / case.group()];
                let mut seen: Vec<usize> = (0..pick.n_first as usize).collect();
                seen.extend(pick.places.iter().map(|&place| place as usize));
                seen.extend(pick.tail as usize..rows);
                let got = &got[head * case.d()..][..case.d()];
                check_head(&case, &seq, (head, &seen), bound_of(b, &case), got);
            }
        }
    }
}

/// How far a mean of values up to 4 may be off: devices that round weights of values, as they round
/// activations, are off by that rounding of the largest. Queries are of the type of the keys already.
fn bound_of<B: Backend>(b: &B, case: &Case) -> f64 {
    let rounding = match case.kv.dtype {
        KvDtype::F32 => 0.0,
        KvDtype::F16 => 1.0 / f64::from(1 << 11),
        KvDtype::Bf16 => 1.0 / f64::from(1 << 8),
        // Codes are multiplied as f16 at least.
        KvDtype::Int8(_) | KvDtype::Fp8(_) => 1.0 / f64::from(1 << 11),
    };
    1e-4 + if b.rounds_activations() { 4.0 * rounding } else { 0.0 }
}

fn check_head(
    case: &Case,
    seq: &Sequence,
    (head, seen): (usize, &[usize]),
    bound: f64,
    got: &[f32],
) {
    let q = query(case, seq, head, seq.rows - 1);
    let kv_head = head / case.group();
    let score = |place: usize| f64::from(case.scale()) * product(q, key(case, seq, kv_head, place));
    let max = seen.iter().map(|&place| score(place)).fold(f64::NEG_INFINITY, f64::max);
    let (mut total, mut sum) = (0.0, vec![0.0; case.d()]);
    for &place in seen {
        let p = (score(place) - max).exp();
        total += p;
        sum.iter_mut().zip(value(case, seq, kv_head, place)).for_each(|(sum, v)| *sum += p * v);
    }
    for (e, (&got, sum)) in got.iter().zip(&sum).enumerate() {
        let expected = sum / total;
        let off = (f64::from(got) - expected).abs();
        assert!(off <= bound, "head {head}, element {e}: {got} for {expected}, {}", case.name());
    }
}

/// What a row with picks gets does not depend on who else is in the batch, and those others get what
/// they get without it.
pub fn picks_rows_agree<B: Backend>(b: &B) {
    let mut random = Random::new(74);
    let case = Case::new(KvDtype::F16, 3, 2, 64).rotated(RopeStyle::Halves, 64);
    let (rows, others) = (300, 40);
    let seqs = [rows, others].map(|rows| Sequence::new(&mut random, &case, rows));
    let digests = digests(&mut random, &case);
    let mut rig = Rig::with_digests(b, &case, room(rows + others), Some(&digests));
    let slots = shuffled_slots(&mut random, room(rows + others).n_slots);
    let (first, second) = slots.split_at(rows.div_ceil(PAGE_LEN));
    rig.write_table(0, 0, first);
    rig.write_table(1, 0, second);
    for layer in 0..N_LAYERS {
        rig.append(&seqs[0], 0, rows - 1, LayerIdx(layer));
    }
    let one = Part { seq: &seqs[0], table: 0, start: rows - 1, end: rows };
    let two = Part { seq: &seqs[1], table: 1, start: 0, end: others };
    let places: Vec<u32> = (10..250).filter(|_| random.below(3) == 0).collect();
    let picks = |seq: u32| {
        [0, 1].map(|head| Pick { seq, head, n_first: 10, places: &places, tail: 280, rows: &[] })
    };
    let width = case.out_width();
    let qkv = rig.rotate(&[one], LAYER);
    let alone = rig.attend_picks(&qkv, &picks(0), 1);
    let dense = rig.step(&[two]).concat();
    let qkv = rig.rotate(&[two, one], LAYER);
    let both = rig.attend_picks(&qkv, &picks(1), others + 1);
    same_bits(&both[others * width..], &alone, &|| "a row with picks, in company".to_owned());
    same_bits(&both[..others * width], &dense, &|| "rows beside one with picks".to_owned());
}

/// Heads that choose while others attend, in the order of the sequence's heads.
struct Waiting<'p> {
    picks: &'p [Pick<'p>],
    /// More rows than are chosen may be announced.
    n_spare: usize,
    /// By what they choose besides, and what of it.
    by: ScoreBy,
    best: Best,
}

/// Whether it has yet to choose, which it is, and what it would choose by scores.
struct Waiter {
    is_open: bool,
    head: usize,
    chosen: Vec<u32>,
}

impl Choosing for Waiting<'_> {
    type Head = Waiter;

    fn open(&self, head: &Waiter) -> Option<usize> {
        let n = self.picks[head.head].n_first as usize + self.picks[head.head].places.len();
        head.is_open.then_some(n + 300 - self.picks[head.head].tail as usize + self.n_spare)
    }

    fn choose(&self, head: &mut Waiter, select: impl FnOnce(&Ask, Best, &mut Vec<u32>)) {
        assert!(head.is_open, "chosen once");
        let ask = Ask { seq: 0, head: head.head as u32, by: self.by, n: 290, at: 7 };
        select(&ask, self.best, &mut head.chosen);
        head.is_open = false;
    }

    fn pick<'a>(&'a self, head: &'a Waiter) -> Pick<'a> {
        let pick = self.picks[head.head];
        // Before it has chosen it shows what it had.
        if head.is_open { Pick { places: &[], tail: 299, ..pick } } else { pick }
    }
}

/// Heads get what they have chosen, whoever chooses meanwhile.
pub fn choosing_agrees<B: Backend>(b: &B) {
    let mut random = Random::new(75);
    let case = Case::new(KvDtype::F16, 3, 4, 64).rotated(RopeStyle::Halves, 64);
    let (rows, digests) = (300, digests(&mut random, &case));
    let seq = Sequence::new(&mut random, &case, rows);
    let mut rig = Rig::with_digests(b, &case, room(rows), Some(&digests));
    rig.write_table(0, 0, &shuffled_slots(&mut random, rows.div_ceil(PAGE_LEN)));
    rig.append(&seq, 0, rows - 1, LAYER);
    let qkv = rig.rotate(&[Part { seq: &seq, table: 0, start: rows - 1, end: rows }], LAYER);
    let places: Vec<Vec<u32>> =
        [1, 2, 3, 50].map(|n| (4..290).filter(|_| random.below(n) == 0).collect()).to_vec();
    let picks: Vec<Pick<'_>> = (0u32..)
        .zip(&places)
        .map(|(head, places)| Pick { seq: 0, head, n_first: 4, places, tail: 290, rows: &[] })
        .collect();
    let expected = rig.attend_picks(&qkv, &picks, 1);
    let bys = (0..digests.len()).map(ScoreBy::Digest).chain([ScoreBy::Keys]).cycle();
    let kinds = (0..16).flat_map(|open| [(open, 0), (open, 700)]).zip(bys);
    for ((open, n_spare), by) in kinds {
        let head = |head| Waiter { is_open: open >> head & 1 == 1, head, chosen: Vec::new() };
        let mut heads: Vec<Waiter> = (0..4).map(head).collect();
        let best = Best { first: 4, k: 30, fade: [0, 1 << 23][open % 2] };
        let choosing = Waiting { picks: &picks, n_spare, by, best };
        let got = rig.attend_choosing(&qkv, (&choosing, &mut heads), 1);
        same_bits(&got, &expected, &|| format!("heads {open:04b} chose meanwhile"));
        assert!(heads.iter().all(|head| !head.is_open), "all have chosen");
        for Waiter { head, chosen, .. } in heads.iter().filter(|head| open >> head.head & 1 == 1) {
            let ask = Ask { seq: 0, head: *head as u32, by, n: 290, at: 0 };
            let mut expected = Vec::new();
            select(&rig.score(&qkv, &[ask], 290), best, &mut expected);
            assert_eq!(*chosen, expected, "head {head} by {by:?}");
        }
    }
}
