//! NVIDIA GPUs as a device: CUDA loaded at run time, kernels compiled by NVRTC at first use.
//!
//! - `device`: the driver, one stream, memory, and the fault that ends it
//! - `nvrtc`, `program`: compiling kernels, keeping them on disk, and what is compiled together
//! - `buf`, `weight`, `kv`, `plan`: what lies on the device
//! - `launch`: one file per operation, beside one `.cu` file each
//!
//! Nothing at build time needs CUDA, and a machine without a driver gets an error, not a crash.

mod buf;
mod device;
mod error;
mod kv;
mod launch;
mod nvrtc;
mod plan;
mod program;
mod weight;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, DeviceError, HostMatrix, PlanShape, WeightType,
};
use nuthatch_types::{KvShape, KvSlots, LayerIdx, PageCopy, PageShift, Slot};

pub use buf::CudaBuf;
use device::{Device, Kernel, Memory};
pub use error::{CompileError, OpenError};
pub use kv::CudaKv;
use kv::PageShape;
use launch::attend::{Attend, AttendKernels, Attention};
use launch::matmul::{Rows, Target};
use launch::round::Rounding;
use launch::{attend, copy, embed, gather, matmul, norm, rope, round, swiglu};
use nvrtc::Compiler;
pub use plan::{CudaPlan, CudaTables};
use program::Program;
pub use weight::CudaWeight;
use weight::{Kernels, Part, WeightKernels, check_size};

/// How a GPU is used.
#[derive(Clone, Debug, Default)]
pub struct CudaConfig {
    /// Where compiled kernels are kept; nowhere if not given.
    pub cache_dir: Option<PathBuf>,
    /// Whether products take all bits of the activations, at three times the arithmetic; if not,
    /// activations are rounded to bf16 before they are multiplied, as is usual on GPUs.
    pub is_exact: bool,
}

/// A GPU as a device.
pub struct Cuda {
    device: Device,
    ordinal: usize,
    compiler: Compiler,
    common: Arc<Common>,
    weights: Mutex<BTreeMap<WeightType, Arc<WeightKernels>>>,
    attention: Mutex<BTreeMap<PageShape, Arc<AttendKernels>>>,
    is_exact: bool,
    scratch: Mutex<Scratch>,
}

/// Memory of one product at a time; usual products need none of it.
#[derive(Default)]
struct Scratch {
    /// Activations that are padded, or in parts.
    rounded: Option<Memory>,
    /// Products with parts.
    products: Option<Memory>,
}

/// The kernels that every model needs.
struct Common {
    norm: Kernel,
    swiglu: Kernel,
    round: Kernel,
    sum: Kernel,
    gather: Kernel,
    copy: Kernel,
    angles: Kernel,
    matmul_f32: Kernel,
    embed_f32: Kernel,
}

impl Cuda {
    /// Opens a device and compiles what every model needs.
    pub fn open(ordinal: usize, config: CudaConfig) -> Result<Self, OpenError> {
        let device = Device::open(ordinal)?;
        let compiler = Compiler::new(device.arch(), config.cache_dir)?;
        let cubin = compiler.cubin(&Program::common())?;
        let common = Common::new(&device, cubin).map_err(|e| OpenError::Driver(e.to_string()))?;
        Ok(Cuda {
            device,
            ordinal,
            compiler,
            common: Arc::new(common),
            weights: Mutex::new(BTreeMap::new()),
            attention: Mutex::new(BTreeMap::new()),
            is_exact: config.is_exact,
            scratch: Mutex::new(Scratch::default()),
        })
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.device.memory()
    }

