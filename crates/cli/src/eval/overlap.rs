//! How much of a selection stays while a query turns: similarity against overlap.

use std::collections::BTreeMap;

use nuthatch_engine::topk::{Decision, Lookup};

use crate::chart::{Axis, Colour, Figure, Line, Panel, Scale};

/// Bins of similarities from 0 to 1.
const N_BINS: usize = 20;

/// Overlaps of selections with those before them, by the similarity of the queries that they were
/// made for.
#[derive(Default)]
pub(super) struct Overlaps {
    /// The last selection of each row, layer and head.
    last: BTreeMap<(u32, usize, usize), Vec<u32>>,
    /// `[policy][bin]` sums of overlaps, and how many.
    bins: Vec<[(f64, u32); N_BINS]>,
}

impl Overlaps {
    /// Of this many policies.
    pub(super) fn new(n_policies: usize) -> Self {
        Overlaps { last: BTreeMap::new(), bins: vec![[(0.0, 0); N_BINS]; n_policies] }
    }

    /// Adds the selections among these decisions. A head that reuses its selection adds nothing, so
    /// `reuse=qsac(eta=1,thresholds=fixed)`, which never does, shows most.
    pub(super) fn add(&mut self, decisions: &[Decision]) {
        for decision in decisions {
            let Some(chosen) = &decision.chosen else { continue };
            let at = (decision.row, decision.layer, decision.head);
            let last = self.last.insert(at, chosen.clone());
            let (Lookup::Turned(Some(similarity)) | Lookup::Late(Some(similarity)), Some(last)) =
                (decision.lookup, last)
            else {
                continue;
            };
            let n_common = chosen.iter().filter(|place| last.binary_search(place).is_ok()).count();
            let bin = ((similarity * N_BINS as f32) as usize).min(N_BINS - 1);
            let (sum, n) = &mut self.bins[decision.policy][bin];
            (*sum, *n) = (*sum + n_common as f64 / chosen.len().max(1) as f64, *n + 1);
        }
    }

    /// A curve for each policy that looked up.
    pub(super) fn figure(&self, model: &str, policies: &[String]) -> Figure {
        let axis = |label: &str| Axis {
            label: label.to_owned(),
            scale: Scale::Linear,
            min: 0.0,
            max: 1.0,
        };
        let points = |bins: &[(f64, u32); N_BINS]| {
            let bins = bins.iter().enumerate().filter(|(_, (_, n))| *n > 0);
            bins.map(|(i, (sum, n))| ((i as f64 + 0.5) / N_BINS as f64, sum / f64::from(*n)))
                .collect::<Vec<_>>()
        };
        let curves: Vec<_> = self.bins.iter().map(points).collect();
        let shown: Vec<usize> = (0..curves.len()).filter(|&i| !curves[i].is_empty()).collect();
        let lines = shown.iter().enumerate().map(|(colour, &i)| Line {
            colour: Colour(colour),
            points: curves[i].clone(),
            is_stepped: false,
        });
        Figure {
            title: format!("Selections that stay while queries turn, {model}"),
            x: axis("similarity of the queries"),
            y: axis("overlap of the selections"),
            legend: shown
                .iter()
                .enumerate()
                .map(|(c, &i)| (policies[i].clone(), Colour(c)))
                .collect(),
            panels: vec![Panel { title: String::new(), lines: lines.collect() }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_shares_of_the_new_selection() {
        let decision = |lookup, chosen: Option<Vec<u32>>| Decision {
            row: 1,
            policy: 0,
            layer: 2,
            head: 0,
            kv_len: 100,
            lookup,
            chosen,
            n_moved: 0,
            n_first: 0,
            places: Vec::new(),
            tail: 90,
        };
        let mut overlaps = Overlaps::new(1);
        overlaps.add(&[
            decision(Lookup::First, Some(vec![1, 2, 3, 4])),
            decision(Lookup::Turned(Some(0.52)), Some(vec![2, 3, 8, 9])),
            decision(Lookup::Hit(0.97), None),
            decision(Lookup::Turned(Some(0.54)), Some(vec![2, 3, 8, 10])),
            decision(Lookup::Turned(None), Some(vec![50])),
        ]);
        let figure = overlaps.figure("m", &["p".to_owned()]);
        assert_eq!(figure.panels[0].lines[0].points, [(0.525, 0.625)]);
    }
}
