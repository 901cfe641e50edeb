//! What a simulation says, in numbers.

use serde::Serialize;

use super::workload::{Request, Workload};
use super::world::{Curves, Outcome, Times};

/// How one policy served one workload. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Metrics {
    /// Time to the first token.
    pub(super) ttft: Spread,
    /// Time to the last token.
    pub(super) end_to_end: Spread,
    /// Tokens of answers in a second, from the first arrival to the last end.
    pub(super) tokens_per_s: f64,
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Requests that were refused, later turns of their chats included.
    pub(super) refused: u64,
    pub(super) preemptions: u64,
    /// Those of them whose pages went to the host.
    pub(super) swaps: u64,
    /// Requests that started with pages on the host.
    pub(super) spilled: u64,
    /// Tokens that were computed again after a preemption.
    pub(super) recomputed_tokens: u64,
    /// Tokens of prompts.
    pub(super) prompt_tokens: u64,
    /// Those of them that the cache held.
    pub(super) cached_tokens: u64,
    /// See [`fairness`].
    pub(super) fairness: f64,
    /// The mean time to the first token of the tenant for whom it is longest.
    pub(super) worst_tenant_ttft: f64,
    /// Times to the first token of some.
    pub(super) ttft_urgent: Spread,
    pub(super) ttft_heavy: Spread,
    pub(super) ttft_others: Spread,
    pub(super) ttft_long: Spread,
}

/// Mean and percentiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
}

impl Spread {
    /// Of any numbers; zeros of none.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            return Spread::default();
        }
        let rank = |share: f64| {
            let place = (share * sorted.len() as f64).ceil() as usize;
            sorted[place.clamp(1, sorted.len()) - 1]
        };
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Spread { mean, p50: rank(0.5), p99: rank(0.99) }
    }
}

/// Seconds that a request waited for its first token.
pub(super) fn ttft(times: &Times) -> f64 {
    times.first.saturating_sub(times.submitted).as_secs_f64()
}

impl Metrics {
    /// Of a simulation that has ended.
    pub(super) fn new(workload: &Workload, outcome: &Outcome) -> Self {
        let all = || {
            let both = workload.requests.iter().zip(&outcome.requests);
            both.filter_map(|(request, times)| Some((request, times.as_ref()?)))
        };
        let waits = |is_one: &dyn Fn(&Request) -> bool| {
            Spread::of(all().filter(|(request, _)| is_one(request)).map(|(_, times)| ttft(times)))
        };
        let n_answered = all().count() as u64;
        let total = |of: fn(&Request, &Times) -> u64| all().map(|(r, t)| of(r, t)).sum::<u64>();
        let n_tokens: u64 = outcome.curves.served.iter().flatten().sum();
        let counters = &outcome.stats.counters;
        let tenant_means =
            (0..workload.n_tenants).map(|tenant| waits(&|r| r.tenant == tenant).mean);
        Metrics {
            ttft: waits(&|_| true),
            end_to_end: Spread::of(
                all().map(|(_, times)| times.end.saturating_sub(times.submitted).as_secs_f64()),
            ),
            tokens_per_s: n_tokens as f64 / outcome.end.as_secs_f64().max(f64::MIN_POSITIVE),
            answered: n_answered,
            refused: workload.requests.len() as u64 - n_answered,
            preemptions: counters.preemptions,
            swaps: counters.preemptions_swap,
            spilled: counters.admissions_spilled,
            recomputed_tokens: counters.recomputed_tokens,
            prompt_tokens: total(|request, _| request.prompt.len() as u64),
            cached_tokens: total(|_, times| u64::from(times.cached)),
            fairness: fairness(&outcome.curves),
            worst_tenant_ttft: tenant_means.fold(0.0, f64::max),
            ttft_urgent: waits(&|request| request.is_urgent),
            ttft_heavy: waits(&|request| request.tenant == 0),
            ttft_others: waits(&|request| request.tenant != 0),
            ttft_long: waits(&|request| request.is_long),
        }
    }
}

