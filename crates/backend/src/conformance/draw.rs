//! `draw`: tokens chosen on the device, against sums in `f64`. A device that leaves choosing to its
//! caller is not judged.

use crate::{Backend, Draw, Moved};

use super::at_most;
use super::compare::upload;
use super::inputs::Random;

/// Sums of a device are rounded; a draw that a change of this size could turn is not judged.
const SLACK: f64 = 2e-5;

/// Every filter alone and together, ties, moved logits, and rows that are no numbers.
pub fn draw_matches<B: Backend>(b: &B) {
    if !b.draws() {
        return;
    }
    let mut random = Random::new(31);
    let (mut n_judged, mut n_skipped) = (0, 0);
    for vocab in [1, 31, 1000, 4099, 50_257].into_iter().take(at_most(4, 5)) {
        for draw in draws(&mut random, vocab) {
            let mut rows: Vec<Vec<f32>> = (0..3).map(|_| logits(&mut random, vocab)).collect();
            // Many equals, which filters have to cut by id.
            rows[1].iter_mut().for_each(|x| *x = x.round());
            rows[2][vocab / 2] = f32::NAN;
            let draws: Vec<Draw> = rows
                .iter()
                .map(|_| Draw { uniform: f64::from(random.unit()).abs() * 0.999, ..draw.clone() })
                .collect();
            let mut buf = upload(b, &rows.concat());
            let mut tokens = [Some(0); 3];
            b.draw(&mut buf, vocab, &draws, &mut tokens).expect("draw runs");
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
}

/// Rows without a largest number have no token; what cannot come is not drawn.
fn infinite_rows<B: Backend>(b: &B) {
    let plain = Draw {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0.999,
        moved: Vec::new(),
    };
    let mut one = vec![f32::NEG_INFINITY; 40];
    one[17] = -3.0;
    let mut infinite = vec![0.0; 40];
    infinite[3] = f32::INFINITY;
    let rows = [one, infinite, vec![f32::NEG_INFINITY; 40]];
    for temperature in [0.0, 1.0] {
        let draws = vec![Draw { temperature, ..plain.clone() }; 3];
        let mut buf = upload(b, &rows.concat());
        let mut tokens = [Some(0); 3];
        b.draw(&mut buf, 40, &draws, &mut tokens).expect("draw runs");
        assert_eq!(tokens, [Some(17), None, None]);
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
        moved: Vec::new(),
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
        Draw { temperature: 0.0, moved: moved.clone(), ..plain.clone() },
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
    for moved in &draw.moved {
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
