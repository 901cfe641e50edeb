//! One prompt, computed once and continued by every policy.
//!
//! ```text
//!   table 0        [ pages of the prompt ]
//!   table 1 + p    [ the same, full ones ][ a copy of the last ][ pages of the answer ]
//! ```
//!
//! Where pages are stored in fewer bits, a table has its own full ones: what comes back of them.

use std::sync::Arc;

use anyhow::ensure;
use nuthatch_backend::{Backend, BatchLayout, DeviceError, PageCodec};
use nuthatch_engine::topk::{Counts, Decision, Retriever, TopK};
use nuthatch_engine::{
    Budget, DiskError, Forward as _, LoadedModel, Pages as _, SharedClock, SizeRequest, Sizes,
    TopKOptions,
};
use nuthatch_model::ModelFiles;
use nuthatch_types::{ColdKv, KvDtype, PageCopy, Slot, SystemClock, TokenId};

/// Tokens of a prompt that are computed at a time.
const CHUNK: u32 = 512;

/// A model with room for one prompt and all policies' answers.
pub(super) struct Runner<B: Backend> {
    model: LoadedModel<B>,
    /// For each policy what its pages went through.
    codecs: Vec<Option<Arc<dyn PageCodec>>>,
    page_len: u32,
    vocab: usize,
}

/// How one policy continued.
#[derive(Clone, Debug, Default)]
pub(super) struct Continuation {
    /// Its tokens, chosen greedily; those that were given, if they were.
    pub(super) tokens: Vec<TokenId>,
    /// The sum of the negative logarithms of the given tokens' probabilities.
    pub(super) nll: f64,
    /// The sum of the divergences from the first policy's distributions.
    pub(super) kl: f64,
    /// What top-k attention did.
    pub(super) counts: Counts,
}

/// How answers end.
pub(super) struct Ending<'a> {
    /// Most tokens.
    pub(super) n_tokens: usize,
    /// Tokens that end an answer.
    pub(super) ends: &'a [TokenId],
    /// Tokens that are continued with, whatever the policy would choose.
    pub(super) given: Option<&'a [TokenId]>,
}

impl<B: Backend> Runner<B> {
    /// Loads a model for prompts and answers of `max_context` tokens together.
    pub(super) fn new(
        backend: Arc<B>,
        files: &ModelFiles,
        options: &TopKOptions,
        colds: &[Option<ColdKv>],
        (max_context, kv_dtype): (u32, KvDtype),
    ) -> anyhow::Result<Self> {
        let n_policies = options.policies.len();
        let n_cold = colds.iter().flatten().count() as u32;
        let request = SizeRequest::for_model(files, kv_dtype, u64::MAX / 2);
        let page_len = request.kv.page_len;
        let n_tables = n_policies as u32 + 1;
        // The prompt once and once for each type, and for each policy its answer and a copy of a page.
        let n_pages = (1 + n_cold) * max_context.div_ceil(page_len) + n_policies as u32 * 24;
        let kv_bytes = request.kv.page_bytes() as u64 * u64::from(n_pages);
        let request = SizeRequest {
            max_context: Some(max_context),
            model_context: max_context,
            max_seqs: n_tables,
            max_rows: CHUNK.max(n_tables),
            budget: Budget::KvBytes(kv_bytes),
            ..request
        };
        let sizes = Sizes::compute(&request)?;
        let mut model = LoadedModel::load(backend, files, &sizes)?;
        let clock: SharedClock = Arc::new(SystemClock::start());
        // Where everything is attended to, pages lie as they do without a policy.
        if options.policies.iter().any(|policy| policy.retriever != Retriever::Full) {
            model.set_topk(files, options, &clock)?;
        }
        let vocab = model.vocab() as usize;
        let mut codecs = Vec::new();
        for cold in colds {
            let codec = cold.as_ref().map(|cold| {
                let codec = model.page_codec(cold);
                codec.ok_or_else(|| DiskError::NoCodec(cold.clone()))
            });
            codecs.push(codec.transpose()?);
        }
        Ok(Runner { model, codecs, page_len, vocab })
    }

