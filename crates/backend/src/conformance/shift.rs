//! `shift_pages`: keys turned in place and on the way to another page, seen through `attend`.

use nuthatch_types::{KvDtype, PageShift, Slot};

use crate::{Backend, RopeStyle};

use super::at_most;
use super::copy::Layers;
use super::inputs::Random;
use super::rig::{Case, FP8, INT8, PAGE_LEN};
use super::truth::attend_turned;

/// Every style, type and partial width, norms, and an attention factor that must count once.
fn cases() -> Vec<Case> {
    use KvDtype::{Bf16, F16, F32};
    use RopeStyle::{Halves, Pairs};
    let mut scaled = Case::new(F32, 2, 1, 64).rotated(Halves, 64);
    scaled.rope.attention_factor = 1.138_629_4;
    vec![
        Case::new(F32, 1, 2, 64).rotated(Halves, 64),
        Case::new(F32, 2, 1, 96).rotated(Pairs, 64),
        Case::new(F16, 3, 1, 64).rotated(Pairs, 64),
        Case::new(F16, 2, 2, 80).rotated(Halves, 32),
        Case::new(Bf16, 2, 1, 128).rotated(Halves, 128).normed(),
        Case::new(Bf16, 1, 1, 32).rotated(Pairs, 16),
        scaled,
        Case::new(INT8, 3, 1, 64).rotated(Pairs, 64),
        Case::new(FP8, 2, 1, 80).rotated(Halves, 32),
    ]
}

/// Pages turned near and far, forwards and backwards, in all layers, against `f64`; in order; by
/// nothing; in place; sources that are not targets stay.
pub fn shift_pages_matches<B: Backend>(b: &B) {
    let mut random = Random::new(25);
    let shift = |source, target, by| PageShift { source: Slot(source), target: Slot(target), by };
    for case in &cases() {
        for by in [-37, 1, 16, 1000, 1_000_003].into_iter().take(at_most(1, 5)) {
            let mut layers = Layers::new(b, case, &mut random, &[Slot(4), Slot(9), Slot(0)]);
            // 4 goes to 7 by way of 5, which holds nothing before.
            let shifts = [shift(4, 5, by), shift(5, 7, 0), shift(9, 9, -3)];
            layers.rig.shift(&shifts);
            layers.rig.shift(&[]);
            layers.rig.write_table(1, 0, &[Slot(7), Slot(9), Slot(0)]);
            for (table, first) in [(1, by), (0, 0)] {
                let turns = |row: usize| [first, -3, 0][row / PAGE_LEN];
                let rows = layers.last_rows(table);
                for (layer, (seq, got)) in layers.sequences.iter().zip(rows).enumerate() {
                    let truth = attend_turned(b, case, seq, seq.rows - 1..seq.rows, &turns);
                    truth.check(&got, &|| {
                        let name = case.name();
                        format!("layer {layer} by table {table}, pages turned by {by}, {name}")
                    });
                }
            }
        }
    }
}
