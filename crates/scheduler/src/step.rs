//! Filling one plan: decoding sequences first, then prompts that were begun, then new ones.

use std::ops::Bound;

use nuthatch_cache::{Admission, Admitted, Prompt};
use nuthatch_types::{SeqId, SeqStart, SeqStep, StepPlan, TableChange};

use crate::sequence::Sequence;
use crate::{Hints, Scheduler};

/// The step that is being executed.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    /// What each sequence does, in the order of the plan.
    pub(crate) flights: Vec<Flight>,
    /// Sequences that the executor was told to forget, to be told again if the step fails.
    pub(crate) ended: Vec<SeqId>,
}

/// What one sequence does in the step that is being executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) seq: SeqId,
    pub(crate) n_tokens: u32,
    pub(crate) sample: bool,
}

/// A plan that is being filled.
#[derive(Debug)]
pub(crate) struct Step {
    plan: StepPlan,
    flights: Vec<Flight>,
    /// Tokens that may still be added.
    budget: u32,
    /// Pages that running sequences still need for the tokens they have now.
    promised: u32,
    /// Sequences that lost their pages in this step.
    pub(crate) n_preempted: u32,
}

/// Which running sequences have their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Decode,
    Prompt,
}

impl Scheduler {
    pub(crate) fn plan_step(&mut self) -> Option<StepPlan> {
        self.counters.steps += 1;
        let mut step = Step {
            plan: StepPlan::default(),
            flights: Vec::new(),
            budget: self.config.max_batched_tokens,
            promised: 0,
            n_preempted: 0,
        };
        loop {
            self.plan_running(Turn::Decode, &mut step);
            self.plan_running(Turn::Prompt, &mut step);
            if !step.flights.is_empty() || !self.preempt_by_force(&mut step) {
                break;
            }
        }
        if step.n_preempted == 0 {
            self.admit_waiting(&mut step);
        }
        if step.flights.is_empty() {
            assert!(self.running.is_empty(), "the oldest sequence alone always fits");
            assert!(self.waiting.is_empty(), "an empty cache holds every accepted request");
            self.counters.steps -= 1;
            return None;
        }
        step.plan.ended = std::mem::take(&mut self.ended);
        self.in_flight = Some(InFlight { flights: step.flights, ended: step.plan.ended.clone() });
        Some(step.plan)
    }

    /// Gives each running sequence whose turn it is its tokens, oldest first.
    fn plan_running(&mut self, turn: Turn, step: &mut Step) {
        // Only sequences after the current one are preempted, so the index stays good.
        let mut i = 0;
        while i < self.running.len() {
            let seq = self.running[i];
            i += 1;
            let sequence = self.seq(seq);
            let now = if sequence.is_decoding() { Turn::Decode } else { Turn::Prompt };
            if now != turn || sequence.last_step == self.counters.steps {
                continue;
            }
            let n_tokens = sequence.pending().min(step.budget);
            if n_tokens > 0 {
                self.plan_or_preempt(seq, n_tokens, step);
            }
            step.promised += self.pages_outstanding(seq);
        }
    }

    /// Adds a running sequence to the step. Younger ones give way when pages are short; when none
    /// is left that may, the sequence keeps what it has and waits for the next step.
    fn plan_or_preempt(&mut self, seq: SeqId, n_tokens: u32, step: &mut Step) {
        while !self.plan_seq(seq, n_tokens, step) {
            if !self.preempt_for(seq, step) {
                self.counters.stalls += 1;
                return;
            }
        }
    }

    /// Admits waiting sequences, oldest first, while seats, tokens and pages last. A request is
    /// admitted when all its tokens fit beside what the running ones still need, so that it is not
    /// thrown out halfway through its prompt; the first that does not fit ends the search, so that
    /// no long request waits for ever.
    fn admit_waiting(&mut self, step: &mut Step) {
        let mut after = Bound::Unbounded;
        while let Some((&arrival, &seq)) = self.waiting.range((after, Bound::Unbounded)).next() {
            after = Bound::Excluded(arrival);
            let has_seat = (self.running.len() as u32) < self.config.max_seqs;
            if !has_seat || step.budget == 0 {
                return;
            }
            if self.waits_for_source(seq) {
                continue;
            }
            let room = self.cache.n_available().saturating_sub(step.promised);
            let mut admission = self.plan_admission(seq);
            if admission.n_pages() > room {
                admission = admission.without_copy();
            }
            if admission.n_pages() > room {
                return;
            }
            self.admit(seq, admission, step);
        }
    }

