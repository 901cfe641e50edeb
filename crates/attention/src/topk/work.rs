//! What is decided about the heads of one layer.

use nuthatch_backend::{Ask, Backend, Best, Bring, Choosing, DeviceError, Pick, ScoreBy};

use super::head::{Head, Lookup};
use super::policy::{Retriever, Reuse};
use super::run::{Active, PolicyRules, Scratch, TopK, TopKLayer, TopKShape};
use super::trace::Decision;

/// What one head of one sequence does in one layer.
pub(super) struct Work {
    pub(super) at: Active,
    pub(super) head_idx: usize,
    pub(super) head: Head,
    pub(super) lookup: Lookup,
    /// For what scores, if a selection is made.
    pub(super) ask: Option<Ask>,
    /// Whether it is still to be made,
    is_open: bool,
    /// and how long that took.
    pub(super) nanos: u64,
    pub(super) n_moved: usize,
    /// Rows of the working set that are attended, and where the tail begins; a late selection changes both
    /// afterwards.
    pub(super) seen: (u32, u32),
    /// Its number in the trace, if that is recorded.
    traced: usize,
}

/// Which selections are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Those that attention waits for.
    Now,
    /// Those that serve from the next step on.
    Late,
}

impl Work {
    pub(super) fn new(at: Active, head_idx: usize, head: Head) -> Self {
        let (lookup, ask) = (Lookup::Always, None);
        let (is_open, nanos, n_moved, seen, traced) = (false, 0, 0, (0, 0), 0);
        Work { at, head_idx, head, lookup, ask, is_open, nanos, n_moved, seen, traced }
    }

    /// Whether a selection is made.
    pub(super) fn chooses(&self, when: When) -> bool {
        self.ask.is_some() && self.lookup.is_late() == (when == When::Late)
    }

    /// Rows that must come near, if any must.
    pub(super) fn bring(&self) -> Option<Bring<'_>> {
        let (places, rows) = self.head.near.missing();
        let (seq, head) = (self.at.seq, self.head_idx as u32);
        (!places.is_empty()).then_some(Bring { seq, head, places, rows })
    }
}

/// What a head sees.
pub(super) fn pick<'a>(topk: &TopK, layer_idx: usize, work: &'a Work) -> Pick<'a> {
    let policy = &topk.policies[work.at.policy].policy;
    let tail = work.head.cut();
    Pick {
        seq: work.at.seq,
        head: work.head_idx as u32,
        n_first: policy.sinks.min(tail),
        places: work.head.places(policy),
        tail,
        rows: if topk.is_brought(layer_idx, work.head_idx) {
            work.head.near_rows(policy)
        } else {
            &[]
        },
    }
}

/// The heads of a layer, some of which make their selections now.
pub(super) struct LayerHeads<'a, B> {
    topk: &'a TopK,
    b: &'a B,
    layer_idx: usize,
    /// Floats of a row of queries.
    width: usize,
    when: When,
    /// Whether all questions were answered.
    pub(super) is_scored: bool,
}

impl<'a, B: Backend> LayerHeads<'a, B> {
    pub(super) fn new(topk: &'a TopK, b: &'a B, layer: &TopKLayer<'_, B>, when: When) -> Self {
        let width = topk.query_stride(layer.dense.owns_kv);
        LayerHeads { topk, b, layer_idx: layer.idx, width, when, is_scored: true }
    }

    /// Rows of a head's selection. The first one fills the working set: what the first tokens need is mostly
    /// asked for by the prompt's end, and there is nothing yet that it could be added to.
    fn n_chosen(&self, work: &Work) -> usize {
        let PolicyRules { policy, rules, .. } = &self.topk.policies[work.at.policy];
        let rule = &rules[self.layer_idx * self.topk.shape.n_kv_heads + work.head_idx];
        let n = policy.cut(work.at.kv_len) - policy.sinks;
        let k = policy.budget.weighted_rows(n, rule.weight) as usize;
        // Pages are cached by their own number.
        let is_lru = matches!(policy.reuse, Reuse::PageLru { .. });
        if is_lru || work.head.has_rows() { k } else { policy.set_size(k).max(k).min(n as usize) }
    }
}

