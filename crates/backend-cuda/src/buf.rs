//! Activations: floats, and beside them the same rounded to bf16 for the products to read.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::device::Memory;

/// A flat array of floats on the device.
///
/// The operations before a product (norm, attention, activation) write both forms, because they
/// have the numbers in registers. What else writes floats makes the rounded ones stale, and a
/// product that meets stale ones has them rounded first.
pub struct CudaBuf {
    pub(crate) len: usize,
    pub(crate) floats: Memory,
    pub(crate) rounded: Memory,
    /// How many of the rounded ones, from the start, are those of the floats.
    n_fresh: AtomicUsize,
}

impl CudaBuf {
    pub(crate) fn new(len: usize, floats: Memory, rounded: Memory) -> Self {
        CudaBuf { len, floats, rounded, n_fresh: AtomicUsize::new(0) }
    }

    /// Whether the first `n` rounded values are those of the floats.
    pub(crate) fn is_fresh(&self, n: usize) -> bool {
        n <= self.n_fresh.load(Ordering::Relaxed)
    }

    /// Says that both forms of the first `n` values were written.
    pub(crate) fn set_fresh(&self, n: usize) {
        self.n_fresh.store(n, Ordering::Relaxed);
    }

    /// Says that floats were written alone.
    pub(crate) fn set_stale(&mut self) {
        *self.n_fresh.get_mut() = 0;
    }
}
