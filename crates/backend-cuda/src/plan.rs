//! One step's batch as the kernels read it: one upload of tokens, positions and attention tasks.
//!
//! A sequence with one row is *split*: a task for each chunk of its keys, then a merge. A sequence
//! with more rows is cut into *tiles* that walk their chunks alone. Both give the same bits, so
//! that the choice is only about filling the device.

use std::sync::Arc;

use nuthatch_backend::{BatchLayout, DeviceError, PlanShape};
use nuthatch_types::Slot;

use crate::device::{Device, Memory};
use crate::kv::{PAGE_LEN, PageShape};
use crate::launch::attend::{AttendKernels, CHUNK, Merge, TILE_LINES, Task, WARP_LINES};

/// Most chunks of one step that are computed apart; rows beyond that are tiles. Guessed: a hundred
/// times what fills the largest device.
const MAX_PARTIALS: usize = 8192;

/// Words of a task and of a merge.
const TASK_WORDS: usize = size_of::<Task>() / 4;
const MERGE_WORDS: usize = size_of::<Merge>() / 4;

/// Tables of slots, one row for each running sequence.
pub struct CudaTables {
    memory: Memory,
    n_rows: u32,
    n_pages: u32,
}

impl CudaTables {
    pub(crate) fn new(device: &Device, n_rows: u32, n_pages: u32) -> Result<Self, DeviceError> {
        let bytes = n_rows as usize * n_pages as usize * 4;
        Ok(CudaTables { memory: device.alloc(bytes, "tables")?, n_rows, n_pages })
    }

    pub(crate) fn write(
        &mut self,
        device: &Device,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        assert!(row < self.n_rows, "a table that is there");
        assert!(start as usize + slots.len() <= self.n_pages as usize, "the slots fit the table");
        let slots: Vec<u32> = slots.iter().map(|slot| slot.0).collect();
        let at = row as usize * self.n_pages as usize + start as usize;
        device.upload(&self.memory, at * 4, &slots)
    }
}

/// Where the parts of the upload are, in words from its start, and how many of each there are.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    n_rows: usize,
    n_outputs: usize,
    splits: usize,
    n_splits: usize,
    tiles: usize,
    n_tiles: usize,
    merges: usize,
    n_merges: usize,
    /// One more than the largest token.
    n_tokens_known: usize,
}

/// A prepared batch.
pub struct CudaPlan {
    pub(crate) shape: PlanShape,
    pub(crate) page: PageShape,
    pub(crate) kernels: Arc<AttendKernels>,
    /// `[rotated width / 2]`
    pub(crate) inv_freq: Memory,
    /// `[T][rotated width / 2]` cosine and sine.
    pub(crate) angles: Memory,
    /// `[partial][G][group][width]` and `[partial][G][group]` maximum and sum, of splits.
    pub(crate) partials: Memory,
    pub(crate) sums: Memory,
    max_partials: usize,
    /// The tables that the batch was planned with.
    pub(crate) tables: u64,
    pub(crate) table_len: u32,
    /// `[T]` tokens, `[T]` positions, `[T]` table rows, output rows, splits, tiles, merges.
    words: Memory,
    host: Vec<u32>,
    parts: Parts,
}

impl CudaPlan {
    pub(crate) fn new(
        device: &Device,
        shape: &PlanShape,
        kernels: Arc<AttendKernels>,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "the plan of a step";
        let page = PageShape::of(&shape.kv);
        let group = shape.n_heads / shape.kv.n_kv_heads as usize;
        let chunks = shape.max_context.div_ceil(CHUNK);
        let max_partials = shape.max_seqs.saturating_mul(chunks).min(MAX_PARTIALS);
        let max_splits = max_partials * group.div_ceil(WARP_LINES);
        let max_tiles = (shape.max_rows * group).div_ceil(TILE_LINES) + shape.max_seqs;
        let words = 4 * shape.max_rows
            + TASK_WORDS * (max_splits + max_tiles + 1)
            + MERGE_WORDS * shape.max_seqs;
        let inv_freq = device.alloc(shape.rope.inv_freq.len() * 4, WHAT)?;
        device.upload(&inv_freq, 0, &shape.rope.inv_freq)?;
        let lines = max_partials * shape.n_heads;
        Ok(CudaPlan {
            angles: device.alloc(shape.max_rows * shape.rope.inv_freq.len() * 8, WHAT)?,
            partials: device.alloc(lines * page.width() * 4, WHAT)?,
            sums: device.alloc(lines * 8, WHAT)?,
            words: device.alloc(words * 4, WHAT)?,
            host: Vec::with_capacity(words),
            shape: shape.clone(),
            page,
            kernels,
            inv_freq,
            max_partials,
            tables: 0,
            table_len: 0,
            parts: Parts::default(),
        })
    }

