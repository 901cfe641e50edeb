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
    /// No answer was asked for.
    #[error("n is 0, but must be at least 1")]
    NoAnswers,
    /// More answers were asked for than may wait. Fewer, or the same later, may be accepted.
    #[error("n is {n}, but only {room} more requests may wait")]
    TooManyAnswers {
        /// Answers that were asked for.
        n: u32,
        /// Requests that may wait beside those that do.
        room: u32,
    },
    /// More answers were asked for than a beam search follows.
    #[error("n is {n}, but must be at most the beam width of {width}")]
    TooManyBeams {
        /// Answers that were asked for.
        n: u32,
        /// Answers that are followed at one time.
        width: u32,
    },
    /// Beams share pages, and a stream moves them.
    #[error("beam search and streaming attention need --kv-layout paged")]
    NoSharing,
    /// Beams share what they have in common, and a stream drops it.
    #[error("a beam search cannot stream")]
    StreamingBeams,
    /// Beams follow what is most probable, and a form is kept by one answer at a time.
    #[error("a beam search cannot keep a form")]
    FormOfBeams,
    /// Beams take each other's place, and a prompt is read with one answer.
    #[error("a beam search does not tell about all tokens of its prompt")]
    PromptOfBeams,
    /// The engine has too many commands before it. The same request may be accepted later.
    #[error("the engine is too busy to take another request")]
    Busy,
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
