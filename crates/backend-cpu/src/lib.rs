//! The CPU backend: plain Rust as the reference, AVX-512 and AMX where the machine has them.
//!
//! - `pack`: weights, quantised as in their file, sixteen rows side by side
//! - `acts`: activations as eight-bit integers
//! - `matmul`: products, one kernel per instruction set, one order of summation
//! - `kv`, `plan`, `attend`: the paged cache, a step's batch, attention over both
//! - `shift`: pages whose keys move to other positions
//! - `rows`: norm, rotation, activation
//! - `pool`: the threads

mod acts;
mod attend;
mod isa;
mod kv;
mod matmul;
mod mem;
mod pack;
mod plan;
mod pool;
mod rows;
mod shift;
mod versions;

use std::sync::Mutex;

use nuthatch_backend::{AttnSpec, Backend, BatchLayout, DeviceError, HostMatrix, PlanShape};
use nuthatch_types::{HostReads, KvShape, KvSlots, LayerIdx, PageCopy, PageShift, Slot};

use acts::Acts;
use attend::{Attention, MAX_GROUP};
pub use isa::Isa;
pub use kv::CpuKv;
use kv::{PAGE, write_token};
pub use matmul::CpuWeight;
use matmul::{Product, Target};
use mem::{Region, SharedMut};
use pack::Packed;
use plan::PageRun;
pub use plan::{CpuPlan, CpuTables};
use pool::Pool;
use rows::{Prepare, norm_row, prepare_head, swiglu_row};

/// Below this many values an elementwise operation is not worth telling other threads about.
const SERIAL_VALUES: usize = 8192;

/// How the CPU is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuConfig {
    /// Threads, the calling one included; 0 means as many as the machine has.
    pub threads: usize,
    /// Instructions to use; `None` takes the best that the machine has.
    pub isa: Option<Isa>,
}

/// The CPU as a device.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    /// Scratch of the matrix products; one product runs at a time.
    acts: Mutex<Acts>,
}

