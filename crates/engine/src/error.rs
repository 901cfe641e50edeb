//! What can go wrong with a request and with the engine.

use nuthatch_backend::DeviceError;
use nuthatch_types::TokenId;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The scheduler cannot take it.
    #[error(transparent)]
    Refused(#[from] nuthatch_scheduler::SubmitError),
    /// A token of the prompt or of the logit bias is not one of the model's.
    #[error("token {} is not in the vocabulary of {vocab} tokens", token.0)]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// The engine failed before and does no more work.
    #[error("the engine has failed: {reason}")]
    Failed {
        /// The failure, in its own words.
        reason: String,
    },
    /// The engine was shut down.
    #[error("the engine has stopped")]
    Stopped,
}

/// Why an engine does no more work.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An invariant of scheduler or cache does not hold: a bug.
    #[error("the engine's bookkeeping is broken: {0}")]
    Broken(#[from] nuthatch_scheduler::Fault),
    /// An assertion failed on the engine's thread: a bug.
    #[error("the engine's thread has panicked")]
    Panicked,
    /// The engine's thread could not be started.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}
