//! Choosing tokens: the device's choice where it chooses for all, and else the samplers'.

use nuthatch_backend::Draw;
use nuthatch_types::{Sampled, SeqStep, SeqSteps, TokenId};

use super::{Executor, Forward, Results};
use crate::sample::Choice;

impl<F: Forward> Executor<F> {
    /// How the device chooses the tokens, if it can choose all of them.
    pub(super) fn draws(&mut self, seqs: &SeqSteps) -> Option<Vec<Draw>> {
        // A constraint is the host's, and looks at all logits.
        let is_constrained = |step: SeqStep<'_>| {
            self.attachments.get(&step.seq).is_some_and(|own| own.constraint.is_some())
        };
        if !self.forward.draws() || seqs.iter().any(is_constrained) {
            return None;
        }
        let draw = |step: SeqStep<'_>| {
            let known = self.seqs.get_mut(&step.seq).expect("a sequence starts before it runs");
            let position = known.catch_up(step);
            known.sampler.draw(position)
        };
        seqs.sampled().map(draw).collect()
    }

    /// The tokens that the device chose, and the sequences for which there was none.
    pub(super) fn take(&mut self, seqs: &SeqSteps, tokens: &[Option<u32>]) -> Results {
        let mut results = (Vec::with_capacity(tokens.len()), Vec::new());
        for (step, &token) in seqs.sampled().zip(tokens) {
            self.take_one(step, token, &mut results);
        }
        results
    }

    pub(super) fn take_one(
        &mut self,
        step: SeqStep<'_>,
        token: Option<u32>,
        (sampled, failed): &mut Results,
    ) {
        let seq = step.seq;
        let Some(token) = token.map(TokenId) else {
            tracing::error!(seq = seq.0, "no token can be chosen");
            failed.push(seq);
            return;
        };
        let known = self.seqs.get_mut(&seq).expect("the sequence was just computed");
        known.chosen(step, token);
        sampled.push(Sampled { seq, token, logprob: None, top: Vec::new() });
    }

    /// Chooses a token for each sequence that asks for one.
    pub(super) fn sample(&mut self, seqs: &SeqSteps) -> Results {
        let vocab = self.forward.vocab() as usize;
        let n_sampled = self.batch.layout().output_rows.len();
        let (mut sampled, mut failed) = (Vec::with_capacity(n_sampled), Vec::new());
        let mut rows = self.logits.chunks_exact_mut(vocab);
        for step in seqs.sampled() {
            let logits = rows.next().expect("one row of logits for each sample");
            let known = self.seqs.get_mut(&step.seq).expect("the sequence was just computed");
            let seq = step.seq;
            let attachment = self.attachments.get_mut(&seq);
            let mut constraint = attachment.and_then(|own| own.constraint.as_mut());
            if let Some(constraint) = &mut constraint
                && let Err(error) = constraint.restrict(logits)
            {
                tracing::warn!(seq = seq.0, %error, "no token can be chosen");
                failed.push(seq);
                continue;
            }
            match known.sample(step, logits, &mut self.scratch) {
                Ok(Choice { token, logprob, top }) => {
                    if let Some(constraint) = constraint {
                        constraint.accept(token);
                    }
                    sampled.push(Sampled { seq, token, logprob, top });
                }
                Err(error) => {
                    tracing::error!(seq = seq.0, %error, "no token can be chosen");
                    failed.push(seq);
                }
            }
        }
        let n_answered = sampled.len() + failed.len();
        assert_eq!(n_answered, n_sampled, "rows and samples were counted apart");
        (sampled, failed)
    }
}
