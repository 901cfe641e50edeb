//! A model without weights whose logits depend on every token of the sequence, read from the pages.
//!
//! A page that is overwritten, a table that is out of date or a row of the wrong sequence changes
//! the answer, and [`Answer::of`], which reads no page, says what it should have been.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use nuthatch_backend::{BatchLayout, DeviceError};
use nuthatch_cache::{Cache, Options};
use nuthatch_engine::sample::{Sampler, Scratch};
use nuthatch_engine::{
    Arrivals, Capacity, Engine, Executor, Forward, Output, Pages, Submission, Ticket, Usage,
};
use nuthatch_scheduler::Scheduler;
use nuthatch_types::{
    Clock, FinishReason, LayerIdx, Limits, PageCopy, PageImage, PageShift, Sampling, Slot, TokenId,
};

pub(crate) const VOCAB: u32 = 61;

/// A sequence that has this token gets logits that are no numbers.
pub(crate) const NAN_TOKEN: TokenId = TokenId(60);

pub(crate) const CAPACITY: Capacity =
    Capacity { max_rows: 16, max_seqs: 5, max_context: 48, page_len: 4, n_slots: 24 };

/// What may happen to an [`Echo`] on purpose.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Each step waits for one entry; when the senders are gone, none waits.
    pub(crate) gate: Option<Receiver<()>>,
    /// The device fails in this step, counted from 1.
    pub(crate) fault_at: Option<u64>,
    /// The model panics in this step.
    pub(crate) panic_at: Option<u64>,
    /// Counts the pages copied.
    pub(crate) n_copies: Arc<AtomicU64>,
    /// Disconnected when the model is dropped.
    #[expect(dead_code, reason = "held for what its drop tells")]
    pub(crate) alive: Option<Sender<()>>,
}

#[derive(Debug)]
pub(crate) struct Echo {
    /// `[n_slots * page_len]` tokens as they were computed.
    arena: Vec<Option<u32>>,
    /// `[max_seqs][table_len]`.
    tables: Vec<Vec<u32>>,
    page_len: usize,
    n_steps: u64,
    script: Script,
    /// `[outputs]` the last token of each row, in place of a hidden state.
    hidden: Vec<f32>,
    /// The last batch.
    last: BatchLayout,
}

impl Echo {
    pub(crate) fn new(capacity: Capacity, script: Script) -> Self {
        let table = vec![u32::MAX; capacity.table_len() as usize];
        Echo {
            hidden: Vec::new(),
            last: BatchLayout::default(),
            arena: vec![None; (capacity.n_slots * capacity.page_len) as usize],
            tables: vec![table; capacity.max_seqs as usize],
            page_len: capacity.page_len as usize,
            n_steps: 0,
            script,
        }
    }

    fn place(&self, row: u32, place: u32) -> usize {
        let place = place as usize;
        let slot = self.tables[row as usize][place / self.page_len] as usize;
        slot * self.page_len + place % self.page_len
    }
}

impl Pages for Echo {
    fn page_image(&self) -> Option<PageImage> {
        // Each token of a page stands for a layer.
        let (bytes, layout) = (4 * self.page_len, "echo".to_owned());
        Some(PageImage { bytes, layer_bytes: Some(4), layout })
    }

    fn read_page(&mut self, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        let page = &self.arena[slot.0 as usize * self.page_len..][..self.page_len];
        for (bytes, token) in target.as_chunks_mut::<4>().0.iter_mut().zip(page) {
            *bytes = token.expect("only full pages leave").to_le_bytes();
        }
        Ok(())
    }

    fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) -> Result<(), DeviceError> {
        let page = &mut self.arena[slot.0 as usize * self.page_len..][..self.page_len];
        for (&bytes, token) in source.as_chunks::<4>().0.iter().zip(&mut page[start / 4..]) {
            *token = Some(u32::from_le_bytes(bytes));
        }
        Ok(())
    }
}

