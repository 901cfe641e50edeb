//! The device decides: whether selections serve, which places are chosen, and which rows are brought,
//! without a word from the host, so that a whole step is one recorded pass.
//!
//! ```text
//!   decide ─► gather ─► attend ─► merge        once a layer
//! ```
//!
//! What is remembered of a sequence lies in the memory of its table's row: labels and states of all
//! heads from the start, marks and working sets when its first row is decided about.

use std::sync::{Mutex, PoisonError};

use nuthatch_backend::topk::{Found, HeadNumbers, Mix};
use nuthatch_backend::{Decided, DecidedPlaces, Deciding, DeviceError, Rules, ScoreBy};

use crate::branch::Branch;
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel, Memory};
use crate::kv::{Arena, CudaKv, PAGE_LEN};
use crate::launch::sparse::{GatherRowsParams, HeadState, SparseHeads, SparseRow, gather_rows};
use crate::launch::sparse_attend::{MAX_NUMBERS, SparseParams, attend, max_tasks};
use crate::launch::sparse_score::{
    DecideParams, HeadRule, MAX_BLOCKS, PIECE, REUSES, SCORE_KEYS, ScoreParams, TALLY_ZEROS, Tally,
    WHOLE, decide, shared_bytes,
};
use crate::launch::{count, sparse};
use crate::plan::CudaPlan;
use crate::{Attention, Cuda};

use super::SparseLayer;

/// Bytes of scratch that rows may need together; more of them are decided about in turns. Guessed.
const SCRATCH_BYTES_MAX: usize = 512 << 20;
const WHAT: &str = "top-k attention";
/// Blocks that bring rows over the link: no more are needed to fill it.
const LINK_BLOCKS: u32 = 16;

/// What decides.
pub(crate) struct Decider {
    rules: Rules,
    kernel: Kernel,
    group: usize,
    /// Places that a sequence may have, whole pieces.
    stride: usize,
    max_context: usize,
    /// `[layer][G]`, and `[layer][G][group]`.
    head_rules: Memory,
    importances: Memory,
    /// `[table][layer][G]`, and `[table][layer][G][group][D]`.
    states: Memory,
    labels: Memory,
    /// Where each head's working set begins, and how many pages it has.
    pages: Vec<(usize, usize)>,
    /// Of each table, when it was first needed.
    tables: Mutex<Vec<Option<TableMemory>>>,
    /// The rows of the batch.
    rows: Memory,
    /// Rows that are decided about at a time.
    n_at_once: usize,
    raw: Memory,
    scores: Memory,
    score_sums: Memory,
    /// Two of each, because layers that are decided about before their turn overlap.
    tallies: [Memory; 2],
    moves: [Memory; 2],
    branch: Branch,
    partials: Memory,
    sums: Memory,
    tasks: Memory,
}

/// What a table's sequence needs that grows with its length.
struct TableMemory {
    /// `[layer][G][stride]`
    marks: Memory,
    pages: Memory,
}

impl Decider {
    fn new(
        device: &Device,
        (kernel, group): (Kernel, usize),
        plan: &CudaPlan,
        kv: &CudaKv,
        rules: &Rules,
    ) -> Result<Self, DeviceError> {
        let alloc = |bytes| device.alloc(bytes, WHAT);
        let (n_heads, n_all) = (kv.shape.n_kv_heads as usize, rules.heads.len());
        let (width, d) = (kv.page.width(), kv.page.head_dim as usize);
        let max_context = plan.shape.max_context;
        let stride = max_context.next_multiple_of(PIECE);
        let one = n_heads * stride * 4 * (group + 3) + n_heads * size_of::<Tally>();
        let n_at_once = (SCRATCH_BYTES_MAX / one).min(MAX_NUMBERS / n_heads);
        let n_at_once = n_at_once.min(plan.shape.max_seqs).max(1);
        let n = n_at_once * n_heads;
        // A head may see everything, in three runs that begin and end within pages.
        let n_tasks = n * max_tasks(max_context + 2 * PAGE_LEN);
        let head_rules: Vec<HeadRule> = rules.heads.iter().map(head_rule).collect();
        let importances: Vec<f32> =
            rules.heads.iter().flat_map(|head| head.importances.iter().copied()).collect();
        let n_tables = rules.n_tables as usize;
        let decider = Decider {
            rules: rules.clone(),
            kernel,
            group,
            stride,
            max_context,
            head_rules: alloc(size_of_val(&head_rules[..]))?,
            importances: alloc(size_of_val(&importances[..]))?,
            states: alloc(n_tables * n_all * size_of::<HeadState>())?,
            labels: alloc(n_tables * n_all * group * d * 4)?,
            pages: working_sets(rules, max_context),
            tables: Mutex::new((0..n_tables).map(|_| None).collect()),
            rows: alloc(plan.shape.max_seqs * size_of::<SparseRow>())?,
            n_at_once,
            raw: alloc(n * group * stride * 4)?,
            scores: alloc(n * stride * 4)?,
            score_sums: alloc(n * stride / PIECE * group * 8)?,
            tallies: [alloc(n * size_of::<Tally>())?, alloc(n * size_of::<Tally>())?],
            moves: [alloc(n * stride * 8)?, alloc(n * stride * 8)?],
            branch: Branch::new(device)?,
            partials: alloc(n_tasks * group * width * 4)?,
            sums: alloc(n_tasks * group * 8)?,
            tasks: alloc((n + 1) * 4)?,
        };
        device.upload(&decider.head_rules, 0, &head_rules)?;
        device.upload(&decider.importances, 0, &importances)?;
        Ok(decider)
    }

