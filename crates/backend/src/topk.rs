//! Top-k attention: what a device keeps beside the keys, what it is asked, and the plainest answers.
//!
//! ```text
//!   rope_append   writes K and V, and the digests of the keys beside their pages
//!   score         how well each place of a sequence fits the queries of one head
//!   select        the places with the best scores
//!   attend_picks  attention over the places that were picked
//! ```
//!
//! What to ask and what to do with the answers is decided elsewhere. The functions of this module
//! are the reference that judges devices; [`select`] is also what a device gets by default.

mod cosine;

use half::f16;

pub use cosine::cosine;

/// What is kept of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestKind {
    /// One bit for each row of the frame: whether the centred key lies on its positive side (HATA).
    Signs,
    /// The key's products with the rows of the frame, see [`channels`] (Loki, Double Sparsity).
    Channels,
    /// The same in four bits, see [`nibbles`]; the queries that meet them have eight, see
    /// [`query_codes`], so that sums of products are whole numbers.
    Nibbles,
    /// The least and the largest of each element over the keys of a page (Quest); has no frame.
    Bounds,
}

/// One way to find keys again, for all layers and heads that own KV.
#[derive(Clone, Debug, PartialEq)]
pub struct Digest {
    /// What is kept.
    pub kind: DigestKind,
    /// Rows of a frame: a multiple of 64 for [`DigestKind::Signs`]; 0 for [`DigestKind::Bounds`].
    pub width: usize,
    /// `[layer][G][width][D]`, or `[width][D]` for all heads alike.
    pub frame: Vec<f32>,
    /// `[layer][G][D]`, subtracted from keys before their signs are taken. The order of products
    /// with a query is the same with and without it, and signs say more about centred keys.
    pub mean: Vec<f32>,
    /// `[layer][G][width]`, by which a query's products with the frame are multiplied; 1 if empty. A
    /// frame whose rows were divided by the roots of these leaves the products of keys and queries as
    /// they were, and has channels of more equal size.
    pub weights: Vec<f32>,
}

impl Digest {
    /// Bytes beside one head's part of a page.
    pub fn page_bytes(&self, page_len: usize, d: usize) -> usize {
        match self.kind {
            DigestKind::Signs => page_len * self.width / 8,
            DigestKind::Channels => page_len * (self.width + 2),
            DigestKind::Nibbles => page_len * (self.width.next_multiple_of(8) / 2 + 2),
            DigestKind::Bounds => 2 * d * 2,
        }
    }

    /// Whether all heads have the same frame.
    pub fn has_one_frame(&self, d: usize) -> bool {
        self.frame.len() == self.width * d
    }

    /// The frame of one head, `[width][D]`; `head` counts layers and heads together.
    pub fn frame_of(&self, head: usize, d: usize) -> &[f32] {
        let head = if self.has_one_frame(d) { 0 } else { head };
        &self.frame[head * self.width * d..][..self.width * d]
    }

    /// The mean of one head, `[D]`.
    pub fn mean_of(&self, head: usize, d: usize) -> &[f32] {
        &self.mean[head * d..][..d]
    }

    /// The weights of one head, `[width]`, or nothing if all are 1.
    pub fn weights_of(&self, head: usize) -> &[f32] {
        if self.weights.is_empty() { &[] } else { &self.weights[head * self.width..][..self.width] }
    }
}

/// By what places are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreBy {
    /// By the keys themselves: the yardstick.
    Keys,
    /// By the digest of this number, in the order in which the device was given them.
    Digest(usize),
}

/// One question: how well the first places of a sequence fit the queries of one key/value head.
///
/// The answer is one number for each place, larger for better ones:
///
/// - signs: how many bits agree, summed over the query heads of the group;
/// - keys and channels: the bits of an `f32`, the sum over the group of the softmax over all places
///   that were asked for, of scaled products;
/// - bounds: the same of the largest product that a key of the page could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The sequence's number in the batch; it has one row there.
    pub seq: u32,
    /// The key/value head.
    pub head: u32,
    /// By what.
    pub by: ScoreBy,
    /// Places `0..n` are scored.
    pub n: u32,
    /// Where the answer begins.
    pub at: usize,
}

