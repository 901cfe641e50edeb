//! Rows kept near, and how they get there.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nuthatch_backend::{Bring, DeviceError, Near, NearCounts, NearHead, RowCode, narrow, widen};
use nuthatch_types::KvDtype;

use crate::Cpu;
use crate::far::PageFile;
use crate::kv::{CpuKv, PAGE};
use crate::mem::{Region, SharedMut};
use crate::plan::{CpuPlan, PlanSeq};
use crate::pool::Pool;

/// The near rows of all tables and heads.
pub(crate) struct NearRows {
    /// `[head]`, layers and heads counted together; with the first row and the first tag inside of
    /// a table's.
    heads: Vec<(NearHead, usize, usize)>,
    table_rows: usize,
    table_tags: usize,
    row_bytes: usize,
    /// What rows that are brought are rounded to, and their type.
    code: Option<(RowCode, KvDtype)>,
    bytes: SharedMut<'static, u8>,
    /// Behind `bytes`.
    _memory: Region<u8>,
    /// The place of each first and last row, counted from 1; 0 for none.
    tags: Vec<AtomicU32>,
    n_brought: AtomicU64,
    n_filled: AtomicU64,
}

/// One head of one table.
#[derive(Clone, Copy)]
pub(crate) struct NearPart {
    head: NearHead,
    row: usize,
    tag: usize,
}

impl NearPart {
    /// The number among first and last rows that a place has if it is there; none for places
    /// that are neither.
    fn number(&self, place: usize) -> Option<usize> {
        let (n_first, n_last) = (self.head.n_first as usize, self.head.n_last as usize);
        match place {
            _ if place < n_first => Some(place),
            _ => (n_last > 0).then(|| n_first + place % n_last),
        }
    }

    /// The same for a sequence of `kv_len` tokens: places that others have replaced have none.
    fn number_in(&self, place: usize, kv_len: usize) -> Option<usize> {
        let is_kept =
            place < self.head.n_first as usize || place + self.head.n_last as usize >= kv_len;
        self.number(place).filter(|_| is_kept)
    }
}

impl NearRows {
    pub(crate) fn new(
        near: &Near,
        row_bytes: usize,
        code: Option<(RowCode, KvDtype)>,
    ) -> Result<Self, DeviceError> {
        let (mut table_rows, mut table_tags) = (0, 0);
        let mut heads = Vec::with_capacity(near.heads.len());
        for &head in &near.heads {
            heads.push((head, table_rows, table_tags));
            table_rows += head.n_rows() as usize;
            table_tags += (head.n_first + head.n_last) as usize;
        }
        let n_tables = near.n_tables as usize;
        let bytes = table_rows.saturating_mul(n_tables).saturating_mul(row_bytes);
        let mut memory = Region::zeroed(bytes, "rows kept near")?;
        let tags = (0..table_tags * n_tables).map(|_| AtomicU32::new(0)).collect();
        #[expect(unsafe_code, reason = "several threads write rows, each its own")]
        // SAFETY: the memory lives as long as the value, which gives out no longer references.
        let bytes = unsafe { SharedMut::from_raw(memory.as_mut_ptr(), memory.len()) };
        let (n_brought, n_filled) = Default::default();
        Ok(NearRows {
            heads,
            table_rows,
            table_tags,
            row_bytes,
            code,
            bytes,
            _memory: memory,
            tags,
            n_brought,
            n_filled,
        })
    }

    pub(crate) fn counts(&self) -> NearCounts {
        let (n_brought, n_filled) = (self.n_brought.load(Relaxed), self.n_filled.load(Relaxed));
        NearCounts { n_brought, n_filled, ..NearCounts::default() }
    }

    pub(crate) fn forget(&self, table: u32) {
        let tags = self.tags.iter().skip(table as usize * self.table_tags).take(self.table_tags);
        tags.for_each(|tag| tag.store(0, Relaxed));
    }

    pub(crate) fn part(&self, table: u32, head: usize) -> NearPart {
        let (part, row, tag) = self.heads[head];
        let table = table as usize;
        NearPart {
            head: part,
            row: table * self.table_rows + row,
            tag: table * self.table_tags + tag,
        }
    }

