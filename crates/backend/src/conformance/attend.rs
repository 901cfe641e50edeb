//! `attend`: decode, prefill and windows against `f64`, over scattered pages in a poisoned arena.

use nuthatch_types::{KvDtype, Slot};

use crate::{Backend, RopeStyle};

use super::at_most;
use super::compare::{download, same_bits, upload};
use super::inputs::Random;
use super::rig::{Case, FP8, INT8, LAYER, PAGE_LEN, Part, Rig, Room, Sequence, shuffled_slots};
use super::truth::attend;

/// Slots that no sequence uses.
const SPARE_SLOTS: usize = 3;

/// Sequences on pages scattered over one arena, one table each.
struct Batch<'a, B: Backend> {
    rig: Rig<'a, B>,
    sequences: Vec<Sequence>,
}

impl<'a, B: Backend> Batch<'a, B> {
    fn new(b: &'a B, case: &'a Case, random: &mut Random, lengths: &[usize]) -> Self {
        let sequences: Vec<Sequence> =
            lengths.iter().map(|&rows| Sequence::new(random, case, rows)).collect();
        let n_slots = sequences.iter().map(Sequence::n_pages).sum::<usize>() + SPARE_SLOTS;
        let room = Room {
            n_slots,
            n_tables: lengths.len(),
            max_rows: lengths.iter().sum(),
            max_context: lengths.iter().copied().max().unwrap_or(1),
        };
        let mut rig = Rig::new(b, case, room);
        let slots = shuffled_slots(random, n_slots);
        let mut rest = &slots[..];
        for (i, seq) in sequences.iter().enumerate() {
            let (own, after) = rest.split_at(seq.n_pages());
            rig.write_table(i as u32, 0, own);
            rest = after;
        }
        Batch { rig, sequences }
    }

    /// One step in which some sequences compute some of their rows, checked against `f64`.
    fn check_step(&mut self, steps: &[(usize, usize, usize)]) {
        let parts: Vec<Part<'_>> = steps
            .iter()
            .map(|&(i, start, end)| Part { seq: &self.sequences[i], table: i as u32, start, end })
            .collect();
        let outputs = self.rig.step(&parts);
        let case = self.rig.case;
        for (part, got) in parts.iter().zip(outputs) {
            let truth = attend(self.rig.b, case, part.seq, part.start..part.end);
            truth.check(&got, &|| {
                let (rows, n) = (part.start..part.end, part.seq.rows);
                format!("attention of rows {rows:?} of {n}, {}", case.name())
            });
        }
    }
}

/// One new token for each of many sequences of all lengths, with every group and width.
pub fn attend_decode_matches<B: Backend>(b: &B) {
    const LENGTHS: [usize; 13] = [257, 1, 600, 2, 15, 1030, 16, 17, 31, 64, 100, 255, 256];
    use KvDtype::{Bf16, F16, F32};
    use RopeStyle::{Halves, Pairs};
    let cases = [
        Case::new(F32, 2, 1, 32).rotated(Halves, 32).normed().windowed(256),
        Case::new(F16, 7, 1, 64).windowed(17),
        Case::new(F16, 2, 1, 64),
        Case::new(F16, 3, 2, 64).rotated(Pairs, 64),
        Case::new(F16, 4, 1, 128).rotated(Halves, 128),
        Case::new(F16, 8, 1, 80).rotated(Halves, 32),
        Case::new(F32, 1, 3, 96).rotated(Pairs, 48).windowed(100),
        Case::new(Bf16, 2, 1, 256).rotated(Halves, 256).normed(),
        Case::new(Bf16, 3, 3, 64).windowed(256),
        Case::new(F16, 8, 2, 64).windowed(16),
        Case::new(F16, 2, 2, 128).rotated(Halves, 128).normed().windowed(1),
        Case::new(F16, 1, 1, 80),
        Case::new(INT8, 3, 2, 64),
        Case::new(INT8, 4, 1, 128).rotated(Halves, 128).windowed(100),
        Case::new(FP8, 2, 1, 80),
        Case::new(FP8, 8, 1, 64).rotated(Pairs, 64).normed(),
    ];
    let mut random = Random::new(14);
    for case in &cases {
        let lengths = &LENGTHS[..at_most(4, LENGTHS.len())];
        let mut batch = Batch::new(b, case, &mut random, lengths);
        let mut steps = Vec::new();
        for (i, seq) in batch.sequences.iter().enumerate() {
            batch.rig.append(seq, i as u32, seq.rows - 1, LAYER);
            steps.push((i, seq.rows - 1, seq.rows));
        }
        batch.check_step(&steps);
    }
}

