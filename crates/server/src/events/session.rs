//! One connection: a subscriber, or somebody who asks for what it missed.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use nuthatch_engine::EngineHandle;
use tokio::net::TcpStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, oneshot};
use tokio::time::timeout;

use super::batch::Encoder;
use super::log::Log;
use super::zmtp::Peer;
use super::{Batch, Feed};

/// Topics that one subscriber may name.
const N_TOPICS: usize = 64;
/// What follows the last batch of a replay, as a number.
const END: i64 = -1;
/// A snapshot before the first batch.
const NO_BATCH: i64 = -1;
/// A snapshot that cannot be had.
const UNAVAILABLE: i64 = -2;
/// How long the engine may take for a snapshot; a step of a long prompt comes before it.
const SNAPSHOT_TIME: Duration = Duration::from_secs(30);

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) topic: Bytes,
    pub(crate) encoder: Encoder,
    pub(crate) live: broadcast::Sender<Batch>,
    pub(crate) log: Mutex<Log>,
    pub(crate) engine: EngineHandle,
    pub(crate) feed: Arc<Feed>,
}

impl Shared {
    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a subscriber every batch from now on. One that is too slow misses some.
pub(crate) async fn publish(shared: Arc<Shared>, stream: TcpStream) -> io::Result<()> {
    let _ = stream.set_nodelay(true);
    let mut batches = shared.live.subscribe();
    let mut peer = Peer::greet(stream, "PUB", &["SUB", "XSUB"]).await?;
    let mut topics: Vec<Bytes> = Vec::new();
    loop {
        tokio::select! {
            message = peer.receive() => subscribe(&mut topics, &message?)?,
            batch = batches.recv() => match batch {
                Ok(Batch { seq, payload }) => {
                    if topics.iter().any(|topic| shared.topic.starts_with(topic)) {
                        peer.send(&[&shared.topic, &seq.to_be_bytes(), &payload]).await?;
                    }
                }
                Err(RecvError::Lagged(n_missed)) => {
                    tracing::debug!(n_missed, "a reader of KV events is too slow");
                }
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

/// Takes a message of a subscriber: 1 and a topic, or 0 and one.
fn subscribe(topics: &mut Vec<Bytes>, message: &[Bytes]) -> io::Result<()> {
    let [frame] = message else { return Ok(()) };
    match frame.first() {
        Some(1) if topics.len() == N_TOPICS => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many topics"));
        }
        Some(1) => topics.push(frame.slice(1..)),
        Some(0) => {
            if let Some(at) = topics.iter().position(|topic| *topic == frame[1..]) {
                topics.remove(at);
            }
        }
        Some(_) | None => {}
    }
    Ok(())
}

/// What somebody asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// Every batch from this number on that is still kept.
    Replay(u64),
    /// Everything that can be found now.
    Snapshot,
}

/// Understands a message; `None` if it makes no sense.
fn question(message: &[Bytes]) -> Option<Question> {
    // An empty frame, which a REQ socket adds by itself, ends the address.
    let [address, asked] = message else { return None };
    if !address.is_empty() {
        return None;
    }
    // As a number it would be one that no batch ever has.
    if asked[..] == b"snapshot"[..] {
        return Some(Question::Snapshot);
    }
    let seq: [u8; 8] = asked[..].try_into().ok()?;
    Some(Question::Replay(u64::from_be_bytes(seq)))
}

/// Answers questions until the one who asks leaves.
pub(crate) async fn answer(shared: Arc<Shared>, stream: TcpStream) -> io::Result<()> {
    let _ = stream.set_nodelay(true);
    let mut peer = Peer::greet(stream, "ROUTER", &["REQ", "DEALER", "ROUTER"]).await?;
    loop {
        let message = peer.receive().await?;
        match question(&message) {
            Some(Question::Replay(seq)) => {
                let batches = shared.log().since(seq);
                for Batch { seq, payload } in batches {
                    peer.send(&[b"", &shared.topic, &seq.to_be_bytes(), &payload]).await?;
                }
                peer.send(&[b"", b"", &END.to_be_bytes(), b""]).await?;
            }
            Some(Question::Snapshot) => {
                let (seq, payload) = snapshot(&shared).await;
                peer.send(&[b"", &shared.topic, &seq.to_be_bytes(), &payload]).await?;
            }
            None => tracing::debug!("a question about KV events that makes no sense"),
        }
    }
}

/// Everything that can be found, after the batch whose number comes with it.
async fn snapshot(shared: &Shared) -> (i64, Vec<u8>) {
    let (sender, answer) = oneshot::channel();
    let feed = Arc::clone(&shared.feed);
    // The engine's thread numbers batches, so there the number and the pages belong together.
    let asked = shared.engine.ask_cached(move |pages| {
        let _ = sender.send((feed.last_seq(), pages));
    });
    match (asked, timeout(SNAPSHOT_TIME, answer).await) {
        (Ok(()), Ok(Ok((seq, pages)))) => {
            let seq = seq.map_or(NO_BATCH, |seq| i64::try_from(seq).unwrap_or(i64::MAX));
            (seq, shared.encoder.snapshot(&pages, shared.engine.now()))
        }
        _ => (UNAVAILABLE, Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(frames: &[&[u8]]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
    }

    #[test]
    fn questions_are_understood_or_not() {
        let ask = |frames: &[&[u8]]| question(&message(frames));
        assert_eq!(ask(&[b"", &7_u64.to_be_bytes()]), Some(Question::Replay(7)));
        assert_eq!(ask(&[b"", b"snapshot"]), Some(Question::Snapshot));
        let wrong: [&[&[u8]]; 5] =
            [&[], &[b""], &[b"", b""], &[b"x", b"snapshot"], &[b"", b"1234567"]];
        for wrong in wrong {
            assert_eq!(ask(wrong), None, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_is_asked_is_a_panic(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 0..5),
        ) {
            let frames: Vec<Bytes> = frames.into_iter().map(Bytes::from).collect();
            let _ = question(&frames);
            let mut topics = Vec::new();
            let _ = subscribe(&mut topics, &frames);
            prop_assert!(topics.len() <= 1);
        }
    }

    #[test]
    fn topics_come_and_go_within_bounds() {
        let mut topics = Vec::new();
        for _ in 0..N_TOPICS {
            subscribe(&mut topics, &message(&[b"\x01kv"])).unwrap();
        }
        assert!(subscribe(&mut topics, &message(&[b"\x01kv"])).is_err());
        subscribe(&mut topics, &message(&[b"\x00kv"])).unwrap();
        assert_eq!(topics.len(), N_TOPICS - 1);
    }
}
