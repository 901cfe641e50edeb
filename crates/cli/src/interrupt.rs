//! Ctrl-C: ends what runs, and ends the program when nothing runs.
//!
//! ```text
//!   idle --begin--> running --Ctrl-C--> stopping --end--> idle
//!    |                                     |
//!    +------------- Ctrl-C ----------------+--> the program ends
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const STOPPING: u8 = 2;

/// What a shell expects of a program that Ctrl-C ended.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// Whether the user pressed Ctrl-C while something ran. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    state: Arc<AtomicU8>,
}

impl Interrupt {
    /// Installs the handler. Call it once in a process.
    pub(crate) fn install() -> Result<Self, ctrlc::Error> {
        let interrupt = Interrupt::default();
        let shared = interrupt.clone();
        ctrlc::set_handler(move || {
            if !shared.request() {
                end_program();
            }
        })?;
        Ok(interrupt)
    }

    /// Marks the start of something that Ctrl-C may stop; it lasts until the guard is dropped.
    pub(crate) fn begin(&self) -> Running<'_> {
        self.state.store(RUNNING, Ordering::SeqCst);
        Running(self)
    }

    /// Asks what runs to stop, and says whether anything did run.
    fn request(&self) -> bool {
        self.state.compare_exchange(RUNNING, STOPPING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Whether what runs should stop.
    pub(crate) fn requested(&self) -> bool {
        self.state.load(Ordering::SeqCst) == STOPPING
    }
}

/// Something that Ctrl-C may stop.
#[derive(Debug)]
pub(crate) struct Running<'a>(&'a Interrupt);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state.store(IDLE, Ordering::SeqCst);
    }
}

#[expect(clippy::exit, reason = "the user asked for it, and the main thread may be blocked")]
fn end_program() {
    std::process::exit(i32::from(EXIT_INTERRUPTED));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stops_what_runs_and_the_second_is_not_taken() {
        let interrupt = Interrupt::default();
        assert!(!interrupt.request(), "nothing runs");
        let running = interrupt.begin();
        assert!(!interrupt.requested());
        assert!(interrupt.request());
        assert!(interrupt.requested());
        assert!(!interrupt.request(), "the second ends the program");
        drop(running);
        assert!(!interrupt.requested());
    }
}
