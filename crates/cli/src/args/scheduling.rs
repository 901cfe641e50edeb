//! Who is served next, and what stays in the cache: flags that every command with an engine has.

use clap::{Args as ClapArgs, ValueEnum};
use nuthatch_engine::Eviction;

/// Who is served next.
///
/// The variants have no documentation of their own, because clap would print it as a long list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum PolicyArg {
    #[default]
    Fcfs,
    Priority,
    #[value(alias = "lpm")]
    Prefix,
    Fair,
    Mlfq,
}

impl PolicyArg {
    /// As it is typed.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PolicyArg::Fcfs => "fcfs",
            PolicyArg::Priority => "priority",
            PolicyArg::Prefix => "prefix",
            PolicyArg::Fair => "fair",
            PolicyArg::Mlfq => "mlfq",
        }
    }
}

/// Which cached pages go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvictionArg {
    #[default]
    Lru,
    Lfu,
    Priority,
    Lineage,
}

impl From<EvictionArg> for Eviction {
    fn from(arg: EvictionArg) -> Self {
        match arg {
            EvictionArg::Lru => Eviction::Lru,
            EvictionArg::Lfu => Eviction::Lfu,
            EvictionArg::Priority => Eviction::Priority,
            EvictionArg::Lineage => Eviction::Lineage,
        }
    }
}

/// Flags in vLLM's words; SGLang's and llama-server's are hidden aliases.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct SchedulingArgs {
    /// Most tokens computed in one step [default: 512, but 4096 on a GPU whose KV is on the host]
    #[arg(long, value_name = "N", alias = "chunked-prefill-size", alias = "batch-size")]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Most sequences that run at one time [default: 1, but 16 for `serve`, `batch`
    /// and `simulate`]
    #[arg(long, value_name = "N", alias = "max-running-requests", alias = "parallel")]
    pub(crate) max_num_seqs: Option<u32>,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
}

/// What stays in the cache.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct CacheArgs {
    /// Which cached pages go first when pages are short
    #[arg(long, value_enum, default_value_t, value_name = "POLICY")]
    #[arg(alias = "radix-eviction-policy")]
    pub(crate) eviction_policy: EvictionArg,
    /// Share the pages of equal beginnings; this is the default
    #[arg(long, overrides_with = "no_enable_prefix_caching", hide = true)]
    pub(crate) enable_prefix_caching: bool,
    /// Compute every prompt from its beginning, whatever the cache holds
    #[arg(long, overrides_with = "enable_prefix_caching", alias = "disable-radix-cache")]
    pub(crate) no_enable_prefix_caching: bool,
}
