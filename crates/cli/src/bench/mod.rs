//! `nuthatch bench`: prefill and decode speed, in llama-bench's terms.
//!
//! The engine's own steps are measured, scheduling and sampling included, on random tokens or those of a text:
//!
//! ```text
//!   ppN @ dD   [ D tokens, not measured ][ N tokens in steps of --max-num-batched-tokens ]
//!   tgN @ dD   [ D tokens, not measured ][ N steps of one token ]
//! ```

mod breakdown;
mod measure;
mod result;
mod serve;

use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, ensure};
use nuthatch_model::{ModelFiles, kv_shape};

use crate::config::BenchConfig;
use crate::fetch::{self, Fetch};
use crate::load::{self, Prepared};
use crate::{plan, text};
use measure::{Bench, Kind, Test, Tokens};
use result::{BenchResult, TestResult};
pub(crate) use serve::run as serve;

/// Runs the command.
pub(crate) fn run(config: &BenchConfig, fetch: &Fetch<'_>) -> anyhow::Result<()> {
    let mut files = match &config.shape {
        Some(name) => ModelFiles::random(plan::shape_config(name)?, Path::new(name)),
        None => ModelFiles::open(&fetch::fetch(&config.model, fetch)?)?,
    };
    files.override_rope(&config.engine.rope)?;
    let mut engine_config = config.engine.clone();
    // Speed does not depend on whether the model makes sense at this length.
    let asked = engine_config.max_context.unwrap_or(0);
    engine_config.max_context = Some(asked.max(config.longest()));
    let prepared = Prepared::with_files(files, &engine_config, fetch.env)?;
    let loaded = prepared.load()?;
    let model = prepared.files.config();
    let tokens = config.text.as_deref().map(|path| read_text(path, &prepared.files)).transpose()?;
    let tokens = tokens.unwrap_or(Tokens::Random(model.vocab));
    let mut bench = Bench::new(loaded.engine, loaded.clock, tokens);
    bench.warm_up()?;
    let mut tests = Vec::new();
    for test in tests_of(config) {
        if io::stderr().is_terminal() {
            // A closed stderr is no reason to stop.
            let _ = writeln!(io::stderr(), "measuring {test}");
        }
        tests.push(TestResult::new(test, bench.measure(test, config.repeat)?));
    }
    let mut breakdowns = Vec::new();
    for test in tests_of(config).into_iter().filter(|_| config.breakdown) {
        breakdowns.push(bench.break_down(test)?);
    }
    let kv = kv_shape(model, prepared.sizes.kv_dtype);
    let far_bytes = u64::from(prepared.sizes.cache().slots().total()) * kv.page_bytes() as u64;
    let result = BenchResult {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("NUTHATCH_COMMIT"),
        model: load::model_name(prepared.files.path()),
        architecture: model.architecture.name(),
        weights_bytes: prepared.files.weight_bytes(),
        n_params: plan::n_params(model),
        device: loaded.device,
        threads: loaded.threads,
        kv_dtype: prepared.sizes.kv_dtype.to_string(),
        max_batched_tokens: prepared.sizes.max_rows,
        overhead: bench.overhead(),
        topk: bench.topk(config.engine.sparse.sparse.as_ref(), (kv, far_bytes)),
        tests,
        breakdowns,
    };
    print(config.json.as_deref(), &result)
}

fn read_text(path: &Path, files: &ModelFiles) -> anyhow::Result<Tokens> {
    let what = || format!("cannot read {}", path.display());
    let tokens =
        text::load(files, true)?.words.raw(&std::fs::read_to_string(path).with_context(what)?)?;
    ensure!(!tokens.is_empty(), "{} is empty", path.display());
    Ok(Tokens::Text(tokens))
}

/// Prefill tests first, then decode tests, each at every depth.
fn tests_of(config: &BenchConfig) -> Vec<Test> {
    let with_depths =
        |kind, tokens: u32| config.depths.iter().map(move |&depth| Test { kind, tokens, depth });
    let prefill = config.prompts.iter().flat_map(|&n| with_depths(Kind::Prefill, n));
    let decode = config.generates.iter().flat_map(|&n| with_depths(Kind::Decode, n));
    prefill.chain(decode).collect()
}

fn print(json: Option<&Path>, result: &BenchResult) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let Some(path) = json else {
        return Ok(out.write_all(result.table().as_bytes())?);
    };
    let mut text = serde_json::to_string_pretty(result)?;
    text.push('\n');
    if path == Path::new("-") {
        return Ok(out.write_all(text.as_bytes())?);
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(out.write_all(result.table().as_bytes())?)
}