/// What one key/value head of a sequence's only row sees.
///
/// ```text
///   [ 0 .. n_first )  [ places, ascending ]  [ tail .. kv_len )
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick<'a> {
    /// The sequence's number in the batch; it has one row there.
    pub seq: u32,
    /// The key/value head.
    pub head: u32,
    /// Places before this are seen.
    pub n_first: u32,
    /// Places between, ascending, each once.
    pub places: &'a [u32],
    /// Places from here on are seen.
    pub tail: u32,
    /// Where `places` are near, as [`Bring::rows`](crate::Bring::rows) put them; empty where they
    /// were not brought.
    pub rows: &'a [u32],
}

/// How the similarities of a group's query heads become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// The harmonic mean, weighted by importance.
    Harmonic,
    /// The least.
    Least,
    /// The mean.
    Mean,
}

/// When a selection is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReuseRule {
    /// How a group's similarities become one.
    pub mix: Mix,
    /// After so many steps in any case.
    pub max_age: Option<u32>,
}

/// What decides about one key/value head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadNumbers {
    /// The similarity that a query must keep.
    pub threshold: f32,
    /// The similarity from which on a query that has turned is served by the selection that there is, and
    /// makes the next one after its attention; more than any query has if none is.
    pub soft: f32,
    /// Its share of rows, as a multiple of the average head's.
    pub weight: f32,
    /// `[group]` importances of its query heads.
    pub importances: Vec<f32>,
}

/// What a device decides by that decides by itself. What is to be decided is said by the functions of
/// `attention::topk`, to the last bit where scores are equal.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// By what places are scored.
    pub by: ScoreBy,
    /// Percent of the places between sinks and tail that a selection has,
    pub percent: f64,
    /// but at least so many,
    pub k_min: u32,
    /// and at most.
    pub k_max: u32,
    /// First places, always attended.
    pub sinks: u32,
    /// Last places, always attended.
    pub recent: u32,
    /// What a score loses with each place that follows it, see [`follow`].
    pub fade: u32,
    /// Rows that stay, in selections.
    pub working_set: f32,
    /// Whether all rows of a selection move, and not only those that are not there.
    pub is_whole: bool,
    /// When a selection is made again; at each step if nothing is said.
    pub reuse: Option<ReuseRule>,
    /// Whether anything is chosen, and not only sinks and the last places attended.
    pub has_choice: bool,
    /// Layers before this one see everything.
    pub first_layer: u32,
    /// `[layer][G]`, all layers of the model.
    pub heads: Vec<HeadNumbers>,
}

impl Rules {
    /// Whether selections may be made after the attention that asks for them.
    pub fn is_soft(&self) -> bool {
        self.reuse.is_some() && self.heads.iter().any(|head| head.soft <= 1.0)
    }
}

/// A sequence of the batch about whose only row the device decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deciding {
    /// Its number in the batch.
    pub seq: u32,
    /// Its table.
    pub table_row: u32,
    /// By which of the rules, in the order in which the device was given them.
    pub rules: u32,
    /// Whether what is remembered of the table's sequence is to be forgotten first.
    pub is_new: bool,
}

/// What the last look at a selection found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// There is nothing to choose from.
    Nothing,
    /// There was no selection yet.
    First,
    /// It serves.
    Hit,
    /// The query has turned away.
    Turned,
    /// The query has turned by a right angle or more.
    TurnedFar,
    /// The query has turned away, but it serves once more, and the next one is made.
    Late,
    /// The selection is too old.
    Aged,
    /// Nobody asked.
    Always,
}

/// What was last decided about one head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decided {
    /// Whether the last selection served,
    pub found: Found,
    /// and how similar the query was.
    pub similarity: f32,
    /// Rows of the selection, 0 if none was made.
    pub n_chosen: u32,
    /// Rows that moved.
    pub n_moved: u32,
    /// Rows of the working set.
    pub n_members: u32,
    /// Places before this are seen.
    pub n_first: u32,
    /// Places from here on are seen.
    pub tail: u32,
    /// Rows of the working set that the step has seen, and where its tail began: the same, unless a
    /// selection was made afterwards.
    pub seen: (u32, u32),
}

/// Places of one head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecidedPlaces {
    /// The last selection, ascending.
    pub chosen: Vec<u32>,
    /// The working set, ascending.
    pub members: Vec<u32>,
}

/// Which places are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Best {
    /// Places before this one are none to choose from.
    pub first: u32,
    /// How many are chosen.
    pub k: usize,
    /// What a score loses with each place that follows it, see [`follow`]; 0 if places stand for
    /// themselves.
    pub fade: u32,
}

