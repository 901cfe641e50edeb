//! What a server is told at its start.

use std::path::PathBuf;
use std::time::Duration;

use nuthatch_engine::{Pooling, Sizes};

use crate::{Endpoint, EventsConfig, Sessions};

/// What a server is told at its start.
#[derive(Debug)]
pub struct ServerConfig {
    /// Names of the model; the first one is in the answers. At least one.
    pub names: Vec<String>,
    /// What all requests share.
    pub endpoint: Endpoint,
    /// How large the engine is, to be told.
    pub sizes: Sizes,
    /// The device, for people.
    pub device: String,
    /// Keys of which a client must give one. None lets everybody in.
    pub api_keys: Vec<String>,
    /// The key that opens what changes the server. Without one nobody may.
    pub admin_key: Option<String>,
    /// Whether clients with different keys, or of different tenants, share no cached pages.
    pub isolates_tenants: bool,
    /// Where conversations with a `session_id` are kept, if they are.
    pub sessions: Option<Sessions>,
    /// Which hidden state is the vector of a text.
    pub pooling: Pooling,
    /// Certificate and key; without them connections are not encrypted.
    pub tls: Option<TlsFiles>,
    /// How changes of the cache are published, if they are.
    pub events: Option<EventsConfig>,
    /// What connections and requests may cost.
    pub limits: HttpLimits,
    /// Seconds since 1970, for answers that say when they were made.
    pub unix_seconds: fn() -> u64,
}

/// Where the files of a certificate are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate and those that vouch for it, as PEM.
    pub certificates: PathBuf,
    /// The private key, as PEM.
    pub key: PathBuf,
}

/// What connections and requests may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections at one time; more wait to be accepted.
    pub n_connections: usize,
    /// Time for a request's head, and between two requests of one connection.
    pub head_time: Duration,
    /// Time for a request's body.
    pub body_time: Duration,
    /// Time in which a client must take at least a byte of what it is sent.
    pub write_time: Duration,
    /// Bytes of all bodies that are being read or understood; more wait.
    pub bodies_bytes: usize,
    /// Time that running requests have to end when the server stops.
    pub drain_time: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        HttpLimits {
            n_connections: 16_384,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(60),
            write_time: Duration::from_secs(60),
            bodies_bytes: 512 << 20,
            drain_time: Duration::from_secs(30),
        }
    }
}