impl Forward for Echo {
    fn vocab(&self) -> u32 {
        VOCAB
    }

    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError> {
        for (entry, slot) in self.tables[row as usize][start as usize..].iter_mut().zip(slots) {
            *entry = slot.0;
        }
        Ok(())
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError> {
        self.script.n_copies.fetch_add(copies.len() as u64, Ordering::SeqCst);
        for copy in copies {
            let (source, target) = (copy.source.0 as usize, copy.target.0 as usize);
            let n = self.page_len;
            self.arena.copy_within(source * n..(source + 1) * n, target * n);
        }
        Ok(())
    }

    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError> {
        let copy = |shift: &PageShift| PageCopy { source: shift.source, target: shift.target };
        self.copy_pages(&shifts.iter().map(copy).collect::<Vec<_>>())
    }

    fn forward_awaiting(
        &mut self,
        layout: &BatchLayout,
        logits: &mut [f32],
        arrivals: &mut dyn Arrivals,
    ) -> Result<bool, DeviceError> {
        for layer in (0..self.page_len as u32).map(LayerIdx) {
            let mut write = |slot, start, bytes: &[u8]| self.write_page(slot, start, bytes);
            if !arrivals.await_layer(layer, &mut write)? {
                return Ok(false);
            }
        }
        self.forward(layout, logits).map(|()| true)
    }

    fn forward(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        self.n_steps += 1;
        if let Some(gate) = &self.script.gate {
            let _ = gate.recv();
        }
        assert_ne!(self.script.panic_at, Some(self.n_steps), "the model panics as it was told");
        if self.script.fault_at == Some(self.n_steps) {
            return Err(DeviceError::Fault("the fake device fails as it was told".to_owned()));
        }
        self.last = layout.clone();
        self.hidden.clear();
        let mut rows = logits.chunks_exact_mut(VOCAB as usize);
        for seq in 0..layout.n_seqs() {
            let table = layout.table_row[seq];
            let range = layout.query_start[seq] as usize..layout.query_start[seq + 1] as usize;
            let first = layout.kv_len[seq] - range.len() as u32;
            for (place, &token) in (first..).zip(&layout.tokens[range.clone()]) {
                let place = self.place(table, place);
                self.arena[place] = Some(token);
            }
            if layout.output_rows.contains(&(range.end as u32 - 1)) {
                let tokens: Vec<TokenId> = (0..layout.kv_len[seq])
                    .map(|p| self.arena[self.place(table, p)].expect("the position was computed"))
                    .map(TokenId)
                    .collect();
                self.hidden.push(tokens[tokens.len() - 1].0 as f32);
                rows.next().unwrap().copy_from_slice(&echo_logits(&tokens));
            }
        }
        assert!(rows.next().is_none(), "one row for each output");
        Ok(())
    }

    fn hidden_len(&self) -> usize {
        1
    }

    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        hidden.copy_from_slice(&self.hidden[..hidden.len()]);
        Ok(())
    }

    fn look_back(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        let output_rows = layout.output_rows.clone();
        assert_eq!(layout, &BatchLayout { output_rows, ..self.last.clone() }, "the same batch");
        assert!(
            layout.output_rows.len() <= self.tables.len(),
            "as many outputs as a pass may have"
        );
        self.hidden.clear();
        let mut logits = logits.chunks_exact_mut(VOCAB as usize);
        for &row in &layout.output_rows {
            let seq = layout.query_start.partition_point(|&start| start <= row) - 1;
            let n_after = layout.query_start[seq + 1] - row - 1;
            let tokens: Vec<TokenId> = (0..layout.kv_len[seq] - n_after)
                .map(|p| self.arena[self.place(layout.table_row[seq], p)].expect("computed"))
                .map(TokenId)
                .collect();
            self.hidden.push(tokens[tokens.len() - 1].0 as f32);
            if let Some(logits) = logits.next() {
                logits.copy_from_slice(&echo_logits(&tokens));
            }
        }
        Ok(())
    }
}

