//! `rope_attend`: the bits of `rope_append` and `attend`, one after the other.

use nuthatch_types::KvDtype;

use crate::{Backend, RopeStyle};

use super::at_most;
use super::attend_bits::rig_and_slots;
use super::compare::same_bits;
use super::inputs::Random;
use super::rig::{Case, LAYER, Part, Sequence};

/// Token by token among neighbours, then what the pages hold, and a prompt.
pub fn rope_attend_agrees<B: Backend>(b: &B) {
    use KvDtype::{Bf16, F16, F32};
    use RopeStyle::{Halves, Pairs};
    const PROMPT: usize = 27;
    const LONG: usize = 300;
    let cases = [
        Case::new(F16, 3, 1, 64).rotated(Pairs, 64),
        Case::new(F16, 4, 2, 128).rotated(Halves, 128),
        Case::new(Bf16, 12, 1, 64).rotated(Halves, 64).windowed(40),
        Case::new(F16, 2, 1, 128).rotated(Halves, 64),
        Case::new(F16, 8, 1, 64).windowed(16),
        Case::new(Bf16, 4, 1, 128).normed(),
        Case::new(F16, 7, 1, 80).rotated(Halves, 80),
        Case::new(F32, 1, 1, 32).rotated(Halves, 32),
    ];
    let mut random = Random::new(27);
    let n_rows = at_most(34, 60);
    for case in &cases[..at_most(4, cases.len())] {
        let seq = Sequence::new(&mut random, case, n_rows);
        let long = Sequence::new(&mut random, case, LONG);
        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (3, LONG));
        for (table, own) in slots.chunks_exact(long.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let part = |seq, table, start, end| Part { seq, table, start, end };
        let name = |what: &str| format!("{what} at once, {}", case.name());
        let expected = rig.step(&[part(&seq, 0, 0, PROMPT)]);
        let got = rig.step_at_once(&[part(&seq, 1, 0, PROMPT)]);
        same_bits(&got[0], &expected[0], &|| name("a prompt"));
        rig.append(&long, 2, LONG - 1, LAYER);
        for row in PROMPT..n_rows {
            let expected = rig.step(&[part(&seq, 0, row, row + 1)]);
            let long = part(&long, 2, LONG - 1, LONG);
            let got = rig.step_at_once(&[long, part(&seq, 1, row, row + 1)]);
            same_bits(&got[1], &expected[0], &|| name(&format!("row {row}")));
        }
        // The last row's key and value are in their page, too.
        let last = |table| part(&seq, table, n_rows - 1, n_rows);
        let expected = rig.step_shared(&[last(0)]);
        let got = rig.step_shared(&[last(1)]);
        same_bits(&got[0], &expected[0], &|| name("pages written"));
    }
}
