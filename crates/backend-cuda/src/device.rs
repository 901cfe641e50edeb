//! The device, its one stream, its memory, and the fault that ends it.

use std::mem::size_of_val;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, result, sys,
};
use cudarc::nvrtc::Ptx;
use nuthatch_backend::DeviceError;

use crate::error::OpenError;
use crate::host_memory::{PLACE_BYTES, Ring};
use crate::timing::Timing;
use crate::virtual_memory::VirtualMemory;

/// The driver that the bindings were made for, in the driver's way of counting.
const DRIVER_NEEDED: i32 = 13_000;

/// A device with one stream, on which everything is ordered.
pub(crate) struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    /// Compute capability.
    capability: (i32, i32),
    /// Most dynamic shared memory of a block.
    shared_bytes_max: usize,
    n_multiprocessors: u32,
    /// Whether arenas of keys and values have addresses first and memory later.
    has_virtual_kv: bool,
    pub(crate) timing: Timing,
    /// What small uploads go through.
    ring: Mutex<Option<Ring>>,
    /// The first fault, in the driver's words. Afterwards nothing is done.
    fault: Mutex<Option<String>>,
}

impl Device {
    /// Opens a device, and says in words why not.
    pub(crate) fn open(ordinal: usize, has_virtual_kv: bool) -> Result<Self, OpenError> {
        let found = driver_version().ok_or(OpenError::NoDriver)?;
        if found < DRIVER_NEEDED {
            return Err(OpenError::OldDriver { found });
        }
        let driver = |e: DriverError| OpenError::Driver(e.to_string());
        let count = CudaContext::device_count().map_err(driver)?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(OpenError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(driver)?;
        let name = context.name().map_err(driver)?;
        let (major, minor) = context.compute_capability().map_err(driver)?;
        if major < 8 {
            return Err(OpenError::OldDevice { name, major, minor });
        }
        let shared =
            sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.attribute(shared).map_err(driver)?;
        let count = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = context.attribute(count).map_err(driver)?;
        Ok(Device {
            stream: context.new_stream().map_err(driver)?,
            context,
            name,
            capability: (major, minor),
            shared_bytes_max: usize::try_from(shared).unwrap_or(0),
            n_multiprocessors: u32::try_from(count).unwrap_or(1),
            has_virtual_kv,
            timing: Timing::default(),
            ring: Mutex::new(None),
            fault: Mutex::new(None),
        })
    }

    /// The device's name and compute capability.
    pub(crate) fn describe(&self) -> (&str, (i32, i32)) {
        (&self.name, self.capability)
    }

    /// Most dynamic shared memory of a block.
    pub(crate) fn shared_bytes_max(&self) -> usize {
        self.shared_bytes_max
    }

    /// Multiprocessors of the device.
    pub(crate) fn n_multiprocessors(&self) -> u32 {
        self.n_multiprocessors
    }

    /// The stream that everything is ordered on.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// The same, to queue on.
    pub(crate) fn main_stream(&self) -> &CudaStream {
        &self.stream
    }

    /// The same, for what is freed when nothing queued uses it any more.
    pub(crate) fn shared_stream(&self) -> Arc<CudaStream> {
        Arc::clone(&self.stream)
    }

    /// The context, for what is freed in it.
    pub(crate) fn context(&self) -> Arc<CudaContext> {
        Arc::clone(&self.context)
    }

    /// What to compile for: the architecture with all its own instructions.
    pub(crate) fn arch(&self) -> String {
        let (major, minor) = self.capability;
        // From Hopper on, some instructions belong to one architecture only.
        let own = if major >= 9 { "a" } else { "" };
        format!("sm_{major}{minor}{own}")
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.enter()?;
        self.check(result::mem_get_info())
    }

    /// Loads machine code.
    pub(crate) fn load(&self, cubin: Vec<u8>) -> Result<Arc<CudaModule>, DeviceError> {
        self.enter()?;
        self.check(self.context.load_module(Ptx::from_binary(cubin)))
    }

    /// One kernel of a module, allowed to use `shared_bytes` of dynamic shared memory.
    pub(crate) fn kernel(
        &self,
        module: &Arc<CudaModule>,
        name: &'static str,
        shared_bytes: usize,
    ) -> Result<Kernel, DeviceError> {
        self.enter()?;
        let function = self.check(module.load_function(name))?;
        let attribute =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let n_bytes = i32::try_from(shared_bytes).unwrap_or(i32::MAX);
        if let Err(e) = function.set_attribute(attribute, n_bytes) {
            let fault = format!("{name} needs {shared_bytes} bytes of shared memory: {e}");
            return Err(DeviceError::Fault(fault));
        }
        // Kernels that want the same share of the first-level cache need not wait for each other.
        let attribute =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        self.check(function.set_attribute(attribute, 100))?;
        let shared_bytes = n_bytes.cast_unsigned();
        Ok(Kernel { name, function, shared_bytes })
    }

    /// Allocates bytes, all zero.
    pub(crate) fn alloc(&self, bytes: usize, what: &'static str) -> Result<Memory, DeviceError> {
        self.enter()?;
        // The driver does not hand out nothing.
        let bytes = bytes.max(16);
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the memory is zeroed below, before anybody else has its address.
        let allocated = unsafe { result::malloc_sync(bytes) };
        let address = match allocated {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(DeviceError::OutOfMemory { bytes, what });
            }
            other => self.check(other)?,
        };
        let context = Arc::clone(&self.context);
        let memory = Memory { address, bytes, context, reserved: None };
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the memory was just allocated with this size.
        let zeroed = unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) };
        self.check(zeroed)?;
        Ok(memory)
    }

    /// Memory for an arena of keys and values: bytes that are all zero, or addresses only.
    pub(crate) fn alloc_kv(&self, bytes: usize) -> Result<Memory, DeviceError> {
        if !self.has_virtual_kv {
            return self.alloc(bytes, "the KV cache");
        }
        let reserved = VirtualMemory::reserve(self, bytes)?;
        let (address, context) = (reserved.address(), Arc::clone(&self.context));
        Ok(Memory { address, bytes, context, reserved: Some(Mutex::new(reserved)) })
    }

    /// Whether a page's slot is its place in the tables, counted over all of them.
    pub(crate) fn has_virtual_kv(&self) -> bool {
        self.has_virtual_kv
    }

    /// An error if pages are where the tables say that they come, and cannot be moved.
    pub(crate) fn check_paged(&self) -> Result<(), DeviceError> {
        match self.has_virtual_kv {
            true => Err(DeviceError::Fault("pages of virtual KV do not move".to_owned())),
            false => Ok(()),
        }
    }

    /// Puts memory behind a range of bytes, if there were addresses only.
    pub(crate) fn back(&self, memory: &Memory, range: Range<usize>) -> Result<(), DeviceError> {
        let Some(reserved) = &memory.reserved else { return Ok(()) };
        reserved.lock().unwrap_or_else(PoisonError::into_inner).back(self, range)
    }

    /// Makes bytes zero again, from byte `start` on.
    pub(crate) fn clear(
        &self,
        memory: &Memory,
        start: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.enter()?;
        assert!(start + bytes <= memory.bytes, "inside the memory");
        let (address, stream) = (memory.address + start as u64, self.stream.cu_stream());
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the memory is live, and the range inside it, as asserted.
        let zeroed = unsafe { result::memset_d8_async(address, 0, bytes, stream) };
        self.check(zeroed)
    }

    /// Copies host values into device memory, from byte `start` on.
    pub(crate) fn upload<T: Copy>(
        &self,
        target: &Memory,
        start: usize,
        source: &[T],
    ) -> Result<(), DeviceError> {
        self.enter()?;
        assert!(start + size_of_val(source) <= target.bytes, "the target is too small");
        if source.is_empty() {
            return Ok(());
        }
        let (address, stream) = (target.address + start as u64, self.stream.cu_stream());
        if size_of_val(source) <= PLACE_BYTES {
            let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            if ring.is_none() {
                *ring = Some(Ring::new(self)?);
            }
            let ring = ring.as_mut().expect("it was just made");
            #[expect(unsafe_code, reason = "raw device memory")]
            // SAFETY: the range is inside the allocation, as asserted.
            return unsafe { ring.upload(self, address, source) };
        }
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the range is inside the allocation, as asserted. The source is pageable memory,
        // which the driver has read when the call returns.
        let copied = unsafe { result::memcpy_htod_async(address, source, stream) };
        self.check(copied)
    }

    /// Copies device memory to the host, from byte `start` on, and waits.
    pub(crate) fn download_from<T: DeviceRepr>(
        &self,
        source: &Memory,
        start: usize,
        target: &mut [T],
    ) -> Result<(), DeviceError> {
        self.enter()?;
        assert!(start + size_of_val(target) <= source.bytes, "the source is too small");
        if target.is_empty() {
            return self.wait();
        }
        let stream = self.stream.cu_stream();
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the range is inside the allocation, as asserted, and `wait` comes before the
        // borrow of the target ends.
        let copied =
            unsafe { result::memcpy_dtoh_async(target, source.address + start as u64, stream) };
        self.check(copied)?;
        self.wait()
    }

    /// Waits until everything queued is done.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        self.enter()?;
        self.check(self.stream.synchronize())
    }

    /// Queues a kernel with one block of parameters. It may begin before the one before it has
    /// ended; every kernel waits for that before it looks at anything another one wrote.
    ///
    /// # Safety
    ///
    /// `params` must be what the kernel takes, and everything that the kernel does with the
    /// addresses in it must stay inside live allocations.
    #[expect(unsafe_code, reason = "kernels use raw device memory")]
    pub(crate) unsafe fn launch<P: DeviceRepr>(
        &self,
        kernel: &Kernel,
        grid: (u32, u32),
        threads: u32,
        params: &P,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_on((&self.stream, true), kernel, (grid, threads), params) }
    }

    /// The same on some stream; unless `is_early`, the kernel begins after all that comes before it.
    ///
    /// # Safety
    ///
    /// As for [`Device::launch`].
    #[expect(unsafe_code, reason = "kernels use raw device memory")]
    pub(crate) unsafe fn launch_on<P: DeviceRepr>(
        &self,
        (stream, is_early): (&CudaStream, bool),
        kernel: &Kernel,
        (grid, threads): ((u32, u32), u32),
        params: &P,
    ) -> Result<(), DeviceError> {
        self.enter()?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: &mut early,
            // Older devices have no instruction to wait with.
            numAttrs: u32::from(is_early && self.capability.0 >= 9),
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        let (function, arguments) = (kernel.function.cu_function(), arguments.as_mut_ptr());
        let begin = self.check(self.timing.mark(stream))?;
        // SAFETY: the configuration, its attribute and the parameters outlive the call, which copies
        // them; the rest is the caller's promise.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, function, arguments, std::ptr::null_mut()) };
        self.check(launched.result())?;
        if let (Some(begin), Some(end)) = (begin, self.check(self.timing.mark(stream))?) {
            self.timing.push(kernel.name, begin, end);
        }
        Ok(())
    }

    /// Blocks of a kernel that fit a multiprocessor.
    pub(crate) fn blocks_at_once(&self, kernel: &Kernel, threads: u32) -> Result<u32, DeviceError> {
        let shared = kernel.shared_bytes as usize;
        let function = &kernel.function;
        self.check(function.occupancy_max_active_blocks_per_multiprocessor(threads, shared, None))
    }

    /// Refuses work after a fault, and makes the device current on this thread.
    pub(crate) fn enter(&self) -> Result<(), DeviceError> {
        if let Some(fault) = &*self.fault.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(DeviceError::Fault(fault.clone()));
        }
        self.check(self.context.bind_to_thread())
    }

    /// Remembers a fault.
    pub(crate) fn check<T>(&self, outcome: Result<T, DriverError>) -> Result<T, DeviceError> {
        outcome.map_err(|e| {
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            DeviceError::Fault(fault.get_or_insert(e.to_string()).clone())
        })
    }
}

