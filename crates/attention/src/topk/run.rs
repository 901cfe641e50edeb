//! Top-k attention over a batch: what is remembered of each sequence, and the order of a layer's
//! work.

use std::collections::VecDeque;
use std::sync::Arc;

use nuthatch_backend::{Ask, Backend, BatchLayout, Bring, DeviceError, Digest, Near, ScoreBy};
use nuthatch_store::KvStore;
use nuthatch_types::Clock;

use super::head::{Head, HeadRule};
use super::near::{NearError, NearNeeds, NearPlan, NearRequest};
use super::policy::{Policy, Retriever};
use super::profile::Profile;
use super::stats::{Counts, Stats};
use super::trace::Decision;
use super::work::{LayerHeads, When, Work};
use crate::Dense;

/// Layers and heads of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKShape {
    /// Layers.
    pub n_layers: usize,
    /// Layers that own keys and values.
    pub n_kv_layers: usize,
    /// Key/value heads of a layer.
    pub n_kv_heads: usize,
    /// Query heads of a key/value head.
    pub group: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Top-k attention of all layers, and what is remembered of the running sequences.
///
/// A sequence is known by the row of its table. Places, not slots, are remembered, so that it does
/// not matter where pages are or who else holds them; a table that is written anew forgets.
pub struct TopK {
    pub(super) shape: TopKShape,
    pub(super) policies: Vec<PolicyRules>,
    digests: Vec<Digest>,
    /// `[layer][G]` what adjacent queries have on the average; empty if it was not measured.
    similarities: Vec<f32>,
    /// What is kept near, if pages are far.
    pub(super) near: Option<NearPlan>,
    pub(super) rows: Vec<Row>,
    /// Sequences of the running step that may attend by picks, and their tables.
    pub(super) active: Vec<Active>,
    /// The same of passes that were queued, until it is counted what a device decided about them.
    pub(super) uncounted: VecDeque<Vec<Active>>,
    /// What was decided by the queries of the layer before, of layers with even numbers and of those
    /// with odd ones: a layer is decided about before the one before it attends.
    pub(super) ahead: [Vec<Work>; 2],
    pub(super) stats: Stats,
    pub(super) measures_mass: bool,
    /// Decisions since they were last taken, if they are recorded.
    pub(super) trace: Option<Vec<Decision>>,
    clock: Option<Arc<dyn Clock + Send + Sync>>,
    pub(super) scratch: Scratch,
    /// Whether the device decides by itself.
    pub(super) on_device: bool,
}

/// A policy with all that follows from it.
pub(super) struct PolicyRules {
    pub(super) policy: Policy,
    pub(super) by: ScoreBy,
    /// `[layer][G]`.
    pub(super) rules: Vec<HeadRule>,
}

/// What is remembered of the sequence in one row of the tables.
#[derive(Default)]
pub(super) struct Row {
    policy: usize,
    /// Its first tokens, which are computed exactly.
    n_prompt: u32,
    /// Entries of its table that were written.
    n_pages: u32,
    /// Places that it had in its last step.
    kv_len: u32,
    /// Whether the device is to forget what it remembers.
    pub(super) is_new: bool,
    /// `[layer][G]`; empty before the first step that needs them.
    pub(super) heads: Vec<Vec<Head>>,
}

/// A sequence of the running step.
#[derive(Clone, Copy)]
pub(super) struct Active {
    pub(super) seq: u32,
    pub(super) row: u32,
    pub(super) policy: usize,
    pub(super) kv_len: u32,
    /// Its only row of the batch.
    pub(super) query_row: usize,
}

/// Memory that layers reuse.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) queries: Vec<f32>,
    pub(super) asks: Vec<Ask>,
    pub(super) scores: Vec<u32>,
}

/// One layer, as [`TopK::attend`] needs it.
pub struct TopKLayer<'a, B: Backend> {
    /// Of the model, counted from the embedding.
    pub idx: usize,
    /// Its exact attention.
    pub dense: &'a Dense<B>,
}

/// Whose queries decide about a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deciding {
    /// Those that the layer before made for it.
    Ahead,
    /// Its own.
    Now,
}

/// What follows from a policy for each head, `[layer][G]`.
pub(super) fn rules_of(shape: &TopKShape, policy: &Policy, profile: &Profile) -> Vec<HeadRule> {
    let heads = (0..shape.n_layers * shape.n_kv_heads)
        .map(|i| (i / shape.n_kv_heads, i % shape.n_kv_heads));
    let mut rules: Vec<HeadRule> = heads
        .map(|(layer, head)| HeadRule::new(policy, &profile.importances(layer, head)))
        .collect();
    HeadRule::share_rows(policy, &mut rules);
    rules
}

