//! The limits of the scheduler, fixed for its life.

use thiserror::Error;

/// The limits of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most tokens computed in one step, over all sequences.
    pub max_batched_tokens: u32,
    /// Most sequences that have pages at one time.
    pub max_seqs: u32,
    /// Most requests that wait at one time; more are refused.
    pub max_waiting: u32,
    /// Most tokens of a sequence, prompt and answer together.
    pub max_context: u32,
    /// Tokens that a token sees in every layer of the model, itself included; `None` when some layer
    /// sees everything. Pages before it are freed while a sequence runs.
    pub window: Option<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            max_batched_tokens: 512,
            max_seqs: 64,
            max_waiting: 4096,
            max_context: 8192,
            window: None,
        }
    }
}

impl Config {
    /// Checks every number against its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = |value: u32, field: &'static str| {
            if value == 0 { Err(ConfigError::Zero { field }) } else { Ok(()) }
        };
        positive(self.max_batched_tokens, "max_batched_tokens")?;
        positive(self.max_seqs, "max_seqs")?;
        positive(self.max_waiting, "max_waiting")?;
        positive(self.window.unwrap_or(1), "window")?;
        if self.max_context < 2 {
            return Err(ConfigError::NoContext { max_context: self.max_context });
        }
        // Decoding sequences come first in a step. Were they more than the budget, a prompt could
        // wait for ever behind them.
        if self.max_seqs > self.max_batched_tokens {
            return Err(ConfigError::BudgetTooSmall {
                max_batched_tokens: self.max_batched_tokens,
                max_seqs: self.max_seqs,
            });
        }
        Ok(())
    }
}

/// Limits under which nothing could run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A limit of nothing.
    #[error("{field} is 0, but must be at least 1")]
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// No room for a prompt and an answer.
    #[error("max_context is {max_context}, but a prompt and an answer need at least 2")]
    NoContext {
        /// What was given.
        max_context: u32,
    },
    /// A step could not serve every running sequence.
    #[error("max_batched_tokens ({max_batched_tokens}) is less than max_seqs ({max_seqs})")]
    BudgetTooSmall {
        /// Tokens of one step.
        max_batched_tokens: u32,
        /// Sequences that may run at one time.
        max_seqs: u32,
    },
}
