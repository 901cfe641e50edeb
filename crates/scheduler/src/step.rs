//! Filling one plan: decoding sequences first, then prompts that were begun, then new ones.

use nuthatch_types::{
    PageCopy, SeqId, SeqStart, SeqStep, SeqSteps, StepPlan, TableChange, TokenId,
};

use crate::Scheduler;
use crate::cost::Work;
use crate::sequence::{Place, Sequence};

/// The step that is being executed.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    /// What each sequence does, in the order of the plan.
    pub(crate) flights: Vec<Flight>,
    /// Sequences that the executor was told to forget, to be told again if the step fails.
    pub(crate) ended: Vec<SeqId>,
    /// What the pass computes.
    pub(crate) work: Work,
    /// Whether most of that are prompts.
    pub(crate) is_prompt: bool,
    /// Pages that are copied between the tiers; 0 if others are copied too.
    pub(crate) n_copies: u32,
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
    pub(crate) plan: StepPlan,
    pub(crate) flights: Vec<Flight>,
    work: Work,
    n_tokens: u32,
    /// Tokens that may still be added.
    pub(crate) budget: u32,
    /// Pages that running sequences still need for the tokens they have now.
    pub(crate) promised: u32,
    /// Whether a running sequence found no pages and nobody to preempt.
    is_stalled: bool,
    /// Sequences that lost their pages in this step.
    pub(crate) n_preempted: u32,
    /// Pages of the device beyond what running sequences still need, if it was asked for. It stays the
    /// same while they get what they need there.
    pub(crate) surplus: Option<i64>,
}

impl Scheduler {
    /// From now on a decoding sequence also has a place for the token after the one that is computed,
    /// where there is room: for executors that begin a step before it is planned.
    pub fn look_ahead(&mut self) {
        self.looks_ahead = true;
    }

    pub(crate) fn plan_step(&mut self) -> Option<StepPlan> {
        self.counters.steps += 1;
        let n_running = self.running.len();
        let mut step = Step {
            plan: StepPlan { seqs: SeqSteps::with_capacity(n_running), ..StepPlan::default() },
            flights: Vec::with_capacity(n_running),
            work: Work::default(),
            n_tokens: 0,
            budget: self.config.max_batched_tokens,
            promised: 0,
            is_stalled: false,
            n_preempted: 0,
            surplus: None,
        };
        self.sort_running();
        self.release_held();
        self.settle_spilled();
        self.displace(&mut step);
        loop {
            (step.promised, step.is_stalled, step.surplus) = (0, false, None);
            let prompts = self.plan_decoding(&mut step);
            self.plan_prompts(prompts, &mut step);
            let is_stuck = step.flights.is_empty() && step.is_stalled;
            if !is_stuck || !self.preempt_by_force(&mut step) {
                break;
            }
        }
        if step.n_preempted == 0 || self.all_paused() {
            self.admit_waiting(&mut step);
            self.admit_over_paused(&mut step);
            self.admit_by_force(&mut step);
        }
        // Loads begin only when copies from their slots have been carried out.
        let awaits_copies = !self.loads.is_empty() && self.cache.n_copies() > 0;
        if step.flights.is_empty() && !awaits_copies {
            // What loads hold is not there for others.
            if self.cache.n_loads() == 0 {
                assert!(self.all_paused(), "the first sequence alone always fits");
                assert_eq!(self.queue.len(), 0, "an empty cache holds every accepted request");
                let is_free = self.held.is_empty() || self.n_guided > 0;
                assert!(is_free, "who waits for another is released when it ends");
            }
            self.counters.steps -= 1;
            return None;
        }
        step.plan.ended = std::mem::take(&mut self.ended);
        step.plan.copies = self.cache.take_copies();
        let n_device = self.cache.config().n_pages;
        let crosses = |copy: &&PageCopy| (copy.source.0 < n_device) != (copy.target.0 < n_device);
        let n_crossing = step.plan.copies.iter().filter(crosses).count();
        self.in_flight = Some(InFlight {
            ended: step.plan.ended.clone(),
            work: step.work,
            is_prompt: step.n_tokens as usize > 2 * step.flights.len(),
            n_copies: if n_crossing == step.plan.copies.len() { n_crossing as u32 } else { 0 },
            flights: step.flights,
        });
        Some(step.plan)
    }

    fn sort_running(&mut self) {
        if std::mem::take(&mut self.is_unsorted) {
            let Scheduler { running, seqs, .. } = self;
            running.sort_by_key(|seq| seqs[seq].rank);
        }
    }

