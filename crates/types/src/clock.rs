//! Time as an argument, so that tests and replays are deterministic.

use std::cell::Cell;
use std::time::Duration;

/// Where time comes from.
pub trait Clock {
    /// Time since some fixed point; never runs backwards.
    fn now(&self) -> Duration;
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(std::time::Instant);

impl SystemClock {
    /// A clock that starts at zero.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the time")]
    pub fn start() -> Self {
        SystemClock(std::time::Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// A clock that tests move by hand.
#[derive(Debug, Default)]
pub struct ManualClock(Cell<Duration>);

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.set(self.0.get() + by);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        self.0.get()
    }
}
