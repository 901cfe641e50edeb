//! One layer's top-k attention over a batch: what each head remembers, and the device's part.

use std::sync::Arc;

use nuthatch_backend::{Ask, Backend, BatchLayout, DeviceError, Digest, Pick, ScoreBy};
use nuthatch_store::KvStore;
use nuthatch_types::Clock;

use super::head::{Head, HeadRule, Lookup};
use super::policy::{Policy, Retriever, Reuse};
use super::profile::Profile;
use super::stats::{Counts, Stats};
use super::trace::Decision;
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
    pub(super) rows: Vec<Row>,
    /// Sequences of the running step that may attend by picks, and their tables.
    pub(super) active: Vec<Active>,
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
    /// Whether the device is to forget what it remembers.
    pub(super) is_new: bool,
    /// `[layer][G]`; empty before the first step that needs them.
    heads: Vec<Vec<Head>>,
}

#[derive(Clone, Copy)]
pub(super) struct Active {
    pub(super) seq: u32,
    pub(super) row: u32,
    pub(super) policy: usize,
    pub(super) kv_len: u32,
    /// Its only row of the batch.
    query_row: usize,
}

#[derive(Default)]
pub(super) struct Scratch {
    /// Of the layer itself, and of the layer before.
    queries: [Vec<f32>; 2],
    pub(super) asks: [Vec<Ask>; 2],
    pub(super) scores: Vec<u32>,
    pub(super) works: Vec<Work>,
}

/// What one head of one sequence does in one layer.
pub(super) struct Work {
    pub(super) at: Active,
    pub(super) head_idx: usize,
    /// Which queries decide: 0 for those of the layer itself, 1 for those of the layer before.
    source: usize,
    pub(super) head: Head,
    pub(super) lookup: Lookup,
    /// Places of the scores, if a selection is made.
    pub(super) scores: Option<(usize, usize)>,
    pub(super) n_moved: usize,
}

