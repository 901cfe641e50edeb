//! `attend`: the same bits however a sequence is cut into steps, whoever shares the batch, and
//! wherever its pages lie.

use nuthatch_types::{KvDtype, Slot};

use crate::{Backend, RopeStyle};

use super::at_most;
use super::compare::same_bits;
use super::inputs::Random;
use super::rig::{Case, FP8, INT8, LAYER, PAGE_LEN, Part, Rig, Room, Sequence, shuffled_slots};

/// Cases for which bits are compared; cheaper than those that are compared with `f64`.
pub(super) fn cases() -> Vec<Case> {
    use KvDtype::{Bf16, F16, F32};
    use RopeStyle::{Halves, Pairs};
    vec![
        Case::new(F16, 3, 1, 64).rotated(Pairs, 64),
        Case::new(INT8, 3, 1, 64).rotated(Pairs, 64),
        Case::new(FP8, 2, 1, 80).rotated(Halves, 80).windowed(100),
        Case::new(F32, 1, 1, 32).rotated(Halves, 32),
        Case::new(Bf16, 4, 1, 128).normed(),
        Case::new(F16, 7, 1, 80).rotated(Halves, 80).windowed(17),
        Case::new(F16, 2, 2, 96).windowed(100),
        Case::new(F16, 8, 1, 64).windowed(16),
        Case::new(F16, 1, 1, 256).rotated(Halves, 64).windowed(1),
    ]
}

/// A rig with room for `n_tables` sequences of `rows`, and all its slots in random order.
pub(super) fn rig_and_slots<'a, B: Backend>(
    b: &'a B,
    case: &'a Case,
    random: &mut Random,
    (n_tables, rows): (usize, usize),
) -> (Rig<'a, B>, Vec<Slot>) {
    let n_slots = n_tables * rows.div_ceil(PAGE_LEN);
    let room = Room { n_slots, n_tables, max_rows: n_tables * rows, max_context: rows };
    (Rig::new(b, case, room), shuffled_slots(random, n_slots))
}

/// All outputs of a sequence that is computed in steps that end at `cuts` and at its end.
pub(super) fn in_steps<B: Backend>(
    rig: &mut Rig<'_, B>,
    seq: &Sequence,
    table: u32,
    cuts: impl IntoIterator<Item = usize>,
) -> Vec<f32> {
    let mut out = Vec::new();
    let mut start = 0;
    for end in cuts.into_iter().chain([seq.rows]) {
        out.extend_from_slice(&rig.step(&[Part { seq, table, start, end }])[0]);
        start = end;
    }
    out
}

/// Whole, chunked at many places, and token by token.
pub fn attend_cuts_agree<B: Backend>(b: &B) {
    const ROWS: usize = 261;
    let mut random = Random::new(18);
    for case in &cases() {
        let seq = Sequence::new(&mut random, case, ROWS);
        let mut cuts: Vec<Vec<usize>> = vec![
            vec![1],
            vec![16],
            vec![ROWS - 1],
            vec![17, 100],
            vec![3, 8, 24, 56, 120, 248],
            vec![32, 64, 96, 128, 160, 192, 224, 256],
            (1..ROWS).collect(),
        ];
        let mut at = 0;
        let irregular = std::iter::from_fn(|| {
            at += 1 + random.below(40);
            (at < ROWS).then_some(at)
        });
        cuts.push(irregular.collect());
        cuts.truncate(at_most(4, cuts.len()));

        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (cuts.len() + 1, ROWS));
        for (table, own) in slots.chunks_exact(seq.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let whole = in_steps(&mut rig, &seq, 0, []);
        for (i, cuts) in cuts.into_iter().enumerate() {
            let what = format!("attention cut at {cuts:?} of {ROWS}, {}", case.name());
            let got = in_steps(&mut rig, &seq, i as u32 + 1, cuts);
            same_bits(&got, &whole, &|| what.clone());
        }
    }
}

