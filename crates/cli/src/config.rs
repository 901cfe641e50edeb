//! What was typed, made sense of: every value checked, every default that needs no model filled in.
//!
//! `Args` -> [`RunConfig`], [`BenchConfig`] -> the engine's `Sizes`; nothing is written back.

use nuthatch_engine::{DiskOptions, EngineOptions, Policy};
use nuthatch_model::{GenerationDefaults, PAGE_LEN, RopeOverride};
use nuthatch_types::{
    BeamParams, ColdKv, EarlyStopping, KvDtype, LayerSet, Sampling, SamplingError,
};

use crate::args::{
    CacheArgs, DeviceArg, EarlyStoppingArg, EngineArgs, KvDtypeArg, KvLayoutArg, PolicyArg,
    RopeScalingArg, SamplingArgs, SchedulingArgs, SparseArgs,
};
use crate::resolve::{ModelSpec, ResolveError};

/// Something typed that makes no sense. The program ends with the exit code of a wrong usage.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The same thing twice.
    #[error("{what} is given twice: `{first}` and `{second}`")]
    Twice {
        /// What.
        what: &'static str,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// A chat, where only one answer makes sense.
    #[error("{0} needs a prompt")]
    NeedsPrompt(&'static str),
    /// A conversation goes on in one way.
    #[error("--session takes one answer, not -n several")]
    SessionOfMany,
    /// Nothing to answer.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Another length of pages.
    #[error("--block-size is {0}, but pages have 16 tokens; other lengths are not supported yet")]
    BlockSize(u32),
    /// A share that is none.
    #[error("--gpu-memory-utilization is {0}, but must be above 0 and at most 1")]
    Share(f64),
    /// Layers beyond those that can be told apart.
    #[error("--kv-cache-dtype-skip-layers is {0:?}, but layers are 0 to 127")]
    SkipLayers(Vec<u32>),
    /// Layers that are stored like all others anyway.
    #[error("--kv-cache-dtype-skip-layers needs --kv-cache-dtype int8 or fp8, not {0}")]
    NothingSkipped(KvDtype),
    /// Fewer bits of fewer bits.
    #[error(
        "--kv-cold-dtype {cold} is for a KV cache of 16 or 32 bits; with --kv-cache-dtype {dtype} \
         pages are stored as they are"
    )]
    CodedTwice {
        /// In memory.
        dtype: KvDtype,
        /// Where pages wait.
        cold: ColdKv,
    },
    /// Pages that would have to move, or to be shared.
    #[error("--kv-layout virtual does not go with {0}: its pages stay where they are")]
    Virtual(&'static str),
    /// Pages that are far, and nothing that chooses among them, or two places for them.
    #[error("--kv-offload {0}")]
    Offload(&'static str),
    /// A flag of another server, as it was typed, and why it says nothing here.
    #[error("{0}: {1}")]
    Peer(String, &'static str),
    /// A number that must be positive.
    #[error("{0} is 0, but must be at least 1")]
    Zero(&'static str),
    /// A step could not serve every sequence.
    #[error("--max-num-batched-tokens ({rows}) is less than --max-num-seqs ({seqs})")]
    Batch {
        /// Tokens of one step.
        rows: u32,
        /// Sequences at one time.
        seqs: u32,
    },
    /// A step could not serve those that run and those that were displaced.
    #[error(
        "mlfq holds as many displaced sequences as run, so --max-num-batched-tokens ({rows}) must \
         be at least twice --max-num-seqs ({n_seqs})"
    )]
    BatchMlfq {
        /// Tokens of one step.
        rows: u32,
        /// Sequences that run at one time.
        n_seqs: u32,
    },
    /// More answers than the search follows.
    #[error("-n is {n}, but must be at most --beam-width ({width})")]
    Beams {
        /// Answers.
        n: u32,
        /// Answers that are followed.
        width: u32,
    },
    /// More alternatives than anybody reads.
    #[error("--logprobs is {0}, but must be at most 100")]
    Logprobs(u32),
    /// A sampling parameter outside its range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A certificate without its key, or a key without its certificate.
    #[error("--ssl-certfile and --ssl-keyfile need each other")]
    HalfTls,
    /// A key that nobody could give, or anybody could guess.
    #[error("an API key is empty")]
    EmptyKey,
    /// Nothing to measure.
    #[error("nothing to measure: --prompt and --gen are both 0")]
    NoTests,
}

/// How answers are sampled, before the model's own defaults are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplingConfig {
    args: SamplingArgs,
    /// The given seed, or a random one.
    pub(crate) seed: u64,
}

