//! Binding, accepting, and a graceful end.
//!
//! ```text
//!   run --stop--> draining: nothing is accepted, new requests are refused, running ones go on
//!                    |-- all have ended ----------------> drained
//!                    |-- no more time --> cancelled ----> cut short
//! ```

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use nuthatch_engine::EngineHandle;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::time::{interval, sleep, timeout};

use crate::ServerConfig;
use crate::app::App;
use crate::connection::Greeter;
use crate::events::Publisher;
use crate::router::router;
use crate::tls::{self, TlsError};

/// How often somebody looks whether the server is to stop.
const STOP_POLL: Duration = Duration::from_millis(50);
/// How often somebody looks whether the engine has failed.
const HEALTH_POLL: Duration = Duration::from_secs(1);
/// Time for the last words of requests that are cut short.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Threads that serve connections: the engine needs the cores.
const N_WORKERS: usize = 2;
/// Threads that make tokens of long prompts.
const N_BLOCKING: usize = 2;

/// A server that is bound and not yet running.
pub struct Server {
    app: Arc<App>,
    runtime: Runtime,
    listener: TcpListener,
    greeter: Greeter,
    events: Option<Publisher>,
    lost: watch::Receiver<bool>,
}

/// How a server ended that was told to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Every request was answered.
    Drained,
    /// Some requests were cancelled, because they had no more time.
    CutShort,
}

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// There is no such interface, or somebody else has its port.
    #[error("cannot listen on {host}:{port}: {error}")]
    Bind {
        /// Where.
        host: String,
        /// Where.
        port: u16,
        /// What the system says.
        error: io::Error,
    },
    /// The certificate cannot be used.
    #[error("cannot use the certificate: {0}")]
    Tls(#[from] TlsError),
    /// The system gives no threads.
    #[error("cannot start: {0}")]
    Runtime(#[from] io::Error),
    /// The engine failed while the server ran.
    #[error("the engine has failed: {0}")]
    Engine(String),
}

impl Server {
    /// A server on a socket that listens. Nothing is answered before [`Server::run`].
    pub fn new(
        config: ServerConfig,
        listener: StdListener,
        engine: EngineHandle,
    ) -> Result<Self, ServeError> {
        let tls = config.tls.as_ref().map(tls::acceptor).transpose()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(N_WORKERS)
            .max_blocking_threads(N_BLOCKING)
            .thread_name("nuthatch-http")
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let (sender, lost) = watch::channel(false);
        let watched = engine.clone();
        // One thread tells all requests when the engine's thread is gone.
        std::thread::Builder::new().name("nuthatch-watch".to_owned()).spawn(move || {
            watched.wait_end();
            sender.send_replace(true);
        })?;
        let (page_len, unix_seconds) = (config.sizes.page_len, config.unix_seconds);
        let publisher = |events| Publisher::new(events, &engine, page_len, unix_seconds);
        let events = config.events.as_ref().map(publisher).transpose()?;
        let feed = events.as_ref().map(Publisher::feed);
        let limits = config.limits;
        let app = Arc::new(App::new(config, engine, lost.clone(), feed));
        let greeter = Greeter { router: router(Arc::clone(&app)), tls, limits };
        Ok(Server { app, runtime, listener, greeter, events, lost })
    }

    /// Where the server listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Where changes of the cache are published, and where questions about them are answered, if
    /// they are.
    pub fn events_addresses(&self) -> io::Result<Option<(String, Vec<SocketAddr>)>> {
        self.events.as_ref().map(Publisher::addresses).transpose()
    }

    /// Serves until `should_stop`, and then until every request has ended or their time is over.
    pub fn run(self, should_stop: impl FnMut() -> bool) -> Result<Stopped, ServeError> {
        let Server { app, runtime, listener, greeter, events, lost } = self;
        let outcome = runtime.block_on(async {
            events.map_or(Ok(()), Publisher::start)?;
            let connections = GracefulShutdown::new();
            let accepting = accept_all(listener, &greeter, &connections);
            let engine_error = tokio::select! {
                () = accepting => None,
                () = wait_for(should_stop) => None,
                error = engine_failed(&app, lost) => Some(error),
            };
            app.stop();
            let drained = drain(&app, connections).await;
            engine_error.map_or(Ok(drained), |error| Err(ServeError::Engine(error)))
        });
        // Connections that are still there belong to clients who do not listen.
        runtime.shutdown_background();
        outcome
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("listener", &self.listener).finish_non_exhaustive()
    }
}

/// Takes a port, before anything is loaded; port 0 lets the system choose.
pub fn listen(host: &str, port: u16) -> Result<StdListener, ServeError> {
    let bind = || {
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let listener = StdListener::bind(&addresses[..])?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|error| ServeError::Bind { host: host.to_owned(), port, error })
}

/// Accepts connections for ever.
async fn accept_all(listener: TcpListener, greeter: &Greeter, connections: &GracefulShutdown) {
    let seats = Arc::new(Semaphore::new(greeter.limits.n_connections));
    loop {
        let Ok(seat) = Arc::clone(&seats).acquire_owned().await else { return };
        let stream = accept(&listener).await;
        let serving = greeter.clone().serve(stream, connections.watcher());
        tokio::spawn(async move {
            serving.await;
            drop(seat);
        });
    }
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                // The client is gone, or there are no more files: the next one may have more luck.
                tracing::debug!(%error, "a connection cannot be accepted");
                sleep(STOP_POLL).await;
            }
        }
    }
}

async fn wait_for(mut should_stop: impl FnMut() -> bool) {
    let mut ticks = interval(STOP_POLL);
    while !should_stop() {
        ticks.tick().await;
    }
}

/// Waits until the engine fails, and says why.
async fn engine_failed(app: &App, mut lost: watch::Receiver<bool>) -> String {
    let failed = async {
        loop {
            sleep(HEALTH_POLL).await;
            if let Ok(stats) = app.ask(|reply| app.engine.ask_stats(reply)).await
                && let Some(error) = stats.error
            {
                return error;
            }
        }
    };
    tokio::select! {
        error = failed => error,
        _ = lost.wait_for(|&lost| lost) => "its thread has ended".to_owned(),
    }
}

/// Lets running requests end, and cancels those that have no more time.
async fn drain(app: &App, connections: GracefulShutdown) -> Stopped {
    let n_open = connections.count();
    let drain_time = app.config.limits.drain_time;
    tracing::info!(n_open, ?drain_time, "stopping: connections have this much time");
    let mut ended = std::pin::pin!(connections.shutdown());
    if timeout(drain_time, ended.as_mut()).await.is_ok() {
        return Stopped::Drained;
    }
    // The engine ends every request, and each tells its client why.
    let engine = app.engine.clone();
    let _ = tokio::task::spawn_blocking(move || engine.shutdown()).await;
    let _ = timeout(LAST_WORDS, ended).await;
    Stopped::CutShort
}
