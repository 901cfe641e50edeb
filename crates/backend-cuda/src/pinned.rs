//! Memory of the host that the device reads and writes at the same addresses.
//!
//! The driver's own allocation clears and pins small pages one by one: 9 s for 16 GiB on one H200. Huge
//! pages that several threads touch first and that are then registered take a tenth of that.

#![expect(unsafe_code, reason = "anonymous mappings and what the driver does with them")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use nuthatch_backend::DeviceError;

use crate::device::Device;

const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Threads that touch pages; more find no more of the system's memory controllers idle. Guessed.
const MAX_THREADS: usize = 16;

/// Pinned memory of the host, all zero at first. Dropping it frees it.
pub(crate) struct PinnedMemory {
    address: u64,
    mapping: Mapping,
    context: Arc<CudaContext>,
}

impl PinnedMemory {
    /// Maps, touches and registers `bytes`, which `what` names in the error.
    pub(crate) fn new(
        device: &Device,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        device.enter()?;
        let mapping = Mapping::new(bytes.max(1)).ok_or(DeviceError::OutOfMemory { bytes, what })?;
        mapping.touch();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the mapping is live, and is unregistered before it ends.
        let registered =
            unsafe { sys::cuMemHostRegister_v2(mapping.start.cast(), mapping.bytes, flags) };
        if registered == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(DeviceError::OutOfMemory { bytes, what });
        }
        device.check(registered.result())?;
        let (context, mut address) = (device.context(), 0);
        // SAFETY: the memory was just registered for the device, and the pointer is to a live integer.
        let found =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, mapping.start.cast(), 0) };
        let memory = PinnedMemory { address, mapping, context };
        device.check(found.result())?;
        Ok(memory)
    }

    /// Where it is, for a kernel's parameters.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Copies bytes from it; nothing that writes to them may be queued.
    pub(crate) fn read(&self, start: usize, target: &mut [u8]) {
        let end = start.checked_add(target.len()).expect("a place in memory");
        assert!(end <= self.mapping.bytes, "inside the memory");
        // SAFETY: the range is inside the live mapping, and the other one is the caller's own.
        unsafe {
            let source = self.mapping.start.add(start);
            source.copy_to_nonoverlapping(target.as_mut_ptr(), target.len());
        }
    }

    /// Copies bytes to it; nothing that reads or writes them may be queued.
    pub(crate) fn write(&mut self, start: usize, source: &[u8]) {
        let end = start.checked_add(source.len()).expect("a place in memory");
        assert!(end <= self.mapping.bytes, "inside the memory");
        // SAFETY: the range is inside the live mapping, which nobody else writes to through `self`,
        // and the other one is the caller's own.
        unsafe {
            let target = self.mapping.start.add(start);
            target.copy_from_nonoverlapping(source.as_ptr(), source.len());
        }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let is_current = self.context.bind_to_thread().is_ok();
        // What is queued may still use it. After a fault nothing runs any more.
        if is_current && self.context.synchronize().is_ok() {
            // SAFETY: registered in `new`, and unregistered here only; the mapping is unmapped after.
            let freed = unsafe { sys::cuMemHostUnregister(self.mapping.start.cast()) };
            let _ = freed;
        }
    }
}

/// An anonymous mapping that asks for huge pages.
struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is owned, and belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: nothing reads or writes through a shared reference but `touch`, whose threads write apart.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Option<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous private mapping with no address hint has no preconditions.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the range was mapped above. A refusal only costs speed, so it is ignored.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        Some(Mapping { start: start.cast(), bytes })
    }

    /// Writes a byte to every page, so that the system finds all of them now and on many threads.
    fn touch(&self) {
        const SMALL_PAGE_BYTES: usize = 4096;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let share = self.bytes.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
        std::thread::scope(|scope| {
            for first in (0..self.bytes).step_by(share) {
                scope.spawn(move || {
                    for at in (first..self.bytes.min(first + share)).step_by(SMALL_PAGE_BYTES) {
                        // SAFETY: inside the mapping, and in no other thread's share.
                        unsafe { self.start.add(at).write_volatile(0) };
                    }
                });
            }
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and unmapped once.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_zero_and_whole() {
        let mapping = Mapping::new(5 * HUGE_PAGE_BYTES + 1).unwrap();
        mapping.touch();
        // SAFETY: the last byte of the mapping.
        assert_eq!(unsafe { mapping.start.add(mapping.bytes - 1).read() }, 0);
        assert!(Mapping::new(usize::MAX / 2).is_none());
    }
}