/// Jain's index over the tenants, averaged over the time in which somebody waits: 1 if everyone has
/// got the same part of what is theirs.
///
/// What is theirs is the max-min share: of all tokens that were served up to a moment, each tenant
/// may have as many as it asked for, but no more than an even part of what the more modest ones
/// leave.
fn fairness(curves: &Curves) -> f64 {
    let n_tenants = curves.asked.first().map_or(0, Vec::len);
    let (mut asked, mut served) = (vec![0; n_tenants], vec![0; n_tenants]);
    let mut indices = Vec::new();
    for (asked_now, served_now) in curves.asked.iter().zip(&curves.served) {
        for (sum, now) in asked.iter_mut().zip(asked_now).chain(served.iter_mut().zip(served_now)) {
            *sum += now;
        }
        let (n_asked, n_served): (u64, u64) = (asked.iter().sum(), served.iter().sum());
        // A twentieth is always on its way, even when nobody waits.
        if n_served > 0 && n_asked > n_served + n_served / 20 {
            let shares = max_min(&asked, n_served as f64);
            let parts = served.iter().zip(&shares).filter(|&(_, &share)| share > 0.0);
            indices.push(jain(parts.map(|(&served, &share)| served as f64 / share)));
        }
    }
    if indices.is_empty() { 1.0 } else { indices.iter().sum::<f64>() / indices.len() as f64 }
}

/// Divides `total` so that nobody gets more than they asked for, and whoever gets less gets no less
/// than anybody else.
fn max_min(asked: &[u64], total: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..asked.len()).collect();
    order.sort_by_key(|&i| asked[i]);
    let mut shares = vec![0.0; asked.len()];
    let mut left = total;
    for (n_before, &i) in order.iter().enumerate() {
        let even = left / (asked.len() - n_before) as f64;
        shares[i] = even.min(asked[i] as f64);
        left -= shares[i];
    }
    shares
}

/// `(sum x)^2 / (n sum x^2)`: 1 if all are equal, 1/n if one has everything.
fn jain(values: impl Iterator<Item = f64>) -> f64 {
    let (mut n, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for value in values {
        n += 1.0;
        sum += value;
        squares += value * value;
    }
    if squares == 0.0 { 1.0 } else { sum * sum / (n * squares) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn percentiles_are_values_that_occur() {
        let spread = Spread::of((1..=200).rev().map(f64::from));
        assert_eq!((spread.mean, spread.p50, spread.p99), (100.5, 100.0, 198.0));
        assert_eq!(Spread::of([7.0]), Spread { mean: 7.0, p50: 7.0, p99: 7.0 });
        assert_eq!(Spread::of([]), Spread::default());
    }

    #[test]
    fn shares_are_max_min() {
        assert_eq!(max_min(&[10, 100, 30], 90.0), [10.0, 50.0, 30.0]);
        assert_eq!(max_min(&[10, 100, 100], 90.0), [10.0, 40.0, 40.0]);
        assert_eq!(max_min(&[1, 2, 3], 90.0), [1.0, 2.0, 3.0]);
        assert_eq!(jain([2.0, 2.0, 2.0].into_iter()), 1.0);
        assert_eq!(jain([3.0, 0.0, 0.0].into_iter()), 1.0 / 3.0);
    }

    #[test]
    fn who_takes_the_modest_ones_part_is_unfair() {
        let curves = |served: [u64; 2]| Curves {
            bin: Duration::from_secs(1),
            asked: vec![vec![100, 20]],
            served: vec![served.to_vec()],
            pages_used: vec![0],
        };
        assert_eq!(fairness(&curves([40, 20])), 1.0);
        assert!(fairness(&curves([50, 10])) < 0.9);
        assert!(fairness(&curves([60, 0])) < fairness(&curves([50, 10])));
        // Nobody waits, so nobody is treated unfairly.
        assert_eq!(fairness(&curves([100, 20])), 1.0);
    }
}
