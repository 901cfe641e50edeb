//! `nuthatch sessions`: conversations that are kept.

use std::io::{self, Write as _};

use anyhow::Context as _;
use nuthatch_server::{Session, Sessions};
use serde_json::json;

use crate::args::SessionsCommand;
use crate::env::Env;

/// Runs the command.
pub(crate) fn run(what: &SessionsCommand, env: &Env) -> anyhow::Result<()> {
    let sessions = Sessions::new(env.session_dir()?);
    let mut out = io::stdout().lock();
    match what {
        SessionsCommand::List { json: as_json } => {
            let names = sessions.names()?;
            let load = |name: &String| Ok((name.clone(), sessions.get(name)?));
            let all: Vec<(String, Session)> =
                names.iter().map(load).collect::<anyhow::Result<_>>()?;
            if *as_json {
                let one = |(name, session): &(String, Session)| json!({ "name": name, "model": session.model, "messages": session.n_messages() });
                let all: Vec<_> = all.iter().map(one).collect();
                writeln!(out, "{}", json!(all))?;
                return Ok(());
            }
            let width = names.iter().map(String::len).max().unwrap_or(0);
            for (name, session) in all {
                writeln!(
                    out,
                    "{name:<width$}  {} messages, {}",
                    session.n_messages(),
                    session.model
                )?;
            }
        }
        SessionsCommand::Export { name, file } => {
            let text = sessions.export(name)?;
            match file {
                Some(path) => std::fs::write(path, text + "\n")
                    .with_context(|| format!("cannot write {}", path.display()))?,
                None => writeln!(out, "{text}")?,
            }
        }
        SessionsCommand::Import { file, name } => {
            let stem = || file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
            let name = name.clone().or_else(stem).unwrap_or_default();
            let session = sessions.import(&name, file)?;
            writeln!(out, "{name}: {} messages", session.n_messages())?;
        }
        SessionsCommand::Delete { names } => {
            for name in names {
                sessions.delete(name)?;
            }
        }
    }
    Ok(())
}
