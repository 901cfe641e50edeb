//! One step's batch as the kernels read it: one upload of tokens, positions and attention tasks.
//!
//! A sequence with one row is *split*: each chunk of its keys is computed apart, then a merge. A
//! sequence with more rows is cut into *tiles* that walk their chunks alone. Both give the same bits,
//! so that the choice is only about filling the device.
//!
//! A batch in which all rows are split and all are wanted is a *decode* batch. What its kernels are
//! queued with depends on nothing but the number of rows, and on whether they have many tasks, so that they
//! can be recorded.

mod tasks;

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nuthatch_backend::{BatchLayout, DeviceError, PlanShape};
use nuthatch_types::Slot;

use crate::branch::{Branch, LateBranch};
use crate::device::{Device, Memory};
use crate::graph::Recordings;
use crate::kv::{CudaKv, PAGE_LEN, PageShape};
use crate::launch::attend::AttendKernels;
use crate::launch::attend_shape::{Cuts, PacedShape, SplitShape};
use crate::launch::draw::Draws;
use crate::launch::{Address, count};
use crate::sparse::Told;

pub(crate) use self::tasks::Seq;
use self::tasks::{
    PART_WORDS, SPLIT_WORDS, TASK_WORDS, Tasks, part_words, split_words, task_words,
};

/// Most chunks of one step that are computed apart; rows beyond that are tiles. Guessed: a hundred
/// times what fills the largest device.
const MAX_PARTIALS: usize = 8192;

/// Rows of a batch; see [`Part`](crate::launch::attend::Part).
const MAX_ROWS: usize = 1 << 16;

/// Words of the counts.
const N_COUNTS: usize = 4;

/// Slots of all tables.
type Slots = Arc<Mutex<Vec<u32>>>;

/// Batches that were planned so far.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Tables of slots, one row for each running sequence.
pub struct CudaTables {
    memory: Memory,
    /// The same on this side.
    slots: Slots,
    n_rows: u32,
    n_pages: u32,
}

impl CudaTables {
    pub(crate) fn new(device: &Device, n_rows: u32, n_pages: u32) -> Result<Self, DeviceError> {
        let n = n_rows as usize * n_pages as usize;
        let memory = device.alloc(n * 4, "tables")?;
        Ok(CudaTables { memory, slots: Arc::new(Mutex::new(vec![0; n])), n_rows, n_pages })
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
        let at = row as usize * self.n_pages as usize + start as usize;
        let slots: Vec<u32> = match device.has_virtual_kv() {
            // Pages are where the tables say that they come.
            true => (at as u32..).take(slots.len()).collect(),
            false => slots.iter().map(|slot| slot.0).collect(),
        };
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        all[at..at + slots.len()].copy_from_slice(&slots);
        device.upload(&self.memory, at * 4, &slots)
    }
}

/// What the upload has, and how many of each there are.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    n_rows: usize,
    n_outputs: usize,
    /// Attention to everything: of all rows, and of those only about which nobody decides.
    all: Listed,
    rest: Listed,
    /// One more than the largest token.
    n_tokens_known: usize,
    is_decode: bool,
}

/// Attention tasks of some rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Listed {
    /// How many chunks there are, and behind it how many were taken.
    pub(crate) counts: Address,
    /// Rows whose chunks are computed apart,
    pub(crate) splits: Address,
    pub(crate) n_splits: u32,
    /// and their chunks.
    pub(crate) parts: Address,
    /// Which kernel those have, if they are many: see [`PacedShape::choose`].
    pub(crate) paced: Option<usize>,
    /// Tasks of many lines and all chunks.
    pub(crate) tiles: Address,
    pub(crate) n_tiles: u32,
}