    /// Also measures which share of attention falls on the chosen tokens.
    pub(super) fn measure_mass(&mut self) {
        if let Some(topk) = self.model.topk_mut() {
            topk.measure_mass();
        }
    }

    /// Computes the prompt and lets these policies continue it; the others' continuations are empty.
    ///
    /// Divergences are from `exact`, logits for each step of tokens that are given; the first policy's
    /// are put there if there are none.
    pub(super) fn run(
        &mut self,
        prompt: &[TokenId],
        policies: &[usize],
        ending: &Ending<'_>,
        exact: &mut Vec<Vec<f32>>,
    ) -> anyhow::Result<Vec<Continuation>> {
        ensure!(!prompt.is_empty(), "an empty prompt");
        if let Some(topk) = self.model.topk_mut() {
            topk.reset_stats();
        }
        let logits = self.prefill(prompt)?;
        self.fork(prompt.len() as u32, ending.n_tokens as u32)?;
        let mut states = vec![Continuation::default(); self.codecs.len()];
        let mut running = policies.to_vec();
        let mut rows = vec![logits; running.len()];
        for step in 0..ending.n_tokens {
            if ending.given.is_some() && exact.len() == step {
                exact.extend(rows.first().cloned());
            }
            choose(&mut states, &running, &rows, (step, ending), exact.get(step));
            running.retain(|&i| {
                states[i].tokens.last().is_some_and(|last| !ending.ends.contains(last))
            });
            if running.is_empty() || step + 1 == ending.n_tokens {
                break;
            }
            let kv_len = (prompt.len() + step + 1) as u32;
            let last = |i: usize| states[i].tokens.last().map_or(0, |token| token.0);
            let tokens: Vec<u32> = running.iter().map(|&i| last(i)).collect();
            rows = self.decode(&running, &tokens, kv_len)?;
        }
        if let Some(stats) = self.model.topk_stats() {
            for (state, counts) in states.iter_mut().zip(&stats.policies) {
                state.counts = *counts;
            }
        }
        Ok(states)
    }

    /// Records decisions from now on.
    pub(super) fn record(&mut self) {
        if let Some(topk) = self.model.topk_mut() {
            topk.record();
        }
    }

    /// The decisions since the last call.
    pub(super) fn take_trace(&mut self) -> Vec<Decision> {
        self.model.topk_mut().map(TopK::take_trace).unwrap_or_default()
    }

    /// Computes the prompt in table 0, exactly; the logits after its last token.
    fn prefill(&mut self, prompt: &[TokenId]) -> anyhow::Result<Vec<f32>> {
        let n_pages = (prompt.len() as u32).div_ceil(self.page_len);
        let slots: Vec<Slot> = (0..n_pages).map(Slot).collect();
        self.model.begin_with(0, u32::MAX, 0);
        self.model.write_table(0, 0, &slots)?;
        let mut logits = vec![0.0; self.vocab];
        let mut start = 0;
        for chunk in prompt.chunks(CHUNK as usize) {
            let end = start + chunk.len() as u32;
            let is_last = end as usize == prompt.len();
            let layout = BatchLayout {
                tokens: chunk.iter().map(|token| token.0).collect(),
                positions: (start..end).collect(),
                query_start: vec![0, end - start],
                kv_len: vec![end],
                table_row: vec![0],
                output_rows: if is_last { vec![end - start - 1] } else { vec![] },
            };
            self.model.forward(&layout, if is_last { &mut logits } else { &mut [] })?;
            start = end;
        }
        Ok(logits)
    }

