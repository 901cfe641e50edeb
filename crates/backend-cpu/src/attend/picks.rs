//! Attention over picked places: rows are read one by one, wherever their pages are.
//!
//! The places that a head sees are one list, first places, picked ones, tail, and are taken in
//! chunks of [`CHUNK`] of that list; chunks are merged from left to right, as everywhere.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use nuthatch_backend::{Ask, Choosing, Pick};

use super::{Attention, Rows, Scratch, rows};
use crate::kv::PAGE;
use crate::mem::SharedMut;
use crate::plan::{CHUNK, CpuPlan, PlanSeq, Task};
use crate::pool::pause;
use crate::topk::{Memory, Scoring};

use super::softmax::{merge_row, softmax_row};

/// The heads of all sequences with picks, cut into chunks. Those that have yet to choose come first, and
/// their chunks last: whoever waits for a choice waits for a thread that is at it.
pub(super) struct PickWork<'a, C: Choosing> {
    choosing: &'a C,
    heads: SharedMut<'a, C::Head>,
    n_heads: usize,
    /// Heads that have yet to choose.
    open: Vec<usize>,
    /// Of each head, whether its pick is known.
    is_known: Vec<AtomicBool>,
    /// Whether a sequence has picks; empty if none has.
    is_picked: Vec<bool>,
    /// Where a head's chunks begin, in the order of heads, and where the last one's end.
    starts: Vec<usize>,
    /// Head and number in it of each chunk, those of open heads last.
    chunks: Vec<(usize, usize)>,
}

thread_local! {
    /// Scores of one head, before they are answers and then.
    static SCORES: RefCell<(Memory, Vec<u32>)> = RefCell::default();
}

/// Entries `start..end` of a pick's list.
#[derive(Clone, Copy)]
pub(super) struct PickChunk<'a> {
    pick: Pick<'a>,
    start: usize,
    end: usize,
}

impl<'a, C: Choosing> PickWork<'a, C> {
    pub(super) fn new(plan: &CpuPlan, choosing: &'a C, heads: &'a mut [C::Head]) -> Self {
        let n_heads = heads.len();
        let mut is_picked = vec![false; if heads.is_empty() { 0 } else { plan.seqs.len() }];
        let (mut open, mut starts, mut chunks) = (Vec::new(), vec![0], Vec::new());
        let mut late = Vec::new();
        for (i, head) in heads.iter().enumerate() {
            let pick = choosing.pick(head);
            let seq = &plan.seqs[pick.seq as usize];
            assert_eq!(seq.n_rows, 1, "a sequence with one row");
            is_picked[pick.seq as usize] = true;
            let n_most = choosing.open(head);
            let n_chunks = n_most.unwrap_or_else(|| len(&pick, seq)).div_ceil(CHUNK);
            starts.push(starts[i] + n_chunks);
            if n_most.is_some() {
                open.push(i);
                late.extend((0..n_chunks).map(|chunk| (i, chunk)));
            } else {
                chunks.extend((0..n_chunks).map(|chunk| (i, chunk)));
            }
        }
        chunks.append(&mut late);
        let is_known = heads.iter().map(|head| choosing.open(head).is_none().into()).collect();
        let heads = SharedMut::new(heads);
        PickWork { choosing, heads, n_heads, open, is_known, is_picked, starts, chunks }
    }

    pub(super) fn n_open(&self) -> usize {
        self.open.len()
    }

    pub(super) fn n_chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Lets the `i`-th of the open heads choose; once for each.
    pub(super) fn choose(&self, i: usize, attention: &Attention<'_>) {
        let head = self.open[i];
        // Also when it panics: who waits must not wait for ever.
        let _known = SetOnDrop(&self.is_known[head]);
        #[expect(unsafe_code, reason = "threads take different heads")]
        // SAFETY: each open head is handled once, and nobody else looks at it before it is known.
        let heads = unsafe { self.heads.part(head, 1) };
        SCORES.with_borrow_mut(|(memory, scores)| {
            self.choosing.choose(&mut heads[0], |ask, best, chosen| {
                let scoring = Scoring { attention: *attention };
                scoring.choose(&Ask { at: 0, ..*ask }, best, (memory, scores), chosen);
            });
        });
    }

