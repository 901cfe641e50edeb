//! An OpenAI-compatible server on an engine: the only crate that knows HTTP.
//!
//! ```text
//!   socket --> hyper --> router --> completions --> answer::Endpoint --> engine's thread
//!     ^                                |                                     |
//!     +---- EventStream, or a body ----+<--- Flight: one channel a request <-+
//! ```
//!
//! Code map: [`listen`] takes a port and [`Server`] runs; `connection` bounds what a connection may cost; `router` says
//! who answers what, `guard` who may ask; `completions` takes requests and `flight` brings them to the
//! engine, whose thread puts each token into the request's channel and waits for nobody, so that no
//! request needs a thread; `stream` is an answer that is sent as it grows; `conversations` continues those that `sessions` keeps in files; `metrics` counts, and
//! `dashboard` shows; `events` tells routers what the cache holds. [`answer`](Endpoint) is the part without HTTP, which `nuthatch batch` shares.
//!
//! Clients are not trusted: what they send is bounded in bytes, time and number, and a panic while
//! one request is handled fails that request alone.

mod answer;
mod app;
mod completions;
mod config;
mod connection;
mod conversations;
mod dashboard;
mod embeddings;
mod error;
mod events;
mod flight;
mod guard;
mod metrics;
mod router;
mod serve;
mod service;
mod sessions;
mod stream;
mod tls;

pub use answer::{Body, Endpoint, Event, Heading, Job, Origin, Piece, ToolFormat, refusal};
pub use config::{HttpLimits, ServerConfig, TlsFiles};
pub use events::{
    Encoding as EventEncoding, Endpoint as EventEndpoint, EventsConfig, EventsConfigError,
};
pub use serve::{ServeError, Server, Stopped, listen};
pub use sessions::{Session, SessionError, Sessions, check_name};
pub use tls::TlsError;
