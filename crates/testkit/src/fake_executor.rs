//! An executor without a model that notices every mistake in a plan.
//!
//! The KV of a token is a number that depends on the token and on all tokens before it, as it does
//! in a real model. Each step writes these numbers through the sequence's table into an arena of
//! slots, after it has read every earlier one back and compared it with what the sequence's history
//! demands. The sampled token is made from the last number read, so that a wrong page gives a wrong
//! answer even if nobody compares. Copies move the numbers between slots of both tiers, in order; a
//! sequence may run on slots of the device only, unless sequences may spill.
//!
//! With a window, only what some token of the step sees is read. In a sequence that streams, a number
//! also depends on how many tokens were dropped before it was computed, and each place knows the
//! position that its key is rotated to.

use nuthatch_types::{
    FastMap, FastSet, Limits, PageShift, Sampled, Sampling, SeqId, SeqStart, SeqStep, Slot,
    StepPlan, StepResult, Streaming, TokenId,
};

use crate::rng::mix;

/// An executor without a model. Panics at the first mistake in a plan.
#[derive(Debug)]
pub struct FakeExecutor {
    page_len: usize,
    n_vocab: u32,
    /// Slots of the device, which come first.
    n_device: u32,
    /// Whether sequences may run on slots of the host.
    may_spill: bool,
    looks_ahead: bool,
    /// What it says a copied page and a computed token took.
    page_nanos: u64,
    token_nanos: u64,
    window: Option<usize>,
    /// `[slot][page_len]` the KV of the token there.
    arena: Vec<Vec<Option<Kv>>>,
    seqs: FastMap<SeqId, FakeSeq>,
    /// Sequences that keep their first and last tokens only.
    streaming: FastMap<SeqId, Streaming>,
    /// Whether a fault has just made it forget sequences that others still know.
    has_forgotten: bool,
}

/// The KV of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kv {
    number: u64,
    /// Where its key is rotated to.
    position: i64,
}

#[derive(Debug)]
struct FakeSeq {
    sampling: Sampling,
    history: Vec<TokenId>,
    /// `[history.len()]` the number that each token must have.
    numbers: Vec<u64>,
    table: Vec<Slot>,
}

impl FakeSeq {
    fn new(start: &SeqStart) -> Self {
        assert!(start.n_prompt as usize <= start.history.len(), "more prompt than history");
        let mut seq = FakeSeq {
            sampling: start.sampling.clone(),
            history: Vec::new(),
            numbers: Vec::new(),
            table: Vec::new(),
        };
        start.history.iter().for_each(|&token| seq.push(token));
        seq
    }

    fn push(&mut self, token: TokenId) {
        self.numbers.push(number_of(self.numbers.last().copied(), token, 0));
        self.history.push(token);
    }

    /// The number of a token that is computed when `n_dropped` before it were dropped.
    fn compute(&mut self, i: usize, n_dropped: u32) -> u64 {
        let before = i.checked_sub(1).map(|before| self.numbers[before]);
        self.numbers[i] = number_of(before, self.history[i], n_dropped);
        self.numbers[i]
    }
}

impl FakeExecutor {
    /// An executor with `n_slots` slots of `page_len` tokens on the device, none of them written,
    /// and none on the host.
    pub fn new(page_len: u32, n_slots: u32, n_vocab: u32) -> Self {
        FakeExecutor {
            page_len: page_len as usize,
            n_vocab,
            n_device: n_slots,
            may_spill: false,
            looks_ahead: false,
            page_nanos: 1000,
            token_nanos: 1000,
            window: None,
            arena: vec![vec![None; page_len as usize]; n_slots as usize],
            seqs: FastMap::default(),
            streaming: FastMap::default(),
            has_forgotten: false,
        }
    }

    /// The same executor with `n_slots` more slots on the host.
    #[must_use]
    pub fn with_host(mut self, n_slots: u32) -> Self {
        self.arena.resize(self.arena.len() + n_slots as usize, vec![None; self.page_len]);
        self
    }

    /// The same executor, whose sequences may run on slots of the host or may not.
    #[must_use]
    pub fn with_spill(mut self, may_spill: bool) -> Self {
        self.may_spill = may_spill;
        self
    }

