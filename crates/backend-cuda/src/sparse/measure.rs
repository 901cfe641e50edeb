//! Parts of top-k attention by themselves, to be measured.

use std::sync::PoisonError;

use cudarc::driver::{CudaStream, sys};
use nuthatch_backend::DeviceError;
use nuthatch_types::LayerIdx;

use crate::Cuda;
use crate::branch::Branch;
use crate::kv::{CudaKv, PAGE_LEN};
use crate::launch::count;
use crate::launch::sparse::{
    GatherRowsParams, HeadState, SparseHeads, SparsePages, SparseRow, gather_rows, post_rows,
};
use crate::link::Link;
use crate::plan::CudaPlan;

use super::scratch::PickedSizes;

/// A stream beside the first one, for what is measured meanwhile.
pub struct Beside(Branch);

/// Threads of the host that bring rows.
pub struct Threads(Link);

/// Rows that are there to be brought.
pub struct ListedRows {
    /// Rows of the longest list.
    longest: usize,
}

impl ListedRows {
    fn sizes(&self, kv: &CudaKv) -> PickedSizes {
        let n_heads = kv.shape.n_kv_heads as usize;
        PickedSizes {
            rows: size_of::<SparseRow>(),
            states: n_heads * size_of::<HeadState>(),
            moves: n_heads * self.longest * 8,
            pages: n_heads * self.longest.div_ceil(PAGE_LEN) * kv.page.bytes(),
            partials: 0,
            sums: 0,
            tasks: 0,
        }
    }
}

/// A head whose working set is empty, to which so many rows move.
fn state_of(first_byte: usize, n_pages: usize, n_moves: u32) -> HeadState {
    HeadState { n_moves, n_gone: n_moves, ..HeadState::empty(first_byte, n_pages) }
}

impl Cuda {
    /// A stream beside the first one.
    pub fn beside(&self) -> Result<Beside, DeviceError> {
        Ok(Beside(Branch::new(&self.device, true)?))
    }

    /// Threads that bring rows of an arena, if its device was opened so.
    pub fn threads(&self, kv: &CudaKv) -> Result<Option<Threads>, DeviceError> {
        Ok(kv.start_link(&self.device)?.map(Threads))
    }

    /// Says which places of the batch's first sequence [`Cuda::bring_rows`] and the others bring: a list for each
    /// head. That is a copy, which is not part of what is measured.
    pub fn list_rows(
        &self,
        plan: &CudaPlan,
        kv: &CudaKv,
        lists: &[Vec<u32>],
    ) -> Result<ListedRows, DeviceError> {
        let sparse = kv.sparse.as_ref().expect("an arena that keeps digests");
        let (n_heads, seq) = (kv.shape.n_kv_heads as usize, &plan.seqs[0]);
        assert_eq!(lists.len(), n_heads, "a list for each head");
        let mut places = lists.iter().flatten();
        assert!(places.all(|&place| (place as usize) < seq.kv_len()), "of the sequence");
        let listed = ListedRows { longest: lists.iter().map(Vec::len).max().unwrap_or(0) };
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let room = scratch.picked(&self.device, &listed.sizes(kv))?;
        let state = |(head, list): (usize, &Vec<u32>)| {
            let n_pages = listed.longest.div_ceil(PAGE_LEN);
            state_of(head * n_pages * kv.page.bytes(), n_pages, count(list.len()))
        };
        let states: Vec<HeadState> = lists.iter().enumerate().map(state).collect();
        let padded = |list: &Vec<u32>| {
            let rest = std::iter::repeat_n(0, listed.longest - list.len());
            list.iter().copied().chain(rest).zip(0..).map(<[u32; 2]>::from).collect::<Vec<_>>()
        };
        let moves: Vec<[u32; 2]> = lists.iter().flat_map(padded).collect();
        let row = SparseRow {
            row: 0,
            kv_len: count(seq.kv_len()),
            table_row: seq.table_row,
            state_row: 0,
            marks: 0,
            pages: room.pages.address(),
        };
        self.device.upload(room.rows, 0, &[row])?;
        self.device.upload(room.states, 0, &states)?;
        self.device.upload(room.moves, 0, &moves)?;
        Ok(listed)
    }

