//! `nuthatch serve`, checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use nuthatch_engine::Pooling;
use nuthatch_server::{EventsConfig, HttpLimits, TlsFiles};

use super::{ConfigError, EngineConfig, model_or_default};
use crate::args::{PoolingArg, ServeArgs, ToolParserArg};
use crate::config::BATCH_SEQS;
use crate::resolve::ModelSpec;

/// `nuthatch serve`, checked.
#[derive(Clone, Debug)]
pub(crate) struct ServeConfig {
    pub(crate) model: ModelSpec,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Names that were given; none means the file's.
    pub(crate) names: Vec<String>,
    pub(crate) api_keys: Vec<String>,
    pub(crate) admin_key: Option<String>,
    pub(crate) isolates_tenants: bool,
    pub(crate) session_dir: Option<PathBuf>,
    pub(crate) pooling: Pooling,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) events: Option<EventsConfig>,
    pub(crate) limits: HttpLimits,
    pub(crate) tool_parser: ToolParserArg,
    pub(crate) engine: EngineConfig,
}

impl ServeConfig {
    /// Checks the arguments.
    pub(crate) fn new(args: &ServeArgs) -> anyhow::Result<Self> {
        let model = match (&args.first, &args.model) {
            (Some(first), Some(second)) => {
                let (first, second) = (first.clone(), second.clone());
                return Err(ConfigError::Twice { what: "the model", first, second }.into());
            }
            (first, second) => first.as_deref().or(second.as_deref()),
        };
        let tls = match (&args.ssl_certfile, &args.ssl_keyfile) {
            (None, None) => None,
            (Some(certificates), Some(key)) => {
                Some(TlsFiles { certificates: certificates.clone(), key: key.clone() })
            }
            _ => return Err(ConfigError::HalfTls.into()),
        };
        for (flag, value) in [
            ("--max-num-queued-reqs", args.max_num_queued_reqs),
            ("--max-connections", args.max_connections),
            ("--client-timeout", args.client_timeout),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero(flag).into());
            }
        }
        let mut api_keys = args.api_key.clone();
        if let Some(path) = &args.api_key_file {
            api_keys.extend(read_keys(path)?);
        }
        if api_keys.iter().chain(&args.admin_key).any(|key| key.trim().is_empty()) {
            return Err(ConfigError::EmptyKey.into());
        }
        let events = args.kv_events_config.as_deref().map(EventsConfig::from_json).transpose()?;
        let client_time = Duration::from_secs(u64::from(args.client_timeout));
        let mut engine = EngineConfig::new(&args.engine, BATCH_SEQS)?;
        engine.options.max_waiting = Some(args.max_num_queued_reqs);
        Ok(ServeConfig {
            model: model_or_default(model)?,
            host: args.host.clone(),
            port: args.port,
            names: args.served_model_name.clone(),
            api_keys,
            admin_key: args.admin_key.clone(),
            isolates_tenants: args.isolate_tenants,
            session_dir: args.session_dir.clone(),
            pooling: match args.pooling {
                PoolingArg::Last => Pooling::Last,
                PoolingArg::Mean => Pooling::Mean,
            },
            tls,
            events: events.flatten(),
            limits: HttpLimits {
                n_connections: args.max_connections as usize,
                head_time: client_time,
                body_time: client_time,
                write_time: client_time,
                drain_time: Duration::from_secs(u64::from(args.shutdown_timeout)),
                ..HttpLimits::default()
            },
            tool_parser: args.tool_call_parser,
            engine,
        })
    }
}

/// The keys of a file, one a line; a file without keys would let everybody in.
fn read_keys(path: &Path) -> anyhow::Result<Vec<String>> {
    let show = || format!("cannot read the keys of {}", path.display());
    let text = std::fs::read_to_string(path).with_context(show)?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    anyhow::ensure!(!keys.is_empty(), "{} holds no key", path.display());
    Ok(keys)
}
