//! Top-k, top-p, min-p and the draw, each without sorting the vocabulary.
//!
//! The filters are those of Hugging Face's `generate`, applied in the order of [`Sampling`]:
//!
//! - top-k keeps `k` tokens;
//! - top-p keeps a token if the tokens before it, best first, sum to less than `top_p` of what
//!   top-k left; the best token always stays;
//! - min-p keeps a token if it is at least `min_p` times as probable as the best.
//!
//! Ties: tokens of equal logit are ordered by id, and a filter that cuts between them keeps the
//! lower ids. (Hugging Face's top-k keeps all tokens equal to the k-th; its top-p cuts between
//! equals in the order of an unstable sort.) min-p never cuts between equals.

use std::cmp::Ordering;

use nuthatch_types::{Sampling, TokenId};

use super::softmax::{BLOCK, exp_neg, fill_weights, inverse};

/// A token and its logit, or later its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) value: f32,
    pub(super) id: u32,
}

/// Best first, equals by id. Values are never NaN here.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.value.partial_cmp(&a.value).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Memory that a draw needs, reused for every token of every sequence.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// `[V]` unnormalised probabilities, the best one 1.
    weights: Vec<f32>,
    /// `[V / BLOCK]` sums of `weights`.
    sums: Vec<f64>,
    /// The tokens that may be drawn, when a filter looks at their order.
    pub(super) candidates: Vec<Candidate>,
    /// Raw logits of the tokens that penalties and bias moved.
    pub(super) touched: Vec<Candidate>,
}

impl Room {
    pub(super) fn with_vocab(vocab: usize) -> Self {
        Room {
            weights: Vec::with_capacity(vocab),
            sums: Vec::with_capacity(vocab.div_ceil(BLOCK)),
            candidates: Vec::with_capacity(vocab),
            touched: Vec::new(),
        }
    }
}

/// Draws a token: `uniform` in `[0, 1)` says which part of the kept probability it falls on.
///
/// `max` must be the largest of `logits` and finite; the temperature must be above 0.
pub(super) fn draw(
    sampling: &Sampling,
    logits: &[f32],
    max: f32,
    uniform: f64,
    room: &mut Room,
) -> TokenId {
    if needs_order(sampling, logits.len()) {
        filter(sampling, logits, max, room);
        // By id, as without filters: an order that devices can keep too.
        room.candidates.sort_unstable_by_key(|candidate| candidate.id);
        draw_candidate(&room.candidates, uniform)
    } else {
        let Room { weights, sums, .. } = room;
        let total = fill_weights(logits, max, sampling.temperature, sampling.min_p, weights, sums);
        draw_weight(weights, sums, total * uniform)
    }
}

fn needs_order(sampling: &Sampling, vocab: usize) -> bool {
    sampling.top_p < 1.0 || cuts_by_rank(sampling, vocab)
}

fn cuts_by_rank(sampling: &Sampling, vocab: usize) -> bool {
    sampling.top_k > 0 && (sampling.top_k as usize) < vocab
}

/// Leaves in `room.candidates` the tokens that may be drawn, with their weights.
pub(super) fn filter(sampling: &Sampling, logits: &[f32], max: f32, room: &mut Room) {
    let top_p = f64::from(sampling.top_p);
    let total = if cuts_by_rank(sampling, logits.len()) {
        select_best(logits, sampling.top_k as usize, &mut room.candidates);
        let sharpness = inverse(sampling.temperature);
        let mut total = 0.0;
        for candidate in &mut room.candidates {
            candidate.value = exp_neg((candidate.value - max) * sharpness);
            total += f64::from(candidate.value);
        }
        total
    } else {
        let Room { weights, sums, candidates, .. } = room;
        let total = fill_weights(logits, max, sampling.temperature, 0.0, weights, sums);
        // All tokens under this together weigh less than what top-p leaves out, so none of them
        // is kept: the order of the many improbable tokens is never asked for.
        let floor = ((1.0 - top_p) * total / logits.len() as f64 * 0.999) as f32;
        candidates.clear();
        candidates.extend(
            (0u32..)
                .zip(weights.iter())
                .filter(|&(_, &w)| w >= floor)
                .map(|(id, &value)| Candidate { value, id }),
        );
        total
    };
    // What min-p drops comes after everything it keeps, so that top-p does not miss it.
    room.candidates.retain(|c| c.value >= sampling.min_p && c.value > 0.0);
    if sampling.top_p < 1.0 {
        keep_nucleus(&mut room.candidates, top_p * total);
    }
    assert!(!room.candidates.is_empty(), "the best token has weight 1 and passes every filter");
}

