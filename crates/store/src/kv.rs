//! Where the bytes of pages are: on the device while a step reads them, on the host meanwhile.

use std::sync::Arc;

use nuthatch_backend::{Backend, DeviceError, LayoutCodec, PageCodec, RopeSpec, RowMover};
use nuthatch_types::{ColdKv, KvShape, KvSlots, PageCopy, PageImage, PageShift, Slot};

/// The keys and values of all pages of both tiers.
///
/// The store knows places, not contents: which slot holds which tokens is the cache's affair.
pub struct KvStore<B: Backend> {
    shape: KvShape,
    slots: KvSlots,
    kv: B::Kv,
}

impl<B: Backend> KvStore<B> {
    /// Allocates both tiers; they never grow.
    pub fn new(backend: &B, shape: KvShape, slots: KvSlots) -> Result<Self, DeviceError> {
        Ok(KvStore { shape, slots, kv: backend.alloc_kv(shape, slots)? })
    }

    /// Shape of the KV.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Slots of each tier.
    pub fn slots(&self) -> KvSlots {
        self.slots
    }

    /// Bytes of both tiers.
    pub fn bytes(&self) -> usize {
        self.shape.page_bytes() * self.slots.total() as usize
    }

    /// Moves pages' bytes inside a tier or between tiers, in order.
    pub fn copy(&mut self, backend: &B, copies: &[PageCopy]) -> Result<(), DeviceError> {
        if copies.is_empty() { Ok(()) } else { backend.copy_pages(&mut self.kv, copies) }
    }

    /// How a page's bytes lie when they leave the device; `None` where they cannot.
    pub fn page_image(&self, backend: &B) -> Option<PageImage> {
        backend.page_image(&self.kv)
    }

    /// What turns pages into fewer bits and back; `None` where nothing does.
    pub fn page_codec(&self, backend: &B, cold: &ColdKv) -> Option<Arc<dyn PageCodec>> {
        let codec = LayoutCodec::new(backend.page_layout(&self.kv)?, cold)?;
        Some(Arc::new(codec))
    }

    /// What makes pages of rows of others; `None` where nothing does.
    pub fn row_mover(&self, backend: &B, rope: &RopeSpec) -> Option<RowMover> {
        RowMover::new(backend.page_layout(&self.kv)?, rope.clone())
    }

    /// Copies a page's bytes from a slot, and waits.
    pub fn read_page(&self, backend: &B, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        backend.read_page(&self.kv, slot, target)
    }

    /// Copies a page's bytes to a slot, or those of some layers, which begin at the byte `start`.
    pub fn write_page(
        &mut self,
        backend: &B,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        backend.write_page(&mut self.kv, slot, start, source)
    }

    /// What is queued from now on sees the pages written so far; with `beside`, those that come next may
    /// be written while it runs, for what is queued after the next call.
    pub fn land_pages(&mut self, backend: &B, beside: bool) -> Result<(), DeviceError> {
        backend.land_pages(&mut self.kv, beside)
    }

    /// Writes pages anew with their keys at other positions, in order.
    pub fn shift(
        &mut self,
        backend: &B,
        plan: &B::Plan,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        if shifts.is_empty() { Ok(()) } else { backend.shift_pages(plan, &mut self.kv, shifts) }
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
