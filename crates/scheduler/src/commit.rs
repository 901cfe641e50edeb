//! Taking in what a step computed.

use nuthatch_types::{FinishReason, Sampled, SeqId, StepResult};

use crate::policy::Service;
use crate::step::Flight;
use crate::{Output, Scheduler};

impl Scheduler {
    /// Takes in the result of the plan made last and says what is new, in the order of the plan.
    /// Sequences that ended have freed their pages when this returns.
    pub fn commit(&mut self, result: StepResult) -> Vec<Output> {
        let in_flight = self.in_flight.take().expect("a plan was made and not yet committed");
        let mut sampled = result.sampled.into_iter();
        let mut outputs = Vec::with_capacity(in_flight.flights.len());
        let n_before = self.seqs.len();
        for flight in in_flight.flights {
            let sample = flight.sample.then(|| {
                let sample = sampled.next().expect("one sample for each that was asked for");
                assert_eq!(sample.seq, flight.seq, "samples come in the order of the plan");
                sample
            });
            // A sequence that was cancelled during the step has gone.
            if self.seqs.contains_key(&flight.seq) {
                self.advance(flight, sample, &mut outputs);
            }
        }
        assert!(sampled.next().is_none(), "no sample that was not asked for");
        if self.seqs.len() < n_before {
            let Scheduler { running, seqs, .. } = self;
            running.retain(|seq| seqs.contains_key(seq));
        }
        outputs
    }

    fn advance(&mut self, flight: Flight, sample: Option<Sampled>, outputs: &mut Vec<Output>) {
        let sequence = self.seqs.get_mut(&flight.seq).expect("the caller looked");
        let start = sequence.computed;
        sequence.computed += flight.n_tokens;
        let n_again = sequence.computed_max.min(sequence.computed).saturating_sub(start);
        sequence.computed_max = sequence.computed_max.max(sequence.computed);
        self.counters.computed_tokens += u64::from(flight.n_tokens);
        self.counters.recomputed_tokens += u64::from(n_again);
        let computed = &sequence.tokens[..sequence.computed as usize];
        if let Some(first_changed) = self.cache.seal(flight.seq, computed) {
            sequence.table_known = sequence.table_known.min(first_changed);
        }
        self.serve(flight);
        if let Some(sample) = sample
            && let Some(reason) = self.take_sample(sample, outputs)
        {
            self.finish(flight.seq, reason, outputs);
        }
    }

    /// Tells the policy what a sequence got.
    fn serve(&mut self, flight: Flight) {
        let sequence = self.seqs.get_mut(&flight.seq).expect("the caller looked");
        sequence.n_since_rank += u64::from(flight.n_tokens);
        let service = Service {
            n_computed: flight.n_tokens,
            n_sampled: u32::from(flight.sample),
            n_since_rank: sequence.n_since_rank,
        };
        if let Some(rank) = self.queue.serve(&sequence.waiter(), service) {
            sequence.rank = rank;
            sequence.n_since_rank = 0;
            self.is_unsorted = true;
        }
    }

    /// Adds a sampled token to its sequence, and says why the sequence ends if it does.
    fn take_sample(&mut self, sample: Sampled, outputs: &mut Vec<Output>) -> Option<FinishReason> {
        self.counters.sampled_tokens += 1;
        let Sampled { seq, token, logprob, top } = sample;
        let sequence = self.seq_mut(seq);
        if sequence.is_stop(token) {
            return Some(FinishReason::Stop);
        }
        sequence.tokens.push(token);
        sequence.protected = false;
        outputs.push(Output::Token { seq, token, logprob, top });
        let is_last = sequence.tokens.len() as u32 >= sequence.max_len;
        is_last.then_some(FinishReason::Length)
    }

    fn finish(&mut self, seq: SeqId, reason: FinishReason, outputs: &mut Vec<Output>) {
        self.counters.finished += 1;
        outputs.extend(self.end(seq, reason));
    }
}
