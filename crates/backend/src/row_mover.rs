//! Pages made of rows of others: the host takes tokens' keys and values out of one page and puts them
//! into another one, with the keys at other positions.
//!
//! A key that was rotated by its position and is rotated by the way to another one is the key before
//! any rotation, rotated by that one.

use crate::{PageLayout, RopeSpec, RopeStyle};

/// Moves rows between pages of one layout.
#[derive(Debug)]
pub struct RowMover {
    layout: PageLayout,
    rope: RopeSpec,
}

/// A token's keys and values that go to another page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMove {
    /// Which token of its page it is, and which it will be.
    pub from: usize,
    /// Which token of the other page it will be.
    pub to: usize,
    /// By how many positions it moves.
    pub by: i32,
}

/// Two numbers of a key that are rotated together, and by how much.
struct Turn {
    first: usize,
    second: usize,
    cos: f32,
    sin: f32,
}

impl RowMover {
    /// `None` where something is kept beside keys and values, which would have to be made anew.
    pub fn new(layout: PageLayout, rope: RopeSpec) -> Option<Self> {
        (layout.tail_bytes == 0).then_some(RowMover { layout, rope })
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.layout.page_bytes()
    }

    /// Moves rows from one page to another; those that stay at their positions keep their bits.
    pub fn move_rows(&self, source: &[u8], target: &mut [u8], rows: &[RowMove]) {
        let (d, size, head_bytes) =
            (self.layout.d, self.layout.dtype.bytes(), self.layout.head_bytes());
        let mut turns = (0, Vec::new());
        let (mut bytes, mut key) = (vec![0; d * size], vec![0.0; d]);
        for row in rows {
            if turns.0 != row.by {
                turns = (row.by, self.turns(row.by));
            }
            let places = |token: usize, part: usize| {
                self.layout.places[(2 * token + part) * d..][..d]
                    .iter()
                    .map(|&at| at as usize * size)
            };
            let heads = source.chunks_exact(head_bytes).zip(target.chunks_exact_mut(head_bytes));
            for (source, target) in heads {
                for part in 0..2 {
                    for (number, at) in bytes.chunks_exact_mut(size).zip(places(row.from, part)) {
                        number.copy_from_slice(&source[at..at + size]);
                    }
                    if part == 0 && row.by != 0 {
                        self.layout.widen(&bytes, &mut key);
                        turn(&mut key, &turns.1);
                        self.layout.narrow(&key, &mut bytes);
                    }
                    for (number, at) in bytes.chunks_exact(size).zip(places(row.to, part)) {
                        target[at..at + size].copy_from_slice(number);
                    }
                }
            }
        }
    }

    fn turns(&self, by: i32) -> Vec<Turn> {
        let half = self.rope.inv_freq.len();
        let turn = |(i, &inv_freq): (usize, &f32)| {
            // Exact for far positions too.
            let (sin, cos) = (f64::from(by) * f64::from(inv_freq)).sin_cos();
            let (first, second) = match self.rope.style {
                RopeStyle::Halves => (i, i + half),
                RopeStyle::Pairs => (2 * i, 2 * i + 1),
            };
            Turn { first, second, cos: cos as f32, sin: sin as f32 }
        };
        self.rope.inv_freq.iter().enumerate().map(turn).collect()
    }
}

fn turn(key: &mut [f32], turns: &[Turn]) {
    for &Turn { first, second, cos, sin } in turns {
        let (a, b) = (key[first], key[second]);
        (key[first], key[second]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::KvDtype;

    use super::*;

    #[test]
    fn keys_turn_with_their_positions_and_everything_else_keeps_its_bits() {
        let (page_len, d, head_len) = (16, 8, 2 * 16 * 8);
        let place = |token, is_value, i| (usize::from(is_value) * page_len + token) * d + i;
        let places = PageLayout::places(page_len, d, place);
        let dtype = KvDtype::F32;
        let layout =
            PageLayout { n_layers: 2, n_kv_heads: 1, d, dtype, places, head_len, tail_bytes: 0 };
        let inv_freq = vec![1.0, 0.25];
        for style in [RopeStyle::Halves, RopeStyle::Pairs] {
            let rope = RopeSpec { inv_freq: inv_freq.clone(), attention_factor: 1.0, style };
            let mover = RowMover::new(layout.clone(), rope).unwrap();
            let numbers: Vec<f32> =
                (0..2 * head_len).map(|i| (i % 97) as f32 / 9.0 - 5.0).collect();
            let mut source = vec![0; mover.page_bytes()];
            layout.narrow(&numbers, &mut source);
            let mut target = vec![0xEE; mover.page_bytes()];
            let rows = [RowMove { from: 3, to: 0, by: 0 }, RowMove { from: 4, to: 1, by: -7 }];
            mover.move_rows(&source, &mut target, &rows);
            let mut moved = vec![0.0; 2 * head_len];
            layout.widen(&target, &mut moved);
            for head in [0, head_len] {
                let of = |page: &[f32], token: usize, is_value: bool| {
                    page[head + place(token, is_value, 0)..][..d].to_vec()
                };
                assert_eq!(of(&moved, 0, false), of(&numbers, 3, false));
                assert_eq!(of(&moved, 0, true), of(&numbers, 3, true));
                assert_eq!(of(&moved, 1, true), of(&numbers, 4, true));
                let (before, after) = (of(&numbers, 4, false), of(&moved, 1, false));
                for (i, &inv_freq) in inv_freq.iter().enumerate() {
                    let (a, b) =
                        if style == RopeStyle::Halves { (i, i + 2) } else { (2 * i, 2 * i + 1) };
                    let (sin, cos) = (-7.0 * inv_freq).sin_cos();
                    assert!((after[a] - (before[a] * cos - before[b] * sin)).abs() < 1e-5);
                    assert!((after[b] - (before[b] * cos + before[a] * sin)).abs() < 1e-5);
                }
                // Only four of eight numbers are rotated.
                assert_eq!(before[4..], after[4..]);
                assert!(
                    target[(head + place(2, false, 0)) * 4..][..4] == [0xEE; 4],
                    "no other row"
                );
            }
        }
        assert!(
            RowMover::new(
                PageLayout { tail_bytes: 1, ..layout },
                RopeSpec { inv_freq, attention_factor: 1.0, style: RopeStyle::Pairs }
            )
            .is_none()
        );
    }
}
