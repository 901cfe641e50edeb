//! Carrying out a plan: tables, rows, the forward pass, one sampled token for each that was asked.
//!
//! The executor obeys plain data and decides nothing. It knows no queue, and it cannot reach the
//! cache: what it knows of a sequence is its row of the tables and its sampler.

mod ahead;
mod choose;
mod forward;
mod prompt;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_backend::{DeviceError, PageCodec, RowMover};
use nuthatch_types::{
    ColdKv, FastMap, PageCopy, PageImage, PageShift, Sampled, SeqId, SeqStart, SeqStep, SeqSteps,
    Slot, StepPlan, StepResult, TokenId,
};

use crate::batch::Batch;
use crate::sample::{Choice, SampleError, Sampler, Scratch};
use crate::{Arrivals, Attachment, Capacity, Pages, SharedClock, TopKStats};

use self::ahead::Ahead;

pub use forward::Forward;
pub use prompt::{PromptReader, PromptScores, ScoredToken};

/// What can carry out plans.
pub trait Execute: Pages {
    /// Tokens of the vocabulary.
    fn vocab(&self) -> u32;

    /// Carries out one plan.
    ///
    /// A result is per sequence: one whose logits were no numbers is named in
    /// [`StepResult::failed`], and the others are as if it were not there. An error is the device's:
    /// everything the device held is lost, and the executor does no more work.
    fn run(&mut self, plan: &StepPlan) -> Result<StepResult, DeviceError>;

    /// The same while pages that the plan's sequences read still come, layer by layer; only where
    /// [`Pages::page_image`] has layers. `None` if they do not come: then no token was computed.
    fn run_awaiting(
        &mut self,
        plan: &StepPlan,
        arrivals: &mut dyn Arrivals,
    ) -> Result<Option<StepResult>, DeviceError>;

    /// Gives a sequence that will come something of its own. It outlives preemptions.
    fn attach(&mut self, seq: SeqId, attachment: Attachment);

    /// The opposite of [`Execute::attach`]. Nothing happens if the sequence has nothing of its own.
    fn detach(&mut self, seq: SeqId);

    /// What top-k attention did so far, if there is such.
    fn topk(&self) -> Option<TopKStats> {
        None
    }
}

/// Carries out plans on a model.
pub struct Executor<F> {
    forward: F,
    capacity: Capacity,
    seqs: FastMap<SeqId, Known>,
    /// What sequences have of their own.
    attachments: FastMap<SeqId, Attachment>,
    /// Prompts that are read whole and have not been yet.
    readers: FastMap<SeqId, PromptReader>,
    /// Tables that belong to no sequence.
    free_rows: Vec<u32>,
    batch: Batch,
    /// The pass that was queued before it was planned, if there is one.
    ahead: Option<Ahead>,
    n_ahead: u64,
    /// `[max_seqs, V]`, written by the forward pass, changed by the samplers.
    logits: Vec<f32>,
    scratch: Scratch,
    /// Measures what the parts of a step take, if there is one.
    clock: Option<SharedClock>,
    n_steps: u64,
    /// What passes took in the running step.
    passing: Duration,
    /// The device's first fault. Afterwards nothing is done.
    poison: Option<String>,
}

/// Tokens that were chosen, and sequences for which there was none, both in the order of the plan.
type Results = (Vec<Sampled>, Vec<SeqId>);

/// What is known of one sequence.
#[derive(Debug)]
struct Known {
    sampler: Sampler,
    /// Tokens that the sampler knows of.
    n_known: u32,
    /// Its row of the tables.
    row: u32,
    /// What its table says.
    table: Vec<Slot>,
    /// The last step that computed something for it.
    last_step: u64,
}

impl Known {
    /// Remembers the step's tokens that the sampler has not seen, and gives the position of the token
    /// after them. What the sampler drew it knows; what the caller chose comes here for the first
    /// time.
    fn catch_up(&mut self, step: SeqStep<'_>) -> u32 {
        let start = step.start + step.shift;
        let position = start + step.tokens.len() as u32;
        for &token in step.tokens.iter().skip(self.n_known.saturating_sub(start) as usize) {
            self.sampler.remember(token);
        }
        self.n_known = self.n_known.max(position);
        position
    }

