//! Taking in what a step computed.

use nuthatch_types::{FinishReason, Sampled, StepResult};

use crate::policy::{Queue, Service};
use crate::sequence::Sequence;
use crate::step::{Flight, InFlight};
use crate::{Output, Scheduler};

impl Scheduler {
    /// Takes in the result of the plan made last and says what is new, in the order of the plan.
    /// Sequences that ended have freed their pages when this returns.
    pub fn commit(&mut self, result: StepResult) -> Vec<Output> {
        let in_flight = self.in_flight.take().expect("a plan was made and not yet committed");
        self.measure(&in_flight, &result);
        let mut sampled = result.sampled.into_iter();
        let mut failed = result.failed.into_iter().peekable();
        let mut outputs = Vec::with_capacity(in_flight.flights.len());
        let n_before = self.seqs.len();
        for flight in in_flight.flights {
            if failed.next_if_eq(&flight.seq).is_some() {
                self.fail(flight, &mut outputs);
                continue;
            }
            let sample = flight.sample.then(|| {
                let sample = sampled.next().expect("one sample for each that was asked for");
                assert_eq!(sample.seq, flight.seq, "samples come in the order of the plan");
                sample
            });
            self.advance(flight, sample, &mut outputs);
        }
        assert!(sampled.next().is_none(), "no sample that was not asked for");
        assert!(failed.next().is_none(), "failures come in the order of the plan");
        if self.seqs.len() < n_before {
            let Scheduler { running, seqs, .. } = self;
            running.retain(|seq| seqs.contains_key(seq));
        }
        outputs
    }

    /// Learns from what the step took, and tells the cache which pages are worth a place on the
    /// host.
    fn measure(&mut self, in_flight: &InFlight, result: &StepResult) {
        if self.cache.config().n_host_pages == 0 {
            return;
        }
        if in_flight.n_copies > 0 && result.copy_nanos > 0 {
            self.meter.copied(in_flight.n_copies, result.copy_nanos);
        }
        if in_flight.is_prompt && result.compute_nanos > 0 {
            self.meter.computed(in_flight.work, result.compute_nanos);
        }
        let pass_nanos = match result.compute_nanos {
            0 => self.meter.rates().pass(in_flight.work),
            measured => measured as f64,
        };
        self.passed(pass_nanos);
        let depth = self.meter.rates().demotion_depth(self.cache.config().page_len);
        self.cache.set_demotion_depth(depth);
    }

    /// Ends a sequence for which no token could be chosen. What the step wrote to its pages is as
    /// doubtful as its logits, so nothing of it is sealed.
    fn fail(&mut self, flight: Flight, outputs: &mut Vec<Output>) {
        assert!(flight.sample, "only a choice can fail");
        // A sequence that was cancelled during the step has gone.
        let Some(output) = self.end(flight.seq, FinishReason::Failed) else { return };
        self.counters.failed += 1;
        outputs.push(output);
    }

    fn advance(&mut self, flight: Flight, sample: Option<Sampled>, outputs: &mut Vec<Output>) {
        // A sequence that was cancelled during the step has gone.
        let Some(sequence) = self.seqs.get_mut(&flight.seq) else { return };
        let start = sequence.computed;
        let end = start + flight.n_tokens;
        sequence.computed = end;
        let n_again = sequence.computed_max.min(end).saturating_sub(start);
        sequence.computed_max = sequence.computed_max.max(end);
        self.counters.computed_tokens += u64::from(flight.n_tokens);
        self.counters.count_recomputed(sequence.loss, n_again);
        // A decoded token ends a page when there is no place left; for the rest, the cache looks.
        if flight.n_tokens > 1 || sequence.n_spare == 0 {
            let computed = &sequence.tokens[..end as usize];
            if let Some(first_changed) = self.cache.seal(flight.seq, computed) {
                sequence.table_known = sequence.table_known.min(first_changed);
            }
        }
        if self.config.window.is_some() {
            self.cache.slide(flight.seq, end);
        }
        if self.queue.counts_service() {
            self.is_unsorted |= serve(self.queue.as_mut(), sequence, flight);
        }
        let Some(sample) = sample else { return };
        self.counters.sampled_tokens += 1;
        if let Some(reason) = take_sample(sequence, sample, outputs) {
            self.counters.finished += 1;
            outputs.extend(self.end(flight.seq, reason));
        }
    }
}

/// Tells the policy what a sequence got, and says whether that changed the sequence's rank.
fn serve(queue: &mut dyn Queue, sequence: &mut Sequence, flight: Flight) -> bool {
    sequence.n_since_rank += u64::from(flight.n_tokens);
    let service = Service {
        n_computed: flight.n_tokens,
        n_sampled: u32::from(flight.sample),
        n_since_rank: sequence.n_since_rank,
    };
    let Some(rank) = queue.serve(&sequence.waiter(), service) else { return false };
    sequence.rank = rank;
    sequence.n_since_rank = 0;
    true
}

/// Adds a sampled token to its sequence, and says why the sequence ends if it does.
fn take_sample(
    sequence: &mut Sequence,
    sample: Sampled,
    outputs: &mut Vec<Output>,
) -> Option<FinishReason> {
    let Sampled { seq, token, logprob, top } = sample;
    sequence.protected = false;
    if sequence.is_guided {
        outputs.push(Output::Candidates { seq, top });
        return None;
    }
    if sequence.is_stop(token) {
        return Some(FinishReason::Stop);
    }
    sequence.push(token);
    outputs.push(Output::Token { seq, token, logprob, top });
    let is_last = sequence.tokens.len() as u32 >= sequence.max_len;
    is_last.then_some(FinishReason::Length)
}
