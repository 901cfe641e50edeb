//! What the cache holds, told to routers as it changes: vLLM's KV events over ZeroMQ.
//!
//! ```text
//!   engine's thread --Feed--> publisher --+--> live: PUB, one task for each subscriber
//!     (never waits)   bounded   encodes   +--> log: the last batches, for those who missed some
//!                                                |
//!                 ROUTER: replay from a number, or a snapshot <-- asked of the engine
//! ```
//!
//! Batches are numbered where they arise. One that finds no room, in the feed or on the way to a slow
//! subscriber, is dropped: its number is missing, and replay or a snapshot heals that.

mod batch;
mod config;
mod log;
mod msgpack;
mod session;
mod zmtp;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use nuthatch_engine::{CacheEvent, EngineHandle};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, broadcast, mpsc};
use tokio::time::{MissedTickBehavior, interval, sleep};

pub(crate) use self::batch::medium;
use self::batch::{Encoder, Stamp};
pub use self::config::{Encoding, Endpoint, EventsConfig, EventsConfigError};
use self::log::Log;
use self::session::Shared;
use crate::ServeError;

/// After this much silence an empty batch is published, so that who listens knows that nothing was
/// missed.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long to wait before a subscriber that cannot be reached is called again.
const RECONNECT: Duration = Duration::from_secs(1);
/// Connections to one socket; more wait.
const N_PEERS: usize = 256;

/// A batch as it is sent.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) seq: u64,
    pub(crate) payload: Bytes,
}

/// Where the engine puts what has changed. Never waits.
#[derive(Debug)]
pub(crate) struct Feed {
    inner: Mutex<FeedState>,
}

#[derive(Debug)]
struct FeedState {
    next_seq: u64,
    n_dropped: u64,
    queue: mpsc::Sender<(u64, Vec<CacheEvent>)>,
}

/// What became of the batches so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FeedCounts {
    pub(crate) n_batches: u64,
    pub(crate) n_dropped: u64,
}

impl Feed {
    fn new(queue: mpsc::Sender<(u64, Vec<CacheEvent>)>) -> Self {
        Feed { inner: Mutex::new(FeedState { next_seq: 0, n_dropped: 0, queue }) }
    }

    /// Numbers a batch and hands it on, or drops it if there is no room; its number is then missing.
    fn push(&self, events: Vec<CacheEvent>) {
        let mut state = self.lock();
        let seq = state.next_seq;
        state.next_seq += 1;
        if let Err(TrySendError::Full(_)) = state.queue.try_send((seq, events)) {
            state.n_dropped += 1;
        }
    }

    /// The number of the last batch; `None` before the first.
    fn last_seq(&self) -> Option<u64> {
        self.lock().next_seq.checked_sub(1)
    }

    pub(crate) fn counts(&self) -> FeedCounts {
        let state = self.lock();
        FeedCounts { n_batches: state.next_seq, n_dropped: state.n_dropped }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FeedState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A publisher that is bound and not yet running.
pub(crate) struct Publisher {
    shared: Arc<Shared>,
    queue: mpsc::Receiver<(u64, Vec<CacheEvent>)>,
    live: Live,
    /// Where replay and snapshots are asked for.
    desks: Vec<StdListener>,
}

/// How subscribers and the publisher meet.
enum Live {
    /// They come here.
    Bound(StdListener),
    /// They are called.
    Calling(String),
}

impl Publisher {
    /// Takes the ports, and asks the engine to tell what changes.
    pub(crate) fn new(
        config: &EventsConfig,
        engine: &EngineHandle,
        page_len: u32,
        unix_seconds: fn() -> u64,
    ) -> Result<Self, ServeError> {
        let live = match &config.endpoint {
            Endpoint::Bind { host, port } => Live::Bound(crate::listen(host, *port)?),
            Endpoint::Connect { address } => Live::Calling(address.clone()),
        };
        let mut desks = Vec::new();
        for endpoint in [&config.replay_endpoint, &config.snapshot_endpoint].into_iter().flatten() {
            match endpoint {
                Endpoint::Bind { host, port } => desks.push(crate::listen(host, *port)?),
                // Checked when the configuration was read: questions come to the server.
                Endpoint::Connect { .. } => {}
            }
        }
        let (sender, queue) = mpsc::channel(config.max_queue_size);
        let feed = Arc::new(Feed::new(sender));
        let told = Arc::clone(&feed);
        // An engine that has failed already has nothing to tell.
        let _ = engine.listen(Box::new(move |events| told.push(events)));
        let stamp = Stamp { unix_start: unix_seconds(), clock_start: engine.now() };
        let shared = Shared {
            topic: Bytes::copy_from_slice(config.topic.as_bytes()),
            encoder: Encoder { encoding: config.encoding, page_len, stamp },
            live: broadcast::Sender::new(config.hwm),
            log: Mutex::new(Log::new(config.buffer_steps)),
            engine: engine.clone(),
            feed,
        };
        Ok(Publisher { shared: Arc::new(shared), queue, live, desks })
    }

    /// What the engine feeds, for the metrics.
    pub(crate) fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.shared.feed)
    }

