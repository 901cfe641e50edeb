//! `nuthatch bench`, checked.

use std::path::PathBuf;

use super::{ConfigError, EngineConfig, model_or_default};
use crate::args::BenchArgs;
use crate::resolve::ModelSpec;

/// Tokens of the sequence that warms an engine up before it is measured.
pub(crate) const WARM_UP_TOKENS: u32 = 80;

/// `nuthatch bench`, checked.
#[derive(Clone, Debug)]
pub(crate) struct BenchConfig {
    pub(crate) model: ModelSpec,
    /// A built-in shape with random weights, instead of the model.
    pub(crate) shape: Option<String>,
    /// Tokens of prefill tests.
    pub(crate) prompts: Vec<u32>,
    /// Tokens of decode tests.
    pub(crate) generates: Vec<u32>,
    pub(crate) depths: Vec<u32>,
    pub(crate) repeat: u32,
    /// Where tokens come from, if they are not made up.
    pub(crate) text: Option<PathBuf>,
    pub(crate) json: Option<PathBuf>,
    pub(crate) breakdown: bool,
    pub(crate) engine: EngineConfig,
}

impl BenchConfig {
    /// Checks the arguments.
    pub(crate) fn new(args: &BenchArgs) -> anyhow::Result<Self> {
        let model = match (&args.first, &args.model) {
            (Some(first), Some(second)) => {
                let (first, second) = (first.clone(), second.clone());
                return Err(ConfigError::Twice { what: "the model", first, second }.into());
            }
            (first, second) => first.as_deref().or(second.as_deref()),
        };
        let tests = |values: &[u32]| values.iter().copied().filter(|&n| n > 0).collect::<Vec<_>>();
        let (prompts, generates) = (tests(&args.prompt), tests(&args.generate));
        if prompts.is_empty() && generates.is_empty() {
            return Err(ConfigError::NoTests.into());
        }
        if args.repeat == 0 {
            return Err(ConfigError::Zero("--repeat").into());
        }
        Ok(BenchConfig {
            model: model_or_default(model)?,
            shape: args.shape.clone(),
            prompts,
            generates,
            depths: args.depth.clone(),
            repeat: args.repeat,
            text: args.text.clone(),
            json: args.json.clone(),
            breakdown: args.breakdown,
            engine: EngineConfig::new(&args.engine, 1)?,
        })
    }

    /// Tokens of the longest test's sequence, with room for the token that follows.
    pub(crate) fn longest(&self) -> u32 {
        let test = self.prompts.iter().chain(&self.generates).copied().max().unwrap_or(0);
        let depth = self.depths.iter().copied().max().unwrap_or(0);
        test.saturating_add(depth).saturating_add(2).max(WARM_UP_TOKENS)
    }
}
