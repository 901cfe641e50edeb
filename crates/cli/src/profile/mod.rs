//! `nuthatch profile`: what top-k attention wants to know of a model's heads.

mod hash;
mod heatmap;

use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nuthatch_backend::{Backend, BatchLayout};
use nuthatch_engine::topk::Profile;
use nuthatch_engine::{Budget, Forward as _, LoadedModel, SizeRequest, Sizes};
use nuthatch_model::{ModelFiles, Restriction, topk_shape};
use nuthatch_types::{KvDtype, Slot, TokenId};

use crate::args::ProfileArgs;
use crate::config::EngineConfig;
use crate::device::{Device, DeviceConfig, FarWay};
use crate::eval::{Prompts, TaskName};
use crate::fetch::{self, Fetch};
use crate::resolve::ModelSpec;
use crate::sparse;

/// What a head under trial still sees: DuoAttention's choice.
const RESTRICTION: Restriction = Restriction { sinks: 16, recent: 64 };
/// Tokens of a text that averages are made of, and of one step.
const N_CALIBRATED: u32 = 1024;
/// Principal directions of each head that are written.
const N_PRINCIPAL: usize = 32;
/// Questions that need something from afar, each of another kind.
const TASKS: [TaskName; 4] =
    [TaskName::Single1, TaskName::Single2, TaskName::MultiKey1, TaskName::Variables];
/// Heads that move the output as far as this share of all heads' are as important as can be.
const TOP_SHARE: f64 = 0.05;

/// Runs the command.
pub(crate) fn run(
    args: &ProfileArgs,
    config: &EngineConfig,
    fetch: &Fetch<'_>,
) -> anyhow::Result<()> {
    let spec = args.model.as_deref().or(args.first.as_deref());
    let spec = spec.map_or_else(|| Ok(ModelSpec::default_model()), ModelSpec::parse)?;
    let mut files = ModelFiles::open(&fetch::fetch(&spec, fetch)?)?;
    files.override_rope(&config.rope)?;
    let fingerprint = sparse::fingerprint(&files)?;
    let target = match &args.output {
        Some(path) => path.clone(),
        None => sparse::profile_path(fetch.env, &fingerprint)
            .context("no home directory to keep the profile in; use --output")?,
    };
    ensure!(!config.kv_virtual, "--kv-layout virtual is for answering and measuring");
    let device = Device::open(&DeviceConfig {
        device: config.device,
        threads: config.threads,
        is_exact: config.is_exact,
        kernel_dir: fetch.env.kernel_dir(),
        kv_file: None,
        kv_virtual: config.kv_virtual,
        far: FarWay { code: None, n_threads: 0 },
    })?;
    let mut profile = match device {
        Device::Cpu(cpu) => measure(cpu, &files, args)?,
        Device::Cuda(cuda) => measure(cuda, &files, args)?,
    };
    profile.fingerprint = fingerprint;
    profile.command = command(args);
    write(&target, &profile)?;
    if let Some(path) = &args.plot {
        std::fs::write(path, heatmap::draw(&profile))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    writeln!(io::stdout().lock(), "{}", target.display())?;
    Ok(())
}

/// The command that makes the same profile again, without the paths of this machine.
fn command(args: &ProfileArgs) -> String {
    let name = |path: &PathBuf| {
        path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
    };
    let mut words = vec!["nuthatch profile".to_owned()];
    if let Some(path) = &args.text {
        words.push(format!("--text {}", name(path)));
    }
    match &args.import {
        Some(path) => words.push(format!("--import {}", name(path))),
        None => words.push(format!("--samples {} --length {}", args.samples, args.length)),
    }
    if args.hash_bits > 0 {
        words.push(format!("--hash-bits {} --hash-length {}", args.hash_bits, args.hash_length));
    }
    words.join(" ")
}

fn write(target: &Path, profile: &Profile) -> anyhow::Result<()> {
    let what = || format!("cannot write {}", target.display());
    if let Some(dir) = target.parent() {
        std::fs::create_dir_all(dir).with_context(what)?;
    }
    let mut text = serde_json::to_string(profile)?;
    text.push('\n');
    let part = target.with_extension("part");
    std::fs::write(&part, text).with_context(what)?;
    std::fs::rename(&part, target).with_context(what)
}

fn measure<B: Backend>(
    backend: Arc<B>,
    files: &ModelFiles,
    args: &ProfileArgs,
) -> anyhow::Result<Profile> {
    let prompts = Prompts::load(files, args.text.as_deref())?;
    let context = args.length.max(N_CALIBRATED).min(files.config().max_context);
    let hash_length = args.hash_length.min(files.config().max_context);
    let longest = if args.hash_bits > 0 { context.max(hash_length) } else { context };
    let request = SizeRequest::for_model(files, KvDtype::F16, u64::MAX / 2);
    let n_pages = u64::from(longest.div_ceil(request.kv.page_len));
    let sizes = Sizes::compute(&SizeRequest {
        max_context: Some(longest),
        max_seqs: 1,
        max_rows: N_CALIBRATED.min(context),
        budget: Budget::KvBytes(request.kv.page_bytes() as u64 * n_pages),
        ..request
    })?;
    let mut model = LoadedModel::load(backend, files, &sizes)?;
    let mut profile = Profile::empty(&topk_shape(files.config()));
    let text = prompts.prose_tokens()?;
    model.calibrate(&text)?.finish(&mut profile);
    round(&mut profile);
    keep_principal(&mut profile);
    if args.hash_bits > 0 {
        let texts = hash::Texts::read(&mut model, &prompts, hash_length)?;
        hash::learn(&mut profile, &texts, args.hash_bits as usize)?;
    }
    if let Some(path) = &args.import {
        let table = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        profile.import_table(&table)?;
        return Ok(profile);
    }
    let questions = (0..args.samples)
        .map(|i| prompts.question(TASKS[i as usize % TASKS.len()], context, u64::from(i) + 1))
        .collect::<anyhow::Result<Vec<_>>>()?;
    profile.importance = importance(&mut model, &questions)?;
    Ok(profile)
}

/// Fewer digits: they say nothing, and make files large.
fn round(profile: &mut Profile) {
    for x in profile.mean.iter_mut().chain(&mut profile.similarity).chain(&mut profile.lengths) {
        *x = (*x * 1e4).round() / 1e4;
    }
}

/// Leaves as many principal directions as policies use; all of them would make files large.
fn keep_principal(profile: &mut Profile) {
    let width = profile.head_dim as usize;
    let heads = profile.principal.chunks(width.max(1));
    profile.principal = heads.flat_map(|rows| rows.iter().take(N_PRINCIPAL)).cloned().collect();
    let heads = profile.lengths.chunks(width.max(1));
    profile.lengths = heads.flat_map(|x| x.iter().take(N_PRINCIPAL)).copied().collect();
}

/// A bar on a terminal, and nothing elsewhere.
fn progress(what: &str, n: usize) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(n as u64);
    if !io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let template = format!("{what} {{bar:30}} {{pos}}/{{len}} {{eta}}");
    bar.set_style(ProgressStyle::with_template(&template)?);
    Ok(bar)
}

