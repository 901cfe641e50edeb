//! One step's batch as the operations read it: tokens, tables, angles, and the list of attention
//! tasks.

use nuthatch_backend::{BatchLayout, PlanShape, RopeStyle};
use nuthatch_types::Slot;

use crate::kv::PAGE;

/// Keys that one partial softmax covers. Boundaries are at multiples of this from the sequence's
/// start, never elsewhere: the order of every sum depends on the place alone.
pub(crate) const CHUNK: usize = 256;
/// Query rows (tokens times heads of the group) that a tile shares converted keys over.
const TILE_ROWS: usize = 128;

/// Tables of slots, one row for each running sequence.
pub struct CpuTables {
    n_pages: usize,
    slots: Vec<u32>,
}

impl CpuTables {
    pub(crate) fn new(n_rows: u32, n_pages: u32) -> Self {
        CpuTables { n_pages: n_pages as usize, slots: vec![0; n_rows as usize * n_pages as usize] }
    }

    pub(crate) fn write(&mut self, row: u32, start: u32, slots: &[Slot]) {
        let start = start as usize;
        assert!(start + slots.len() <= self.n_pages);
        let at = row as usize * self.n_pages + start;
        for (target, slot) in self.slots[at..at + slots.len()].iter_mut().zip(slots) {
            *target = slot.0;
        }
    }

    fn row(&self, row: u32, n: usize) -> &[u32] {
        assert!(n <= self.n_pages);
        &self.slots[row as usize * self.n_pages..][..n]
    }
}

/// One sequence of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanSeq {
    /// First row, and rows, of the batch.
    pub(crate) first_row: usize,
    pub(crate) n_rows: usize,
    /// Place of the first row in the table.
    pub(crate) place: usize,
    /// First entry of its table in `CpuPlan::slots`.
    pub(crate) first_slot: usize,
    /// Its table.
    pub(crate) table_row: u32,
}

impl PlanSeq {
    /// Keys of the sequence once this step is written.
    pub(crate) fn kv_len(&self) -> usize {
        self.place + self.n_rows
    }
}

/// A piece of attention that one thread does alone, for one key/value head.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Rows `start..start + n` of the sequence over all their keys.
    Tile { seq: usize, start: usize, n: usize },
    /// The sequence's only row over the keys of one chunk; `partial` is where the result goes.
    Split { seq: usize, chunk: usize, partial: usize },
}

/// Rows of one sequence whose keys go to one page; one thread writes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageRun {
    pub(crate) seq: usize,
    /// First row inside the sequence, and rows.
    pub(crate) start: usize,
    pub(crate) n: usize,
}

/// A prepared batch.
pub struct CpuPlan {
    pub(crate) shape: PlanShape,
    pub(crate) tokens: Vec<u32>,
    pub(crate) output_rows: Vec<u32>,
    pub(crate) seqs: Vec<PlanSeq>,
    pub(crate) slots: Vec<u32>,
    /// `[T][rotated width / 2]`.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) runs: Vec<PageRun>,
    pub(crate) tasks: Vec<Task>,
    /// Partial results of all [`Task::Split`].
    pub(crate) n_partials: usize,
    /// Scratch for those, `[n_partials][group][D + 2]` per key/value head; grows, never shrinks.
    pub(crate) partials: std::sync::Mutex<Vec<f32>>,
}

impl CpuPlan {
    pub(crate) fn new(shape: &PlanShape) -> Self {
        CpuPlan {
            shape: shape.clone(),
            tokens: Vec::with_capacity(shape.max_rows),
            output_rows: Vec::with_capacity(shape.max_seqs),
            seqs: Vec::with_capacity(shape.max_seqs),
            slots: Vec::new(),
            cos: Vec::new(),
            sin: Vec::new(),
            runs: Vec::new(),
            tasks: Vec::new(),
            n_partials: 0,
            partials: std::sync::Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Query heads that share a key/value head.
    pub(crate) fn group(&self) -> usize {
        self.shape.n_heads / self.shape.kv.n_kv_heads as usize
    }

    pub(crate) fn prepare(&mut self, tables: &CpuTables, layout: &BatchLayout) {
        assert!(layout.n_rows() <= self.shape.max_rows && layout.n_seqs() <= self.shape.max_seqs);
        assert_eq!(layout.query_start.len(), layout.n_seqs() + 1);
        self.tokens.clone_from(&layout.tokens);
        self.output_rows.clone_from(&layout.output_rows);
        self.seqs.clear();
        self.slots.clear();
        self.runs.clear();
        self.tasks.clear();
        self.n_partials = 0;
        for i in 0..layout.n_seqs() {
            let first_row = layout.query_start[i] as usize;
            let n_rows = layout.query_start[i + 1] as usize - first_row;
            let kv_len = layout.kv_len[i] as usize;
            assert!(n_rows >= 1 && n_rows <= kv_len && kv_len <= self.shape.max_context);
            let place = kv_len - n_rows;
            let first_slot = self.slots.len();
            let n_pages = kv_len.div_ceil(PAGE);
            let table_row = layout.table_row[i];
            self.slots.extend_from_slice(tables.row(table_row, n_pages));
            self.seqs.push(PlanSeq { first_row, n_rows, place, first_slot, table_row });
            self.plan_runs(i);
            self.plan_tasks(i);
        }
        self.angles(&layout.positions);
    }

    fn plan_runs(&mut self, seq: usize) {
        let PlanSeq { n_rows, place, .. } = self.seqs[seq];
        let mut start = 0;
        while start < n_rows {
            let room = PAGE - (place + start) % PAGE;
            let n = room.min(n_rows - start);
            self.runs.push(PageRun { seq, start, n });
            start += n;
        }
    }

    fn plan_tasks(&mut self, seq: usize) {
        let PlanSeq { n_rows, .. } = self.seqs[seq];
        if n_rows == 1 {
            for chunk in 0..self.seqs[seq].kv_len().div_ceil(CHUNK) {
                self.tasks.push(Task::Split { seq, chunk, partial: self.n_partials });
                self.n_partials += 1;
            }
            return;
        }
        let step = (TILE_ROWS / self.group()).clamp(1, 32);
        // The last tiles see the most keys; starting with them evens out the finish.
        for start in (0..n_rows).step_by(step).rev() {
            self.tasks.push(Task::Tile { seq, start, n: step.min(n_rows - start) });
        }
    }

    fn angles(&mut self, positions: &[u32]) {
        let rope = &self.shape.rope;
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &inv_freq in &rope.inv_freq {
                // In f32 the product would be off by a unit in its last place, which is 0.06
                // radians at a million, and a sequence that streams goes on beyond that.
                let (sin, cos) = (f64::from(position) * f64::from(inv_freq)).sin_cos();
                self.cos.push(cos as f32 * rope.attention_factor);
                self.sin.push(sin as f32 * rope.attention_factor);
            }
        }
    }

    pub(crate) fn halves(&self) -> bool {
        self.shape.rope.style == RopeStyle::Halves
    }
}
