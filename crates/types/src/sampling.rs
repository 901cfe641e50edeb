//! How a sequence's tokens are chosen and when it ends.

use crate::TokenId;

/// How the next token is chosen from the logits.
///
/// The order is: penalties, logit bias, temperature, top-k, top-p, min-p, draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most probable token; 1 samples the model's own distribution.
    pub temperature: f32,
    /// Only the `top_k` most probable tokens may be drawn; 0 means all.
    pub top_k: u32,
    /// Only the most probable tokens whose probabilities sum to `top_p` may be drawn; 1 means all.
    pub top_p: f32,
    /// Only tokens at least `min_p` times as probable as the best may be drawn; 0 means all.
    pub min_p: f32,
    /// Logits of tokens seen in prompt or answer are divided (if positive) or multiplied by it.
    pub repetition_penalty: f32,
    /// Subtracted once for each time a token was generated.
    pub frequency_penalty: f32,
    /// Subtracted once if a token was generated.
    pub presence_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Seed of the sequence's own random stream.
    pub seed: u64,
    /// Whether each token comes with the logarithm of its probability, and how many of the most
    /// probable tokens come with it. `None` saves a pass over the vocabulary.
    pub n_logprobs: Option<u32>,
    /// 0 draws a token. Otherwise none is drawn: the caller gets this many of the best tokens,
    /// each with the logarithm of its probability changed by penalties and bias, and says which
    /// one it is. Temperature and filters do not count then.
    pub n_candidates: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            n_logprobs: None,
            n_candidates: 0,
        }
    }
}

impl Sampling {
    /// Takes the most probable token, always.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Checks every number against its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |ok: bool, field: &'static str, value: f32, allowed: &'static str| {
            if ok { Ok(()) } else { Err(SamplingError { field, value, allowed }) }
        };
        // Comparisons with NaN are false, so NaN is refused everywhere.
        let t = self.temperature;
        check((0.0..=100.0).contains(&t), "temperature", t, "0 to 100")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "0 to 1")?;
        let r = self.repetition_penalty;
        check(r > 0.0 && r <= 100.0, "repetition_penalty", r, "above 0, at most 100")?;
        let f = self.frequency_penalty;
        check((-2.0..=2.0).contains(&f), "frequency_penalty", f, "-2 to 2")?;
        let p = self.presence_penalty;
        check((-2.0..=2.0).contains(&p), "presence_penalty", p, "-2 to 2")?;
        for &(_, bias) in &self.logit_bias {
            check((-100.0..=100.0).contains(&bias), "logit_bias", bias, "-100 to 100")?;
        }
        Ok(())
    }
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingError {
    /// Name of the parameter, as users type it.
    pub field: &'static str,
    /// What was given.
    pub value: f32,
    /// What is allowed.
    pub allowed: &'static str,
}

impl std::fmt::Display for SamplingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is {}, but must be {}", self.field, self.value, self.allowed)
    }
}

impl std::error::Error for SamplingError {}

/// When a sequence ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Tokens that end the sequence; they are not part of the answer.
    pub stop_tokens: Vec<TokenId>,
    /// Stop tokens are ignored until this many tokens were generated.
    pub min_tokens: u32,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled, or a stop string was found.
    Stop,
    /// The token limit or the context length was reached.
    Length,
    /// The user left or cancelled.
    Cancelled,
    /// The device failed, or no token could be chosen.
    Failed,
}

impl FinishReason {
    /// What users are told of an answer that failed on a device that did not.
    pub const NO_TOKEN: &str = "the engine gave no answer: its logits were no numbers, or the \
        form that was asked for allowed no token";
}
