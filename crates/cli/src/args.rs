//! What was typed. `config` makes sense of it; nothing here is checked against anything else.

mod batch;
mod bench_serve;
mod eval;
mod file;
mod peers;
mod profile;
mod scheduling;
mod serve;
mod sessions;
mod simulate;
mod sparse;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use nuthatch_engine::{DiskIo, DiskOptions};
use nuthatch_model::{ConfigError, RopeKind};
use nuthatch_types::{ColdDtype, ColdKv};

use crate::size::{parse_bytes, parse_disk, parse_swap, parse_tokens};

pub(crate) use batch::BatchArgs;
pub(crate) use bench_serve::{BenchServeArgs, DatasetArg, Figure};
pub(crate) use eval::EvalArgs;
pub(crate) use file::{FileError, with_config_file};
pub(crate) use profile::ProfileArgs;
pub(crate) use scheduling::{CacheArgs, PolicyArg, SchedulingArgs};
pub(crate) use serve::{PoolingArg, ServeArgs, ToolParserArg};
pub(crate) use sessions::{SessionsArgs, SessionsCommand};
pub(crate) use simulate::{HostReadsArg, SimulateArgs, WorkloadArgs};
pub(crate) use sparse::{OffloadArg, SparseArgs, Switch};

const EXAMPLES: &str = "\
Examples:
  nuthatch run \"Why do transformers cache keys and values?\"
  nuthatch run                                  chat with the default model
  nuthatch run ./Qwen2.5-7B-Instruct            a Hugging Face directory
  nuthatch run model.gguf \"Tell me a story\"     a GGUF file
  nuthatch plan llama3-8b --context 128K --batch 8 --memory 80GiB
  nuthatch bench --prompt 512 --gen 128 --depth 2048,8000
  nuthatch serve --port 8000                    an OpenAI-compatible server
  nuthatch batch requests.jsonl                 OpenAI batch lines, many at a time
  nuthatch simulate --rate 1.2                  what each scheduling policy does";

/// Runs language models with a paged KV cache.
#[derive(Debug, Parser)]
#[command(name = "nuthatch", version, about, after_help = EXAMPLES)]
#[command(max_term_width = 100, propagate_version = false, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Say more about what happens, on stderr; twice for debugging
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "one is made in the life of the process")]
pub(crate) enum Command {
    /// Answer a prompt, or chat
    Run(Box<RunArgs>),
    /// Fetch a model and say where it is
    Pull(PullArgs),
    /// Say how much memory a model's KV cache needs, and how many sequences fit
    Plan(PlanArgs),
    /// Measure prefill and decode speed
    Bench(BenchArgs),
    /// Serve a model to OpenAI's clients, over HTTP
    Serve(Box<ServeArgs>),
    /// Measure what top-k attention does to answers
    Eval(Box<EvalArgs>),
    /// Measure a model's heads for top-k attention
    Profile(Box<ProfileArgs>),
    /// Answer a file of OpenAI batch requests, many at a time
    Batch(Box<BatchArgs>),
    /// Conversations that `run --session` keeps
    Sessions(SessionsArgs),
    /// Compare scheduling policies on one workload, in virtual time and without a model
    Simulate(Box<SimulateArgs>),
}

const RUN_EXAMPLES: &str = "\
MODEL is a .gguf file, a Hugging Face directory, a hub id (org/name, org/name:FILE.gguf or
org/name:Q4_K_M), or a short name (smollm2). A lone argument that is none of these is the PROMPT.
Without a MODEL the default, SmolLM2-135M-Instruct, is fetched and run. Without a PROMPT it is read
from stdin, or a chat begins if stdin is a terminal.

Examples:
  nuthatch run \"Why is the sky blue?\"
  nuthatch run model.gguf --greedy --max-tokens 100 \"Once upon a time\" --raw
  nuthatch run -n 3 \"Name a bird\"
  nuthatch run --beam-width 4 --length-penalty 1.2 \"Translate to French: good morning\"
  git diff | nuthatch run --system \"Write a commit message\"
  nuthatch run --rope-scaling yarn --rope-scale 4 --ctx-size 32K
  nuthatch run --streaming-window 1K            a chat without end in a fixed memory
  nuthatch run --session birds                  a chat that goes on another day";

