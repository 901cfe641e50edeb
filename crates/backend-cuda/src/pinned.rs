//! Memory of the host that the device reads and writes at the same addresses.
//!
//! The driver's own allocation clears and pins small pages one by one: 9 s for 16 GiB on one H200. Huge
//! pages that several threads touch first and that are then registered take a tenth of that.

#![expect(unsafe_code, reason = "anonymous mappings and what the driver does with them")]

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};
use nuthatch_backend::DeviceError;

use crate::device::{Device, Memory};

const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Threads that touch and register pages; more find no more of the system's memory controllers idle.
/// Guessed.
const MAX_THREADS: usize = 16;

/// Pinned memory of the host, all zero at first. Dropping it frees it.
pub(crate) struct PinnedMemory {
    mapping: Mapping,
    /// Bytes that were registered at a time.
    share: usize,
    /// Where those begin that are registered.
    registered: Vec<usize>,
    /// What everything that uses it is queued on.
    stream: Arc<CudaStream>,
}

impl PinnedMemory {
    /// Maps, touches and registers `bytes`, which `what` names in the error.
    pub(crate) fn new(
        device: &Device,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        Self::in_shares(device, bytes, what, threads)
    }

    /// The same in one: a copy can be of all of it.
    pub(crate) fn whole(
        device: &Device,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        Self::in_shares(device, bytes, what, 1)
    }

    fn in_shares(
        device: &Device,
        bytes: usize,
        what: &'static str,
        threads: usize,
    ) -> Result<Self, DeviceError> {
        device.enter()?;
        let out_of_memory = DeviceError::OutOfMemory { bytes, what };
        let Some(mapping) = Mapping::new(bytes.max(1)) else { return Err(out_of_memory) };
        let share = mapping.bytes.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
        let stream = device.shared_stream();
        let mut memory = PinnedMemory { mapping, share, registered: Vec::new(), stream };
        let outcomes = memory.register();
        let is_registered = |(_, outcome): &(usize, &Result<_, _>)| outcome.is_ok();
        let firsts = (0..bytes.max(1)).step_by(share).zip(&outcomes).filter(is_registered);
        memory.registered = firsts.map(|(first, _)| first).collect();
        for outcome in outcomes {
            if outcome == Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) {
                return Err(out_of_memory);
            }
            device.check(outcome)?;
        }
        Ok(memory)
    }

    /// Touches and registers all shares, each on a thread of its own, so that some are pinned while others
    /// are still touched.
    fn register(&self) -> Vec<Result<(), DriverError>> {
        let shares = (0..self.mapping.bytes).step_by(self.share);
        std::thread::scope(|scope| {
            let workers: Vec<_> = shares
                .map(|first| {
                    scope.spawn(move || {
                        let bytes = self.share.min(self.mapping.bytes - first);
                        self.mapping.touch(first, bytes);
                        self.stream.context().bind_to_thread()?;
                        self.register_share(first, bytes)
                    })
                })
                .collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, Result<(), DriverError>>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        })
    }

    fn register_share(&self, first: usize, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: inside the mapping.
        let start = unsafe { self.mapping.start.add(first) };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the mapping is live, and is unregistered before it ends.
        unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, flags) }.result()?;
        let mut address = 0;
        // SAFETY: the memory was just registered for the device, and the pointer is to a live integer.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start.cast(), 0) }.result()?;
        // Shares follow each other for the device as they do here.
        if address == start as u64 {
            return Ok(());
        }
        // SAFETY: registered above, and nobody has it.
        unsafe { sys::cuMemHostUnregister(start.cast()) }.result()?;
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED))
    }

    /// How much of it, from its beginning on, one copy may be of.
    pub(crate) fn run_bytes(&self) -> usize {
        self.share.min(self.mapping.bytes)
    }

    /// Where it is, for a kernel's parameters.
    pub(crate) fn address(&self) -> u64 {
        self.mapping.start as u64
    }

    /// Queues a copy of its first bytes by the copy engine.
    pub(crate) fn copy_to(
        &self,
        device: &Device,
        target: &Memory,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        assert!(bytes <= self.run_bytes() && bytes <= target.bytes(), "bytes of both");
        device.enter()?;
        let source = self.mapping.start.cast_const().cast();
        // SAFETY: both are live and have so many bytes; dropping either waits for what is queued.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(target.address(), source, bytes, device.stream()) };
        device.check(copied.result())
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
        let is_current = self.stream.context().bind_to_thread().is_ok();
        // What is queued may still use it. Waiting for the whole context would fail while another thread
        // records a pass on a stream of its own.
        let mut is_free = is_current && self.stream.synchronize().is_ok();
        for &first in self.registered.iter().filter(|_| is_current) {
            // SAFETY: registered in `new`, and unregistered here only; the mapping is unmapped after.
            let freed = unsafe { sys::cuMemHostUnregister(self.mapping.start.add(first).cast()) };
            is_free &= freed.result().is_ok();
        }
        // What the driver still knows as registered must not become somebody else's memory: copies from
        // there would be refused.
        if !is_free {
            self.mapping.keep();
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

    /// Has the mapping stay when this is dropped.
    fn keep(&mut self) {
        self.bytes = 0;
    }

    /// Writes a byte to every page of a part, so that the system finds all of them now.
    fn touch(&self, first: usize, bytes: usize) {
        const SMALL_PAGE_BYTES: usize = 4096;
        for at in (first..first + bytes).step_by(SMALL_PAGE_BYTES) {
            assert!(at < self.bytes, "a part of the mapping");
            // SAFETY: inside the mapping, and in no other thread's part.
            unsafe { self.start.add(at).write_volatile(0) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: mapped in `new` with this length, and unmapped once.
            unsafe { libc::munmap(self.start.cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_zero_and_whole() {
        let mapping = Mapping::new(5 * HUGE_PAGE_BYTES + 1).unwrap();
        mapping.touch(0, mapping.bytes);
        // SAFETY: the last byte of the mapping.
        assert_eq!(unsafe { mapping.start.add(mapping.bytes - 1).read() }, 0);
        assert!(Mapping::new(usize::MAX / 2).is_none());
    }
}