/// Whole prompts in one step, prompts cut into chunks, and both beside decoding sequences.
pub fn attend_prefill_matches<B: Backend>(b: &B) {
    use KvDtype::{Bf16, F16, F32};
    use RopeStyle::{Halves, Pairs};
    let cases = [
        Case::new(F32, 1, 2, 32).rotated(Pairs, 32).normed().windowed(17),
        Case::new(F16, 3, 1, 64),
        Case::new(F16, 4, 1, 128).rotated(Halves, 128).windowed(17),
        Case::new(Bf16, 7, 1, 32).windowed(100),
        Case::new(F32, 1, 1, 96).rotated(Halves, 48).normed(),
        Case::new(F16, 2, 1, 80).windowed(1),
        Case::new(F16, 8, 1, 64).windowed(16),
        Case::new(F16, 1, 1, 256).rotated(Pairs, 256),
        Case::new(INT8, 2, 1, 80).windowed(17),
        Case::new(INT8, 3, 1, 64).rotated(Pairs, 64),
        Case::new(FP8, 4, 1, 128),
    ];
    let mut random = Random::new(15);
    for case in &cases {
        let mut batch = Batch::new(b, case, &mut random, &[17, 257, 1, 100, 33, 64]);
        batch.check_step(&[(0, 0, 17), (1, 0, 257), (2, 0, 1), (3, 0, 37)]);
        batch.check_step(&[(4, 0, 16), (3, 37, 99), (5, 0, 15)]);
        batch.check_step(&[(3, 99, 100), (5, 15, 64), (4, 16, 17)]);
        batch.check_step(&[(4, 17, 33)]);
    }
}

/// Contexts of many thousand keys, the last rows alone and together: devices may cut far keys into
/// longer pieces than near ones.
pub fn attend_long_matches<B: Backend>(b: &B) {
    /// Rows of the last step.
    const LAST: usize = 20;
    let cases = [
        (Case::new(KvDtype::F16, 1, 8, 32).rotated(RopeStyle::Halves, 32), 9_100),
        (Case::new(KvDtype::Bf16, 3, 1, 32), 8_700),
        (Case::new(KvDtype::F16, 2, 4, 32), 8_900),
    ];
    let mut random = Random::new(25);
    for (case, rows) in &cases[..at_most(1, cases.len())] {
        let mut batch = Batch::new(b, case, &mut random, &[*rows]);
        let (seq, start) = (&batch.sequences[0], rows - LAST);
        batch.rig.append(seq, 0, start, LAYER);
        let mut step = |end| batch.rig.step(&[Part { seq, table: 0, start, end }]).concat();
        let (alone, together) = (step(start + 1), step(*rows));
        let what = || format!("attention of rows {start}.. of {rows}, {}", case.name());
        same_bits(&alone, &together[..alone.len()], &what);
        let n_checked = 2;
        let truth = attend(b, case, seq, start..start + n_checked);
        truth.check(&together[..n_checked * case.out_width()], &what);
    }
}