    /// Keeps the rows of some places of a sequence that has `kv_len` with them, if they are first or
    /// last ones. Each place is given to one thread.
    pub(crate) fn keep(&self, part: NearPart, places: Range<usize>, kv_len: usize, rows: &[u8]) {
        for (place, row) in places.zip(rows.chunks_exact(self.row_bytes)) {
            if let Some(number) = part.number_in(place, kv_len) {
                self.write(part.row + number, row);
                self.tags[part.tag + number].store(place as u32 + 1, Relaxed);
            }
        }
    }

    /// Rounds rows that come from far to what their codes would say.
    fn round(&self, rows: &mut [u8]) {
        let Some((code, dtype)) = self.code else { return };
        let half = self.row_bytes / 2;
        let mut x = vec![0.0; half / dtype.bytes()];
        for row in rows.chunks_exact_mut(half) {
            widen(dtype, row, &mut x);
            code.round(&mut x);
            narrow(dtype, &x, row);
        }
    }

    fn write(&self, row: usize, bytes: &[u8]) {
        #[expect(unsafe_code, reason = "threads write different rows")]
        // SAFETY: nobody reads or writes this row meanwhile. First and last rows are written by the
        // thread that has their place, before their layer attends; chosen ones as the list of one
        // head says, of which each goes to one thread, and attention of that layer waits for it.
        let target = unsafe { self.bytes.part(row * self.row_bytes, self.row_bytes) };
        target.copy_from_slice(bytes);
    }

    fn address(&self, row: usize) -> *const u8 {
        self.bytes.address(row * self.row_bytes, self.row_bytes)
    }

    /// Where a first or last row is, if it is near.
    pub(crate) fn find(&self, part: NearPart, place: usize) -> Option<*const u8> {
        let number = part.number(place)?;
        let is_there = self.tags[part.tag + number].load(Relaxed) == place as u32 + 1;
        is_there.then(|| self.address(part.row + number))
    }

    /// Where a chosen row is.
    pub(crate) fn chosen(&self, part: NearPart, row: u32) -> *const u8 {
        self.address(self.chosen_row(part, row))
    }

    fn chosen_row(&self, part: NearPart, row: u32) -> usize {
        assert!(row < part.head.n_chosen, "a row of the chosen part");
        part.row + (part.head.n_first + part.head.n_last + row) as usize
    }
}

/// A run of rows on its way: where it is far, and where its rows go.
struct Move {
    at: usize,
    /// Rows of the list of targets.
    targets: Range<usize>,
}

/// The moves of some heads.
#[derive(Default)]
struct Moves {
    runs: Vec<Move>,
    targets: Vec<usize>,
}

impl Moves {
    /// Adds the rows of one head, neighbours inside a page together.
    fn push(
        &mut self,
        plan: &CpuPlan,
        head: usize,
        kv: &CpuKv,
        near: &NearRows,
        bring: &Bring<'_>,
    ) {
        let seq = &plan.seqs[bring.seq as usize];
        let part = near.part(seq.table_row, head);
        let mut last = None;
        for (&place, &row) in bring.places.iter().zip(bring.rows) {
            let start = self.targets.len();
            self.targets.push(near.chosen_row(part, row));
            let place = place as usize;
            match self.runs.last_mut() {
                Some(run) if last == Some(place) && !place.is_multiple_of(PAGE) => {
                    run.targets.end += 1
                }
                _ => {
                    let at = kv.row_start(head, plan.slot(seq, place), place % PAGE);
                    self.runs.push(Move { at, targets: start..start + 1 });
                }
            }
            last = Some(place + 1);
        }
    }

    fn carry_out(&self, far: &dyn Fn(usize, &mut [u8]), near: &NearRows) {
        let mut buffer = vec![0; PAGE * near.row_bytes];
        for Move { at, targets } in &self.runs {
            let rows = &mut buffer[..targets.len() * near.row_bytes];
            far(*at, rows);
            near.round(rows);
            for (&target, row) in
                self.targets[targets.clone()].iter().zip(rows.chunks_exact(near.row_bytes))
            {
                near.write(target, row);
            }
        }
        near.n_brought.fetch_add(self.targets.len() as u64, Relaxed);
    }
}

impl Cpu {
    /// The same device with rows that are brought near as if they had come in eight bits. Pages stay as they are:
    /// this is what devices are compared with whose link carries codes.
    #[must_use]
    pub fn with_far_code(self, code: RowCode) -> Self {
        Cpu { far_code: Some(code), ..self }
    }
}

