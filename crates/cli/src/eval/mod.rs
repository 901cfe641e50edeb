//! `nuthatch eval`: what policies of top-k attention, and pages in fewer bits, do to answers.
//!
//! `tasks` makes prompts like RULER's, `longbench` reads LongBench's, `runner` lets every policy continue each of them, `results`
//! keeps what was found. A run that was interrupted goes on where it stopped.

mod longbench;
mod overlap;
mod prompts;
mod results;
mod runner;
mod tasks;
mod trace;
mod words;

use std::io::{self, Write as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use nuthatch_backend::Backend;
use nuthatch_backend_cuda::{Cuda, FarPages};
use nuthatch_engine::topk::{Counts, Policy, Retriever};
use nuthatch_model::ModelFiles;
use nuthatch_tokens::DecodeOptions;
use nuthatch_types::{ColdKv, HeadSet, KvDtype, LayerSet, TokenId};

use crate::args::{EvalArgs, OffloadArg};
use crate::chart::Figure;
use crate::config::{self, EngineConfig};
use crate::device::{Device, DeviceConfig};
use crate::fetch::{self, Fetch};
use crate::load;
use crate::resolve::ModelSpec;
use crate::sparse;
use longbench::Dataset;
use overlap::Overlaps;
pub(crate) use prompts::Prompts;
use results::{Record, Results};
use runner::{Continuation, Ending, Runner};
pub(crate) use tasks::TaskName;
use trace::Trace;

/// Tokens that are continued with and measured, of a text.
const N_MEASURED: usize = 256;
/// Characters of an answer that are kept.
const ANSWER_CHARS: usize = 160;

/// Everything that stays the same.
struct Eval<'a> {
    args: &'a EvalArgs,
    tasks: Vec<TaskName>,
    datasets: Vec<Dataset>,
    /// How prompts are continued, and what their pages went through before.
    ways: Vec<(Policy, Option<ColdKv>)>,
    /// Other types of the whole KV cache, with which prompts are continued exactly.
    caches: Vec<KvDtype>,
    /// The names of both.
    policies: Vec<String>,
    prompts: Prompts,
    fetch: &'a Fetch<'a>,
}

/// One prompt.
struct Cell<'a> {
    sample: u32,
    length: u32,
    task: Task<'a>,
}

/// What is asked.
#[derive(Clone, Copy)]
enum Task<'a> {
    Made(TaskName),
    LongBench(&'a Dataset),
}