/// The logits after `tokens`.
pub(crate) fn echo_logits(tokens: &[TokenId]) -> Vec<f32> {
    if tokens.contains(&NAN_TOKEN) {
        return vec![f32::NAN; VOCAB as usize];
    }
    let mut hash = 17u64;
    for token in tokens {
        hash = (hash ^ u64::from(token.0)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(29);
    }
    (0..u64::from(VOCAB))
        .map(|v| {
            let bits = (hash ^ v).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            // Never the token that breaks the logits.
            if v == u64::from(NAN_TOKEN.0) { f32::NEG_INFINITY } else { bits as f32 / 2e6 }
        })
        .collect()
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) logprobs: Vec<Option<f32>>,
    pub(crate) reason: FinishReason,
    pub(crate) usage: Usage,
}

impl Answer {
    /// The answer to a request that is alone in the world.
    pub(crate) fn of(submission: &Submission, max_context: u32) -> Self {
        let Submission { prompt, sampling, limits, .. } = submission;
        let mut sampler = Sampler::new(sampling.clone(), prompt, &[]);
        let mut scratch = Scratch::with_vocab(VOCAB as usize);
        let mut all = prompt.clone();
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        let reason = loop {
            let mut logits = echo_logits(&all);
            let Ok(choice) = sampler.sample(&mut logits, all.len() as u32, &mut scratch) else {
                break FinishReason::Failed;
            };
            let is_stop = limits.stop_tokens.contains(&choice.token);
            if is_stop && tokens.len() as u32 >= limits.min_tokens {
                break FinishReason::Stop;
            }
            tokens.push(choice.token);
            all.push(choice.token);
            logprobs.push(choice.logprob);
            if tokens.len() as u32 == limits.max_tokens || all.len() as u32 == max_context {
                break FinishReason::Length;
            }
        };
        let usage = Usage {
            prompt_tokens: prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: tokens.len() as u32,
        };
        Answer { tokens, logprobs, reason, usage }
    }

    /// Receives everything that a ticket has. `None` if the engine was lost.
    pub(crate) fn receive(ticket: &Ticket) -> Option<Self> {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        loop {
            match ticket.recv()? {
                Output::Token { token, logprob, .. } => {
                    tokens.push(token);
                    logprobs.push(logprob);
                }
                Output::Finished { index, reason, usage, score, .. } => {
                    assert_eq!((index, score), (0, None));
                    assert_eq!(ticket.recv(), None, "nothing after the end");
                    // What the cache held depends on who came before.
                    let usage = Usage { cached_tokens: 0, ..usage };
                    return Some(Answer { tokens, logprobs, reason, usage });
                }
            }
        }
    }
}

/// All answers that a ticket has, with their scores. `None` if the engine was lost.
pub(crate) fn receive_all(ticket: &Ticket) -> Option<Vec<(Answer, Option<f32>)>> {
    collect_all(std::iter::from_fn(|| ticket.recv()))
}

/// All answers of a request, in order of their indices, with their scores. `None` if one has not
/// ended.
pub(crate) fn collect_all(
    outputs: impl Iterator<Item = Output>,
) -> Option<Vec<(Answer, Option<f32>)>> {
    let mut open: BTreeMap<u32, (Vec<TokenId>, Vec<Option<f32>>)> = BTreeMap::new();
    let mut all = BTreeMap::new();
    for output in outputs {
        match output {
            Output::Token { index, token, logprob, .. } => {
                assert!(!all.contains_key(&index), "no token after the end");
                let (tokens, logprobs) = open.entry(index).or_default();
                tokens.push(token);
                logprobs.push(logprob);
            }
            Output::Finished { index, reason, usage, score, .. } => {
                let (tokens, logprobs) = open.remove(&index).unwrap_or_default();
                let answer = Answer { tokens, logprobs, reason, usage };
                assert!(all.insert(index, (answer, score)).is_none(), "one end for each answer");
            }
        }
    }
    let n = all.len() as u32;
    (open.is_empty() && n > 0 && all.keys().copied().eq(0..n)).then(|| all.into_values().collect())
}

