//! `attend_split.cu` and `attend_feed.cuh`, `attend_tile.cu`, `attend_wide.cu`, `attend_f32.cu`: attention
//! over pages.

use nuthatch_backend::{AttnSpec, DeviceError, RopeStyle};
use nuthatch_types::{KvDtype, LayerIdx};

use super::attend_shape::{Cuts, PacedShape, SplitShape, TEAM, TileShape, WARP_LINES};
use super::{Address, NearPages, count, params};
use crate::Cuda;
use crate::buf::CudaBuf;
use crate::device::Kernel;
use crate::kv::CudaKv;
use crate::plan::{CudaPlan, Listed};

params! {
    /// Mirrors `Task`: the lines (pairs of a token and a query head) of one block.
    Task {
        /// Of the batch.
        first_row: u32,
        first_line: u32,
        n_lines: u32,
        /// Of the sequence's first row.
        place: u32,
        table_row: u32,
        padding: [u32; 3],
    }
}

params! {
    /// Mirrors `Split`: a row that is alone in its sequence.
    Split {
        /// Of the batch.
        row: u32,
        n_keys: u32,
        table_row: u32,
        /// Where the result of its first chunk goes.
        partial: u32,
    }
}

params! {
    /// Mirrors `Part`: one chunk of a split.
    Part {
        /// Row of the batch, and the chunk from bit 16 on.
        row_chunk: u32,
        n_keys: u32,
        table_row: u32,
        /// Where its result goes.
        partial: u32,
    }
}

params! {
    /// Mirrors `AttendParams`.
    AttendParams {
        qkv: Address,
        layer: Address,
        out: Address,
        rounded: Address,
        partials: Address,
        sums: Address,
        tasks: Address,
        n_tasks: Address,
        tables: Address,
        angles: Address,
        head_bytes: u64,
        near: NearPages,
        q_stride: u32,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        prefetch: u32,
        cuts: Cuts,
        tile_parts: u32,
        is_halves: u32,
        is_contiguous: u32,
        scale: f32,
    }
}

params! {
    /// Mirrors `AttendF32Params`.
    AttendF32Params {
        qkv: Address,
        layer: Address,
        out: Address,
        rounded: Address,
        places: Address,
        table_rows: Address,
        tables: Address,
        head_bytes: u64,
        near: NearPages,
        q_stride: u32,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        scale: f32,
    }
}

/// The kernels for one KV type and head width.
pub(crate) struct AttendKernels {
    pub(crate) rope: Kernel,
    pub(crate) write_far: Kernel,
    pub(crate) code_pages: Kernel,
    pub(crate) shift: Kernel,
    pub(crate) attend: Attend,
}

/// How attention is computed.
#[expect(clippy::large_enum_variant, reason = "there is one for each kind of pages")]
pub(crate) enum Attend {
    /// One kernel for everything.
    F32(Kernel),
    /// Tensor cores.
    Mma {
        /// Rows alone in their sequences, chunk by chunk; for groups that one of them takes.
        splits: [(SplitShape, Kernel); 2],
        /// Many lines, all chunks.
        tile: Tile,
        /// Bring splits together, in the order of [`MergeShape::ALL`](super::merge::MergeShape::ALL).
        merges: [Kernel; 4],
        /// For many tasks, where there is one.
        paced: Option<Paced>,
    },
}

/// Splits that fill their rings little by little, in the order of [`PacedShape::ALL`], and merges after them,
/// in that of [`TurnShape::ALL`](super::merge::TurnShape::ALL).
pub(crate) struct Paced {
    pub(crate) kernels: [Kernel; 3],
    pub(crate) merges: [Kernel; 4],
}

/// A kernel that takes many lines of one sequence.
pub(crate) struct Tile {
    pub(crate) kernel: Kernel,
    pub(crate) shape: TileShape,
}

impl AttendKernels {
    /// Lines that are one task of many.
    pub(crate) fn tile_lines(&self) -> usize {
        match &self.attend {
            // Its tasks are not looked at.
            Attend::F32(_) => WARP_LINES * TEAM,
            Attend::Mma { tile, .. } => tile.shape.lines,
        }
    }
}