impl<'a> Task<'a> {
    fn name(self) -> &'a str {
        match self {
            Task::Made(task) => task.name(),
            Task::LongBench(dataset) => &dataset.name,
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &EvalArgs, config: &EngineConfig, fetch: &Fetch<'_>) -> anyhow::Result<()> {
    let spec = args.model.as_deref().or(args.first.as_deref());
    let spec = spec.map_or_else(|| Ok(ModelSpec::default_model()), ModelSpec::parse)?;
    let datasets = args.longbench.as_deref().map(longbench::load).transpose()?.unwrap_or_default();
    let tasks = match args.task.is_empty() {
        true if datasets.is_empty() => vec![TaskName::Single1],
        _ => TaskName::parse_all(&args.task).map_err(anyhow::Error::msg)?,
    };
    let mut files = ModelFiles::open(&fetch::fetch(&spec, fetch)?)?;
    files.override_rope(&config.rope)?;
    let prompts = Prompts::load(&files, args.text.as_deref())?;
    let ways = ways(args)?;
    let is_full = |(policy, cold): &(Policy, Option<ColdKv>)| {
        policy.retriever == Retriever::Full && cold.is_none()
    };
    ensure!(
        !tasks.contains(&TaskName::Perplexity) || ways.first().is_some_and(is_full),
        "ppl measures how far policies are from the first one: let that be --policy full"
    );
    let policies = ways.iter().map(|(policy, cold)| match cold {
        None => policy.to_string(),
        Some(cold) => format!("{policy}, pages as {cold}"),
    });
    let caches = args.cache.iter().map(|&dtype| config::kv_dtype(&args.engine, dtype));
    let caches = caches.collect::<Result<Vec<_>, _>>()?;
    let policies = policies.chain(caches.iter().map(|dtype| format!("full, cache as {dtype}")));
    let far = config.sparse.kv_offload.as_ref().and(config.sparse.far_way().code);
    let policies = policies.map(|policy| match far {
        Some(code) => format!("{policy}, rows as {code}"),
        None => policy,
    });
    let policies = policies.collect();
    let new = Results {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        model: load::model_name(files.path()),
        fingerprint: sparse::fingerprint(&files)?,
        seed: args.seed,
        trace: None,
        records: Vec::new(),
    };
    let mut results = new.clone();
    for path in args.json.iter().chain(&args.add) {
        ensure!(path.is_file() || args.json.as_ref() == Some(path), "no {}", path.display());
        let known = Results::resume(path, new.clone())?;
        if args.json.as_ref() == Some(path) {
            results.trace = known.trace;
        }
        results.replace(known.records);
    }
    let eval = Eval { args, tasks, datasets, ways, caches, policies, prompts, fetch };
    ensure!(!config.kv_virtual, "--kv-layout virtual is for answering and measuring");
    let device = Device::open(&DeviceConfig {
        device: config.device,
        threads: config.threads,
        is_exact: config.is_exact,
        kernel_dir: fetch.env.kernel_dir(),
        kv_file: config.sparse.kv_file(),
        kv_virtual: config.kv_virtual,
        far: config.sparse.far_way(),
    })?;
    match device {
        Device::Cpu(cpu) => eval.all(cpu, &files, config, &mut results)?,
        Device::Cuda(cuda) => eval.on_gpu(cuda, &files, config, &mut results)?,
    }
    if let Some(path) = &args.plot {
        write_figure(path, &results.figure(&eval.policies))?;
    }
    Ok(io::stdout().lock().write_all(results.table(&eval.policies).as_bytes())?)
}

/// The policies, and for each type of stored pages exact attention.
fn ways(args: &EvalArgs) -> anyhow::Result<Vec<(Policy, Option<ColdKv>)>> {
    let mut ways: Vec<_> = args.policy.iter().map(|policy| (*policy, None)).collect();
    for &dtype in &args.cold {
        ways.push(("full".parse()?, args.engine.cold_kv_as(dtype)));
    }
    Ok(ways)
}

fn write_figure(path: &Path, figure: &Figure) -> anyhow::Result<()> {
    std::fs::write(path, figure.svg()).with_context(|| format!("cannot write {}", path.display()))
}

impl Eval<'_> {
    /// On a GPU, which keeps what it needs near by itself.
    fn on_gpu(
        &self,
        mut cuda: Arc<Cuda>,
        files: &ModelFiles,
        config: &EngineConfig,
        results: &mut Results,
    ) -> anyhow::Result<()> {
        let mut config = config.clone();
        match config.sparse.kv_offload.take() {
            None => {}
            Some(OffloadArg::Disk(_)) => bail!("--kv-offload disk: a GPU reads the host's memory"),
            Some(OffloadArg::Host) => {
                let way = config.sparse.far_way();
                let longest = self.args.length.iter().copied().max().unwrap_or(0);
                // The prompt has copies, so that what is measured is decoding.
                let n_near = (longest + N_MEASURED as u32) / 16 + 64 * self.policies.len() as u32;
                let cuda = Arc::get_mut(&mut cuda).context("a device that nobody uses yet")?;
                cuda.keep_far(FarPages {
                    n_near,
                    resident: LayerSet::NONE,
                    n_threads: way.n_threads,
                    code: way.code,
                    coded_here: HeadSet::NONE,
                    fails_after: None,
                });
            }
        }
        self.all(cuda, files, &config, results)
    }