/// The most rows that the working sets of all heads of a sequence have together, by the policy that has
/// most, in a context of `n` tokens.
pub fn working_rows(shape: &TopKShape, policies: &[Policy], profile: &Profile, n: u32) -> u64 {
    let rows = |policy: &Policy| -> u64 {
        let rules = rules_of(shape, policy, profile);
        rules.iter().map(|rule| u64::from(policy.rows_max(n, rule.weight))).sum()
    };
    policies.iter().map(rows).max().unwrap_or(0)
}

impl TopK {
    /// Top-k attention by any of these policies, for sequences in up to `n_rows` tables.
    ///
    /// A row begins with the first policy.
    pub fn new(shape: TopKShape, policies: &[Policy], profile: &Profile, n_rows: usize) -> Self {
        assert!(!policies.is_empty(), "at least one policy");
        let mut digests: Vec<Digest> = Vec::new();
        let rules = policies.iter().map(|policy| {
            let by = match profile.digest(policy.retriever) {
                None => ScoreBy::Keys,
                Some(digest) => {
                    let known = digests.iter().position(|known| *known == digest);
                    ScoreBy::Digest(known.unwrap_or_else(|| {
                        digests.push(digest);
                        digests.len() - 1
                    }))
                }
            };
            PolicyRules { policy: *policy, by, rules: rules_of(&shape, policy, profile) }
        });
        let policies: Vec<PolicyRules> = rules.collect();
        let stats = Stats { policies: vec![Counts::default(); policies.len()], ..Stats::default() };
        TopK {
            shape,
            policies,
            digests,
            similarities: profile.similarities(),
            near: None,
            ahead: Default::default(),
            rows: (0..n_rows).map(|_| Row::default()).collect(),
            active: Vec::new(),
            uncounted: VecDeque::new(),
            stats,
            measures_mass: false,
            trace: None,
            clock: None,
            scratch: Scratch::default(),
            on_device: false,
        }
    }

    /// What must be kept beside pages.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }

    /// Pages are far from now on; shares near memory, and says what the device has to keep there.
    pub fn keep_near(
        &mut self,
        needs: &NearNeeds,
        request: &NearRequest,
    ) -> Result<&Near, NearError> {
        if self.shape.n_layers != self.shape.n_kv_layers {
            return Err(NearError::SharedLayers);
        }
        let policies: Vec<(Policy, &[HeadRule])> =
            self.policies.iter().map(|rules| (rules.policy, &rules.rules[..])).collect();
        let heads = (self.shape.n_kv_heads, &self.similarities[..]);
        Ok(&self.near.insert(NearPlan::new(&policies, heads, needs, request)?).near)
    }

    /// What is kept near, if pages are far.
    pub fn near(&self) -> Option<&NearPlan> {
        self.near.as_ref()
    }

    /// Bytes of the largest selection of an average head after its first, in a context of `n` tokens.
    pub fn selection_bytes(&self, n: u32, row_bytes: usize) -> u64 {
        let rows = self.policies.iter().map(|rules| rules.policy.budget.rows(n)).max();
        u64::from(rows.unwrap_or(0)) * row_bytes as u64
    }

    /// Measures, from now on, which share of attention falls on attended rows; before any step. This
    /// costs more than exact attention, and a device does not decide by itself then.
    pub fn measure_mass(&mut self) {
        (self.measures_mass, self.on_device) = (true, false);
    }

    /// Records every decision from now on, until [`TopK::take_trace`]; this grows with each step.
    pub fn record(&mut self) {
        self.trace.get_or_insert_default();
    }

    /// The decisions since the last call.
    pub fn take_trace(&mut self) -> Vec<Decision> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Measures, from now on, what choosing takes.
    pub fn set_clock(&mut self, clock: Arc<dyn Clock + Send + Sync>) {
        self.clock = Some(clock);
    }

    /// What was done so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Forgets what was counted.
    pub fn reset_stats(&mut self) {
        let n_policies = self.policies.len();
        self.stats = Stats { policies: vec![Counts::default(); n_policies], ..Stats::default() };
    }

    /// The policies, in the order in which they were given.
    pub fn policies(&self) -> impl ExactSizeIterator<Item = &Policy> {
        self.policies.iter().map(|rules| &rules.policy)
    }

