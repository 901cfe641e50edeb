//! `nuthatch plan`: what a model's KV cache costs, before anything is loaded.
//!
//! `shape` knows models by their sizes alone, `report` does the arithmetic, this file prints it.

mod report;
mod shape;

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use nuthatch_model::{ModelConfig, ModelFiles};

use crate::args::PlanArgs;
use crate::fetch::{self, Fetch};
use crate::host;
use crate::known;
use crate::load;
use crate::resolve::ModelSpec;
use crate::size::{Bytes, Tokens};
use crate::table::{Align, Table};
use report::{Ask, Fit, Report};
use shape::{PlanModel, Weights};

/// The names of built-in shapes, for the help text.
pub(crate) fn shape_names() -> String {
    shape::BUILT_IN.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}

/// A built-in shape as a model's configuration.
pub(crate) fn shape_config(name: &str) -> anyhow::Result<ModelConfig> {
    let shape = shape::find(name)
        .with_context(|| format!("no shape `{name}`; the built-in ones are {}", shape_names()))?;
    Ok(ModelConfig::from_json(shape.config_json().as_bytes(), None)?)
}

/// Parameters of a model, counted from its sizes.
pub(crate) fn n_params(config: &ModelConfig) -> u64 {
    PlanModel::from_config(String::new(), config, None).n_params
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs, fetch: &Fetch<'_>) -> anyhow::Result<()> {
    let model = find_model(&args.model, fetch)?;
    let ask = Ask {
        context: args.context.unwrap_or(model.context),
        batch: args.batch.max(1),
        average: args.average,
        memory: args.memory.or_else(host::total_memory),
        memory_is_given: args.memory.is_some(),
    };
    let report = Report::new(&model, &ask);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(render(&report).as_bytes())?;
    }
    Ok(())
}

/// The model by its sizes: from a file where there is one, else from the built-in list, else from
/// the hub's `config.json`.
fn find_model(name: &str, fetch: &Fetch<'_>) -> anyhow::Result<PlanModel> {
    let path = Path::new(name);
    if path.is_file() && path.extension().is_some_and(|e| e == "json") {
        return from_config(path, name);
    }
    if path.is_dir() && path.join("config.json").exists() && !has_weights(path) {
        return from_config(&path.join("config.json"), name);
    }
    // A short name whose weights are not here is planned by its shape, without fetching them.
    let shape = match known::find(name) {
        Some(known) if fetch::is_present(known, fetch)? => None,
        Some(known) => known.names.iter().find_map(|name| shape::find(name)),
        None if path.exists() => None,
        None => shape::find(name),
    };
    if let Some(shape) = shape {
        return Ok(shape.into_plan_model());
    }
    let spec = ModelSpec::parse(name)
        .with_context(|| format!("the built-in shapes are {}", shape_names()))?;
    match spec {
        ModelSpec::Hub(hub) if hub.pick.is_none() => {
            from_config(&fetch::fetch_config(&hub, fetch)?, &hub.repo)
        }
        ModelSpec::Local(_) | ModelSpec::Known(_) | ModelSpec::Hub(_) => {
            from_files(&fetch::fetch(&spec, fetch)?)
        }
    }
}

fn has_weights(dir: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|f| dir.join(f).exists())
}

fn from_config(path: &Path, name: &str) -> anyhow::Result<PlanModel> {
    let show = || path.display().to_string();
    let text = std::fs::read(path).with_context(show)?;
    let config = ModelConfig::from_json(&text, None).with_context(show)?;
    Ok(PlanModel::from_config(name.to_owned(), &config, None))
}

fn from_files(path: &Path) -> anyhow::Result<PlanModel> {
    let files = ModelFiles::open(path)?;
    let weights = Weights { bytes: files.weight_bytes(), what: "as in the file".to_owned() };
    Ok(PlanModel::from_config(load::model_name(path), files.config(), Some(weights)))
}