/// How the engine runs.
#[derive(Clone, Debug)]
pub(crate) struct EngineConfig {
    pub(crate) device: DeviceArg,
    /// Whether a GPU takes all bits of the activations; 0 threads are all cores.
    pub(crate) is_exact: bool,
    pub(crate) threads: u32,
    /// Whether the pages of a sequence lie one after the other.
    pub(crate) kv_virtual: bool,
    /// Asked context; the model's if not given.
    pub(crate) max_context: Option<u32>,
    pub(crate) kv_dtype: KvDtype,
    /// Asked memory for KV.
    pub(crate) kv_bytes: Option<u64>,
    /// Share of the available memory that may be used for everything.
    pub(crate) memory_share: Option<f64>,
    /// Memory of the host tier.
    pub(crate) host_bytes: u64,
    /// The disk tier, the address of the remote one, how both store pages, and the key if they encrypt.
    pub(crate) disk: Option<DiskOptions>,
    pub(crate) remote: Option<String>,
    pub(crate) cold: Option<ColdKv>,
    pub(crate) by_layers: Option<bool>,
    pub(crate) reuse: Option<u32>,
    pub(crate) key_file: Option<std::path::PathBuf>,
    /// Tokens of one step, and whether they may be more where that is much faster.
    pub(crate) max_rows: u32,
    pub(crate) may_take_more_rows: bool,
    /// Sequences that the engine knows at one time, and whether they may be fewer where memory is short.
    pub(crate) max_seqs: u32,
    pub(crate) may_run_fewer: bool,
    pub(crate) options: EngineOptions,
    pub(crate) rope: RopeOverride,
    /// Which tokens are attended.
    pub(crate) sparse: SparseArgs,
}

fn model_or_default(model: Option<&str>) -> Result<ModelSpec, ResolveError> {
    model.map_or_else(|| Ok(ModelSpec::default_model()), ModelSpec::parse)
}

impl SamplingConfig {
    fn new(args: &SamplingArgs) -> Result<Self, ConfigError> {
        if args.max_tokens == Some(0) {
            return Err(ConfigError::Zero("--max-tokens"));
        }
        if let Some(n) = args.logprobs.filter(|&n| n > 100) {
            return Err(ConfigError::Logprobs(n));
        }
        if args.n == 0 {
            return Err(ConfigError::Zero("-n"));
        }
        let config =
            SamplingConfig { args: args.clone(), seed: args.seed.unwrap_or_else(random_seed) };
        config.sampling(&GenerationDefaults::default()).validate()?;
        if let Some(beam) = config.beam() {
            beam.validate()?;
            if args.n > beam.width {
                return Err(ConfigError::Beams { n: args.n, width: beam.width });
            }
        }
        Ok(config)
    }

    /// Sequences that run at one time unless the user says otherwise: all answers to a prompt, up to
    /// a limit beyond which they follow each other; a search needs all of them.
    fn n_seats(&self) -> u32 {
        const SIDE_BY_SIDE: u32 = 16;
        self.beam().map_or(self.n().min(SIDE_BY_SIDE), |beam| beam.width)
    }

    /// Answers to each prompt.
    pub(crate) fn n(&self) -> u32 {
        self.args.n
    }

    /// The search, if one was asked for.
    pub(crate) fn beam(&self) -> Option<BeamParams> {
        let args = &self.args;
        let early_stopping = match args.early_stopping {
            Some(EarlyStoppingArg::True) => EarlyStopping::Yes,
            Some(EarlyStoppingArg::False) | None => EarlyStopping::No,
            Some(EarlyStoppingArg::Never) => EarlyStopping::Never,
        };
        let length_penalty = args.length_penalty.unwrap_or(1.0);
        args.beam_width.map(|width| BeamParams { width, length_penalty, early_stopping })
    }

    /// What was typed, then what the model's makers recommend, then what suits most models.
    pub(crate) fn sampling(&self, model: &GenerationDefaults) -> Sampling {
        let args = &self.args;
        let is_greedy_model = model.do_sample == Some(false);
        let temperature = if args.greedy {
            0.0
        } else if is_greedy_model {
            args.temperature.unwrap_or(0.0)
        } else {
            args.temperature.or(model.temperature).unwrap_or(0.7)
        };
        Sampling {
            temperature,
            top_k: args.top_k.or(model.top_k).unwrap_or(40),
            top_p: args.top_p.or(model.top_p).unwrap_or(0.95),
            min_p: args.min_p.or(model.min_p).unwrap_or(0.05),
            repetition_penalty: args.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
            frequency_penalty: args.frequency_penalty.unwrap_or(0.0),
            presence_penalty: args.presence_penalty.unwrap_or(0.0),
            logit_bias: Vec::new(),
            seed: self.seed,
            n_logprobs: args.logprobs,
            n_candidates: 0,
        }
    }

