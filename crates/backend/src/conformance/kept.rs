//! `attend` when a sequence does not keep everything: pages before the window are somebody else's,
//! and positions are not places.

use nuthatch_types::{KvDtype, Slot};

use crate::{Backend, RopeStyle};

use super::at_most;
use super::attend_bits::{cases, in_steps, rig_and_slots};
use super::compare::same_bits;
use super::inputs::Random;
use super::rig::{Case, PAGE_LEN, Part, Sequence};
use super::truth::attend;

/// What lies in pages that left the window, and which slots their entries name, changes no bit.
pub fn attend_freed_agrees<B: Backend>(b: &B) {
    const ROWS: usize = 310;
    // Steps shorter and longer than the windows.
    const CUTS: [usize; 8] = [1, 20, 100, 101, 164, 165, 299, 300];
    let mut random = Random::new(27);
    let mut cases = cases();
    cases.retain(|case| case.window.is_some());
    cases.push(Case::new(KvDtype::F32, 2, 1, 64).windowed(33));
    cases.push(Case::new(KvDtype::F16, 3, 1, 64).rotated(RopeStyle::Pairs, 64).windowed(256));
    for case in &cases[..at_most(3, cases.len())] {
        let window = case.window.expect("only such were kept") as usize;
        let seq = Sequence::new(&mut random, case, ROWS);
        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (2, ROWS));
        for (table, own) in slots.chunks_exact(seq.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let expected = in_steps(&mut rig, &seq, 0, []);
        let own = &slots[seq.n_pages()..];
        let (mut start, mut n_freed) = (0, 0);
        for end in CUTS.into_iter().chain([ROWS]) {
            let got = &rig.step(&[Part { seq: &seq, table: 1, start, end }])[0];
            let width = case.out_width();
            same_bits(got, &expected[start * width..end * width], &|| {
                format!("rows {start}..{end} after {n_freed} pages were freed, {}", case.name())
            });
            start = end;
            n_freed = (end + 1).saturating_sub(window) / PAGE_LEN;
            if n_freed > 0 {
                rig.poison(&own[..n_freed]);
                // A freed entry may name any slot.
                rig.write_table(1, 0, &vec![own[0]; n_freed]);
            }
        }
    }
}

/// Rows whose positions are far beyond their places are rotated by the former and see by the latter.
pub fn attend_places_are_not_positions<B: Backend>(b: &B) {
    const ROWS: usize = 70;
    let mut random = Random::new(28);
    let cases = [
        Case::new(KvDtype::F32, 2, 1, 64).rotated(RopeStyle::Halves, 64),
        Case::new(KvDtype::F16, 3, 1, 64).rotated(RopeStyle::Pairs, 64),
        Case::new(KvDtype::F32, 1, 2, 32).rotated(RopeStyle::Halves, 32).windowed(19),
    ];
    for case in &cases {
        for turn in [16, 4096] {
            let seq = Sequence { turn, ..Sequence::new(&mut random, case, ROWS) };
            let (mut rig, slots): (_, Vec<Slot>) = rig_and_slots(b, case, &mut random, (2, ROWS));
            rig.write_table(0, 0, &slots[..seq.n_pages()]);
            for (start, end) in [(0, 17), (17, 18), (18, 69), (69, ROWS)] {
                let got = &rig.step(&[Part { seq: &seq, table: 0, start, end }])[0];
                attend(b, case, &seq, start..end).check(got, &|| {
                    format!("rows {start}..{end}, {turn} positions on, {}", case.name())
                });
            }
        }
    }
}