    /// Whether some policy decides by the queries of the layer before.
    pub fn speculates(&self) -> bool {
        self.policies.iter().any(|rules| rules.policy.speculates)
    }

    /// A sequence takes a row of the tables. Its first `n_prompt` tokens are computed exactly.
    pub fn begin(&mut self, row: u32, n_prompt: u32, policy: usize) {
        assert!(policy < self.policies.len(), "one of the policies");
        let row = &mut self.rows[row as usize];
        (row.policy, row.n_prompt, row.n_pages, row.kv_len) = (policy, n_prompt, 0, 0);
        row.forget();
    }

    /// Entries of a row's table were written; says whether they replace others. That alone changes no
    /// place: a page that moved, or that somebody else has too, holds the same tokens. But its bits may
    /// differ, so what is near comes again.
    pub fn table_written(&mut self, row: u32, start: u32, n_entries: u32) -> bool {
        let row = &mut self.rows[row as usize];
        let replaces = start < row.n_pages;
        if replaces && self.near.is_some() {
            row.heads.iter_mut().flatten().for_each(|head| head.near.bring_again());
        }
        row.n_pages = start + n_entries;
        replaces
    }

    /// Looks at a step's batch. The rows of prompts are computed exactly, and so are those of
    /// sequences that have several.
    pub fn begin_step(&mut self, layout: &BatchLayout) {
        self.active.clear();
        for seq in 0..layout.n_seqs() {
            let first = layout.query_start[seq];
            let n_rows = layout.query_start[seq + 1] - first;
            let (row, kv_len) = (layout.table_row[seq], layout.kv_len[seq]);
            let known = &mut self.rows[row as usize];
            // It is computed again from somewhere on, or tokens were dropped: what was remembered by
            // place is no longer true.
            if std::mem::replace(&mut known.kv_len, kv_len) >= kv_len {
                known.forget();
            }
            let rules = &self.policies[known.policy];
            let is_short = kv_len <= known.n_prompt || kv_len < rules.policy.from;
            if n_rows != 1 || is_short || rules.policy.retriever == Retriever::Full {
                continue;
            }
            if known.heads.is_empty() {
                let TopKShape { n_layers, n_kv_heads, .. } = self.shape;
                known.heads = vec![vec![Head::default(); n_kv_heads]; n_layers];
            }
            let (seq, query_row) = (seq as u32, first as usize);
            self.active.push(Active { seq, row, policy: known.policy, kv_len, query_row });
        }
    }

    /// Whether some sequence of the step is decided about by the layer before.
    pub fn is_speculating(&self) -> bool {
        self.active.iter().any(|at| self.policies[at.policy].policy.speculates)
    }