#[derive(Debug, ClapArgs)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// File, directory, hub id or short name
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<String>,
    /// What to answer; `-` reads stdin
    #[arg(value_name = "PROMPT")]
    pub(crate) second: Option<String>,
    /// The model, said explicitly
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// The prompt, said explicitly
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Go on with the conversation of this name, or begin it; it is kept, and so is what the model
    /// made of it (see --kv-disk), so that it goes on quickly another day
    #[arg(long, value_name = "NAME", conflicts_with = "raw")]
    pub(crate) session: Option<String>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print tokens and speed to stderr after each answer
    #[arg(long)]
    pub(crate) stats: bool,
    /// Print the whole answer as one JSON object instead of streaming its text
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep only the first and the last tokens in the cache (StreamingLLM), this many of the last, so
    /// that a conversation never fills it; what lies between is not seen again
    #[arg(long, value_name = "TOKENS", value_parser = parse_tokens)]
    pub(crate) streaming_window: Option<u32>,
    /// How many of the first
    #[arg(long, value_name = "TOKENS", default_value_t = 4, requires = "streaming_window")]
    pub(crate) streaming_sinks: u32,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Clone, Debug, Default, ClapArgs)]
#[command(next_help_heading = "Sampling (defaults come from the model)")]
pub(crate) struct SamplingArgs {
    /// 0 takes the most probable token, 1 the model's own distribution
    #[arg(long, visible_alias = "temp", value_name = "T")]
    pub(crate) temperature: Option<f32>,
    /// The same as --temperature 0
    #[arg(long, conflicts_with = "temperature")]
    pub(crate) greedy: bool,
    /// Only the K most probable tokens; 0 for all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Only the most probable tokens with this share of the probability; 1 for all
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f32>,
    /// Only tokens with at least this share of the best one's probability; 0 for all
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f32>,
    /// Make seen tokens less probable by this factor; 1 for none
    #[arg(long, visible_alias = "repeat-penalty", value_name = "R")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Take this from a token's logit for each time it was generated
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Take this from a token's logit if it was generated
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Same seed, same answer; random if not given
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// End the answer before this text; may be given more than once
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Most tokens of an answer [default: what the context holds]
    #[arg(long, visible_alias = "n-predict", value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    /// Answers to the same prompt; the second has the seed plus 1, and so on
    #[arg(short = 'n', long = "n", value_name = "N", default_value_t = 1)]
    pub(crate) n: u32,
    /// Search for the most probable answers, following this many, instead of sampling
    #[arg(long, visible_alias = "num-beams", value_name = "N")]
    pub(crate) beam_width: Option<u32>,
    /// Above 0 the search prefers longer answers, below 0 shorter ones [default: 1]
    #[arg(long, value_name = "F", allow_negative_numbers = true, requires = "beam_width")]
    pub(crate) length_penalty: Option<f32>,
    /// Whether the search ends as soon as enough answers are complete; `never` goes on as long as
    /// a better one could come [default: false]
    #[arg(long, value_enum, value_name = "WHEN", requires = "beam_width")]
    #[arg(num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) early_stopping: Option<EarlyStoppingArg>,
    /// Report each token's log probability and the N best alternatives, as JSON lines on stderr
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<u32>,
}

/// Where the model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    #[default]
    Auto,
    Cpu,
    /// One of the machine's GPUs.
    Cuda(u32),
}

impl FromStr for DeviceArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(DeviceArg::Auto),
            "cpu" => Ok(DeviceArg::Cpu),
            "cuda" => Ok(DeviceArg::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(DeviceArg::Cuda)
                .ok_or("use auto, cpu, cuda or cuda:N"),
        }
    }
}

/// How keys and values are stored; `Auto` is f16.
///
/// The variants have no documentation of their own, because clap would print it as a long list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvDtypeArg {
    #[default]
    Auto,
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    F32,
    Int8,
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

/// How pages lie on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvLayoutArg {
    #[default]
    Paged,
    Virtual,
}

/// How keys and values are stored on a disk; `Auto` is as in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColdDtypeArg {
    #[default]
    Auto,
    Int8,
    #[value(alias = "fp8_e4m3")]
    Fp8,
    Int4,
}

/// How positions beyond the trained context are rotated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RopeScalingArg {
    /// By the scaling of this name.
    Named(RopeKind),
    /// As a JSON object says.
    Json(String),
}

impl EngineArgs {
    /// What is stored in fewer bits on a disk.
    pub(crate) fn cold_kv(&self) -> Option<ColdKv> {
        self.cold_kv_as(self.kv_cold_dtype)
    }

    /// As [`EngineArgs::cold_kv`], with another type.
    pub(crate) fn cold_kv_as(&self, dtype: ColdDtypeArg) -> Option<ColdKv> {
        let dtype = match dtype {
            ColdDtypeArg::Auto => return None,
            ColdDtypeArg::Int8 => ColdDtype::Int8,
            ColdDtypeArg::Fp8 => ColdDtype::Fp8,
            ColdDtypeArg::Int4 => ColdDtype::Int4,
        };
        Some(ColdKv { dtype, exact_layers: self.kv_cold_skip_layers.clone() })
    }
}