    fn all<B: Backend>(
        &self,
        backend: Arc<B>,
        files: &ModelFiles,
        config: &EngineConfig,
        results: &mut Results,
    ) -> anyhow::Result<()> {
        let longest = self.args.length.iter().copied().max().unwrap_or(0);
        let context = files.config().max_context;
        ensure!(longest <= context, "--length is {longest}, but the model's context {context}");
        let (policies, colds): (Vec<Policy>, Vec<_>) = self.ways.iter().cloned().unzip();
        let options = sparse::options_of(files, &policies, &config.sparse, self.fetch.env)?;
        let sizes = (longest + N_MEASURED as u32, KvDtype::F16);
        let main = Runner::new(Arc::clone(&backend), files, &options, &colds, sizes)?;
        let mut runner = Runners { main, n_ways: self.ways.len(), caches: Vec::new() };
        let full = ["full".parse()?];
        for &dtype in &self.caches {
            let options = sparse::options_of(files, &full, &config.sparse, self.fetch.env)?;
            let (backend, sizes) = (Arc::clone(&backend), (sizes.0, dtype));
            runner.caches.push(Runner::new(backend, files, &options, &[None], sizes)?);
        }
        if self.args.mass {
            runner.main.measure_mass();
        }
        let goes_on = self.args.json.as_ref().is_some_and(|path| path.is_file());
        let path = self.args.record_trace.as_deref();
        let goes_on_at = path.filter(|_| goes_on).map(|path| results.trace_bytes(path));
        let mut trace = Trace::open(path, goes_on_at)?;
        let mut overlaps = Overlaps::new(self.policies.len());
        if self.args.record_trace.is_some() || self.args.overlap_plot.is_some() {
            runner.main.record();
        }
        let _running = self.fetch.interrupt.begin();
        for Cell { sample, length, task } in self.cells()? {
            let is_done = |policy: &String| results.has(task.name(), length, sample, policy);
            let missing: Vec<usize> =
                (0..self.policies.len()).filter(|&i| !is_done(&self.policies[i])).collect();
            if missing.is_empty() {
                continue;
            }
            if self.fetch.interrupt.requested() {
                return Ok(());
            }
            let Some(records) = self.one(&mut runner, &missing, (task, length, sample))? else {
                let name = task.name();
                let _ = writeln!(
                    io::stderr(),
                    "{name} does not fit into {length} tokens, or has no question {sample}: skipped"
                );
                continue;
            };
            results.replace(records);
            let decisions = runner.main.take_trace();
            overlaps.add(&decisions);
            if let (Some(path), Some(bytes)) = (path, trace.write(&decisions)?) {
                results.trace_ends(path, bytes)?;
            }
            if let Some(path) = &self.args.json {
                results.save(path)?;
            }
            // A closed stderr is no reason to stop.
            let _ = writeln!(io::stderr(), "{} @ {length}, {sample}: done", task.name());
        }
        match &self.args.overlap_plot {
            Some(path) => write_figure(path, &overlaps.figure(&results.model, &self.policies)),
            None => Ok(()),
        }
    }