    /// What a head sees; waits until that is known.
    fn pick(&self, head: usize) -> Pick<'a> {
        let mut spins = 0;
        while !self.is_known[head].load(Ordering::Acquire) {
            pause(&mut spins);
        }
        #[expect(unsafe_code, reason = "what is known does not change")]
        // SAFETY: the only part with this head was dropped before it was known, and heads live for 'a.
        let head: &'a C::Head = unsafe { &*self.heads.address(head, 1) };
        self.choosing.pick(head)
    }

    /// The `i`-th chunk and the number that its result has; waits until it is known. Nothing if the head
    /// has chosen less.
    pub(super) fn chunk(&self, plan: &CpuPlan, i: usize) -> Option<(PickChunk<'a>, usize)> {
        let (head, chunk) = self.chunks[i];
        let pick = self.pick(head);
        let (n, start) = (len(&pick, &plan.seqs[pick.seq as usize]), chunk * CHUNK);
        let number = self.starts[head] + chunk;
        (start < n).then(|| (PickChunk { pick, start, end: n.min(start + CHUNK) }, number))
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

/// Says that a head's pick is known.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
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

    /// Where the rows of a chunk are: in the arena, or near, or, if they belong there and are not, in `stored`.
    fn chunk_addresses<'b>(
        &self,
        chunk: &PickChunk<'_>,
        (at, stored): (&'b mut [*const u8; CHUNK], &mut Vec<u8>),
    ) -> &'b [*const u8] {
        assert!(self.kv.by_rows, "an arena with digests");
        let PickChunk { pick, start, end } = chunk;
        let seq = &self.plan.seqs[pick.seq as usize];
        let head = self.kv.head_number(self.layer, pick.head as usize);
        let Some(near) = &self.kv.near else {
            self.arena_addresses(chunk, (seq, head), at);
            return &at[..end - start];
        };
        let row_bytes = self.kv.row_bytes(head);
        stored.resize(CHUNK * row_bytes, 0);
        let buffers = stored.chunks_exact_mut(row_bytes);
        for ((at, i), buffer) in at.iter_mut().zip(*start..*end).zip(buffers) {
            let brought = i.checked_sub(pick.n_first as usize).and_then(|i| pick.rows.get(i));
            *at = match brought {
                Some(&row) => near.chosen(near.part(seq.table_row, head), row),
                None => {
                    let of = (head, place(pick, i));
                    self.kv.resolve(near, (self.plan, seq), of, buffer)
                }
            };
        }
        &at[..end - start]
    }

    /// The same of rows that are all in the arena. First places, picked ones and the tail have a loop each:
    /// which of them a place is would take longer than its address.
    fn arena_addresses(
        &self,
        &PickChunk { pick, start, end }: &PickChunk<'_>,
        (seq, head): (&PlanSeq, usize),
        at: &mut [*const u8; CHUNK],
    ) {
        let rows = self.kv.head_rows(head).expect("pages are in memory where nothing is near");
        let slots = &self.plan.slots[seq.first_slot..];
        let mut at = at.iter_mut();
        let mut add = |place: usize| {
            let at = at.next().expect("no more than a chunk");
            *at = rows.address(slots[place / PAGE] as usize, place % PAGE);
        };
        let n_first = pick.n_first as usize;
        let n_before = n_first + pick.places.len();
        let [picked, end_picked] = [start, end].map(|i| i.clamp(n_first, n_before) - n_first);
        (start..end.min(n_first)).for_each(&mut add);
        pick.places[picked..end_picked].iter().for_each(|&place| add(place as usize));
        (start.max(n_before)..end).for_each(|i| add(pick.tail as usize + i - n_before));
    }

    /// One chunk of a pick; `target` is `[group][D + 2]`: output, maximum, sum.
    pub(super) fn pick_chunk(
        &self,
        chunk: &PickChunk<'_>,
        scratch: &mut Scratch,
        target: &mut [f32],
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let pick = &chunk.pick;
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
    pub(super) fn merge_picks<C: Choosing>(
        &self,
        work: &PickWork<'_, C>,
        partials: &[f32],
        out: &mut [f32],
    ) {
        let (d, group) = (self.d(), self.plan.group());
        let n_heads = self.kv.shape.n_kv_heads as usize;
        let stride = group * (d + 2);
        for head in 0..work.n_heads {
            let pick = &work.pick(head);
            let seq = &self.plan.seqs[pick.seq as usize];
            let n = len(pick, seq);
            assert!(n > 0, "a row sees at least itself");
            let (first, end) = (work.starts[head], work.starts[head + 1]);
            assert!(n <= (end - first) * CHUNK, "no more rows than were said");
            let chunks = &partials[first * stride..][..n.div_ceil(CHUNK) * stride];
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
