//! A device that decides by itself: it is told the rules once, and asked afterwards what it decided.
//!
//! While decisions are recorded, the host decides too, from the same queries and scores, and a device
//! that decides otherwise is at fault.

use nuthatch_backend::topk::{Found, HeadNumbers, Mix, ReuseRule};
use nuthatch_backend::{Backend, Decided, Deciding, DeviceError, Rules};
use nuthatch_store::KvStore;

use super::head::{HeadRule, Lookup};
use super::policy::{Aggregate, Refresh, Retriever, Reuse};
use super::run::{self, PolicyRules, TopK, TopKLayer, TopKShape};
use super::work::{Work, pick};

impl TopK {
    /// Lets the device decide if it can: by all policies, or by none.
    pub fn decide_on_device<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        store: &mut KvStore<B>,
    ) -> Result<(), DeviceError> {
        let choosing = || self.policies.iter().filter(|of| !is_full(of));
        let rules: Vec<Rules> = choosing().filter_map(|of| self.rules(of)).collect();
        let n_ahead = choosing().filter(|of| of.policy.speculates).count();
        let is_alike = n_ahead == 0 || n_ahead == rules.len();
        if rules.is_empty() || rules.len() < choosing().count() || !is_alike {
            return Ok(());
        }
        let n_tables = self.rows.len() as u32;
        self.on_device = b.decide_by(plan, store.device_mut(), &rules, n_tables)?;
        self.rows.iter_mut().for_each(|row| row.is_new = true);
        Ok(())
    }

    /// A policy's number among the rules that the device was given.
    fn rules_number(&self, policy: usize) -> u32 {
        self.policies[..policy].iter().filter(|of| !is_full(of)).count() as u32
    }

    /// The rules of a policy, if a device could decide by them.
    fn rules(&self, of: &PolicyRules) -> Option<Rules> {
        let policy = &of.policy;
        let reuse = match policy.reuse {
            Reuse::Never => None,
            Reuse::Qsac(qsac) => {
                let mix = match qsac.aggregate {
                    Aggregate::Harmonic => Mix::Harmonic,
                    Aggregate::Min => Mix::Least,
                    Aggregate::Mean => Mix::Mean,
                };
                Some(ReuseRule { mix, max_age: qsac.max_age })
            }
            Reuse::PageLru { .. } => return None,
        };
        // Of the last token, keys are written while others are decided about.
        let is_late = policy.speculates && policy.recent == 0;
        if is_late || self.measures_mass || self.near.is_some() {
            return None;
        }
        let numbers = |rule: &HeadRule| HeadNumbers {
            threshold: rule.threshold,
            soft: rule.soft,
            weight: rule.weight,
            importances: rule.importances.clone(),
        };
        Some(Rules {
            by: of.by,
            percent: policy.budget.percent,
            k_min: policy.budget.min,
            k_max: policy.budget.max,
            sinks: policy.sinks,
            recent: policy.recent,
            fade: policy.fade(self.shape.group),
            working_set: policy.working_set,
            is_whole: policy.refresh == Refresh::Whole,
            reuse,
            has_choice: policy.retriever != Retriever::Streaming,
            first_layer: policy.dense_layers,
            heads: of.rules.iter().map(numbers).collect(),
        })
    }

    /// Tells the device about which rows of the step it decides.
    pub fn begin_on_device<B: Backend>(
        &mut self,
        b: &B,
        plan: &mut B::Plan,
        store: &KvStore<B>,
    ) -> Result<(), DeviceError> {
        if self.on_device {
            self.uncounted.push_back(self.active.clone());
        }
        if !self.on_device || self.active.is_empty() {
            return Ok(());
        }
        let mut rows = Vec::with_capacity(self.active.len());
        for at in &self.active {
            let is_new = std::mem::take(&mut self.rows[at.row as usize].is_new);
            let (seq, table_row, rules) = (at.seq, at.row, self.rules_number(at.policy));
            rows.push(Deciding { seq, table_row, rules, is_new });
        }
        b.begin_deciding(plan, store.device(), &rows)
    }

    /// Whether a step needs nothing of what the step before has decided: a device knows that by itself.
    pub fn may_be_queued(&self) -> bool {
        self.on_device && self.trace.is_none()
    }

    /// Whether the host decides about some sequence of the step, layer by layer.
    pub fn decides_on_host(&self) -> bool {
        !self.active.is_empty() && (!self.on_device || self.trace.is_some())
    }

    /// One layer, about which the device decides.
    pub(super) fn attend_on_device<B: Backend>(
        &mut self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        store: &KvStore<B>,
        (qkv, out): (&B::Buf, &mut B::Buf),
    ) -> Result<(), DeviceError> {
        let (kv, dense) = (store.device(), layer.dense);
        if self.active.is_empty() || layer.dense.window.is_some() {
            return b.attend(plan, dense.layer, &dense.spec(), qkv, kv, out);
        }
        b.attend_deciding(plan, (layer.idx, dense.layer), &dense.spec(), qkv, kv, out)?;
        if self.trace.is_none() {
            return Ok(());
        }
        // What the host decides from the same queries and scores says what the device had to.
        let mut works = self.take_heads(layer, run::Deciding::Now);
        self.decide(b, plan, layer, (kv, qkv), &mut works)?;
        self.decide_late(b, layer, &mut works);
        works.append(&mut self.ahead[layer.idx % 2]);
        self.check_device(b, layer, store, &works)?;
        self.put_back(layer.idx, works);
        Ok(())
    }

    /// Has the device decide about a layer before its turn.
    pub(super) fn decide_ahead_on_device<B: Backend>(
        &self,
        b: &B,
        plan: &B::Plan,
        layer: &TopKLayer<'_, B>,
        store: &KvStore<B>,
        queries: &B::Buf,
    ) -> Result<(), DeviceError> {
        let (dense, idx) = (layer.dense, layer.idx);
        if dense.window.is_some() {
            return Ok(());
        }
        b.decide_ahead(plan, (idx, dense.layer), &dense.spec(), queries, store.device())
    }

    /// Counts what the device decided in the first step that has ended and was not counted, unless the host did.
    pub fn count_on_device<B: Backend>(
        &mut self,
        b: &B,
        store: &KvStore<B>,
        has_window: impl Fn(usize) -> bool,
    ) -> Result<(), DeviceError> {
        let active = self.uncounted.pop_front().unwrap_or_default();
        if active.is_empty() || self.trace.is_some() {
            return Ok(());
        }
        let TopKShape { n_layers, n_kv_heads: n_heads, .. } = self.shape;
        let decided = b.told(store.device())?;
        for (at, decided) in active.iter().zip(decided.chunks_exact(n_layers * n_heads)) {
            let (counts, of) = (&mut self.stats.policies[at.policy], &self.policies[at.policy]);
            for (i, (decided, rule)) in decided.iter().zip(&of.rules).enumerate() {
                let layer = i / n_heads;
                if layer < of.policy.dense_layers as usize || has_window(layer) {
                    continue;
                }
                counts.heads += 1;
                counts.rows_full += u64::from(at.kv_len);
                let (n_members, tail) = decided.seen;
                counts.rows_attended += u64::from(decided.n_first + n_members + at.kv_len - tail);
                if matches!(of.policy.reuse, Reuse::Qsac(_)) && decided.found != Found::Nothing {
                    counts.count_lookup(rule.is_frozen(), lookup_of(decided));
                }
                if !matches!(decided.found, Found::Nothing | Found::Hit) {
                    counts.selections += 1;
                    counts.rows_selected += u64::from(decided.n_chosen);
                    counts.rows_moved += u64::from(decided.n_moved);
                }
            }
        }
        Ok(())
    }

    /// Whether the device has decided what the host has.
    fn check_device<B: Backend>(
        &self,
        b: &B,
        layer: &TopKLayer<'_, B>,
        store: &KvStore<B>,
        works: &[Work],
    ) -> Result<(), DeviceError> {
        let n_heads = self.shape.n_kv_heads;
        for works in works.chunks(n_heads) {
            let row = works[0].at.row;
            let decided = b.decided(store.device(), row)?;
            for work in works {
                let number = layer.idx * n_heads + work.head_idx;
                let places = b.decided_places(store.device(), (row, number))?;
                let pick = pick(self, layer.idx, work);
                let expected = expected(work, &pick);
                let has_places = work.lookup.is_hit() || places.chosen == work.head.chosen();
                if expected != decided[number] || !has_places || places.members != pick.places {
                    let (layer, head) = (layer.idx, work.head_idx);
                    return Err(DeviceError::Fault(format!(
                        "layer {layer}, head {head} of table {row} at {} tokens: the device decided \
                         {:?}, {} rows stay, but it should be {expected:?}, {} rows stay; chosen \
                         alike: {has_places}",
                        work.at.kv_len,
                        decided[number],
                        places.members.len(),
                        pick.places.len(),
                    )));
                }
            }
        }
        Ok(())
    }
}

