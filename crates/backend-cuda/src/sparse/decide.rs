//! The device decides: whether selections serve, which places are chosen, and which rows are brought,
//! without a word from the host, so that a whole step is one recorded pass.
//!
//! ```text
//!   decide ─► attend ─► merge        once a layer
//!                         └─► decide ─► gather        beside the next ones, if policies are soft
//! ```
//!
//! Whoever decides brings the rows too; only those that are late, and those that threads of the host bring,
//! have a kernel of their own.
//!
//! What is remembered of a sequence lies in the seat of its table's row (`room`). Rows that are decided
//! about by the same rules are decided about together, and all of them attend together.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaStream;
use nuthatch_backend::{Deciding, DeviceError, Rules, ScoreBy};
use nuthatch_types::KvDtype;

use crate::Cuda;
use crate::branch::{Branch, LateBranch};
use crate::buf::CudaBuf;
use crate::device::{Device, Memory};
use crate::kv::CudaKv;
use crate::launch::attend::Attention;
use crate::launch::sparse::{HeadState, SparseHeads, SparseRow};
use crate::launch::sparse_attend::{MAX_NUMBERS, SparseParams, attend};
use crate::launch::sparse_score::{
    DECIDE_WARPS, DecideParams, HeadRule, LATE, LOOKS, SCORE_KEYS, ScoreParams, decide,
    shared_bytes,
};
use crate::launch::{count, sparse};
use crate::link::Link;
use crate::plan::CudaPlan;

use super::SparseLayer;
use super::room::{DONE_BYTES, Room, RoomShape, Seats, Set};
use super::rules::DeviceRules;
use super::told::Told;

pub(super) const WHAT: &str = "top-k attention";

/// What decides.
pub(crate) struct Decider {
    pub(super) rules: Vec<DeviceRules>,
    /// Heads of all layers.
    pub(super) n_all: usize,
    pub(super) group: usize,
    max_context: usize,
    /// How large everything is.
    pub(super) room: Room,
    pub(super) seats: Mutex<Seats>,
    pub(super) told: Arc<Told>,
    /// `[table][layer][G][group][D]` twice and `[table][layer][G][stride]`.
    labels: Memory,
    pub(super) asked: Memory,
    pub(super) marks: Memory,
    /// `[table]` the pages of working sets.
    pages: Memory,
    /// The rows of the batch.
    rows: Memory,
    pub(super) sets: Vec<Set>,
    branch: Branch,
    /// Where selections are made late, if any are.
    pub(super) late: Option<Arc<LateBranch>>,
    /// Threads of the host that bring rows, if they do.
    pub(super) link: Option<Link>,
    partials: Memory,
    sums: Memory,
    tasks: Memory,
    /// `[layer]`: what counts blocks that have decided.
    done: Memory,
}

/// Rows that are decided about together.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) rules: usize,
    pub(super) first: usize,
    pub(super) n: usize,
}