    /// Rows that are decided about together: the first, and how many.
    fn turns(&self, n: usize) -> impl Iterator<Item = (usize, usize)> {
        let n_at_once = self.n_at_once;
        (0..n).step_by(n_at_once).map(move |first| (first, n_at_once.min(n - first)))
    }

    /// Rows and states of one layer of the model.
    fn heads(&self, at: &SparseLayer<'_>, idx: usize, (first, n): (usize, usize)) -> SparseHeads {
        let (n_heads, n_all) = (at.n_kv_heads(), self.rules.heads.len());
        let first_head = idx * n_heads;
        assert!(first_head + n_heads <= n_all, "a layer of the model");
        SparseHeads {
            rows: self.rows.address() + (first * size_of::<SparseRow>()) as u64,
            states: self.states.address() + (first_head * size_of::<HeadState>()) as u64,
            state_stride: count(n_all),
            n_rows: count(n),
            n_kv_heads: count(n_heads),
            group: count(self.group),
        }
    }

    /// Bytes of all states of one table.
    fn table_bytes(&self) -> usize {
        self.rules.heads.len() * size_of::<HeadState>()
    }

    /// The memory of a table's row, forgotten if it is new: marks and pages.
    fn table(
        &self,
        device: &Device,
        page_bytes: usize,
        row: &Deciding,
    ) -> Result<(u64, u64), DeviceError> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let table = &mut tables[row.table_row as usize];
        let is_new = row.is_new || table.is_none();
        let memory = match table {
            Some(memory) => memory,
            None => {
                let n_pages = self.pages.last().map_or(0, |&(first, n)| first + n);
                table.insert(TableMemory {
                    marks: device.alloc(self.rules.heads.len() * self.stride * 8, WHAT)?,
                    pages: device.alloc(n_pages * page_bytes, WHAT)?,
                })
            }
        };
        if is_new {
            device.clear(&memory.marks)?;
            let empty = self.pages.iter().map(|&(first, n)| HeadState::empty(first, n));
            let empty: Vec<HeadState> = empty.collect();
            let start = row.table_row as usize * self.table_bytes();
            device.upload(&self.states, start, &empty)?;
        }
        Ok((memory.marks.address(), memory.pages.address()))
    }
}

fn head_rule(head: &HeadNumbers) -> HeadRule {
    HeadRule { threshold: head.threshold, weight: head.weight }
}

/// Where working sets begin and how many pages each has, for sequences of up to `n` tokens.
fn working_sets(rules: &Rules, n: usize) -> Vec<(usize, usize)> {
    let mut first = 0;
    let of = |head: &HeadNumbers| {
        let wanted = (rules.percent * f64::from(head.weight) * n as f64 / 100.0).ceil();
        let k = (wanted as u64).max(u64::from(rules.k_min)).min(u64::from(rules.k_max));
        let k = k.min(n as u64);
        let rows = (k as f32 * rules.working_set).ceil() as usize;
        let n_pages = rows.max(k as usize).min(n).div_ceil(PAGE_LEN) + 1;
        first += n_pages;
        (first - n_pages, n_pages)
    };
    rules.heads.iter().map(of).collect()
}

impl Cuda {
    /// Prepares to decide by rules.
    pub(crate) fn prepare_deciding(
        &self,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        rules: &Rules,
    ) -> Result<bool, DeviceError> {
        let (n_heads, d) = (kv.shape.n_kv_heads as usize, kv.page.head_dim as usize);
        let group = plan.group();
        let Some(sparse) = &kv.sparse else { return Ok(false) };
        if self.is_eager || group > sparse.group || n_heads > MAX_NUMBERS {
            return Ok(false);
        }
        assert!(rules.heads.iter().all(|head| head.importances.len() == group), "one each");
        let (kind, width) = match rules.by {
            ScoreBy::Keys => (SCORE_KEYS, 0),
            ScoreBy::Digest(i) => {
                let digest = &sparse.digests[i];
                (sparse::kind_number(digest.kind), digest.width)
            }
        };
        let shared = shared_bytes(kind, width, group, d);
        let kernel = self.device.kernel(&sparse.kernels.module, "decide", shared)?;
        let decider = Decider::new(&self.device, (kernel, group), plan, kv, rules)?;
        if let Some(sparse) = &mut kv.sparse {
            sparse.decider = Some(decider);
        }
        Ok(true)
    }

