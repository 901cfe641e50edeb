//! Attention over pages: exact, and the same bits for a row however it came to be computed.
//!
//! Keys are taken in chunks of [`CHUNK`], cut at multiples from the sequence's start. For one row
//! and chunk:
//!
//! ```text
//!   s[j] = q . k[j]              one chain of fused multiply-adds along the head
//!   m = max s,  p = exp(s - m)   sixteen lanes, one for each token of a page
//!   l = sum p                    page after page in lanes, then across lanes
//!   o = sum p[j] v[j]            token after token
//! ```
//!
//! and chunks are merged from left to right. A [`Task::Tile`] does this for many rows, converting
//! each page once for all of them; a [`Task::Split`] does it for one row and one chunk, straight
//! from the pages, so that a long context is shared among threads. Masked keys have `p = 0`, and
//! adding zero changes nothing, so both give the same bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod convert;
mod element;
mod picks;
mod portable;
mod rows;
mod softmax;

use std::ops::Range;

use nuthatch_backend::Choosing;
use nuthatch_types::KvDtype;

use crate::far::PageFile;
use crate::isa::Isa;
use crate::kv::{CpuKv, PAGE};
use crate::mem::SharedMut;
use crate::plan::{CHUNK, CpuPlan, PlanSeq, Task};
use crate::pool::Pool;
pub(crate) use element::to_floats;
use picks::PickWork;
pub(crate) use rows::{Rows, row_scores};
use softmax::{merge_row, softmax_row};

const CHUNK_PAGES: usize = CHUNK / PAGE;

/// One layer's attention, shared by all threads.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub(crate) isa: Isa,
    pub(crate) plan: &'a CpuPlan,
    pub(crate) kv: &'a CpuKv,
    pub(crate) layer: usize,
    pub(crate) scale: f32,
    pub(crate) window: Option<usize>,
    /// `[T, width]`; a row begins with its queries, `[H D]`.
    pub(crate) qkv: &'a [f32],
    pub(crate) width: usize,
}

/// Keys that a row sees: `start..end`.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

/// A run of pages of one head, ready to be multiplied: where each page's keys and values start.
pub(crate) struct Pages<'a> {
    pub(crate) dtype: KvDtype,
    pub(crate) d: usize,
    pub(crate) keys: &'a [*const u8],
    pub(crate) values: &'a [*const u8],
    /// `[tokens]` what the scores of keys, and the weights of values, are multiplied by, if these are
    /// codes.
    scales: Option<[&'a [f32]; 2]>,
}

/// Memory that one thread reuses from task to task.
#[derive(Default)]
struct Scratch {
    /// `[rows][D]` scaled queries.
    q: Vec<f32>,
    /// `[rows][CHUNK]` scores, then probabilities.
    scores: Vec<f32>,
    /// `[rows][D]` output of one chunk.
    chunk_out: Vec<f32>,
    /// `[rows][D + 2]` output, maximum and sum so far.
    state: Vec<f32>,
    /// `[CHUNK_PAGES][D][16]` and `[CHUNK][D]` converted keys and values.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[CHUNK]` scales of keys and of values, if they have any.
    scales: [Vec<f32>; 2],
    /// Pages or rows as they are stored, where they are in a file.
    stored: Vec<u8>,
}