/// A clock that tests move by hand.
#[derive(Debug, Default)]
pub(crate) struct HandClock(AtomicU64);

impl HandClock {
    pub(crate) fn advance_ms(&self, ms: u64) {
        self.0.fetch_add(ms, Ordering::SeqCst);
    }

    /// A fault: a clock should not go back.
    pub(crate) fn go_back_ms(&self, ms: u64) {
        let back = |now: u64| Some(now.saturating_sub(ms));
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, back).unwrap();
    }
}

impl Clock for HandClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst))
    }
}

/// An engine over an [`Echo`] that finds nothing again, and its clock.
pub(crate) fn engine(
    capacity: Capacity,
    script: Script,
) -> (Engine<Executor<Echo>>, Arc<HandClock>) {
    engine_with(capacity, script, Options { prefix: false, ..Options::default() })
}

/// Twelve requests of few beginnings while time flies after every `n_flown`-th, so that what is late is
/// computed and what failed is asked again, and now and then goes back: answers are right.
pub(crate) fn answers_are_right(
    engine: &mut Engine<Executor<Echo>>,
    clock: &HandClock,
    max_context: u32,
    (seed, round): (u64, u64),
    n_flown: u64,
) {
    let mut receivers = Vec::new();
    for i in 0..12 {
        let request = submission((seed + i) % 3, 20 + 5 * ((round + i) % 4) as u32, 6);
        let (outputs, receiver) = unbounded();
        engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
        receivers.push((request, receiver));
        for _ in 0..i % 5 {
            engine.step().unwrap();
            engine.verify().unwrap();
        }
        if i % n_flown == n_flown - 1 {
            clock.advance_ms(10_000);
        }
        if i % 5 == 4 {
            clock.go_back_ms(7_000);
        }
    }
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    for (request, receiver) in receivers {
        let got = &collect_all(receiver.try_iter()).unwrap()[0].0;
        let expected = Answer::of(&request, max_context);
        assert_eq!((&got.tokens, got.reason), (&expected.tokens, expected.reason));
    }
}

/// An engine over an [`Echo`], and its clock.
pub(crate) fn engine_with(
    capacity: Capacity,
    script: Script,
    options: Options,
) -> (Engine<Executor<Echo>>, Arc<HandClock>) {
    let cache = nuthatch_cache::Config {
        page_len: capacity.page_len,
        n_pages: capacity.n_slots,
        n_host_pages: 0,
    };
    let config = nuthatch_scheduler::Config {
        max_batched_tokens: capacity.max_rows,
        max_seqs: capacity.max_seqs,
        max_waiting: 64,
        max_context: capacity.max_context,
        window: None,
    };
    let scheduler = Scheduler::new(config, Cache::with_options(cache, options).unwrap()).unwrap();
    let executor = Executor::new(Echo::new(capacity, script), capacity);
    let clock = Arc::new(HandClock::default());
    (Engine::new(scheduler, executor, clock.clone()), clock)
}

/// A request with a prompt made from `seed`; every third is greedy, all have different seeds.
pub(crate) fn submission(seed: u64, n_prompt: u32, max_tokens: u32) -> Submission {
    let prompt = (0..n_prompt).map(|i| TokenId((seed as u32 * 7 + i * i) % 59)).collect();
    let sampling = match seed % 3 {
        0 => Sampling::greedy(),
        1 => Sampling {
            seed,
            top_p: 0.9,
            repetition_penalty: 1.2,
            n_logprobs: Some(0),
            ..Sampling::default()
        },
        _ => Sampling { seed, top_k: 20, frequency_penalty: 0.5, ..Sampling::default() },
    };
    let limits = Limits { max_tokens, stop_tokens: vec![TokenId(3)], min_tokens: 4 };
    Submission { prompt, sampling, limits, ..Submission::default() }
}
