//! From a configuration to an engine: open the files, compute the sizes, choose the device.

mod near_table;

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use nuthatch_engine::topk::{NearError, NearPlan, digest_page_bytes};
use nuthatch_engine::{
    Budget, DiskOptions, EngineOptions, FarRequest, Forecast, MemoryError, SharedClock,
    SizeRequest, Sizes, SlowOptions, StoreKey, TopKOptions,
};
use nuthatch_model::{GenerationDefaults, LoadError, ModelConfig, ModelFiles, kv_shape};
use nuthatch_types::{Sampling, SystemClock};

use crate::config::EngineConfig;
use crate::device::{AnyEngine, Device, DeviceConfig};
use crate::env::Env;
use crate::size::{Bytes, Tokens};
use crate::sparse;
use crate::table::{Align, Table};
use near_table::near_table;

/// Share of the available memory that is used unless the user says otherwise. The rest is for the
/// file cache that loading fills, and for everybody else.
const MEMORY_SHARE: f64 = 0.85;
/// Tokens of one step, unless the user says otherwise, where a prompt's pages may have to come over a GPU's
/// link once for each of them: 512 took 2.7 times as long for 128K tokens (docs/sparse-speed.md).
const FAR_STEP_ROWS: u32 = 4096;

/// A model that is open, with everything decided and nothing loaded.
pub(crate) struct Prepared {
    pub(crate) files: ModelFiles,
    pub(crate) sizes: Sizes,
    options: EngineOptions,
    topk: Option<TopKOptions>,
    slow: SlowOptions,
    /// Whether the engine does without a disk tier that another one uses.
    is_disk_optional: bool,
    device: Device,
}

/// An engine that is ready to run.
pub(crate) struct Loaded {
    pub(crate) engine: AnyEngine,
    pub(crate) clock: SharedClock,
    /// The device, for people.
    pub(crate) device: String,
    pub(crate) threads: usize,
}

/// Tokens of one step, if there is room for so many.
fn most_rows(config: &EngineConfig, far: Option<&FarRequest>, context: u32) -> u32 {
    match far {
        Some(_) if config.may_take_more_rows => FAR_STEP_ROWS.min(context),
        _ => config.max_rows,
    }
}

/// A context that the model was not made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--max-model-len is {asked}, but the model was made for {context} tokens; stretch it with \
     --rope-scaling yarn --rope-scale {}", asked.div_ceil((*context).max(1))
)]
pub(crate) struct ContextError {
    asked: u32,
    context: u32,
}

impl Prepared {
    /// Opens the files and computes the sizes. Too little memory is an error before anything is
    /// loaded.
    pub(crate) fn open(path: &Path, config: &EngineConfig, env: &Env) -> anyhow::Result<Self> {
        let mut files = ModelFiles::open(path)?;
        files.override_rope(&config.rope)?;
        let context = files.config().max_context;
        if let Some(asked) = config.max_context.filter(|&asked| asked > context) {
            return Err(ContextError { asked, context }.into());
        }
        Self::with_files(files, config, env)
    }