/// One layer's attention.
pub(crate) struct Attention<'a> {
    pub(crate) cuda: &'a Cuda,
    pub(crate) plan: &'a CudaPlan,
    pub(crate) layer: LayerIdx,
    pub(crate) spec: &'a AttnSpec<'a, Cuda>,
    pub(crate) qkv: &'a CudaBuf,
    pub(crate) kv: &'a CudaKv,
    pub(crate) tasks: Listed,
}

impl Cuda {
    pub(crate) fn attention<'a>(
        &'a self,
        plan: &'a CudaPlan,
        layer: LayerIdx,
        spec: &'a AttnSpec<'a, Cuda>,
        (qkv, kv): (&'a CudaBuf, &'a CudaKv),
    ) -> Attention<'a> {
        Attention { cuda: self, plan, layer, spec, qkv, kv, tasks: plan.all() }
    }
}

/// Whether attention can also rotate queries and keys, and append keys and values.
pub(crate) fn can_append(plan: &CudaPlan, spec: &AttnSpec<'_, Cuda>, kv: &CudaKv) -> bool {
    let (d, rotated) = (kv.page.head_dim as usize, 2 * plan.shape.rope.inv_freq.len());
    let is_split = plan.n_rows() > 0 && plan.all().n_splits as usize == plan.n_rows();
    let has_lanes = d.is_multiple_of(64) && rotated == d && kv.page.dtype != KvDtype::F32;
    is_split && has_lanes && spec.owns_kv && spec.head_norms.is_none() && kv.sparse.is_none()
}

