//! `nuthatch batch`, checked.

use std::path::{Path, PathBuf};

use super::{EngineConfig, model_or_default};
use crate::args::BatchArgs;
use crate::resolve::ModelSpec;

/// Sequences at one time, unless the user says otherwise. On two cores more give hardly more; see
/// docs/batch.md for the measurement.
pub(crate) const BATCH_SEQS: u32 = 16;

/// `nuthatch batch`, checked.
#[derive(Clone, Debug)]
pub(crate) struct BatchConfig {
    pub(crate) model: ModelSpec,
    pub(crate) input: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) as_json: bool,
    pub(crate) engine: EngineConfig,
}

impl BatchConfig {
    /// Checks the arguments.
    pub(crate) fn new(args: &BatchArgs) -> anyhow::Result<Self> {
        Ok(BatchConfig {
            model: model_or_default(args.model.as_deref())?,
            input: args.input.clone(),
            output: args.output.clone().unwrap_or_else(|| default_output(&args.input)),
            as_json: args.json,
            engine: EngineConfig::new(&args.engine, BATCH_SEQS)?,
        })
    }
}

/// `requests.jsonl` gives `requests.out.jsonl`.
fn default_output(input: &Path) -> PathBuf {
    input.with_extension("out.jsonl")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_lies_beside_the_input() {
        assert_eq!(default_output(Path::new("a/b.jsonl")), Path::new("a/b.out.jsonl"));
        assert_eq!(default_output(Path::new("b")), Path::new("b.out.jsonl"));
    }
}