/// When and where is decided.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    /// With which scratch.
    pub(super) set: usize,
    pub(super) branch: Option<&'a CudaStream>,
    /// About those that attention has served once more.
    pub(super) is_late: bool,
    /// Nothing else is decided meanwhile, so that all blocks have room although each fills half of a
    /// multiprocessor.
    pub(super) is_sole: bool,
    /// Where the end is told to attention, or 0.
    pub(super) done: u64,
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
        let is_soft = rules.iter().any(|one| one.rules.is_soft());
        let n_all = rules.first().map_or(0, |one| one.rules.heads.len());
        assert!(rules.iter().all(|one| one.rules.heads.len() == n_all), "rules of one model");
        let max_context = plan.shape.max_context;
        let room = Room::new(&RoomShape {
            page: kv.page,
            n_all,
            n_kv_heads: kv.shape.n_kv_heads as usize,
            group,
            max_context,
            n_rows: plan.shape.max_seqs,
            set_bytes: rules.iter().map(DeviceRules::set_bytes).max().unwrap_or(0),
            is_soft,
        });
        let sets = (0..room.n_sets).map(|_| Set::new(device, &room)).collect::<Result<_, _>>()?;
        Ok(Decider {
            rules,
            n_all,
            group,
            max_context,
            seats: Mutex::new(Seats::new(n_tables)),
            told: Arc::new(Told::new(device, (n_tables, plan.shape.max_seqs), room.states)?),
            labels: alloc(n_tables * room.labels)?,
            asked: alloc(n_tables * room.asked)?,
            marks: alloc(n_tables * room.marks)?,
            pages: alloc(n_tables * room.pages)?,
            rows: alloc(room.rows)?,
            sets,
            branch: Branch::new(device, true)?,
            late: is_soft.then(|| LateBranch::new(device).map(Arc::new)).transpose()?,
            link: kv.start_link(device)?,
            partials: alloc(room.partials)?,
            sums: alloc(room.sums)?,
            tasks: alloc(room.tasks)?,
            done: alloc(room.done)?,
            room,
        })
    }

    /// Whether all rules have the last tokens seen, whatever is chosen: as many as a step changes digests of.
    pub(super) fn sees_last(&self, changed: impl Fn(ScoreBy) -> u32) -> bool {
        self.rules.iter().all(|one| one.rules.recent >= changed(one.rules.by))
    }

    /// The rows that pick in a layer of the model.
    fn turns(&self, plan: &CudaPlan, idx: usize) -> Vec<Turn> {
        let mut turns = Vec::new();
        let mut start = 0;
        for &(rules, n) in &plan.deciding {
            let end = start + n;
            if idx >= self.rules[rules].rules.first_layer as usize {
                turns.extend((start..end).step_by(self.room.n_at_once).map(|first| {
                    let n = self.room.n_at_once.min(end - first);
                    Turn { rules, first, n }
                }));
            }
            start = end;
        }
        turns
    }

    /// Rows and states of one layer of the model.
    pub(super) fn heads(
        &self,
        at: &SparseLayer<'_>,
        idx: usize,
        (first, n): (usize, usize),
    ) -> SparseHeads {
        let (n_heads, n_all) = (at.n_kv_heads(), self.n_all);
        let first_head = idx * n_heads;
        assert!(first_head + n_heads <= n_all, "a layer of the model");
        SparseHeads {
            rows: self.rows.address() + (first * size_of::<SparseRow>()) as u64,
            states: self.told.states.address() + (first_head * size_of::<HeadState>()) as u64,
            state_stride: count(n_all),
            n_rows: count(n),
            n_kv_heads: count(n_heads),
            group: count(self.group),
        }
    }

    /// Where marks and working sets of a table's row are, cleared if it is new.
    fn seat(&self, device: &Device, row: &Deciding) -> Result<(u64, u64), DeviceError> {
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let (seat, rules) = (row.table_row as usize, row.rules as usize);
        if seats.rules(seat).is_some_and(|before| before != rules) {
            // As rows, codes of others may be no numbers.
            device.clear(&self.pages, seat * self.room.pages, self.room.pages)?;
        }
        if seats.take(seat, rules, row.is_new) {
            device.clear(&self.marks, seat * self.room.marks, self.room.marks)?;
            let empty = self.rules[rules].empty_states();
            device.upload(&self.told.states, seat * self.room.states, &empty)?;
        }
        let at = |memory: &Memory, bytes: usize| memory.address() + (seat * bytes) as u64;
        Ok((at(&self.marks, self.room.marks), at(&self.pages, self.room.pages)))
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
        if self.is_eager.load(Ordering::Relaxed) || group > sparse.group || n_heads > MAX_NUMBERS {
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
        let shared = shared.max().unwrap_or(0).max(DECIDE_WARPS * sparse::ring_bytes(kv.page));
        let set_page = kv.page.set_bytes(kv.keeps_codes(0) && !kv.has_both_sets());
        let on_device = |rules: &Rules| {
            assert!(rules.heads.iter().all(|head| head.importances.len() == group), "one each");
            let kernel = |name| self.device.kernel(&sparse.kernels.module, name, shared);
            let kernels = [kernel("decide")?, kernel("decide_beside")?];
            DeviceRules::new(&self.device, kernels, (plan.shape.max_context, set_page), rules)
        };
        let all = rules.iter().map(on_device).collect::<Result<Vec<_>, _>>()?;
        let all = (all, n_tables as usize);
        let decider = Decider::new(&self.device, group, plan, kv, all)?;
        if let Some(near) = &kv.near {
            let most = |of: fn(&Rules) -> u32| rules.iter().map(of).max().unwrap_or(0) as usize;
            near.want(most(|rules| rules.sinks), most(|rules| rules.recent));
        }
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
        decider.link.as_ref().map_or(Ok(()), Link::check)?;
        let tables = rows.iter().map(|row| row.table_row).collect();
        plan.told = Some((Arc::clone(&decider.told), tables)).filter(|_| !rows.is_empty());
        let mut rows = rows.to_vec();
        rows.sort_by_key(|row| row.rules);
        let (mut is_served, mut is_short) = (true, true);
        let list = rows
            .iter()
            .map(|row| {
                let seq = &plan.seqs[row.seq as usize];
                assert!(seq.n_rows == 1 && seq.table_row == row.table_row, "one row of its table");
                assert!(seq.kv_len() <= decider.max_context, "no longer than planned for");
                let (marks, pages) = decider.seat(&self.device, row)?;
                let (kv_len, table_row) = (count(seq.kv_len()), row.table_row);
                is_served &= decider.serves(row, kv_len);
                is_short &= kv_len <= self.tuning.short;
                let (row, state_row) = (count(seq.first_row), table_row);
                Ok(SparseRow { row, kv_len, table_row, state_row, marks, pages })
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        self.device.upload(&decider.rows, 0, &list)?;
        let same = rows.chunk_by(|a, b| a.rules == b.rules);
        plan.deciding = same.map(|rows| (rows[0].rules as usize, rows.len())).collect();
        plan.late = decider.late.clone();
        (plan.is_served, plan.is_short) = (is_served, is_short);
        plan.leave_out(&self.device, &rows.iter().map(|row| row.seq).collect::<Vec<_>>())
    }

    /// Decides and attends in one layer.
    pub(crate) fn attend_decided(
        &self,
        at: &SparseLayer<'_>,
        idx: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let &SparseLayer { plan, layer, spec, qkv, kv, .. } = at;
        let decider = decider_of(kv);
        let turns = decider.turns(plan, idx);
        let n_picking: usize = turns.iter().map(|turn| turn.n).sum();
        if n_picking < plan.n_rows() {
            let all = self.attention(plan, layer, spec, (qkv, kv));
            Attention { tasks: plan.beside_picks(n_picking), ..all }.run(out)?;
        }
        let width = (spec.n_heads * kv.page.head_dim) as usize;
        assert!(plan.n_rows() * width <= out.len, "the rows fit out");
        assert!(plan.n_rows() * at.q_stride() as usize <= qkv.len, "the rows are in qkv");
        assert_eq!(at.group(), decider.group, "decided about these heads");
        let is_decided = plan.ahead[idx % 2].take() == Some(idx);
        if is_decided {
            decider.branch.join(&self.device, idx)?;
        }
        // What is made late may still be on its way in the first two sets.
        let set = if decider.late.is_some() { 2 } else { idx % 2 };
        let place = Place { set, branch: None, is_late: false, is_sole: false, done: 0 };
        for &turn in turns.iter().filter(|_| !is_decided && !plan.is_served) {
            self.decide_turn(at, (decider, idx), turn, place)?;
        }
        let done = if is_decided { self.told_at((decider, idx), at, &turns) } else { 0 };
        // Rows that pick are one behind the other, except for those of rules that do not pick here.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &Turn { first, n, .. } in &turns {
            match runs.last_mut() {
                Some(run) if run.0 + run.1 == first && run.1 + n <= decider.room.n_at_once => {
                    run.1 += n
                }
                _ => runs.push((first, n)),
            }
        }
        for run in runs {
            self.attend_decided_some(at, (decider, idx), (run, done), out)?;
        }
        out.set_fresh(plan.n_rows() * width);
        turns.iter().try_for_each(|&turn| self.decide_late(at, (decider, idx), turn))
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
        // One after the other, or beside each other; the layer before has been decided about too, so attention
        // to it decides nothing.
        let is_serial = plan.is_short && decider.late.is_none();
        let turn = if is_serial { 0 } else { idx };
        let is_sole = is_serial && idx > 0 && plan.ahead[(idx - 1) % 2].get() == Some(idx - 1);
        let branch = decider.branch.fork(&self.device, turn)?;
        let done = self.told_at((decider, idx), at, &turns);
        let place = Place { set: idx % 2, branch: Some(branch), is_late: false, is_sole, done };
        for &turn in &turns {
            self.decide_turn(at, (decider, idx), turn, place)?;
        }
        decider.branch.end_on(&self.device, idx, turn)?;
        plan.ahead[idx % 2].set(Some(idx));
        Ok(())
    }

    /// Where those who decide ahead tell attention to a layer that all is decided and brought; 0 if that is not one
    /// launch about one row.
    fn told_at(
        &self,
        (decider, idx): (&Decider, usize),
        at: &SparseLayer<'_>,
        turns: &[Turn],
    ) -> u64 {
        let is_one = turns.len() == 1 && turns[0].n == 1 && self.n_decided(at) > 0;
        let is_alone = decider.late.is_none() && decider.link.is_none();
        match is_one && is_alone && at.kv.page.dtype != KvDtype::F32 {
            true => decider.done.address() + (idx * DONE_BYTES) as u64,
            false => 0,
        }
    }

    /// Decides, and brings rows, unless it is late.
    pub(super) fn decide_turn(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        turn: Turn,
        place: Place<'_>,
    ) -> Result<(), DeviceError> {
        let n_bringing = self.n_bringing(at, decider, place);
        self.choose_turn(at, (decider, idx), turn, (place, n_bringing))?;
        if n_bringing > 0 || place.is_late {
            return Ok(());
        }
        self.bring_turn(at, (decider, idx), turn, place)
    }

    fn choose_turn(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        Turn { rules, first, n }: Turn,
        (Place { set, branch, is_late, is_sole, done }, n_bringing): (Place<'_>, u32),
    ) -> Result<(), DeviceError> {
        let n_heads = at.n_kv_heads();
        let Set { raw, scores, score_sums, tallies, moves } = &decider.sets[set];
        let (by, first_head) = (&decider.rules[rules], idx * n_heads);
        let rules = &by.rules;
        let heads = decider.heads(at, idx, (first, n));
        let d = at.kv.page.head_dim as usize;
        let at_head = |bytes: usize| (first_head * bytes) as u64;
        let mut score = ScoreParams {
            raw: raw.address(),
            scores: scores.address(),
            sums: score_sums.address(),
            stride: count(decider.room.stride),
            ..at.score_params(rules.by)
        };
        let flags = match (is_late, at.plan.is_served) {
            (false, _) => 0,
            (true, false) => LATE,
            (true, true) => LATE + LOOKS,
        };
        if is_late {
            (score.qkv, score.q_stride) = decider.asked(at, idx);
        }
        let params = DecideParams {
            score,
            heads,
            labels: decider.labels.address() + at_head(decider.group * d * 4),
            rules: by.head_rules.address() + at_head(size_of::<HeadRule>()),
            importances: by.importances.address() + at_head(decider.group * 4),
            tallies: tallies.address(),
            moves: moves.address(),
            codes: at.kv.kept_codes_of(at.layer.0),
            done,
            percent: rules.percent,
            mark_stride: decider.room.stride as u64,
            first_head: count(first_head),
            k_min: rules.k_min,
            k_max: rules.k_max,
            sinks: rules.sinks,
            recent: rules.recent,
            working_set: rules.working_set,
            max_age: rules.reuse.and_then(|reuse| reuse.max_age).unwrap_or(u32::MAX),
            aggregate: by.aggregate(),
            flags: by.flags() + flags,
            fade: rules.fade,
            n_bringing,
            padding: 0,
        };
        // Of those that may run at once; two layers may, or one alone.
        let n_late = (self.tuning.late_blocks as usize).min(by.n_at_once / 2).max(1);
        let is_alone = branch.is_none() && at.plan.ahead.iter().all(|ahead| ahead.get().is_none());
        let most = match (is_late, is_alone) {
            (true, _) => n_late,
            (false, false) => (by.n_at_once / 2).min(self.tuning.blocks_deciding as usize),
            (false, true) if decider.is_soft(at.plan) => by.n_at_once - n_late,
            (false, true) => by.n_at_once,
        };
        let (kernel, most) = match is_sole {
            true => (&by.beside, by.n_beside),
            false => (&by.kernel, most),
        };
        decide(&self.device, kernel, &params, (most, branch))
    }

    fn attend_decided_some(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        (some, done): ((usize, usize), u64),
        out: &mut CudaBuf,
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
            done,
            asked: if decider.is_soft(at.plan) { decider.asked(at, idx).0 } else { 0 },
            q_stride: at.q_stride(),
            scale: at.spec.scale * std::f32::consts::LOG2_E,
            row_tasks: 0,
            is_early: u32::from(at.plan.is_short && self.tuning.early > 0),
        };
        let kernels = (&at.sparse().kernels.attend, at.kv.keeps_codes(at.layer.0));
        attend(&self.device, kernels, &params)
    }
}

pub(super) fn decider_of(kv: &CudaKv) -> &Decider {
    let sparse = kv.sparse.as_ref().and_then(|sparse| sparse.decider.as_ref());
    sparse.expect("an arena that decides")
}
