//! Which blocks attend to what: splits and tiles of a batch.

use crate::launch::attend::{Part, Split, Task};
use crate::launch::attend_shape::Cuts;

/// Words of a split, of its parts, and of a task.
pub(super) const SPLIT_WORDS: usize = size_of::<Split>() / 4;
pub(super) const PART_WORDS: usize = size_of::<Part>() / 4;
pub(super) const TASK_WORDS: usize = size_of::<Task>() / 4;

/// One sequence of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seq {
    pub(crate) first_row: usize,
    pub(crate) n_rows: usize,
    /// Of the first row.
    pub(crate) place: usize,
    pub(crate) table_row: u32,
}

impl Seq {
    /// Tokens of the sequence, the batch's included.
    pub(crate) fn kv_len(&self) -> usize {
        self.place + self.n_rows
    }
}

/// The attention tasks of a batch.
pub(super) struct Tasks {
    group: usize,
    tile_lines: usize,
    cuts: Cuts,
    max_partials: usize,
    pub(super) splits: Vec<Split>,
    pub(super) tiles: Vec<Task>,
    n_partials: usize,
}

impl Tasks {
    pub(super) fn new(
        (group, tile_lines): (usize, usize),
        cuts: Cuts,
        max_partials: usize,
    ) -> Self {
        let (splits, tiles) = (Vec::new(), Vec::new());
        Tasks { group, tile_lines, cuts, max_partials, splits, tiles, n_partials: 0 }
    }

    /// A split if the sequence has one row and there is room, or else tiles.
    pub(super) fn push(&mut self, seq: &Seq) {
        let n_keys = seq.place + seq.n_rows;
        let [.., n_chunks] = self.cuts.n_chunks(n_keys);
        if seq.n_rows > 1 || self.n_partials + n_chunks > self.max_partials {
            return self.tile(seq);
        }
        let (row, n_keys, partial) = (seq.first_row as u32, n_keys as u32, self.n_partials as u32);
        self.splits.push(Split { row, n_keys, table_row: seq.table_row, partial });
        self.n_partials += n_chunks;
    }

    /// The chunks of all splits, large ones first, and how many there are.
    pub(super) fn parts(&self, mut push: impl FnMut(Part)) -> u32 {
        let mut n_parts = 0;
        for size in [3, 2, 1, 0] {
            for split in &self.splits {
                let ends = self.cuts.n_chunks(split.n_keys as usize);
                let start = if size == 0 { 0 } else { ends[size - 1] };
                for chunk in start as u32..ends[size] as u32 {
                    let (row_chunk, partial) = (split.row | chunk << 16, split.partial + chunk);
                    let (n_keys, table_row) = (split.n_keys, split.table_row);
                    push(Part { row_chunk, n_keys, table_row, partial });
                    n_parts += 1;
                }
            }
        }
        n_parts
    }

    /// Tiles of lines over all chunks.
    fn tile(&mut self, seq: &Seq) {
        let n_lines = seq.n_rows * self.group;
        // The last tiles see the most keys; starting with them evens out the finish.
        for first in (0..n_lines).step_by(self.tile_lines).rev() {
            self.tiles.push(Task {
                first_row: seq.first_row as u32,
                first_line: first as u32,
                n_lines: self.tile_lines.min(n_lines - first) as u32,
                place: seq.place as u32,
                table_row: seq.table_row,
                padding: [0; 3],
            });
        }
    }
}

pub(super) fn split_words(split: &Split) -> [u32; SPLIT_WORDS] {
    [split.row, split.n_keys, split.table_row, split.partial]
}

pub(super) fn part_words(part: &Part) -> [u32; PART_WORDS] {
    [part.row_chunk, part.n_keys, part.table_row, part.partial]
}

pub(super) fn task_words(task: &Task) -> [u32; TASK_WORDS] {
    let Task { first_row, first_line, n_lines, place, table_row, padding: [a, b, c] } = *task;
    [first_row, first_line, n_lines, place, table_row, a, b, c]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_alone_is_split_and_a_prompt_is_tiled() {
        let mut tasks = Tasks::new((20, 64), Cuts::of(8), 18);
        let row = Seq { first_row: 3, n_rows: 1, place: 600, table_row: 9 };
        tasks.push(&row);
        assert_eq!(split_words(&tasks.splits[0]), [3, 601, 9, 0]);
        assert_eq!(tasks.n_partials, 10);

        tasks.push(&Seq { first_row: 4, n_rows: 7, place: 0, table_row: 1 });
        let found: Vec<_> = tasks.tiles.iter().map(|t| (t.first_line, t.n_lines)).collect();
        assert_eq!(found, [(128, 12), (64, 64), (0, 64)]);

        // Ten more chunks have no place, eight have.
        tasks.push(&row);
        assert_eq!((tasks.splits.len(), tasks.tiles.len()), (1, 4));
        tasks.push(&Seq { place: 511, ..row });
        assert_eq!(split_words(&tasks.splits[1]), [3, 512, 9, 10]);
    }

    #[test]
    fn large_chunks_come_first() {
        let cuts = Cuts { n_small: 32, n_middle: 32, large: 384, n_large: 1 };
        let mut tasks = Tasks::new((1, 64), cuts, 200);
        tasks.push(&Seq { first_row: 0, n_rows: 1, place: 8600, table_row: 5 });
        tasks.push(&Seq { first_row: 1, n_rows: 1, place: 100, table_row: 6 });
        let mut parts = Vec::new();
        let n = tasks.parts(|part| parts.push((part.row_chunk & 0xFFFF, part.row_chunk >> 16)));
        assert_eq!((n as usize, parts.len()), (68, 68));
        assert_eq!(parts[..4], [(0, 65), (0, 64), (0, 32), (0, 33)]);
        assert_eq!(parts[34..36], [(0, 0), (0, 1)]);
        assert_eq!(parts[66..], [(1, 0), (1, 1)]);
    }
}
