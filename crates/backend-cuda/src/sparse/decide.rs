//! The device decides: whether selections serve, which places are chosen, and which rows are brought,
//! without a word from the host, so that a whole step is one recorded pass.
//!
//! ```text
//!   decide ─► gather ─► attend ─► merge        once a layer
//! ```
//!
//! What is remembered of a sequence lies in the memory of its table's row: labels and states of all
//! heads from the start, marks and working sets when its first row is decided about. Rows that are
//! decided about by the same rules are decided about together, and all of them attend together.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::CudaStream;
use nuthatch_backend::topk::Found;
use nuthatch_backend::{Decided, DecidedPlaces, Deciding, DeviceError, Rules, ScoreBy};

use crate::branch::Branch;
use crate::buf::CudaBuf;
use crate::device::{Device, Memory};
use crate::kv::{Arena, CudaKv, PAGE_LEN};
use crate::launch::sparse::{GatherRowsParams, HeadState, SparseHeads, SparseRow, gather_rows};
use crate::launch::sparse_attend::{MAX_NUMBERS, SparseParams, attend, max_tasks};
use crate::launch::sparse_score::{
    DecideParams, HeadRule, PIECE, SCORE_KEYS, ScoreParams, TALLY_ZEROS, Tally, decide,
    shared_bytes,
};
use crate::launch::{count, sparse};
use crate::plan::CudaPlan;
use crate::{Attention, Cuda};

use super::SparseLayer;
use super::rules::DeviceRules;

/// Bytes of scratch that rows may need together; more of them are decided about in turns. Guessed.
const SCRATCH_BYTES_MAX: usize = 512 << 20;
pub(super) const WHAT: &str = "top-k attention";
/// Blocks that bring rows over the link: no more are needed to fill it.
const LINK_BLOCKS: u32 = 8;

/// What decides.
pub(crate) struct Decider {
    rules: Vec<DeviceRules>,
    /// Heads of all layers.
    n_all: usize,
    group: usize,
    /// Places that a sequence may have, whole pieces.
    stride: usize,
    max_context: usize,
    /// `[table][layer][G]`, and `[table][layer][G][group][D]`.
    states: Memory,
    labels: Memory,
    /// Of each table, when it was first needed.
    tables: Mutex<Vec<Option<TableMemory>>>,
    /// The rows of the batch.
    rows: Memory,
    /// Rows that are decided about at a time.
    n_at_once: usize,
    /// Two of each, because layers that are decided about before their turn overlap.
    raw: [Memory; 2],
    scores: [Memory; 2],
    score_sums: [Memory; 2],
    tallies: [Memory; 2],
    moves: [Memory; 2],
    branch: Branch,
    partials: Memory,
    sums: Memory,
    tasks: Memory,
}

/// Rows that are decided about together.
#[derive(Clone, Copy)]
struct Turn {
    rules: usize,
    first: usize,
    n: usize,
}

/// What a table's sequence needs that grows with its length.
struct TableMemory {
    rules: usize,
    /// `[layer][G][stride]`
    marks: Memory,
    pages: Memory,
}

