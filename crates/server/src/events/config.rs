//! `--kv-events-config`, in vLLM's words.

use serde::Deserialize;

/// Batches that are kept for replay, at most.
const STEPS_MAX: usize = 1_000_000;
/// Batches that wait, in the feed or for a subscriber, at most.
const QUEUE_MAX: usize = 1_000_000;
/// Bytes of a topic.
const TOPIC_BYTES: usize = 255;

/// How the cache's changes are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsConfig {
    /// Where batches are published.
    pub endpoint: Endpoint,
    /// Where missed batches are asked for.
    pub replay_endpoint: Option<Endpoint>,
    /// Where snapshots are asked for; they are also given where replay is.
    pub snapshot_endpoint: Option<Endpoint>,
    /// Batches that are kept for replay.
    pub buffer_steps: usize,
    /// Batches that wait for a slow subscriber; further ones are dropped.
    pub hwm: usize,
    /// Batches that wait to be encoded; further ones are dropped.
    pub max_queue_size: usize,
    /// What batches are published under.
    pub topic: String,
    /// How events are written.
    pub encoding: Encoding,
}

/// How events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// `{"type": "BlockStored", ...}`, as vLLM does since the middle of 2026.
    #[default]
    Map,
    /// `["BlockStored", ...]`, as vLLM did before and SGLang does.
    Array,
}

/// One end of a ZeroMQ connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Others come here.
    Bind {
        /// The interface.
        host: String,
        /// The port; 0 lets the system choose.
        port: u16,
    },
    /// We go there.
    Connect {
        /// `host:port`
        address: String,
    },
}

/// Why a configuration of events makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum EventsConfigError {
    /// It is not JSON of the expected form.
    #[error("--kv-events-config: {0}")]
    Json(#[from] serde_json::Error),
    /// An endpoint is not one of TCP.
    #[error("--kv-events-config: {0:?} is no endpoint of the form tcp://HOST:PORT")]
    Endpoint(String),
    /// Questions come to the server.
    #[error(
        "--kv-events-config: {0:?} is not an interface of this machine to listen on; use * or an address of it"
    )]
    Elsewhere(String),
    /// A publisher that is not known.
    #[error("--kv-events-config: publisher {0:?} is not known; there are zmq and null")]
    Publisher(String),
    /// A number or a text is too large, or 0.
    #[error("--kv-events-config: {what} is {value}, but must be from 1 to {max}")]
    Range {
        /// The field.
        what: &'static str,
        /// What was given.
        value: usize,
        /// The most there may be.
        max: usize,
    },
}

/// vLLM's fields, and ours.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    #[serde(default)]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    #[serde(default = "default_endpoint")]
    endpoint: String,
    replay_endpoint: Option<String>,
    snapshot_endpoint: Option<String>,
    #[serde(default = "default_steps")]
    buffer_steps: usize,
    #[serde(default = "default_queue")]
    hwm: usize,
    #[serde(default = "default_queue")]
    max_queue_size: usize,
    #[serde(default)]
    topic: String,
    #[serde(default)]
    encoding: Encoding,
}

fn default_endpoint() -> String {
    "tcp://*:5557".to_owned()
}

fn default_steps() -> usize {
    10_000
}

/// A queue is memory that is never given back, so ours is shorter than vLLM's 100,000.
fn default_queue() -> usize {
    4096
}