    /// Rows of the batch.
    pub(crate) fn n_rows(&self) -> usize {
        self.parts.n_rows
    }

    /// Rows that logits are wanted for.
    pub(crate) fn n_outputs(&self) -> usize {
        self.parts.n_outputs
    }

    /// One more than the largest token of the batch.
    pub(crate) fn n_tokens_known(&self) -> usize {
        self.parts.n_tokens_known
    }

    /// Query heads that share a key/value head.
    pub(crate) fn group(&self) -> usize {
        self.shape.n_heads / self.shape.kv.n_kv_heads as usize
    }

    fn word(&self, at: usize) -> u64 {
        self.words.address() + at as u64 * 4
    }

    /// `[T]`
    pub(crate) fn tokens(&self) -> u64 {
        self.word(0)
    }

    /// `[T]`
    pub(crate) fn positions(&self) -> u64 {
        self.word(self.parts.n_rows)
    }

    /// `[T]`
    pub(crate) fn table_rows(&self) -> u64 {
        self.word(2 * self.parts.n_rows)
    }

    /// `[outputs]`
    pub(crate) fn output_rows(&self) -> u64 {
        self.word(3 * self.parts.n_rows)
    }

    /// Tasks of one token and one chunk.
    pub(crate) fn splits(&self) -> (u64, u32) {
        (self.word(self.parts.splits), self.parts.n_splits as u32)
    }

    /// Tasks of many lines and all chunks.
    pub(crate) fn tiles(&self) -> (u64, u32) {
        (self.word(self.parts.tiles), self.parts.n_tiles as u32)
    }

    /// Rows whose chunks are merged.
    pub(crate) fn merges(&self) -> (u64, u32) {
        (self.word(self.parts.merges), self.parts.n_merges as u32)
    }

    /// Works out the tasks of a batch and uploads everything.
    pub(crate) fn prepare(
        &mut self,
        device: &Device,
        tables: &CudaTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        let (n_rows, n_seqs) = (layout.n_rows(), layout.n_seqs());
        assert!(n_rows <= self.shape.max_rows, "no more rows than the plan holds");
        assert!(n_seqs <= self.shape.max_seqs, "no more sequences than the plan holds");
        assert_eq!(layout.query_start.len(), n_seqs + 1);
        assert!(layout.output_rows.iter().all(|&row| (row as usize) < n_rows), "rows of the batch");
        (self.tables, self.table_len) = (tables.memory.address(), tables.n_pages);
        let mut table_rows = vec![0; n_rows];
        let mut tasks = Tasks { group: self.group(), ..Tasks::default() };
        for i in 0..n_seqs {
            let rows = layout.query_start[i] as usize..layout.query_start[i + 1] as usize;
            let kv_len = layout.kv_len[i] as usize;
            assert!(!rows.is_empty() && rows.len() <= kv_len && kv_len <= self.shape.max_context);
            assert_eq!(layout.positions[rows.start] as usize, kv_len - rows.len());
            assert!(
                kv_len.div_ceil(PAGE_LEN) <= tables.n_pages as usize,
                "the table is long enough"
            );
            assert!(layout.table_row[i] < tables.n_rows, "a table that is there");
            table_rows[rows.clone()].fill(layout.table_row[i]);
            let seq = Seq {
                first_row: rows.start,
                n_rows: rows.len(),
                position: kv_len - rows.len(),
                table_row: layout.table_row[i],
            };
            let n_chunks = kv_len.div_ceil(CHUNK);
            if seq.n_rows == 1 && tasks.n_partials + n_chunks <= self.max_partials {
                tasks.split(&seq, n_chunks);
            } else {
                tasks.tile(&seq, n_chunks);
            }
        }
        self.host.clear();
        self.host.extend(&layout.tokens);
        self.host.extend(&layout.positions);
        self.host.extend(&table_rows);
        self.host.extend(&layout.output_rows);
        // Tasks are read in pieces of sixteen bytes.
        self.host.resize(self.host.len().next_multiple_of(4), 0);
        let splits = self.host.len();
        self.host.extend(tasks.splits.iter().flat_map(task_words));
        let tiles = self.host.len();
        self.host.extend(tasks.tiles.iter().flat_map(task_words));
        let merges = self.host.len();
        self.host.extend(tasks.merges.iter().flat_map(merge_words));
        self.parts = Parts {
            n_rows,
            n_outputs: layout.output_rows.len(),
            splits,
            n_splits: tasks.splits.len(),
            tiles,
            n_tiles: tasks.tiles.len(),
            merges,
            n_merges: tasks.merges.len(),
            n_tokens_known: layout.tokens.iter().max().map_or(0, |&token| token as usize + 1),
        };
        device.upload(&self.words, 0, &self.host)
    }
}

