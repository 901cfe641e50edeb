//! Device memory whose addresses are reserved at once and backed little by little.
//!
//! The driver's virtual memory calls, as vAttention uses them: a sequence's keys and values lie one after
//! the other, whatever memory is behind them, and attention needs no table.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result, sys};
use nuthatch_backend::DeviceError;

use crate::device::Device;

/// Reserved addresses, some of them backed. Dropping it gives up both.
pub(crate) struct VirtualMemory {
    address: u64,
    bytes: usize,
    /// What is backed at once.
    granule: usize,
    kind: sys::CUmemAllocationProp,
    /// The memory behind each granule that has some.
    backed: BTreeMap<usize, sys::CUmemGenericAllocationHandle>,
    /// What everything that uses it is queued on.
    stream: Arc<CudaStream>,
}

#[expect(unsafe_code, reason = "handles of the driver")]
// SAFETY: the driver's handles belong to no thread; the only pointer, in `kind`, is null.
unsafe impl Send for VirtualMemory {}
#[expect(unsafe_code, reason = "handles of the driver")]
// SAFETY: as above, and nothing changes behind a shared reference.
unsafe impl Sync for VirtualMemory {}

impl VirtualMemory {
    /// Reserves addresses for so many bytes.
    pub(crate) fn reserve(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        device.enter()?;
        let stream = device.shared_stream();
        let kind = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: stream.context().cu_device(),
            },
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut granule, mut address) = (0, 0);
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: both pointers are to live values.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &kind, least) };
        device.check(asked.result())?;
        let bytes = bytes.max(1).next_multiple_of(granule);
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the pointer is to a live address, and the size is a multiple of the granule.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut address, bytes, granule, 0, 0) };
        device.check(reserved.result())?;
        Ok(VirtualMemory { address, bytes, granule, kind, backed: BTreeMap::new(), stream })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the device that are behind the addresses.
    pub(crate) fn backed_bytes(&self) -> usize {
        self.backed.len() * self.granule
    }

    /// Puts memory, all zero, behind a range of bytes, where there is none yet.
    pub(crate) fn back(&mut self, device: &Device, range: Range<usize>) -> Result<(), DeviceError> {
        assert!(range.end <= self.bytes, "inside what is reserved");
        device.enter()?;
        for granule in range.start / self.granule..range.end.div_ceil(self.granule) {
            if !self.backed.contains_key(&granule) {
                self.back_one(device, granule)?;
            }
        }
        Ok(())
    }

    fn back_one(&mut self, device: &Device, granule: usize) -> Result<(), DeviceError> {
        let (bytes, mut handle) = (self.granule, 0);
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: both pointers are to live values.
        let created = unsafe { sys::cuMemCreate(&mut handle, bytes, &self.kind, 0) };
        match created.result() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(DeviceError::OutOfMemory { bytes, what: "the KV cache" });
            }
            other => device.check(other)?,
        }
        // From here on it is given up with the rest, even if it cannot be used.
        self.backed.insert(granule, handle);
        let address = self.address + (granule * bytes) as u64;
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the addresses are reserved, and nothing is behind them yet.
        let mapped = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) };
        device.check(mapped.result())?;
        let access = sys::CUmemAccessDesc {
            location: self.kind.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the range was just mapped, and the pointer is to one live description.
        let opened = unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) };
        device.check(opened.result())?;
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the range was just mapped and opened.
        let zeroed = unsafe { result::memset_d8_async(address, 0, bytes, device.stream()) };
        device.check(zeroed)
    }
}

impl Drop for VirtualMemory {
    fn drop(&mut self) {
        // After a fault nothing can be freed, and the driver frees all of it with the process.
        if self.stream.context().bind_to_thread().is_err() || self.stream.synchronize().is_err() {
            return;
        }
        for (&granule, &handle) in &self.backed {
            let address = self.address + (granule * self.granule) as u64;
            #[expect(unsafe_code, reason = "calls of the C interface")]
            // SAFETY: mapped in `back_one` and given up here only; nothing that is queued uses it.
            let _ = unsafe { (sys::cuMemUnmap(address, self.granule), sys::cuMemRelease(handle)) };
        }
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: reserved in `reserve` and given up here only; nothing is mapped any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}
