//! The CPU backend: plain Rust as the reference, AVX-512 and AMX where the machine has them.
//!
//! - `pack`: weights, quantised as in their file, sixteen rows side by side
//! - `acts`: activations as eight-bit integers
//! - `matmul`: products, one kernel per instruction set, one order of summation
//! - `kv`, `plan`, `append`, `attend`: the paged cache, a step's batch, writing and reading
//! - `coded`: pages in eight bits
//! - `far`, `near`: pages in a file, and the rows of them that are kept in memory
//! - `topk`: digests of keys, and finding places by them
//! - `chooser`: heads that choose while others attend
//! - `shift`: pages whose keys move to other positions
//! - `rows`: norm, rotation, activation
//! - `pool`: the threads

mod acts;
mod append;
mod attend;
mod chooser;
mod coded;
mod far;
mod isa;
mod kv;
mod matmul;
mod mem;
mod near;
mod pack;
mod plan;
mod pool;
mod rows;
mod shift;
mod topk;
mod versions;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use nuthatch_backend::{
    Ask, AttnSpec, Backend, BatchLayout, Bring, Chooser, DeviceError, Digest, HostMatrix, Known,
    Near, NearCounts, PageLayout, Pick, PlanShape, RowCode,
};
use nuthatch_types::{HostReads, KvShape, KvSlots, LayerIdx, PageCopy, PageImage, PageShift, Slot};