    /// The same executor, whose sequences may have a place for a token more, or may not.
    #[must_use]
    pub fn with_look_ahead(mut self, looks_ahead: bool) -> Self {
        self.looks_ahead = looks_ahead;
        self
    }

    /// The same executor, which says that a copied page and a computed token take this long.
    #[must_use]
    pub fn with_costs(mut self, page_nanos: u64, token_nanos: u64) -> Self {
        (self.page_nanos, self.token_nanos) = (page_nanos, token_nanos);
        self
    }

    /// The same executor, with a model that sees no further back than `window` tokens.
    #[must_use]
    pub fn with_window(mut self, window: Option<u32>) -> Self {
        self.window = window.map(|window| window as usize);
        self
    }

    /// Says that a sequence which has not started streams.
    pub fn expect_streaming(&mut self, seq: SeqId, streaming: Streaming) {
        self.streaming.insert(seq, streaming);
    }

    /// Checks a plan and carries it out.
    pub fn run(&mut self, plan: &StepPlan) -> StepResult {
        for seq in &plan.ended {
            let known = self.seqs.remove(seq).is_some();
            assert!(known || self.has_forgotten, "{seq:?} ended but never started");
        }
        self.has_forgotten = false;
        for start in &plan.started {
            let before = self.seqs.insert(start.seq, FakeSeq::new(start));
            assert!(before.is_none(), "{:?} started twice", start.seq);
        }
        for copy in &plan.copies {
            assert_ne!(copy.source, copy.target, "a page is copied onto itself");
            self.arena[copy.target.0 as usize] = self.arena[copy.source.0 as usize].clone();
        }
        for shift in &plan.shifts {
            self.shift(shift);
        }
        assert!(!plan.seqs.is_empty() || !plan.copies.is_empty(), "a step that does nothing");
        let mut written = FastSet::default();
        plan.seqs.iter().for_each(|step| self.write(step, &mut written));
        // Everything is written before anything is read, as on a device that works layer by layer.
        let sampled = plan.seqs.iter().filter_map(|step| self.read(step)).collect();
        let n_tokens = plan.seqs.n_tokens();
        StepResult {
            sampled,
            failed: Vec::new(),
            copy_nanos: self.page_nanos * plan.copies.len() as u64,
            compute_nanos: self.token_nanos * n_tokens as u64,
        }
    }

    /// Writes the KV of a prompt's tokens from `start` on to whole slots, as a slower tier does that
    /// has kept it.
    pub fn fill(&mut self, prompt: &[TokenId], start: u32, slots: &[Slot]) {
        let mut last = None;
        for (position, &token) in prompt.iter().enumerate() {
            let number = number_of(last, token, 0);
            last = Some(number);
            let place = position.checked_sub(start as usize);
            let slot = place.and_then(|place| slots.get(place / self.page_len));
            if let Some(slot) = slot {
                let kv = Kv { number, position: position as i64 };
                self.arena[slot.0 as usize][position % self.page_len] = Some(kv);
            }
        }
    }

    /// Sequences that have started and not ended.
    pub fn n_seqs(&self) -> usize {
        self.seqs.len()
    }

    /// Forgets everything, as a device does that fails and is started again.
    pub fn fail(&mut self) {
        self.seqs.clear();
        self.arena.iter_mut().for_each(|page| page.fill(None));
        self.has_forgotten = true;
    }

    fn shift(&mut self, shift: &PageShift) {
        let turned = |kv: &Option<Kv>| {
            let Kv { number, position } = kv.expect("a page that is turned was computed");
            Some(Kv { number, position: position + i64::from(shift.by) })
        };
        let page = self.arena[shift.source.0 as usize].iter().map(turned).collect();
        self.arena[shift.target.0 as usize] = page;
    }