    /// [`Cuda::bring_rows`] by threads of the host.
    pub fn bring_by(
        &self,
        threads: &Threads,
        (plan, kv): (&CudaPlan, &CudaKv),
        layer: LayerIdx,
        listed: &ListedRows,
        n_blocks: u32,
    ) -> Result<(), DeviceError> {
        threads.0.check()?;
        self.bring(plan, layer, kv, listed, (n_blocks, None, Some(&threads.0)))
    }

    /// [`Cuda::bring_rows`] beside what comes next.
    pub fn bring_beside(
        &self,
        beside: &Beside,
        (plan, kv): (&CudaPlan, &CudaKv),
        layer: LayerIdx,
        listed: &ListedRows,
        n_blocks: u32,
    ) -> Result<(), DeviceError> {
        let branch = beside.0.fork(&self.device, 0)?;
        self.bring(plan, layer, kv, listed, (n_blocks, Some(branch), None))
    }

    /// Brings the rows that were last listed to working sets, for all heads of a layer, by so many blocks.
    pub fn bring_rows(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        listed: &ListedRows,
        n_blocks: u32,
    ) -> Result<(), DeviceError> {
        self.bring(plan, layer, kv, listed, (n_blocks, None, None))
    }

    fn bring(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        listed: &ListedRows,
        (n_blocks, branch, link): (u32, Option<&CudaStream>, Option<&Link>),
    ) -> Result<(), DeviceError> {
        let sparse = kv.sparse.as_ref().expect("an arena that keeps digests");
        let n_heads = count(kv.shape.n_kv_heads as usize);
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let room = scratch.picked(&self.device, &listed.sizes(kv))?;
        let heads = SparseHeads {
            rows: room.rows.address(),
            states: room.states.address(),
            state_stride: n_heads,
            n_rows: 1,
            n_kv_heads: n_heads,
            group: 1,
        };
        let pages = SparsePages {
            layer: kv.layer_address(layer.0),
            tables: plan.tables,
            head_bytes: kv.head_bytes(),
            near: kv.near_pages(layer.0),
            table_len: plan.table_len,
            padding: 0,
        };
        let mut params = GatherRowsParams::of_moves(
            (heads, pages),
            (room.moves.address(), listed.longest),
            kv.codes_of(layer.0),
        );
        if let Some(link) = link {
            let params = link.ask(layer.0 as usize, &mut params);
            post_rows(&self.device, &sparse.kernels.post, &params, branch)?;
        }
        gather_rows(&self.device, &sparse.kernels.gather, &params, (n_blocks, branch))
    }

    /// Copies the first bytes of the arena to the device by the copy engine: what bringing rows is
    /// measured by.
    pub fn copy_pages_of(&self, kv: &CudaKv, bytes: usize) -> Result<(), DeviceError> {
        self.copy_on(self.device.main_stream(), kv, bytes)
    }

    /// [`Cuda::copy_pages_of`] beside what comes next.
    pub fn copy_beside(
        &self,
        beside: &Beside,
        kv: &CudaKv,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.copy_on(beside.0.fork(&self.device, 0)?, kv, bytes)
    }

    fn copy_on(&self, stream: &CudaStream, kv: &CudaKv, bytes: usize) -> Result<(), DeviceError> {
        let sparse = kv.sparse.as_ref().expect("an arena that keeps digests");
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = PickedSizes { pages: bytes, ..PickedSizes::default() };
        let room = scratch.picked(&self.device, &sizes)?;
        assert!(bytes as u64 <= kv.head_bytes() * kv.n_heads() as u64, "bytes of the arena");
        self.device.enter()?;
        let (target, source) = (room.pages.address(), kv.head_address(0));
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: both ranges are inside live allocations, as asserted, at addresses that the driver knows
        // the kind of.
        let copied = unsafe { sys::cuMemcpyAsync(target, source, bytes, stream.cu_stream()) };
        self.device.check(copied.result())
    }
}