impl EventsConfig {
    /// Reads vLLM's JSON. `None` if it says that nothing is to be published.
    pub fn from_json(text: &str) -> Result<Option<Self>, EventsConfigError> {
        let given: Given = serde_json::from_str(text)?;
        match given.publisher.as_deref() {
            Some("zmq") | None => {}
            Some("null") => return Ok(None),
            Some(other) => return Err(EventsConfigError::Publisher(other.to_owned())),
        }
        if !given.enable_kv_cache_events {
            return Ok(None);
        }
        for (what, value, max) in [
            ("buffer_steps", given.buffer_steps, STEPS_MAX),
            ("hwm", given.hwm, QUEUE_MAX),
            ("max_queue_size", given.max_queue_size, QUEUE_MAX),
            ("the length of topic", given.topic.len().max(1), TOPIC_BYTES),
        ] {
            if !(1..=max).contains(&value) {
                return Err(EventsConfigError::Range { what, value, max });
            }
        }
        let desk = |text: Option<String>| text.map(|text| listening(&text)).transpose();
        Ok(Some(EventsConfig {
            endpoint: endpoint(&given.endpoint)?,
            replay_endpoint: desk(given.replay_endpoint)?,
            snapshot_endpoint: desk(given.snapshot_endpoint)?,
            buffer_steps: given.buffer_steps,
            hwm: given.hwm,
            max_queue_size: given.max_queue_size,
            topic: given.topic,
            encoding: given.encoding,
        }))
    }
}

/// Where others come to, if the host is `*` or an address that means this machine; else where we go.
fn endpoint(text: &str) -> Result<Endpoint, EventsConfigError> {
    let wrong = || EventsConfigError::Endpoint(text.to_owned());
    let address = text.strip_prefix("tcp://").ok_or_else(wrong)?;
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        return Err(wrong());
    }
    let host = if host == "*" { "0.0.0.0" } else { host };
    let ip: Option<std::net::IpAddr> = host.parse().ok();
    let is_here = ip.is_some_and(|ip| ip.is_unspecified() || ip.is_loopback());
    if is_here {
        return Ok(Endpoint::Bind { host: host.to_owned(), port });
    }
    Ok(Endpoint::Connect { address: address.to_owned() })
}

fn listening(text: &str) -> Result<Endpoint, EventsConfigError> {
    match endpoint(text)? {
        bind @ Endpoint::Bind { .. } => Ok(bind),
        Endpoint::Connect { .. } => Err(EventsConfigError::Elsewhere(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(host: &str, port: u16) -> Endpoint {
        Endpoint::Bind { host: host.to_owned(), port }
    }

    #[test]
    fn endpoints_are_here_or_elsewhere() {
        assert_eq!(endpoint("tcp://*:5557").unwrap(), bind("0.0.0.0", 5557));
        assert_eq!(endpoint("tcp://127.0.0.1:0").unwrap(), bind("127.0.0.1", 0));
        assert_eq!(endpoint("tcp://[::]:1").unwrap(), bind("::", 1));
        let address = "router.svc:5557".to_owned();
        assert_eq!(endpoint("tcp://router.svc:5557").unwrap(), Endpoint::Connect { address });
        for wrong in ["", "tcp://", "tcp://:1", "tcp://x", "tcp://x:99999", "ipc:///x:1"] {
            assert!(endpoint(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn vllms_own_words_are_understood() {
        let text = r#"{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://*:5558","buffer_steps":10000,"hwm":100000,
            "max_queue_size":100000,"topic":"kv@pod@model"}"#;
        let config = EventsConfig::from_json(text).unwrap().unwrap();
        assert_eq!(config.replay_endpoint, Some(bind("0.0.0.0", 5558)));
        assert_eq!((config.encoding, config.hwm), (Encoding::Map, 100_000));
        for off in ["{}", r#"{"enable_kv_cache_events":true,"publisher":"null"}"#] {
            assert_eq!(EventsConfig::from_json(off).unwrap(), None);
        }
        for wrong in [
            "",
            r#"{"enabled":true}"#,
            r#"{"enable_kv_cache_events":true,"hwm":0}"#,
            r#"{"enable_kv_cache_events":true,"encoding":"xml"}"#,
            r#"{"enable_kv_cache_events":true,"replay_endpoint":"tcp://elsewhere:1"}"#,
        ] {
            assert!(EventsConfig::from_json(wrong).is_err(), "{wrong}");
        }
    }
}