impl Attention<'_> {
    /// Attends for every row of the batch; `out` is `[T, H D]`. Sequences with picks see what is
    /// picked, the others everything.
    ///
    /// Heads that have yet to choose begin with it, one on a thread, while others attend already.
    pub(crate) fn run<C: Choosing>(
        &self,
        pool: &Pool,
        choosing: &C,
        heads: &mut [C::Head],
        out: &mut [f32],
    ) {
        let n_heads = self.kv.shape.n_kv_heads as usize;
        let plan = self.plan;
        let stride = plan.group() * (self.d() + 2);
        let work = PickWork::new(plan, choosing, heads);
        let dense_tasks = work.dense_tasks(plan);
        let n_dense_partials = n_heads * plan.n_partials;
        let mut partials = plan.partials.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let n_partials = (n_dense_partials + work.n_chunks()) * stride;
        if partials.len() < n_partials {
            partials.resize(n_partials.next_power_of_two(), 0.0);
        }
        let shared_out = SharedMut::new(out);
        let shared_partials = SharedMut::new(&mut partials);
        #[expect(unsafe_code, reason = "threads write disjoint partials")]
        // SAFETY: partials of tasks and of chunks of picks are numbered apart, and each is run once.
        let partial = |i: usize| unsafe { shared_partials.part(i * stride, stride) };
        let (n_open, n_dense) = (work.n_open(), dense_tasks.len() * n_heads);
        pool.run(n_open + n_dense + work.n_chunks(), &|i| {
            let Some(i) = i.checked_sub(n_open) else { return work.choose(i, self) };
            SCRATCH.with_borrow_mut(|scratch| {
                if let Some(i) = i.checked_sub(n_dense) {
                    let Some((chunk, number)) = work.chunk(plan, i) else { return };
                    return self.pick_chunk(&chunk, scratch, partial(n_dense_partials + number));
                }
                // Heads of one task follow each other, so that threads share the row's queries.
                let (task, head) = (dense_tasks[i / n_heads], i % n_heads);
                match task {
                    Task::Tile { seq, start, n } => {
                        let rows = start..start + n;
                        self.tile(head, &plan.seqs[seq], rows, scratch, shared_out);
                    }
                    Task::Split { seq, chunk, partial: number } => {
                        let target = partial(head * plan.n_partials + number);
                        self.split(head, &plan.seqs[seq], chunk, scratch, target);
                    }
                }
            });
        });
        self.merge_splits(&work, &partials, out);
        self.merge_picks(&work, &partials[n_dense_partials * stride..], out);
    }

    pub(crate) fn d(&self) -> usize {
        self.kv.shape.head_dim as usize
    }

    /// Keys that the row at `place` sees.
    fn span(&self, place: usize) -> Span {
        let end = place + 1;
        Span { start: self.window.map_or(0, |window| end.saturating_sub(window)), end }
    }

    /// Scales the group's queries of one batch row into `q`, `[group][D]`.
    fn load_queries(&self, row: usize, head: usize, q: &mut [f32]) {
        let (d, group) = (self.d(), self.plan.group());
        let source = &self.qkv[row * self.width + head * group * d..][..group * d];
        for (q, &x) in q.iter_mut().zip(source) {
            *q = x * self.scale;
        }
    }

    /// Addresses of the sequence's pages `first..first + n` of one head.
    fn addresses(
        &self,
        head: usize,
        seq: &PlanSeq,
        first: usize,
        n: usize,
    ) -> ([*const u8; CHUNK_PAGES], [*const u8; CHUNK_PAGES]) {
        let number = self.kv.head_number(self.layer, head);
        let (start, page_bytes) = (self.kv.page_start(number, 0), self.kv.head_page_bytes(number));
        let value_start = PAGE * self.d() * self.dtype().bytes();
        let slots = &self.plan.slots[seq.first_slot + first..][..n];
        let mut keys = [std::ptr::null(); CHUNK_PAGES];
        let mut values = [std::ptr::null(); CHUNK_PAGES];
        for ((key, value), &slot) in keys.iter_mut().zip(&mut values).zip(slots) {
            let page = &self.kv.bytes[start + slot as usize * page_bytes..][..page_bytes];
            *key = page.as_ptr();
            *value = page[value_start..].as_ptr();
        }
        (keys, values)
    }

    /// Reads pages of one head, neighbours together.
    pub(crate) fn read_pages(
        &self,
        file: &PageFile,
        head: usize,
        seq: &PlanSeq,
        pages: Range<usize>,
        out: &mut Vec<u8>,
    ) {
        let number = self.kv.head_number(self.layer, head);
        let len = self.kv.head_page_bytes(number);
        let slots = &self.plan.slots[seq.first_slot..][pages];
        out.resize(slots.len() * len, 0);
        let mut rest = &mut out[..];
        for run in slots.chunk_by(|a, b| a + 1 == *b) {
            let (target, after) = rest.split_at_mut(run.len() * len);
            file.read(self.kv.page_start(number, run[0] as usize), target);
            rest = after;
        }
    }

    /// One row's share of one chunk; `target` is `[group][D + 2]`: output, maximum, sum.
    fn split(
        &self,
        head: usize,
        seq: &PlanSeq,
        chunk: usize,
        scratch: &mut Scratch,
        target: &mut [f32],
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let span = self.span(seq.place);
        let start = (chunk * CHUNK).max(span.start);
        let end = ((chunk + 1) * CHUNK).min(span.end);
        if start >= end {
            for state in target.chunks_exact_mut(d + 2) {
                state[d] = f32::NEG_INFINITY;
            }
            return;
        }
        // Pages before the window may be gone; only those that are seen are touched.
        let first_page = start / PAGE;
        let n_pages = end.div_ceil(PAGE) - first_page;
        let (dtype, (keys, values)) = if self.kv.by_rows {
            (KvDtype::F32, self.convert(head, seq, (first_page, n_pages), scratch))
        } else {
            (self.dtype(), self.addresses(head, seq, first_page, n_pages))
        };
        if !self.kv.by_rows {
            self.load_scales(&keys[..n_pages], &mut scratch.scales);
        }
        let Scratch { q, scores, chunk_out, scales, .. } = scratch;
        let (keys, values) = (&keys[..n_pages], &values[..n_pages]);
        let pages = Pages { dtype, d, keys, values, scales: self.scales(scales, 0) };
        q.resize(group * d, 0.0);
        scores.resize(group * CHUNK, 0.0);
        chunk_out.resize(group * d, 0.0);
        self.load_queries(seq.first_row, head, q);
        self.scores(&pages, group, q, scores);
        let first = first_page * PAGE;
        let visible = start - first..end - first;
        for (row, state) in target.chunks_exact_mut(d + 2).enumerate() {
            let scores = &mut scores[row * CHUNK..][..n_pages * PAGE];
            (state[d], state[d + 1]) = softmax_row(self.isa, scores, visible.start, visible.end);
        }
        self.mix(&pages, visible, group, scores, chunk_out);
        for (out, state) in chunk_out.chunks_exact(d).zip(target.chunks_exact_mut(d + 2)) {
            state[..d].copy_from_slice(out);
        }
    }

    /// Merges the partial results of the rows that were split, chunk after chunk.
    fn merge_splits<C: Choosing>(&self, work: &PickWork<'_, C>, partials: &[f32], out: &mut [f32]) {
        let (d, group) = (self.d(), self.plan.group());
        let n_heads = self.kv.shape.n_kv_heads as usize;
        let stride = group * (d + 2);
        let mut partial = 0;
        for (i, seq) in self.plan.seqs.iter().enumerate().filter(|(_, seq)| seq.n_rows == 1) {
            let n_chunks = seq.kv_len().div_ceil(CHUNK);
            let n_merged = if work.has_picks(i) { 0 } else { n_heads };
            for head in 0..n_merged {
                for row in 0..group {
                    let at = |chunk: usize| {
                        let first = (head * self.plan.n_partials + partial + chunk) * stride;
                        &partials[first + row * (d + 2)..][..d + 2]
                    };
                    let target = (seq.first_row * n_heads + head) * group + row;
                    let out = &mut out[target * d..][..d];
                    let mut total = (f32::NEG_INFINITY, 0.0);
                    for chunk in (0..n_chunks).map(at).filter(|c| c[d] != f32::NEG_INFINITY) {
                        merge_row(self.isa, out, &mut total, &chunk[..d], (chunk[d], chunk[d + 1]));
                    }
                    out.iter_mut().for_each(|x| *x *= 1.0 / total.1);
                }
            }
            partial += n_chunks;
        }
    }

    /// Some rows of a sequence over all the keys they see.
    fn tile(
        &self,
        head: usize,
        seq: &PlanSeq,
        rows: Range<usize>,
        scratch: &mut Scratch,
        out: SharedMut<'_, f32>,
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let (start, n) = (rows.start, rows.len());
        let rows = n * group;
        let Scratch { q, scores, chunk_out, state, .. } = scratch;
        q.resize(rows * d, 0.0);
        scores.resize(rows * CHUNK, 0.0);
        chunk_out.resize(rows * d, 0.0);
        state.clear();
        state.resize(rows * (d + 2), 0.0);
        for i in 0..n {
            let q = &mut q[i * group * d..(i + 1) * group * d];
            self.load_queries(seq.first_row + start + i, head, q);
        }
        for row in state.chunks_exact_mut(d + 2) {
            row[d] = f32::NEG_INFINITY;
        }
        let place = seq.place + start;
        let (first, last) = (self.span(place), self.span(place + n - 1));
        for chunk in first.start / CHUNK..last.end.div_ceil(CHUNK) {
            self.tile_chunk(head, seq, (place, n), chunk, scratch);
        }
        let n_heads = self.kv.shape.n_kv_heads as usize;
        for (row, state) in scratch.state.chunks_exact(d + 2).enumerate() {
            let batch_row = seq.first_row + start + row / group;
            let target = (batch_row * n_heads + head) * group + row % group;
            #[expect(unsafe_code, reason = "threads write disjoint rows and heads")]
            // SAFETY: each (tile, head) runs once, and tiles own disjoint rows.
            let out = unsafe { out.part(target * d, d) };
            let inverse = 1.0 / state[d + 1];
            for (out, &x) in out.iter_mut().zip(&state[..d]) {
                *out = x * inverse;
            }
        }
    }

    /// Adds one chunk to the state of a tile's rows.
    fn tile_chunk(
        &self,
        head: usize,
        seq: &PlanSeq,
        (place, n): (usize, usize),
        chunk: usize,
        scratch: &mut Scratch,
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let chunk_start = (chunk * CHUNK).max(self.span(place).start);
        let first_page = chunk_start / PAGE;
        let chunk_end = ((chunk + 1) * CHUNK).min(place + n);
        let n_pages = chunk_end.div_ceil(PAGE) - first_page;
        let first = first_page * PAGE;
        let (key_at, value_at) = self.convert(head, seq, (first_page, n_pages), scratch);
        let Scratch { q, scores, chunk_out, state, scales, .. } = scratch;
        // Blocks of tokens that share their visible pages, so that the triangle is not computed
        // as a square.
        let step = PAGE.min(n);
        for block in (0..n).step_by(step) {
            let tokens = step.min(n - block);
            let last = self.span(place + block + tokens - 1);
            let end = last.end.min(chunk_end);
            if end <= first {
                continue;
            }
            let begin = self.span(place + block).start.max(chunk_start);
            let (lo, hi) = ((begin - first) / PAGE, (end - first).div_ceil(PAGE));
            let (keys, values) = (&key_at[lo..hi], &value_at[lo..hi]);
            let scales = self.scales(scales, lo * PAGE);
            let pages = Pages { dtype: KvDtype::F32, d, keys, values, scales };
            let base = first + lo * PAGE;
            let rows = block * group..(block + tokens) * group;
            let scores = &mut scores[rows.start * CHUNK..rows.end * CHUNK];
            let chunk_out = &mut chunk_out[rows.start * d..rows.end * d];
            self.scores(&pages, rows.len(), &q[rows.start * d..rows.end * d], scores);
            let mut totals = [(f32::NEG_INFINITY, 0.0); PAGE * MAX_GROUP];
            for (row, total) in totals[..rows.len()].iter_mut().enumerate() {
                let span = self.span(place + block + row / group);
                let visible =
                    (span.start.max(base) - base, span.end.min(chunk_end) as isize - base as isize);
                let scores = &mut scores[row * CHUNK..][..pages.keys.len() * PAGE];
                if visible.1 > visible.0 as isize {
                    *total = softmax_row(self.isa, scores, visible.0, visible.1 as usize);
                } else {
                    scores.fill(0.0);
                }
            }
            self.mix(&pages, begin - base..end - base, rows.len(), scores, chunk_out);
            let states = state[rows.start * (d + 2)..rows.end * (d + 2)].chunks_exact_mut(d + 2);
            for ((state, out), total) in states.zip(chunk_out.chunks_exact(d)).zip(totals) {
                if total.0 != f32::NEG_INFINITY {
                    let (sum, rest) = state.split_at_mut(d);
                    let mut so_far = (rest[0], rest[1]);
                    merge_row(self.isa, sum, &mut so_far, out, total);
                    (rest[0], rest[1]) = so_far;
                }
            }
        }
    }

    /// `scores[r][j] = q[r] . k[j]` for all keys of the pages; `scores` has rows of [`CHUNK`].
    fn scores(&self, pages: &Pages<'_>, rows: usize, q: &[f32], scores: &mut [f32]) {
        assert!(q.len() >= rows * pages.d && scores.len() >= rows * CHUNK);
        assert!(pages.keys.len() <= CHUNK_PAGES);
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => avx512::scores(pages, rows, q, scores),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::scores(pages, rows, q, scores),
            isa => portable::scores(isa, pages, rows, q, scores),
        }
        if let Some([scales, _]) = pages.scales {
            self.scale_rows(pages, scales, &mut scores[..rows * CHUNK]);
        }
    }

    /// `out[r] = sum of p[r][j] v[j]` over the keys `visible`; `p` may be changed.
    fn mix(
        &self,
        pages: &Pages<'_>,
        visible: Range<usize>,
        rows: usize,
        p: &mut [f32],
        out: &mut [f32],
    ) {
        assert!(p.len() >= rows * CHUNK && out.len() >= rows * pages.d);
        assert!(visible.end <= pages.values.len() * PAGE);
        if let Some([_, scales]) = pages.scales {
            self.scale_rows(pages, scales, &mut p[..rows * CHUNK]);
        }
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx if pages.d.is_multiple_of(PAGE) => {
                avx512::mix(pages, visible, rows, p, out);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if pages.d.is_multiple_of(PAGE) => avx2::mix(pages, visible, rows, p, out),
            isa => portable::mix(isa, pages, visible, rows, p, out),
        }
    }
}

/// Most query heads of a group; `Cpu::alloc_plan` refuses more.
pub(crate) const MAX_GROUP: usize = 64;

std::thread_local! {
    /// Scratch is kept from task to task; it holds no state between them.
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::new(Scratch::default());
}