    /// Remembers the token that the device chose after those of `step`.
    fn chosen(&mut self, step: SeqStep<'_>, token: TokenId) {
        self.sampler.remember(token);
        self.n_known = step.start + step.shift + step.tokens.len() as u32 + 1;
    }

    /// Chooses the token after those of `step`.
    fn sample(
        &mut self,
        step: SeqStep<'_>,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<Choice, SampleError> {
        let position = self.catch_up(step);
        let choice = self.sampler.sample(logits, position, scratch)?;
        self.n_known = position + u32::from(self.sampler.draws());
        Ok(choice)
    }
}

impl<F: Forward> Executor<F> {
    /// An executor that knows no sequence. Everything it will ever need is allocated here, but for
    /// tables and what penalties remember.
    pub fn new(forward: F, capacity: Capacity) -> Self {
        assert!(capacity.max_seqs > 0, "an executor without tables does nothing");
        assert!(capacity.page_len > 0, "a page holds at least one token");
        let vocab = forward.vocab() as usize;
        let max_seqs = capacity.max_seqs as usize;
        Executor {
            seqs: FastMap::with_capacity_and_hasher(max_seqs, Default::default()),
            attachments: FastMap::default(),
            readers: FastMap::default(),
            free_rows: (0..capacity.max_seqs).rev().collect(),
            batch: Batch::with_capacity(capacity.max_rows as usize, max_seqs),
            ahead: None,
            n_ahead: 0,
            logits: vec![0.0; max_seqs * vocab],
            scratch: Scratch::with_vocab(vocab),
            clock: None,
            n_steps: 0,
            passing: Duration::ZERO,
            poison: None,
            forward,
            capacity,
        }
    }

    /// The same executor, which tells what copies and passes take by this clock.
    #[must_use]
    pub fn with_clock(mut self, clock: SharedClock) -> Self {
        self.clock = Some(clock);
        self
    }

    /// The model, to look at.
    pub fn forward(&self) -> &F {
        &self.forward
    }

    /// Passes that were queued before they were planned.
    pub fn n_ahead(&self) -> u64 {
        self.n_ahead
    }

    /// Carries out a plan, while pages come if there are `arrivals`; `None` if they do not come.
    fn carry_out(
        &mut self,
        plan: &StepPlan,
        arrivals: Option<&mut dyn Arrivals>,
    ) -> Result<Option<StepResult>, DeviceError> {
        self.n_steps += 1;
        self.passing = Duration::ZERO;
        let early = self.early(plan, arrivals.is_some())?;
        for &seq in &plan.ended {
            self.forget(seq);
        }
        for start in &plan.started {
            self.learn(start);
        }
        let begin = self.now();
        if !plan.copies.is_empty() {
            self.copy_pages(&plan.copies)?;
        }
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let copy_nanos = nanos(self.now().saturating_sub(begin));
        if plan.seqs.is_empty() {
            return Ok(Some(StepResult { copy_nanos, ..StepResult::default() }));
        }
        if !plan.shifts.is_empty() {
            self.shift_pages(&plan.shifts)?;
        }
        self.batch.clear();
        let is_awaiting = arrivals.is_some();
        let (sampled, failed) = match early {
            None => {
                for step in plan.seqs.iter() {
                    let row = self.change_table(step)?;
                    self.batch.push(step, row);
                }
                match self.compute(&plan.seqs, (arrivals, true))? {
                    Some(results) => results,
                    None => return Ok(None),
                }
            }
            Some(early) => self.take_early(plan, early)?,
        };
        // Waiting says nothing of what computing takes.
        let compute_nanos = if is_awaiting { 0 } else { nanos(self.passing) };
        Ok(Some(StepResult { sampled, failed, copy_nanos, compute_nanos }))
    }