impl<B: Backend> Choosing for LayerHeads<'_, B> {
    type Head = Work;

    fn open(&self, work: &Work) -> Option<usize> {
        if !(work.is_open && work.chooses(self.when)) {
            return None;
        }
        let (policy, k) = (&self.topk.policies[work.at.policy].policy, self.n_chosen(work));
        let n_always = policy.sinks + work.at.kv_len - policy.cut(work.at.kv_len);
        let n_most = if work.head.has_rows() { policy.set_size(k).max(k) } else { k };
        Some((n_always as usize + n_most).min(work.at.kv_len as usize))
    }

    fn choose(&self, work: &mut Work, select: impl FnOnce(&Ask, Best, &mut Vec<u32>)) {
        let Some(ask) = work.ask else { return };
        let (topk, begin) = (self.topk, self.topk.now());
        let TopKShape { group, head_dim, .. } = topk.shape;
        let policy = &topk.policies[work.at.policy].policy;
        let Scratch { queries, scores, .. } = &topk.scratch;
        let (cut, k) = (policy.cut(work.at.kv_len), self.n_chosen(work));
        let best = Best { first: policy.sinks, k, fade: policy.fade(group) };
        self.b.fetch(&work.head.set().members);
        self.b.fetch(&work.head.set().used);
        if self.is_scored {
            let scores = &scores[ask.at..ask.at + ask.n as usize];
            self.b.select(scores, best, &mut work.head.chosen);
        } else {
            select(&ask, best, &mut work.head.chosen);
        }
        let at = work.at.query_row * self.width + work.head_idx * group * head_dim;
        let label = match policy.reuse {
            Reuse::Qsac(_) => &queries[at..at + group * head_dim],
            Reuse::Never | Reuse::PageLru { .. } => &[],
        };
        work.n_moved = work.head.take_over(policy, label, cut, |set, wanted, capacity| {
            self.b.admit(set, wanted, capacity)
        });
        if topk.is_brought(self.layer_idx, work.head_idx) {
            let n_missing = work.head.place_near(policy);
            if matches!(policy.reuse, Reuse::PageLru { .. }) {
                // The last page of a sequence comes as it grows.
                work.n_moved = n_missing;
            }
        } else if topk.near.is_some() {
            work.n_moved = 0;
        }
        (work.is_open, work.nanos) = (false, topk.nanos_since(begin));
    }

    fn pick<'a>(&'a self, work: &'a Work) -> Pick<'a> {
        pick(self.topk, self.layer_idx, work)
    }
}

impl TopK {
    /// Whether the chosen rows of a head are brought near; not if all its rows are there.
    fn is_brought(&self, layer_idx: usize, head_idx: usize) -> bool {
        let head = layer_idx * self.shape.n_kv_heads + head_idx;
        self.near.as_ref().is_some_and(|near| !near.is_resident[head])
    }

    /// Floats of a row of queries, keys and values.
    fn query_stride(&self, owns_kv: bool) -> usize {
        let TopKShape { n_kv_heads, group, head_dim, .. } = self.shape;
        let n_kv = if owns_kv { n_kv_heads } else { 0 };
        (n_kv_heads * group + 2 * n_kv) * head_dim
    }

    /// Decides for each head whether its selection serves, and asks for scores where it does not.
    pub(super) fn look_up<B: Backend>(
        &mut self,
        b: &B,
        buf: &B::Buf,
        layer: &TopKLayer<'_, B>,
        works: &mut [Work],
    ) -> Result<(), DeviceError> {
        let begin = self.now();
        let TopKShape { n_kv_heads, group, head_dim, .. } = self.shape;
        let width = self.query_stride(layer.dense.owns_kv);
        let Scratch { queries, asks, .. } = &mut self.scratch;
        let has_label =
            |work: &&Work| matches!(self.policies[work.at.policy].policy.reuse, Reuse::Qsac(_));
        // Of the last row only queries.
        let n_values = |work: &Work| work.at.query_row * width + n_kv_heads * group * head_dim;
        queries.resize(works.iter().filter(has_label).map(n_values).max().unwrap_or(0), 0.0);
        if !queries.is_empty() {
            b.read(buf, queries)?;
        }
        asks.clear();
        let mut n_scores = 0;
        for work in works.iter_mut() {
            let rules = &self.policies[work.at.policy];
            let (policy, kv_len) = (&rules.policy, work.at.kv_len);
            let cut = policy.cut(kv_len);
            if policy.retriever == Retriever::Streaming || cut <= policy.sinks {
                work.head.refresh(policy, &[], &[], cut);
                work.head.leave_near();
                continue;
            }
            if matches!(policy.reuse, Reuse::Qsac(_)) {
                let rule = &rules.rules[layer.idx * n_kv_heads + work.head_idx];
                let start = work.at.query_row * width + work.head_idx * group * head_dim;
                let queries = &queries[start..start + group * head_dim];
                work.lookup = work.head.look_up(policy, rule, queries, |x, y| b.cosine(x, y));
                let counts = &mut self.stats.policies[work.at.policy];
                counts.count_lookup(rule.is_frozen(), work.lookup);
                if work.lookup.is_hit() {
                    work.head.reuse();
                    continue;
                }
            }
            let (seq, head) = (work.at.seq, work.head_idx as u32);
            let ask = Ask { seq, head, by: rules.by, n: cut, at: n_scores };
            asks.push(ask);
            (work.ask, work.is_open) = (Some(ask), true);
            n_scores += cut as usize;
        }
        // Those of the layer after come while this one attends.
        for at in &self.active {
            let heads = self.rows[at.row as usize].heads.get(layer.idx + 1);
            heads.into_iter().flatten().for_each(|head| b.fetch(head.label()));
        }
        self.stats.select_nanos += self.nanos_since(begin);
        Ok(())
    }

