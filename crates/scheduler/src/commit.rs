//! Taking in what a step computed.

use nuthatch_types::{FinishReason, SeqId, StepResult};

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
        // Nearly always every sample is a token of an answer and there is no other news: the samples
        // become outputs where they are.
        let mut news = News {
            outputs: result.sampled.into_iter().map(Output::Token).collect(),
            n_told: 0,
            more: Vec::new(),
            gone: Vec::new(),
        };
        let mut failed = result.failed.into_iter().peekable();
        let n_before = self.seqs.len();
        let counts_service = self.queue.counts_service();
        for flight in in_flight.flights {
            if failed.next_if_eq(&flight.seq).is_some() {
                self.fail(flight, &mut news);
            } else {
                self.advance(flight, counts_service, &mut news);
            }
        }
        assert!(failed.next().is_none(), "failures come in the order of the plan");
        if self.seqs.len() < n_before {
            let Scheduler { running, seqs, .. } = self;
            running.retain(|seq| seqs.contains_key(seq));
        }
        news.into_outputs()
    }

    /// Learns from what the step took, and tells the cache which pages are worth a place on the
    /// host.
    fn measure(&mut self, in_flight: &InFlight, result: &StepResult) {
        if self.cache.config().n_host_pages == 0 && !self.has_slow_tier {
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
    fn fail(&mut self, flight: Flight, news: &mut News) {
        assert!(flight.sample, "only a choice can fail");
        // A sequence that was cancelled during the step has gone.
        let Some(output) = self.end(flight.seq, FinishReason::Failed) else { return };
        self.counters.failed += 1;
        news.add(output);
    }

    fn advance(&mut self, flight: Flight, counts_service: bool, news: &mut News) {
        let page_len = self.cache.config().page_len;
        let Some(sequence) = self.seqs.get_mut(&flight.seq) else {
            // It was cancelled during the step.
            if flight.sample {
                news.drop_sample(flight.seq);
            }
            return;
        };
        let start = sequence.computed;
        let end = start + flight.n_tokens;
        sequence.computed = end;
        let n_again = sequence.computed_max.min(end).saturating_sub(start);
        sequence.computed_max = sequence.computed_max.max(end);
        self.counters.computed_tokens += u64::from(flight.n_tokens);
        self.counters.count_recomputed(sequence.loss, n_again);
        // A decoded token ends a page when all places that are left are of whole pages; for the rest,
        // the cache looks.
        if flight.n_tokens > 1 || sequence.n_spare.is_multiple_of(page_len) {
            let computed = &sequence.tokens.settle()[..end as usize];
            if let Some(first_changed) = self.cache.seal(flight.seq, computed) {
                sequence.table_known = sequence.table_known.min(first_changed);
            }
        }
        if self.config.window.is_some() {
            self.cache.slide(flight.seq, end);
        }
        if counts_service {
            self.is_unsorted |= serve(self.queue.as_mut(), sequence, flight);
        }
        if !flight.sample {
            return;
        }
        self.counters.sampled_tokens += 1;
        let output = news.next_sample(flight.seq);
        if let Some(reason) = take_sample(sequence, output) {
            self.counters.finished += 1;
            let finished = self.end(flight.seq, reason).expect("it has just been found");
            // A stop token is not part of the answer.
            if reason == FinishReason::Stop {
                *output = finished;
            } else {
                news.add(finished);
            }
        }
    }
}

/// What is new, while a step is taken in.
struct News {
    /// One for each sample, in order.
    outputs: Vec<Output>,
    /// How many of them have been looked at.
    n_told: usize,
    /// Others, each with the number of those in `outputs` that come before it, in order.
    more: Vec<(usize, Output)>,
    /// Those of `outputs` whose sequences have gone, in order.
    gone: Vec<usize>,
}

impl News {
    /// The next sample, which must be of `seq`.
    fn next_sample(&mut self, seq: SeqId) -> &mut Output {
        let output = self.outputs.get_mut(self.n_told);
        let output = output.expect("one sample for each that was asked for");
        assert_eq!(output.seq(), seq, "samples come in the order of the plan");
        self.n_told += 1;
        output
    }

    fn drop_sample(&mut self, seq: SeqId) {
        self.gone.push(self.n_told);
        self.next_sample(seq);
    }

    /// Adds what comes after the samples so far.
    fn add(&mut self, output: Output) {
        self.more.push((self.n_told, output));
    }

    fn into_outputs(self) -> Vec<Output> {
        let News { outputs, n_told, more, gone } = self;
        assert_eq!(n_told, outputs.len(), "no sample that was not asked for");
        if more.is_empty() && gone.is_empty() {
            return outputs;
        }
        let mut all = Vec::with_capacity(outputs.len() + more.len());
        let (mut more, mut gone) = (more.into_iter().peekable(), gone.into_iter().peekable());
        for (i, output) in outputs.into_iter().enumerate() {
            while let Some((_, other)) = more.next_if(|&(place, _)| place == i) {
                all.push(other);
            }
            if gone.next_if_eq(&i).is_none() {
                all.push(output);
            }
        }
        all.extend(more.map(|(_, other)| other));
        all
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
fn take_sample(sequence: &mut Sequence, output: &mut Output) -> Option<FinishReason> {
    let Output::Token(sample) = output else { unreachable!("made of a sample") };
    sequence.protected = false;
    if sequence.is_guided {
        *output = Output::Candidates { seq: sample.seq, top: std::mem::take(&mut sample.top) };
        return None;
    }
    if sequence.is_stop(sample.token) {
        return Some(FinishReason::Stop);
    }
    sequence.push(sample.token);
    let is_last = sequence.tokens.len() >= sequence.max_len;
    is_last.then_some(FinishReason::Length)
}
