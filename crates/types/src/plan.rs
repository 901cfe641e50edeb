//! What the scheduler asks of the executor, and what it gets back: plain data, by value.
//!
//! A plan says only what changes. The executor keeps each sequence's table of slots and its
//! sampler, so that a decode step costs the same at any context length.

use crate::{Sampling, SeqId, SeqSteps, Slot, TokenId};

/// Everything the executor needs for one forward pass, in the order in which it is applied:
/// `ended`, `started`, `copies`, `shifts`, `seqs`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Sequences that the executor forgets.
    pub ended: Vec<SeqId>,
    /// Sequences that the executor has not seen before.
    pub started: Vec<SeqStart>,
    /// Pages whose bytes move before the pass, in order: the source of one copy may be the target of
    /// an earlier one.
    pub copies: Vec<PageCopy>,
    /// Pages of the device that are written anew, their keys at other positions, in order.
    pub shifts: Vec<PageShift>,
    /// The batch. It is empty when there are only copies to make.
    pub seqs: SeqSteps,
}

/// A sequence that the executor has not seen before.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqStart {
    /// The sequence.
    pub seq: SeqId,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// The tokens that penalties look back on: the prompt, then what was generated before the
    /// sequence came to the executor. Later ones are added by the executor, when they are sampled
    /// or, if they are the caller's choice, when they are computed.
    pub history: Vec<TokenId>,
    /// How many of `history` are the prompt's.
    pub n_prompt: u32,
}

/// One page's bytes copied from slot to slot. The slots' numbers say in which tiers they are: see
/// [`KvSlots`](crate::KvSlots).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Where the bytes are.
    pub source: Slot,
    /// Where they go.
    pub target: Slot,
}

/// One page written from another: values as they are, keys turned by `by` positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShift {
    /// Where the keys and values are. It may be the target.
    pub source: Slot,
    /// Where they go.
    pub target: Slot,
    /// Positions that are added to those of the keys.
    pub by: i32,
}

/// What the executor gives back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// One entry for each [`SeqStep`](crate::SeqStep) that asked for a sample and is not in `failed`,
    /// in the order of the plan.
    pub sampled: Vec<Sampled>,
    /// Sequences whose logits were no numbers to choose by, in the order of the plan. They end; the
    /// others are as if these were not there.
    pub failed: Vec<SeqId>,
    /// What the plan's copies took, in nanoseconds; 0 when it was not measured.
    pub copy_nanos: u64,
    /// What its passes took, or the wait for one that was queued before, in nanoseconds; 0 when it was not measured.
    pub compute_nanos: u64,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The sequence.
    pub seq: SeqId,
    /// The token. Where the caller chooses ([`Sampling::n_candidates`]), the best candidate.
    pub token: TokenId,
    /// Natural logarithm of the token's probability before penalties, temperature and filters, if
    /// logarithms were asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens and their logarithms, as many as were asked for, best first. Where
    /// the caller chooses, the candidates and their scores.
    pub top: Vec<(TokenId, f32)>,
}
