//! Rows that come to where they are kept: those that the host has chosen, and those that were decided about
//! by blocks that do not bring them.

use std::sync::PoisonError;

use cudarc::driver::CudaStream;
use nuthatch_backend::{Bring, DeviceError};
use nuthatch_types::LayerIdx;

use crate::Cuda;
use crate::kv::CudaKv;
use crate::launch::count;
use crate::launch::sparse::{GatherRowsParams, SparseHeads, SparsePages, gather_rows, post_rows};
use crate::launch::sparse_attend::MAX_NUMBERS;
use crate::plan::CudaPlan;

use super::SparseLayer;
use super::decide::{Decider, Place, Turn};
use super::room::Set;
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
            let blocks = self.n_gathering(kv.is_far(layer.0), None);
            gather_rows(&self.device, &sparse.kernels.gather, &gather, (blocks, None))?;
        }
        Ok(())
    }

    /// Blocks that decide and then bring rows; none if somebody else does.
    pub(super) fn n_bringing(
        &self,
        at: &SparseLayer<'_>,
        decider: &Decider,
        place: Place<'_>,
    ) -> u32 {
        let is_far = at.kv.is_far(at.layer.0);
        match (is_far, place.branch) {
            _ if place.is_late || (is_far && decider.link.is_some()) => 0,
            (true, Some(_)) => self.n_decided(at),
            (true, None) => self.tuning.blocks_alone,
            (false, _) => u32::MAX,
        }
    }

    /// Those of them that bring rows from far pages while something else runs.
    pub(super) fn n_decided(&self, at: &SparseLayer<'_>) -> u32 {
        match at.kv.codes {
            Some(_) => self.tuning.blocks_expanding,
            None => self.tuning.blocks_decided,
        }
    }

    /// Brings the rows that were decided about, for those who did not.
    pub(super) fn bring_turn(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        Turn { first, n, .. }: Turn,
        Place { set, branch, is_late, .. }: Place<'_>,
    ) -> Result<(), DeviceError> {
        let (sparse, first_head) = (at.sparse(), idx * at.n_kv_heads());
        let Set { moves, .. } = &decider.sets[set];
        let mut gather = GatherRowsParams {
            heads: decider.heads(at, idx, (first, n)),
            pages: at.pages(),
            moves: moves.address(),
            mark_stride: decider.room.stride as u64,
            staged: 0,
            tickets: 0,
            is_closed: 0,
            n_staged: 0,
            first_head: count(first_head),
            stride: count(decider.room.stride),
            padding: 0,
            codes: at.kv.kept_codes_of(at.layer.0),
        };
        let is_far = at.kv.is_far(at.layer.0);
        // A desk has one order at a time.
        if let Some(link) = decider.link.as_ref().filter(|_| is_far && !is_late) {
            let params = link.ask(idx, &mut gather);
            post_rows(&self.device, &sparse.kernels.post, &params, branch)?;
        }
        let blocks = self.n_gathering(is_far, branch);
        gather_rows(&self.device, &sparse.kernels.gather, &gather, (blocks, branch))
    }

    /// Blocks that only bring rows: near ones as many as hide what memory takes, twelve warps on each
    /// multiprocessor.
    fn n_gathering(&self, is_far: bool, branch: Option<&CudaStream>) -> u32 {
        match (is_far, branch) {
            (true, Some(_)) => self.tuning.blocks,
            (true, None) => self.tuning.blocks_alone,
            (false, _) => (12 * 32 / self.tuning.threads).max(1) * self.device.n_multiprocessors(),
        }
    }
}