impl Decider {
    fn new(
        device: &Device,
        group: usize,
        plan: &CudaPlan,
        kv: &CudaKv,
        (rules, n_tables): (Vec<DeviceRules>, usize),
    ) -> Result<Self, DeviceError> {
        let alloc = |bytes| device.alloc(bytes, WHAT);
        let two = |bytes| Ok::<_, DeviceError>([alloc(bytes)?, alloc(bytes)?]);
        let n_heads = kv.shape.n_kv_heads as usize;
        let n_all = rules.first().map_or(0, |one| one.rules.heads.len());
        assert!(rules.iter().all(|one| one.rules.heads.len() == n_all), "rules of one model");
        let (width, d) = (kv.page.width(), kv.page.head_dim as usize);
        let max_context = plan.shape.max_context;
        let stride = max_context.next_multiple_of(PIECE);
        let one = n_heads * stride * 4 * (group + 3) + n_heads * size_of::<Tally>();
        let n_at_once = (SCRATCH_BYTES_MAX / one).min(MAX_NUMBERS / n_heads);
        let n_at_once = n_at_once.min(plan.shape.max_seqs).max(1);
        let n = n_at_once * n_heads;
        // A head may see everything, in three runs that begin and end within pages.
        let n_tasks = n * max_tasks(max_context + 2 * PAGE_LEN);
        Ok(Decider {
            rules,
            n_all,
            group,
            stride,
            max_context,
            states: alloc(n_tables * n_all * size_of::<HeadState>())?,
            labels: alloc(n_tables * n_all * group * d * 4)?,
            tables: Mutex::new((0..n_tables).map(|_| None).collect()),
            rows: alloc(plan.shape.max_seqs * size_of::<SparseRow>())?,
            n_at_once,
            raw: two(n * group * stride * 4)?,
            scores: two(n * stride * 4)?,
            score_sums: two(n * stride / PIECE * group * 8)?,
            tallies: two(n * size_of::<Tally>())?,
            moves: two(n * stride * 8)?,
            branch: Branch::new(device)?,
            partials: alloc(n_tasks * group * width * 4)?,
            sums: alloc(n_tasks * group * 8)?,
            tasks: alloc((n + 1) * 4)?,
        })
    }

    /// The rows that pick in a layer of the model.
    fn turns(&self, plan: &CudaPlan, idx: usize) -> Vec<Turn> {
        let mut turns = Vec::new();
        let mut start = 0;
        for &(rules, n) in &plan.deciding {
            let end = start + n;
            if idx >= self.rules[rules].rules.first_layer as usize {
                turns.extend((start..end).step_by(self.n_at_once).map(|first| {
                    let n = self.n_at_once.min(end - first);
                    Turn { rules, first, n }
                }));
            }
            start = end;
        }
        turns
    }

    /// Rows and states of one layer of the model.
    fn heads(&self, at: &SparseLayer<'_>, idx: usize, (first, n): (usize, usize)) -> SparseHeads {
        let (n_heads, n_all) = (at.n_kv_heads(), self.n_all);
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
        self.n_all * size_of::<HeadState>()
    }

    /// The memory of a table's row, forgotten if it is new: marks and pages.
    fn table(
        &self,
        device: &Device,
        page_bytes: usize,
        row: &Deciding,
    ) -> Result<(u64, u64), DeviceError> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let (rules, table) = (row.rules as usize, &mut tables[row.table_row as usize]);
        let pages = &self.rules[rules].pages;
        // What is freed first can be had again.
        *table = table.take().filter(|memory| memory.rules == rules);
        let is_new = row.is_new || table.is_none();
        let memory = match table {
            Some(memory) => memory,
            None => {
                let n_pages = pages.last().map_or(0, |&(first, n)| first + n);
                table.insert(TableMemory {
                    rules,
                    marks: device.alloc(self.n_all * self.stride * 8, WHAT)?,
                    pages: device.alloc(n_pages * page_bytes, WHAT)?,
                })
            }
        };
        if is_new {
            device.clear(&memory.marks)?;
            let empty = pages.iter().map(|&(first, n)| HeadState::empty(first, n));
            let empty: Vec<HeadState> = empty.collect();
            let start = row.table_row as usize * self.table_bytes();
            device.upload(&self.states, start, &empty)?;
        }
        Ok((memory.marks.address(), memory.pages.address()))
    }
}

