//! What callers hold: a handle to the engine's thread, and a ticket for each request.
//!
//! One bounded channel leads in. Each request has its own channel out, which the engine never waits
//! for: it holds at most the tokens of the request's answers and their ends. The thread ends when it is told
//! to, or when no handle and no ticket is left.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, TrySendError, bounded, select, unbounded,
};
use nuthatch_cache::CachedPage;
use nuthatch_types::SeqId;

use crate::engine::{CacheListener, CachePicture, EngineStats, SharedClock};
use crate::executor::Execute;
use crate::{Engine, EngineError, Output, Sink, Submission, SubmitError};

/// Commands that wait while a step is computed. More make their senders wait for its end.
const N_COMMANDS: usize = 1024;

/// A way to the engine's thread, from any thread.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: Sender<Command>,
    clock: Clock,
    /// Set by the thread when it ends as it should.
    stopped: Arc<AtomicBool>,
    /// Nothing is ever sent; the channel closes with the thread, however it ends.
    alive: Receiver<Infallible>,
}

/// [`SharedClock`] with a name to print.
#[derive(Clone)]
struct Clock(SharedClock);

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}

/// One request's news. Dropping it cancels the request.
#[derive(Debug)]
pub struct Ticket {
    seq: SeqId,
    outputs: Receiver<Output>,
    commands: Sender<Command>,
}

/// Takes the engine's answer to a command, on the engine's thread. It must not wait for anything.
type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// What the engine's thread is asked to do between steps.
enum Command {
    Submit {
        submission: Box<Submission>,
        outputs: Sink,
        submitted: Duration,
        reply: Reply<Result<SeqId, SubmitError>>,
    },
    Cancel(SeqId),
    EndAnswer {
        request: SeqId,
        index: u32,
    },
    Stats(Reply<EngineStats>),
    Picture {
        n_branches: usize,
        n_tokens: usize,
        reply: Reply<CachePicture>,
    },
    ForgetIdle(Reply<u32>),
    Listen(CacheListener),
    CachedPages(Reply<Vec<CachedPage>>),
    Shutdown(Sender<Option<EngineError>>),
}

/// Whether the thread goes on.
enum Flow {
    Continue,
    /// Ends, and tells the one who asked for it.
    End(Asker),
}