    fn write(&mut self, step: SeqStep<'_>, written: &mut FastSet<(Slot, usize)>) {
        let id = step.seq;
        let seq = self.seqs.get_mut(&id).unwrap_or_else(|| panic!("{id:?} was not started"));
        let keep = step.table.keep as usize;
        assert!(keep <= seq.table.len(), "{id:?} keeps {keep} of {} entries", seq.table.len());
        seq.table.truncate(keep);
        seq.table.extend(step.table.push);

        let on_host = seq.table.iter().find(|slot| slot.0 >= self.n_device);
        assert!(on_host.is_none() || self.may_spill, "{id:?} runs on the host");
        let (start, shift) = (step.start as usize, step.shift as usize);
        let end = start + step.tokens.len();
        assert!(start < end, "{id:?} computes nothing");
        if seq.sampling.n_candidates > 0 && end + shift == seq.history.len() + 1 {
            // The caller's choice is told by computing it.
            seq.push(step.tokens[end - start - 1]);
        }
        assert!(end + shift <= seq.history.len(), "{id:?} computes tokens that are not known");
        let history = &seq.history[start + shift..end + shift];
        assert_eq!(step.tokens[..], *history, "{id:?} computes other tokens");
        let needed = [end, end + usize::from(self.looks_ahead)].map(|n| n.div_ceil(self.page_len));
        assert!(needed.contains(&seq.table.len()), "{id:?} has unused entries");
        if let Some(streaming) = self.streaming.get(&id) {
            let page_len = self.page_len as u32;
            assert!(end <= streaming.max_len(page_len) as usize, "{id:?} keeps too much");
        }
        for place in start..end {
            let slot = seq.table[place / self.page_len];
            let offset = place % self.page_len;
            assert!(written.insert((slot, offset)), "{id:?} writes {slot:?}+{offset}, not alone");
            let number = seq.compute(place + shift, step.shift);
            let position = (place + shift) as i64;
            self.arena[slot.0 as usize][offset] = Some(Kv { number, position });
        }
    }

    fn read(&mut self, step: SeqStep<'_>) -> Option<Sampled> {
        let id = step.seq;
        let n_sinks = match self.streaming.get(&id) {
            Some(streaming) if step.shift > 0 => {
                streaming.sink_pages(self.page_len as u32) as usize * self.page_len
            }
            _ => 0,
        };
        let seq = self.seqs.get_mut(&id).expect("it was written to");
        let (start, shift) = (step.start as usize, step.shift as usize);
        let end = start + step.tokens.len();
        // What streams keeps its whole table, whatever the model sees of it.
        let window = self.window.filter(|_| !self.streaming.contains_key(&id));
        let first = window.map_or(0, |window| (start + 1).saturating_sub(window));
        let mut last = None;
        for place in first..end {
            let slot = seq.table[place / self.page_len];
            last = self.arena[slot.0 as usize][place % self.page_len];
            let token = if place < n_sinks { place } else { place + shift };
            let position = (place + shift) as i64;
            let expected = Some(Kv { number: seq.numbers[token], position });
            assert_eq!(last, expected, "{id:?} reads another token at {place} in {slot:?}");
        }
        let at_end = end + shift == seq.history.len();
        assert!(!step.sample || at_end, "{id:?} samples in the middle of its tokens");
        if !step.sample {
            return None;
        }
        let token = next_token(last?.number, seq.sampling.seed, self.n_vocab);
        let top = candidates(token, &seq.sampling, self.n_vocab);
        if top.is_empty() {
            seq.push(token);
        }
        Some(Sampled { seq: id, token, logprob: None, top })
    }
}

/// The candidates that a [`FakeExecutor`] gives after `tokens`, which are not empty.
pub fn candidates_after(
    tokens: &[TokenId],
    sampling: &Sampling,
    n_vocab: u32,
) -> Vec<(TokenId, f32)> {
    let last = tokens.iter().fold(None, |last, &token| Some(number_of(last, token, 0)));
    let best = next_token(last.expect("there is a token"), sampling.seed, n_vocab);
    candidates(best, sampling, n_vocab)
}

fn candidates(best: TokenId, sampling: &Sampling, n_vocab: u32) -> Vec<(TokenId, f32)> {
    let n = sampling.n_candidates.min(n_vocab);
    (0..n).map(|i| (TokenId((best.0 + i) % n_vocab), -1.0 - i as f32)).collect()
}

