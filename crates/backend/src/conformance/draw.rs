//! `draw`: tokens chosen on the device, against sums in `f64`. A device that leaves choosing to its
//! caller is not judged.

use std::sync::Arc;

use nuthatch_types::Slot;

use crate::{Backend, BatchLayout, Draw, Moved, WeightType};

use super::at_most;
use super::compare::{download, unwritten, upload};
use super::inputs::Random;
use super::matmul::Stack;
use super::rig::small_plan;

/// Sums of a device are rounded; a draw that a change of this size could turn is not judged.
const SLACK: f64 = 2e-5;

/// Every filter alone and together, ties, moved logits, and rows that are no numbers.
pub fn draw_matches<B: Backend>(b: &B) {
    if !b.draws() {
        return;
    }
    let mut random = Random::new(31);
    let (mut n_judged, mut n_skipped) = (0, 0);
    for vocab in [1, 31, 1000, 4099, 50_257].into_iter().take(at_most(3, 5)) {
        for draw in draws(&mut random, vocab) {
            let mut rows: Vec<Vec<f32>> = (0..3).map(|_| logits(&mut random, vocab)).collect();
            // Many equals, which filters have to cut by id.
            rows[1].iter_mut().for_each(|x| *x = x.round());
            rows[2][vocab / 2] = f32::NAN;
            let draws: Vec<Draw> = rows
                .iter()
                .map(|_| Draw { uniform: f64::from(random.unit()).abs() * 0.999, ..draw.clone() })
                .collect();
            let tokens = choose(b, &rows.concat(), vocab, &draws);
            assert_eq!(tokens[2], None, "a row with NaN, {draw:?}");
            for row in 0..2 {
                let Some(expected) = sure(&rows[row], &draws[row]) else {
                    n_skipped += 1;
                    continue;
                };
                n_judged += 1;
                assert_eq!(tokens[row], Some(expected), "vocabulary of {vocab}, {:?}", draws[row]);
            }
        }
    }
    assert!(n_skipped * 5 < n_judged, "{n_skipped} draws were not judged, {n_judged} were");
    infinite_rows(b);
    next_rows(b);
}

/// Rows without a largest number have no token; what cannot come is not drawn.
fn infinite_rows<B: Backend>(b: &B) {
    let plain = Draw {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0.999,
        moved: Arc::default(),
    };
    let mut one = vec![f32::NEG_INFINITY; 40];
    one[17] = -3.0;
    let mut infinite = vec![0.0; 40];
    infinite[3] = f32::INFINITY;
    let rows = [one, infinite, vec![f32::NEG_INFINITY; 40]];
    for temperature in [0.0, 1.0] {
        let draws = vec![Draw { temperature, ..plain.clone() }; 3];
        assert_eq!(choose(b, &rows.concat(), 40, &draws), [Some(17), None, None]);
    }
}

/// Three sequences of one token each.
fn three_rows() -> BatchLayout {
    BatchLayout {
        tokens: vec![1, 2, 3],
        positions: vec![0; 3],
        query_start: vec![0, 1, 2, 3],
        kv_len: vec![1; 3],
        table_row: vec![0; 3],
        output_rows: vec![0, 1, 2],
    }
}

fn choose<B: Backend>(b: &B, logits: &[f32], vocab: usize, draws: &[Draw]) -> [Option<u32>; 3] {
    let mut plan = small_plan(b, &three_rows());
    let (mut logits, mut tokens) = (upload(b, logits), [Some(0); 3]);
    b.plan_draws(&mut plan, draws).expect("draws are planned");
    b.draw(&plan, &mut logits, vocab).expect("draw runs");
    b.end_pass(&mut plan).expect("the pass ends");
    b.drawn(&mut plan, &mut tokens).expect("there are tokens");
    tokens
}