impl CpuKv {
    /// Brings rows near now, heads on several threads.
    pub(crate) fn bring(&self, pool: &Pool, plan: &CpuPlan, layer: usize, brings: &[Bring<'_>]) {
        let Some(near) = &self.near else { return };
        let work = |i: usize| {
            let mut moves = Moves::default();
            moves.push(
                plan,
                self.head_number(layer, brings[i].head as usize),
                self,
                near,
                &brings[i],
            );
            moves.carry_out(&|at, out| self.read(at, out), near);
        };
        match brings.len() {
            0 => {}
            1 => work(0),
            n => pool.run(n, &work),
        }
    }

    /// Lets the worker bring rows near, if there is one.
    pub(crate) fn bring_ahead(
        &self,
        pool: &Pool,
        plan: &CpuPlan,
        layer: usize,
        brings: &[Bring<'_>],
    ) {
        let (Some(near), Some(worker)) = (&self.near, &self.worker) else {
            return self.bring(pool, plan, layer, brings);
        };
        let mut moves = Moves::default();
        for bring in brings {
            moves.push(plan, self.head_number(layer, bring.head as usize), self, near, bring);
        }
        worker.begin(layer, moves);
    }

    /// Where a first or last row of a sequence is near, or the same row in `buffer`. What should be
    /// near and is not is filled in. Each place is given to one thread.
    pub(crate) fn resolve(
        &self,
        near: &NearRows,
        (plan, seq): (&CpuPlan, &PlanSeq),
        (head, place): (usize, usize),
        buffer: &mut [u8],
    ) -> *const u8 {
        let part = near.part(seq.table_row, head);
        if let Some(address) = near.find(part, place) {
            return address;
        }
        self.read(self.row_start(head, plan.slot(seq, place), place % PAGE), buffer);
        near.n_filled.fetch_add(1, Relaxed);
        near.keep(part, place..place + 1, seq.kv_len(), buffer);
        buffer.as_ptr()
    }
}

impl CpuPlan {
    /// The slot of the page that a place of a sequence is in.
    pub(crate) fn slot(&self, seq: &PlanSeq, place: usize) -> usize {
        self.slots[seq.first_slot + place / PAGE] as usize
    }
}

/// A thread that brings rows near while others compute. Where no core is free for it, whoever needs
/// rows brings those that it has not begun with.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and those who wait for it see.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Layers, and what must come before they attend.
    waiting: VecDeque<(usize, Moves)>,
    /// The layer that the thread is at.
    running: Option<usize>,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, file: &PageFile, near: &NearRows) {
        let mut state = self.lock();
        while !state.is_over {
            let Some((layer, moves)) = state.waiting.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.running = Some(layer);
            drop(state);
            moves.carry_out(&|at, out| file.read(at, out), near);
            state = self.lock();
            state.running = None;
            self.changed.notify_all();
        }
    }
}

impl Worker {
    pub(crate) fn start(file: &Arc<PageFile>, near: &Arc<NearRows>) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared::default());
        let (file, near, of_thread) = (Arc::clone(file), Arc::clone(near), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("nuthatch-bring".to_owned());
        let thread = thread.spawn(move || of_thread.run(&file, &near));
        let thread = thread.map_err(|error| DeviceError::Fault(format!("no thread: {error}")))?;
        Ok(Worker { shared, thread: Some(thread) })
    }

    fn begin(&self, layer: usize, moves: Moves) {
        self.shared.lock().waiting.push_back((layer, moves));
        self.shared.changed.notify_all();
    }

    /// Sees to it that the rows of one layer are near.
    pub(crate) fn finish(&self, kv: &CpuKv, layer: usize) -> Result<(), DeviceError> {
        /// After this long it is asked whether the thread is still there.
        const PATIENCE: Duration = Duration::from_millis(200);
        let Some(near) = &kv.near else { return Ok(()) };
        let mut state = self.shared.lock();
        loop {
            if let Some(i) = state.waiting.iter().position(|&(of, _)| of == layer) {
                let moves = state.waiting.remove(i);
                drop(state);
                if let Some((_, moves)) = moves {
                    moves.carry_out(&|at, out| kv.read(at, out), near);
                }
                state = self.shared.lock();
            } else if state.running != Some(layer) {
                return Ok(());
            } else if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err(DeviceError::Fault(
                    "the thread that brings rows near is gone".to_owned(),
                ));
            } else {
                let waited = self.shared.changed.wait_timeout(state, PATIENCE);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Its panic was printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}