use acts::Acts;
use append::Append;
use attend::{Attention, MAX_GROUP};
pub use isa::Isa;
pub use kv::CpuKv;
use kv::PAGE;
pub use matmul::CpuWeight;
use matmul::{Order, Product, Target};
use mem::{Region, SharedMut, Slab};
use pack::Packed;
pub use plan::{CpuPlan, CpuTables};
use pool::Pool;
use rows::{norm_row, swiglu_row};
use topk::Scoring;

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
    /// Scratch of the matrix products, and their order; one product runs at a time.
    products: Mutex<(Acts, Order)>,
    /// What weights are cut from.
    slab: Mutex<Slab>,
    /// Weights loaded so far: the number of the next.
    n_weights: AtomicUsize,
    /// Scores of one layer's questions before they are answers; kept, because clearing memory for
    /// each layer took half as long as the scores.
    scoring: Mutex<topk::Memory>,
    /// Where KV pages lie, if not in memory.
    kv_file: Option<PathBuf>,
    /// What rows that are brought near are rounded to.
    far_code: Option<RowCode>,
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
        let products = Mutex::new((Acts::empty(), Order::default()));
        let (pool, slab, n_weights, scoring) =
            (Pool::new(threads), Mutex::default(), AtomicUsize::new(0), Mutex::default());
        Ok(Cpu { pool, isa, products, slab, n_weights, scoring, kv_file: None, far_code: None })
    }

    /// The same with KV pages in a file of this name, or in this folder, instead of in memory.
    #[must_use]
    pub fn with_kv_file(self, path: PathBuf) -> Self {
        Cpu { kv_file: Some(path), ..self }
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

    fn attention<'a>(
        &self,
        plan: &'a CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &'a Region<f32>,
        kv: &'a CpuKv,
    ) -> Attention<'a> {
        let n_kv = if spec.owns_kv { kv.shape.n_kv_heads as usize } else { 0 };
        Attention {
            isa: self.isa,
            plan,
            kv,
            layer: layer.0 as usize,
            scale: spec.scale,
            window: spec.window.map(|window| window as usize),
            qkv,
            width: (spec.n_heads as usize + 2 * n_kv) * kv.shape.head_dim as usize,
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
        let (acts, order) = &mut *self.products.lock().unwrap_or_else(PoisonError::into_inner);
        Product { isa: self.isa, weight, x, rows, target }.run(&self.pool, acts, order, out)
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
        let mut slab = self.slab.lock().unwrap_or_else(PoisonError::into_inner);
        let packed = parts.iter().map(|part| Packed::new(&self.pool, &mut slab, part));
        let parts = packed.collect::<Result<Vec<_>, _>>()?;
        let number = self.n_weights.fetch_add(1, Ordering::Relaxed);
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(CpuWeight { number, rows, cols: parts[0].cols, parts })
    }

    fn host_reads(&self) -> HostReads {
        HostReads::Near
    }

    /// Both tiers are one arena: here, a slot of the host differs from one of the device only by
    /// whose budget it is.
    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<CpuKv, DeviceError> {
        CpuKv::new(shape, slots.total(), self.kv_file.as_deref())
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
        kv.check()
    }

    fn page_image(&self, kv: &CpuKv) -> Option<PageImage> {
        // Pages that are in a file are read there.
        kv.file.is_none().then(|| kv.page_image(self.isa))
    }

    fn page_layout(&self, kv: &CpuKv) -> Option<PageLayout> {
        kv.page_layout(kv.page_image(self.isa).bytes)
    }

    fn read_page(&self, kv: &CpuKv, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        kv.read_page(slot, target);
        Ok(())
    }

    fn write_page(
        &self,
        kv: &mut CpuKv,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        kv.write_page(slot, start, source);
        Ok(())
    }

    fn shift_pages(
        &self,
        plan: &CpuPlan,
        kv: &mut CpuKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        shift::shift_pages(&self.pool, kv, &plan.shape.rope, shifts);
        let slots: Vec<usize> = shifts.iter().map(|shift| shift.target.0 as usize).collect();
        topk::encode_pages(self.isa, &self.pool, kv, &slots);
        kv.check()
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
        let append = Append::new(self.isa, plan, layer.0 as usize, spec, (qkv, kv));
        let width = append.width * PAGE;
        self.each_row(plan.runs.len(), width, &|i| append.run(&plan.runs[i]));
        kv.check()
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
        self.attention(plan, layer, spec, qkv, kv).run(&self.pool, &Known::default(), &mut [], out);
        kv.check()
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

    fn keep_digests(&self, kv: &mut CpuKv, digests: &[Digest]) -> Result<(), DeviceError> {
        kv.keep_digests(digests)
    }

    fn keep_near(&self, kv: &mut CpuKv, near: &Near) -> Result<(), DeviceError> {
        kv.keep_near(near, self.far_code)
    }

    fn forget_near(&self, kv: &mut CpuKv, table_row: u32) {
        if let Some(near) = &kv.near {
            near.forget(table_row);
        }
    }

    fn bring(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        kv: &CpuKv,
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        kv.bring(&self.pool, plan, layer.0 as usize, brings);
        kv.check()
    }

    fn bring_ahead(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        kv: &CpuKv,
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        kv.bring_ahead(&self.pool, plan, layer.0 as usize, brings);
        Ok(())
    }

    fn near_counts(&self, kv: &CpuKv) -> NearCounts {
        let counts = kv.near.as_ref().map(|near| near.counts()).unwrap_or_default();
        NearCounts { file_bytes: kv.file.as_ref().map_or(0, |file| file.n_read()), ..counts }
    }

    fn read_keys(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        kv: &CpuKv,
        (seq, head, n): (u32, u32, u32),
    ) -> Result<Vec<f32>, DeviceError> {
        let seq = &plan.seqs[seq as usize];
        let slot = |place| plan.slot(seq, place);
        let head = kv.head_number(layer.0 as usize, head as usize);
        let keys =
            kv.read_keys(self.isa, head, (0..n as usize).map(|place| (slot(place), place % PAGE)));
        kv.check()?;
        Ok(keys)
    }

    fn score(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Region<f32>,
        kv: &CpuKv,
        asks: &[Ask],
        scores: &mut [u32],
    ) -> Result<(), DeviceError> {
        let attention = self.attention(plan, layer, spec, qkv, kv);
        let mut memory = self.scoring.lock().unwrap_or_else(PoisonError::into_inner);
        Scoring { attention }.run(&self.pool, asks, &mut memory, scores);
        kv.check()
    }

    fn attend_picks(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Region<f32>,
        kv: &CpuKv,
        picks: &[Pick<'_>],
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        let known = (&Known::default(), &mut picks.to_vec()[..]);
        self.attend_choosing(plan, layer, spec, qkv, kv, known, out)
    }
}
