//! Prompts that have more pages than there are frames for all layers: layers take turns.
//!
//! All frames are then of two layers, the one that is computed and the next, whose pages come over the link
//! meanwhile:
//!
//! ```text
//!   stream   layer 4 ──────────── layer 5 ──────────── layer 6 ───
//!   branch   rows of 4 out, 5 in  rows of 5 out, 6 in  ...
//!   frames   [4][5]               [6][5]               [6][7]
//! ```
//!
//! So a long prompt's pages cross the link once for each chunk, and not once for each tile that attends
//! to them.

use cudarc::driver::{CudaEvent, sys};
use nuthatch_backend::DeviceError;
use nuthatch_types::LayerIdx;

use super::frames::Wanted;
use crate::Cuda;
use crate::branch::{Branch, record, wait};
use crate::device::Device;
use crate::kv::CudaKv;
use crate::launch::copy::{FillParams, fill_frames};
use crate::plan::CudaPlan;

/// Which layers have pages in the frames.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// In either half, also if they are still coming.
    holds: [Option<u32>; 2],
    /// The one that is computed.
    pub(super) now: Option<u32>,
}

/// The moments when a layer's pages have come, for either half.
pub(super) struct Came([CudaEvent; 2]);

impl Came {
    pub(super) fn new(device: &Device) -> Result<Self, DeviceError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = || device.check(device.context().new_event(flags));
        Ok(Came([event()?, event()?]))
    }
}

/// Whether the layers of a batch take turns, if it wants these pages and there are so many frames for all
/// layers: where more bytes would else come over the link, because each tile of a prompt reads what is far.
/// Only beside a pass is it known that pages come once.
pub(super) fn are_needed(wanted: &Wanted, n_frames: u32, plan: &CudaPlan) -> bool {
    let n_far = wanted.len().saturating_sub(n_frames as usize);
    let prompts = plan.seqs.iter().filter(|seq| seq.n_rows > 1 && plan.beside.is_some());
    let tiles = |n_rows: usize| (n_rows * plan.group()).div_ceil(plan.tile_lines());
    n_far * prompts.map(|seq| tiles(seq.n_rows)).max().unwrap_or(0) > wanted.len()
}

/// Which half of the frames a layer has: the next that is far has the other.
fn half_of(layer: u32, kv: &CudaKv) -> usize {
    kv.rank(layer) as usize % 2
}

impl Cuda {
    /// It is a layer's turn, if layers take turns: its pages are there, and those of the next begin to come.
    pub(crate) fn take_turn(
        &self,
        plan: &CudaPlan,
        LayerIdx(layer): LayerIdx,
        kv: &CudaKv,
    ) -> Result<(), DeviceError> {
        let Some(near) = kv.near.as_ref().filter(|_| kv.is_far(layer)) else { return Ok(()) };
        let mut state = near.state();
        let Some(turns) = &mut state.turns else { return Ok(()) };
        let Some(branch) = &plan.beside else {
            return Err(DeviceError::Fault("layers take turns in a pass only".to_owned()));
        };
        self.bring_layer(branch, turns, layer, kv)?;
        turns.now = Some(layer);
        wait(&self.device, self.device.main_stream(), &near.came.0[half_of(layer, kv)])?;
        kv.far_after(layer).map_or(Ok(()), |next| self.bring_layer(branch, turns, next, kv))
    }

    /// Has the pages of a layer come, unless they do already. They take the place of those two layers
    /// before, with which all that is queued on the stream so far, and on the branch, is done.
    fn bring_layer(
        &self,
        branch: &Branch,
        turns: &mut Turns,
        layer: u32,
        kv: &CudaKv,
    ) -> Result<(), DeviceError> {
        let (Some(near), half) = (&kv.near, half_of(layer, kv)) else { return Ok(()) };
        if turns.holds[half] == Some(layer) {
            return Ok(());
        }
        let to = near.half(half, kv);
        let params = FillParams {
            near: to.layer,
            far: kv.layer_address(layer),
            frames: to.frames,
            near_head_bytes: to.head_bytes,
            far_head_bytes: kv.head_bytes(),
            n_slots: kv.slots.device,
            page_bytes: kv.page.bytes() as u32,
            n_heads: kv.shape.n_kv_heads,
            padding: 0,
        };
        let stream = branch.fork(&self.device, 0)?;
        fill_frames(&self.device, (&self.common.fill, stream), &params)?;
        record(&self.device, &near.came.0[half], stream)?;
        turns.holds[half] = Some(layer);
        branch.end(&self.device, 0)
    }
}