fn render(report: &Report) -> String {
    let model = &report.model;
    let mut text = format!(
        "{}: {} layers, {} query heads over {} KV heads ({}), head width {}\n\
         weights {} ({}), {} parameters, context {}, page {} tokens\n",
        model.name,
        model.n_layers,
        model.n_heads,
        model.n_kv_heads,
        report.sharing(),
        model.head_dim,
        Bytes(model.weights.bytes),
        model.weights.what,
        people(model.n_params),
        Tokens(model.context),
        report.page_len,
    );
    if let Some(window) = model.window {
        text += &format!(
            "sliding window of {} tokens: the tables below count the whole sequence\n",
            Tokens(window)
        );
    }
    if let Some(scale) = report.rope_scale {
        text += &format!(
            "{} tokens are beyond the model's {}: needs --rope-scaling yarn --rope-scale {scale}\n",
            Tokens(report.batch.context),
            Tokens(model.context),
        );
    }
    text += "\nKV of one token\n";
    text += &per_token(report).plain();
    text += "\nKV of one sequence\n";
    text += &per_sequence(report).plain();
    let batch = &report.batch;
    text += &format!(
        "\n{} x {} tokens: {} in f16",
        batch.n_seqs,
        Tokens(batch.context),
        Bytes(batch.f16_bytes)
    );
    text += &format!(", {} with the weights\n", Bytes(batch.f16_bytes + model.weights.bytes));
    if let Some(fit) = &report.fit {
        text += &render_fit(fit);
    }
    text
}

/// A count with a decimal unit.
fn people(n: u64) -> String {
    if n < 1_000_000_000 {
        format!("{:.1} M", n as f64 / 1e6)
    } else {
        format!("{:.2} B", n as f64 / 1e9)
    }
}

fn per_token(report: &Report) -> Table {
    let model = &report.model;
    let mut table = Table::new([
        ("KV type".to_owned(), Align::Left),
        (format!("MHA ({} KV heads)", model.n_heads), Align::Right),
        (format!("{} ({} KV heads)", report.sharing_name(), model.n_kv_heads), Align::Right),
        ("runs now".to_owned(), Align::Left),
    ]);
    for row in &report.per_token {
        let (mha, own) = (Bytes(row.mha_bytes), Bytes(row.bytes));
        let now = if row.is_supported { "yes" } else { "only on disk (--kv-cold-dtype)" };
        table.push([row.dtype.to_owned(), mha.to_string(), own.to_string(), now.to_owned()]);
    }
    table
}

fn per_sequence(report: &Report) -> Table {
    let head = [("tokens".to_owned(), Align::Right), ("MHA f16".to_owned(), Align::Right)];
    let dtypes = report.per_token.iter().map(|row| (row.dtype.to_owned(), Align::Right));
    let mut table = Table::new(head.into_iter().chain(dtypes));
    for row in &report.per_sequence {
        let mut cells = vec![Tokens(row.context).to_string(), Bytes(row.mha_f16_bytes).to_string()];
        cells.extend(row.bytes.iter().map(|(_, bytes)| Bytes(*bytes).to_string()));
        table.push(cells);
    }
    table
}

fn render_fit(fit: &Fit) -> String {
    let whose = if fit.memory_is_given { "given" } else { "this machine's" };
    let mut text = format!("\nMemory {} ({whose}): ", Bytes(fit.memory_bytes));
    let Some(kv_bytes) = fit.kv_bytes else {
        text += &format!("the weights alone need {}\n", Bytes(fit.weights_bytes));
        return text;
    };
    text += &format!(
        "{} for weights, {} for KV\nSequences that fit, {} tokens on average, {} at most\n",
        Bytes(fit.weights_bytes),
        Bytes(kv_bytes),
        Tokens(fit.average),
        Tokens(fit.context),
    );
    let mut table = Table::new([
        ("KV type", Align::Left),
        ("paged", Align::Right),
        ("waste", Align::Right),
        ("contiguous", Align::Right),
        ("waste", Align::Right),
        ("gain", Align::Right),
    ]);
    for row in &fit.rows {
        table.push([
            row.dtype.to_owned(),
            row.paged_seqs.to_string(),
            format!("{:.2} %", row.paged_waste * 100.0),
            row.contiguous_seqs.to_string(),
            format!("{:.0} %", row.contiguous_waste * 100.0),
            row.gain().map_or_else(|| "-".to_owned(), |gain| format!("{gain:.1}x")),
        ]);
    }
    text += &table.plain();
    // As the engine sees it: one sequence at its longest.
    if fit.rows.iter().all(|row| row.contiguous_seqs == 0) {
        let context = Tokens(fit.context);
        // The host's memory is more than what was given only if that is a device's.
        let place = if fit.memory_is_given { "host" } else { "disk:PATH" };
        text += &format!(
            "{context} tokens do not fit. Keep KV elsewhere: nuthatch serve MODEL --max-model-len \
             {context} --sparse auto --kv-offload {place} (approximate; docs/sparse.md)\n"
        );
    }
    text
}
