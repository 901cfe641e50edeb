//! Passes that are queued before they are planned.
//!
//! ```text
//!   device   | pass 1        | pass 2        | pass 3
//!   host      queue 2, await 1 | commit 1, plan 2, queue 3, await 2 | commit 2, ...
//! ```
//!
//! Where all sequences of a plan decode, the next plan is nearly always the same one token further. So
//! that pass is queued at once, with tokens that the device itself puts in, and runs while the plan's
//! tokens are told and the next plan is made. A plan that is what was guessed, or whose sequences are
//! some of those, needs no pass of its own; for any other, what was guessed is thrown away.
//!
//! That is safe because everything on a device is in one order, and because the guess writes one place
//! of each sequence only, the one after its last: nobody reads that before it is written again.

use nuthatch_backend::{DeviceError, Draw};
use nuthatch_types::{SeqId, SeqStep, StepPlan, TableChange, TokenId};

use super::{Executor, Forward};

/// A pass that was queued before it was planned.
pub(super) struct Ahead {
    rows: Vec<Row>,
}

/// What was guessed of one sequence.
struct Row {
    seq: SeqId,
    /// Where its token goes, and tokens that were dropped before.
    start: u32,
    shift: u32,
    /// Which token that is, as the pass before chose it.
    token: Option<u32>,
}

impl Ahead {
    /// Whether a step is what was guessed, but for its table.
    fn is_guess(row: &Row, step: &SeqStep<'_>) -> bool {
        let is_place = (row.start, row.shift) == (step.start, step.shift);
        let [TokenId(token)] = *step.tokens else { return false };
        is_place && step.sample && row.token == Some(token)
    }

    /// The row of each step of a plan, in order, if all were guessed.
    fn rows_of(&self, plan: &StepPlan) -> Option<Vec<usize>> {
        let mut rows = self.rows.iter().enumerate();
        let row_of = |step: SeqStep<'_>| {
            let (i, row) = rows.find(|(_, row)| row.seq == step.seq)?;
            Self::is_guess(row, &step).then_some(i)
        };
        plan.seqs.iter().map(row_of).collect()
    }
}

impl<F: Forward> Executor<F> {
    /// The pass that was queued, if it is the plan's. If not, it is waited for and forgotten.
    pub(super) fn ahead_of(&mut self, plan: &StepPlan) -> Result<Option<Ahead>, DeviceError> {
        let Some(ahead) = self.ahead.take() else { return Ok(None) };
        let has_table = |step: SeqStep<'_>| {
            let known = self.seqs.get(&step.seq);
            known.is_some_and(|known| known.table_len == step.table.keep)
        };
        let is_plain = plan.copies.is_empty() && plan.shifts.is_empty() && !plan.seqs.is_empty();
        if is_plain && plan.seqs.iter().all(has_table) && ahead.rows_of(plan).is_some() {
            return Ok(Some(ahead));
        }
        self.forward.drawn(&mut vec![None; ahead.rows.len()])?;
        Ok(None)
    }

    /// The tokens of a plan whose pass was queued before.
    pub(super) fn take_ahead(
        &mut self,
        plan: &StepPlan,
        ahead: &Ahead,
    ) -> Result<Vec<Option<u32>>, DeviceError> {
        for step in plan.seqs.iter() {
            self.seqs.get_mut(&step.seq).expect("a sequence starts before it runs").catch_up(step);
        }
        let rows = ahead.rows_of(plan).expect("the plan was compared");
        if rows.len() == ahead.rows.len() {
            return self.await_tokens(plan, rows.len());
        }
        // Rows that follow a pass are all of its rows.
        let mut tokens = vec![None; ahead.rows.len()];
        self.forward.drawn(&mut tokens)?;
        Ok(rows.into_iter().map(|row| tokens[row]).collect())
    }

    /// Queues the pass after the plan's if it can be guessed, and waits for the plan's tokens.
    pub(super) fn await_tokens(
        &mut self,
        plan: &StepPlan,
        n: usize,
    ) -> Result<Vec<Option<u32>>, DeviceError> {
        let mut ahead = match self.guess(plan) {
            Some(draws) => Some(self.queue_ahead(plan, &draws)?),
            None => None,
        };
        let mut tokens = vec![None; n];
        self.forward.drawn(&mut tokens)?;
        if let Some(ahead) = &mut ahead {
            ahead.rows.iter_mut().zip(&tokens).for_each(|(row, &token)| row.token = token);
        }
        self.ahead = ahead;
        Ok(tokens)
    }

    /// How the tokens after the plan's are chosen, if the next plan can be guessed: if all decode,
    /// nobody looks at anything but tokens, and what is chosen next depends on no token that is not
    /// known.
    fn guess(&self, plan: &StepPlan) -> Option<Vec<Draw>> {
        if !self.forward.runs_ahead() || !self.attachments.is_empty() || !self.readers.is_empty() {
            return None;
        }
        let draw = |step: SeqStep<'_>| {
            let known = &self.seqs[&step.seq];
            let place = step.start + 1;
            let has_page = place < known.table_len * self.capacity.page_len;
            let is_decoding = step.sample && step.tokens.len() == 1;
            if !is_decoding || !has_page || place >= self.capacity.max_context {
                return None;
            }
            known.sampler.draw_unseen(place + step.shift + 1)
        };
        plan.seqs.iter().map(draw).collect()
    }

    fn queue_ahead(&mut self, plan: &StepPlan, draws: &[Draw]) -> Result<Ahead, DeviceError> {
        self.batch.clear();
        let mut rows = Vec::with_capacity(draws.len());
        for step in plan.seqs.iter() {
            let (seq, start, shift) = (step.seq, step.start + 1, step.shift);
            let next =
                SeqStep { start, tokens: &[TokenId(0)], table: TableChange::default(), ..step };
            self.batch.push(next, self.seqs[&seq].row);
            rows.push(Row { seq, start, shift, token: None });
        }
        self.forward.queue(self.batch.layout(), draws, true)?;
        Ok(Ahead { rows })
    }
}