    fn weight_kernels(&self, dtype: WeightType) -> Result<Kernels, DeviceError> {
        if dtype == WeightType::F32 {
            return Ok(Kernels::F32(Arc::clone(&self.common)));
        }
        let mut known = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&dtype) {
            return Ok(Kernels::Packed(Arc::clone(kernels)));
        }
        let cubin = self.cubin(&Program::weights(dtype))?;
        let kernels = Arc::new(WeightKernels::new(&self.device, cubin, dtype)?);
        known.insert(dtype, Arc::clone(&kernels));
        Ok(Kernels::Packed(kernels))
    }

    fn attend_kernels(&self, page: PageShape) -> Result<Arc<AttendKernels>, DeviceError> {
        let mut known = self.attention.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&page) {
            return Ok(Arc::clone(kernels));
        }
        let cubin = self.cubin(&Program::attention(page))?;
        let kernels = Arc::new(AttendKernels::new(&self.device, cubin, page)?);
        known.insert(page, Arc::clone(&kernels));
        Ok(kernels)
    }

    fn cubin(&self, program: &Program) -> Result<Vec<u8>, DeviceError> {
        self.compiler.cubin(program).map_err(|e| DeviceError::Fault(e.to_string()))
    }

    fn product(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        target: &mut Target<'_>,
    ) -> Result<(), DeviceError> {
        target.out.set_stale();
        if rows == 0 {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { rounded, products } = &mut *scratch;
        for part in &w.parts {
            match &part.kernels {
                Kernels::F32(common) => {
                    let part = (part, &common.matmul_f32);
                    matmul::matmul_f32(&self.device, part, (x, rows), target)?;
                }
                Kernels::Packed(kernels) if self.is_exact => {
                    let x = self.exact_rows(x, rows, w.cols, rounded)?;
                    let bytes = x.n * part.rows * 4;
                    let products = self.room(products, bytes)?;
                    matmul::matmul_apart(&self.device, (part, kernels), x, products)?;
                    let products = (products, part);
                    round::sum(&self.device, &self.common.sum, products, rows, target)?;
                }
                Kernels::Packed(kernels) => {
                    let x = self.rounded_rows(x, rows, w.cols, rounded)?;
                    matmul::matmul(&self.device, (part, kernels), x, target)?;
                }
            }
        }
        Ok(())
    }

    /// Activations rounded to bf16: those that came with the floats, if they are fresh and need no
    /// padding.
    fn rounded_rows(
        &self,
        x: &CudaBuf,
        rows: usize,
        cols: usize,
        scratch: &mut Option<Memory>,
    ) -> Result<Rows, DeviceError> {
        let rounding = Rounding { rows, cols, stride: cols.next_multiple_of(64), parts: 1 };
        let stride = rounding.stride;
        if stride != cols {
            let target = self.room(scratch, rows * stride * 2)?;
            round::round(&self.device, &self.common.round, x, rounding, target)?;
            return Ok(Rows { address: target.address(), stride, n: rows });
        }
        if !x.is_fresh(rows * cols) {
            round::round(&self.device, &self.common.round, x, rounding, &x.rounded)?;
            x.set_fresh(rows * cols);
        }
        Ok(Rows { address: x.rounded.address(), stride, n: rows })
    }

    /// Activations as rows of bf16 whose sums they are.
    fn exact_rows(
        &self,
        x: &CudaBuf,
        rows: usize,
        cols: usize,
        scratch: &mut Option<Memory>,
    ) -> Result<Rows, DeviceError> {
        let (stride, parts) = (cols.next_multiple_of(64), round::EXACT_PARTS);
        let target = self.room(scratch, rows * parts * stride * 2)?;
        let rounding = Rounding { rows, cols, stride, parts };
        round::round(&self.device, &self.common.round, x, rounding, target)?;
        Ok(Rows { address: target.address(), stride, n: rows * parts })
    }

    /// Scratch of at least `bytes`; grows, never shrinks.
    fn room<'a>(
        &self,
        scratch: &'a mut Option<Memory>,
        bytes: usize,
    ) -> Result<&'a Memory, DeviceError> {
        match scratch.take().filter(|memory| memory.bytes() >= bytes) {
            Some(memory) => Ok(scratch.insert(memory)),
            None => {
                let memory = self.device.alloc(bytes.next_power_of_two(), "scratch of products")?;
                Ok(scratch.insert(memory))
            }
        }
    }
}

impl Common {
    fn new(device: &Device, cubin: Vec<u8>) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        let kernel = |name| device.kernel(&module, name, 0);
        Ok(Common {
            norm: kernel("norm_rows")?,
            swiglu: kernel("swiglu")?,
            round: kernel("round_rows")?,
            sum: kernel("sum_rows")?,
            gather: kernel("gather_rows")?,
            copy: kernel("copy_pages")?,
            angles: kernel("rope_angles")?,
            matmul_f32: kernel("matmul_f32")?,
            embed_f32: kernel("embed_f32")?,
        })
    }
}

impl AttendKernels {
    fn new(device: &Device, cubin: Vec<u8>, page: PageShape) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        let kernel = |name, shared| device.kernel(&module, name, shared);
        let attend = match page.dtype {
            nuthatch_types::KvDtype::F32 => Attend::F32(kernel("attend_f32", 0)?),
            nuthatch_types::KvDtype::F16 | nuthatch_types::KvDtype::Bf16 => Attend::Mma {
                split: kernel("attend_split", attend::SPLIT.shared_bytes(page))?,
                tile: kernel("attend_tile", attend::TILE.shared_bytes(page))?,
                merge: kernel("merge", attend::merge_shared_bytes(page))?,
            },
        };
        Ok(AttendKernels { rope: kernel("rope_append", 0)?, attend })
    }
}

