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
/// margin. In each layer the `n_prefetchable` least difficult ones are left to prefetching, and come
/// last. `thresholds` and `similarities` are `[layer][G]`; similarities that are missing are 0.
pub(super) fn residency(
    n_kv_heads: usize,
    thresholds: &[f32],
    similarities: &[f32],
    n_prefetchable: usize,
) -> Vec<usize> {
    let similarity = |i: usize| similarities.get(i).copied().unwrap_or(0.0);
    let difficulty = |i: usize| thresholds[i] - (similarity(i) - MARGIN);
    let most_difficult = |heads: &mut [usize]| {
        heads.sort_by(|&a, &b| difficulty(b).total_cmp(&difficulty(a)).then(a.cmp(&b)));
    };
    let heads: Vec<usize> = (0..thresholds.len()).collect();
    let (mut order, mut left) = (Vec::new(), Vec::new());
    for heads in heads.chunks(n_kv_heads.max(1)).skip(1) {
        let mut heads = heads.to_vec();
        most_difficult(&mut heads);
        let (stay, prefetched) = heads.split_at(heads.len().saturating_sub(n_prefetchable));
        order.extend_from_slice(stay);
        left.extend_from_slice(prefetched);
    }
    most_difficult(&mut order);
    most_difficult(&mut left);
    let first = heads.into_iter().take(n_kv_heads);
    first.chain(order).chain(left).collect()
}

/// The groups of so many heads, such as layers, in the order in which they should stay where groups stay or go as
/// a whole: those first of which most rows come, because their heads are difficult and choose much. `heads` are
/// `[layer][G]`: threshold, average similarity and share of the rows.
fn most_rows(n_together: usize, heads: &[(f32, f32, f32)]) -> Vec<u32> {
    let rows = |&(threshold, similarity, weight): &(f32, f32, f32)| {
        weight * (threshold - (similarity - MARGIN)).max(0.0)
    };
    let sums = heads.chunks(n_together.max(1)).map(|heads| heads.iter().map(rows).sum::<f32>());
    let mut groups: Vec<(u32, f32)> = (0..).zip(sums).collect();
    groups.sort_by(|a, b| b.1.total_cmp(&a.1));
    groups.into_iter().map(|(group, _)| group).collect()
}

/// The groups of `n_together` heads that own keys and values, such as layers, those first that should stay on the
/// device where not all can: by the first policy, or in their order where layers share them and a profile says
/// nothing about whose rows would come.
pub fn hardest(
    shape: &TopKShape,
    policies: &[Policy],
    profile: &Profile,
    n_together: usize,
) -> Vec<u32> {
    let is_shared = shape.n_layers != shape.n_kv_layers;
    let Some(policy) = policies.first().filter(|_| !is_shared) else {
        let n = shape.n_kv_layers * shape.n_kv_heads / n_together.max(1);
        return (0..n as u32).collect();
    };
    let similarities = profile.similarities();
    let similarity = |i: usize| similarities.get(i).copied().unwrap_or(0.0);
    let rules = rules_of(shape, policy, profile);
    let head = |(i, rule): (usize, &HeadRule)| (rule.threshold, similarity(i), rule.weight);
    let heads: Vec<(f32, f32, f32)> = rules.iter().enumerate().map(head).collect();
    most_rows(n_together, &heads)
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
    fn layers_stay_whose_heads_turn_and_choose_much() {
        let easy = (0.7, 0.9, 1.0);
        let heads = [easy, (0.9, 0.8, 1.0), easy, (0.9, 0.8, 2.0), easy, easy];
        assert_eq!(most_rows(2, &heads), [1, 0, 2]);
        assert_eq!(most_rows(3, &heads), [1, 0]);
        assert_eq!(most_rows(1, &heads), [3, 1, 0, 2, 4, 5]);
        assert_eq!(most_rows(2, &[(0.8, 0.0, 1.0); 6]), [0, 1, 2], "nothing was measured");
    }

    #[test]
    fn layers_that_share_keys_stay_in_their_order() {
        let shape = TopKShape { n_layers: 3, n_kv_layers: 3, n_kv_heads: 1, group: 1, head_dim: 2 };
        let similarity = vec![0.9, 0.1, 0.5];
        let profile = Profile { similarity, ..Profile::empty(&shape) };
        let policies = ["hata,reuse=qsac(eta=0.8,thresholds=fixed)".parse().unwrap()];
        assert_eq!(hardest(&shape, &policies, &profile, 1), [1, 2, 0]);
        let shared = TopKShape { n_kv_layers: 2, ..shape };
        assert_eq!(hardest(&shared, &policies, &profile, 1), [0, 1]);
        assert_eq!(hardest(&shape, &[], &profile, 1), [0, 1, 2]);
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