    /// Decides about a layer by the queries that the layer before made for it, laid out as its own,
    /// for sequences whose policy wants that; rows come near while other layers compute.
    pub fn decide_ahead<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        store: &KvStore<B>,
        queries: &B::Buf,
    ) -> Result<(), DeviceError> {
        if self.on_device {
            self.decide_ahead_on_device(b, plan, layer, store, queries)?;
            if self.trace.is_none() {
                return Ok(());
            }
        }
        let mut works = self.take_heads(layer, Deciding::Ahead);
        self.decide(b, plan, layer, (store.device(), queries), &mut works)?;
        if self.near.is_some() {
            let brings: Vec<Bring<'_>> = works.iter().filter_map(Work::bring).collect();
            b.bring_ahead(plan, layer.dense.layer, store.device(), &brings)?;
            works.iter_mut().for_each(|work| work.head.near.settle());
        }
        self.ahead[layer.idx % 2] = works;
        Ok(())
    }

    /// Attends in one layer: sequences that may, by picks, and the others to everything. Keys and
    /// values were appended; `qkv` and `out` are those of [`Dense::run`].
    pub fn attend<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        store: &KvStore<B>,
        (qkv, out): (&B::Buf, &mut B::Buf),
    ) -> Result<(), DeviceError> {
        if self.on_device {
            return self.attend_on_device(b, plan, layer, store, (qkv, out));
        }
        let (kv, dense) = (store.device(), layer.dense);
        let mut works = self.take_heads(layer, Deciding::Now);
        // Else heads choose while others attend.
        let chooses_first = self.near.is_some() || self.measures_mass;
        self.look_up(b, qkv, layer, &mut works)?;
        let is_scored = chooses_first || !self.scores_beside(b, &works);
        if is_scored {
            self.score(b, plan, layer, (kv, qkv))?;
        }
        let n_asked = works.len();
        if chooses_first {
            self.select_asked(b, layer, &mut works);
        }
        works.append(&mut self.ahead[layer.idx % 2]);
        if works.is_empty() {
            return b.attend(plan, dense.layer, &dense.spec(), qkv, kv, out);
        }
        if self.near.is_some() {
            let begin = self.now();
            let brings: Vec<Bring<'_>> = works.iter().filter_map(Work::bring).collect();
            b.bring(plan, dense.layer, kv, &brings)?;
            works.iter_mut().for_each(|work| work.head.near.settle());
            self.stats.bring_nanos += self.nanos_since(begin);
        }
        if self.measures_mass {
            self.measure(b, plan, layer, (qkv, kv), &works)?;
        }
        let mut heads = LayerHeads::new(self, b, layer, When::Now);
        heads.is_scored = is_scored;
        let heads = (&heads, &mut works[..]);
        b.attend_choosing(plan, dense.layer, &dense.spec(), qkv, kv, heads, out)?;
        if !chooses_first {
            let nanos: u64 = works[..n_asked].iter().map(|work| work.nanos).sum();
            self.stats.select_nanos += nanos / b.n_threads() as u64;
            self.selected(layer.idx, &mut works[..n_asked], When::Now);
        }
        self.decide_late(b, layer, &mut works);
        if self.near.is_some() {
            let late = || works.iter().filter(|work| work.chooses(When::Late));
            let brings: Vec<Bring<'_>> = late().filter_map(Work::bring).collect();
            b.bring(plan, dense.layer, kv, &brings)?;
            works.iter_mut().for_each(|work| work.head.near.settle());
        }
        self.put_back(layer.idx, works);
        Ok(())
    }

    /// Makes the selections that serve from the next step on, from the scores of [`TopK::decide`].
    pub(super) fn decide_late<B: Backend>(
        &mut self,
        b: &B,
        layer: &TopKLayer<'_, B>,
        works: &mut [Work],
    ) {
        if works.iter().any(|work| work.chooses(When::Late)) {
            let begin = self.now();
            self.select(b, layer, works, When::Late);
            self.stats.select_nanos += self.nanos_since(begin);
        }
    }

    /// Looks up, scores and selects.
    pub(super) fn decide<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        (kv, queries): (&B::Kv, &B::Buf),
        works: &mut [Work],
    ) -> Result<(), DeviceError> {
        self.look_up(b, queries, layer, works)?;
        self.score(b, plan, layer, (kv, queries))?;
        self.select_asked(b, layer, works);
        Ok(())
    }

    /// Makes the selections that [`TopK::look_up`] found to be needed now.
    fn select_asked<B: Backend>(&mut self, b: &B, layer: &TopKLayer<'_, B>, works: &mut [Work]) {
        let begin = self.now();
        self.select(b, layer, works, When::Now);
        self.stats.select_nanos += self.nanos_since(begin);
    }

    pub(super) fn now(&self) -> Option<std::time::Duration> {
        self.clock.as_ref().map(|clock| clock.now())
    }

    pub(super) fn nanos_since(&self, begin: Option<std::time::Duration>) -> u64 {
        let passed = begin.and_then(|begin| Some(self.now()?.saturating_sub(begin)));
        passed.map_or(0, |passed| u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Takes what is remembered of the layer's heads, of sequences that are decided about now.
    pub(super) fn take_heads<B: Backend>(
        &mut self,
        layer: &TopKLayer<'_, B>,
        deciding: Deciding,
    ) -> Vec<Work> {
        let mut works = Vec::new();
        for &at in &self.active {
            let policy = &self.policies[at.policy].policy;
            // Nothing comes before the first layer.
            let is_ahead = policy.speculates && layer.idx > 0;
            // A window is short already.
            if layer.dense.window.is_some()
                || layer.idx < policy.dense_layers as usize
                || is_ahead != (deciding == Deciding::Ahead)
            {
                continue;
            }
            let heads = std::mem::take(&mut self.rows[at.row as usize].heads[layer.idx]);
            works.extend(heads.into_iter().enumerate().map(|(i, head)| Work::new(at, i, head)));
        }
        works
    }

    /// Gives back what [`TopK::take_heads`] took.
    pub(super) fn put_back(&mut self, layer_idx: usize, works: Vec<Work>) {
        for work in works {
            self.rows[work.at.row as usize].heads[layer_idx].push(work.head);
        }
    }
}

impl Row {
    fn forget(&mut self) {
        self.is_new = true;
        self.heads.iter_mut().flatten().for_each(Head::clear);
    }
}
