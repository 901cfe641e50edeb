//! A little pinned memory of the host, so that copies wait for nobody: uploads go through a ring of it.
//!
//! A copy from memory that is not pinned may wait for everything that is queued.

#![expect(unsafe_code, reason = "memory that the driver hands out")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, DeviceRepr, result, sys};
use nuthatch_backend::DeviceError;

use crate::device::{Device, Memory};

/// Pinned memory of the host, all zero at first. Dropping it frees it; nothing that uses it may be
/// queued.
pub(crate) struct HostMemory {
    start: *mut u8,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory is owned, and belongs to no thread.
unsafe impl Send for HostMemory {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        device.enter()?;
        let bytes = bytes.max(1);
        // SAFETY: freed in `drop` only.
        let start = device.check(unsafe { result::malloc_host(bytes, 0) })?.cast::<u8>();
        // SAFETY: just allocated with this size.
        unsafe { start.write_bytes(0, bytes) };
        Ok(HostMemory { start, bytes, context: device.context() })
    }

    /// Queues a copy of `bytes` of device memory, from byte `from` on, to here, from byte `start` on.
    pub(crate) fn fetch(
        &mut self,
        device: &Device,
        (source, from): (&Memory, usize),
        start: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        assert!(start + bytes <= self.bytes && from + bytes <= source.bytes(), "inside both");
        device.enter()?;
        // SAFETY: inside both, as asserted; both outlive what is queued.
        let copied = unsafe {
            let target = self.start.add(start).cast();
            sys::cuMemcpyDtoHAsync_v2(
                target,
                source.address() + from as u64,
                bytes,
                device.stream(),
            )
        };
        device.check(copied.result())
    }

    /// Copies values from it, from byte `start` on; nothing that writes to them may be queued.
    pub(crate) fn read<T: DeviceRepr>(&self, start: usize, target: &mut [T]) {
        let bytes = size_of_val(target);
        assert!(start + bytes <= self.bytes, "inside the memory");
        // SAFETY: inside the live allocation, as asserted; the other range is the caller's own. The
        // device may have written here, and values that it shares with the host may be any bytes.
        unsafe {
            self.start.add(start).copy_to_nonoverlapping(target.as_mut_ptr().cast(), bytes);
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new`, and freed here only.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// Bytes of a place of the ring; what is larger is copied from where it is.
pub(crate) const PLACE_BYTES: usize = 256 << 10;
const N_PLACES: usize = 8;

/// Places that uploads take in turn.
pub(crate) struct Ring {
    memory: HostMemory,
    /// When the last copy from each place was made.
    copied: [Option<CudaEvent>; N_PLACES],
    next: usize,
}

impl Ring {
    pub(crate) fn new(device: &Device) -> Result<Self, DeviceError> {
        let memory = HostMemory::new(device, N_PLACES * PLACE_BYTES)?;
        Ok(Ring { memory, copied: Default::default(), next: 0 })
    }

    /// Queues a copy of values, of no more bytes than a place has, to an address of the device.
    ///
    /// # Safety
    ///
    /// There must be as many bytes at the address, in a live allocation.
    pub(crate) unsafe fn upload<T: Copy>(
        &mut self,
        device: &Device,
        target: u64,
        source: &[T],
    ) -> Result<(), DeviceError> {
        let bytes = size_of_val(source);
        assert!(bytes <= PLACE_BYTES, "it fits a place");
        let place = self.next;
        self.next = (place + 1) % N_PLACES;
        if let Some(copied) = self.copied[place].take() {
            device.check(copied.synchronize())?;
        }
        // SAFETY: a place is inside the memory, and nobody else uses it, since the last copy from it has
        // been made; the target is the caller's promise.
        let copied = unsafe {
            let staged = self.memory.start.add(place * PLACE_BYTES);
            staged.copy_from_nonoverlapping(source.as_ptr().cast(), bytes);
            sys::cuMemcpyHtoDAsync_v2(target, staged.cast(), bytes, device.stream())
        };
        device.check(copied.result())?;
        self.copied[place] = Some(device.check(device.main_stream().record_event(None))?);
        Ok(())
    }
}