    /// The same for files that are open, and any context.
    pub(crate) fn with_files(
        files: ModelFiles,
        config: &EngineConfig,
        env: &Env,
    ) -> anyhow::Result<Self> {
        let mut device = Device::open(&DeviceConfig {
            device: config.device,
            threads: config.threads,
            is_exact: config.is_exact,
            kernel_dir: env.kernel_dir(),
            kv_file: config.sparse.kv_file(),
            kv_virtual: config.kv_virtual,
            far: config.sparse.far_way(),
        })?;
        // Where the system does not tell, allocation itself has to fail.
        let available = device.available_memory()?.unwrap_or(u64::MAX / 2);
        let mut topk = sparse::options(&files, &config.sparse, env)?;
        let kv = kv_shape(files.config(), config.kv_dtype);
        let policies = topk.as_ref().map_or(&[][..], |topk| &topk.policies);
        let context = config.max_context.unwrap_or(files.config().max_context);
        let deciding = |max_seqs: u32, code| {
            let bytes = |topk| device.deciding_bytes(&files, topk, (kv, context, max_seqs), code);
            topk.as_ref().map_or(0, bytes)
        };
        let mut max_seqs = config.max_seqs;
        while config.may_run_fewer && max_seqs > 1 && deciding(max_seqs, None) > available / 4 {
            max_seqs /= 2;
        }
        if max_seqs < config.max_seqs {
            tracing::info!("top-k attention takes much memory: {max_seqs} sequences at one time");
        }
        let way = config.sparse.far_way();
        let saved = deciding(max_seqs, None) - deciding(max_seqs, way.code);
        let request = SizeRequest {
            deciding: deciding(max_seqs, None),
            weights: device.weight_bytes(&files, policies)?,
            digest_page_bytes: digest_page_bytes(policies, &kv) as u64,
            max_context: config.max_context,
            max_seqs,
            max_rows: config.max_rows,
            host_bytes: config.host_bytes,
            host_reads: device.host_reads(),
            far: device.far(topk.as_ref(), (kv, &way, saved)),
            budget: budget(config),
            ..SizeRequest::for_model(&files, config.kv_dtype, available)
        };
        let most_rows = most_rows(config, request.far.as_ref(), context);
        let mut sizes = Sizes::with_rows(&request, most_rows)
            .map_err(|error| explain_sizes(error, config, files.path()))?;
        if config.kv_virtual {
            reserve_tables(&mut sizes, config.may_run_fewer)?;
        }
        let of = (&sizes, kv, request.digest_page_bytes);
        let forecast = device.forecast(&files, topk.as_ref(), of, &config.sparse.far_way())?;
        if let Some(forecast) = &forecast {
            say(&describe_forecast(forecast, &sizes, kv.n_layers));
            near_table(&sizes).iter().for_each(|table| say(table));
            // Where nothing leaves the device, the faster of both ways is taken.
            if sizes.host_kv == 0
                && let Some(topk) = &mut topk
            {
                let least = forecast.chosen_from().min(sizes.max_context);
                topk.policies.iter_mut().for_each(|policy| policy.from = policy.from.max(least));
            }
        }
        if let Some(near) = &sizes.near {
            anyhow::ensure!(
                config.sparse.kv_file().is_none(),
                "--kv-offload disk: a GPU reads pages from the host's memory only"
            );
            let shape = nuthatch_model::topk_shape(files.config());
            let n_in_time = forecast.map_or(0, |of| of.n_in_time / sizes.max_seqs);
            device.keep_far(near, (topk.as_ref(), &shape, n_in_time), &config.sparse.far_way());
        }
        let slow = slow_options(config)?;
        let (options, is_disk_optional) = (config.options, false);
        Ok(Prepared { files, sizes, options, topk, slow, is_disk_optional, device })
    }

    /// Keeps pages in this directory, unless the user named another one, or another engine uses it.
    pub(crate) fn keep_if_free(&mut self, disk: DiskOptions) {
        if self.slow.disk.is_none() && self.slow.remote.is_none() {
            (self.slow.disk, self.is_disk_optional) = (Some(disk), true);
        }
    }

    /// Loads the weights and says so, one line for the model and one for the memory.
    pub(crate) fn load(&self) -> anyhow::Result<Loaded> {
        let (device, threads) = (self.device.name(), self.device.threads());
        let model = describe_model(self.files.path(), self.files.config());
        let memory = describe_memory(&self.sizes);
        say(&format!("model: {model}"));
        say(&format!("memory: {memory}; {device}"));
        let clock: SharedClock = Arc::new(SystemClock::start());
        let mut engine = self
            .device
            .load(&self.files, &self.sizes, &self.options, Arc::clone(&clock), self.topk.as_ref())
            .map_err(|error| {
                let what = if let LoadError::Near(NearError::Budget { budget, .. }) = &error {
                    too_small(*budget)
                } else {
                    format!("cannot load {}", self.files.path().display())
                };
                anyhow::Error::new(error).context(what)
            })?;
        if let Some((near, _)) = engine.executor().near() {
            tracing::info!("near: {}", describe_near(near));
        }
        self.open_slow(&mut engine)?;
        Ok(Loaded { engine, clock, device, threads })
    }
}

/// How much memory may be used.
fn budget(config: &EngineConfig) -> Budget {
    match (config.kv_bytes, config.memory_share) {
        // A file has room for as many pages as sequences can use, if the disk has.
        (bytes, _) if config.sparse.kv_file().is_some() => {
            Budget::OutsideBytes(bytes.unwrap_or(u64::MAX / 2))
        }
        (Some(bytes), _) => Budget::KvBytes(bytes),
        (None, share) => Budget::Share(share.unwrap_or(MEMORY_SHARE)),
    }
}

