//! Which heads had better keep all their KV on the device.

use super::head::HeadRule;
use super::policy::Policy;
use super::profile::Profile;
use super::run::{TopKShape, rules_of};

/// What adjacent queries of a head may be less similar than on the average.
const MARGIN: f32 = 0.05;

/// Heads of one layer whose selections can be fetched while another layer computes: the time that a
/// layer takes, by what the link carries, over the bytes of one head's selection.
///
/// (The published formula has the fraction upside down.)
pub fn prefetchable_heads(layer_seconds: f64, link_bytes_per_s: f64, head_bytes: f64) -> u32 {
    if head_bytes <= 0.0 {
        return u32::MAX;
    }
    (layer_seconds * link_bytes_per_s / head_bytes) as u32
}

/// The heads in the order in which they should stay: those of the first layer, for which nothing can
/// be fetched ahead, then the others, the most difficult first.
///
/// A head is the more difficult, the higher its threshold is above its average similarity less a
/// margin. `thresholds` and `similarities` are `[layer][G]`; similarities that are missing are 0.
pub(super) fn residency(
    n_kv_heads: usize,
    thresholds: &[f32],
    similarities: &[f32],
    n_prefetchable: usize,
) -> Vec<usize> {
    let similarity = |i: usize| similarities.get(i).copied().unwrap_or(0.0);
    let difficulty: Vec<f32> =
        (0..thresholds.len()).map(|i| thresholds[i] - (similarity(i) - MARGIN)).collect();
    let others = most_difficult_first(&difficulty, n_kv_heads, n_prefetchable);
    let first = 0..n_kv_heads.min(thresholds.len());
    first.chain(others.into_iter().filter(|&head| head >= n_kv_heads)).collect()
}

/// Heads by their difficulty, but the `n_prefetchable` least difficult of each layer after the first, which are left
/// to prefetching, come last.
fn most_difficult_first(
    difficulty: &[f32],
    n_kv_heads: usize,
    n_prefetchable: usize,
) -> Vec<usize> {
    let sort = |heads: &mut [usize]| {
        heads.sort_by(|&a, &b| difficulty[b].total_cmp(&difficulty[a]).then(a.cmp(&b)));
    };
    let heads: Vec<usize> = (0..difficulty.len()).collect();
    let (mut order, mut left) = (Vec::new(), Vec::new());
    for (layer, heads) in heads.chunks(n_kv_heads.max(1)).enumerate() {
        let mut heads = heads.to_vec();
        sort(&mut heads);
        let n_left = if layer == 0 { 0 } else { n_prefetchable };
        let (stay, prefetched) = heads.split_at(heads.len().saturating_sub(n_left));
        order.extend_from_slice(stay);
        left.extend_from_slice(prefetched);
    }
    sort(&mut order);
    sort(&mut left);
    order.extend(left);
    order
}

/// The layers that own keys and values, those first that should stay on the device where not all can: those that
/// attend to everything, then those of which most rows come.
pub fn hardest_layers(shape: &TopKShape, policies: &[Policy], profile: &Profile) -> Vec<u32> {
    let heads = rows_that_come(shape, policies, profile);
    let layers: Vec<f32> =
        heads.chunks(shape.n_kv_heads.max(1)).map(|heads| heads.iter().sum()).collect();
    countable(most_difficult_first(&layers, 1, 0))
}

/// The heads of layers that do not attend to everything, counting those of all layers, in such an order; rows of
/// `n_prefetchable` heads of a layer come in time.
pub fn hardest_heads(
    shape: &TopKShape,
    policies: &[Policy],
    profile: &Profile,
    n_prefetchable: usize,
) -> Vec<u32> {
    let rows = rows_that_come(shape, policies, profile);
    let mut heads = most_difficult_first(&rows, shape.n_kv_heads, n_prefetchable);
    heads.retain(|&head| rows[head].is_finite());
    countable(heads)
}

fn countable(all: Vec<usize>) -> Vec<u32> {
    all.into_iter().map(|i| u32::try_from(i).expect("layers and heads of a model")).collect()
}

