//! `rope_append`: what it does to queries. Keys and values are seen through `attend`.

use nuthatch_types::{KvDtype, Slot};

use crate::{Backend, RopeStyle};

use super::compare::{ROUNDING, TINY, Truth, download, same_bits};
use super::inputs::Random;
use super::rig::{Case, LAYER, PAGE_LEN, Part, Rig, Room, Sequence};
use super::truth::{pair, ready};

/// Heads, styles and widths; the third and fourth rotate a part of each head only.
fn cases() -> Vec<Case> {
    let mut scaled = Case::new(KvDtype::F32, 2, 1, 64).rotated(RopeStyle::Halves, 64);
    scaled.rope.attention_factor = 1.138_629_4;
    vec![
        Case::new(KvDtype::F16, 3, 1, 64).rotated(RopeStyle::Halves, 64),
        Case::new(KvDtype::F16, 1, 2, 32).rotated(RopeStyle::Pairs, 32),
        Case::new(KvDtype::Bf16, 4, 1, 80).rotated(RopeStyle::Halves, 32),
        Case::new(KvDtype::F32, 2, 2, 96).rotated(RopeStyle::Pairs, 64),
        Case::new(KvDtype::F16, 2, 1, 128).rotated(RopeStyle::Halves, 128).normed(),
        Case::new(KvDtype::F16, 1, 1, 256).rotated(RopeStyle::Pairs, 256).normed(),
        Case::new(KvDtype::F16, 7, 1, 64).normed(),
        scaled,
    ]
}

/// Queries at near and far positions.
fn sequences(random: &mut Random, case: &Case) -> Vec<Sequence> {
    [(0, 33), (1000, 5), (32_767, 3), (99_990, 17)]
        .map(|(first, rows)| Sequence { first, ..Sequence::new(random, case, rows) })
        .into()
}

/// A rig on which each of the sequences has pages of its own.
fn rig<'a, B: Backend>(b: &'a B, case: &'a Case, sequences: &[Sequence]) -> Rig<'a, B> {
    let room = Room { n_slots: 10, n_tables: sequences.len(), max_rows: 64, max_context: 100_032 };
    let mut rig = Rig::new(b, case, room);
    let mut n_used = 0;
    for (table, seq) in sequences.iter().enumerate() {
        let page = seq.first / PAGE_LEN;
        let n = seq.n_pages() - page;
        let slots: Vec<Slot> = (n_used..n_used + n).map(|slot| Slot(slot as u32)).collect();
        rig.write_table(table as u32, page as u32, &slots);
        n_used += n;
    }
    rig
}

fn parts(sequences: &[Sequence]) -> Vec<Part<'_>> {
    sequences
        .iter()
        .enumerate()
        .map(|(i, seq)| Part { seq, table: i as u32, start: 0, end: seq.rows })
        .collect()
}

/// The query part of each row.
fn queries<B: Backend>(b: &B, rig: &mut Rig<'_, B>, parts: &[Part<'_>]) -> Vec<f32> {
    let (width, q_width) = (rig.case.qkv_width(), rig.case.out_width());
    let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
    let qkv = rig.rotate(parts, LAYER);
    let qkv = download(b, &qkv, rows * width);
    qkv.chunks_exact(width).flat_map(|row| row[..q_width].iter().copied()).collect()
}

/// Queries of all styles, widths, norms and positions up to 100,000, against `f64`.
///
/// The angle may be rounded to `f32` once, which matters at far positions: a unit in the last place
/// of 100,000 radians is 0.008.
pub fn rope_matches<B: Backend>(b: &B) {
    let mut random = Random::new(12);
    for case in cases() {
        let sequences = sequences(&mut random, &case);
        let got = queries(b, &mut rig(b, &case, &sequences), &parts(&sequences));
        let mut truth = Truth::default();
        for seq in &sequences {
            for (t, row) in seq.qkv.chunks_exact(case.qkv_width()).enumerate() {
                for head in row[..case.out_width()].chunks_exact(case.d()) {
                    push_head(&case, head, seq.first + t, &mut truth);
                }
            }
        }
        truth.check(&got, &|| format!("queries of {}", case.name()));
    }
}

fn push_head(case: &Case, head: &[f32], position: usize, truth: &mut Truth) {
    let norm = case.norms.as_ref().map(|(q, _)| &q[..]);
    let value = ready(head, norm, &case.rope, position);
    let relative = match norm {
        Some(_) => (8.0 + (head.len() as f64).sqrt()) * ROUNDING,
        None => 0.0,
    };
    let mut bound: Vec<f64> = value.iter().map(|x| x.abs() * relative + TINY).collect();
    for (i, &inv_freq) in case.rope.inv_freq.iter().enumerate() {
        let (first, second) = pair(&case.rope, i);
        let length = value[first].hypot(value[second]);
        let radians = position as f64 * f64::from(inv_freq) * ROUNDING;
        // Turning by nothing is exact.
        let turned = if inv_freq == 0.0 { 0.0 } else { 8.0 * ROUNDING };
        for at in [first, second] {
            bound[at] += length * (2.0 * radians + turned + relative);
        }
    }
    for (value, bound) in value.into_iter().zip(bound) {
        truth.push(value, bound);
    }
}

/// A query has the same bits alone and in any batch.
pub fn rope_rows_agree<B: Backend>(b: &B) {
    let mut random = Random::new(13);
    for case in cases() {
        let sequences = sequences(&mut random, &case);
        let mut rig = rig(b, &case, &sequences);
        let together = queries(b, &mut rig, &parts(&sequences));
        let mut before = 0;
        for (i, seq) in sequences.iter().enumerate() {
            let width = case.out_width();
            for (start, end) in [(0, 1), (0, 2), (1, seq.rows), (seq.rows - 1, seq.rows)] {
                let part = Part { seq, table: i as u32, start, end };
                let got = queries(b, &mut rig, &[part]);
                let expected = &together[(before + start) * width..(before + end) * width];
                same_bits(&got, expected, &|| {
                    format!("queries {start}..{end} of sequence {i}, {}", case.name())
                });
            }
            before += seq.rows;
        }
    }
}
