//! Rotation and attention in `f64`, written down as their formulas say, with bounds on what
//! rounding may do to each result.
//!
//! ```text
//!   o = sum p_j v_j,   p = softmax(s),   s_j = scale q . k_j
//! ```
//!
//! If each score is off by at most `e_j`, then to first order `o` is off by at most
//! `sum p_j e_j |v_j - o|`; the weighted sum itself adds its own rounding. A score is off by the
//! rounding of its dot product and of its exponent. Heads that were normalised or rotated on the
//! device carry the rounding of that, the rounding of the angle (position times frequency, in
//! `f32`), and sometimes a key element that fell on the other side of a tie when it was stored. A device
//! that rounds activations may also round queries, and the weights `p`, to the arena's type.

use std::ops::Range;

use half::{bf16, f16};
use nuthatch_types::{ColdDtype, KvDtype};

use crate::cold::{decode, encode, vector_bytes};
use crate::{Backend, RopeSpec, RopeStyle};

use super::compare::{ROUNDING, TINY, Truth};
use super::rig::{Case, EPS, Sequence};

/// Stored key elements of one key that may have fallen on the other side of a tie.
const FLIPS: f64 = 2.0;
/// The smallest weight of a code's vector that f16 holds, as a share of the largest: a code may be 0, and
/// then nothing else hides that smaller ones are lost.
const LOST: f64 = 1.0 / (1u64 << 31) as f64;
/// Bounds are to first order; what is left out is far below this factor.
const SLACK: f64 = 2.0;

/// A sequence's heads as they are attended.
struct Heads {
    /// `[rows that attend, H, D]`, normalised and rotated.
    q: Vec<f64>,
    /// `[all rows, G, D]`, normalised, rotated, and rounded to the arena's type.
    k: Vec<f64>,
    /// `[all rows, G, D]`, rounded to the arena's type.
    v: Vec<f64>,
}

impl Heads {
    fn new(case: &Case, seq: &Sequence, rows: &Range<usize>, turns: &Turns<'_>) -> Self {
        let (d, h, g) = (case.d(), case.n_heads, case.n_kv_heads());
        let mut heads = Heads { q: Vec::new(), k: Vec::new(), v: Vec::new() };
        for (t, row) in seq.qkv.chunks_exact(case.qkv_width()).enumerate() {
            let position = seq.position(t);
            let norms = case.norms.as_ref();
            if rows.contains(&t) {
                for head in row[..h * d].chunks_exact(d) {
                    let norm = norms.map(|(q, _)| &q[..]);
                    heads.q.extend(ready(head, norm, &case.rope, position));
                }
            }
            for head in row[h * d..(h + g) * d].chunks_exact(d) {
                let norm = norms.map(|(_, k)| &k[..]);
                let mut key = ready(head, norm, &case.rope, position);
                store(case.kv.dtype, &mut key);
                if turns(t) != 0 {
                    turn(&mut key, &case.rope, f64::from(turns(t)), 1.0);
                    store(case.kv.dtype, &mut key);
                }
                heads.k.extend(key);
            }
            for head in row[(h + g) * d..].chunks_exact(d) {
                let mut value: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
                store(case.kv.dtype, &mut value);
                heads.v.extend(value);
            }
        }
        heads
    }
}

/// A head, normalised if there are weights, and rotated.
pub(super) fn ready(
    head: &[f32],
    norm: Option<&[f32]>,
    rope: &RopeSpec,
    position: usize,
) -> Vec<f64> {
    let mut head: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
    if let Some(weight) = norm {
        let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        head.iter_mut().zip(weight).for_each(|(x, &w)| *x *= scale * f64::from(w));
    }
    turn(&mut head, rope, position as f64, f64::from(rope.attention_factor));
    head
}

/// Rotates a head in place.
fn turn(head: &mut [f64], rope: &RopeSpec, position: f64, factor: f64) {
    for (i, &inv_freq) in rope.inv_freq.iter().enumerate() {
        let angle = position * f64::from(inv_freq);
        let (sin, cos) = (factor * angle.sin(), factor * angle.cos());
        let (first, second) = pair(rope, i);
        let (x, y) = (head[first], head[second]);
        head[first] = x * cos - y * sin;
        head[second] = x * sin + y * cos;
    }
}

