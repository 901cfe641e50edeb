//! Attention over picked places: rows are read one by one, wherever their pages are.
//!
//! The places that a head sees are one list, first places, picked ones, tail, and are taken in
//! chunks of [`CHUNK`] of that list; chunks are merged from left to right, as everywhere.

use std::ops::Range;

use nuthatch_backend::Pick;

use super::{Attention, Rows, Scratch, rows};
use crate::kv::PAGE;
use crate::plan::{CHUNK, CpuPlan, PlanSeq, Task};

use super::softmax::{merge_row, softmax_row};

/// The chunks of all picks.
pub(super) struct PickWork<'a> {
    picks: &'a [Pick<'a>],
    /// Whether a sequence has picks; empty if none has.
    is_picked: Vec<bool>,
    /// Chunks of the first pick, then those of the second, and so on.
    pub(super) chunks: Vec<PickChunk<'a>>,
}

/// Entries `start..end` of a pick's list.
pub(super) struct PickChunk<'a> {
    pick: &'a Pick<'a>,
    start: usize,
    end: usize,
}

impl<'a> PickWork<'a> {
    pub(super) fn new(plan: &CpuPlan, picks: &'a [Pick<'a>]) -> Self {
        let mut is_picked = vec![false; if picks.is_empty() { 0 } else { plan.seqs.len() }];
        let mut chunks = Vec::new();
        for pick in picks {
            let seq = &plan.seqs[pick.seq as usize];
            assert_eq!(seq.n_rows, 1, "a sequence with one row");
            is_picked[pick.seq as usize] = true;
            let n = len(pick, seq);
            assert!(n > 0, "a row sees at least itself");
            let starts = (0..n).step_by(CHUNK);
            chunks.extend(starts.map(|start| PickChunk { pick, start, end: n.min(start + CHUNK) }));
        }
        PickWork { picks, is_picked, chunks }
    }

    pub(super) fn has_picks(&self, seq: usize) -> bool {
        self.is_picked.get(seq).is_some_and(|&is_picked| is_picked)
    }

    /// The tasks of the sequences that see everything.
    pub(super) fn dense_tasks<'p>(&self, plan: &'p CpuPlan) -> std::borrow::Cow<'p, [Task]> {
        if self.is_picked.is_empty() {
            return plan.tasks.as_slice().into();
        }
        let is_dense = |task: &&Task| match **task {
            Task::Tile { seq, .. } | Task::Split { seq, .. } => !self.has_picks(seq),
        };
        plan.tasks.iter().filter(is_dense).copied().collect()
    }
}

/// Places of a pick's list.
fn len(pick: &Pick<'_>, seq: &PlanSeq) -> usize {
    let kv_len = seq.kv_len();
    assert!(pick.n_first as usize <= kv_len && pick.tail as usize <= kv_len, "places of the table");
    pick.n_first as usize + pick.places.len() + (kv_len - pick.tail as usize)
}

/// The place of entry `i` of a pick's list.
fn place(pick: &Pick<'_>, i: usize) -> usize {
    let n_first = pick.n_first as usize;
    match i.checked_sub(n_first) {
        None => i,
        Some(i) => match pick.places.get(i) {
            Some(&place) => place as usize,
            None => pick.tail as usize + i - pick.places.len(),
        },
    }
}