/// A prepared batch.
pub struct CudaPlan {
    pub(crate) shape: PlanShape,
    /// For each kind of pages.
    kernels: Vec<(PageShape, Arc<AttendKernels>)>,
    /// `[rotated width / 2]`
    pub(crate) inv_freq: Memory,
    /// `[T][rotated width / 2]` cosine and sine.
    pub(crate) angles: Memory,
    /// `[partial][G][group][width]` and `[partial][G][group]` maximum and sum, of splits.
    pub(crate) partials: Memory,
    pub(crate) sums: Memory,
    max_partials: usize,
    /// Where tasks of the rows are about which nobody decides, in words.
    rest_at: usize,
    /// The tables that the batch was planned with.
    pub(crate) tables: u64,
    pub(crate) table_len: u32,
    slots: Slots,
    /// The batch's number, of all that were ever planned.
    pub(crate) step: u64,
    /// How many parts of splits there are, and how many were taken; then `[T]` positions, places and
    /// table rows, output rows, splits, tiles, and parts of splits. At last the same counts and tasks of the rest.
    words: Memory,
    host: Vec<u32>,
    /// The sequences of the batch.
    pub(crate) seqs: Vec<Seq>,
    /// Rules, and how many rows of the batch the device decides about by them.
    pub(crate) deciding: Vec<(usize, usize)>,
    /// Layers that were decided about before their turn: an even one, and an odd one.
    pub(crate) ahead: [Cell<Option<usize>>; 2],
    /// Whether all rows are served by the selections that their heads have.
    pub(crate) is_served: bool,
    /// Whether all sequences that the device decides about are short.
    pub(crate) is_short: bool,
    /// Where selections are made late.
    pub(crate) late: Option<Arc<LateBranch>>,
    /// Who tells the host what is decided, and about the sequences of which tables.
    pub(crate) told: Option<(Arc<Told>, Vec<u32>)>,
    parts: Parts,
    /// While a pass is queued: beside which pages that are far are written, or digests taken.
    pub(crate) beside: Option<Branch>,
    /// What it was before and will be again.
    idle_beside: [Option<Branch>; 2],
    /// Rows of the table that tokens were last looked up in.
    vocab: Cell<usize>,
    pub(crate) draws: Draws,
    pub(crate) recordings: Recordings,
}

