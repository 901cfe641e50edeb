//! Prompts that have more pages than there are frames for all layers: layers take turns.
//!
//! All frames are then of two layers, the one that is computed and the next, whose pages come over the link
//! meanwhile, or, see below, of two parts of layers:
//!
//! ```text
//!   stream   layer 4 ──────────── layer 5 ──────────── layer 6 ───
//!   branch   rows of 4 out, 5 in  rows of 5 out, 6 in  ...
//!   frames   [4][5]               [6][5]               [6][7]
//! ```
//!
//! So a long prompt's pages cross the link once for each chunk, and not once for each tile that attends
//! to them. Where there are too few frames for all pages of two layers, the heads of a layer are parts that take
//! turns in the same way, and attention is queued for one part after the other:
//!
//! ```text
//!   stream   rows of 4   heads 0, 1 ─ 2, 3 ─── 4, 5 ─── 6, 7 ──── rows of 5   heads 0, 1 ──
//!   branch               2, 3 in      4, 5 in  6, 7 in  0, 1 of 5             2, 3 in
//! ```
//!
//! The first part is there when a layer's rows are written, and gets these too; rows of the others are written to the
//! pages alone, from which they come with everything else. They come beside attention, and not beside products as far
//! as attention is long enough: those would be disturbed more.

use cudarc::driver::{CudaEvent, sys};
use nuthatch_backend::DeviceError;
use nuthatch_types::{KvDtype, KvShape, LayerIdx};

use super::Near;
use super::frames::Wanted;
use crate::Cuda;
use crate::branch::{Branch, record, wait};
use crate::device::Device;
use crate::kv::CudaKv;
use crate::launch::NearPages;
use crate::launch::copy::{FillParams, fill_frames};
use crate::plan::CudaPlan;

/// Parts of a layer at most: fewer heads are too few tiles at a time for a large device.
const MOST_PARTS: u32 = 4;

/// Parts that the heads of a layer may be, if there are few copies of pages.
pub fn most_parts(kv: &KvShape) -> u32 {
    parts_of(kv).last().copied().unwrap_or(1)
}

/// In how many parts heads can be, all alike. Attention in floats of 32 bits takes all at one time.
fn parts_of(kv: &KvShape) -> Vec<u32> {
    let most = if kv.dtype == KvDtype::F32 { 1 } else { MOST_PARTS };
    (1..=most).filter(|&n| kv.n_kv_heads.is_multiple_of(n)).collect()
}

/// Which layers have pages in the frames.
#[derive(Debug)]
pub(super) struct Turns {
    /// Parts of a layer's heads, and frames of each of these.
    n_parts: u32,
    pub(super) n_frames: u32,
    /// Pages that come: those that the step only reads are first of the list.
    pub(super) n_seen: u32,
    pub(super) n_pages: u32,
    /// Layer and part in either half, also if they are still coming.
    holds: [Option<(u32, u32)>; 2],
    /// The one that is computed.
    now: Option<u32>,
}

impl Turns {
    /// For so many pages that are wanted: as few parts as there is room for.
    pub(super) fn new(n_wanted: usize, near: &Near, kv: &CudaKv) -> Self {
        let n_frames = |n_parts| near.n_frames_in_turn(n_parts, kv.slots.device);
        let fits = |&n_parts: &u32| n_frames(n_parts) as usize >= n_wanted;
        let n_parts = parts_of(&kv.shape).into_iter().find(fits);
        let n_parts = n_parts.unwrap_or_else(|| most_parts(&kv.shape));
        let n_frames = n_frames(n_parts);
        Turns { n_parts, n_frames, n_seen: 0, n_pages: 0, holds: [None; 2], now: None }
    }

    /// Heads of a part.
    fn n_heads(&self, kv: &CudaKv) -> u32 {
        kv.shape.n_kv_heads / self.n_parts
    }

    /// Which half of the frames a part of a layer has: whose turn is next has the other.
    fn half_of(&self, (layer, part): (u32, u32), kv: &CudaKv) -> usize {
        (kv.rank(layer) * self.n_parts + part) as usize % 2
    }

    /// Whose turn is next.
    fn after(&self, (layer, part): (u32, u32), kv: &CudaKv) -> Option<(u32, u32)> {
        match part + 1 {
            next if next < self.n_parts => Some((layer, next)),
            _ => kv.far_after(layer).map(|layer| (layer, 0)),
        }
    }

    /// Where copies of a layer's pages are, of all heads, if it is its turn.
    pub(super) fn of_layer(&self, layer: u32, near: &Near, kv: &CudaKv) -> Option<NearPages> {
        let is_whole = self.n_parts == 1 && self.now == Some(layer);
        is_whole.then(|| self.copies((layer, 0), near, kv))
    }

