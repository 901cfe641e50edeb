//! Queries that are made up for steps: how they change from one to the next.
//!
//! Those of a key/value head stay near the one before, or turn away from it, at the rate that is asked for; or they lie around
//! a centre, and are far from it now and then; or they turn as often as the heads of a recorded trace did
//! (`eval/sparse/heads.py`), so that adjacent cosines and selections have as much in common as those of the trace.

use std::error::Error;

use nuthatch_backend::topk::cosine;

use crate::step::Shape;

/// A query that stays has this cosine with the one before, and one that turns away this one, unless
/// `cosine=PERCENT` says another.
const STAYS: f32 = 0.995;
pub(crate) const TURNS: f32 = 0.7;
/// The cosine of two queries around a centre, if neither is far from it.
const CALM: f32 = 0.98;

/// As in a trace: the cosine of queries that look for the same, and of those that do not;
const SAME: f32 = 0.9;
const OTHER: f32 = 0.735;
/// what a lookup must reach;
pub(crate) const TRACED_THRESHOLD: f32 = 0.82;
/// how much of the difference is in the channels by which keys are chosen, of queries that look for the same, and of those
/// that do not;
const SEEN_SAME: f32 = 0.02;
const SEEN_OTHER: f32 = 0.18;
/// how long queries are;
const LENGTH: f32 = 8.0;
/// and by which power of e all heads are more or less likely to turn in one step.
const UNEVEN: f32 = 0.9;
/// Channels by which keys are chosen, of each half of a head.
pub(crate) const SEEN: usize = 16;

/// Small numbers that their seed determines.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1 << 24) as f32
    }

    fn bell(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// How queries change from step to step: so many heads in a hundred turn away, to this cosine.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) percent: u32,
    pub(crate) cosine: f32,
    pub(crate) way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the query before.
    Away,
    /// For one step, from those around their centre.
    Around,
    /// As often as heads of a trace; percent and cosine do not count.
    Traced,
}

/// What heads of a recorded trace did, `[layer][head]`: the share of lookups that missed, and the rows of a working set as a
/// share of the context.
pub(crate) struct Traced(Vec<Vec<(f32, f32)>>);

impl Traced {
    /// What `eval/sparse/heads.py` wrote.
    pub(crate) fn read(path: &str) -> Result<Self, Box<dyn Error>> {
        let layers: Vec<Vec<(f32, f32)>> = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        match layers.iter().any(Vec::is_empty) || layers.is_empty() {
            true => Err(format!("{path} has no heads").into()),
            false => Ok(Traced(layers)),
        }
    }

    /// Of a head of a model that may have more layers and heads.
    pub(crate) fn of(&self, shape: &Shape, (layer, head): (usize, usize)) -> (f32, f32) {
        let heads = &self.0[layer * self.0.len() / shape.n_layers as usize];
        heads[head * heads.len() / shape.n_kv_heads as usize]
    }

    /// The groups of so many heads of a model, those first of which most rows come.
    pub(crate) fn hardest(&self, shape: &Shape, n_together: u32) -> Vec<u32> {
        let place =
            |head: u32| ((head / shape.n_kv_heads) as usize, (head % shape.n_kv_heads) as usize);
        let rows = |group: u32| -> f32 {
            (group * n_together..(group + 1) * n_together)
                .map(|head| self.of(shape, place(head)))
                .map(|(misses, rows)| misses * rows)
                .sum()
        };
        let mut groups: Vec<u32> = (0..shape.n_layers * shape.n_kv_heads / n_together).collect();
        groups.sort_by(|&a, &b| rows(b).total_cmp(&rows(a)));
        groups
    }
}

/// How much more or less likely than usually heads are to turn in a step.
pub(crate) fn unevenness(step: usize) -> f32 {
    // Steps of the golden section are as even as can be.
    let unit = (step as f32 * 0.618_034).fract();
    (UNEVEN * (2.0 * unit - 1.0)).exp()
}