/// `[layer][G]` how many rows come to each head, by a measure of its own: difficult heads that choose much, by the
/// first policy; all rows in layers that attend to everything. The same for all heads where layers share keys and
/// values, and a profile says nothing about whose rows would come.
fn rows_that_come(shape: &TopKShape, policies: &[Policy], profile: &Profile) -> Vec<f32> {
    let is_shared = shape.n_layers != shape.n_kv_layers;
    let Some(policy) = policies.first().filter(|_| !is_shared) else {
        return vec![0.0; shape.n_kv_layers * shape.n_kv_heads];
    };
    let similarities = profile.similarities();
    let rows = |(i, rule): (usize, &HeadRule)| {
        let similarity = similarities.get(i).copied().unwrap_or(0.0);
        match i / shape.n_kv_heads < policy.dense_layers as usize {
            true => f32::INFINITY,
            false => rule.weight * (rule.threshold - (similarity - MARGIN)).max(0.0),
        }
    };
    rules_of(shape, policy, profile).iter().enumerate().map(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_carries_about_one_head_of_an_8b_model_a_layer() {
        // 128K tokens, 10 %, 512 B a row; 105 microseconds a layer; 50 GB/s.
        let head_bytes = 131_072.0 * 0.1 * 512.0;
        assert_eq!(prefetchable_heads(105e-6, 50e9, head_bytes), 0);
        assert_eq!(prefetchable_heads(140e-6, 50e9, head_bytes), 1);
        assert_eq!(prefetchable_heads(1.0, 1.0, 0.0), u32::MAX);
    }

    #[test]
    fn what_turns_and_chooses_much_stays_and_what_attends_to_everything() {
        let shape = TopKShape { n_layers: 3, n_kv_layers: 3, n_kv_heads: 2, group: 1, head_dim: 2 };
        let similarity = vec![0.9, 0.4, 0.3, 0.1, 0.9, 0.9];
        let profile = Profile { similarity, ..Profile::empty(&shape) };
        let policies = |text: &str| vec![text.parse().unwrap()];
        let adaptive = policies("hata,reuse=qsac(eta=0.8,thresholds=fixed)");
        assert_eq!(hardest_layers(&shape, &adaptive, &profile), [1, 0, 2]);
        let heads = |n| hardest_heads(&shape, &adaptive, &profile, n);
        assert_eq!(heads(0), [3, 2, 1, 0, 4, 5]);
        // The easier head of each layer is left to the link; nothing comes ahead for the first.
        assert_eq!(heads(1), [3, 1, 0, 4, 2, 5]);
        assert_eq!(heads(2), [1, 0, 3, 2, 4, 5]);
        let dense = policies("hata,reuse=qsac(eta=0.8,thresholds=fixed),dense_layers=1");
        assert_eq!(hardest_layers(&shape, &dense, &profile), [0, 1, 2]);
        assert_eq!(hardest_heads(&shape, &dense, &profile, 0), [3, 2, 4, 5]);
        // Nothing is known, or layers share keys.
        assert_eq!(hardest_layers(&shape, &[], &profile), [0, 1, 2]);
        let shared = TopKShape { n_kv_layers: 2, ..shape };
        assert_eq!(hardest_layers(&shared, &adaptive, &profile), [0, 1]);
        assert_eq!(hardest_heads(&shared, &adaptive, &profile, 0), [0, 1, 2, 3]);
    }

    #[test]
    fn the_first_layer_and_the_hardest_heads_stay() {
        let thresholds = [0.0, 0.0, 0.8, 0.7, 0.8, -0.9];
        let similarities = [0.9, 0.9, 0.9, 0.5, 0.6, 0.9];
        let order = |n_prefetchable| residency(2, &thresholds, &similarities, n_prefetchable);
        assert_eq!(order(0), [0, 1, 3, 4, 2, 5]);
        // The easier head of each layer is left to prefetching.
        assert_eq!(order(1), [0, 1, 3, 4, 2, 5]);
        assert_eq!(residency(3, &thresholds, &similarities, 2), [0, 1, 2, 3, 4, 5]);
        assert_eq!(residency(2, &[0.0, 0.0, 0.9, 0.8, 0.1, 0.0], &[], 1), [0, 1, 2, 4, 3, 5]);
        assert_eq!(order(9), [0, 1, 3, 4, 2, 5]);
        assert_eq!(residency(2, &[], &[], 0), [] as [usize; 0]);
    }
}
