//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nuthatch_engine::EngineHandle;
use nuthatch_wire::{ApiError, ErrorKind};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::ServerConfig;
use crate::conversations::OpenTurns;
use crate::error::engine_lost;
use crate::events::Feed;
use crate::guard::Keys;
use crate::metrics::Metrics;

/// Bytes that one permit for bodies stands for.
pub(crate) const BODY_UNIT: usize = 4096;

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) config: ServerConfig,
    pub(crate) engine: EngineHandle,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
    /// The way of the cache's changes, if they are published.
    pub(crate) feed: Option<Arc<Feed>>,
    /// Permits for bodies, each worth [`BODY_UNIT`] bytes.
    pub(crate) bodies: Arc<Semaphore>,
    /// Conversations that are being answered.
    pub(crate) open_turns: OpenTurns,
    /// When the server began, in seconds since 1970.
    pub(crate) started: u64,
    /// Becomes true when the engine is lost.
    lost: watch::Receiver<bool>,
    is_stopping: AtomicBool,
}

impl App {
    pub(crate) fn new(
        config: ServerConfig,
        engine: EngineHandle,
        lost: watch::Receiver<bool>,
        feed: Option<Arc<Feed>>,
    ) -> Self {
        App {
            keys: Keys::new(&config),
            metrics: Metrics::new(&config.names[0], engine.now()),
            bodies: Arc::new(Semaphore::new(config.limits.bodies_bytes.div_ceil(BODY_UNIT))),
            open_turns: OpenTurns::default(),
            started: (config.unix_seconds)(),
            lost,
            is_stopping: AtomicBool::new(false),
            feed,
            engine,
            config,
        }
    }

    /// The name in the answers.
    pub(crate) fn model(&self) -> &str {
        &self.config.names[0]
    }

    /// Refuses a request for another model than this one.
    pub(crate) fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if !self.config.names.iter().any(|name| name == asked) => {
                let message = format!("The model `{asked}` does not exist.");
                let error = ApiError::new(ErrorKind::NotFound, message);
                Err(error.about("model").with_code("model_not_found"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the engine works.
    pub(crate) fn is_alive(&self) -> bool {
        !*self.lost.borrow()
    }

    /// Whether no more requests are taken.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Waits for the engine's answer to something that it was asked.
    ///
    /// What was sent while the engine's thread fell over is never answered, so waiting for the
    /// answer alone could be for ever.
    pub(crate) async fn answer<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, ApiError> {
        let mut lost = self.lost.clone();
        tokio::select! {
            answer = answer => answer.map_err(|_| engine_lost()),
            _ = lost.wait_for(|&lost| lost) => Err(engine_lost()),
        }
    }

    /// Asks the engine something: `ask` gets what takes its answer.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(Reply<T>) -> Result<(), nuthatch_engine::SubmitError>,
    ) -> Result<T, ApiError> {
        let (sender, receiver) = oneshot::channel();
        // Whoever asked may have gone meanwhile, which is no fault.
        let reply: Reply<T> = Box::new(move |answer| {
            let _ = sender.send(answer);
        });
        ask(reply).map_err(|error| crate::refusal(&error))?;
        self.answer(receiver).await
    }
}

/// Takes the engine's answer.
pub(crate) type Reply<T> = Box<dyn FnOnce(T) + Send>;
