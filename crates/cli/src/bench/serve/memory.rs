//! The memory of another process, as it goes.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use crossbeam_channel::{Sender, bounded};
use nuthatch_types::{Clock as _, SystemClock};

use crate::host;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);

/// A thread that looks at a process.
pub(crate) struct MemoryWatch {
    pid: u32,
    stop: Sender<()>,
    thread: JoinHandle<Vec<(f64, u64)>>,
}

/// What it saw.
#[derive(Clone, Debug)]
pub(crate) struct Curve {
    pub(crate) pid: u32,
    /// Seconds, and resident bytes.
    pub(crate) samples: Vec<(f64, u64)>,
}

impl MemoryWatch {
    /// Begins to look.
    pub(crate) fn start(pid: u32, clock: Arc<SystemClock>) -> anyhow::Result<Self> {
        host::resident_memory(pid)
            .with_context(|| format!("there is no process {pid} to watch"))?;
        let (stop, stopped) = bounded::<()>(0);
        let begin = clock.now();
        let look = move || {
            let mut samples = Vec::new();
            loop {
                let seconds = (clock.now() - begin).as_secs_f64();
                samples.extend(host::resident_memory(pid).map(|bytes| (seconds, bytes)));
                // An answer can only be that the other end is gone.
                if stopped.recv_timeout(EVERY).is_err_and(|error| error.is_disconnected()) {
                    return samples;
                }
            }
        };
        let thread = std::thread::Builder::new().name("memory".to_owned()).spawn(look)?;
        Ok(MemoryWatch { pid, stop, thread })
    }

    /// Ends, and gives what was seen.
    pub(crate) fn stop(self) -> Curve {
        let MemoryWatch { pid, stop, thread } = self;
        drop(stop);
        Curve { pid, samples: thread.join().unwrap_or_default() }
    }
}