/// The two elements that frequency `i` rotates.
pub(super) fn pair(rope: &RopeSpec, i: usize) -> (usize, usize) {
    match rope.style {
        RopeStyle::Halves => (i, i + rope.inv_freq.len()),
        RopeStyle::Pairs => (2 * i, 2 * i + 1),
    }
}

/// What the arena keeps of one token's key or value of one head.
///
/// By way of `f32`, because a device has no more than that, and because `half` drops the low bits
/// of an `f64` before it looks for ties.
fn store(dtype: KvDtype, x: &mut [f64]) {
    let mut floats: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    store_floats(dtype, &mut floats);
    x.iter_mut().zip(floats).for_each(|(x, float)| *x = f64::from(float));
}

/// The same for floats.
pub(super) fn store_floats(dtype: KvDtype, x: &mut [f32]) {
    let mut code = |code: ColdDtype| {
        let mut codes = vec![0; vector_bytes(code, x.len())];
        encode(code, x, &mut codes);
        decode(code, &codes, x);
    };
    match dtype {
        KvDtype::F32 => {}
        KvDtype::F16 => x.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        KvDtype::Bf16 => x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        KvDtype::Int8(_) => code(ColdDtype::Int8),
        KvDtype::Fp8(_) => code(ColdDtype::Fp8),
    }
}

/// Distance of neighbouring stored values, relative to the value.
fn stored_step(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::F32 => 2.0 * ROUNDING,
        KvDtype::F16 => 1.0 / (1 << 10) as f64,
        KvDtype::Bf16 => 1.0 / (1 << 7) as f64,
        KvDtype::Int8(_) => 0.0,
        KvDtype::Fp8(_) => 1.0 / (1 << 3) as f64,
    }
}

/// Distance of neighbouring stored values that are small, relative to the largest of their vector.
fn stored_step_at_zero(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 0.0,
        KvDtype::Int8(_) => 1.0 / 127.0,
        KvDtype::Fp8(_) => 1.0 / (448 << 9) as f64,
    }
}

/// By how many positions the key of a row was turned after it was stored.
pub(super) type Turns<'a> = dyn Fn(usize) -> i32 + 'a;

/// How far off a device may round a query's elements and the weights, relative to each: to f16 where
/// keys and values are codes.
fn attend_step<B: Backend>(b: &B, dtype: KvDtype) -> f64 {
    let rounded = if dtype.is_coded() { KvDtype::F16 } else { dtype };
    if b.rounds_activations() && dtype != KvDtype::F32 { stored_step(rounded) / 2.0 } else { 0.0 }
}

/// Outputs of some rows of a sequence, `[rows, H, D]`.
pub(super) fn attend<B: Backend>(b: &B, case: &Case, seq: &Sequence, rows: Range<usize>) -> Truth {
    attend_turned(b, case, seq, rows, &|_| 0)
}

/// The same, of a sequence some of whose keys were turned.
pub(super) fn attend_turned<B: Backend>(
    b: &B,
    case: &Case,
    seq: &Sequence,
    rows: Range<usize>,
    turns: &Turns<'_>,
) -> Truth {
    let (d, step) = (case.d(), attend_step(b, case.kv.dtype));
    let lost = if case.kv.dtype.is_coded() && step > 0.0 { LOST } else { 0.0 };
    let heads = Heads::new(case, seq, &rows, turns);
    let first_row = rows.start;
    let angles = AngleError::new(case);
    let mut truth = Truth::default();
    for t in rows {
        let window = case.window.map_or(usize::MAX, |window| window as usize);
        let start = (t + 1).saturating_sub(window);
        for h in 0..case.n_heads {
            let q = &heads.q[((t - first_row) * case.n_heads + h) * d..][..d];
            let at = |j: usize| (j * case.n_kv_heads() + h / case.group()) * d;
            let scores: Vec<Score> = (start..=t)
                .map(|j| {
                    let k = &heads.k[at(j)..][..d];
                    let mut score = Score::new(case, q, k, step);
                    if turns(j) != 0 {
                        // It was computed and rounded twice.
                        score.error *= 2.0;
                    }
                    score.error += angles.of(q, k, (seq.position(t), seq.position(j)));
                    score
                })
                .collect();
            let values: Vec<&[f64]> = (start..=t).map(|j| &heads.v[at(j)..][..d]).collect();
            mix(&scores, &values, (step, lost), &mut truth);
        }
    }
    truth
}