/// Places after a good one that are good because of it.
pub const N_FOLLOWERS: usize = 7;

/// Gives each place the largest of its own score and of those of the [`N_FOLLOWERS`] places before it,
/// less `fade` for each step between.
///
/// What is copied from a text is read on, token by token: the places after the best one are asked for
/// next, and a selection that has them serves longer.
pub fn follow(scores: &[u32], fade: u32, out: &mut Vec<u32>) {
    out.clear();
    out.extend((0..scores.len()).map(|place| {
        let before = (0..=N_FOLLOWERS.min(place) as u32).zip(scores[..=place].iter().rev());
        before
            .map(|(step, score)| score.saturating_sub(step.saturating_mul(fade)))
            .max()
            .unwrap_or(0)
    }));
}

/// The `k` places with the largest scores among `first..scores.len()`, ascending; of equal scores
/// the first. All of them if there are not more than `k`.
pub fn select(scores: &[u32], best: Best, chosen: &mut Vec<u32>) {
    chosen.clear();
    let Best { first, k, fade } = best;
    let mut middle = &scores[(first as usize).min(scores.len())..];
    let mut followed = Vec::new();
    if fade > 0 {
        follow(middle, fade, &mut followed);
        middle = &followed;
    }
    if k >= middle.len() {
        chosen.extend(first..first + middle.len() as u32);
        return;
    }
    if k == 0 {
        return;
    }
    // The largest threshold that at least k scores reach.
    let (mut low, mut high) = (0, u32::MAX);
    while low < high {
        let middle_value = low + (high - low).div_ceil(2);
        let n = middle.iter().filter(|&&score| score >= middle_value).count();
        if n >= k {
            low = middle_value;
        } else {
            high = middle_value - 1;
        }
    }
    let n_above = middle.iter().filter(|&&score| score > low).count();
    let mut n_equal = k - n_above;
    for (place, &score) in (first..).zip(middle) {
        if score > low {
            chosen.push(place);
        } else if score == low && n_equal > 0 {
            chosen.push(place);
            n_equal -= 1;
        }
    }
}

/// The signs of a key, or of a query with no mean, in words of 64 bits.
pub fn signs(frame: &[f32], mean: Option<&[f32]>, x: &[f32]) -> Vec<u64> {
    let d = x.len();
    let mut words = vec![0u64; frame.len() / d / 64];
    for (bit, row) in frame.chunks_exact(d).enumerate() {
        let mut sum = 0.0f32;
        for (e, (&w, &x)) in row.iter().zip(x).enumerate() {
            sum += w * (x - mean.map_or(0.0, |mean| mean[e]));
        }
        words[bit / 64] |= u64::from(sum > 0.0) << (bit % 64);
    }
    words
}

/// A key's products with the rows of a frame in eight bits, and what each of them stands for: the
/// largest is 127.
pub fn channels(products: &[f32]) -> (Vec<i8>, f16) {
    let most = products.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let unit = f16::from_f32(most / 127.0);
    let scale = if unit > f16::ZERO { 1.0 / unit.to_f32() } else { 0.0 };
    (products.iter().map(|x| (x * scale).round() as i8).collect(), unit)
}

/// A key's products with the rows of a frame in four bits, and what one stands for: 8 is nothing, and
/// the largest is 7 away from it.
pub fn nibbles(products: &[f32]) -> (Vec<u8>, f16) {
    let most = products.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let unit = f16::from_f32(most / 7.0);
    let scale = if unit > f16::ZERO { 1.0 / unit.to_f32() } else { 0.0 };
    let code = |x: &f32| (nearest((x * scale).clamp(-8.0, 7.0)) as i8 + 8).cast_unsigned();
    (products.iter().map(code).collect(), unit)
}

/// What `f32::round` gives, of small numbers and without a call; 0 for what is no number.
fn nearest(x: f32) -> i32 {
    let whole = x as i32;
    let rest = x - whole as f32;
    whole + i32::from(rest >= 0.5) - i32::from(rest <= -0.5)
}

/// A query's products with the rows of a frame in eight bits, and what one stands for: the largest is
/// 127. Queries that are nearly nothing, or no numbers, are nothing.
pub fn query_codes(products: &[f32]) -> (impl Iterator<Item = i8>, f32) {
    let most = products.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let is_something = most > 1e-30 && most < f32::INFINITY;
    let (scale, unit) = if is_something { (127.0 / most, most / 127.0) } else { (0.0, 0.0) };
    (products.iter().map(move |x| nearest(x * scale) as i8), unit)
}