/// Alone, and between sequences that prefill, decode, are long, are short, or have gone wrong.
pub fn attend_neighbours_agree<B: Backend>(b: &B) {
    const ROWS: usize = 90;
    const LONG: usize = 530;
    let mut random = Random::new(19);
    for case in cases().iter().take(at_most(4, usize::MAX)) {
        let seq = Sequence::new(&mut random, case, ROWS);
        let long = Sequence::new(&mut random, case, LONG);
        let short = Sequence::new(&mut random, case, 21);
        let wrong =
            Sequence { first: 0, turn: 0, qkv: vec![f32::NAN; 19 * case.qkv_width()], rows: 19 };
        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (5, LONG));
        for (table, own) in slots.chunks_exact(long.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let alone = in_steps(&mut rig, &seq, 0, []);
        rig.append(&long, 1, LONG - 1, LAYER);

        let width = case.out_width();
        let part = |seq, table, start, end| Part { seq, table, start, end };
        let steps: [&[Part<'_>]; 4] = [
            &[part(&long, 1, LONG - 1, LONG), part(&seq, 4, 0, 40)],
            &[part(&seq, 4, 40, 41), part(&short, 2, 0, 20), part(&long, 1, LONG - 1, LONG)],
            &[
                part(&wrong, 3, 0, 18),
                part(&short, 2, 20, 21),
                part(&seq, 4, 41, 89),
                part(&long, 1, LONG - 33, LONG),
            ],
            &[part(&wrong, 3, 18, 19), part(&seq, 4, 89, 90), part(&long, 1, LONG - 1, LONG)],
        ];
        for (i, parts) in steps.into_iter().enumerate() {
            let outputs = rig.step(parts);
            for (part, got) in parts.iter().zip(outputs).filter(|(part, _)| part.table == 4) {
                let expected = &alone[part.start * width..part.end * width];
                same_bits(&got, expected, &|| {
                    format!("attention among neighbours, step {i}, {}", case.name())
                });
            }
        }
    }
}

/// Pages in ascending, descending and random order, in another table, and shared with a neighbour.
pub fn attend_places_agree<B: Backend>(b: &B) {
    const ROWS: usize = 75;
    const SHARED_PAGES: usize = 3;
    let mut random = Random::new(20);
    for case in &cases() {
        let seq = Sequence::new(&mut random, case, ROWS);
        let n_pages = seq.n_pages();
        let (mut rig, mut slots) = rig_and_slots(b, case, &mut random, (5, ROWS));
        slots.sort();
        let mut own: Vec<Vec<Slot>> = slots.chunks_exact(n_pages).map(<[Slot]>::to_vec).collect();
        own[1].reverse();
        random.shuffle(&mut own[2]);
        for (table, own) in own.iter().enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let expected = in_steps(&mut rig, &seq, 0, []);
        for table in 1..4 {
            let got = in_steps(&mut rig, &seq, table, [33]);
            same_bits(&got, &expected, &|| format!("order {table} of slots, {}", case.name()));
        }

        // The last table takes its first pages from the first, as a prefix hit does.
        rig.write_table(4, 0, &own[0][..SHARED_PAGES]);
        let start = SHARED_PAGES * PAGE_LEN;
        let part = |table| Part { seq: &seq, table, start, end: ROWS };
        let outputs = rig.step(&[part(4), part(0)]);
        for got in outputs {
            let expected = &expected[start * case.out_width()..];
            same_bits(&got, expected, &|| format!("shared prefix, {}", case.name()));
        }
    }
}

/// Rows do not see later rows of their own sequence, not even if those have gone wrong.
///
/// Otherwise a full page would depend on the tokens that happened to follow it, and could not be
/// shared with a sequence that goes on differently.
pub fn attend_past_agrees<B: Backend>(b: &B) {
    const ROWS: usize = 70;
    let mut random = Random::new(24);
    for case in &cases() {
        let seq = Sequence::new(&mut random, case, ROWS);
        let (mut rig, slots) = rig_and_slots(b, case, &mut random, (4, ROWS));
        for (table, own) in slots.chunks_exact(seq.n_pages()).enumerate() {
            rig.write_table(table as u32, 0, own);
        }
        let expected = in_steps(&mut rig, &seq, 0, []);
        for (table, right) in [(1, 69), (2, 40), (3, 16)] {
            let mut wrong = seq.clone();
            wrong.qkv[right * case.qkv_width()..].fill(f32::NAN);
            let got = in_steps(&mut rig, &wrong, table, []);
            let n = right * case.out_width();
            same_bits(&got[..n], &expected[..n], &|| {
                format!("attention of {right} rows before rows of NaN, {}", case.name())
            });
        }
    }
}
