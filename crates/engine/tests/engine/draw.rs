//! Tokens that a device chooses are those that the engine would have chosen.

use nuthatch_backend::{BatchLayout, DeviceError, Draw};
use nuthatch_engine::{Execute, Executor, Forward, Pages};
use nuthatch_types::{
    PageCopy, PageShift, Sampling, SeqId, SeqStart, SeqStep, Slot, StepPlan, TableChange, TokenId,
};

use crate::echo::{CAPACITY, Echo, Script, VOCAB, submission};

/// A model whose device chooses, by sums in `f64` over sorted tokens.
struct Drawing(Echo);

impl Pages for Drawing {}

impl Forward for Drawing {
    fn vocab(&self) -> u32 {
        self.0.vocab()
    }

    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError> {
        self.0.write_table(row, start, slots)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError> {
        self.0.copy_pages(copies)
    }

    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError> {
        self.0.shift_pages(shifts)
    }

    fn forward(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        self.0.forward(layout, logits)
    }

    fn hidden_len(&self) -> usize {
        self.0.hidden_len()
    }

    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        self.0.hidden(hidden)
    }

    fn look_back(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        self.0.look_back(layout, logits)
    }

    fn draws(&self) -> bool {
        true
    }

    fn forward_and_draw(
        &mut self,
        layout: &BatchLayout,
        draws: &[Draw],
        tokens: &mut [Option<u32>],
    ) -> Result<(), DeviceError> {
        let mut logits = vec![0.0; draws.len() * VOCAB as usize];
        self.0.forward(layout, &mut logits)?;
        let rows = logits.chunks_exact_mut(VOCAB as usize).zip(draws);
        tokens.iter_mut().zip(rows).for_each(|(token, (row, draw))| *token = choose(row, draw));
        Ok(())
    }
}

fn choose(logits: &mut [f32], draw: &Draw) -> Option<u32> {
    if logits.iter().any(|x| x.is_nan()) {
        return None;
    }
    for moved in &draw.moved {
        let logit = &mut logits[moved.token as usize];
        *logit = moved.apply(*logit);
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if draw.temperature == 0.0 {
        return Some(order[0] as u32);
    }
    let max = logits[order[0]];
    let weight = |i: usize| (f64::from(logits[i] - max) / f64::from(draw.temperature)).exp();
    order.truncate(if draw.top_k > 0 { draw.top_k as usize } else { usize::MAX });
    let limit = f64::from(draw.top_p) * order.iter().map(|&i| weight(i)).sum::<f64>();
    let mut before = 0.0;
    order.retain(|&i| {
        let is_kept = draw.top_p == 1.0 || before < limit;
        before += weight(i);
        is_kept && weight(i) >= f64::from(draw.min_p)
    });
    order.sort_unstable();
    let mut left = draw.uniform * order.iter().map(|&i| weight(i)).sum::<f64>();
    let found = order.iter().find(|&&i| {
        left -= weight(i);
        left < 0.0
    });
    found.or(order.last()).map(|&i| i as u32)
}

/// Every kind of request, alone; and beside one that wants logarithms for some steps, which the
/// engine has to choose for then.
#[test]
fn a_device_that_chooses_gives_the_same_tokens() {
    const N_TOKENS: u32 = 12;
    for seed in 0..24 {
        let request = submission(seed, 6, N_TOKENS);
        let sampling = Sampling { n_logprobs: None, ..request.sampling.clone() };
        let mut here = Executor::new(Echo::new(CAPACITY, Script::default()), CAPACITY);
        let mut there = Executor::new(Drawing(Echo::new(CAPACITY, Script::default())), CAPACITY);
        let mut plan = StepPlan {
            started: vec![start(1, &sampling, &request.prompt)],
            seqs: [step(1, 0, &request.prompt, &[1, 2, 3, 4, 5].map(Slot))].into(),
            ..StepPlan::default()
        };
        let other = Sampling { n_logprobs: Some(2), ..Sampling::greedy() };
        for i in 0..N_TOKENS {
            let (expected, got) = (here.run(&plan).unwrap(), there.run(&plan).unwrap());
            assert_eq!(got, expected, "token {i} of {sampling:?}");
            let next = expected.sampled[0].token;
            plan = StepPlan::default();
            plan.seqs.push(step(1, 6 + i, &[next], &[1, 2, 3, 4, 5].map(Slot)));
            if i == 4 {
                plan.started.push(start(2, &other, &request.prompt));
            }
            if (4..7).contains(&i) {
                plan.seqs.push(step(2, i - 4, &request.prompt[..1], &[6, 7].map(Slot)));
            }
            if i == 7 {
                plan.ended.push(SeqId(2));
            }
        }
    }
}

fn start(seq: u64, sampling: &Sampling, prompt: &[TokenId]) -> SeqStart {
    let (sampling, history, n_prompt) = (sampling.clone(), prompt.to_vec(), prompt.len() as u32);
    SeqStart { seq: SeqId(seq), sampling, history, n_prompt }
}

fn step<'a>(seq: u64, start: u32, tokens: &'a [TokenId], push: &'a [Slot]) -> SeqStep<'a> {
    let (seq, table) = (SeqId(seq), TableChange { keep: 0, push });
    SeqStep { seq, start, shift: 0, tokens, table, sample: true }
}
