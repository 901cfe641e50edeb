//! Which heads keep all their KV on the device.

/// What stays on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residency {
    /// `[layer][G]` whether the head's whole KV stays.
    pub is_resident: Vec<bool>,
    /// How many do.
    pub n_resident: usize,
}

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

/// Picks the heads that stay, at most `budget` of them beside those of the first layer, which always
/// stay: nothing can be fetched ahead for it.
///
/// A head is the more difficult, the higher its threshold is above its average similarity less a
/// margin. In each layer the `n_prefetchable` least difficult ones are left to prefetching; of the
/// others the most difficult stay. `thresholds` and `similarities` are `[layer][G]`.
pub fn residency(
    n_kv_heads: usize,
    thresholds: &[f32],
    similarities: &[f32],
    margin: f32,
    (n_prefetchable, budget): (usize, usize),
) -> Residency {
    let difficulty = |i: usize| thresholds[i] - (similarities[i] - margin);
    let mut is_resident = vec![false; thresholds.len()];
    is_resident[..n_kv_heads.min(thresholds.len())].fill(true);
    let mut candidates = Vec::new();
    for layer in 1..thresholds.len() / n_kv_heads {
        let mut heads: Vec<usize> = (layer * n_kv_heads..(layer + 1) * n_kv_heads).collect();
        heads.sort_by(|&a, &b| difficulty(a).total_cmp(&difficulty(b)).then(a.cmp(&b)));
        candidates.extend(heads.into_iter().skip(n_prefetchable));
    }
    candidates.sort_by(|&a, &b| difficulty(b).total_cmp(&difficulty(a)).then(a.cmp(&b)));
    for &head in candidates.iter().take(budget) {
        is_resident[head] = true;
    }
    let n_resident = is_resident.iter().filter(|&&is| is).count();
    Residency { is_resident, n_resident }
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
    fn the_first_layer_and_the_hardest_heads_stay() {
        let thresholds = [0.0, 0.0, 0.8, 0.7, 0.8, -0.9];
        let similarities = [0.9, 0.9, 0.9, 0.5, 0.6, 0.9];
        let resident = |n_prefetchable, budget| {
            residency(2, &thresholds, &similarities, 0.05, (n_prefetchable, budget)).is_resident
        };
        assert_eq!(resident(0, 0), [true, true, false, false, false, false]);
        assert_eq!(resident(0, 1), [true, true, false, true, false, false]);
        assert_eq!(resident(0, 2), [true, true, false, true, true, false]);
        // The easier head of each layer is left to prefetching.
        assert_eq!(resident(1, 9), [true, true, false, true, true, false]);
        assert_eq!(resident(2, 9), [true, true, false, false, false, false]);
    }
}
