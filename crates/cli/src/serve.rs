//! `nuthatch serve`: an OpenAI-compatible server.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use nuthatch_server::{Endpoint, Server, ServerConfig, Sessions, Stopped, ToolFormat, listen};

use crate::args::ToolParserArg;
use crate::config::ServeConfig;
use crate::fetch::{self, Fetch};
use crate::host;
use crate::interrupt::EXIT_INTERRUPTED;
use crate::load::{self, Prepared};
use crate::text;

/// Runs the command. Ctrl-C lets running requests end; the second one does not.
pub(crate) fn run(config: &ServeConfig, fetch: &Fetch<'_>) -> anyhow::Result<ExitCode> {
    // A port that cannot be had is known before anything is fetched or loaded.
    let listener = listen(&config.host, config.port)?;
    allow_connections(config.limits.n_connections as u64);
    let path = fetch::fetch(&config.model, fetch)?;
    let prepared = Prepared::open(&path, &config.engine, fetch.env)?;
    let text = text::load(&prepared.files, false)?;
    let loaded = prepared.load()?;
    let engine = loaded.engine.spawn()?;
    let mut names = config.names.clone();
    if names.is_empty() {
        names.push(load::model_name(&path));
    }
    let name = names[0].clone();
    let tools = match config.tool_parser {
        ToolParserArg::Auto => text.tools,
        ToolParserArg::Hermes => ToolFormat::Hermes,
        ToolParserArg::Llama => ToolFormat::Llama,
        ToolParserArg::None => ToolFormat::None,
    };
    let server = Server::new(
        ServerConfig {
            names,
            endpoint: Endpoint::new(
                text.words,
                load::sampling(&prepared.files.config().generation),
                prepared.sizes.max_context,
                tools,
            ),
            sizes: prepared.sizes,
            device: loaded.device,
            api_keys: config.api_keys.clone(),
            admin_key: config.admin_key.clone(),
            isolates_tenants: config.isolates_tenants,
            sessions: config.session_dir.clone().map(Sessions::new),
            pooling: config.pooling,
            tls: config.tls.clone(),
            events: config.events.clone(),
            limits: config.limits,
            unix_seconds: host::unix_seconds,
        },
        listener,
        engine.clone(),
    )?;
    announce(&name, server.address()?, config);
    if let Some((live, desks)) = server.events_addresses()? {
        announce_events(&live, &desks);
    }
    let running = fetch.interrupt.begin();
    let stopped = server.run(|| fetch.interrupt.requested())?;
    drop(running);
    engine.shutdown()?;
    Ok(match stopped {
        Stopped::Drained => ExitCode::SUCCESS,
        Stopped::CutShort => {
            let _ = writeln!(io::stderr(), "requests were cancelled: they had no more time");
            ExitCode::from(EXIT_INTERRUPTED)
        }
    })
}

/// Files that are open besides connections: the model's, and what the runtime needs.
const N_OTHER_FILES: u64 = 256;

/// Shells often allow a thousand open files, and a connection is one.
fn allow_connections(n: u64) {
    let n_allowed = host::allow_files(n + N_OTHER_FILES);
    if let Some(n_allowed) = n_allowed.filter(|&n_allowed| n_allowed < n + N_OTHER_FILES) {
        let n_fit = n_allowed.saturating_sub(N_OTHER_FILES);
        tracing::warn!("the system allows {n_allowed} open files: {n_fit} connections of {n}");
    }
}

/// Says where changes of the cache are published.
fn announce_events(live: &str, desks: &[SocketAddr]) {
    let mut text = format!("KV events are published at tcp://{live}");
    for desk in desks {
        text += &format!(", replayed at tcp://{desk}");
    }
    text.push('\n');
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Says where the server is, and who can reach it. A closed stderr is no reason to stop.
fn announce(name: &str, address: SocketAddr, config: &ServeConfig) {
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let mut text = format!("{name} is served at {scheme}://{address}");
    text += match (address.ip().is_loopback(), config.api_keys.is_empty()) {
        (true, _) => ", for this machine only (--host 0.0.0.0 opens it to others)\n",
        (false, false) => ", for all who reach this machine and have a key\n",
        (false, true) => {
            ", for ALL who reach this machine: no key is needed (--api-key-file asks for one)\n"
        }
    };
    if !address.ip().is_loopback() && config.tls.is_none() {
        text += "connections are not encrypted: --ssl-certfile and --ssl-keyfile do that\n";
    }
    let _ = io::stderr().write_all(text.as_bytes());
}