impl Cpu {
    /// Starts the threads.
    pub fn new(config: CpuConfig) -> Result<Cpu, DeviceError> {
        let best = Isa::detect();
        let isa = config.isa.unwrap_or(best);
        if isa > best {
            let fault = format!("this machine has no {isa}; its best is {best}");
            return Err(DeviceError::Fault(fault));
        }
        let threads = match config.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        Ok(Cpu { pool: Pool::new(threads), isa, acts: Mutex::new(Acts::empty()) })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use, the calling one included.
    pub fn threads(&self) -> usize {
        self.pool.n_threads()
    }

    /// Runs `row(i)` for each row, on several threads if there is enough to do.
    fn each_row(&self, rows: usize, width: usize, row: &(dyn Fn(usize) + Sync)) {
        if rows * width <= SERIAL_VALUES {
            (0..rows).for_each(row);
        } else {
            self.pool.run(rows, row);
        }
    }

    fn product(
        &self,
        weight: &CpuWeight,
        x: &Region<f32>,
        rows: usize,
        target: Target,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let mut acts = self.acts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Product { isa: self.isa, weight, x, rows, target }.run(&self.pool, &mut acts, out)
    }
}

impl Backend for Cpu {
    type Buf = Region<f32>;
    type Weight = CpuWeight;
    type Kv = CpuKv;
    type Tables = CpuTables;
    type Plan = CpuPlan;

    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa, self.threads())
    }

    fn alloc(&self, len: usize) -> Result<Region<f32>, DeviceError> {
        Region::zeroed(len, "activations")
    }

    fn write(&self, target: &mut Region<f32>, source: &[f32]) -> Result<(), DeviceError> {
        target[..source.len()].copy_from_slice(source);
        Ok(())
    }

    fn read(&self, source: &Region<f32>, target: &mut [f32]) -> Result<(), DeviceError> {
        target.copy_from_slice(&source[..target.len()]);
        Ok(())
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<CpuWeight, DeviceError> {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols == parts[0].cols));
        let packed = parts.iter().map(|part| Packed::new(&self.pool, part));
        let parts = packed.collect::<Result<Vec<_>, _>>()?;
        Ok(CpuWeight { rows: parts.iter().map(|part| part.rows).sum(), cols: parts[0].cols, parts })
    }

    fn host_reads(&self) -> HostReads {
        HostReads::Near
    }

    /// Both tiers are one arena: here, a slot of the host differs from one of the device only by
    /// whose budget it is.
    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<CpuKv, DeviceError> {
        CpuKv::new(shape, slots.total())
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<CpuTables, DeviceError> {
        Ok(CpuTables::new(n_rows, n_pages))
    }

    fn write_table(
        &self,
        tables: &mut CpuTables,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        tables.write(row, start, slots);
        Ok(())
    }

    fn copy_pages(&self, kv: &mut CpuKv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        kv.copy_pages(copies);
        Ok(())
    }

    fn shift_pages(
        &self,
        plan: &CpuPlan,
        kv: &mut CpuKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        shift::shift_pages(&self.pool, kv, &plan.shape.rope, shifts);
        Ok(())
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<CpuPlan, DeviceError> {
        let group = shape.n_heads / shape.kv.n_kv_heads as usize;
        if group > MAX_GROUP {
            let fault = format!("{group} query heads to a key head; at most {MAX_GROUP} here");
            return Err(DeviceError::Fault(fault));
        }
        Ok(CpuPlan::new(shape))
    }

    fn plan(
        &self,
        plan: &mut CpuPlan,
        tables: &CpuTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        plan.prepare(tables, layout);
        Ok(())
    }

    fn embed(
        &self,
        table: &CpuWeight,
        plan: &CpuPlan,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let [table] = &table.parts[..] else { panic!("an embedding is one matrix") };
        let d = table.cols;
        let out = SharedMut::new(out);
        self.each_row(plan.n_rows(), d, &|i| {
            #[expect(unsafe_code, reason = "threads write disjoint rows")]
            // SAFETY: each row is written once.
            let out = unsafe { out.part(i * d, d) };
            table.row(plan.tokens[i] as usize, out);
        });
        Ok(())
    }

    fn gather_rows(
        &self,
        plan: &CpuPlan,
        x: &Region<f32>,
        d: usize,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        for (out, &row) in out.chunks_exact_mut(d).zip(&plan.output_rows) {
            out.copy_from_slice(&x[row as usize * d..][..d]);
        }
        Ok(())
    }

    fn norm(
        &self,
        x: &Region<f32>,
        weight: &Region<f32>,
        eps: f32,
        rows: usize,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let d = weight.len();
        let out = SharedMut::new(out);
        self.each_row(rows, d, &|i| {
            #[expect(unsafe_code, reason = "threads write disjoint rows")]
            // SAFETY: each row is written once.
            let out = unsafe { out.part(i * d, d) };
            norm_row(self.isa, &x[i * d..(i + 1) * d], weight, eps, out);
        });
        Ok(())
    }

    fn matmul(
        &self,
        w: &CpuWeight,
        x: &Region<f32>,
        rows: usize,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, Target::Replace, out)
    }

    fn matmul_add(
        &self,
        w: &CpuWeight,
        x: &Region<f32>,
        rows: usize,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, Target::Add, out)
    }

    fn rope_append(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Region<f32>,
        kv: &mut CpuKv,
    ) -> Result<(), DeviceError> {
        let shape = kv.shape;
        let (d, n_heads) = (shape.head_dim as usize, spec.n_heads as usize);
        let n_kv = if spec.owns_kv { shape.n_kv_heads as usize } else { 0 };
        let width = (n_heads + 2 * n_kv) * d;
        let page_bytes = kv.head_page_bytes();
        let starts: Vec<usize> =
            (0..n_kv).map(|head| kv.head_start(layer.0 as usize, head)).collect();
        let qkv = SharedMut::new(qkv);
        let bytes = SharedMut::new(&mut kv.bytes);
        let half = plan.shape.rope.inv_freq.len();
        let run = |i: usize| {
            let PageRun { seq, start, n } = plan.runs[i];
            let seq = &plan.seqs[seq];
            for row in start..start + n {
                let batch_row = seq.first_row + row;
                #[expect(unsafe_code, reason = "threads write disjoint rows")]
                // SAFETY: each row belongs to one run, and each run is handled once.
                let qkv = unsafe { qkv.part(batch_row * width, width) };
                let angles = batch_row * half..(batch_row + 1) * half;
                let mut prepare = Prepare {
                    norm: spec.head_norms.map(|(q, _)| &q[..]),
                    eps: spec.eps,
                    cos: &plan.cos[angles.clone()],
                    sin: &plan.sin[angles],
                    halves: plan.halves(),
                };
                let (q, kv) = qkv.split_at_mut(n_heads * d);
                let (k, v) = kv.split_at_mut(n_kv * d);
                for head in q.chunks_exact_mut(d) {
                    prepare_head(self.isa, head, &prepare);
                }
                prepare.norm = spec.head_norms.map(|(_, k)| &k[..]);
                let place = seq.place + row;
                let slot = plan.slots[seq.first_slot + place / PAGE] as usize;
                for (head, (k, v)) in k.chunks_exact_mut(d).zip(v.chunks_exact(d)).enumerate() {
                    prepare_head(self.isa, k, &prepare);
                    let page = starts[head] + slot * page_bytes;
                    write_token(bytes, page, place % PAGE, shape.dtype, k, v);
                }
            }
        };
        self.each_row(plan.runs.len(), width * PAGE, &run);
        Ok(())
    }

    fn attend(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Region<f32>,
        kv: &CpuKv,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let d = kv.shape.head_dim as usize;
        let n_kv = if spec.owns_kv { kv.shape.n_kv_heads as usize } else { 0 };
        let attention = Attention {
            isa: self.isa,
            plan,
            kv,
            layer: layer.0 as usize,
            scale: spec.scale,
            window: spec.window.map(|window| window as usize),
            qkv,
            width: (spec.n_heads as usize + 2 * n_kv) * d,
        };
        attention.run(&self.pool, out);
        Ok(())
    }

    fn swiglu(
        &self,
        gate_up: &Region<f32>,
        f: usize,
        rows: usize,
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let out = SharedMut::new(out);
        self.each_row(rows, f, &|i| {
            #[expect(unsafe_code, reason = "threads write disjoint rows")]
            // SAFETY: each row is written once.
            let out = unsafe { out.part(i * f, f) };
            let (gate, up) = gate_up[i * 2 * f..(i + 1) * 2 * f].split_at(f);
            swiglu_row(self.isa, gate, up, out);
        });
        Ok(())
    }
}
