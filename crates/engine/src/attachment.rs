//! What a request brings along for the executor: a form that its answers must have, and somebody who
//! wants to see what the model thinks of its prompt.
//!
//! The engine speaks tokens and knows no grammar. Whoever does gives each request a [`Constraint`],
//! which the executor asks before it chooses and tells what it chose. A constraint that takes time
//! to think should do so on a thread of its own after [`Constraint::accept`]: the next forward pass
//! runs meanwhile.

use std::fmt;
use std::sync::Arc;

use nuthatch_types::TokenId;

use crate::executor::PromptReader;

/// Says which tokens may come next in one answer.
pub trait Constraint: fmt::Debug + Send {
    /// Makes the logits of tokens that may not come next minus infinity. An error ends the answer.
    fn restrict(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError>;

    /// Takes note of the token that was chosen.
    fn accept(&mut self, token: TokenId);
}

/// A constraint that cannot say what may come next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the form of the answer cannot be kept: {0}")]
pub struct ConstraintError(pub String);

/// The form of a request's answers: makes a constraint for each of them.
#[derive(Clone)]
pub struct Form(Arc<dyn Fn() -> Box<dyn Constraint> + Send + Sync>);

impl Form {
    /// A form that constraints keep which `make` makes, each at the begin of an answer.
    pub fn new(make: impl Fn() -> Box<dyn Constraint> + Send + Sync + 'static) -> Self {
        Form(Arc::new(make))
    }

    /// A constraint for one answer.
    pub(crate) fn constraint(&self) -> Box<dyn Constraint> {
        (self.0)()
    }
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Form")
    }
}

/// Takes the model's hidden state of a prompt, which is `[hidden]` floats after the last norm, when
/// the answer's first token is chosen. Called on the engine's thread, so it must not wait.
#[derive(Clone)]
pub struct HiddenSink {
    pooling: Pooling,
    take: Arc<TakeHidden>,
}

/// Which hidden state stands for a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// That of the last token, which has seen the whole prompt. What the cache holds of the others
    /// need not be computed.
    #[default]
    Last,
    /// The mean over all tokens, all of which are computed for it.
    Mean,
}

type TakeHidden = dyn Fn(&[f32]) + Send + Sync;

impl Pooling {
    /// Its name, as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Last => "last",
            Pooling::Mean => "mean",
        }
    }
}

impl HiddenSink {
    /// A sink that gives the state of the last token to `take`.
    pub fn new(take: impl Fn(&[f32]) + Send + Sync + 'static) -> Self {
        HiddenSink { pooling: Pooling::Last, take: Arc::new(take) }
    }

    /// The same sink for another state.
    #[must_use]
    pub fn with_pooling(self, pooling: Pooling) -> Self {
        HiddenSink { pooling, ..self }
    }

    pub(crate) fn pooling(&self) -> Pooling {
        self.pooling
    }

    pub(crate) fn send(&self, hidden: &[f32]) {
        (self.take)(hidden);
    }
}

impl fmt::Debug for HiddenSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HiddenSink")
    }
}

/// What the executor keeps for one sequence besides its table and its sampler.
#[derive(Debug, Default)]
pub struct Attachment {
    /// Which tokens may come next.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Who wants the hidden state of the prompt's last token; taken when it was sent.
    pub hidden: Option<HiddenSink>,
    /// Who reads all rows of the prompt. The sequence must compute them all.
    pub prompt: Option<PromptReader>,
}