/// The product of a key in four bits and a query in eight, in units of both.
pub fn nibble_product(key: &[u8], query: &[i8]) -> i32 {
    key.iter().zip(query).map(|(&k, &q)| (i32::from(k) - 8) * i32::from(q)).sum()
}

/// Bits that agree.
pub fn agreement(a: &[u64], b: &[u64]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (!(a ^ b)).count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_chosen_and_ties_go_to_the_first() {
        let mut chosen = Vec::new();
        let mut state = 7u32;
        for n in 0..60u32 {
            for k in [0, 1, 2, 7, 30, 59, 60, 100] {
                for first in [0, 1, 5] {
                    let mut scores = Vec::new();
                    for _ in 0..n {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        scores.push(if k % 2 == 0 { (state >> 24) % 9 } else { state });
                    }
                    select(&scores, Best { first, k, fade: 0 }, &mut chosen);
                    let mut naive: Vec<u32> = (first..n.max(first)).collect();
                    naive.sort_by_key(|&i| (std::cmp::Reverse(scores[i as usize]), i));
                    naive.truncate(k);
                    naive.sort_unstable();
                    assert_eq!(chosen, naive, "{scores:?} from {first}, {k}");
                }
            }
        }
    }

    #[test]
    fn whole_numbers_in_four_and_in_eight_bits_stand_for_themselves() {
        let (key, unit) = nibbles(&[7.0, -7.0, 0.0, 3.0]);
        assert_eq!((&key[..], unit.to_f32()), (&[15, 1, 8, 11][..], 1.0));
        let collected = |products: &[f32]| {
            let (codes, unit) = query_codes(products);
            (codes.collect::<Vec<i8>>(), unit)
        };
        let (query, of_query) = collected(&[-127.0, 5.0, 60.0, 0.4]);
        assert_eq!((&query[..], of_query), (&[-127, 5, 60, 0][..], 1.0));
        assert_eq!(nibble_product(&key, &query), -7 * 127 - 7 * 5);
        assert_eq!(nibbles(&[0.0; 3]).0, [8; 3]);
        for nothing in [[0.0; 2], [f32::NAN, 0.0], [f32::INFINITY, 1.0], [1e-40, 0.0]] {
            assert_eq!(collected(&nothing), (vec![0; 2], 0.0));
        }
    }

    #[test]
    fn the_nearest_is_the_one_that_rounding_gives() {
        let halves = (-260..260).map(|i| i as f32 / 2.0);
        for x in halves.flat_map(|x| [x.next_down(), x, x.next_up()]) {
            assert_eq!(nearest(x), x.round() as i32, "{x}");
        }
        assert_eq!((nearest(f32::NAN), nearest(-0.0), nearest(1e-40)), (0, 0, 0));
    }

    #[test]
    fn places_after_a_good_one_are_chosen_with_it() {
        const HALVING: u32 = 1 << 23;
        let mut scores = vec![0.001f32.to_bits(); 64];
        (scores[3], scores[10], scores[30]) = (9f32.to_bits(), 1f32.to_bits(), 0.2f32.to_bits());
        let best = |first, k, fade| {
            let mut chosen = Vec::new();
            select(&scores, Best { first, k, fade }, &mut chosen);
            chosen
        };
        assert_eq!(best(5, 2, 0), [10, 30]);
        // 1, a half, a quarter, then 0.2.
        assert_eq!(best(5, 4, HALVING), [10, 11, 12, 30]);
        // The seventh place has a 128th and the eighth nothing; what comes first leads nobody.
        let all: Vec<u32> = [5].into_iter().chain(10..18).chain(30..38).collect();
        assert_eq!(best(5, 17, HALVING), all);
        assert_eq!(best(5, 9, 2 * HALVING), [10, 11, 12, 13, 14, 30, 31, 32, 33]);
    }

    #[test]
    fn signs_of_centred_keys() {
        // Two frames' rows along the axes; 64 rows in all.
        let mut frame = vec![0.0; 128];
        (frame[0], frame[3]) = (1.0, 1.0);
        let words = signs(&frame, Some(&[1.0, -1.0]), &[1.5, -2.0]);
        assert_eq!(words, [0b01]);
        assert_eq!(signs(&frame, None, &[1.5, 2.0]), [0b11]);
        assert_eq!(agreement(&[0b01], &[0b11]), 63);
    }
}
