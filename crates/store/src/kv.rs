//! The device arena: where the bytes of pages are while a step runs.

use nuthatch_backend::{Backend, DeviceError};
use nuthatch_types::{KvShape, PageCopy};

/// The keys and values of all pages that the device holds, `n_slots` of them.
///
/// The store knows places, not contents: which slot holds which tokens is the cache's affair.
pub struct KvStore<B: Backend> {
    shape: KvShape,
    n_slots: u32,
    kv: B::Kv,
}

impl<B: Backend> KvStore<B> {
    /// Allocates the arena; it never grows.
    pub fn new(backend: &B, shape: KvShape, n_slots: u32) -> Result<Self, DeviceError> {
        Ok(KvStore { shape, n_slots, kv: backend.alloc_kv(shape, n_slots)? })
    }

    /// Shape of the KV.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Slots of the arena.
    pub fn n_slots(&self) -> u32 {
        self.n_slots
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.shape.page_bytes() * self.n_slots as usize
    }

    /// Moves pages' bytes, in order.
    pub fn copy(&mut self, backend: &B, copies: &[PageCopy]) -> Result<(), DeviceError> {
        if copies.is_empty() { Ok(()) } else { backend.copy_pages(&mut self.kv, copies) }
    }

    /// The device's own handle, for operations on it.
    pub fn device(&self) -> &B::Kv {
        &self.kv
    }

    /// The device's own handle, for operations that write to it.
    pub fn device_mut(&mut self) -> &mut B::Kv {
        &mut self.kv
    }
}