/// The last rows of so many sequences that a device is full, of fewer, and some of them alone: devices may have
/// other kernels for many.
pub fn attend_many_agree<B: Backend>(b: &B) {
    const SEQS: usize = 80;
    let cases = [
        Case::new(KvDtype::F16, 8, 4, 128),
        Case::new(KvDtype::Bf16, 8, 4, 128).rotated(RopeStyle::Halves, 128).windowed(67),
    ];
    let mut random = Random::new(26);
    for case in &cases[..at_most(1, cases.len())] {
        let lengths: Vec<usize> = (0..SEQS).map(|i| 65 + i % 5).collect();
        let mut batch = Batch::new(b, case, &mut random, &lengths);
        for (i, seq) in batch.sequences.iter().enumerate() {
            batch.rig.append(seq, i as u32, seq.rows - 1, LAYER);
        }
        let part = |(i, seq): (usize, _)| {
            let rows = lengths[i];
            Part { seq, table: i as u32, start: rows - 1, end: rows }
        };
        let parts: Vec<Part<'_>> = batch.sequences.iter().enumerate().map(part).collect();
        let together = batch.rig.step(&parts);
        for n in [36, 50] {
            let what = || format!("attention of {n} of {SEQS} sequences, {}", case.name());
            same_bits(&together[..n].concat(), &batch.rig.step(&parts[..n]).concat(), &what);
        }
        for i in [0, 7, SEQS - 1] {
            let what = || format!("attention of sequence {i} of {SEQS}, {}", case.name());
            let alone = batch.rig.step(&parts[i..=i]).concat();
            same_bits(&together[i], &alone, &what);
            let rows = parts[i].start..parts[i].end;
            attend(b, case, parts[i].seq, rows).check(&together[i], &what);
        }
    }
}

/// A window at a far position: pages that left the window are not read, whatever their slots hold.
pub fn attend_far_matches<B: Backend>(b: &B) {
    const FIRST: usize = 99_968;
    let mut random = Random::new(16);
    for (window, style) in [(40, RopeStyle::Halves), (17, RopeStyle::Pairs), (1, RopeStyle::Pairs)]
    {
        let case = Case::new(KvDtype::F16, 2, 1, 64).rotated(style, 64).windowed(window);
        let seq = Sequence { first: FIRST, ..Sequence::new(&mut random, &case, 100) };
        let first_page = FIRST / PAGE_LEN;
        let n_own = seq.n_pages() - first_page;
        let room =
            Room { n_slots: n_own + 1, n_tables: 1, max_rows: 100, max_context: FIRST + 100 };
        let mut rig = Rig::new(b, &case, room);
        // Slot 0 stays poisoned, and stands for all that left the window.
        let mut slots = vec![Slot(0); first_page];
        slots.extend((1..=n_own as u32).rev().map(Slot));
        rig.write_table(0, 0, &slots);
        // Rows are attended once their whole window was written.
        let known = window as usize;
        rig.append(&seq, 0, known, LAYER);
        for (start, end) in [(known, known + 1), (known + 1, 99), (99, 100)] {
            let part = Part { seq: &seq, table: 0, start, end };
            let got = &rig.step(&[part])[0];
            attend(b, &case, &seq, start..end)
                .check(got, &|| format!("far rows {start}..{end}, {}", case.name()));
        }
    }
}

/// After `rope_append`, the k and v parts of the buffer are nobody's business.
pub fn attend_reads_queries_only<B: Backend>(b: &B) {
    let mut random = Random::new(17);
    let case = Case::new(KvDtype::F16, 3, 2, 64).rotated(RopeStyle::Halves, 64);
    let mut batch = Batch::new(b, &case, &mut random, &[40]);
    for (start, end) in [(0, 39), (39, 40)] {
        let part = Part { seq: &batch.sequences[0], table: 0, start, end };
        let qkv = batch.rig.rotate(&[part], LAYER);
        let expected = batch.rig.attend(&[part], &qkv, LAYER);
        let mut rows = download(b, &qkv, (end - start) * case.qkv_width());
        for row in rows.chunks_exact_mut(case.qkv_width()) {
            row[case.out_width()..].fill(f32::NAN);
        }
        let got = batch.rig.attend(&[part], &upload(b, &rows), LAYER);
        same_bits(&got[0], &expected[0], &|| format!("attention of rows {start}..{end}"));
    }
}