/// A batch that is planned before the tokens of the one before it are there begins with them.
fn next_rows<B: Backend>(b: &B) {
    const VOCAB: usize = 40;
    const WIDTH: usize = 64;
    let mut random = Random::new(32);
    let stack = Stack::single(&mut random, WeightType::BF16, VOCAB, WIDTH);
    let table = stack.load(b);
    let greedy = Draw {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0.5,
        moved: Arc::default(),
    };
    let layout = three_rows();
    let mut tables = b.alloc_tables(1, 1).expect("a table");
    b.write_table(&mut tables, 0, 0, &[Slot(0)]).expect("the table is written");
    let mut plan = small_plan(b, &layout);
    let chosen = [[7, 39, 0], [12, 7, 7], [3, 4, 5]];
    for (i, tokens) in chosen.iter().enumerate() {
        let mut rows = vec![0.0; 3 * VOCAB];
        for (row, &token) in tokens.iter().enumerate() {
            rows[row * VOCAB + token as usize] = 1.0;
        }
        let mut logits = upload(b, &rows);
        b.plan_draws(&mut plan, &vec![greedy.clone(); 3]).expect("draws are planned");
        b.draw(&plan, &mut logits, VOCAB).expect("draw runs");
        b.end_pass(&mut plan).expect("the pass ends");
        b.plan_next(&mut plan, &tables, &layout).expect("the next batch is planned");
        let mut out = unwritten(b, 3 * WIDTH);
        b.embed(&table, &plan, &mut out).expect("embed runs");
        let expected: Vec<f32> =
            tokens.iter().flat_map(|&token| stack.parts[0].0.row(token as usize)).collect();
        assert_eq!(download(b, &out, 3 * WIDTH), expected, "batch {i}");
        // One pass is always behind.
        if i > 0 {
            let mut found = [None; 3];
            b.drawn(&mut plan, &mut found).expect("there are tokens");
            assert_eq!(found, chosen[i - 1].map(Some), "batch {i}");
        }
    }
}

fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    (0..vocab).map(|_| 4.0 * (random.unit() + random.unit() + random.unit())).collect()
}

fn draws(random: &mut Random, vocab: usize) -> Vec<Draw> {
    let plain = Draw {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0.0,
        moved: Arc::default(),
    };
    let mut token = |i: usize| (i * 37 + (random.unit().abs() * 30.0) as usize) as u32;
    let mut moved: Vec<Moved> = (0..60).map(|i| Moved::nothing(token(i))).collect();
    moved.sort_by_key(|moved| moved.token);
    moved.dedup_by_key(|moved| moved.token);
    for (i, moved) in moved.iter_mut().enumerate() {
        moved.factor = 1.3;
        moved.minus = 0.25 * (i % 7) as f32;
        moved.plus = if i % 5 == 0 { 6.0 } else { 0.0 };
    }
    moved.push(Moved { plus: 100.0, ..Moved::nothing(vocab as u32 + 5) });
    let moved = Arc::new(moved);
    vec![
        Draw { temperature: 0.0, ..plain.clone() },
        plain.clone(),
        Draw { temperature: 0.3, ..plain.clone() },
        Draw { top_k: 1, ..plain.clone() },
        Draw { top_k: 40, ..plain.clone() },
        Draw { top_k: vocab as u32, ..plain.clone() },
        Draw { top_p: 0.9, ..plain.clone() },
        Draw { top_p: 0.1, temperature: 2.0, ..plain.clone() },
        Draw { min_p: 0.2, ..plain.clone() },
        Draw { top_k: 300, top_p: 0.7, min_p: 0.01, temperature: 1.5, ..plain.clone() },
        Draw { temperature: 0.0, moved: Arc::clone(&moved), ..plain.clone() },
        Draw { top_p: 0.95, moved, ..plain },
    ]
}

/// The token, if none of the numbers that decide it is near a border.
fn sure(logits: &[f32], draw: &Draw) -> Option<u32> {
    let at = |top_p: f64, uniform: f64| {
        let top_p = if draw.top_p < 1.0 { (f64::from(draw.top_p) + top_p) as f32 } else { 1.0 };
        let uniform = (draw.uniform + uniform).clamp(0.0, 1.0 - 1e-9);
        token(logits, &Draw { top_p, uniform, ..draw.clone() })
    };
    let token = at(0.0, 0.0);
    let moves = [(SLACK, SLACK), (SLACK, -SLACK), (-SLACK, SLACK), (-SLACK, -SLACK)];
    moves.iter().all(|&(top_p, uniform)| at(top_p, uniform) == token).then_some(token)
}

fn token(logits: &[f32], draw: &Draw) -> u32 {
    let mut logits = logits.to_vec();
    for moved in draw.moved.iter() {
        if let Some(logit) = logits.get_mut(moved.token as usize) {
            *logit = moved.apply(*logit);
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if draw.temperature == 0.0 {
        return order[0] as u32;
    }
    let max = logits[order[0]];
    let weight = |i: usize| (f64::from(logits[i] - max) / f64::from(draw.temperature)).exp();
    if draw.top_k > 0 {
        order.truncate(draw.top_k as usize);
    }
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let (mut before, mut n_kept) = (0.0, 0);
    for &i in &order {
        if draw.top_p < 1.0 && n_kept > 0 && before >= f64::from(draw.top_p) * total {
            break;
        }
        before += weight(i);
        n_kept += 1;
    }
    order.truncate(n_kept);
    order.retain(|&i| weight(i) >= f64::from(draw.min_p));
    order.sort_unstable();
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut left = total * draw.uniform;
    for &i in &order {
        left -= weight(i);
        if left < 0.0 {
            return i as u32;
        }
    }
    order[order.len() - 1] as u32
}