    /// Gives each running sequence that decodes its token, in order of rank, and returns the others.
    fn plan_decoding(&mut self, step: &mut Step) -> Vec<SeqId> {
        let mut prompts = Vec::new();
        let (n_step, page_len) = (self.counters.steps, self.cache.config().page_len);
        let n_ahead = u32::from(self.looks_ahead);
        // Only sequences after the current one are preempted, so the index stays good.
        let mut i = 0;
        while i < self.running.len() {
            let seq = self.running[i];
            i += 1;
            let sequence = self.seqs.get_mut(&seq).expect("a queued sequence has not ended");
            if sequence.last_step == n_step {
                continue;
            }
            if sequence.n_loading > 0 {
                step.promised += self.pages_outstanding(seq);
            } else if !sequence.is_decoding() {
                prompts.push(seq);
            } else if sequence.n_spare > n_ahead && sequence.is_table_known(page_len) {
                // The way of nearly every decoded token.
                sequence.n_spare -= 1;
                self.n_spare -= 1;
                sequence.last_step = n_step;
                let table = TableChange { keep: sequence.table_known, push: &[] };
                step.push(sequence, &[sequence.newest], table);
            } else {
                self.plan_or_preempt(seq, 1, step);
            }
        }
        prompts
    }

    /// Gives each of the other running sequences what is left of the budget, in order of rank.
    fn plan_prompts(&mut self, prompts: Vec<SeqId>, step: &mut Step) {
        for seq in prompts {
            let sequence = self.seq(seq);
            if sequence.place != Place::Running {
                continue;
            }
            let n_tokens = sequence.pending().min(step.budget);
            if n_tokens > 0 {
                self.plan_or_preempt(seq, n_tokens, step);
            }
            step.promised += self.pages_outstanding(seq);
        }
    }

    /// Adds a running sequence to the step. Those after it give way when pages are short; when none
    /// is left that may, the sequence keeps what it has and waits for the next step.
    fn plan_or_preempt(&mut self, seq: SeqId, n_tokens: u32, step: &mut Step) {
        while !self.plan_seq(seq, n_tokens, step) {
            if !self.preempt_for(seq, step) {
                self.counters.stalls += 1;
                step.is_stalled = true;
                return;
            }
        }
    }

    /// Adds the next `n_tokens` of a sequence to the step, or as many as its table has room for.
    /// Changes nothing when their pages are not there.
    pub(crate) fn plan_seq(&mut self, seq: SeqId, n_tokens: u32, step: &mut Step) -> bool {
        let Some(n_tokens) = self.make_way(seq, n_tokens, step) else { return false };
        let n_host = self.n_to_spill(seq, step);
        if n_host > 0 {
            step.surplus = None;
        }
        let page_len = self.cache.config().page_len;
        let n_step = self.counters.steps;
        let sequence = self.seqs.get_mut(&seq).expect("a queued sequence has not ended");
        let start = sequence.computed;
        let end = start + n_tokens;
        // All places of the last page at once, so that the cache is asked once a page.
        let placed = start + sequence.n_spare;
        let places = |end: u32| end.next_multiple_of(page_len).saturating_sub(placed);
        let (needed, ahead) = (places(end), places(sequence.end_ahead(end)));
        let mut n_places = needed;
        let mut extended = None;
        if self.looks_ahead && n_host == 0 && ahead > needed {
            // Nobody gives way for it.
            extended = self.cache.extend(seq, ahead, 0).ok();
            if extended.is_some() {
                (n_places, step.surplus) = (ahead, None);
            }
        }
        let extended = extended.or_else(|| self.cache.extend(seq, needed, n_host).ok());
        let Some(n_pages) = extended else { return false };
        self.n_spare = self.n_spare + n_places - n_tokens;
        sequence.n_spare = sequence.n_spare + n_places - n_tokens;
        if !std::mem::replace(&mut sequence.is_started, true) {
            step.plan.started.push(SeqStart {
                seq,
                sampling: (*sequence.sampling).clone(),
                history: sequence.tokens.settle().to_vec(),
                n_prompt: sequence.n_prompt,
            });
            self.n_started += 1;
            self.n_unstarted -= 1;
        }
        let keep = std::mem::replace(&mut sequence.table_known, n_pages);
        sequence.last_step = n_step;
        sequence.tokens.settle();
        let tokens = &sequence.tokens.settled()[start as usize..end as usize];
        step.push(sequence, tokens, TableChange { keep, push: &[] });
        if keep != n_pages {
            step.plan.seqs.push_slots(self.cache.slots(seq, keep));
        }
        true
    }
}

impl Step {
    /// Adds the next tokens of a sequence.
    // Inlined for the usual case of one token.
    #[inline(always)]
    fn push(&mut self, sequence: &Sequence, tokens: &[TokenId], table: TableChange<'_>) {
        let (seq, shift, n_tokens) = (sequence.id, sequence.dropped, tokens.len() as u32);
        let start = sequence.computed - shift;
        let sample = sequence.computed + n_tokens == sequence.tokens.len();
        self.budget -= n_tokens;
        self.n_tokens += n_tokens;
        self.work.add(Work::of(start..start + n_tokens));
        self.flights.push(Flight { seq, n_tokens, sample });
        self.plan.seqs.push(SeqStep { seq, start, shift, tokens, table, sample });
    }
}