    /// Gives a waiting sequence what was found for it, and its first tokens to compute.
    fn admit(&mut self, seq: SeqId, admission: Admission, step: &mut Step) {
        let arrival = self.seq(seq).arrival;
        self.waiting.remove(&arrival);
        let position = self.running.partition_point(|&other| self.seq(other).arrival < arrival);
        self.running.insert(position, seq);
        let Admitted { n_found, copy } = self.cache.admit(admission);
        step.plan.copies.extend(copy);
        let budget = step.budget;
        let sequence = self.seq_mut(seq);
        sequence.computed = n_found;
        if sequence.sampling.is_some() {
            sequence.cached = n_found.min(sequence.n_prompt);
        }
        let n_tokens = sequence.pending().min(budget);
        let planned = self.plan_seq(seq, n_tokens, step);
        assert!(planned, "pages for all tokens were counted");
        step.promised += self.pages_outstanding(seq);
    }

    /// Decides what a waiting sequence starts with: what is cached of its tokens, or what the
    /// sequence that it forks has, whichever is more.
    fn plan_admission(&self, seq: SeqId) -> Admission {
        let sequence = self.seq(seq);
        let Hints { salt, retention, .. } = sequence.hints;
        let prompt = Prompt { tokens: &sequence.tokens, salt, retention };
        let found = self.cache.plan_admit(seq, prompt);
        let n_found = found.miss().map_or(0, |miss| miss.at);
        let Some(source) = self.fork_source(seq) else { return found };
        let n_shared = sequence.n_common.min(source.computed);
        if n_shared <= n_found {
            return found;
        }
        self.cache.plan_fork(source.id, seq, n_shared, sequence.tokens.len() as u32)
    }

    /// Whether the sequence that a waiting one forks has not computed all that they share.
    fn waits_for_source(&self, seq: SeqId) -> bool {
        self.fork_source(seq).is_some_and(|source| source.computed < self.seq(seq).n_common)
    }

    /// The sequence that another one forks, if it is still there.
    fn fork_source(&self, seq: SeqId) -> Option<&Sequence> {
        self.seqs.get(&self.seq(seq).hints.fork_of?)
    }

    /// Adds the next `n_tokens` of a sequence to the step, or changes nothing when their pages are
    /// not there.
    fn plan_seq(&mut self, seq: SeqId, n_tokens: u32, step: &mut Step) -> bool {
        let Ok(extend) = self.cache.plan_extend(seq, n_tokens) else { return false };
        self.cache.apply(extend);
        let n_pages = self.cache.n_pages(seq);
        let n_step = self.counters.steps;
        let sequence = self.seqs.get_mut(&seq).expect("a queued sequence has not ended");
        if let Some(sampling) = sequence.sampling.take() {
            let history = sequence.tokens.clone();
            step.plan.started.push(SeqStart { seq, sampling, history });
        }
        let start = sequence.computed;
        let end = start + n_tokens;
        let keep = std::mem::replace(&mut sequence.table_known, n_pages);
        let sample = end as usize == sequence.tokens.len();
        sequence.last_step = n_step;
        step.budget -= n_tokens;
        step.flights.push(Flight { seq, n_tokens, sample });
        step.plan.seqs.push(SeqStep {
            seq,
            start,
            tokens: sequence.tokens[start as usize..end as usize].to_vec(),
            table: TableChange { keep, push: self.cache.slots(seq, keep).collect() },
            sample,
        });
        true
    }

    /// Pages that a running sequence still needs for the tokens it has.
    fn pages_outstanding(&self, seq: SeqId) -> u32 {
        let n_tokens = self.seq(seq).tokens.len() as u32;
        n_tokens.div_ceil(self.cache.config().page_len).saturating_sub(self.cache.n_pages(seq))
    }
}