impl Cuda {
    /// Prepares to decide by rules.
    pub(crate) fn prepare_deciding(
        &self,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        rules: &[Rules],
        n_tables: u32,
    ) -> Result<bool, DeviceError> {
        let (n_heads, d) = (kv.shape.n_kv_heads as usize, kv.page.head_dim as usize);
        let group = plan.group();
        let Some(sparse) = &kv.sparse else { return Ok(false) };
        if self.is_eager || group > sparse.group || n_heads > MAX_NUMBERS {
            return Ok(false);
        }
        // A function has one limit, whoever launches it.
        let shared = rules.iter().map(|rules| {
            let (kind, width) = match rules.by {
                ScoreBy::Keys => (SCORE_KEYS, 0),
                ScoreBy::Digest(i) => {
                    let digest = &sparse.digests[i];
                    (sparse::kind_number(digest.kind), digest.width)
                }
            };
            shared_bytes(kind, width, group, d)
        });
        let shared = shared.max().unwrap_or(0);
        let on_device = |rules: &Rules| {
            assert!(rules.heads.iter().all(|head| head.importances.len() == group), "one each");
            let kernel = self.device.kernel(&sparse.kernels.module, "decide", shared)?;
            DeviceRules::new(&self.device, kernel, plan.shape.max_context, rules)
        };
        let all = rules.iter().map(on_device).collect::<Result<Vec<_>, _>>()?;
        let rules = (all, n_tables as usize);
        let decider = Decider::new(&self.device, group, plan, kv, rules)?;
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
        let mut rows = rows.to_vec();
        rows.sort_by_key(|row| row.rules);
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
        let same = rows.chunk_by(|a, b| a.rules == b.rules);
        plan.deciding = same.map(|rows| (rows[0].rules as usize, rows.len())).collect();
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
        let decider = decider_of(kv);
        let turns = decider.turns(plan, idx);
        let n_picking: usize = turns.iter().map(|turn| turn.n).sum();
        if n_picking < plan.n_rows() {
            let (device, prefetch) = (&self.device, self.l2_prefetch);
            Attention { device, plan, layer, spec, qkv, kv, prefetch }.run(out)?;
        }
        let width = (spec.n_heads * kv.page.head_dim) as usize;
        assert!(plan.n_rows() * width <= out.len, "the rows fit out");
        assert!(plan.n_rows() * at.q_stride() as usize <= qkv.len, "the rows are in qkv");
        assert_eq!(at.group(), decider.group, "decided about these heads");
        let is_decided = plan.ahead[idx % 2].take() == Some(idx);
        if is_decided {
            decider.branch.join(&self.device, idx)?;
        }
        for &turn in turns.iter().filter(|_| !is_decided) {
            self.decide_some(at, (decider, idx), turn, None)?;
        }
        // Rows that pick are one behind the other, except for those of rules that do not pick here.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &Turn { first, n, .. } in &turns {
            match runs.last_mut() {
                Some(run) if run.0 + run.1 == first && run.1 + n <= decider.n_at_once => run.1 += n,
                _ => runs.push((first, n)),
            }
        }
        for run in runs {
            self.attend_decided_some(at, (decider, idx), run, (!is_decided, out))?;
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
        let turns = decider.turns(plan, idx);
        if turns.is_empty() {
            return Ok(());
        }
        let branch = decider.branch.fork(&self.device)?;
        for &turn in &turns {
            self.decide_some(at, (decider, idx), turn, Some(branch))?;
        }
        decider.branch.end(&self.device, idx)?;
        plan.ahead[idx % 2].set(Some(idx));
        Ok(())
    }

    /// Decides, and brings rows; on a branch if there is one.
    fn decide_some(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        Turn { rules, first, n }: Turn,
        branch: Option<&CudaStream>,
    ) -> Result<(), DeviceError> {
        let (sparse, n_heads) = (at.sparse(), at.n_kv_heads());
        let (tallies, moves) = (&decider.tallies[idx % 2], &decider.moves[idx % 2]);
        let (by, first_head) = (&decider.rules[rules], idx * n_heads);
        let rules = &by.rules;
        let heads = decider.heads(at, idx, (first, n));
        let score = ScoreParams {
            raw: decider.raw[idx % 2].address(),
            scores: decider.scores[idx % 2].address(),
            sums: decider.score_sums[idx % 2].address(),
            stride: count(decider.stride),
            ..at.score_params(rules.by)
        };
        let d = at.kv.page.head_dim as usize;
        let at_head = |bytes: usize| (first_head * bytes) as u64;
        let params = DecideParams {
            score,
            heads,
            labels: decider.labels.address() + at_head(decider.group * d * 4),
            rules: by.head_rules.address() + at_head(size_of::<HeadRule>()),
            importances: by.importances.address() + at_head(decider.group * 4),
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
            aggregate: by.aggregate(),
            flags: by.flags(),
            padding: 0,
        };
        decide(&self.device, &by.kernel, &params, branch)?;
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
        let mut states = vec![HeadState::empty(0, 0); decider.n_all];
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
