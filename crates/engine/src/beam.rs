//! Beam search: which answers in the making go on, which are complete, and when it is over.
//!
//! ```text
//!   beams         each with its best candidates  ->  all candidates, best first
//!   candidates    [0, width)                          [width, n_candidates)
//!                 complete ones join `finished`       complete ones are dropped
//!                 the first `width` that are not complete are the next beams
//! ```
//!
//! The rules are those of Hugging Face's `generate(num_beams=...)`, in its present form, in which
//! all of this is done with tensors of fixed size: candidates beyond the first `width` are there so
//! that enough beams go on when the best ones are complete, and never enter the finished ones.
//!
//! Nothing here knows the scheduler: a search is told candidates and says moves.

use nuthatch_types::{BeamParams, EarlyStopping, FinishReason, Limits, SeqId, TokenId};

/// A token of an answer and its score.
type Scored = (TokenId, f32);

/// One search.
#[derive(Clone, Debug)]
pub(crate) struct BeamSearch {
    params: BeamParams,
    limits: Limits,
    /// Answers in the making, best first; at most `width`, all of the same length.
    beams: Vec<Beam>,
    /// Complete answers, best first, at most `width`.
    finished: Vec<Hypothesis>,
    n_generated: u32,
}

/// An answer in the making.
#[derive(Clone, Debug)]
struct Beam {
    seq: SeqId,
    tokens: Vec<Scored>,
    /// Sum of the tokens' scores.
    sum: f64,
    /// What may follow, if that is known yet.
    candidates: Option<Vec<Scored>>,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hypothesis {
    /// The tokens with their scores, without the stop token.
    pub(crate) tokens: Vec<Scored>,
    /// The sum of all scores, that of the stop token included, for its length.
    pub(crate) score: f64,
    /// Why it ended.
    pub(crate) reason: FinishReason,
}

/// What happens to a sequence next. Moves are made in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// It is followed no further.
    Discard(SeqId),
    /// `seq` begins as `source` with one more token.
    Fork { source: SeqId, seq: SeqId, token: TokenId },
    /// It goes on with a token.
    Proceed { seq: SeqId, token: TokenId },
}

/// One of all candidates.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    beam_idx: usize,
    token: TokenId,
    logprob: f32,
    sum: f64,
}

impl BeamSearch {
    /// A search that begins with one sequence. `limits.max_tokens` must be what the sequence can
    /// have, and `params` valid.
    pub(crate) fn new(params: BeamParams, limits: Limits, seq: SeqId) -> Self {
        let first = Beam { seq, tokens: Vec::new(), sum: 0.0, candidates: None };
        BeamSearch { params, limits, beams: vec![first], finished: Vec::new(), n_generated: 0 }
    }

    /// The sequences of the answers in the making.
    pub(crate) fn seqs(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.beams.iter().map(|beam| beam.seq)
    }

    /// Takes what may follow one of the beams, best first. True when that is known for all of them.
    pub(crate) fn take(&mut self, seq: SeqId, candidates: Vec<Scored>) -> bool {
        let beam = self.beams.iter_mut().find(|beam| beam.seq == seq);
        let beam = beam.expect("only sequences of the search are told");
        let before = beam.candidates.replace(candidates);
        assert!(before.is_none(), "a beam waits until it is told how to go on");
        self.beams.iter().all(|beam| beam.candidates.is_some())
    }

    /// Makes the next step. `next_seq` names new sequences. When no beam is left, the search is
    /// over and all its sequences are discarded.
    pub(crate) fn advance(&mut self, next_seq: impl FnMut() -> SeqId) -> Vec<Move> {
        let width = self.params.width as usize;
        let mut next = Vec::with_capacity(width);
        for (rank, candidate) in self.candidates().into_iter().enumerate() {
            match self.ending(candidate.token) {
                Some(reason) if rank < width => self.finish(candidate, reason),
                None if next.len() < width => next.push(candidate),
                Some(_) | None => {}
            }
        }
        self.n_generated += 1;
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(width);
        if self.is_over(next.first()) {
            next.clear();
        }
        self.follow(&next, next_seq)
    }

