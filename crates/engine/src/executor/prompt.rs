//! Reading every row of a prompt, and not only its last: the probabilities of its tokens, or the
//! mean of their hidden states.
//!
//! A pass works out logits for the rows that are sampled. When it is over, what the last layer gave
//! is still there for all its rows; those that somebody reads are looked back on, in pieces that fit
//! the buffer of logits, however long the prompt is. The scheduler computes such a prompt from its
//! first token on, whatever the cache holds; after a preemption, rows come again that were read
//! before, and are left out.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use nuthatch_backend::DeviceError;
use nuthatch_types::{SeqId, SeqStep, SeqSteps, TokenId};

use super::{Executor, Forward, Results};
use crate::HiddenSink;
use crate::sample::{self, Scratch};

/// The probabilities of a prompt's tokens, shared by who asked for them and who works them out.
#[derive(Clone, Debug, Default)]
pub struct PromptScores {
    n_top: u32,
    tokens: Arc<Mutex<Vec<ScoredToken>>>,
}

/// A token of a prompt and its probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability after the tokens before it.
    pub logprob: f32,
    /// The most probable tokens in its place and their logarithms, best first.
    pub top: Vec<(TokenId, f32)>,
}

impl PromptScores {
    /// No probabilities yet. With each, the `n_top` most probable tokens will come.
    pub fn new(n_top: u32) -> Self {
        PromptScores { n_top, tokens: Arc::default() }
    }

    /// What is known so far, in order: nothing of the first token, before which there is none. All
    /// of it is there when the answer's first token is.
    pub fn tokens(&self) -> Vec<ScoredToken> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, scored: ScoredToken) {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).push(scored);
    }
}

/// Reads the rows of one prompt as they are computed.
#[derive(Debug)]
pub struct PromptReader {
    prompt: Vec<TokenId>,
    scores: Option<PromptScores>,
    mean: Option<Mean>,
    /// Rows read so far.
    n_read: u32,
    /// Whether the logits of a row were no numbers.
    is_broken: bool,
}

/// The mean of hidden states, on its way.
#[derive(Debug)]
struct Mean {
    sink: HiddenSink,
    /// `[hidden]`
    sums: Vec<f64>,
}

impl PromptReader {
    /// Works out the probabilities of a prompt's tokens, the mean of their hidden states, or both.
    pub fn new(
        prompt: Vec<TokenId>,
        scores: Option<PromptScores>,
        mean: Option<HiddenSink>,
    ) -> Self {
        let mean = mean.map(|sink| Mean { sink, sums: Vec::new() });
        PromptReader { prompt, scores, mean, n_read: 0, is_broken: false }
    }

    /// Rows that it reads. The last one says nothing about a token of the prompt.
    fn n_rows(&self) -> u32 {
        let n_prompt = self.prompt.len() as u32;
        if self.mean.is_some() { n_prompt } else { n_prompt.saturating_sub(1) }
    }

    /// The rows of a sequence's step that it has not read, counted from the step's first.
    fn rows(&self, step: SeqStep<'_>) -> Range<u32> {
        let start = step.start + step.shift;
        let end = (start + step.tokens.len() as u32).min(self.n_rows());
        assert!(start <= self.n_read || end <= self.n_read, "a prompt that is read is computed");
        let first = self.n_read.max(start);
        first - start..end.max(first) - start
    }

    fn add_hidden(&mut self, hidden: &[f32], hidden_len: usize) {
        let Some(Mean { sums, .. }) = &mut self.mean else { return };
        sums.resize(hidden_len, 0.0);
        for row in hidden.chunks_exact(hidden_len) {
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum += f64::from(x);
            }
        }
    }

    /// Takes the logits of the next row.
    fn add_logits(&mut self, position: u32, logits: &[f32], scratch: &mut Scratch) {
        let Some(scores) = &self.scores else { return };
        let Some(&token) = self.prompt.get(position as usize + 1) else { return };
        match sample::score(logits, token, scores.n_top, scratch) {
            Some((logprob, top)) => scores.push(ScoredToken { token, logprob, top }),
            None => self.is_broken = true,
        }
    }

    /// Gives the mean away when every row was read, and says whether there is nothing left to do.
    fn finish(&mut self) -> bool {
        if self.n_read < self.n_rows() {
            return false;
        }
        if let Some(Mean { sink, sums }) = self.mean.take() {
            let n_rows = self.prompt.len() as f64;
            sink.send(&sums.iter().map(|sum| (sum / n_rows) as f32).collect::<Vec<f32>>());
        }
        !self.is_broken
    }
}

impl<F: Forward> Executor<F> {
    /// Reads what the pass has computed of prompts that are read whole. Sequences whose rows gave no
    /// numbers go from `sampled` to `failed`.
    pub(super) fn read_prompts(
        &mut self,
        seqs: &SeqSteps,
        (sampled, failed): &mut Results,
    ) -> Result<(), DeviceError> {
        if self.readers.is_empty() {
            return Ok(());
        }
        let mut first_row = 0;
        let mut is_any_broken = false;
        for step in seqs.iter() {
            let rows_of_seq = first_row;
            first_row += step.tokens.len() as u32;
            let Some(mut reader) = self.readers.remove(&step.seq) else { continue };
            let rows = reader.rows(step);
            self.read(&mut reader, rows_of_seq + rows.start..rows_of_seq + rows.end)?;
            is_any_broken |= reader.is_broken;
            if !reader.finish() {
                self.readers.insert(step.seq, reader);
            }
        }
        if is_any_broken {
            let is_broken = |seq| self.readers.get(&seq).is_some_and(|reader| reader.is_broken);
            sampled.retain(|sample| !is_broken(sample.seq));
            let is_left = |seq: &SeqId| !sampled.iter().any(|sample| sample.seq == *seq);
            *failed = seqs.sampled().map(|step| step.seq).filter(is_left).collect();
        }
        Ok(())
    }

    /// Reads `rows` of the batch.
    fn read(&mut self, reader: &mut PromptReader, rows: Range<u32>) -> Result<(), DeviceError> {
        let (vocab, hidden_len) = (self.forward.vocab() as usize, self.forward.hidden_len());
        let mut start = rows.start;
        while start < rows.end {
            let end = rows.end.min(start + self.capacity.max_seqs);
            let n_rows = (end - start) as usize;
            let n_logits = if reader.scores.is_some() { n_rows * vocab } else { 0 };
            self.batch.set_outputs(start..end);
            let logits = &mut self.logits[..n_logits];
            self.forward.look_back(self.batch.layout(), logits)?;
            for (position, logits) in (reader.n_read..).zip(logits.chunks_exact(vocab)) {
                reader.add_logits(position, logits, &mut self.scratch);
            }
            if reader.mean.is_some() {
                let mut hidden = vec![0.0; n_rows * hidden_len];
                self.forward.hidden(&mut hidden)?;
                reader.add_hidden(&hidden, hidden_len);
            }
            reader.n_read += end - start;
            start = end;
        }
        Ok(())
    }
}