/// A score and how far off it may be.
struct Score {
    value: f64,
    error: f64,
}

impl Score {
    fn new(case: &Case, q: &[f64], k: &[f64], step: f64) -> Self {
        let scale = f64::from(case.scale());
        let (mut sum, mut mass, mut largest) = (0.0, 0.0, 0.0f64);
        for (q, k) in q.iter().zip(k) {
            let product = q * k;
            sum += product;
            mass += product.abs();
            largest = largest.max(product.abs());
        }
        let width = (q.len() as f64).sqrt();
        let mut error = mass * ((2.0 * width + 4.0) * ROUNDING + step);
        if case.changes_heads() {
            error += mass * (2.0 * width + 16.0) * ROUNDING;
            let top = |x: &[f64]| x.iter().fold(0.0, |top: f64, x| top.max(x.abs()));
            let at_zero = top(q) * top(k) * stored_step_at_zero(case.kv.dtype);
            error += FLIPS * (largest * stored_step(case.kv.dtype) + at_zero);
        }
        let value = scale * sum;
        Score { value, error: scale * error + 4.0 * ROUNDING * value.abs() }
    }
}

/// What the rounding of angles does to a score.
struct AngleError<'a> {
    case: &'a Case,
}

impl<'a> AngleError<'a> {
    fn new(case: &'a Case) -> Self {
        AngleError { case }
    }

    fn of(&self, q: &[f64], k: &[f64], positions: (usize, usize)) -> f64 {
        let rope = &self.case.rope;
        if rope.inv_freq.iter().all(|&inv_freq| inv_freq == 0.0) {
            return 0.0;
        }
        let mut sum = 0.0;
        for (i, &inv_freq) in rope.inv_freq.iter().enumerate() {
            let (first, second) = pair(rope, i);
            let lengths =
                (q[first].powi(2) + q[second].powi(2)) * (k[first].powi(2) + k[second].powi(2));
            sum += lengths.sqrt() * f64::from(inv_freq);
        }
        let radians = (positions.0 + positions.1) as f64 * ROUNDING;
        f64::from(self.case.scale()) * sum * radians
    }
}

/// The softmax of the scores, applied to the values.
fn mix(scores: &[Score], values: &[&[f64]], (step, lost): (f64, f64), truth: &mut Truth) {
    let top = scores.iter().fold(f64::NEG_INFINITY, |top, score| top.max(score.value));
    let weights: Vec<f64> = scores.iter().map(|score| (score.value - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    let d = values[0].len();
    let mut out = vec![0.0; d];
    let mut mass = vec![0.0; d];
    for (weight, v) in weights.iter().zip(values) {
        for ((out, mass), v) in out.iter_mut().zip(&mut mass).zip(*v) {
            *out += weight / total * v;
            *mass += weight / total * v.abs();
        }
    }
    let mut error: Vec<f64> = mass
        .iter()
        .map(|mass| mass * ((8.0 + 2.0 * (values.len() as f64).sqrt()) * ROUNDING + step))
        .collect();
    let largest = values.iter().copied().flatten().fold(0.0, |top: f64, x| top.max(x.abs()));
    error.iter_mut().for_each(|error| *error += lost * values.len() as f64 * largest);
    for ((weight, score), v) in weights.iter().zip(scores).zip(values) {
        let off = weight / total * score.error;
        // Keys without weight cannot move the result.
        if off > 0.0 {
            for ((error, out), v) in error.iter_mut().zip(&out).zip(*v) {
                *error += off * (v - out).abs();
            }
        }
    }
    for (out, error) in out.iter().zip(&error) {
        truth.push(*out, SLACK * error + TINY);
    }
}