    /// Says about which rows is decided.
    pub(crate) fn prepare_rows(
        &self,
        plan: &mut CudaPlan,
        kv: &CudaKv,
        rows: &[Deciding],
    ) -> Result<(), DeviceError> {
        let decider = decider_of(kv);
        let list = rows
            .iter()
            .map(|row| {
                let seq = &plan.seqs[row.seq as usize];
                assert!(seq.n_rows == 1 && seq.table_row == row.table_row, "one row of its table");
                assert!(seq.kv_len() <= decider.max_context, "no longer than planned for");
                let (marks, pages) = decider.table(&self.device, kv.page.bytes(), row)?;
                let (kv_len, table_row) = (count(seq.kv_len()), row.table_row);
                let batch_row = count(seq.first_row);
                let state_row = table_row;
                Ok(SparseRow { row: batch_row, kv_len, table_row, state_row, marks, pages })
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        self.device.upload(&decider.rows, 0, &list)?;
        plan.n_deciding = rows.len();
        Ok(())
    }

    /// Decides and attends in one layer.
    pub(crate) fn attend_decided(
        &self,
        at: &SparseLayer<'_>,
        idx: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let &SparseLayer { plan, layer, spec, qkv, kv } = at;
        if plan.n_deciding < plan.n_rows() {
            let (device, prefetch) = (&self.device, self.l2_prefetch);
            Attention { device, plan, layer, spec, qkv, kv, prefetch }.run(out)?;
        }
        let decider = decider_of(kv);
        let width = (spec.n_heads * kv.page.head_dim) as usize;
        assert!(plan.n_rows() * width <= out.len, "the rows fit out");
        assert!(plan.n_rows() * at.q_stride() as usize <= qkv.len, "the rows are in qkv");
        assert_eq!(at.group(), decider.group, "decided about these heads");
        let is_decided = plan.ahead.take() == Some(idx);
        if is_decided {
            decider.branch.join(&self.device, idx)?;
        }
        for some in decider.turns(plan.n_deciding) {
            if !is_decided {
                self.decide_some(at, (decider, idx), some, false)?;
            }
            self.attend_decided_some(at, (decider, idx), some, (!is_decided, out))?;
        }
        out.set_fresh(plan.n_rows() * width);
        Ok(())
    }

    /// Decides about a layer before its turn, and brings rows meanwhile.
    pub(crate) fn decide_meanwhile(
        &self,
        at: &SparseLayer<'_>,
        idx: usize,
    ) -> Result<(), DeviceError> {
        let (plan, decider) = (at.plan, decider_of(at.kv));
        assert!(plan.n_rows() * at.q_stride() as usize <= at.qkv.len, "the rows are in qkv");
        assert_eq!(at.group(), decider.group, "decided about these heads");
        // Lists of rows to bring have room for one turn.
        let is_one_turn = plan.n_deciding <= decider.n_at_once;
        for some in decider.turns(plan.n_deciding) {
            self.decide_some(at, (decider, idx), some, is_one_turn)?;
        }
        if !is_one_turn {
            decider.branch.fork(&self.device)?;
        }
        decider.branch.end(&self.device, idx)?;
        plan.ahead.set(Some(idx));
        Ok(())
    }

    /// Decides, and brings rows; on the branch if that is to run meanwhile.
    fn decide_some(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        (first, n): (usize, usize),
        is_meanwhile: bool,
    ) -> Result<(), DeviceError> {
        let (sparse, n_heads) = (at.sparse(), at.n_kv_heads());
        let (tallies, moves) = (&decider.tallies[idx % 2], &decider.moves[idx % 2]);
        let (rules, first_head) = (&decider.rules, idx * n_heads);
        let heads = decider.heads(at, idx, (first, n));
        let score = ScoreParams {
            raw: decider.raw.address(),
            scores: decider.scores.address(),
            sums: decider.score_sums.address(),
            stride: count(decider.stride),
            ..at.score_params(rules.by)
        };
        let d = at.kv.page.head_dim as usize;
        let at_head = |bytes: usize| (first_head * bytes) as u64;
        let params = DecideParams {
            score,
            heads,
            labels: decider.labels.address() + at_head(decider.group * d * 4),
            rules: decider.head_rules.address() + at_head(size_of::<HeadRule>()),
            importances: decider.importances.address() + at_head(decider.group * 4),
            tallies: tallies.address(),
            moves: moves.address(),
            percent: rules.percent,
            mark_stride: decider.stride as u64,
            first_head: count(first_head),
            k_min: rules.k_min,
            k_max: rules.k_max,
            sinks: rules.sinks,
            recent: rules.recent,
            working_set: rules.working_set,
            max_age: rules.reuse.and_then(|reuse| reuse.max_age).unwrap_or(u32::MAX),
            aggregate: rules.reuse.map_or(0, |reuse| mix_number(reuse.mix)),
            flags: u32::from(rules.reuse.is_some()) * REUSES + u32::from(rules.is_whole) * WHOLE,
            padding: 0,
        };
        // Blocks that wait for each other must all be on the device.
        let n_blocks = self.device.n_multiprocessors() as usize / (n * n_heads);
        let n_blocks = n_blocks.clamp(1, MAX_BLOCKS).min(decider.stride / PIECE);
        decide(&self.device, &decider.kernel, &params, n_blocks)?;
        let gather = GatherRowsParams {
            heads,
            pages: at.pages(),
            moves: moves.address(),
            tallies: tallies.address(),
            tally_words: size_of::<Tally>() as u64 / 4,
            stride: count(decider.stride),
            n_zeros: count(TALLY_ZEROS),
        };
        let blocks = match at.kv.arena {
            Arena::Device(_) => self.device.n_multiprocessors(),
            Arena::Host(_) => LINK_BLOCKS,
        };
        let branch = if is_meanwhile { Some(decider.branch.fork(&self.device)?) } else { None };
        gather_rows(&self.device, &sparse.kernels.gather, &gather, (blocks, branch))
    }

    fn attend_decided_some(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        some: (usize, usize),
        (is_early, out): (bool, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let params = SparseParams {
            heads: decider.heads(at, idx, some),
            pages: at.pages(),
            qkv: at.qkv.floats.address(),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            partials: decider.partials.address(),
            sums: decider.sums.address(),
            tasks: decider.tasks.address(),
            q_stride: at.q_stride(),
            scale: at.spec.scale * std::f32::consts::LOG2_E,
        };
        attend(&self.device, &at.sparse().kernels.attend, &params, is_early)
    }

    /// What was last decided about a table's sequence.
    pub(crate) fn decisions(
        &self,
        kv: &CudaKv,
        table_row: u32,
    ) -> Result<Vec<Decided>, DeviceError> {
        let decider = decider_of(kv);
        let mut states = vec![HeadState::empty(0, 0); decider.rules.heads.len()];
        let start = table_row as usize * decider.table_bytes();
        self.device.download_from(&decider.states, start, &mut states)?;
        Ok(states.iter().map(decided).collect())
    }

    /// The places of one head of a table's sequence.
    pub(crate) fn places_of(
        &self,
        kv: &CudaKv,
        (table_row, head): (u32, usize),
    ) -> Result<DecidedPlaces, DeviceError> {
        let decider = decider_of(kv);
        let mut state = [HeadState::empty(0, 0)];
        let start = table_row as usize * decider.table_bytes() + head * size_of::<HeadState>();
        self.device.download_from(&decider.states, start, &mut state)?;
        let mut places = DecidedPlaces::default();
        let tables = decider.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &tables[table_row as usize] else { return Ok(places) };
        let mut marks = vec![[0u32; 2]; decider.stride];
        self.device.download_from(&memory.marks, head * decider.stride * 8, &mut marks)?;
        for (place, [stamp, _]) in (0..).zip(marks).filter(|(_, [stamp, _])| *stamp > 0) {
            places.members.push(place);
            if stamp == state[0].now {
                places.chosen.push(place);
            }
        }
        Ok(places)
    }
}

fn decider_of(kv: &CudaKv) -> &Decider {
    let sparse = kv.sparse.as_ref().and_then(|sparse| sparse.decider.as_ref());
    sparse.expect("an arena that decides")
}

fn mix_number(mix: Mix) -> u32 {
    match mix {
        Mix::Harmonic => 0,
        Mix::Least => 1,
        Mix::Mean => 2,
    }
}

fn decided(state: &HeadState) -> Decided {
    let found = match state.lookup {
        0 => Found::Nothing,
        1 => Found::First,
        2 => Found::Hit,
        3 => Found::Turned,
        4 => Found::TurnedFar,
        5 => Found::Aged,
        _ => Found::Always,
    };
    Decided {
        found,
        similarity: state.similarity,
        n_chosen: state.n_chosen,
        n_moved: state.n_moved,
        n_members: state.n_members,
        n_first: state.n_first,
        tail: state.cut,
    }
}
