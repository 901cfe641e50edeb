//! Whether a selection still serves: similarities of queries, and the thresholds they must reach.

use super::policy::{Aggregate, Qsac, Soft};

/// The similarity that a head of this importance must keep.
///
/// An angle between that of `eta`, for importance 1, and that of `floor`, for importance 0, which is
/// a half turn in what was published.
pub fn threshold(importance: f32, qsac: &Qsac) -> f32 {
    if !qsac.is_adaptive {
        return qsac.eta;
    }
    between(importance, qsac.p, (qsac.floor, qsac.eta))
}

/// The least similarity at which a query of such a head that misses is served late; more than any query
/// has if none is.
pub fn soft_threshold(importance: f32, qsac: &Qsac) -> f32 {
    match qsac.soft {
        None => f32::INFINITY,
        // To the bit: what has turned by a right angle or more counts as -1.
        Some(Soft { floor, eta }) if floor == eta => eta,
        Some(Soft { floor, eta }) => between(importance, qsac.p, (floor, eta)),
    }
}

/// A similarity whose angle lies between two, by importance.
fn between(importance: f32, p: f32, (floor, eta): (f32, f32)) -> f32 {
    let lambda = importance.clamp(0.0, 1.0).powf(p);
    let angle = |similarity: f32| similarity.clamp(-1.0, 1.0).acos();
    (lambda * angle(eta) + (1.0 - lambda) * angle(floor)).cos()
}

/// One similarity of a group's, or nothing where one of them is not above 0 and the mean is
/// harmonic: queries that have turned by a right angle have nothing in common, and a harmonic mean
/// of such numbers means nothing.
pub fn aggregate(
    similarities: impl ExactSizeIterator<Item = f32>,
    importances: &[f32],
    how: Aggregate,
) -> Option<f32> {
    match how {
        Aggregate::Min => similarities.reduce(f32::min),
        Aggregate::Mean => {
            let n = similarities.len().max(1) as f32;
            Some(similarities.sum::<f32>() / n)
        }
        Aggregate::Harmonic => {
            // Heads that matter to nobody weigh the same.
            let total: f32 = importances.iter().sum();
            let weight = |importance: f32| if total > 0.0 { importance / total } else { 1.0 };
            let (mut weights, mut sum) = (0.0, 0.0);
            for (similarity, &importance) in similarities.zip(importances) {
                if similarity <= 0.0 {
                    return None;
                }
                weights += weight(importance);
                sum += weight(importance) / similarity;
            }
            Some(weights / sum)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn thresholds_are_those_of_the_paper() {
        let qsac = Qsac::default();
        for (importance, tau) in
            [(0.0, -1.0), (0.5, -0.95), (0.8, -0.29), (0.85, -0.04), (0.9, 0.25), (0.95, 0.54)]
        {
            let found = threshold(importance, &qsac);
            assert!((found - tau).abs() < 0.006, "{importance}: {found}");
        }
        assert!((threshold(1.0, &qsac) - 0.8).abs() < 1e-6);
        let floored = Qsac { floor: 0.6, ..qsac };
        assert!((threshold(0.0, &floored) - 0.6).abs() < 1e-6);
        assert!((threshold(1.0, &floored) - 0.8).abs() < 1e-6);
        let fixed = Qsac { is_adaptive: false, ..qsac };
        assert_eq!(threshold(0.1, &fixed), 0.8);
    }

    #[test]
    fn heads_that_matter_are_served_late_less_often() {
        let qsac = Qsac::default();
        assert_eq!(soft_threshold(0.5, &qsac), f32::INFINITY);
        let all = Qsac { soft: Some(Soft { floor: -1.0, eta: -1.0 }), ..qsac };
        for importance in [0.0, 0.3, 0.9, 1.0] {
            assert_eq!(soft_threshold(importance, &all), -1.0);
        }
        let some = Qsac { soft: Some(Soft { floor: 0.2, eta: 0.9 }), ..qsac };
        let found = [0.0, 0.6, 0.9, 1.0].map(|importance| soft_threshold(importance, &some));
        assert!(found.is_sorted(), "{found:?}");
        assert!((found[0] - 0.2).abs() < 1e-6 && (found[3] - 0.9).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn a_right_angle_is_a_miss_and_no_number() {
        assert_eq!(aggregate([0.9, 0.0].into_iter(), &[1.0, 0.0], Aggregate::Harmonic), None);
        assert_eq!(aggregate([0.9, -0.5].into_iter(), &[1.0, 1.0], Aggregate::Harmonic), None);
        assert_eq!(aggregate([0.9, -0.5].into_iter(), &[1.0, 1.0], Aggregate::Min), Some(-0.5));
    }

    proptest! {
        #[test]
        fn a_mean_lies_between_and_leans_to_the_least(
            pairs in prop::collection::vec((0.01f32..1.0, 0.0f32..1.0), 1..8)
        ) {
            let (sims, weights): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let aggregate =
                |sims: &[f32], weights: &[f32], how| aggregate(sims.iter().copied(), weights, how);
            let harmonic = aggregate(&sims, &weights, Aggregate::Harmonic).unwrap();
            let least = aggregate(&sims, &weights, Aggregate::Min).unwrap();
            let most = sims.iter().copied().fold(0.0, f32::max);
            prop_assert!(harmonic >= least - 1e-5 && harmonic <= most + 1e-5);
            let equal = vec![1.0; sims.len()];
            let harmonic = aggregate(&sims, &equal, Aggregate::Harmonic).unwrap();
            let mean = aggregate(&sims, &equal, Aggregate::Mean).unwrap();
            prop_assert!(harmonic <= mean + 1e-5);
            let same = vec![sims[0]; sims.len()];
            let found = aggregate(&same, &weights, Aggregate::Harmonic).unwrap();
            prop_assert!((found - sims[0]).abs() < 1e-5);
        }

        #[test]
        fn thresholds_grow_with_importance(a in 0.0f32..1.0, b in 0.0f32..1.0, p in 0.5f32..4.0) {
            let qsac = Qsac { p, ..Qsac::default() };
            let (low, high) = if a < b { (a, b) } else { (b, a) };
            prop_assert!(threshold(low, &qsac) <= threshold(high, &qsac) + 1e-6);
            prop_assert!(threshold(high, &qsac) <= 0.8 + 1e-6);
        }
    }
}