    /// Whether heads had better be scored while others attend; not if a selection is made after that.
    pub(super) fn scores_beside<B: Backend>(&self, b: &B, works: &[Work]) -> bool {
        let is_late = works.iter().any(|work| work.chooses(When::Late));
        let places = |work: &Work| work.head.places(&self.policies[work.at.policy].policy).len();
        // A head that chooses anew will see about as many rows as it does now.
        !is_late && b.scores_beside(&self.scratch.asks, works.iter().map(places).sum())
    }

    /// Answers all questions of [`TopK::look_up`].
    pub(super) fn score<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        (kv, queries): (&B::Kv, &B::Buf),
    ) -> Result<(), DeviceError> {
        let (begin, dense) = (self.now(), layer.dense);
        let Scratch { asks, scores, .. } = &mut self.scratch;
        let Some(last) = asks.last() else { return Ok(()) };
        scores.resize(scores.len().max(last.at + last.n as usize), 0);
        b.score(plan, dense.layer, &dense.spec(), queries, kv, asks, scores)?;
        self.stats.select_nanos += self.nanos_since(begin);
        Ok(())
    }

    /// Makes the selections that were asked for; late ones after all that is attended was picked.
    pub(super) fn select<B: Backend>(
        &mut self,
        b: &B,
        layer: &TopKLayer<'_, B>,
        works: &mut [Work],
        when: When,
    ) {
        let choosing = LayerHeads::new(self, b, layer, when);
        let choose = |work: &mut Work| {
            if choosing.open(work).is_some() {
                choosing.choose(work, |_, _, _| ());
            }
        };
        // Mostly there is one or none, which is not worth waking threads for.
        match works.iter().filter(|work| work.chooses(when)).count() {
            0 | 1 => works.iter_mut().for_each(choose),
            _ => b.each(works, choose),
        }
        self.selected(layer.idx, works, when);
    }

    /// Counts and records selections that were made.
    pub(super) fn selected(&mut self, layer_idx: usize, works: &mut [Work], when: When) {
        if when == When::Now {
            self.count_attended(works);
        }
        self.count_selected(works, when);
        self.trace_decisions(layer_idx, works, when);
    }

    fn count_attended(&mut self, works: &mut [Work]) {
        for work in works {
            let policy = &self.policies[work.at.policy].policy;
            let counts = &mut self.stats.policies[work.at.policy];
            let (kv_len, tail) = (work.at.kv_len, work.head.cut());
            work.seen = (work.head.places(policy).len() as u32, tail);
            let n_near = work.seen.0 + policy.sinks.min(tail);
            counts.heads += 1;
            counts.rows_full += u64::from(kv_len);
            counts.rows_attended += u64::from(n_near + kv_len - tail);
        }
    }

    fn count_selected(&mut self, works: &[Work], when: When) {
        for work in works.iter().filter(|work| work.chooses(when)) {
            let counts = &mut self.stats.policies[work.at.policy];
            counts.selections += 1;
            counts.rows_selected += work.head.chosen.len() as u64;
            counts.rows_moved += work.n_moved as u64;
        }
    }

    fn trace_decisions(&mut self, layer_idx: usize, works: &mut [Work], when: When) {
        let Some(mut trace) = self.trace.take() else { return };
        for work in works.iter_mut().filter(|work| when == When::Now || work.chooses(when)) {
            if when == When::Now {
                work.traced = trace.len();
                trace.push(self.decision(layer_idx, work));
            } else {
                let decision = &mut trace[work.traced];
                decision.chosen = Some(work.head.chosen.clone());
                decision.n_moved = work.n_moved;
            }
        }
        self.trace = Some(trace);
    }

    fn decision(&self, layer_idx: usize, work: &Work) -> Decision {
        let pick = pick(self, layer_idx, work);
        Decision {
            row: work.at.row,
            policy: work.at.policy,
            layer: layer_idx,
            head: work.head_idx,
            kv_len: work.at.kv_len,
            lookup: work.lookup,
            chosen: work.chooses(When::Now).then(|| work.head.chosen.clone()),
            n_moved: work.n_moved,
            n_first: pick.n_first,
            places: pick.places.to_vec(),
            tail: pick.tail,
        }
    }

    /// Measures which share of attention falls on the picks.
    pub(super) fn measure<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        (qkv, kv): (&B::Buf, &B::Kv),
        works: &[Work],
    ) -> Result<(), DeviceError> {
        let (group, dense) = (self.shape.group as f64, layer.dense);
        for work in works {
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
            let pick = pick(self, 0, work);
            let share = |place: usize| f64::from(f32::from_bits(scores[place]));
            let mut mass: f64 = (0..pick.n_first as usize).map(share).sum();
            mass += pick.places.iter().map(|&place| share(place as usize)).sum::<f64>();
            mass += (pick.tail as usize..kv_len).map(share).sum::<f64>();
            let rules = &self.policies[work.at.policy].rules;
            let rule = &rules[layer.idx * self.shape.n_kv_heads + work.head_idx];
            let importance = f64::from(rule.importances.iter().copied().fold(0.0, f32::max));
            let counts = &mut self.stats.policies[work.at.policy];
            counts.mass += mass / group;
            counts.mass_heads += 1;
            counts.mass_important += importance * mass / group;
            counts.importance += importance;
        }
        Ok(())
    }
}