/// How far the output moves, averaged over the questions, as a share of how far the most important
/// heads move it.
fn importance<B: Backend>(
    model: &mut LoadedModel<B>,
    questions: &[Vec<TokenId>],
) -> anyhow::Result<Vec<f32>> {
    ensure!(!questions.is_empty(), "--samples is 0");
    let bar = progress("importance", questions.len())?;
    let mut sums: Vec<f64> = Vec::new();
    for question in questions {
        let moved = probe(model, question)?;
        sums.resize(moved.len(), 0.0);
        sums.iter_mut().zip(moved).for_each(|(sum, x)| *sum += f64::from(x));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let sums: Vec<f64> = sums.into_iter().map(|square| square.max(0.0).sqrt()).collect();
    let mut sorted = sums.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let top = sorted[(sorted.len() as f64 * TOP_SHARE) as usize].max(f64::MIN_POSITIVE);
    Ok(sums.iter().map(|x| ((x / top).min(1.0) * 1e4).round() as f32 / 1e4).collect())
}

/// Computes all but the last token of a question, and tries each head at the last.
fn probe<B: Backend>(model: &mut LoadedModel<B>, question: &[TokenId]) -> anyhow::Result<Vec<f32>> {
    let (last, before) = question.split_last().context("an empty question")?;
    let n = question.len() as u32;
    let slots: Vec<Slot> = (0..n.div_ceil(16)).map(Slot).collect();
    model.write_table(0, 0, &slots)?;
    let layout = |tokens: &[TokenId], start: u32| {
        let end = start + tokens.len() as u32;
        BatchLayout {
            tokens: tokens.iter().map(|token| token.0).collect(),
            positions: (start..end).collect(),
            query_start: vec![0, end - start],
            kv_len: vec![end],
            table_row: vec![0],
            output_rows: Vec::new(),
        }
    };
    let mut start = 0;
    for chunk in before.chunks(512) {
        model.forward(&layout(chunk, start), &mut [])?;
        start += chunk.len() as u32;
    }
    Ok(model.probe(&layout(&[*last], start), RESTRICTION)?)
}