impl EngineHandle {
    /// Submits a request.
    ///
    /// Waits until the step that is being computed has ended; then the request is accepted, or
    /// refused with the reason.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, SubmitError> {
        let submitted = self.clock.0.now();
        let (sender, outputs) = unbounded();
        let (reply, answer) = replying();
        let (submission, sink) = (Box::new(submission), Sink::from(sender));
        let command = Command::Submit { submission, outputs: sink, submitted, reply };
        self.commands.send(command).map_err(|_| SubmitError::Stopped)?;
        let seq = self.wait(&answer).ok_or(SubmitError::Stopped)??;
        Ok(Ticket { seq, outputs, commands: self.commands.clone() })
    }

    /// What the engine holds and what it did, after the step that is being computed. `None` when
    /// the engine has stopped.
    pub fn stats(&self) -> Option<EngineStats> {
        let (reply, answer) = replying();
        self.commands.send(Command::Stats(reply)).ok()?;
        self.wait(&answer)
    }

    /// Submits a request whose news go to `outputs`, without waiting: for callers that may not
    /// block. `reply` gets the answer on the engine's thread, before any news; both are dropped
    /// unused if the engine is lost.
    pub fn submit_to(
        &self,
        submission: Submission,
        outputs: Sink,
        reply: impl FnOnce(Result<SeqId, SubmitError>) + Send + 'static,
    ) -> Result<(), SubmitError> {
        let (submission, submitted) = (Box::new(submission), self.now());
        let reply: Reply<_> = Box::new(reply);
        self.order(Command::Submit { submission, outputs, submitted, reply })
    }

    /// Asks the engine to end a request, all its answers. Nothing happens if it has already ended,
    /// or if the engine is too busy to be told: it then ends when its sink says that nobody listens.
    pub fn cancel(&self, request: SeqId) {
        let _ = self.order(Command::Cancel(request));
    }

    /// Asks the engine to end one answer of a request, without waiting; the others go on. See
    /// [`Engine::end_answer`]. False when the engine is too busy to be told.
    pub fn end_answer(&self, request: SeqId, index: u32) -> bool {
        self.order(Command::EndAnswer { request, index }).is_ok()
    }

    /// Like [`EngineHandle::stats`], without waiting.
    pub fn ask_stats(
        &self,
        reply: impl FnOnce(EngineStats) + Send + 'static,
    ) -> Result<(), SubmitError> {
        self.order(Command::Stats(Box::new(reply)))
    }

    /// Asks for a picture of the cache, without waiting. See [`Engine::cache_picture`].
    pub fn ask_picture(
        &self,
        n_branches: usize,
        n_tokens: usize,
        reply: impl FnOnce(CachePicture) + Send + 'static,
    ) -> Result<(), SubmitError> {
        self.order(Command::Picture { n_branches, n_tokens, reply: Box::new(reply) })
    }

    /// Asks the engine to give up what is cached and nobody uses, without waiting. `reply` gets the
    /// number of pages.
    pub fn forget_idle(&self, reply: impl FnOnce(u32) + Send + 'static) -> Result<(), SubmitError> {
        self.order(Command::ForgetIdle(Box::new(reply)))
    }

    /// Asks the engine to tell `listener` what changes in the cache, without waiting. See
    /// [`Engine::listen`].
    pub fn listen(&self, listener: CacheListener) -> Result<(), SubmitError> {
        self.order(Command::Listen(listener))
    }

    /// Asks for everything that can be found by its tokens, without waiting. Who listens has been
    /// told of all of it when `reply` is called.
    pub fn ask_cached(
        &self,
        reply: impl FnOnce(Vec<CachedPage>) + Send + 'static,
    ) -> Result<(), SubmitError> {
        self.order(Command::CachedPages(Box::new(reply)))
    }

    /// The time on the engine's clock.
    pub fn now(&self) -> Duration {
        self.clock.0.now()
    }

    /// Waits until the engine's thread has ended, however it ended.
    pub fn wait_end(&self) {
        // Nothing is ever sent, so an answer can only be that the channel is closed.
        let _ = self.alive.recv();
    }

    fn order(&self, command: Command) -> Result<(), SubmitError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::Busy,
            TrySendError::Disconnected(_) => SubmitError::Stopped,
        })
    }

    /// Waits for the thread's answer to a command; `None` when the thread has gone.
    ///
    /// A command that was sent while the thread fell over stays in the channel with its reply, so
    /// waiting for the reply alone could be for ever.
    fn wait<T>(&self, answer: &Receiver<T>) -> Option<T> {
        select! {
            recv(answer) -> answer => answer.ok(),
            recv(self.alive) -> _ => answer.try_recv().ok(),
        }
    }

    /// Cancels every request, ends the thread and frees what it owned, and returns the error with
    /// which the engine had failed, if it had. Does nothing to an engine that was shut down before.
    pub fn shutdown(&self) -> Result<(), EngineError> {
        let (reply, answer) = bounded(1);
        if self.commands.send(Command::Shutdown(reply)).is_err() {
            let stopped = self.stopped.load(Ordering::Acquire);
            return if stopped { Ok(()) } else { Err(EngineError::Panicked) };
        }
        match self.wait(&answer) {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(error),
            // Another caller's shutdown came first, or the thread was lost on the way.
            None if self.stopped.load(Ordering::Acquire) => Ok(()),
            None => Err(EngineError::Panicked),
        }
    }
}

impl Ticket {
    /// The request's first sequence, to be recognised by in logs.
    pub fn seq(&self) -> SeqId {
        self.seq
    }

    /// Waits for the next news. `None` after the last answer's [`Output::Finished`], or when the
    /// engine was lost.
    pub fn recv(&self) -> Option<Output> {
        self.outputs.recv().ok()
    }

    /// The next news if there are any now; `Ok(None)` if there are none yet, and `Err` where
    /// [`Ticket::recv`] gives `None`.
    pub fn try_recv(&self) -> Result<Option<Output>, Ended> {
        match self.outputs.try_recv() {
            Ok(output) => Ok(Some(output)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Ended),
        }
    }

    /// Waits for the next news, but not longer than `timeout`; answers like [`Ticket::try_recv`].
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Option<Output>, Ended> {
        match self.outputs.recv_timeout(timeout) {
            Ok(output) => Ok(Some(output)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Ended),
        }
    }

    /// Asks the engine to end one answer of the request; the others go on. See
    /// [`Engine::end_answer`].
    pub fn end_answer(&self, index: u32) {
        // An engine that has stopped has ended the answer already.
        let _ = self.commands.send(Command::EndAnswer { request: self.seq, index });
    }

    /// Asks the engine to end the request, all its answers. Tokens that are already on their way
    /// still come, and then each answer's [`Output::Finished`].
    pub fn cancel(&self) {
        // An engine that has stopped has ended the request already.
        let _ = self.commands.send(Command::Cancel(self.seq));
    }
}

/// A request's last news have been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request has ended")]
pub struct Ended;