    /// The `n` best complete answers, best first.
    pub(crate) fn into_best(mut self, n: u32) -> Vec<Hypothesis> {
        self.finished.truncate(n as usize);
        self.finished
    }

    /// The best candidates of all beams, best first. A stop token that comes too early is none.
    fn candidates(&mut self) -> Vec<Candidate> {
        let is_early = self.n_generated < self.limits.min_tokens;
        let mut all = Vec::new();
        for (beam_idx, beam) in self.beams.iter_mut().enumerate() {
            let candidates = beam.candidates.take().expect("every beam has its candidates");
            for (token, logprob) in candidates {
                let is_masked = is_early && self.limits.stop_tokens.contains(&token);
                if logprob > f32::NEG_INFINITY && !is_masked {
                    let sum = beam.sum + f64::from(logprob);
                    all.push(Candidate { beam_idx, token, logprob, sum });
                }
            }
        }
        // Stable, so that of equals the better beam and then the better token comes first.
        all.sort_by(|a, b| b.sum.total_cmp(&a.sum));
        all.truncate(self.params.n_candidates(self.limits.stop_tokens.len()) as usize);
        all
    }

    /// Why an answer is complete with this token, if it is.
    fn ending(&self, token: TokenId) -> Option<FinishReason> {
        if self.limits.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.n_generated + 1 >= self.limits.max_tokens).then_some(FinishReason::Length)
    }

    fn finish(&mut self, candidate: Candidate, reason: FinishReason) {
        let mut tokens = self.beams[candidate.beam_idx].tokens.clone();
        if reason != FinishReason::Stop {
            tokens.push((candidate.token, candidate.logprob));
        }
        let score = self.score(candidate.sum, self.n_generated + 1);
        self.finished.push(Hypothesis { tokens, score, reason });
    }

    fn score(&self, sum: f64, n_tokens: u32) -> f64 {
        sum / f64::from(n_tokens).powf(f64::from(self.params.length_penalty))
    }

    /// Whether the search ends, with `best` as the best answer in the making.
    fn is_over(&self, best: Option<&Candidate>) -> bool {
        let Some(best) = best else { return true };
        let Some(worst) = self.finished.get(self.params.width as usize - 1) else { return false };
        let n_tokens = match self.params.early_stopping {
            EarlyStopping::Yes => return true,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.limits.max_tokens,
            EarlyStopping::Never | EarlyStopping::No => self.n_generated,
        };
        self.score(best.sum, n_tokens) <= worst.score
    }

    /// Makes the chosen candidates the next beams. The first that follows a beam keeps its
    /// sequence, the others fork it; forks come first, while their source is as it was.
    fn follow(&mut self, next: &[Candidate], mut next_seq: impl FnMut() -> SeqId) -> Vec<Move> {
        let before = std::mem::take(&mut self.beams);
        let mut is_kept = vec![false; before.len()];
        let (mut forks, mut proceeds) = (Vec::new(), Vec::new());
        for &Candidate { beam_idx, token, logprob, sum } in next {
            let source = &before[beam_idx];
            let seq = if std::mem::replace(&mut is_kept[beam_idx], true) {
                let seq = next_seq();
                forks.push(Move::Fork { source: source.seq, seq, token });
                seq
            } else {
                proceeds.push(Move::Proceed { seq: source.seq, token });
                source.seq
            };
            let mut tokens = source.tokens.clone();
            tokens.push((token, logprob));
            self.beams.push(Beam { seq, tokens, sum, candidates: None });
        }
        let left = before.iter().zip(is_kept).filter(|&(_, is_kept)| !is_kept);
        let mut moves: Vec<Move> = left.map(|(beam, _)| Move::Discard(beam.seq)).collect();
        moves.append(&mut forks);
        moves.append(&mut proceeds);
        moves
    }
}

#[cfg(test)]
mod tests;