    fn run_or_poison(
        &mut self,
        plan: &StepPlan,
        arrivals: Option<&mut dyn Arrivals>,
    ) -> Result<Option<StepResult>, DeviceError> {
        if let Some(fault) = &self.poison {
            return Err(DeviceError::Fault(format!("the device failed before: {fault}")));
        }
        let result = self.carry_out(plan, arrivals);
        if let Err(error) = &result {
            self.poison = Some(error.to_string());
        }
        result
    }

    /// The time, or always zero without a clock.
    fn now(&self) -> Duration {
        self.clock.as_ref().map_or(Duration::ZERO, |clock| clock.now())
    }

    /// Does what is part of a pass.
    fn pass<T>(
        &mut self,
        part: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let begin = self.now();
        let done = part(self)?;
        self.passing += self.now().saturating_sub(begin);
        Ok(done)
    }

    fn forget(&mut self, seq: SeqId) {
        let known = self.seqs.remove(&seq).expect("only a known sequence ends");
        self.free_rows.push(known.row);
    }

    fn learn(&mut self, start: &SeqStart) {
        let row = self.free_rows.pop().expect("no more sequences than there are tables");
        let (prompt, answer) = start.history.split_at(start.n_prompt as usize);
        let sampler = Sampler::new(start.sampling.clone(), prompt, answer);
        let n_known = start.history.len() as u32;
        let known = Known { sampler, n_known, row, table: Vec::new(), last_step: 0 };
        self.forward.begin(row, start.n_prompt);
        let before = self.seqs.insert(start.seq, known);
        assert!(before.is_none(), "a sequence starts once");
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            assert!(copy.source.0 < self.capacity.n_slots, "source slot outside the arena");
            assert!(copy.target.0 < self.capacity.n_slots, "target slot outside the arena");
        }
        self.forward.copy_pages(copies)
    }

    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError> {
        for shift in shifts {
            assert!(shift.source.0 < self.capacity.n_slots, "source slot outside the arena");
            assert!(shift.target.0 < self.capacity.n_slots, "target slot outside the arena");
        }
        self.forward.shift_pages(shifts)
    }

    /// Checks a sequence's step, brings its table up to date, and returns the table's row.
    fn change_table(&mut self, step: SeqStep<'_>) -> Result<u32, DeviceError> {
        let Capacity { n_slots, page_len, .. } = self.capacity;
        let vocab = self.forward.vocab();
        let known = self.seqs.get_mut(&step.seq).expect("a sequence starts before it runs");
        assert!(known.last_step < self.n_steps, "a sequence is in a step once");
        known.last_step = self.n_steps;
        assert!(!step.tokens.is_empty(), "a step computes at least one token");
        assert!(step.tokens.iter().all(|token| token.0 < vocab), "a token of the vocabulary");

        let change = step.table;
        assert!(change.keep as usize <= known.table.len(), "only entries that are there can stay");
        assert!(change.push.iter().all(|slot| slot.0 < n_slots), "slot outside the arena");
        let table_len = change.keep + change.push.len() as u32;
        assert!(table_len <= self.capacity.table_len(), "table longer than the context");
        let end = u64::from(step.start) + step.tokens.len() as u64;
        let room = u64::from(table_len) * u64::from(page_len);
        assert!(end <= room, "every token has a page");
        known.table.truncate(change.keep as usize);
        known.table.extend_from_slice(change.push);
        if !change.push.is_empty() {
            self.forward.write_table(known.row, change.keep, change.push)?;
        }
        Ok(known.row)
    }

    /// Gives hidden states to those who wait for them.
    fn show_hidden(&mut self, seqs: &SeqSteps) -> Result<(), DeviceError> {
        if self.attachments.is_empty() {
            return Ok(());
        }
        let len = self.forward.hidden_len();
        for (row, step) in seqs.sampled().enumerate() {
            let attachment = self.attachments.get_mut(&step.seq);
            let Some(sink) = attachment.and_then(|own| own.hidden.take()) else { continue };
            // Rare enough that the rows before it may be read too.
            let mut hidden = vec![0.0; (row + 1) * len];
            self.forward.hidden(&mut hidden)?;
            sink.send(&hidden[row * len..]);
        }
        Ok(())
    }

    /// Leaves the batch's logits; false if pages that come for it do not.
    fn write_logits(&mut self, arrivals: Option<&mut dyn Arrivals>) -> Result<bool, DeviceError> {
        let layout = self.batch.layout();
        let n_logits = layout.output_rows.len() * self.forward.vocab() as usize;
        let logits = &mut self.logits[..n_logits];
        match arrivals {
            None => self.forward.forward(layout, logits).map(|()| true),
            Some(arrivals) => self.forward.forward_awaiting(layout, logits, arrivals),
        }
    }

    /// The forward pass of the batch, which is of `seqs`, while pages come if there are `arrivals`; `None` if they
    /// do not come. If these are all of a plan, the next pass may be queued too.
    fn compute(
        &mut self,
        seqs: &SeqSteps,
        (arrivals, is_all): (Option<&mut dyn Arrivals>, bool),
    ) -> Result<Option<Results>, DeviceError> {
        let n_rows = self.batch.layout().n_rows();
        assert!(n_rows <= self.capacity.max_rows as usize, "more rows than planned for");
        let draws = if arrivals.is_none() { self.draws(seqs) } else { None };
        let tokens = match draws {
            Some(draws) => Some(self.pass(|this| {
                this.forward.queue(this.batch.layout(), &draws, false)?;
                this.await_tokens(is_all.then_some(seqs), draws.len())
            })?),
            None => match self.pass(|this| this.write_logits(arrivals))? {
                true => None,
                false => return Ok(None),
            },
        };
        self.show_hidden(seqs)?;
        let mut results = match tokens {
            Some(tokens) => self.take(seqs, &tokens),
            None => self.sample(seqs),
        };
        self.read_prompts(seqs, &mut results)?;
        Ok(Some(results))
    }
}

