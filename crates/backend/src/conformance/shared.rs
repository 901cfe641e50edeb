//! Layers that own no keys and values, and read those of another.

use crate::Backend;

use super::attend_bits::{cases, in_steps, rig_and_slots};
use super::compare::same_bits;
use super::inputs::Random;
use super::rig::{Part, Sequence};

/// Queries without keys get what they would get with them, bit for bit, and write nothing.
pub fn shared_layers_agree<B: Backend>(b: &B) {
    const ROWS: usize = 75;
    const CUTS: [(usize, usize); 5] = [(0, 1), (1, 40), (40, 41), (41, 74), (74, 75)];
    let mut random = Random::new(26);
    for case in &cases() {
        let owner = Sequence::new(&mut random, case, ROWS);
        // Other queries to the same keys and values.
        let mut other = Sequence::new(&mut random, case, ROWS);
        let (width, q_width) = (case.qkv_width(), case.out_width());
        let rows = other.qkv.chunks_exact_mut(width).zip(owner.qkv.chunks_exact(width));
        rows.for_each(|(other, owner)| other[q_width..].copy_from_slice(&owner[q_width..]));

        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (2, ROWS));
        for (table, own) in slots.chunks_exact(owner.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let expected = in_steps(&mut rig, &other, 1, []);
        let alone = in_steps(&mut rig, &owner, 0, []);
        for (start, end) in CUTS {
            let part = |seq| Part { seq, table: 0, start, end };
            let rows = start * q_width..end * q_width;
            let got = rig.step(&[part(&owner)]);
            same_bits(&got[0], &alone[rows.clone()], &|| {
                format!("rows {start}..{end} of the layer that owns, {}", case.name())
            });
            let got = rig.step_shared(&[part(&other)]);
            same_bits(&got[0], &expected[rows], &|| {
                format!("rows {start}..{end} of the layer that shares, {}", case.name())
            });
        }
    }
}