    /// The same of as many heads as there are copies of when the layer's rows are written.
    pub(super) fn written(&self, layer: u32, near: &Near, kv: &CudaKv) -> Option<(NearPages, u32)> {
        let first = || (self.copies((layer, 0), near, kv), self.n_heads(kv));
        (self.now == Some(layer)).then(first)
    }

    fn copies(&self, of: (u32, u32), near: &Near, kv: &CudaKv) -> NearPages {
        let first = self.half_of(of, kv) as u32 * self.n_heads(kv);
        near.copies_at(first, self.n_frames, kv)
    }
}

/// The moments when pages of a layer, or of a part of it, have come, for either half.
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

impl Cuda {
    /// It is a layer's turn, if layers take turns: its pages are there, or those of its first part.
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
        self.bring_part(branch, turns, (layer, 0), kv)?;
        turns.now = Some(layer);
        self.wait_for(near, turns.half_of((layer, 0), kv))
    }

    /// Queues attention of prompts to a layer, `queue(heads before, heads, copies)`: at one time, or, if heads take
    /// turns, part by part; and those who are next begin to come. What is near is locked meanwhile, so `queue` must not
    /// ask for it.
    pub(crate) fn in_parts(
        &self,
        plan: &CudaPlan,
        LayerIdx(layer): LayerIdx,
        kv: &CudaKv,
        mut queue: impl FnMut(u32, u32, NearPages) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let copies = kv.near_pages(layer);
        let mut state = kv.near.as_ref().map(Near::state);
        let turns = state.as_mut().and_then(|state| state.turns.as_mut());
        // A layer that reads the pages of another one, not of the one before it, reads them from the host.
        let turns = turns.filter(|turns| turns.now == Some(layer));
        let (Some(near), Some(turns), Some(branch)) = (&kv.near, turns, &plan.beside) else {
            drop(state);
            return queue(0, kv.shape.n_kv_heads, copies);
        };
        let n_heads = turns.n_heads(kv);
        for part in 0..turns.n_parts {
            let of = (layer, part);
            self.bring_part(branch, turns, of, kv)?;
            self.wait_for(near, turns.half_of(of, kv))?;
            let next = turns.after(of, kv);
            next.map_or(Ok(()), |next| self.bring_part(branch, turns, next, kv))?;
            queue(part * n_heads, n_heads, turns.copies(of, near, kv))?;
        }
        Ok(())
    }

    fn wait_for(&self, near: &Near, half: usize) -> Result<(), DeviceError> {
        wait(&self.device, self.device.main_stream(), &near.came.0[half])
    }

    /// Has the pages of a part of a layer come, unless they do already. They take the place of those before, with
    /// which all that is queued on the stream so far, and on the branch, is done.
    fn bring_part(
        &self,
        branch: &Branch,
        turns: &mut Turns,
        of: (u32, u32),
        kv: &CudaKv,
    ) -> Result<(), DeviceError> {
        let (Some(near), half) = (&kv.near, turns.half_of(of, kv)) else { return Ok(()) };
        if turns.holds[half] == Some(of) {
            return Ok(());
        }
        let (to, n_heads) = (turns.copies(of, near, kv), turns.n_heads(kv));
        let before = u64::from(of.1 * n_heads) * kv.head_bytes();
        let params = FillParams {
            near: to.layer,
            far: kv.layer_address(of.0) + before,
            list: near.list.address(),
            near_head_bytes: to.head_bytes,
            far_head_bytes: kv.head_bytes(),
            // What the step begins is written there if it is not yet.
            n_pages: if turns.now == Some(of.0) { turns.n_pages } else { turns.n_seen },
            page_bytes: kv.page.bytes() as u32,
            n_heads,
            padding: 0,
        };
        let stream = branch.fork(&self.device, 0)?;
        fill_frames(&self.device, (&self.common.fill, stream), &params)?;
        record(&self.device, &near.came.0[half], stream)?;
        turns.holds[half] = Some(of);
        branch.end(&self.device, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_as_many_heads_each() {
        let of = |n_kv_heads, dtype| {
            most_parts(&KvShape { n_layers: 2, n_kv_heads, head_dim: 64, page_len: 16, dtype })
        };
        assert_eq!([8, 12, 6, 3, 2, 5, 1].map(|n| of(n, KvDtype::F16)), [4, 4, 3, 3, 2, 1, 1]);
        assert_eq!(of(8, KvDtype::F32), 1);
    }
}