    /// Texts that end an answer.
    pub(crate) fn stops(&self) -> &[String] {
        &self.args.stop
    }

    /// Most tokens of an answer, if the user said so.
    pub(crate) fn max_tokens(&self) -> Option<u32> {
        self.args.max_tokens
    }

    /// Whether log probabilities were asked for, even with no alternatives.
    pub(crate) fn wants_logprobs(&self) -> bool {
        self.args.logprobs.is_some()
    }
}

/// A seed that nobody chose: enough bits to differ, few enough to type again.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    // The standard library seeds its maps from the system's randomness.
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

impl EngineConfig {
    /// Checks the arguments; `n_seqs` run at one time unless the user says otherwise.
    fn new(args: &EngineArgs, n_seqs: u32) -> Result<Self, ConfigError> {
        let SparseArgs { kv_offload, sparse, .. } = &args.sparse;
        if kv_offload.is_some() && sparse.is_none() {
            return Err(ConfigError::Offload("needs --sparse, such as --sparse auto"));
        }
        if kv_offload.is_some() && (args.kv_disk.is_some() || args.kv_remote.is_some()) {
            let why = "does not go with --kv-disk and --kv-remote: it has pages elsewhere already";
            return Err(ConfigError::Offload(why));
        }
        Self::of_sizes(args, n_seqs)
    }

    /// The same for a command that drives the model itself, and says how it attends in its own way.
    pub(crate) fn alone(args: &EngineArgs) -> Result<Self, ConfigError> {
        Self::of_sizes(args, 1)
    }

    fn of_sizes(args: &EngineArgs, n_seqs: u32) -> Result<Self, ConfigError> {
        if args.block_size != PAGE_LEN {
            return Err(ConfigError::BlockSize(args.block_size));
        }
        if args.threads == Some(0) {
            return Err(ConfigError::Zero("--threads"));
        }
        let batch = BatchSizes::new(&args.scheduling, n_seqs)?;
        let (max_seqs, policy) = batch.policy(args.scheduling_policy)?;
        let kv_virtual = args.kv_layout == KvLayoutArg::Virtual;
        if let Some(other) = moves_pages(args).filter(|_| kv_virtual) {
            return Err(ConfigError::Virtual(other));
        }
        Ok(EngineConfig {
            device: args.device,
            is_exact: args.exact_activations,
            kv_virtual,
            threads: args.threads.unwrap_or(0),
            max_context: args.max_model_len,
            kv_dtype: kv_dtype(args, args.kv_cache_dtype)?,
            kv_bytes: args.kv_cache_memory_bytes,
            memory_share: memory_share(args)?,
            host_bytes: args.swap_space,
            disk: args.kv_disk.clone().map(|disk| DiskOptions { io: args.kv_disk_io, ..disk }),
            remote: args.kv_remote.clone(),
            cold: args.cold_kv(),
            by_layers: args.kv_disk_layers,
            reuse: args.cache_reuse.filter(|n| *n > 0),
            key_file: args.kv_key_file.clone(),
            max_rows: batch.max_rows,
            may_take_more_rows: args.scheduling.max_num_batched_tokens.is_none(),
            max_seqs,
            may_run_fewer: args.scheduling.max_num_seqs.is_none() && max_seqs == batch.n_seqs,
            sparse: args.sparse.clone(),
            options: EngineOptions {
                policy,
                prefix_caching: prefix_caching(&args.scheduling.cache) && !kv_virtual,
                shares_pages: !kv_virtual,
                eviction: args.scheduling.cache.eviction_policy.into(),
                max_waiting: None,
            },
            rope: RopeOverride {
                scaling: match args.rope_scaling {
                    Some(RopeScalingArg::Named(kind)) => Some(kind),
                    Some(RopeScalingArg::Json(_)) | None => None,
                },
                parameters: match &args.rope_scaling {
                    Some(RopeScalingArg::Json(object)) => Some(object.clone()),
                    Some(RopeScalingArg::Named(_)) | None => None,
                },
                scale: args.rope_scale,
                theta: args.rope_freq_base,
                original: args.rope_original_context,
            },
        })
    }
}

/// What was asked for that moves pages or shares them.
fn moves_pages(args: &EngineArgs) -> Option<&'static str> {
    let all = [
        (args.swap_space > 0, "--swap-space"),
        (args.kv_disk.is_some(), "--kv-disk"),
        (args.kv_remote.is_some(), "--kv-remote"),
        (args.sparse.sparse.is_some(), "--sparse"),
        (args.scheduling.cache.enable_prefix_caching, "--enable-prefix-caching"),
    ];
    all.into_iter().find(|(is_asked, _)| *is_asked).map(|(_, name)| name)
}