/// The answer that a [`FakeExecutor`] gives to a prompt when nothing else is running, at most
/// `max_len` tokens of prompt and answer together. `streaming` comes with the length of a page.
pub fn answer_alone(
    prompt: &[TokenId],
    sampling: &Sampling,
    limits: &Limits,
    max_len: usize,
    n_vocab: u32,
    streaming: Option<(Streaming, u32)>,
) -> Vec<TokenId> {
    let number = |before: (Option<u64>, u32), token: &TokenId| {
        let (last, n_tokens) = before;
        (Some(number_of(last, *token, n_dropped(streaming, n_tokens))), n_tokens + 1)
    };
    let mut so_far = prompt.iter().fold((None, 0), number);
    let mut answer = Vec::new();
    while prompt.len() + answer.len() < max_len && answer.len() < limits.max_tokens as usize {
        let Some(last) = so_far.0 else { break };
        let token = next_token(last, sampling.seed, n_vocab);
        if answer.len() >= limits.min_tokens as usize && limits.stop_tokens.contains(&token) {
            break;
        }
        answer.push(token);
        so_far = number(so_far, &token);
    }
    answer
}

/// Tokens that were dropped when the one after the first `n_tokens` is computed: a page each time
/// the table is full.
fn n_dropped(streaming: Option<(Streaming, u32)>, n_tokens: u32) -> u32 {
    let Some((streaming, page_len)) = streaming else { return 0 };
    match n_tokens.checked_sub(streaming.max_len(page_len)) {
        Some(n_over) => (n_over / page_len + 1) * page_len,
        None => 0,
    }
}

fn number_of(before: Option<u64>, token: TokenId, n_dropped: u32) -> u64 {
    let before = before.unwrap_or(1).rotate_left(17) ^ mix(u64::from(n_dropped));
    mix(before ^ mix(u64::from(token.0) + 0x5EED))
}

fn next_token(kv: u64, seed: u64, n_vocab: u32) -> TokenId {
    TokenId((mix(kv ^ mix(seed)) % u64::from(n_vocab)) as u32)
}

#[cfg(test)]
mod tests {
    use nuthatch_types::TableChange;

    use super::*;

    fn step<'a>(push: &'a [Slot], start: u32, tokens: &'a [TokenId], sample: bool) -> SeqStep<'a> {
        let table = TableChange { keep: 0, push };
        SeqStep { seq: SeqId(1), start, shift: 0, tokens, table, sample }
    }

    fn plan(step: SeqStep<'_>) -> StepPlan {
        StepPlan { seqs: [step].into(), ..StepPlan::default() }
    }

    fn start(mut plan: StepPlan, history: &[TokenId]) -> StepPlan {
        let sampling = Sampling::default();
        plan.started.push(SeqStart {
            seq: SeqId(1),
            sampling,
            history: history.to_vec(),
            n_prompt: history.len() as u32,
        });
        plan
    }

    #[test]
    fn the_same_history_gives_the_same_answer_however_it_is_cut() {
        let prompt = [3, 1, 4, 1, 5].map(TokenId);
        let limits = Limits { max_tokens: 1, ..Limits::default() };
        let alone = answer_alone(&prompt, &Sampling::default(), &limits, 99, 50, None);
        let mut executor = FakeExecutor::new(2, 8, 50);
        executor.run(&start(plan(step(&[Slot(7), Slot(2)], 0, &prompt[..3], false)), &prompt));
        let slots = [Slot(7), Slot(2), Slot(0)];
        let result = executor.run(&plan(step(&slots, 3, &prompt[3..], true)));
        assert_eq!(result.sampled[0].token, alone[0]);
    }

    #[test]
    #[should_panic(expected = "reads another token at 0")]
    fn a_wrong_table_is_noticed() {
        let prompt = [3, 1, 4].map(TokenId);
        let mut executor = FakeExecutor::new(2, 8, 50);
        executor.run(&start(plan(step(&[Slot(7)], 0, &prompt[..2], false)), &prompt));
        executor.run(&plan(step(&[Slot(6), Slot(2)], 2, &prompt[2..], true)));
    }

    #[test]
    #[should_panic(expected = "reads another token at 0")]
    fn a_sink_that_was_not_turned_is_noticed() {
        let prompt: Vec<TokenId> = (0..7).map(TokenId).collect();
        let mut executor = FakeExecutor::new(2, 8, 50);
        executor.expect_streaming(SeqId(1), Streaming { n_sinks: 2, window: 4 });
        let slots = [Slot(7), Slot(2), Slot(0)];
        executor.run(&start(plan(step(&slots, 0, &prompt[..6], false)), &prompt));
        let slots = [Slot(7), Slot(0), Slot(1)];
        executor.run(&plan(SeqStep { shift: 2, ..step(&slots, 4, &prompt[6..], true) }));
    }
}