/// One sequence of the batch.
struct Seq {
    first_row: usize,
    n_rows: usize,
    /// Position of the first row.
    position: usize,
    table_row: u32,
}

/// The attention tasks of a batch.
#[derive(Default)]
struct Tasks {
    group: usize,
    splits: Vec<Task>,
    tiles: Vec<Task>,
    merges: Vec<Merge>,
    n_partials: usize,
}

impl Tasks {
    /// The sequence's only row, a task for each chunk.
    fn split(&mut self, seq: &Seq, n_chunks: usize) {
        for chunk in 0..n_chunks {
            let partial = self.n_partials + chunk;
            for first_line in (0..self.group).step_by(WARP_LINES) {
                let n_lines = WARP_LINES.min(self.group - first_line);
                let lines = first_line..first_line + n_lines;
                self.splits
                    .push(Task { partial: partial as u32, ..task(seq, lines, chunk..chunk + 1) });
            }
        }
        self.merges.push(Merge {
            row: seq.first_row as u32,
            partial: self.n_partials as u32,
            n_partials: n_chunks as u32,
            padding: 0,
        });
        self.n_partials += n_chunks;
    }

    /// Tiles of lines over all chunks.
    fn tile(&mut self, seq: &Seq, n_chunks: usize) {
        let n_lines = seq.n_rows * self.group;
        // The last tiles see the most keys; starting with them evens out the finish.
        for first in (0..n_lines).step_by(TILE_LINES).rev() {
            let lines = first..n_lines.min(first + TILE_LINES);
            self.tiles.push(task(seq, lines, 0..n_chunks));
        }
    }
}

fn task(seq: &Seq, lines: std::ops::Range<usize>, chunks: std::ops::Range<usize>) -> Task {
    Task {
        first_row: seq.first_row as u32,
        first_line: lines.start as u32,
        n_lines: lines.len() as u32,
        position: seq.position as u32,
        table_row: seq.table_row,
        first_chunk: chunks.start as u32,
        end_chunk: chunks.end as u32,
        partial: 0,
    }
}

fn task_words(task: &Task) -> [u32; TASK_WORDS] {
    let Task { first_row, first_line, n_lines, position, table_row, .. } = *task;
    let Task { first_chunk, end_chunk, partial, .. } = *task;
    [first_row, first_line, n_lines, position, table_row, first_chunk, end_chunk, partial]
}

fn merge_words(merge: &Merge) -> [u32; MERGE_WORDS] {
    [merge.row, merge.partial, merge.n_partials, merge.padding]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_row_is_split_and_a_prompt_is_tiled() {
        let mut tasks = Tasks { group: 20, ..Tasks::default() };
        let row = Seq { first_row: 3, n_rows: 1, position: 600, table_row: 9 };
        tasks.split(&row, 3);
        // Twenty lines are two warps for each of three chunks.
        let found: Vec<_> = tasks
            .splits
            .iter()
            .map(|t| (t.first_line, t.n_lines, t.first_chunk, t.end_chunk, t.partial))
            .collect();
        let expected = [(0, 16, 0, 1, 0), (16, 4, 0, 1, 0), (0, 16, 1, 2, 1), (16, 4, 1, 2, 1)];
        assert_eq!(found[..4], expected);
        assert_eq!(found.len(), 6);
        assert_eq!((tasks.merges[0].row, tasks.merges[0].n_partials), (3, 3));

        let prompt = Seq { first_row: 4, n_rows: 7, position: 0, table_row: 1 };
        tasks.tile(&prompt, 1);
        let found: Vec<_> = tasks.tiles.iter().map(|t| (t.first_line, t.n_lines)).collect();
        assert_eq!(found, [(128, 12), (64, 64), (0, 64)]);
        assert_eq!(tasks.n_partials, 3);
    }
}