/// One layer, as [`TopK::attend`] needs it.
pub struct TopKLayer<'a, B: Backend> {
    /// Of the model, counted from the embedding.
    pub idx: usize,
    /// Its exact attention.
    pub dense: &'a Dense<B>,
    /// Queries from the layer before, if some policy wants them and there is one; laid out as the
    /// layer's own.
    pub ahead: Option<&'a B::Buf>,
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
            let heads = (0..shape.n_layers * shape.n_kv_heads)
                .map(|i| (i / shape.n_kv_heads, i % shape.n_kv_heads));
            let mut rules: Vec<HeadRule> = heads
                .map(|(layer, head)| HeadRule::new(policy, &profile.importances(layer, head)))
                .collect();
            HeadRule::share_rows(policy, &mut rules);
            PolicyRules { policy: *policy, by, rules }
        });
        let policies: Vec<PolicyRules> = rules.collect();
        let stats = Stats { policies: vec![Counts::default(); policies.len()], ..Stats::default() };
        TopK {
            shape,
            policies,
            digests,
            rows: (0..n_rows).map(|_| Row::default()).collect(),
            active: Vec::new(),
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

    /// Measures, from now on, which share of attention falls on attended rows. This costs more than
    /// exact attention.
    pub fn measure_mass(&mut self) {
        self.measures_mass = true;
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
        (row.policy, row.n_prompt, row.n_pages) = (policy, n_prompt, 0);
        row.forget();
    }

    /// Entries of a row's table were written. Where they replace others, what was remembered by
    /// place is no longer true.
    pub fn table_written(&mut self, row: u32, start: u32, n_entries: u32) {
        let row = &mut self.rows[row as usize];
        if start < row.n_pages {
            row.forget();
        }
        row.n_pages = start + n_entries;
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
            let rules = &self.policies[known.policy];
            if n_rows != 1 || kv_len <= known.n_prompt || rules.policy.retriever == Retriever::Full
            {
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
        let begin = self.now();
        self.take_heads(layer);
        if self.scratch.works.is_empty() {
            return b.attend(plan, dense.layer, &dense.spec(), qkv, kv, out);
        }
        let sources = [qkv, layer.ahead.unwrap_or(qkv)];
        self.look_up(b, sources, layer)?;
        let Scratch { asks, scores, .. } = &mut self.scratch;
        for (queries, asks) in sources.into_iter().zip(asks).filter(|(_, asks)| !asks.is_empty()) {
            b.score(plan, dense.layer, &dense.spec(), queries, kv, asks, scores)?;
        }
        self.select(b, layer);
        if let Some(begin) = begin {
            let nanos = self.now().unwrap_or(begin).saturating_sub(begin).as_nanos();
            self.stats.select_nanos += u64::try_from(nanos).unwrap_or(u64::MAX);
        }
        if self.measures_mass {
            self.measure(b, plan, dense, (qkv, kv))?;
        }
        let picks = picks(&self.policies, &self.scratch.works);
        b.attend_picks(plan, dense.layer, &dense.spec(), qkv, kv, &picks, out)?;
        self.put_back(layer.idx);
        Ok(())
    }

    /// Floats of a row of queries, keys and values.
    fn query_stride(&self, owns_kv: bool) -> usize {
        let TopKShape { n_kv_heads, group, head_dim, .. } = self.shape;
        let n_kv = if owns_kv { n_kv_heads } else { 0 };
        (n_kv_heads * group + 2 * n_kv) * head_dim
    }

    fn now(&self) -> Option<std::time::Duration> {
        self.clock.as_ref().map(|clock| clock.now())
    }

    /// Takes what is remembered of the layer's heads into the list of works.
    pub(super) fn take_heads<B: Backend>(&mut self, layer: &TopKLayer<'_, B>) {
        self.scratch.works.clear();
        for &at in &self.active {
            let policy = &self.policies[at.policy].policy;
            // A window is short already.
            if layer.dense.window.is_some() || layer.idx < policy.dense_layers as usize {
                continue;
            }
            let heads = std::mem::take(&mut self.rows[at.row as usize].heads[layer.idx]);
            self.scratch.works.extend(heads.into_iter().enumerate().map(|(head_idx, head)| {
                let source = usize::from(policy.speculates && layer.ahead.is_some());
                let (lookup, scores, n_moved) = (Lookup::Always, None, 0);
                Work { at, head_idx, source, head, lookup, scores, n_moved }
            }));
        }
    }

    pub(super) fn put_back(&mut self, layer_idx: usize) {
        for work in self.scratch.works.drain(..) {
            self.rows[work.at.row as usize].heads[layer_idx].push(work.head);
        }
    }

    /// Decides for each head whether its selection serves, and asks for scores where it does not.
    pub(super) fn look_up<B: Backend>(
        &mut self,
        b: &B,
        sources: [&B::Buf; 2],
        layer: &TopKLayer<'_, B>,
    ) -> Result<(), DeviceError> {
        let TopKShape { n_kv_heads, group, head_dim, .. } = self.shape;
        let width = self.query_stride(layer.dense.owns_kv);
        let Scratch { queries, scores, asks, works } = &mut self.scratch;
        for (source, (queries, buf)) in queries.iter_mut().zip(sources).enumerate() {
            let has_label = |work: &&Work| {
                let reuse = self.policies[work.at.policy].policy.reuse;
                work.source == source && matches!(reuse, Reuse::Qsac(_))
            };
            let n_rows = works.iter().filter(has_label).map(|work| work.at.query_row + 1).max();
            queries.resize(n_rows.unwrap_or(0) * width, 0.0);
            if !queries.is_empty() {
                b.read(buf, queries)?;
            }
        }
        asks.iter_mut().for_each(Vec::clear);
        let mut n_scores = 0;
        for work in works.iter_mut() {
            let rules = &self.policies[work.at.policy];
            let (policy, kv_len) = (&rules.policy, work.at.kv_len);
            let cut = policy.cut(kv_len);
            if policy.retriever == Retriever::Streaming || cut <= policy.sinks {
                work.head.refresh(policy, &[], &[], cut);
                continue;
            }
            if matches!(policy.reuse, Reuse::Qsac(_)) {
                let rule = &rules.rules[layer.idx * n_kv_heads + work.head_idx];
                let start = work.at.query_row * width + work.head_idx * group * head_dim;
                let queries = &queries[work.source][start..start + group * head_dim];
                work.lookup = work.head.look_up(policy, rule, queries);
                let counts = &mut self.stats.policies[work.at.policy];
                counts.count_lookup(rule.is_frozen(), work.lookup);
                if work.lookup.is_hit() {
                    work.head.reuse();
                    continue;
                }
            }
            let (seq, head) = (work.at.seq, work.head_idx as u32);
            asks[work.source].push(Ask { seq, head, by: rules.by, n: cut, at: n_scores });
            work.scores = Some((n_scores, n_scores + cut as usize));
            n_scores += cut as usize;
        }
        if scores.len() < n_scores {
            scores.resize(n_scores, 0);
        }
        Ok(())
    }

    /// Makes the selections that were asked for.
    pub(super) fn select<B: Backend>(&mut self, b: &B, layer: &TopKLayer<'_, B>) {
        let TopKShape { n_kv_heads, group, head_dim, .. } = self.shape;
        let width = self.query_stride(layer.dense.owns_kv);
        let (policies, Scratch { queries, scores, works, .. }) =
            (&self.policies, &mut self.scratch);
        let first_head = layer.idx * n_kv_heads;
        let make = |work: &mut Work| {
            let Some((start, end)) = work.scores else { return };
            let PolicyRules { policy, rules, .. } = &policies[work.at.policy];
            let cut = policy.cut(work.at.kv_len);
            let weight = rules[first_head + work.head_idx].weight;
            let k = policy.budget.weighted_rows(cut - policy.sinks, weight);
            b.select(&scores[start..end], policy.sinks, k as usize, &mut work.head.chosen);
            let at = work.at.query_row * width + work.head_idx * group * head_dim;
            let label = match policy.reuse {
                Reuse::Qsac(_) => &queries[work.source][at..at + group * head_dim],
                Reuse::Never | Reuse::PageLru { .. } => &[],
            };
            work.n_moved = work.head.take_over(policy, label, cut);
        };
        // Mostly there is one or none, which is not worth waking threads for.
        match works.iter().filter(|work| work.scores.is_some()).count() {
            0 | 1 => works.iter_mut().for_each(make),
            _ => b.each(works, make),
        }
        for work in &self.scratch.works {
            let counts = &mut self.stats.policies[work.at.policy];
            let policy = &self.policies[work.at.policy].policy;
            counts.heads += 1;
            counts.rows_full += u64::from(work.at.kv_len);
            let pick = pick(policy, work);
            let n_attended = pick.n_first + pick.places.len() as u32 + work.at.kv_len - pick.tail;
            counts.rows_attended += u64::from(n_attended);
            if work.scores.is_some() {
                counts.selections += 1;
                counts.rows_selected += work.head.chosen.len() as u64;
                counts.rows_moved += work.n_moved as u64;
            }
        }
        if let Some(trace) = &mut self.trace {
            let decision = |work: &Work| {
                let pick = pick(&self.policies[work.at.policy].policy, work);
                Decision {
                    row: work.at.row,
                    policy: work.at.policy,
                    layer: layer.idx,
                    head: work.head_idx,
                    kv_len: work.at.kv_len,
                    lookup: work.lookup,
                    chosen: work.scores.map(|_| work.head.chosen.clone()),
                    n_moved: work.n_moved,
                    n_first: pick.n_first,
                    places: pick.places.to_vec(),
                    tail: pick.tail,
                }
            };
            trace.extend(self.scratch.works.iter().map(decision));
        }
    }

    /// Measures which share of attention falls on the picks.
    fn measure<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        dense: &Dense<B>,
        (qkv, kv): (&B::Buf, &B::Kv),
    ) -> Result<(), DeviceError> {
        let group = self.shape.group as f64;
        for work in &self.scratch.works {
            let kv_len = work.at.kv_len as usize;
            let ask = Ask {
                seq: work.at.seq,
                head: work.head_idx as u32,
                by: ScoreBy::Keys,
                n: work.at.kv_len,
                at: 0,
            };
            let mut scores = vec![0; kv_len];
            b.score(plan, dense.layer, &dense.spec(), qkv, kv, &[ask], &mut scores)?;
            let pick = pick(&self.policies[work.at.policy].policy, work);
            let share = |place: usize| f64::from(f32::from_bits(scores[place]));
            let mut mass: f64 = (0..pick.n_first as usize).map(share).sum();
            mass += pick.places.iter().map(|&place| share(place as usize)).sum::<f64>();
            mass += (pick.tail as usize..kv_len).map(share).sum::<f64>();
            let counts = &mut self.stats.policies[work.at.policy];
            counts.mass += mass / group;
            counts.mass_heads += 1;
        }
        Ok(())
    }
}

impl Row {
    fn forget(&mut self) {
        self.is_new = true;
        self.heads.iter_mut().flatten().for_each(Head::clear);
    }
}

fn picks<'a>(policies: &[PolicyRules], works: &'a [Work]) -> Vec<Pick<'a>> {
    works.iter().map(|work| pick(&policies[work.at.policy].policy, work)).collect()
}

/// What a head sees.
pub(super) fn pick<'a>(policy: &Policy, work: &'a Work) -> Pick<'a> {
    let tail = work.head.cut();
    Pick {
        seq: work.at.seq,
        head: work.head_idx as u32,
        n_first: policy.sinks.min(tail),
        places: work.head.places(policy),
        tail,
    }
}