impl Drop for Ticket {
    fn drop(&mut self) {
        // Never blocks. If there is no room now, the engine sees at the next token that it sends
        // that nobody listens any more.
        let _ = self.commands.try_send(Command::Cancel(self.seq));
    }
}

impl<E: Execute + Send + 'static> Engine<E> {
    /// Gives the engine a thread of its own.
    pub fn spawn(self) -> Result<EngineHandle, EngineError> {
        let (commands, receiver) = bounded(N_COMMANDS);
        let clock = Clock(self.clock().clone());
        let stopped = Arc::new(AtomicBool::new(false));
        let (life, alive) = bounded(0);
        let handle = EngineHandle { commands, clock, stopped: Arc::clone(&stopped), alive };
        thread::Builder::new().name("nuthatch-engine".to_owned()).spawn(move || {
            // Declared first, so it is dropped last, also when the engine panics.
            let _life: Sender<Infallible> = life;
            let receiver = receiver;
            let (asker, error) = run(self, &receiver);
            stopped.store(true, Ordering::Release);
            if let Some(asker) = asker {
                let _ = asker.send(error);
            }
        })?;
        Ok(handle)
    }
}

/// A reply for a caller that waits.
fn replying<T: Send + 'static>() -> (Reply<T>, Receiver<T>) {
    let (sender, receiver) = bounded(1);
    // Whoever asked may have gone meanwhile, which is no fault.
    let reply = move |answer| {
        let _ = sender.send(answer);
    };
    (Box::new(reply), receiver)
}

/// Who asked for the end, to be told of it.
type Asker = Option<Sender<Option<EngineError>>>;

/// The engine's thread: commands between steps, and nothing but commands when idle. When this
/// returns, the engine and all its memory are gone.
fn run<E: Execute>(
    mut engine: Engine<E>,
    commands: &Receiver<Command>,
) -> (Asker, Option<EngineError>) {
    let asker = loop {
        if let Flow::End(asker) = take_commands(&mut engine, commands) {
            break asker;
        }
        if let Err(error) = engine.step() {
            engine.fail(error.into());
        }
        if engine.is_idle()
            && let Err(error) = engine.verify_sample()
        {
            engine.fail(error);
        }
    };
    engine.cancel_all();
    if let Err(error) = engine.flush() {
        engine.fail(error.into());
    }
    (asker, engine.into_error())
}

/// Does what was asked since the last step; waits for something to do when there is nothing.
fn take_commands<E: Execute>(engine: &mut Engine<E>, commands: &Receiver<Command>) -> Flow {
    while engine.is_idle() {
        // While there is something to save, commands are looked at in between.
        let is_saving = engine.rest().unwrap_or_else(|error| {
            engine.fail(error.into());
            false
        });
        let command = if is_saving { commands.try_recv() } else { wait_for(commands) };
        let command = match command {
            Ok(command) => command,
            Err(TryRecvError::Empty) => continue,
            Err(TryRecvError::Disconnected) => return Flow::End(None),
        };
        if let end @ Flow::End(_) = obey(engine, command) {
            return end;
        }
    }
    // No more than fit the channel, so that a flood of commands cannot keep the engine from work.
    for _ in 0..N_COMMANDS {
        match commands.try_recv() {
            Ok(command) => {
                if let end @ Flow::End(_) = obey(engine, command) {
                    return end;
                }
            }
            Err(TryRecvError::Empty) => break,
            Err(TryRecvError::Disconnected) => return Flow::End(None),
        }
    }
    Flow::Continue
}

fn wait_for(commands: &Receiver<Command>) -> Result<Command, TryRecvError> {
    commands.recv().map_err(|_| TryRecvError::Disconnected)
}

/// Carries out one command.
fn obey<E: Execute>(engine: &mut Engine<E>, command: Command) -> Flow {
    match command {
        Command::Submit { submission, outputs, submitted, reply } => {
            reply(engine.submit(*submission, outputs, submitted));
        }
        Command::Cancel(seq) => engine.cancel(seq),
        Command::EndAnswer { request, index } => engine.end_answer(request, index),
        Command::Stats(reply) => reply(engine.stats()),
        Command::Picture { n_branches, n_tokens, reply } => {
            reply(engine.cache_picture(n_branches, n_tokens));
        }
        Command::ForgetIdle(reply) => reply(engine.forget_idle()),
        Command::Listen(listener) => engine.listen(listener),
        Command::CachedPages(reply) => {
            engine.tell_listener();
            reply(engine.cached_pages());
        }
        Command::Shutdown(asker) => return Flow::End(Some(asker)),
    }
    Flow::Continue
}