/// A kernel that can be queued.
#[derive(Clone)]
pub(crate) struct Kernel {
    name: &'static str,
    function: CudaFunction,
    /// Dynamic shared memory of a block.
    shared_bytes: u32,
}

impl Kernel {
    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes as usize
    }

    /// The same with less dynamic shared memory.
    pub(crate) fn with_shared_bytes(&self, bytes: usize) -> Self {
        assert!(bytes <= self.shared_bytes as usize, "no more than was asked for");
        Kernel { shared_bytes: bytes as u32, ..self.clone() }
    }
}

/// Device memory. Dropping it frees it, once nothing that is queued can use it.
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    context: Arc<CudaContext>,
    /// What is behind the addresses, if it comes little by little.
    reserved: Option<Mutex<VirtualMemory>>,
}

impl Memory {
    /// Where it is, for a kernel's parameters.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// How much it is.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How much of it is memory, and not only addresses.
    pub(crate) fn backed_bytes(&self) -> usize {
        self.reserved.as_ref().map_or(self.bytes, |reserved| {
            reserved.lock().unwrap_or_else(PoisonError::into_inner).backed_bytes()
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After a fault nothing can be freed, and the driver frees all of it with the process.
        if self.reserved.is_none() && self.context.bind_to_thread().is_ok() {
            #[expect(unsafe_code, reason = "raw device memory")]
            // SAFETY: allocated in `Device::alloc`, and freed here only. The call waits for what is
            // queued.
            let freed = unsafe { result::free_sync(self.address) };
            let _ = freed;
        }
    }
}

/// What the driver says about itself, or nothing if there is none.
///
/// The bindings expect every function of the version that they were made for, and panic where one
/// is missing; so the version is asked for without them.
fn driver_version() -> Option<i32> {
    type GetVersion = unsafe extern "C" fn(*mut i32) -> i32;
    let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    #[expect(unsafe_code, reason = "loads the driver")]
    // SAFETY: the driver's initialisers have no requirements.
    let library = unsafe { libloading::Library::new(name) }.ok()?;
    #[expect(unsafe_code, reason = "a function of the driver")]
    // SAFETY: this is the function's type in every version of the driver.
    let get = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion\0") }.ok()?;
    let mut version = 0;
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: the pointer is to a live integer.
    let status = unsafe { get(&mut version) };
    (status == 0).then_some(version)
}
