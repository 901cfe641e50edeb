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
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, select, unbounded,
};
use nuthatch_types::SeqId;

use crate::engine::{EngineStats, SharedClock};
use crate::executor::Execute;
use crate::{Engine, EngineError, Output, Submission, SubmitError};

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

/// What the engine's thread is asked to do between steps.
#[derive(Debug)]
enum Command {
    Submit {
        submission: Box<Submission>,
        outputs: Sender<Output>,
        submitted: Duration,
        reply: Sender<Result<SeqId, SubmitError>>,
    },
    Cancel(SeqId),
    Stats(Sender<EngineStats>),
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
        let (reply, answer) = bounded(1);
        let submission = Box::new(submission);
        let command = Command::Submit { submission, outputs: sender, submitted, reply };
        self.commands.send(command).map_err(|_| SubmitError::Stopped)?;
        let seq = self.wait(&answer).ok_or(SubmitError::Stopped)??;
        Ok(Ticket { seq, outputs, commands: self.commands.clone() })
    }

    /// What the engine holds and what it did, after the step that is being computed. `None` when
    /// the engine has stopped.
    pub fn stats(&self) -> Option<EngineStats> {
        let (reply, answer) = bounded(1);
        self.commands.send(Command::Stats(reply)).ok()?;
        self.wait(&answer)
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
    (asker, engine.into_error())
}

/// Does what was asked since the last step; waits for something to do when there is nothing.
fn take_commands<E: Execute>(engine: &mut Engine<E>, commands: &Receiver<Command>) -> Flow {
    while engine.is_idle() {
        let Ok(command) = commands.recv() else { return Flow::End(None) };
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

/// Carries out one command. Whoever asked may have gone meanwhile, which is no fault.
fn obey<E: Execute>(engine: &mut Engine<E>, command: Command) -> Flow {
    match command {
        Command::Submit { submission, outputs, submitted, reply } => {
            let answer = engine.submit(*submission, outputs, submitted);
            let _ = reply.send(answer);
        }
        Command::Cancel(seq) => engine.cancel(seq),
        Command::Stats(reply) => {
            let _ = reply.send(engine.stats());
        }
        Command::Shutdown(asker) => return Flow::End(Some(asker)),
    }
    Flow::Continue
}
