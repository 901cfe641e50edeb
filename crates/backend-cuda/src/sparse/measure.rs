//! Parts of top-k attention by themselves, to be measured.

use std::sync::PoisonError;

use cudarc::driver::sys;
use nuthatch_backend::DeviceError;
use nuthatch_types::LayerIdx;

use crate::Cuda;
use crate::kv::{CudaKv, PAGE_LEN};
use crate::launch::count;
use crate::launch::sparse::{
    GatherRowsParams, HeadState, SparseHeads, SparsePages, SparseRow, gather_rows,
};
use crate::plan::CudaPlan;

use super::scratch::PickedSizes;

impl Cuda {
    /// Brings the rows of some places of the batch's first sequence to working sets, for all heads of a
    /// layer, by so many blocks. The lists are uploaded when the first layer is brought.
    pub fn bring_rows(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        places: &[u32],
        n_blocks: u32,
    ) -> Result<(), DeviceError> {
        let sparse = kv.sparse.as_ref().expect("an arena that keeps digests");
        let (n_heads, seq) = (kv.shape.n_kv_heads as usize, &plan.seqs[0]);
        assert!(places.iter().all(|&place| (place as usize) < seq.kv_len()), "of the sequence");
        let n_pages = places.len().div_ceil(PAGE_LEN);
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = PickedSizes {
            rows: size_of::<SparseRow>(),
            states: n_heads * size_of::<HeadState>(),
            moves: n_heads * places.len() * 8,
            pages: n_heads * n_pages * kv.page.bytes(),
            partials: 0,
            sums: 0,
            tasks: 0,
        };
        let room = scratch.picked(&self.device, &sizes)?;
        if layer.0 == 0 {
            let n = count(places.len());
            let state = |head| {
                let empty = HeadState::empty(head * n_pages, n_pages);
                HeadState { n_moves: n, n_gone: n, ..empty }
            };
            let states: Vec<HeadState> = (0..n_heads).map(state).collect();
            let moves: Vec<[u32; 2]> = (0..n_heads)
                .flat_map(|_| places.iter().copied().zip(0..).map(<[u32; 2]>::from))
                .collect();
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
        }
        let heads = SparseHeads {
            rows: room.rows.address(),
            states: room.states.address(),
            state_stride: count(n_heads),
            n_rows: 1,
            n_kv_heads: count(n_heads),
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
        let params = GatherRowsParams {
            heads,
            pages,
            moves: room.moves.address(),
            tallies: 0,
            tally_words: 0,
            mark_stride: 0,
            staged: 0,
            tickets: 0,
            n_staged: 0,
            first_head: 0,
            stride: count(places.len()),
            n_zeros: 0,
        };
        gather_rows(&self.device, &sparse.kernels.gather, &params, (n_blocks, None))
    }

    /// Copies the first bytes of the arena to the device by the copy engine: what bringing rows is
    /// measured by.
    pub fn copy_pages_of(&self, kv: &CudaKv, bytes: usize) -> Result<(), DeviceError> {
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
        let copied = unsafe { sys::cuMemcpyAsync(target, source, bytes, self.device.stream()) };
        self.device.check(copied.result())
    }
}
