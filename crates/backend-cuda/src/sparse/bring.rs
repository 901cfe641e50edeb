//! Rows that the host has brought to where it keeps them.

use std::sync::PoisonError;

use nuthatch_backend::{Bring, DeviceError};
use nuthatch_types::LayerIdx;

use crate::Cuda;
use crate::kv::CudaKv;
use crate::launch::count;
use crate::launch::sparse::{GatherRowsParams, SparseHeads, SparsePages, gather_rows};
use crate::launch::sparse_attend::MAX_NUMBERS;
use crate::plan::CudaPlan;

use super::scratch::PickedSizes;

impl Cuda {
    /// Brings rows of one layer near.
    pub(crate) fn bring_chosen(
        &self,
        (plan, layer, kv): (&CudaPlan, LayerIdx, &CudaKv),
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        let (Some(chosen), Some(sparse)) = (&kv.chosen, &kv.sparse) else {
            return Err(DeviceError::Fault("no rows are kept near here".to_owned()));
        };
        let n_heads = kv.shape.n_kv_heads as usize;
        // A block counts the moves of so many heads, and a sequence has all of them.
        for brings in brings.chunks((MAX_NUMBERS / n_heads).max(1)) {
            let brought = chosen.brought((plan, layer, kv), brings);
            let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            let room = scratch.picked(
                &self.device,
                &PickedSizes {
                    rows: size_of_val(&brought.rows[..]),
                    states: size_of_val(&brought.states[..]),
                    moves: size_of_val(&brought.moves[..]),
                    ..PickedSizes::default()
                },
            )?;
            self.device.upload(room.rows, 0, &brought.rows)?;
            self.device.upload(room.states, 0, &brought.states)?;
            self.device.upload(room.moves, 0, &brought.moves)?;
            let heads = SparseHeads {
                rows: room.rows.address(),
                states: room.states.address(),
                state_stride: count(n_heads),
                n_rows: count(brought.rows.len()),
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
            let gather = GatherRowsParams::of_moves(
                (heads, pages),
                (room.moves.address(), brought.stride),
                kv.codes_of(layer.0),
            );
            let blocks = match kv.is_far(layer.0) {
                true => self.tuning.blocks_alone,
                false => self.device.n_multiprocessors(),
            };
            gather_rows(&self.device, &sparse.kernels.gather, &gather, (blocks, None))?;
        }
        Ok(())
    }
}