/// Compiles every kernel for an architecture such as `sm_90a`, and gives for each program its name
/// and the compiler's report. Needs NVRTC, but no device.
pub fn compile_all(arch: &str) -> Result<Vec<(String, String)>, OpenError> {
    let compiler = Compiler::new(arch.to_owned(), None)?;
    let compile = |program: Program| {
        let (_, log) = compiler.compile(&program)?;
        Ok((program.name, log))
    };
    Program::all().into_iter().map(compile).collect()
}

impl Backend for Cuda {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type Kv = CudaKv;
    type Tables = CudaTables;
    type Plan = CudaPlan;

    fn name(&self) -> String {
        let (name, (major, minor)) = self.device.describe();
        format!("cuda:{} ({name}, {major}.{minor})", self.ordinal)
    }

    fn rounds_activations(&self) -> bool {
        !self.is_exact
    }

    fn alloc(&self, len: usize) -> Result<CudaBuf, DeviceError> {
        const WHAT: &str = "activations";
        let floats = self.device.alloc(len * 4, WHAT)?;
        Ok(CudaBuf::new(len, floats, self.device.alloc(len * 2, WHAT)?))
    }

    fn write(&self, target: &mut CudaBuf, source: &[f32]) -> Result<(), DeviceError> {
        assert!(source.len() <= target.len, "the values fit the buffer");
        target.set_stale();
        self.device.upload(&target.floats, 0, source)
    }

    fn read(&self, source: &CudaBuf, target: &mut [f32]) -> Result<(), DeviceError> {
        assert!(target.len() <= source.len, "the values are in the buffer");
        self.device.download(&source.floats, target)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.device.wait()
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<CudaWeight, DeviceError> {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols == parts[0].cols));
        for part in parts {
            check_size(part)?;
        }
        let mut weight = CudaWeight { rows: 0, cols: parts[0].cols, parts: Vec::new() };
        for same in parts.chunk_by(|a, b| a.dtype == b.dtype) {
            let kernels = self.weight_kernels(same[0].dtype)?;
            let part = Part::load(&self.device, kernels, same, weight.rows)?;
            weight.rows += part.rows;
            weight.parts.push(part);
        }
        Ok(weight)
    }

    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<CudaKv, DeviceError> {
        CudaKv::new(&self.device, shape, slots)
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<CudaTables, DeviceError> {
        CudaTables::new(&self.device, n_rows, n_pages)
    }

    fn write_table(
        &self,
        tables: &mut CudaTables,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        tables.write(&self.device, row, start, slots)
    }

    fn shift_pages(
        &self,
        _plan: &CudaPlan,
        _kv: &mut CudaKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        if shifts.is_empty() {
            return Ok(());
        }
        Err(DeviceError::Fault("streaming has no kernel on this device yet".to_owned()))
    }

    fn copy_pages(&self, kv: &mut CudaKv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        copy::copy_pages(&self.device, &self.common.copy, kv, copies)
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<CudaPlan, DeviceError> {
        let kernels = self.attend_kernels(PageShape::of(&shape.kv))?;
        CudaPlan::new(&self.device, shape, kernels)
    }

    fn plan(
        &self,
        plan: &mut CudaPlan,
        tables: &CudaTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        plan.prepare(&self.device, tables, layout)?;
        rope::angles(&self.device, &self.common.angles, plan)
    }

    fn embed(
        &self,
        table: &CudaWeight,
        plan: &CudaPlan,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        embed::embed(&self.device, table, plan, out)
    }

    fn gather_rows(
        &self,
        plan: &CudaPlan,
        x: &CudaBuf,
        d: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        gather::gather_rows(&self.device, &self.common.gather, plan, (x, d), out)
    }

    fn norm(
        &self,
        x: &CudaBuf,
        weight: &CudaBuf,
        eps: f32,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        norm::norm(&self.device, &self.common.norm, (x, weight), (eps, rows), out)
    }

    fn matmul(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: false })
    }

    fn matmul_add(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: true })
    }

    fn rope_append(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut CudaBuf,
        kv: &mut CudaKv,
    ) -> Result<(), DeviceError> {
        rope::rope_append(&self.device, plan, layer, spec, qkv, kv)
    }

    fn attend(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        Attention { device: &self.device, plan, layer, spec, qkv, kv }.run(out)
    }

    fn swiglu(
        &self,
        gate_up: &CudaBuf,
        f: usize,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        swiglu::swiglu(&self.device, &self.common.swiglu, gate_up, (f, rows), out)
    }
}