impl<F: fmt::Debug> fmt::Debug for Executor<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("forward", &self.forward)
            .field("capacity", &self.capacity)
            .field("seqs", &self.seqs)
            .field("n_steps", &self.n_steps)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}

impl<F: Forward> Execute for Executor<F> {
    fn vocab(&self) -> u32 {
        self.forward.vocab()
    }

    fn topk(&self) -> Option<TopKStats> {
        self.forward.topk()
    }

    fn run(&mut self, plan: &StepPlan) -> Result<StepResult, DeviceError> {
        let result = self.run_or_poison(plan, None)?;
        Ok(result.expect("only what waits does without a result"))
    }

    fn run_awaiting(
        &mut self,
        plan: &StepPlan,
        arrivals: &mut dyn Arrivals,
    ) -> Result<Option<StepResult>, DeviceError> {
        self.run_or_poison(plan, Some(arrivals))
    }

    fn attach(&mut self, seq: SeqId, mut attachment: Attachment) {
        if let Some(reader) = attachment.prompt.take() {
            self.readers.insert(seq, reader);
        }
        if attachment.constraint.is_some() || attachment.hidden.is_some() {
            self.attachments.insert(seq, attachment);
        }
    }

    fn detach(&mut self, seq: SeqId) {
        self.readers.remove(&seq);
        self.attachments.remove(&seq);
    }
}

impl<F: Forward> Pages for Executor<F> {
    fn page_image(&self) -> Option<PageImage> {
        self.forward.page_image()
    }

    fn page_codec(&self, cold: &ColdKv) -> Option<Arc<dyn PageCodec>> {
        self.forward.page_codec(cold)
    }

    fn row_mover(&self) -> Option<RowMover> {
        self.forward.row_mover()
    }

    fn read_page(&mut self, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        assert!(slot.0 < self.capacity.n_slots, "slot outside the arena");
        self.forward.read_page(slot, target)
    }

    fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) -> Result<(), DeviceError> {
        assert!(slot.0 < self.capacity.n_slots, "slot outside the arena");
        self.forward.write_page(slot, start, source)
    }
}
