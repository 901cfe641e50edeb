//! What was typed after `nuthatch simulate`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use nuthatch_types::HostReads;

use super::{PolicyArg, SchedulingArgs};
use crate::simulate::{Cost, parse_cost};
use crate::size::parse_tokens;

const EXAMPLES: &str = "\
The real scheduler and cache run; only the model is missing, and time is computed: a step takes
  step + prefill * (prompt tokens) + prefill-kv * (prompt tokens x tokens before each)
       + decode * (answers) + decode-kv * (cached tokens that answers read) + copy * (pages)
       + host * (pages that sequences read on the host)
microseconds. Requests come at random; chats go on for some turns; one tenant sends much in the
second third of the time. Every policy gets the same requests, and a seed gives the same output.

Examples:
  nuthatch simulate
  nuthatch simulate --policies fcfs,fair --rate 1.5 --heavy-share 0.7 --plots plots
  nuthatch simulate --cost step=6200,prefill=40,decode=20,decode-kv=0.03 --rate 20";

#[derive(Debug, ClapArgs)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimulateArgs {
    /// Policies to compare
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY,...")]
    #[arg(default_value = "fcfs,priority,prefix,fair,mlfq")]
    pub(crate) policies: Vec<PolicyArg>,
    /// Same seed, same output
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Also write everything to a file as JSON; `-` prints it instead of the tables
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write plots to a folder as SVG
    #[arg(long, value_name = "FOLDER")]
    pub(crate) plots: Option<PathBuf>,
    /// Pages of the KV cache, 16 tokens each
    #[arg(long, value_name = "N", default_value_t = 1024, alias = "num-gpu-blocks-override")]
    pub(crate) pages: u32,
    /// Pages of the host tier, to which preempted sequences may be swapped
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) host_pages: u32,
    /// How the device reads pages of the host, so that a request for which it has no room may run on
    /// them: as its own, over a link, or never
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub(crate) host_reads: HostReadsArg,
    /// Microseconds that parts of a step take, such as step=3000,prefill=900
    #[arg(long, value_name = "PART=US,...", value_parser = parse_cost, default_value = "")]
    pub(crate) cost: Cost,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
}

/// How the device reads pages of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HostReadsArg {
    Never,
    #[default]
    Near,
    Far,
}

impl From<HostReadsArg> for HostReads {
    fn from(arg: HostReadsArg) -> Self {
        match arg {
            HostReadsArg::Never => HostReads::Never,
            HostReadsArg::Near => HostReads::Near,
            HostReadsArg::Far => HostReads::Far,
        }
    }
}

#[derive(Clone, Debug, ClapArgs, serde::Serialize)]
#[command(next_help_heading = "Workload")]
pub(crate) struct WorkloadArgs {
    /// Seconds in which requests come
    #[arg(long, value_name = "S", default_value_t = 600.0)]
    pub(crate) duration: f64,
    /// Requests a second, on average
    #[arg(long, value_name = "N", default_value_t = 0.8)]
    pub(crate) rate: f64,
    /// Tokens of what a user says, on average; ShareGPT's are 161
    #[arg(long, value_name = "N", default_value_t = 161.0)]
    pub(crate) prompt_mean: f64,
    /// Deviation of the logarithm of that length
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub(crate) prompt_sigma: f64,
    /// Tokens of an answer, on average; ShareGPT's are 338
    #[arg(long, value_name = "N", default_value_t = 338.0)]
    pub(crate) answer_mean: f64,
    /// Deviation of the logarithm of that length
    #[arg(long, value_name = "S", default_value_t = 0.8)]
    pub(crate) answer_sigma: f64,
    /// Turns of a chat, on average
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    pub(crate) turns: f64,
    /// Seconds from a turn to the next, on average
    #[arg(long, value_name = "S", default_value_t = 40.0)]
    pub(crate) think: f64,
    /// System prompts; each chat begins with one of them
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub(crate) groups: u32,
    /// Tokens of a system prompt
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub(crate) system_tokens: u32,
    /// Tenants
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub(crate) tenants: u32,
    /// Share of the requests that come from the first tenant, all in the second third of the time
    #[arg(long, value_name = "SHARE", default_value_t = 0.4)]
    pub(crate) heavy_share: f64,
    /// Share of the requests that are urgent
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    pub(crate) urgent_share: f64,
    /// Share of the chats that begin with a long document
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) long_share: f64,
    /// Tokens of a long document
    #[arg(long, value_name = "TOKENS", default_value = "8K", value_parser = parse_tokens)]
    pub(crate) long_tokens: u32,
    /// Most tokens of a sequence
    #[arg(long, value_name = "TOKENS", default_value = "4K", value_parser = parse_tokens)]
    pub(crate) max_model_len: u32,
}
