//! What it costs to move pages and to compute tokens, learned from what steps took.
//!
//! A step's pass takes about `token_nanos * tokens + pair_nanos * pairs`, where a token makes one
//! pair with itself and one with each token before it, because attention looks at all of them. The
//! two rates are fitted to the steps that compute prompts, by least squares in which older steps
//! count less and less. Steps that mostly decode are left out: they wait for the weights, and say
//! little about a prompt.

use std::ops::Range;

/// What it costs to move a page and to compute a token, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// One page copied between the tiers.
    pub page_nanos: f64,
    /// One page brought from a disk.
    pub disk_nanos: f64,
    /// One page brought from a store somewhere else.
    pub remote_nanos: f64,
    /// One token of a prompt computed, without attention.
    pub token_nanos: f64,
    /// What each token computed adds for itself and for each token before it.
    pub pair_nanos: f64,
}

impl Default for Rates {
    /// A guess for the time before anything was measured: a prompt at 10,000 tokens a second, and
    /// pages that cost next to nothing, because only who copies one learns what it costs.
    fn default() -> Self {
        let (page_nanos, disk_nanos, remote_nanos) = (1_000.0, 2_000.0, 2_000.0);
        Rates { page_nanos, disk_nanos, remote_nanos, token_nanos: 100_000.0, pair_nanos: 10.0 }
    }
}

impl Rates {
    /// Whether anything was computed that says what computing takes.
    pub fn is_measured(&self) -> bool {
        self.token_nanos != Rates::default().token_nanos
    }

    /// Taking pages to the host and bringing them back.
    pub fn swap(&self, n_pages: u32) -> f64 {
        2.0 * self.page_nanos * f64::from(n_pages)
    }

    /// Bringing pages from something slower than the host.
    pub fn load(&self, pages: StoredPages) -> f64 {
        self.disk_nanos * f64::from(pages.n_disk) + self.remote_nanos * f64::from(pages.n_remote)
    }

    /// Computing the tokens at these positions.
    pub fn compute(&self, positions: Range<u32>) -> f64 {
        self.pass(Work::of(positions))
    }

    /// A pass that computes prompts.
    pub(crate) fn pass(&self, work: Work) -> f64 {
        self.token_nanos * work.n_tokens + self.pair_nanos * work.n_pairs
    }

    /// The fewest pages that must come before one, so that bringing it back from the host costs less
    /// than computing it again; `u32::MAX` when that is never so.
    pub fn demotion_depth(&self, page_len: u32) -> u32 {
        let cost = |depth: u32| self.compute(depth * page_len..(depth + 1) * page_len);
        let first = cost(0);
        if self.page_nanos < first {
            return 0;
        }
        // What one page more before it adds.
        let slope = self.pair_nanos * f64::from(page_len) * f64::from(page_len);
        if slope <= 0.0 {
            return u32::MAX;
        }
        // A float that is too large for the integer becomes the largest one.
        ((self.page_nanos - first) / slope).floor().min(f64::from(u32::MAX - 1)) as u32 + 1
    }
}

/// What is slower than the host and has pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A disk.
    Disk,
    /// A store somewhere else.
    Remote,
}

/// Pages that something slower than the host has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredPages {
    /// Those of a disk.
    pub n_disk: u32,
    /// Those that only a store somewhere else has.
    pub n_remote: u32,
}

/// What a step computes, in the terms of the rates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    n_tokens: f64,
    n_pairs: f64,
}

impl Work {
    /// The work of computing the tokens at these positions.
    pub(crate) fn of(positions: Range<u32>) -> Self {
        let (start, end) = (f64::from(positions.start), f64::from(positions.end));
        let n_tokens = end - start;
        Work { n_tokens, n_pairs: n_tokens * (start + end + 1.0) / 2.0 }
    }

    pub(crate) fn add(&mut self, other: Work) {
        self.n_tokens += other.n_tokens;
        self.n_pairs += other.n_pairs;
    }
}

/// The rates, and what they are made from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    rates: Rates,
    pages: f64,
    page_nanos: f64,
    /// Pages from each source, and what they took.
    loads: [(f64, f64); 2],
    /// Sums over steps of the products of tokens, pairs and nanoseconds.
    tokens_tokens: f64,
    tokens_pairs: f64,
    pairs_pairs: f64,
    tokens_nanos: f64,
    pairs_nanos: f64,
}

/// What remains of a measurement's weight after each later one; about the last ten count. Guessed.
const DECAY: f64 = 0.9;
/// What remains of the believed cost of a page after each pass over prompts without a copy or a load.
/// If these seemed too dear once, for whatever cause, they are tried again some hundred passes later.
/// Guessed.
const DOUBT: f64 = 0.995;

impl Meter {
    pub(crate) fn rates(&self) -> Rates {
        self.rates
    }

    /// Takes in that `n_pages` were copied between the tiers.
    pub(crate) fn copied(&mut self, n_pages: u32, nanos: u64) {
        self.pages = DECAY * self.pages + f64::from(n_pages);
        self.page_nanos = DECAY * self.page_nanos + nanos as f64;
        self.rates.page_nanos = self.page_nanos / self.pages;
    }