impl Attention<'_> {
    /// `out[t, h] = softmax(scale q[t, h] K) V` for every row of the plan.
    pub(crate) fn run(&self, out: &mut CudaBuf) -> Result<(), DeviceError> {
        self.run_as(false, out)
    }

    /// The same; if it `appends`, queries and keys are not rotated, and keys and values not in their
    /// pages yet, which [`can_append`] has said to be possible.
    pub(crate) fn run_as(&self, appends: bool, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let angles = if appends { self.plan.angles.address() } else { 0 };
        let (plan, kv) = (self.plan, self.kv);
        let (d, n_heads) = (kv.page.head_dim as usize, self.spec.n_heads);
        assert!(plan.n_rows() * self.q_stride() <= self.qkv.len, "the rows are in qkv");
        assert!(plan.n_rows() * n_heads as usize * d <= out.len, "the rows fit out");
        assert!(plan.shape.kv == kv.shape, "the plan is for this arena");
        assert_eq!(plan.group(), self.group() as usize, "the plan is for these heads");
        out.set_fresh(plan.n_rows() * n_heads as usize * d);
        match &plan.kernels_of(kv, kv.page_of(self.layer.0)).attend {
            Attend::F32(kernel) => self.cuda.in_parts(plan, self.layer, kv, |first, n, near| {
                assert!(first == 0 && n == kv.shape.n_kv_heads, "all heads at one time");
                self.attend_f32(kernel, near, out)
            }),
            Attend::Mma { splits: [small, large], tile, merges, paced } => {
                let Listed { splits, n_splits, tiles, n_tiles, .. } = self.tasks;
                if n_splits > 0 {
                    let (shape, kernel) = if self.group() <= 8 { small } else { large };
                    let is_paced = self.group() <= 8 && self.cuda.l2_prefetch == 0;
                    let paced = paced.as_ref().zip(self.tasks.paced.filter(|_| is_paced));
                    let (kernel, warps) = match paced {
                        Some((paced, i)) => (&paced.kernels[i], PacedShape::ALL[i].warps),
                        None => (kernel, shape.warps),
                    };
                    let grid = (self.cuda.device.n_multiprocessors(), 1);
                    let tasks = (self.tasks.parts, 1, angles);
                    let all = (0, kv.near_pages(self.layer.0));
                    self.attend(kernel, tasks, (grid, count(32 * warps)), all, out)?;
                    match paced {
                        Some((paced, _)) => {
                            self.merge_turns(&paced.merges, (splits, n_splits), out)?
                        }
                        None => self.merge(merges, (splits, n_splits), out)?,
                    }
                }
                if n_tiles > 0 {
                    // The plan is made before it is known how pages lie, and so which kernel it is for.
                    let parts = count(plan.tile_lines().div_ceil(tile.shape.lines));
                    let threads = count(tile.shape.threads);
                    self.cuda.in_parts(plan, self.layer, kv, |first, n_heads, near| {
                        let grid = (n_tiles * parts, n_heads);
                        let (kernel, tasks) = (&tile.kernel, (tiles, parts, 0));
                        self.attend(kernel, tasks, (grid, threads), (first, near), out)
                    })?;
                }
                Ok(())
            }
        }
    }

    /// Floats of a row of q, and of k and v if the layer owns them.
    fn q_stride(&self) -> usize {
        let n_kv_heads = if self.spec.owns_kv { self.kv.shape.n_kv_heads } else { 0 };
        (self.spec.n_heads + 2 * n_kv_heads) as usize * self.kv.page.head_dim as usize
    }

    pub(super) fn group(&self) -> u32 {
        self.spec.n_heads / self.kv.shape.n_kv_heads
    }

    /// What scores are multiplied with: exponents are of two.
    fn scale(&self) -> f32 {
        self.spec.scale * std::f32::consts::LOG2_E
    }

    pub(super) fn window(&self) -> u32 {
        self.spec.window.unwrap_or(u32::MAX)
    }

    /// Tasks of one kind, of the layer's heads from one on.
    fn attend(
        &self,
        kernel: &Kernel,
        (tasks, tile_parts, angles): (Address, u32, Address),
        (grid, threads): ((u32, u32), u32),
        (first, near): (u32, NearPages),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let head_bytes = self.kv.layer_head_bytes(self.layer.0);
        // Elements of a row that belong to heads before.
        let before = u64::from(first * self.group() * self.kv.page.head_dim);
        let params = AttendParams {
            qkv: self.qkv.floats.address() + 4 * before,
            layer: self.kv.layer_address(self.layer.0) + u64::from(first) * head_bytes,
            out: out.floats.address() + 4 * before,
            rounded: out.rounded.address() + 2 * before,
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            tasks,
            n_tasks: self.tasks.counts,
            tables: self.plan.tables,
            angles,
            head_bytes,
            near,
            q_stride: count(self.q_stride()),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            // Steps that splits bring to the second-level cache ahead of their use, or 0.
            prefetch: self.cuda.l2_prefetch,
            cuts: self.plan.cuts(),
            tile_parts,
            is_halves: u32::from(self.plan.shape.rope.style == RopeStyle::Halves),
            is_contiguous: u32::from(self.cuda.device.has_virtual_kv()),
            scale: self.scale(),
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: tasks are rows of the batch, asserted to be in qkv and out; partial results have
        // their places in the plan, counted when the tasks were made; slots come from the plan's
        // tables, whose entries the executor has checked against the arena. What is appended goes to the
        // pages of the rows, which nobody else reads meanwhile.
        unsafe {
            self.cuda.device.launch(kernel, grid, threads, &params)
        }
    }

    fn attend_f32(
        &self,
        kernel: &Kernel,
        near: NearPages,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let params = AttendF32Params {
            qkv: self.qkv.floats.address(),
            layer: self.kv.layer_address(self.layer.0),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            places: self.plan.places(),
            table_rows: self.plan.table_rows(),
            tables: self.plan.tables,
            head_bytes: self.kv.layer_head_bytes(self.layer.0),
            near,
            q_stride: count(self.q_stride()),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            scale: self.scale(),
        };
        let grid = (count(self.plan.n_rows()), self.spec.n_heads);
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: rows and heads were asserted to be in qkv and out; slots are as above.
        unsafe {
            self.cuda.device.launch(kernel, grid, 32, &params)
        }
    }
}