    /// Gives each policy a table that shares the prompt's full pages.
    fn fork(&mut self, n_prompt: u32, n_answer: u32) -> anyhow::Result<()> {
        let n_full = n_prompt / self.page_len;
        let n_pages = (n_prompt + n_answer).div_ceil(self.page_len);
        let mut next = n_prompt.div_ceil(self.page_len);
        for (policy, codec) in self.codecs.clone().iter().enumerate() {
            let row = policy as u32 + 1;
            let mut slots: Vec<Slot> = (0..n_full).map(Slot).collect();
            if let Some(codec) = codec {
                for slot in &mut slots {
                    self.recode(&**codec, *slot, Slot(next))?;
                    *slot = Slot(next);
                    next += 1;
                }
            }
            if !n_prompt.is_multiple_of(self.page_len) {
                let (source, target) = (Slot(n_full), Slot(next));
                self.model.copy_pages(&[PageCopy { source, target }])?;
            }
            let own = n_pages - n_full;
            slots.extend((next..next + own).map(Slot));
            next += own;
            self.model.begin_with(row, n_prompt, policy);
            self.model.write_table(row, 0, &slots)?;
        }
        Ok(())
    }

    /// Writes what a page is after it was stored.
    fn recode(
        &mut self,
        codec: &dyn PageCodec,
        source: Slot,
        target: Slot,
    ) -> Result<(), DeviceError> {
        let (mut page, mut coded) = (vec![0; codec.page_bytes()], vec![0; codec.coded_bytes()]);
        self.model.read_page(source, &mut page)?;
        codec.encode(&page, &mut coded);
        codec.decode(&coded, &mut page);
        self.model.write_page(target, 0, &page)
    }

    /// One step of the running policies; their logits, in the same order.
    fn decode(
        &mut self,
        running: &[usize],
        tokens: &[u32],
        kv_len: u32,
    ) -> anyhow::Result<Vec<Vec<f32>>> {
        let n = running.len();
        let layout = BatchLayout {
            tokens: tokens.to_vec(),
            positions: vec![kv_len - 1; n],
            query_start: (0..=n as u32).collect(),
            kv_len: vec![kv_len; n],
            table_row: running.iter().map(|&i| i as u32 + 1).collect(),
            output_rows: (0..n as u32).collect(),
        };
        let mut logits = vec![0.0; n * self.vocab];
        self.model.forward(&layout, &mut logits)?;
        Ok(logits.chunks_exact(self.vocab).map(<[f32]>::to_vec).collect())
    }
}

/// Adds a token to each running answer; `rows` are their logits, in the same order.
fn choose(
    states: &mut [Continuation],
    running: &[usize],
    rows: &[Vec<f32>],
    (step, ending): (usize, &Ending<'_>),
    exact: Option<&Vec<f32>>,
) {
    let exact = exact.map(|row| log_softmax(row));
    for (&i, row) in running.iter().zip(rows) {
        let token = match ending.given {
            Some(given) => given[step],
            None => argmax(row),
        };
        if ending.given.is_some() {
            let logs = log_softmax(row);
            states[i].nll -= logs[token.0 as usize];
            if let Some(exact) = &exact {
                states[i].kl += divergence(exact, &logs);
            }
        }
        states[i].tokens.push(token);
    }
}

fn argmax(row: &[f32]) -> TokenId {
    let best = row.iter().enumerate().fold(0, |best, (i, &x)| if x > row[best] { i } else { best });
    TokenId(best as u32)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
    let log_total = total.ln() + f64::from(max);
    row.iter().map(|&x| f64::from(x) - log_total).collect()
}

/// Of one distribution from another, both as logarithms.
fn divergence(exact: &[f64], other: &[f64]) -> f64 {
    exact.iter().zip(other).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_the_definition() {
        let (p, q) = (log_softmax(&[0.0, 0.0]), log_softmax(&[0.0, 3f32.ln()]));
        assert!((p[0] - 0.5f64.ln()).abs() < 1e-6 && (q[1] - 0.75f64.ln()).abs() < 1e-6);
        assert!((divergence(&p, &q) - 0.5 * (2.0f64.ln() + (2.0f64 / 3.0).ln())).abs() < 1e-6);
        assert!(divergence(&p, &p).abs() < 1e-12);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), TokenId(1));
    }
}