fn is_full(of: &PolicyRules) -> bool {
    of.policy.retriever == Retriever::Full
}

/// What the device has to say about a head.
fn expected(work: &Work, pick: &nuthatch_backend::Pick<'_>) -> Decided {
    let has_chosen = work.ask.is_some();
    let (found, similarity) = match work.lookup {
        Lookup::First => (Found::First, 0.0),
        Lookup::Hit(similarity) => (Found::Hit, similarity),
        Lookup::Turned(Some(similarity)) => (Found::Turned, similarity),
        Lookup::Turned(None) => (Found::TurnedFar, 0.0),
        Lookup::Late(similarity) => (Found::Late, similarity.unwrap_or(0.0)),
        Lookup::Aged => (Found::Aged, 0.0),
        Lookup::Always if has_chosen => (Found::Always, 0.0),
        Lookup::Always => (Found::Nothing, 0.0),
    };
    Decided {
        found,
        similarity,
        n_chosen: if has_chosen { work.head.chosen().len() as u32 } else { 0 },
        n_moved: if has_chosen { work.n_moved as u32 } else { 0 },
        n_members: pick.places.len() as u32,
        n_first: pick.n_first,
        tail: pick.tail,
        seen: work.seen,
    }
}

fn lookup_of(decided: &Decided) -> Lookup {
    match decided.found {
        Found::First => Lookup::First,
        Found::Hit => Lookup::Hit(decided.similarity),
        Found::Turned => Lookup::Turned(Some(decided.similarity)),
        Found::TurnedFar => Lookup::Turned(None),
        Found::Late => Lookup::Late(Some(decided.similarity)),
        Found::Aged => Lookup::Aged,
        Found::Nothing | Found::Always => Lookup::Always,
    }
}
