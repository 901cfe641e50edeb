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
//! some of those, needs no pass of its own. If it has others too, say a prompt that has come, those have
//! a pass of their own, and what was guessed serves the rest.
//!
//! That is safe because everything on a device is in one order, and because the guess writes one place
//! of each sequence only, the one after its last: nobody reads that before it is written again. It is
//! also what top-k attention needs, which remembers what a pass decided: no token is computed twice,
//! unless its sequence gives way to others meanwhile.

use nuthatch_backend::{DeviceError, Draw};
use nuthatch_types::{SeqId, SeqStep, SeqSteps, Slot, StepPlan, TableChange, TokenId};

use super::{Executor, Forward, Results};

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
    /// The page of that place.
    slot: Slot,
    /// Which token that is, as the pass before chose it.
    token: Option<u32>,
}

/// What a plan has of such a pass.
pub(super) struct Early {
    /// The pass's row of each of the plan's sequences, if it has one.
    rows: Vec<Option<usize>>,
    /// Rows of the pass.
    n: usize,
    /// What the pass chose, if something could not be done before that was known.
    tokens: Option<Vec<Option<u32>>>,
}

impl<F: Forward> Executor<F> {
    /// What the plan has of the pass that was queued. If that is nothing, the pass is waited for and
    /// forgotten, and so it is if pages are awaited, because such a plan may yet come to nothing.
    pub(super) fn early(
        &mut self,
        plan: &StepPlan,
        is_awaiting: bool,
    ) -> Result<Option<Early>, DeviceError> {
        let Some(ahead) = self.ahead.take() else { return Ok(None) };
        let n = ahead.rows.len();
        let mut next = 0;
        let row_of = |step: SeqStep<'_>| {
            // They are in the same order, but for those that have ended.
            let rest = ahead.rows[next..].iter().chain(&ahead.rows[..next]);
            let i = (next + rest.take_while(|row| row.seq != step.seq).count()) % n;
            let is_guess = self.is_guess(&ahead.rows[i], step) && !plan.ended.contains(&step.seq);
            next = if is_guess { (i + 1) % n } else { next };
            is_guess.then_some(i)
        };
        let rows: Vec<Option<usize>> = plan.seqs.iter().map(row_of).collect();
        let has_some = rows.iter().any(Option::is_some) && !is_awaiting;
        let has_all = rows.iter().all(Option::is_some) && has_some;
        if has_all && plan.copies.is_empty() && plan.shifts.is_empty() {
            return Ok(Some(Early { rows, n, tokens: None }));
        }
        let mut tokens = vec![None; n];
        self.pass(|this| this.forward.drawn(&mut tokens))?;
        Ok(has_some.then_some(Early { rows, n, tokens: Some(tokens) }))
    }

    /// Whether a step is what was guessed. Its table may change, but not where the token has gone.
    fn is_guess(&self, row: &Row, step: SeqStep<'_>) -> bool {
        let is_place = (row.seq, row.start, row.shift) == (step.seq, step.start, step.shift);
        let (&[TokenId(token)], true) = (step.tokens, is_place && step.sample) else {
            return false;
        };
        let Some(known) = self.seqs.get(&step.seq) else { return false };
        let (page, keep) = (row.start / self.capacity.page_len, step.table.keep);
        let slot = match page.checked_sub(keep) {
            None => known.table.get(page as usize),
            Some(pushed) => step.table.push.get(pushed as usize),
        };
        row.token == Some(token) && slot == Some(&row.slot)
    }

    /// The results of a plan of which the pass that was queued before has computed something.
    pub(super) fn take_early(
        &mut self,
        plan: &StepPlan,
        Early { rows, n, tokens }: Early,
    ) -> Result<Results, DeviceError> {
        let mut others = SeqSteps::default();
        for (step, row) in plan.seqs.iter().zip(&rows) {
            let table_row = self.change_table(step)?;
            if row.is_some() {
                self.seqs.get_mut(&step.seq).expect("its table was changed").catch_up(step);
            } else {
                self.batch.push(step, table_row);
                others.push(step);
            }
        }
        // Rows that follow a pass are all of its rows.
        let is_followed = tokens.is_none() && rows.iter().copied().eq((0..n).map(Some));
        let tokens = match tokens {
            Some(tokens) => tokens,
            None => self.pass(|this| this.await_tokens(is_followed.then_some(&plan.seqs), n))?,
        };
        let (sampled, failed) = match others.is_empty() {
            true => Results::default(),
            false => self.compute(&others, (None, false))?.expect("nothing is awaited"),
        };
        let (mut sampled, mut failed) =
            (sampled.into_iter().peekable(), failed.into_iter().peekable());
        let mut results = (Vec::with_capacity(plan.seqs.len()), Vec::new());
        for (step, row) in plan.seqs.iter().zip(&rows) {
            match row {
                Some(row) => self.take_one(step, tokens[*row], &mut results),
                None => {
                    results.0.extend(sampled.next_if(|sampled| sampled.seq == step.seq));
                    results.1.extend(failed.next_if_eq(&step.seq));
                }
            }
        }
        Ok(results)
    }

    /// Waits for the `n` tokens of the first pass that was queued. If all of it is known, the pass that
    /// follows is queued before, if it can be guessed.
    pub(super) fn await_tokens(
        &mut self,
        all: Option<&SeqSteps>,
        n: usize,
    ) -> Result<Vec<Option<u32>>, DeviceError> {
        let guess = all.and_then(|seqs| Some((seqs, self.guess(seqs)?)));
        let mut ahead = match guess {
            Some((seqs, draws)) => Some(self.queue_ahead(seqs, &draws)?),
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

    /// How the tokens after a plan's are chosen, if the next plan can be guessed: if all decode,
    /// nobody looks at anything but tokens, and what is chosen next depends on no token that is not
    /// known.
    fn guess(&self, seqs: &SeqSteps) -> Option<Vec<Draw>> {
        if !self.forward.runs_ahead() || !self.attachments.is_empty() || !self.readers.is_empty() {
            return None;
        }
        let draw = |step: SeqStep<'_>| {
            let known = &self.seqs[&step.seq];
            let place = step.start + 1;
            let has_page = (place / self.capacity.page_len) < known.table.len() as u32;
            let is_decoding = step.sample && step.tokens.len() == 1;
            if !is_decoding || !has_page || place >= self.capacity.max_context {
                return None;
            }
            known.sampler.draw_unseen(place + step.shift + 1)
        };
        seqs.iter().map(draw).collect()
    }

    fn queue_ahead(&mut self, seqs: &SeqSteps, draws: &[Draw]) -> Result<Ahead, DeviceError> {
        self.batch.clear();
        let mut rows = Vec::with_capacity(draws.len());
        for step in seqs.iter() {
            let (seq, start, shift) = (step.seq, step.start + 1, step.shift);
            let next =
                SeqStep { start, tokens: &[TokenId(0)], table: TableChange::default(), ..step };
            let known = &self.seqs[&seq];
            self.batch.push(next, known.row);
            let slot = known.table[(start / self.capacity.page_len) as usize];
            rows.push(Row { seq, start, shift, slot, token: None });
        }
        self.forward.queue(self.batch.layout(), draws, true)?;
        self.n_ahead += 1;
        Ok(Ahead { rows })
    }
}