/// The queries of one row in one layer.
pub(crate) struct Queries {
    random: Random,
    /// `[G][group D]`
    heads: Vec<Vec<f32>>,
    centres: Vec<Vec<f32>>,
    /// What heads look for.
    aims: Vec<Vec<f32>>,
    head_dim: usize,
    /// `[G]` how often heads turn, if that is as in a trace.
    rates: Vec<f32>,
    /// Cosines of queries with those before, added up, and how many.
    pub(crate) adjacent: (f64, u32),
}

impl Queries {
    pub(crate) fn new(
        shape: &Shape,
        (layer, seq): (usize, usize),
        traced: Option<&Traced>,
    ) -> Self {
        let mut random = Random((9 + 1000 * seq + 1_000_000 * layer) as u64);
        let group = (shape.n_heads / shape.n_kv_heads * shape.head_dim) as usize;
        let heads = (0..shape.n_kv_heads).map(|_| (0..group).map(|_| random.bell()).collect());
        let heads: Vec<Vec<f32>> = heads.collect();
        let rate = |head: usize| traced.map_or(0.0, |traced| traced.of(shape, (layer, head)).0);
        let rates = (0..heads.len()).map(rate).collect();
        let (centres, aims) = (heads.clone(), heads.clone());
        let head_dim = shape.head_dim as usize;
        Queries { random, centres, aims, heads, head_dim, rates, adjacent: (0.0, 0) }
    }

    /// The next step's, in which heads are so much more likely to turn than usually.
    pub(crate) fn next(&mut self, turn: Turn, more: f32) -> Vec<f32> {
        for i in 0..self.heads.len() {
            let before = self.heads[i].clone();
            let after = match turn.way {
                Way::Traced => self.traced(i, more),
                Way::Away | Way::Around => self.turned(i, turn),
            };
            let adjacent = cosine(&after, &before);
            self.adjacent = (self.adjacent.0 + f64::from(adjacent), self.adjacent.1 + 1);
            self.heads[i] = after;
        }
        self.heads.concat()
    }

    fn turned(&mut self, i: usize, turn: Turn) -> Vec<f32> {
        let turns = self.random.unit() * 100.0 < turn.percent as f32;
        let is_around = turn.way == Way::Around;
        let (from, cosine) = match (is_around, turns) {
            (false, false) => (&self.heads[i], STAYS),
            (false, true) => (&self.heads[i], turn.cosine),
            (true, false) => (&self.centres[i], CALM.sqrt()),
            (true, true) => (&self.centres[i], turn.cosine / CALM.sqrt()),
        };
        mixed(from, cosine, || self.random.bell())
    }

    /// A head turns to something else, or goes on.
    fn traced(&mut self, i: usize, more: f32) -> Vec<f32> {
        let rate = self.rates[i];
        if self.random.unit() < rate * more / (1.0 - rate + rate * more) {
            self.aims[i] = self.differing(&self.centres[i].clone(), OTHER / SAME, SEEN_OTHER);
        }
        let aim = self.aims[i].clone();
        let query = self.differing(&aim, SAME, SEEN_SAME);
        query.into_iter().map(|x| LENGTH * x).collect()
    }

    /// Something else, so that two of these have such a cosine, with so much of what differs in the channels by which keys are chosen.
    fn differing(&mut self, from: &[f32], cosine: f32, seen: f32) -> Vec<f32> {
        let half = self.head_dim / 2;
        let share = SEEN as f32 / half as f32;
        let sizes = [(seen / share).sqrt(), ((1.0 - seen) / (1.0 - share)).sqrt()];
        let mut e = 0;
        mixed(from, cosine.sqrt(), || {
            let size = sizes[usize::from(e % half >= SEEN)];
            e += 1;
            size * self.random.bell()
        })
    }
}

/// A vector that has this cosine with another.
fn mixed(from: &[f32], cosine: f32, mut random: impl FnMut() -> f32) -> Vec<f32> {
    let sine = (1.0 - cosine * cosine).sqrt();
    from.iter().map(|from| cosine * from + sine * random()).collect()
}