fn parse_rope_scaling(text: &str) -> Result<RopeScalingArg, ConfigError> {
    if text.trim_start().starts_with('{') {
        return Ok(RopeScalingArg::Json(text.to_owned()));
    }
    text.parse().map(RopeScalingArg::Named)
}

/// When beam search ends, in Hugging Face's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EarlyStoppingArg {
    True,
    False,
    Never,
}

#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Where to run: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceArg,
    /// On a GPU, multiply with all bits of the activations instead of rounding them to bf16
    #[arg(long)]
    pub(crate) exact_activations: bool,
    /// Threads [default: the machine's cores]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<u32>,
    /// Most tokens of a sequence, such as 8192 or 32K [default: the model's, if memory allows]
    #[arg(short = 'c', long, visible_alias = "ctx-size", alias = "context-length")]
    #[arg(value_name = "TOKENS", value_parser = parse_tokens)]
    pub(crate) max_model_len: Option<u32>,
    /// How keys and values are stored; int8 and fp8 take half the memory and change answers a little
    #[arg(long, value_enum, default_value_t, value_name = "TYPE")]
    pub(crate) kv_cache_dtype: KvDtypeArg,
    /// Layers that stay f16 with int8 and fp8, such as 0,29
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub(crate) kv_cache_dtype_skip_layers: Vec<u32>,
    /// Memory of the KV cache, such as 2GiB [default: what the context and sequences need]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory_bytes: Option<u64>,
    /// Share of the free memory that weights, KV cache and working memory may have together
    /// [default: 0.85]
    #[arg(long, value_name = "SHARE", alias = "mem-fraction-static")]
    pub(crate) gpu_memory_utilization: Option<f64>,
    /// Where a GPU's KV pages are: anywhere, or one after the other behind addresses that are reserved
    /// for every sequence at its longest, where nothing can be shared or moved
    #[arg(long, value_enum, default_value_t, value_name = "LAYOUT")]
    pub(crate) kv_layout: KvLayoutArg,
    /// Tokens of one page of the KV cache
    #[arg(long, value_name = "N", default_value_t = 16, alias = "page-size")]
    pub(crate) block_size: u32,
    /// Who is served next: fcfs = first come, priority = most urgent, prefix = longest cached prefix
    /// first, fair = between tenants, mlfq = shortest so far first
    #[arg(long, value_enum, default_value_t, value_name = "POLICY", alias = "schedule-policy")]
    pub(crate) scheduling_policy: PolicyArg,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    /// Host memory for evicted pages and preempted sequences; exact (vLLM's --kv-offloading-size). In
    /// GiB if no unit is given
    #[arg(long, value_name = "SIZE", value_parser = parse_swap, default_value = "0")]
    #[arg(alias = "kv-offloading-size", alias = "hicache-size")]
    pub(crate) swap_space: u64,
    /// Keep KV pages in a directory, up to this size, so that they outlive the process:
    /// ./kv-cache:20GiB. Only one engine at a time may use it
    #[arg(long, value_name = "PATH:SIZE", value_parser = parse_disk)]
    pub(crate) kv_disk: Option<DiskOptions>,
    /// How its files are read and written: by io_uring where the system has it (auto), by uring or
    /// threads; with ,direct around the system's page cache
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub(crate) kv_disk_io: DiskIo,
    /// Compute the first layers while the others of stored pages still come; unless it is said, with
    /// --kv-disk-io uring,direct on the CPU only
    #[arg(long, value_name = "BOOL")]
    pub(crate) kv_disk_layers: Option<bool>,
    /// Keep KV pages also somewhere else, where several engines find them: s3://BUCKET/PREFIX,
    /// gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, redis://HOST:PORT or file:///FOLDER
    #[arg(long, value_name = "URL")]
    pub(crate) kv_remote: Option<String>,
    /// Also use stored pages whose tokens stand elsewhere in a prompt, N in a row at least, as when
    /// the oldest turns of a conversation were left out; changes answers. Needs --kv-disk
    #[arg(long, value_name = "N")]
    pub(crate) cache_reuse: Option<u32>,
    /// Encrypt stored pages with the key in this file: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub(crate) kv_key_file: Option<PathBuf>,
    /// How pages are stored on disk or in the remote store: as they are (auto), or in fewer bits, which
    /// changes answers a little
    #[arg(long, value_enum, default_value_t, value_name = "TYPE")]
    pub(crate) kv_cold_dtype: ColdDtypeArg,
    /// Layers that --kv-cold-dtype leaves as they are, such as 0,29
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub(crate) kv_cold_skip_layers: Vec<u32>,
    /// Stretch the context beyond what the model was trained on: none, linear, dynamic, yarn,
    /// llama3, or an object as config.json has it under rope_scaling
    #[arg(long, value_name = "KIND|JSON", value_parser = parse_rope_scaling)]
    pub(crate) rope_scaling: Option<RopeScalingArg>,
    /// By how much to stretch it
    #[arg(long, value_name = "FACTOR")]
    pub(crate) rope_scale: Option<f64>,
    /// The context that the model was trained on, if its files do not say so
    #[arg(long, value_name = "TOKENS", visible_alias = "yarn-orig-ctx", value_parser = parse_tokens)]
    pub(crate) rope_original_context: Option<u32>,
    /// Base of the rotation's frequencies
    #[arg(long, value_name = "THETA")]
    pub(crate) rope_freq_base: Option<f64>,
    #[command(flatten)]
    pub(crate) sparse: SparseArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PullArgs {
    /// Hub id or short name
    #[arg(value_name = "MODEL", default_value = "smollm2")]
    pub(crate) model: String,
}

