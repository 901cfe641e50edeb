//! What was typed after `nuthatch serve`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};

use super::EngineArgs;

const EXAMPLES: &str = "\
Flags have vLLM's names; the common ones of SGLang and llama-server are understood too, such as
--tp-size 1, --context-length, -hf, -np, -ngl, -a, -fa, -ctk with -ctv. The server answers
/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics and a
page to watch it at /. It listens on this machine only, unless --host says otherwise.

FILE of --config has a flag a line, without its dashes, as YAML: `max-num-seqs: 32`. What is typed
goes before it.

Examples:
  nuthatch serve
  nuthatch serve ./Qwen2.5-7B-Instruct --served-model-name qwen --max-model-len 32K
  nuthatch serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile a.pem --ssl-keyfile k.pem";

#[derive(Debug, ClapArgs)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// File, directory, hub id or short name
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<String>,
    /// The model, said explicitly
    #[arg(short, long, value_name = "MODEL", alias = "model-path")]
    pub(crate) model: Option<String>,
    /// Interface to listen on; 0.0.0.0 is all of them
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Names by which clients call the model; answers have the first [default: the file's name]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) served_model_name: Vec<String>,
    /// A key that clients must give; may be given more than once. Others can see what was typed,
    /// so prefer --api-key-file
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// A file of keys, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// The key that opens /reset_prefix_cache; without it nobody may
    #[arg(long, value_name = "KEY")]
    pub(crate) admin_key: Option<String>,
    /// Clients with different keys (or X-Tenant-Id headers, without keys) share no cached pages
    #[arg(long)]
    pub(crate) isolate_tenants: bool,
    /// Keep conversations whose requests have a `session_id` in this directory, and go on with them
    #[arg(long, value_name = "DIR")]
    pub(crate) session_dir: Option<PathBuf>,
    /// Certificate, and those that vouch for it, as PEM
    #[arg(long, value_name = "FILE", alias = "ssl-cert-file")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key of the certificate, as PEM
    #[arg(long, value_name = "FILE", alias = "ssl-key-file")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Most requests that wait; more are refused with status 503
    #[arg(long, value_name = "N", default_value_t = 4096, alias = "max-queued-requests")]
    pub(crate) max_num_queued_reqs: u32,
    /// Most connections at one time
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    pub(crate) max_connections: u32,
    /// Seconds that running requests have to end when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) shutdown_timeout: u32,
    /// Seconds that a client has to send a request, and to take something of its answer
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) client_timeout: u32,
    /// Publish what the prefix cache holds, for routers, in vLLM's words: '{"enable_kv_cache_events":
    /// true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "encoding": "map"}'
    #[arg(long, value_name = "JSON")]
    pub(crate) kv_events_config: Option<String>,
    /// How the model writes calls of tools
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) tool_call_parser: ToolParserArg,
    /// Which hidden state /v1/embeddings gives for a text: that of its last token, or the mean over
    /// all of them
    #[arg(long, value_enum, default_value_t, value_name = "KIND")]
    pub(crate) pooling: PoolingArg,
    /// A file with these flags, as YAML
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// Which hidden state is the vector of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingArg {
    #[default]
    Last,
    Mean,
}

/// How a model writes calls of tools; `auto` asks its chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ToolParserArg {
    #[default]
    Auto,
    #[value(alias = "qwen", alias = "qwen25")]
    Hermes,
    #[value(name = "llama3_json", alias = "llama3")]
    Llama,
    None,
}