impl Attention<'_> {
    /// Where the rows of neighbouring places of one head are; in `stored`, if they are in a file.
    pub(crate) fn row_addresses<'b>(
        &self,
        head: usize,
        seq: &PlanSeq,
        places: Range<usize>,
        (at, stored): (&'b mut [*const u8; CHUNK], &mut Vec<u8>),
    ) -> &'b [*const u8] {
        assert!(self.kv.by_rows, "an arena with digests");
        let number = self.kv.head_number(self.layer, head);
        let row_bytes = self.kv.row_bytes(number);
        let first_page = places.start / PAGE;
        if let Some(file) = &self.kv.file {
            self.read_pages(file, head, seq, first_page..places.end.div_ceil(PAGE), stored);
        }
        let (n, rows) = (places.len(), self.kv.head_rows(number));
        for (at, place) in at.iter_mut().zip(places) {
            *at = match &rows {
                None => stored[(place - first_page * PAGE) * row_bytes..][..row_bytes].as_ptr(),
                Some(rows) => rows.address(self.plan.slot(seq, place), place % PAGE),
            };
        }
        &at[..n]
    }

    /// Where the rows of a chunk are: near, if some are kept there, or in the arena, or in `stored`.
    fn chunk_addresses<'b>(
        &self,
        &PickChunk { pick, start, end }: &PickChunk<'_>,
        (at, stored): (&'b mut [*const u8; CHUNK], &mut Vec<u8>),
    ) -> &'b [*const u8] {
        assert!(self.kv.by_rows, "an arena with digests");
        let seq = &self.plan.seqs[pick.seq as usize];
        let head = self.kv.head_number(self.layer, pick.head as usize);
        let row_bytes = self.kv.row_bytes(head);
        stored.resize(CHUNK * row_bytes, 0);
        let buffers = stored.chunks_exact_mut(row_bytes);
        let rows = self.kv.head_rows(head);
        for ((at, i), buffer) in at.iter_mut().zip(start..end).zip(buffers) {
            let brought = i.checked_sub(pick.n_first as usize).and_then(|i| pick.rows.get(i));
            *at = match (&self.kv.near, brought) {
                (Some(near), Some(&row)) => near.chosen(near.part(seq.table_row, head), row),
                (Some(near), None) => {
                    let of = (head, place(pick, i));
                    self.kv.resolve(near, (self.plan, seq), of, buffer)
                }
                (None, _) => {
                    let rows = rows.as_ref().expect("pages are in memory where nothing is near");
                    let place = place(pick, i);
                    rows.address(self.plan.slot(seq, place), place % PAGE)
                }
            };
        }
        &at[..end - start]
    }

    /// One chunk of a pick; `target` is `[group][D + 2]`: output, maximum, sum.
    pub(super) fn pick_chunk(
        &self,
        chunk: &PickChunk<'_>,
        scratch: &mut Scratch,
        target: &mut [f32],
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let pick = chunk.pick;
        let (seq, head) = (&self.plan.seqs[pick.seq as usize], pick.head as usize);
        let mut at = [std::ptr::null(); CHUNK];
        let Scratch { q, scores, chunk_out, stored, .. } = scratch;
        let at = self.chunk_addresses(chunk, (&mut at, stored));
        let rows = Rows { dtype: self.kv.shape.dtype, d, at };
        q.resize(group * d, 0.0);
        scores.resize(group * CHUNK, 0.0);
        chunk_out.resize(group * d, 0.0);
        self.load_queries(seq.first_row, head, q);
        rows::row_scores(self.isa, &rows, group, q, scores);
        for (row, state) in target.chunks_exact_mut(d + 2).enumerate() {
            let scores = &mut scores[row * CHUNK..][..at.len().next_multiple_of(PAGE)];
            (state[d], state[d + 1]) = softmax_row(self.isa, scores, 0, at.len());
        }
        rows::row_mix(self.isa, &rows, group, scores, chunk_out);
        for (out, state) in chunk_out.chunks_exact(d).zip(target.chunks_exact_mut(d + 2)) {
            state[..d].copy_from_slice(out);
        }
    }

    /// Merges the chunks of each pick.
    pub(super) fn merge_picks(&self, work: &PickWork<'_>, partials: &[f32], out: &mut [f32]) {
        let (d, group) = (self.d(), self.plan.group());
        let n_heads = self.kv.shape.n_kv_heads as usize;
        let stride = group * (d + 2);
        let mut rest = partials;
        for pick in work.picks {
            let seq = &self.plan.seqs[pick.seq as usize];
            let (chunks, after) = rest.split_at(len(pick, seq).div_ceil(CHUNK) * stride);
            rest = after;
            for row in 0..group {
                let target = (seq.first_row * n_heads + pick.head as usize) * group + row;
                let out = &mut out[target * d..][..d];
                let mut total = (f32::NEG_INFINITY, 0.0);
                for chunk in chunks.chunks_exact(stride) {
                    let chunk = &chunk[row * (d + 2)..][..d + 2];
                    merge_row(self.isa, out, &mut total, &chunk[..d], (chunk[d], chunk[d + 1]));
                }
                out.iter_mut().for_each(|x| *x *= 1.0 / total.1);
            }
        }
    }
}