    /// Where batches are published, and where questions are answered.
    pub(crate) fn addresses(&self) -> io::Result<(String, Vec<SocketAddr>)> {
        let live = match &self.live {
            Live::Bound(listener) => listener.local_addr()?.to_string(),
            Live::Calling(address) => address.clone(),
        };
        let desks = self.desks.iter().map(StdListener::local_addr).collect::<io::Result<_>>()?;
        Ok((live, desks))
    }

    /// Starts everything, inside a runtime. It ends with it.
    pub(crate) fn start(self) -> io::Result<()> {
        let Publisher { shared, queue, live, desks } = self;
        tokio::spawn(publish(Arc::clone(&shared), queue));
        tokio::spawn(beat(Arc::clone(&shared.feed)));
        match live {
            Live::Bound(listener) => {
                let listener = TcpListener::from_std(listener)?;
                let shared = Arc::clone(&shared);
                tokio::spawn(accept(listener, move |stream| {
                    session::publish(Arc::clone(&shared), stream)
                }));
            }
            Live::Calling(address) => {
                tokio::spawn(call(Arc::clone(&shared), address));
            }
        }
        for desk in desks {
            let listener = TcpListener::from_std(desk)?;
            let shared = Arc::clone(&shared);
            tokio::spawn(accept(listener, move |stream| {
                session::answer(Arc::clone(&shared), stream)
            }));
        }
        Ok(())
    }
}

/// Encodes batches, remembers them, and sends them to all who listen.
async fn publish(shared: Arc<Shared>, mut queue: mpsc::Receiver<(u64, Vec<CacheEvent>)>) {
    while let Some((seq, events)) = queue.recv().await {
        let payload = Bytes::from(shared.encoder.batch(&events, shared.engine.now()));
        let batch = Batch { seq, payload };
        shared.log().push(batch.clone());
        // Nobody may be listening.
        let _ = shared.live.send(batch);
    }
}

/// Publishes an empty batch after a while of silence.
async fn beat(feed: Arc<Feed>) {
    let mut ticks = interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = feed.last_seq();
    loop {
        ticks.tick().await;
        if feed.last_seq() == before {
            feed.push(Vec::new());
        }
        before = feed.last_seq();
    }
}

/// Serves everybody who comes.
async fn accept<F: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
) {
    let seats = Arc::new(Semaphore::new(N_PEERS));
    loop {
        let Ok(seat) = Arc::clone(&seats).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a reader of KV events cannot be accepted");
                sleep(RECONNECT).await;
                continue;
            }
        };
        let serving = serve(stream);
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%error, "a reader of KV events has gone");
            }
            drop(seat);
        });
    }
}

/// Calls the one subscriber, again and again.
async fn call(shared: Arc<Shared>, address: String) {
    loop {
        let outcome = match TcpStream::connect(&address).await {
            Ok(stream) => session::publish(Arc::clone(&shared), stream).await,
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            tracing::debug!(%error, address, "KV events have no reader");
        }
        sleep(RECONNECT).await;
    }
}
