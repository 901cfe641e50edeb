//! Distributions: histograms as Prometheus has them, and percentiles of the last while.

use std::collections::VecDeque;
use std::time::Duration;

/// How often a value was in which range.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    /// Upper ends of the ranges, which include them.
    bounds: &'static [f64],
    /// One more than there are bounds: the last has none.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        Histogram { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub(crate) fn add(&mut self, value: f64) {
        let range = self.bounds.partition_point(|&bound| bound < value);
        self.counts[range] += 1;
        self.sum += value;
    }

    pub(crate) fn sum(&self) -> f64 {
        self.sum
    }

    /// Each bound with the number of values up to it; the last is infinite and has all.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().scan(0, |total, &count| {
            *total += count;
            Some(*total)
        }))
    }

    pub(crate) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// The values of the last while, for percentiles.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent {
    values: VecDeque<(Duration, f64)>,
}

impl Recent {
    /// Values that are kept.
    const N_MAX: usize = 4096;
    /// How long a value counts.
    const WHILE: Duration = Duration::from_secs(60);

    pub(crate) fn add(&mut self, now: Duration, value: f64) {
        if self.values.len() == Self::N_MAX {
            self.values.pop_front();
        }
        self.values.push_back((now, value));
    }

    /// The values below which these shares of all are; nothing without values.
    pub(crate) fn percentiles<const N: usize>(
        &self,
        now: Duration,
        shares: [f64; N],
    ) -> Option<[f64; N]> {
        let since = now.saturating_sub(Self::WHILE);
        let recent = self.values.iter().filter(|(at, _)| *at >= since);
        let mut values: Vec<f64> = recent.map(|&(_, value)| value).collect();
        values.sort_unstable_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        Some(shares.map(|share| values[(share * last as f64).round() as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_the_range_below() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 9.0] {
            histogram.add(value);
        }
        let ranges: Vec<_> = histogram.cumulative().collect();
        assert_eq!(ranges, [(1.0, 2), (2.0, 4), (f64::INFINITY, 5)]);
        assert_eq!((histogram.sum(), histogram.count()), (14.0, 5));
    }

    #[test]
    fn percentiles_are_of_the_last_minute() {
        let mut recent = Recent::default();
        let at = Duration::from_secs;
        assert_eq!(recent.percentiles(at(0), [0.5]), None);
        (0..=100).for_each(|value| recent.add(at(1), f64::from(value)));
        assert_eq!(recent.percentiles(at(2), [0.0, 0.5, 0.99]), Some([0.0, 50.0, 99.0]));
        recent.add(at(70), 7.0);
        assert_eq!(recent.percentiles(at(80), [0.5]), Some([7.0]));
        (0..9000).for_each(|_| recent.add(at(90), 1.0));
        assert_eq!(recent.values.len(), Recent::N_MAX);
    }
}