impl CudaPlan {
    pub(crate) fn new(
        device: &Device,
        shape: &PlanShape,
        kernels: Vec<(PageShape, Arc<AttendKernels>)>,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "the plan of a step";
        if shape.max_rows > MAX_ROWS {
            let rows = shape.max_rows;
            let message = format!("a step of {rows} tokens: this device takes at most {MAX_ROWS}");
            return Err(DeviceError::Fault(message));
        }
        let width = PageShape::of_layer(&shape.kv, 0).width();
        let group = shape.n_heads / shape.kv.n_kv_heads as usize;
        let [.., chunks] = Cuts::of(shape.kv.n_kv_heads).n_chunks(shape.max_context);
        let max_partials = shape.max_seqs.saturating_mul(chunks).min(MAX_PARTIALS);
        let max_tiles = (shape.max_rows * group).div_ceil(tile_lines(&kernels)) + shape.max_seqs;
        let words = N_COUNTS
            + SPLIT_WORDS * shape.max_seqs
            + TASK_WORDS * max_tiles
            // Warps look at as many before they know how many there are.
            + PART_WORDS * max_partials.max(device.n_multiprocessors() as usize * SplitShape::MAX_WARPS);
        let rest_at = (words + 4 * shape.max_rows).next_multiple_of(4) + 4;
        let words = rest_at + words;
        let inv_freq = device.alloc(shape.rope.inv_freq.len() * 4, WHAT)?;
        device.upload(&inv_freq, 0, &shape.rope.inv_freq)?;
        let lines = max_partials * shape.n_heads;
        Ok(CudaPlan {
            angles: device.alloc(shape.max_rows * shape.rope.inv_freq.len() * 8, WHAT)?,
            partials: device.alloc(lines * width * 4, WHAT)?,
            sums: device.alloc(lines * 8, WHAT)?,
            words: device.alloc(words * 4, WHAT)?,
            host: Vec::with_capacity(words),
            seqs: Vec::new(),
            deciding: Vec::new(),
            ahead: Default::default(),
            late: None,
            told: None,
            is_served: false,
            is_short: false,
            shape: shape.clone(),
            kernels,
            inv_freq,
            max_partials,
            rest_at,
            tables: 0,
            table_len: 0,
            slots: Slots::default(),
            step: 0,
            parts: Parts::default(),
            beside: None,
            idle_beside: [None, None],
            vocab: Cell::new(0),
            draws: Draws::new(device, shape.max_rows)?,
            recordings: Recordings::default(),
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

    /// Whether every row is split and wanted.
    pub(crate) fn is_decode(&self) -> bool {
        self.parts.is_decode
    }

    /// Asserts that the batch's tokens are rows of a table, and remembers it for recordings.
    pub(crate) fn check_tokens(&self, n_rows: usize) {
        assert!(self.parts.n_tokens_known <= n_rows, "tokens of the table");
        self.vocab.set(n_rows);
    }

    /// Asserts that the batch's tokens are rows of the table that recordings look them up in.
    pub(crate) fn check_tokens_again(&self) {
        let n_rows = self.vocab.get();
        assert!(n_rows == 0 || self.parts.n_tokens_known <= n_rows, "tokens of the table");
    }

    /// Where chunks of keys get longer.
    pub(crate) fn cuts(&self) -> Cuts {
        Cuts::of(self.shape.kv.n_kv_heads)
    }

    /// The kernels for pages of an arena: one whose pages are of rows has its own.
    pub(crate) fn kernels_of<'a>(&'a self, kv: &'a CudaKv, page: PageShape) -> &'a AttendKernels {
        if let Some(sparse) = &kv.sparse {
            return &sparse.attend;
        }
        let (_, kernels) =
            self.kernels.iter().find(|(of, _)| *of == page).expect("pages of the plan");
        kernels
    }

    /// Lines of a task of many; kernels that take fewer share it.
    pub(crate) fn tile_lines(&self) -> usize {
        tile_lines(&self.kernels)
    }

    /// Query heads that share a key/value head.
    pub(crate) fn group(&self) -> usize {
        self.shape.n_heads / self.shape.kv.n_kv_heads as usize
    }

    /// `[row][table_len]` the slots of all tables.
    pub(crate) fn slots(&self) -> MutexGuard<'_, Vec<u32>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts memory behind the pages of the batch's sequences, where there are addresses only.
    pub(crate) fn back_tables(&self, device: &Device, kv: &CudaKv) -> Result<(), DeviceError> {
        let virtual_seqs = self.seqs.iter().filter(|_| device.has_virtual_kv());
        virtual_seqs.into_iter().try_for_each(|seq| {
            let n_pages = seq.kv_len().div_ceil(PAGE_LEN) as u32;
            kv.back_table(device, (seq.table_row, self.table_len), n_pages)
        })
    }

    /// Something runs beside the pass that begins.
    pub(crate) fn begin_beside(&mut self, device: &Device) -> Result<(), DeviceError> {
        // Pages that come for a prompt would else wait until the last blocks of attention have begun.
        let is_urgent = !self.is_decode();
        if self.beside.as_ref().is_none_or(|branch| branch.is_urgent != is_urgent) {
            self.leave_beside();
            let idle = self.idle_beside[usize::from(is_urgent)].take();
            self.beside = Some(idle.map_or_else(|| Branch::new(device, is_urgent), Ok)?);
        }
        Ok(())
    }

    /// What comes after the pass begins after that has ended.
    pub(crate) fn end_beside(&mut self, device: &Device) -> Result<(), DeviceError> {
        self.beside.as_ref().map_or(Ok(()), |branch| branch.join(device, 0))?;
        self.late.take().map_or(Ok(()), |late| late.join(device))?;
        self.leave_beside();
        Ok(())
    }

    /// The pass is queued: what it says to the host is on its way.
    pub(crate) fn tell(&mut self, device: &Device) -> Result<(), DeviceError> {
        if let Some((told, tables)) = self.told.take() {
            told.end_pass(device, &tables)?;
        }
        self.draws.end_pass(device)
    }

    /// Nothing runs beside the pass but what was recorded.
    pub(crate) fn leave_beside(&mut self) {
        if let Some(branch) = self.beside.take() {
            let at = usize::from(branch.is_urgent);
            self.idle_beside[at] = Some(branch);
        }
    }

    fn word(&self, at: usize) -> u64 {
        self.words.address() + at as u64 * 4
    }

    /// `[T]`
    pub(crate) fn tokens(&self) -> u64 {
        self.draws.tokens.address()
    }

    /// `[T]` what rows are rotated by.
    pub(crate) fn positions(&self) -> u64 {
        self.word(N_COUNTS)
    }

    /// `[T]` which token of its table a row is.
    pub(crate) fn places(&self) -> u64 {
        self.word(N_COUNTS + self.parts.n_rows)
    }

    /// `[T]`
    pub(crate) fn table_rows(&self) -> u64 {
        self.word(N_COUNTS + 2 * self.parts.n_rows)
    }

    /// `[outputs]`
    pub(crate) fn output_rows(&self) -> u64 {
        self.word(N_COUNTS + 3 * self.parts.n_rows)
    }

    /// Attention of all rows to everything.
    pub(crate) fn all(&self) -> Listed {
        self.parts.all
    }

    /// The same of the rows about which nobody decides.
    pub(crate) fn rest(&self) -> Listed {
        self.parts.rest
    }

    /// The same in a layer where so many rows pick: if those are all about which is decided, they see no more than
    /// that, however much there is.
    pub(crate) fn beside_picks(&self, n_picking: usize) -> Listed {
        let n_deciding = self.deciding.iter().map(|same| same.1).sum();
        if n_picking > 0 && n_picking == n_deciding { self.parts.rest } else { self.parts.all }
    }

    /// Works out the tasks of a batch and uploads everything, but for the tokens unless they are known:
    /// they are then those that were drawn last.
    pub(crate) fn prepare(
        &mut self,
        device: &Device,
        tables: &CudaTables,
        layout: &BatchLayout,
        knows_tokens: bool,
    ) -> Result<(), DeviceError> {
        let (n_rows, n_seqs) = (layout.n_rows(), layout.n_seqs());
        assert!(n_rows <= self.shape.max_rows, "no more rows than the plan holds");
        assert!(n_rows <= MAX_ROWS, "a row is told in sixteen bits");
        assert!(n_seqs <= self.shape.max_seqs, "no more sequences than the plan holds");
        assert_eq!(layout.query_start.len(), n_seqs + 1);
        assert_eq!(layout.positions.len(), n_rows, "a position for each row");
        assert!(layout.output_rows.len() <= n_rows, "no more outputs than rows");
        assert!(layout.output_rows.iter().all(|&row| (row as usize) < n_rows), "rows of the batch");
        (self.tables, self.table_len) = (tables.memory.address(), tables.n_pages);
        self.slots = Arc::clone(&tables.slots);
        self.step = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
        let (mut places, mut table_rows) = (vec![0; n_rows], vec![0; n_rows]);
        self.seqs.clear();
        self.deciding.clear();
        self.told = None;
        self.is_served = false;
        self.is_short = false;
        self.ahead.iter().for_each(|ahead| ahead.set(None));
        for i in 0..n_seqs {
            let rows = layout.query_start[i] as usize..layout.query_start[i + 1] as usize;
            let kv_len = layout.kv_len[i] as usize;
            assert!(!rows.is_empty() && rows.len() <= kv_len && kv_len <= self.shape.max_context);
            assert!(kv_len.div_ceil(PAGE_LEN) <= tables.n_pages as usize, "the table is too short");
            assert!(layout.table_row[i] < tables.n_rows, "a table that is there");
            let first = kv_len - rows.len();
            for (place, row) in (first as u32..).zip(rows.clone()) {
                (places[row], table_rows[row]) = (place, layout.table_row[i]);
            }
            let (first_row, n_rows, table_row) = (rows.start, rows.len(), layout.table_row[i]);
            self.seqs.push(Seq { first_row, n_rows, place: first, table_row });
        }
        self.draws.clear();
        self.host.clear();
        self.host.resize(N_COUNTS, 0);
        self.host.extend(&layout.positions);
        self.host.extend(&places);
        self.host.extend(&table_rows);
        self.host.extend(&layout.output_rows);
        // Tasks are read in pieces of sixteen bytes.
        self.host.resize(self.host.len().next_multiple_of(4), 0);
        self.parts = Parts {
            n_rows,
            n_outputs: layout.output_rows.len(),
            // What was drawn is a row of the table, or becomes its last row.
            n_tokens_known: if knows_tokens { end_of(&layout.tokens) } else { 0 },
            ..Parts::default()
        };
        let mut host = std::mem::take(&mut self.host);
        self.parts.all = self.list_tasks(device, (&mut host, 0), |_| true);
        self.host = host;
        let is_all = layout.output_rows.iter().copied().eq(0..n_rows as u32);
        self.parts.is_decode = n_rows > 0 && self.parts.all.n_splits as usize == n_rows && is_all;
        if knows_tokens {
            device.upload(&self.draws.tokens, 0, &layout.tokens)?;
        }
        device.upload(&self.words, 0, &self.host)
    }

    /// About the rows of these sequences of the batch is decided.
    pub(crate) fn leave_out(&mut self, device: &Device, seqs: &[u32]) -> Result<(), DeviceError> {
        // Where it is about all of them, there is no rest.
        if seqs.is_empty() || seqs.len() == self.seqs.len() {
            return Ok(());
        }
        let (mut host, at) = (vec![0; N_COUNTS], self.rest_at);
        self.parts.rest = self.list_tasks(device, (&mut host, at), |seq| !seqs.contains(&seq));
        device.upload(&self.words, at * 4, &host)
    }

    /// Puts the tasks of some sequences behind everything else of an upload to a word, and how many chunks they have
    /// in front. Where they are depends on nothing that grows, because recordings know it.
    fn list_tasks(
        &self,
        device: &Device,
        (host, at): (&mut Vec<u32>, usize),
        takes: impl Fn(u32) -> bool,
    ) -> Listed {
        let lines = (self.group(), self.tile_lines());
        let mut tasks = Tasks::new(lines, self.cuts(), self.max_partials);
        for (_, seq) in (0..).zip(&self.seqs).filter(|(i, _)| takes(*i)) {
            tasks.push(seq);
        }
        let splits = self.word(at + host.len());
        host.extend(tasks.splits.iter().flat_map(split_words));
        let tiles = self.word(at + host.len());
        host.extend(tasks.tiles.iter().flat_map(task_words));
        let parts = self.word(at + host.len());
        let n_parts = tasks.parts(|part| host.extend(part_words(&part)));
        let n_tasks = n_parts as usize * self.shape.kv.n_kv_heads as usize * lines.0.div_ceil(8);
        host[0] = n_parts;
        Listed {
            counts: self.word(at),
            splits,
            n_splits: count(tasks.splits.len()),
            parts,
            paced: PacedShape::choose(n_tasks, device.n_multiprocessors()),
            tiles,
            n_tiles: count(tasks.tiles.len()),
        }
    }
}

/// One more than the largest.
fn end_of(tokens: &[u32]) -> usize {
    tokens.iter().max().map_or(0, |&token| token as usize + 1)
}

fn tile_lines(kernels: &[(PageShape, Arc<AttendKernels>)]) -> usize {
    kernels.iter().map(|(_, kernels)| kernels.tile_lines()).max().unwrap_or(1)
}