/// Where pages are kept beside memory.
fn slow_options(config: &EngineConfig) -> anyhow::Result<SlowOptions> {
    Ok(SlowOptions {
        disk: config.disk.clone(),
        remote: match &config.remote {
            Some(url) => Some(nuthatch_remote::open(url).context("cannot use --kv-remote")?),
            None => None,
        },
        cold: config.cold.clone(),
        by_layers: config.by_layers,
        reuse: config.reuse,
        key: config.key_file.as_deref().map(read_key).transpose()?,
    })
}

fn too_small(budget: u64) -> String {
    format!("--kv-device-budget {} is too small", Bytes(budget))
}

/// Why memory is short, in the words of the flags.
fn explain_sizes(error: MemoryError, config: &EngineConfig, path: &Path) -> anyhow::Error {
    let what = match (&error, config.sparse.kv_device_budget) {
        (MemoryError::Near { .. }, Some(budget)) => too_small(budget),
        _ => format!("not enough memory for {}", path.display()),
    };
    anyhow::Error::new(error).context(what)
}

impl Prepared {
    fn open_slow(&self, engine: &mut AnyEngine) -> anyhow::Result<()> {
        if self.slow.disk.is_none() && self.slow.remote.is_none() {
            return Ok(());
        }
        // What a session would keep; `EngineConfig` refuses a directory that was asked for.
        if self.topk.as_ref().is_some_and(|topk| topk.offload.is_some()) {
            return Ok(());
        }
        let mut slow = self.slow.clone();
        if let Device::Cuda(_) = self.device {
            // Passes are too short there to hide what reading by parts costs: 55 ms whole and 62 by layers
            // (`eval/store/ways.py`, one H200, 2026-11).
            slow.by_layers.get_or_insert(false);
        }
        match engine.keep_pages(&slow) {
            Err(error) if self.is_disk_optional => {
                tracing::warn!("pages are not kept: {error}");
                return Ok(());
            }
            result => result?,
        }
        let held = engine.stats().tier.and_then(|tier| tier.disk);
        if let (Some(disk), Some(held)) = (&self.slow.disk, held) {
            let (bytes, bytes_max) = (Bytes(held.bytes), Bytes(held.bytes_max));
            let dir = disk.dir.display();
            tracing::info!("disk: {} pages, {bytes} of {bytes_max} in {dir}", held.pages);
        }
        Ok(())
    }
}