/// How keys and values are stored in memory, in a type and with the layers that stay f16.
pub(crate) fn kv_dtype(args: &EngineArgs, dtype: KvDtypeArg) -> Result<KvDtype, ConfigError> {
    let skipped = &args.kv_cache_dtype_skip_layers;
    let wide = LayerSet::of(skipped);
    let wide = wide.ok_or_else(|| ConfigError::SkipLayers(skipped.clone()))?;
    let dtype = match dtype {
        KvDtypeArg::Auto | KvDtypeArg::F16 => KvDtype::F16,
        KvDtypeArg::Bf16 => KvDtype::Bf16,
        KvDtypeArg::F32 => KvDtype::F32,
        KvDtypeArg::Int8 => KvDtype::Int8(wide),
        KvDtypeArg::Fp8 => KvDtype::Fp8(wide),
    };
    if dtype.wide_layers() != wide {
        return Err(ConfigError::NothingSkipped(dtype));
    }
    match args.cold_kv() {
        Some(cold) if dtype.is_coded() => Err(ConfigError::CodedTwice { dtype, cold }),
        _ => Ok(dtype),
    }
}

fn memory_share(args: &EngineArgs) -> Result<Option<f64>, ConfigError> {
    match args.gpu_memory_utilization {
        Some(share) if !(share > 0.0 && share <= 1.0) => Err(ConfigError::Share(share)),
        share => Ok(share),
    }
}

/// Tokens of one step, unless somebody says otherwise.
const STEP_ROWS: u32 = 512;

/// How large steps are, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSizes {
    /// Tokens of one step.
    pub(crate) max_rows: u32,
    /// Sequences that run at one time.
    pub(crate) n_seqs: u32,
}

impl BatchSizes {
    /// Checks the arguments; `n_seqs` run at one time unless the user says otherwise.
    pub(crate) fn new(args: &SchedulingArgs, n_seqs: u32) -> Result<Self, ConfigError> {
        let max_rows = args.max_num_batched_tokens.unwrap_or(STEP_ROWS);
        let n_seqs = args.max_num_seqs.unwrap_or(n_seqs);
        for (flag, value) in [("--max-num-seqs", n_seqs), ("--max-num-batched-tokens", max_rows)] {
            if value == 0 {
                return Err(ConfigError::Zero(flag));
            }
        }
        if max_rows < n_seqs {
            return Err(ConfigError::Batch { rows: max_rows, seqs: n_seqs });
        }
        Ok(BatchSizes { max_rows, n_seqs })
    }

    /// A policy with its numbers, and how many sequences the engine knows at one time: those that
    /// run and, where higher levels displace lower ones, as many that wait to go on.
    pub(crate) fn policy(&self, policy: PolicyArg) -> Result<(u32, Policy), ConfigError> {
        let n_seqs = self.n_seqs;
        Ok(match policy {
            PolicyArg::Fcfs => (n_seqs, Policy::Fcfs),
            PolicyArg::Priority => (n_seqs, Policy::Priority { boost: PRIORITY_BOOST }),
            PolicyArg::Prefix => (n_seqs, PREFIX),
            PolicyArg::Fair => (n_seqs, Policy::Fair),
            PolicyArg::Mlfq => {
                let seqs = n_seqs.saturating_mul(2);
                if self.max_rows < seqs {
                    return Err(ConfigError::BatchMlfq { rows: self.max_rows, n_seqs });
                }
                let (levels, quantum, max_wait) = MLFQ;
                (seqs, Policy::Mlfq { levels, quantum, max_wait, max_running: n_seqs })
            }
        })
    }
}

/// Arrivals that one step of priority is worth: more than wait in most queues, so that priorities
/// count, and few enough that nobody waits for ever. A guess.
const PRIORITY_BOOST: u32 = 256;
/// Being passed over once is worth a page. A guess.
const PREFIX: Policy = Policy::Prefix { ageing: 16, window: 256 };
/// Levels, tokens of the first, and steps after which one who waits rises. `simulate` was the judge
/// of the quantum: see docs/simulate.md.
const MLFQ: (u8, u32, u32) = (5, 256, 2000);

/// Whether equal beginnings share their pages.
pub(crate) fn prefix_caching(args: &CacheArgs) -> bool {
    args.enable_prefix_caching || !args.no_enable_prefix_caching
}

mod batch;
mod bench;
mod run;
mod serve;

pub(crate) use batch::{BATCH_SEQS, BatchConfig};
pub(crate) use bench::{BenchConfig, WARM_UP_TOKENS};
pub(crate) use run::{Prompt, RunConfig};
pub(crate) use serve::ServeConfig;

#[cfg(test)]
mod tests;