    /// Takes in that something slower than the host brought `n_pages`.
    pub(crate) fn loaded(&mut self, source: Source, n_pages: u32, nanos: u64) {
        let (pages, total) = &mut self.loads[source as usize];
        *pages = DECAY * *pages + f64::from(n_pages);
        *total = DECAY * *total + nanos as f64;
        *match source {
            Source::Disk => &mut self.rates.disk_nanos,
            Source::Remote => &mut self.rates.remote_nanos,
        } = *total / *pages;
    }

    /// Takes in what a pass over prompts took.
    pub(crate) fn computed(&mut self, work: Work, nanos: u64) {
        self.rates.page_nanos *= DOUBT;
        self.rates.disk_nanos *= DOUBT;
        self.rates.remote_nanos *= DOUBT;
        // Thousands keep the squares of long prompts well inside a float's precision.
        let (tokens, pairs) = (work.n_tokens / 1e3, work.n_pairs / 1e3);
        let nanos = nanos as f64;
        let sums = [
            (&mut self.tokens_tokens, tokens * tokens),
            (&mut self.tokens_pairs, tokens * pairs),
            (&mut self.pairs_pairs, pairs * pairs),
            (&mut self.tokens_nanos, tokens * nanos),
            (&mut self.pairs_nanos, pairs * nanos),
        ];
        for (sum, product) in sums {
            *sum = DECAY * *sum + product;
        }
        let (token_nanos, pair_nanos) = self.fit();
        self.rates.token_nanos = token_nanos / 1e3;
        self.rates.pair_nanos = pair_nanos / 1e3;
    }

    /// The rates of the least squared error, neither below 0.
    fn fit(&self) -> (f64, f64) {
        let det = self.tokens_tokens * self.pairs_pairs - self.tokens_pairs * self.tokens_pairs;
        // Steps that are all alike cannot tell the two rates apart.
        if det > 1e-6 * self.tokens_tokens * self.pairs_pairs {
            let token =
                (self.tokens_nanos * self.pairs_pairs - self.pairs_nanos * self.tokens_pairs) / det;
            let pair = (self.pairs_nanos * self.tokens_tokens
                - self.tokens_nanos * self.tokens_pairs)
                / det;
            if token >= 0.0 && pair >= 0.0 {
                return (token, pair);
            }
            if token < 0.0 {
                return (0.0, self.pairs_nanos / self.pairs_pairs);
            }
        }
        (self.tokens_nanos / self.tokens_tokens, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_found_again_and_follow_a_change() {
        let mut meter = Meter::default();
        assert_eq!(meter.rates(), Rates::default());
        assert!(!meter.rates().is_measured());
        for rates in [(50_000.0, 20.0), (400.0, 3.0)] {
            let (token_nanos, pair_nanos) = rates;
            let (page_nanos, disk_nanos, remote_nanos) = (7e4, 3e5, 9e5);
            let truth = Rates { page_nanos, disk_nanos, remote_nanos, token_nanos, pair_nanos };
            for i in 0..200 {
                let start = (i % 7) * 512;
                let nanos = truth.compute(start..start + 512);
                meter.computed(Work::of(start..start + 512), nanos as u64);
            }
            meter.copied(3, 210_000);
            meter.loaded(Source::Disk, 2, 600_000);
            meter.loaded(Source::Remote, 1, 900_000);
            let found = meter.rates();
            assert!(found.is_measured());
            assert!((found.disk_nanos / truth.disk_nanos - 1.0).abs() < 1e-9, "{found:?}");
            assert!((found.remote_nanos / truth.remote_nanos - 1.0).abs() < 1e-9, "{found:?}");
            assert!((found.token_nanos / truth.token_nanos - 1.0).abs() < 0.01, "{found:?}");
            assert!((found.pair_nanos / truth.pair_nanos - 1.0).abs() < 0.01, "{found:?}");
            assert!((found.page_nanos / truth.page_nanos - 1.0).abs() < 1e-9, "{found:?}");
        }
    }

    #[test]
    fn rates_stay_sane_whatever_was_measured() {
        let mut meter = Meter::default();
        for (start, end, nanos) in [(0, 1, 1), (0, 1, 1), (5, 900, 0), (0, 4, u64::MAX), (3, 4, 9)]
        {
            meter.computed(Work::of(start..end), nanos);
            let Rates { token_nanos, pair_nanos, .. } = meter.rates();
            assert!(token_nanos >= 0.0 && token_nanos.is_finite(), "{token_nanos}");
            assert!(pair_nanos >= 0.0 && pair_nanos.is_finite(), "{pair_nanos}");
        }
    }

    #[test]
    fn the_depth_is_where_loading_begins_to_pay() {
        for (page_nanos, token_nanos, pair_nanos) in
            [(1e5, 1e3, 10.0), (1e5, 1e5, 0.0), (1e5, 0.0, 1.0), (5e3, 300.0, 0.7)]
        {
            let rates = Rates { page_nanos, token_nanos, pair_nanos, ..Rates::default() };
            let cost = |depth: u32| rates.compute(depth * 16..(depth + 1) * 16);
            let depth = rates.demotion_depth(16);
            assert!(cost(depth) > page_nanos);
            assert!(depth == 0 || cost(depth - 1) <= page_nanos);
        }
        let never =
            Rates { page_nanos: 1e9, token_nanos: 1.0, pair_nanos: 0.0, ..Rates::default() };
        assert_eq!(never.demotion_depth(16), u32::MAX);
    }
}