/// Tells people what was decided: in the log, or if it does not say so, on a terminal.
fn say(text: &str) {
    tracing::info!("{text}");
    if std::io::stderr().is_terminal() && !tracing::enabled!(tracing::Level::INFO) {
        // A closed stderr is no reason to stop.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// Has every sequence find room at its longest, and fewer of them run if they may.
fn reserve_tables(sizes: &mut Sizes, may_run_fewer: bool) -> anyhow::Result<()> {
    let (n_pages, table_len) = (sizes.n_pages, sizes.capacity().table_len());
    let n_tables = (n_pages / table_len).min(sizes.max_seqs);
    anyhow::ensure!(
        n_tables == sizes.max_seqs || (may_run_fewer && n_tables > 0),
        "--kv-layout virtual has room for {n_tables} sequences of {} tokens, not for {}; lower \
         --max-num-seqs or --max-model-len",
        sizes.max_context,
        sizes.max_seqs
    );
    sizes.max_seqs = n_tables;
    sizes.kv = sizes.kv / u64::from(n_pages) * u64::from(n_tables * table_len);
    sizes.n_pages = n_tables * table_len;
    Ok(())
}

/// The key in a file.
fn read_key(path: &Path) -> anyhow::Result<StoreKey> {
    let in_file = || format!("--kv-key-file {}", path.display());
    let bytes = std::fs::read(path).with_context(in_file)?;
    StoreKey::read(&bytes).with_context(in_file)
}

/// How tokens are chosen where a request says nothing: what the model's makers recommend, then
/// OpenAI's defaults.
pub(crate) fn sampling(model: &GenerationDefaults) -> Sampling {
    let temperature = match model.do_sample {
        Some(false) => 0.0,
        Some(true) | None => model.temperature.unwrap_or(1.0),
    };
    Sampling {
        temperature,
        top_k: model.top_k.unwrap_or(0),
        top_p: model.top_p.unwrap_or(1.0),
        min_p: model.min_p.unwrap_or(0.0),
        repetition_penalty: model.repetition_penalty.unwrap_or(1.0),
        ..Sampling::default()
    }
}

/// The last part of the path, or what comes nearest.
pub(crate) fn model_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn describe_model(path: &Path, config: &ModelConfig) -> String {
    format!(
        "{}: {}, {} layers, {} heads over {} KV heads, context {}",
        model_name(path),
        config.architecture.name(),
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        Tokens(config.max_context),
    )
}

fn describe_near(near: &NearPlan) -> String {
    format!(
        "rows {}, digests {}; {} of {} heads stay whole",
        Bytes(near.row_bytes),
        Bytes(near.digest_bytes),
        near.n_resident(),
        near.is_resident.len(),
    )
}

/// What a step takes in either place, and where pages therefore are.
fn describe_forecast(forecast: &Forecast, sizes: &Sizes, n_layers: u32) -> String {
    let mut table = Table::new([
        ("decode step", Align::Left),
        ("expected", Align::Right),
        ("taken", Align::Left),
    ]);
    let is_far = sizes.host_kv > 0;
    let from = forecast.chosen_from();
    let taken = |is_taken: bool| if is_taken { "yes" } else { "" };
    let short = format!("below {from} tokens");
    for (name, seconds, taken) in [
        ("full attention, pages on the device", forecast.full, if is_far { "" } else { &short }),
        ("top-k attention, pages on the device", forecast.here, taken(!is_far)),
        ("top-k attention, pages on the host", forecast.far, taken(is_far)),
    ] {
        table.push([name.to_owned(), format!("{:.2} ms", seconds * 1e3), taken.to_owned()]);
    }
    let stay = match sizes.near {
        Some(near) if near.n_heads > 0 => format!("{} heads stay in eight bits", near.n_heads),
        near => format!("{} of {n_layers} layers stay", near.map_or(0, |near| near.n_layers)),
    };
    let why = match is_far {
        true => format!(
            "{} of KV leave the device; {stay} (the link would need {} layers); rows of {} heads come \
             while a layer is computed",
            Bytes(sizes.host_kv),
            forecast.n_layers,
            forecast.n_in_time,
        ),
        false => "nothing leaves the device: there is room for all KV".to_owned(),
    };
    let (n, context) = (sizes.max_seqs, Tokens(sizes.max_context));
    format!("plan for {n} x {context} tokens: {why}\n{}", table.plain())
}

fn describe_memory(sizes: &Sizes) -> String {
    let deciding = match sizes.deciding {
        0 => String::new(),
        bytes => format!(", top-k attention {}", Bytes(bytes)),
    };
    if let Some(near) = &sizes.near {
        let layers = match near.n_layers {
            0 => String::new(),
            n => format!(", {n} whole layers {}", Bytes(near.layers)),
        };
        let heads = match near.n_heads {
            0 => String::new(),
            n => format!(", {n} heads in eight bits {}", Bytes(near.heads)),
        };
        return format!(
            "on the device {}: weights {}, working memory {}{deciding}, digests {}, copies of {} \
             pages {}{layers}{heads}; on the host {}: KV of {} pages of {} tokens, {}",
            Bytes(sizes.total() - sizes.host_kv),
            Bytes(sizes.weights),
            Bytes(sizes.working),
            Bytes(near.digests),
            near.n_pages,
            Bytes(near.copies),
            Bytes(sizes.host_kv),
            sizes.n_pages,
            sizes.page_len,
            sizes.kv_dtype,
        );
    }
    let host = match sizes.host_kv {
        0 => String::new(),
        bytes => format!(" and {} on the host", Bytes(bytes)),
    };
    format!(
        "weights {}, KV {} ({} pages of {} tokens, {}){host}, working memory {}{deciding}",
        Bytes(sizes.weights),
        Bytes(sizes.kv),
        sizes.n_pages,
        sizes.page_len,
        sizes.kv_dtype,
        Bytes(sizes.working),
    )
}

#[cfg(test)]
mod tests;