    /// This process's prompts: the first of every task and length, then the second, and so on, so
    /// that a part of them already says something about all.
    fn cells(&self) -> anyhow::Result<Vec<Cell<'_>>> {
        let lengths = &self.args.length;
        let samples = match self.args.samples.as_slice() {
            [one] => vec![one.clone(); lengths.len()],
            list => list.to_vec(),
        };
        let (n_samples, n_lengths) = (samples.len(), lengths.len());
        ensure!(n_samples == n_lengths, "--samples has {n_samples} numbers, --length {n_lengths}");
        let made = self.tasks.iter().map(|&task| Task::Made(task));
        let tasks: Vec<Task<'_>> = made.chain(self.datasets.iter().map(Task::LongBench)).collect();
        let mut cells = Vec::new();
        for sample in 0..samples.iter().map(|range| range.end).max().unwrap_or(0) {
            let is_in = |(_, range): &(_, &Range<u32>)| range.contains(&sample);
            for (&length, _) in lengths.iter().zip(&samples).filter(is_in) {
                cells.extend(tasks.iter().map(|&task| Cell { sample, length, task }));
            }
        }
        let (first, step) = self.args.shard;
        Ok(cells.into_iter().skip(first as usize).step_by(step as usize).collect())
    }

    /// What the policies answer; nothing if the question does not fit.
    fn one<B: Backend>(
        &self,
        runner: &mut Runners<B>,
        missing: &[usize],
        (task, length, sample): (Task<'_>, u32, u32),
    ) -> anyhow::Result<Option<Vec<Record>>> {
        // Another seed for each prompt, whatever the other tasks and lengths are.
        let seed = self.args.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(sample));
        let (prompt, n_answer, made) = match task {
            Task::Made(TaskName::Perplexity) => {
                return self.continue_text(runner, length, sample).map(Some);
            }
            Task::Made(task) => {
                let Some((made, prompt)) = self.prompts.fit(task, length, seed)? else {
                    return Ok(None);
                };
                (prompt, made.n_answer, Some(made))
            }
            Task::LongBench(dataset) => {
                let Some(prompt) = self.prompts.cut(dataset, length, sample)? else {
                    return Ok(None);
                };
                (prompt, dataset.n_answer, None)
            }
        };
        let score = |answer: &str| match (task, &made) {
            (Task::LongBench(dataset), _) => dataset.score(sample, answer),
            (Task::Made(_), made) => made.as_ref().map_or(0.0, |made| made.score(answer)),
        };
        let n_tokens = n_answer as usize;
        let ending = Ending { n_tokens, ends: &self.prompts.text.ends, given: None };
        let found = runner.run(&prompt, missing, &ending)?;
        let records = missing.iter().map(|&i| {
            let (policy, found) = (&self.policies[i], &found[i]);
            let answer =
                self.prompts.text.tokenizer.decode(&found.tokens, DecodeOptions::default());
            Record {
                score: score(&answer),
                answer: answer.chars().take(ANSWER_CHARS).collect(),
                ..record(task.name(), (length, sample), policy, &prompt, found)
            }
        });
        Ok(Some(records.collect()))
    }

    /// Continues a part of the text with its own tokens.
    fn continue_text<B: Backend>(
        &self,
        runner: &mut Runners<B>,
        length: u32,
        sample: u32,
    ) -> anyhow::Result<Vec<Record>> {
        let text = self.prompts.prose_tokens()?;
        let n = length as usize;
        ensure!(n > N_MEASURED && text.len() >= n, "the text has {} tokens, not {n}", text.len());
        let room = text.len() - n;
        // Spread over the text by the golden ratio, however many samples there will be.
        let start = (room as f64 * (f64::from(sample) * 0.618_033_988_75).fract()) as usize;
        let (prompt, rest) = text[start..start + n].split_at(n - N_MEASURED);
        let ending = Ending { n_tokens: N_MEASURED, ends: &[], given: Some(rest) };
        // Divergences are from the first, so none can be left out.
        let all: Vec<usize> = (0..self.policies.len()).collect();
        let found = runner.run(prompt, &all, &ending)?;
        let per_token = |sum: f64| sum / N_MEASURED as f64;
        let records = self.policies.iter().zip(&found).map(|(policy, found)| Record {
            score: per_token(found.nll),
            kl: Some(per_token(found.kl)),
            ..record(TaskName::Perplexity.name(), (length, sample), policy, prompt, found)
        });
        Ok(records.collect())
    }
}

/// The model with the cache of most ways, and with each other cache.
struct Runners<B: Backend> {
    main: Runner<B>,
    n_ways: usize,
    caches: Vec<Runner<B>>,
}

impl<B: Backend> Runners<B> {
    /// As [`Runner::run`], policies of all caches counted together.
    fn run(
        &mut self,
        prompt: &[TokenId],
        policies: &[usize],
        ending: &Ending<'_>,
    ) -> anyhow::Result<Vec<Continuation>> {
        let mut exact = Vec::new();
        let first: Vec<usize> = policies.iter().copied().filter(|&i| i < self.n_ways).collect();
        let mut found = self.main.run(prompt, &first, ending, &mut exact)?;
        for (i, cache) in (self.n_ways..).zip(&mut self.caches) {
            found.extend(match policies.contains(&i) {
                true => cache.run(prompt, &[0], ending, &mut exact)?,
                false => vec![Continuation::default()],
            });
        }
        Ok(found)
    }
}

fn record(
    task: &str,
    (length, sample): (u32, u32),
    policy: &str,
    prompt: &[TokenId],
    found: &Continuation,
) -> Record {
    let counts: &Counts = &found.counts;
    Record {
        task: task.to_owned(),
        length,
        sample,
        policy: policy.to_owned(),
        n_prompt: prompt.len() as u32,
        n_answer: found.tokens.len() as u32,
        score: 0.0,
        kl: None,
        live_hits: counts.live_hit_ratio(),
        frozen_hits: counts.frozen_hit_ratio(),
        // Only soft policies have them.
        late: counts.late_ratio().filter(|&ratio| ratio > 0.0),
        attended: counts.attended_share(),
        moved: counts.moved_share(),
        mass: counts.mass_recall(),
        important_mass: counts.important_mass_recall(),
        answer: String::new(),
    }
}