const PLAN_EXAMPLES: &str = "\
MODEL is anything `run` takes, a config.json, or a built-in shape: SHAPES.

Examples:
  nuthatch plan llama2-70b --context 8K --memory 160GiB
  nuthatch plan model.gguf --context 128K --batch 8 --memory 80GiB --json";

#[derive(Debug, ClapArgs)]
#[command(after_help = PLAN_EXAMPLES.replace("SHAPES", &crate::plan::shape_names()))]
pub(crate) struct PlanArgs {
    /// File, directory, config.json, hub id, short name or built-in shape
    #[arg(value_name = "MODEL", default_value = "smollm2")]
    pub(crate) model: String,
    /// Most tokens of a sequence, such as 128K [default: the model's context]
    #[arg(short, long, visible_alias = "max-model-len", alias = "ctx-size")]
    #[arg(value_name = "TOKENS", value_parser = parse_tokens)]
    pub(crate) context: Option<u32>,
    /// Sequences at one time
    #[arg(short, long, visible_alias = "max-num-seqs", value_name = "N", default_value_t = 1)]
    pub(crate) batch: u32,
    /// Memory for weights and KV, such as 80GiB [default: this machine's]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// Average tokens of a sequence [default: half the context]
    #[arg(short, long, value_name = "TOKENS", value_parser = parse_tokens)]
    pub(crate) average: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `bench` measures besides the engine itself.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Put a load on a server that speaks OpenAI's protocol, and measure it
    Serve(Box<BenchServeArgs>),
}

const BENCH_EXAMPLES: &str = "\
Tests are named as llama-bench names them: pp512 is the prefill of 512 tokens, tg128 the decode of
128, and `@ d2048` says that the cache held 2048 tokens before. Numbers may be lists: 128,512.

Examples:
  nuthatch bench
  nuthatch bench model.gguf --prompt 512,2048 --gen 128 --depth 0,2048,8000 --threads 8
  nuthatch bench --shape llama3-8b --random-weights --depth 8192,32768
  nuthatch bench --json results.json";

#[derive(Debug, ClapArgs)]
#[command(after_help = BENCH_EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: Option<BenchCommand>,
    /// File, directory, hub id or short name
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<String>,
    /// The model, said explicitly
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Measure a built-in shape (see `nuthatch plan --help`) instead of a model
    #[arg(long, value_name = "SHAPE", requires = "random_weights", conflicts_with_all = ["first", "model"])]
    pub(crate) shape: Option<String>,
    /// Make up the weights of the shape, in bf16; no files are needed
    #[arg(long, requires = "shape")]
    pub(crate) random_weights: bool,
    /// Tokens of the prefill tests; 0 for none
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "512")]
    pub(crate) prompt: Vec<u32>,
    /// Tokens of the decode tests; 0 for none
    #[arg(short = 'n', long = "gen", value_name = "N,...", value_delimiter = ',')]
    #[arg(default_value = "128")]
    pub(crate) generate: Vec<u32>,
    /// Tokens in the cache before a test
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    pub(crate) depth: Vec<u32>,
    /// Times that each test is measured
    #[arg(short, long, value_name = "N", default_value_t = 3)]
    pub(crate) repeat: u32,
    /// Take tokens from a text, from any place on, instead of making them up: how often `--sparse`
    /// chooses anew depends on what is said
    #[arg(long, value_name = "FILE", conflicts_with = "shape")]
    pub(crate) text: Option<PathBuf>,
    /// Also write JSON to a file; `-` prints it instead of the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Also say what each stage of each layer takes; on a GPU
    #[arg(long)]
    pub(crate) breakdown: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