/// Writes the `k` best tokens to `best`, in no particular order.
///
/// Keeps a short list and the worst logit that can still enter it; nearly every token is refused by
/// one comparison, and the list is cut back by selection when it is full.
pub(super) fn select_best(logits: &[f32], k: usize, best: &mut Vec<Candidate>) {
    best.clear();
    if k == 0 {
        return;
    }
    let room = (2 * k).max(256);
    let mut bar = f32::NEG_INFINITY;
    for (id, &value) in (0u32..).zip(logits) {
        // A token equal to the bar has a higher id than those that set it, and loses the tie.
        if value > bar || best.len() < k {
            best.push(Candidate { value, id });
            if best.len() == room {
                let (_, worst, _) = best.select_nth_unstable_by(k - 1, best_first);
                bar = worst.value;
                best.truncate(k);
            }
        }
    }
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, best_first);
        best.truncate(k);
    }
}

/// Sorts tokens best first.
pub(super) fn sort_best(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by(best_first);
}

/// Keeps the tokens before which, best first, there is less weight than `mass`.
///
/// ```text
///   candidates   [0, start)     [start, end)     [end, ..)
///                kept           not yet known    dropped
/// ```
///
/// Halves the middle by selection until it is short enough to sort: linear in the candidates,
/// whatever the distribution.
fn keep_nucleus(candidates: &mut Vec<Candidate>, mass: f64) {
    let weight = |part: &[Candidate]| part.iter().map(|c| f64::from(c.value)).sum::<f64>();
    let (mut start, mut end) = (0, candidates.len());
    let mut before = 0.0;
    while end - start > 64 {
        let half = (end - start) / 2;
        candidates[start..end].select_nth_unstable_by(half, best_first);
        let better = weight(&candidates[start..start + half]);
        if before + better >= mass {
            end = start + half;
        } else {
            before += better;
            start += half;
        }
    }
    sort_best(&mut candidates[start..end]);
    while start < end && (before < mass || start == 0) {
        before += f64::from(candidates[start].value);
        start += 1;
    }
    candidates.truncate(start);
}

fn draw_candidate(candidates: &[Candidate], uniform: f64) -> TokenId {
    let total: f64 = candidates.iter().map(|c| f64::from(c.value)).sum();
    let mut left = total * uniform;
    for candidate in candidates {
        left -= f64::from(candidate.value);
        if left < 0.0 {
            return TokenId(candidate.id);
        }
    }
    // Rounding can leave a crumb after the last token, which then takes it.
    TokenId(candidates.last().expect("a filter keeps at least one token").id)
}

/// The token on which `left` falls: first its block, then the token in it.
fn draw_weight(weights: &[f32], sums: &[f64], mut left: f64) -> TokenId {
    let mut last = None;
    for (block, (part, &sum)) in weights.chunks(BLOCK).zip(sums).enumerate() {
        if left >= sum {
            left -= sum;
            if sum > 0.0 {
                last = Some(block);
            }
            continue;
        }
        if let Some(i) = draw_in_block(part, left) {
            return token_at(block, i);
        }
        // The block's sum and the running sum are rounded apart: the last token takes the crumb.
        last = Some(block);
        break;
    }
    let block = last.expect("the best token has weight 1");
    let part = weights.chunks(BLOCK).nth(block).expect("blocks were counted from the weights");
    let i = part.iter().rposition(|&w| w > 0.0).expect("the block's sum is above 0");
    token_at(block, i)
}

fn draw_in_block(part: &[f32], mut left: f64) -> Option<usize> {
    part.iter().position(|&w| {
        left -= f64::from(w);
        left < 0.0
    })
}

fn token_at(block: usize, i: usize) -> TokenId {
    TokenId(u32::try_from(block * BLOCK + i).expect("token ids have 32 bits"))
}
