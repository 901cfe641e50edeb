//! Pages that are far: all of them lie in memory of the host, which kernels read and write over the link,
//! and some have a copy in a *frame* on the device.
//!
//! ```text
//!   host     [layer][kv head][slot]     everything that was ever written
//!   device   [layer][kv head][frame]    what steps write, sinks, last pages, prompts that are computed
//! ```
//!
//! Where a copy is, `frames[slot]` says; kernels look there first, and write to both. So it does not
//! matter to answers which pages have one: prefix hits, forks, swaps and cancelling need nothing of
//! their own. If a prompt has more pages than frames, [`turns`] has two layers, or two parts of a layer, share all of them.

mod chosen;
mod codes;
mod frames;
mod turns;

use std::sync::{Mutex, MutexGuard, PoisonError};

use nuthatch_backend::{Backend as _, DeviceError};
use nuthatch_types::{Clock as _, KvSlots, PageCopy, Slot, SystemClock};

use crate::Cuda;
use crate::device::{Device, Memory};
use crate::kv::{CudaKv, PAGE_LEN};
use crate::launch::copy::{self, Tiers};
use crate::launch::{NearPages, count};
use crate::pinned::PinnedMemory;
use crate::plan::CudaPlan;
pub(crate) use chosen::ChosenRows;
pub(crate) use codes::Codes;
pub use codes::code_bytes;
use frames::{Frames, Wanted};
pub use turns::most_parts;
use turns::{Came, Turns};

/// Tokens that a head goes on with one selection before the rest of its tail may come over the link.
/// Guessed.
const TAIL_TOKENS: usize = 128;

/// Pages of a decoding sequence that should have copies on the device, if it always sees so many first
/// and last tokens.
pub fn near_pages(n_first: u32, n_last: u32) -> u32 {
    let n =
        (n_first as usize).div_ceil(PAGE_LEN) + (n_last as usize + TAIL_TOKENS).div_ceil(PAGE_LEN);
    // The last tokens may begin within a page.
    u32::try_from(n + 1).unwrap_or(u32::MAX)
}

/// Copies of pages on the device.
pub(crate) struct Near {
    /// `[layer][kv head][frame]`, or, while layers take turns, two of them, or parts of them, with more frames.
    pages: Memory,
    /// `[slot]` the frame of each.
    map: Memory,
    /// Slot and frame of pages that come when it is a layer's turn.
    list: Memory,
    n_frames: u32,
    /// Layers whose pages are far.
    n_layers: u32,
    came: Came,
    /// Bytes that the copy engine brings from the pages in a second.
    pub(crate) link_rate: u64,
    state: Mutex<State>,
}

/// What is known on this side.
struct State {
    frames: Frames,
    /// The batch that frames were last given for.
    step: u64,
    /// First and last tokens of a decoding sequence that are wanted near.
    n_first: usize,
    n_last: usize,
    /// Where layers take turns, whose it is.
    turns: Option<Turns>,
    /// Pages that were copied to frames so far.
    n_loaded: u64,
}

impl Near {
    pub(crate) fn new(
        device: &Device,
        (page_bytes, n_layers): (usize, u32),
        (n_slots, n_frames): (u32, u32),
        far: &PinnedMemory,
    ) -> Result<Self, DeviceError> {
        let frames = Frames::new(n_slots, n_frames);
        let bytes = page_bytes.saturating_mul(n_frames as usize);
        let pages = device.alloc(bytes, "near KV pages")?;
        Ok(Near {
            link_rate: link_rate(device, far, &pages)?,
            pages,
            map: device.alloc(n_slots as usize * 4, "near KV pages")?,
            list: device.alloc(n_slots as usize * 8, "near KV pages")?,
            n_frames,
            n_layers,
            came: Came::new(device)?,
            state: Mutex::new(State {
                frames,
                step: 0,
                n_first: PAGE_LEN,
                n_last: 8 * PAGE_LEN,
                turns: None,
                n_loaded: 0,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which tokens decoding sequences always see.
    pub(crate) fn want(&self, n_first: usize, n_last: usize) {
        let mut state = self.state();
        (state.n_first, state.n_last) = (n_first, n_last + TAIL_TOKENS);
    }

    /// Pages that were copied to frames so far.
    pub(crate) fn n_loaded(&self) -> u64 {
        self.state().n_loaded
    }

    /// No page has a copy.
    pub(crate) fn clear(&self, device: &Device, slots: KvSlots) -> Result<(), DeviceError> {
        let mut state = self.state();
        (state.frames, state.turns) = (Frames::new(slots.device, self.n_frames), None);
        self.tell(device, &mut state)
    }

    /// These pages were written, but not their copies.
    pub(crate) fn forget(
        &self,
        device: &Device,
        slots: impl Iterator<Item = Slot>,
    ) -> Result<(), DeviceError> {
        let mut state = self.state();
        slots.for_each(|slot| state.frames.forget(slot.0));
        self.tell(device, &mut state)
    }

    /// Where copies of a layer's pages are, if the layer is the `index`th of those that are far; nowhere
    /// while it is another one's turn, or while its heads take turns.
    pub(crate) fn of_layer(&self, (layer, index): (u32, u32), kv: &CudaKv) -> Option<NearPages> {
        match &self.state().turns {
            None => Some(self.copies_at(index * kv.shape.n_kv_heads, self.n_frames, kv)),
            Some(turns) => turns.of_layer(layer, self, kv),
        }
    }

    /// Whether copies are of the layer, or the heads, whose turn it is.
    pub(crate) fn takes_turns(&self) -> bool {
        self.state().turns.is_some()
    }

    /// Where rows that are written go beside the layer's pages, if layers take turns: copies of its first heads, and of
    /// how many.
    pub(crate) fn written(&self, layer: u32, kv: &CudaKv) -> Option<(NearPages, u32)> {
        self.state().turns.as_ref().and_then(|turns| turns.written(layer, self, kv))
    }

    /// Frames of a head, if two layers, or two such parts of a layer, have all of them.
    fn n_frames_in_turn(&self, n_parts: u32, n_slots: u32) -> u32 {
        let n = u64::from(self.n_frames) * u64::from(self.n_layers) * u64::from(n_parts) / 2;
        n.min(n_slots.into()) as u32
    }

    /// The copies from a head's on, if each has so many frames.
    fn copies_at(&self, first_head: u32, n_frames: u32, kv: &CudaKv) -> NearPages {
        let head_bytes = kv.page.bytes() as u64 * u64::from(n_frames);
        let layer = self.pages.address() + u64::from(first_head) * head_bytes;
        NearPages { frames: self.map.address(), layer, head_bytes }
    }

    /// Tells the device which pages have copies.
    fn tell(&self, device: &Device, state: &mut State) -> Result<(), DeviceError> {
        for (first, frames) in state.frames.take_changes() {
            device.upload(&self.map, first as usize * 4, frames)?;
        }
        Ok(())
    }
}

/// Bytes that the copy engine brings from memory of the host in a second.
fn link_rate(device: &Device, from: &PinnedMemory, to: &Memory) -> Result<u64, DeviceError> {
    let bytes = RATE_BYTES.min(from.run_bytes()).min(to.bytes());
    best_rate(device, bytes, || from.copy_to(device, to, bytes))
}

/// Bytes of which something is measured.
const RATE_BYTES: usize = 64 << 20;

/// Bytes a second of the best of a few times.
fn best_rate(
    device: &Device,
    bytes: usize,
    mut queue: impl FnMut() -> Result<(), DeviceError>,
) -> Result<u64, DeviceError> {
    if bytes == 0 {
        return Ok(0);
    }
    let clock = SystemClock::start();
    let mut best = 0.0f64;
    for _ in 0..3 {
        device.wait()?;
        let begin = clock.now();
        queue()?;
        device.wait()?;
        best = best.max(bytes as f64 / (clock.now() - begin).as_secs_f64().max(1e-9));
    }
    Ok(best as u64)
}

impl State {
    /// The pages that a batch wants near: those that it writes, what decoding sequences always see, and
    /// all of those that have several rows, because they see everything.
    fn wanted(&self, plan: &CudaPlan) -> Wanted {
        let mut wanted = Wanted::default();
        let tables = plan.slots();
        for seq in &plan.seqs {
            let slots = &tables[seq.table_row as usize * plan.table_len as usize..];
            let (begin, end) = (seq.place.div_ceil(PAGE_LEN), seq.kv_len().div_ceil(PAGE_LEN));
            wanted.begun.extend(&slots[begin..end]);
            let last = match seq.n_rows {
                1 => seq.kv_len().saturating_sub(self.n_last) / PAGE_LEN,
                _ => 0,
            };
            // The page that is written further comes first.
            wanted.seen.extend(slots[last.min(begin)..begin].iter().rev());
            wanted.seen.extend(&slots[..self.n_first.div_ceil(PAGE_LEN).min(last).min(begin)]);
        }
        wanted
    }
}

impl Cuda {
    /// Bytes a second that the device reads from its memory, and that come over the link: measured now.
    pub fn rates(&self) -> Result<(u64, u64), DeviceError> {
        const FLOATS: usize = 1 << 26;
        let far = PinnedMemory::whole(&self.device, RATE_BYTES, "rates")?;
        let link = link_rate(&self.device, &far, &self.device.alloc(RATE_BYTES, "rates")?)?;
        let (source, mut out) = (self.alloc(FLOATS)?, self.alloc(1)?);
        let read = best_rate(&self.device, 4 * FLOATS, || self.read_all(&source, &mut out))?;
        Ok((read, link))
    }

    /// Gives copies to the pages that a batch wants near; once for each batch.
    pub(crate) fn prepare_near(&self, plan: &CudaPlan, kv: &CudaKv) -> Result<(), DeviceError> {
        // Only kernels for pages of rows know of copies.
        let (Some(near), Some((pages, n_heads)), true) =
            (&kv.near, kv.far_heads(), kv.sparse.is_some())
        else {
            return Ok(());
        };
        let mut state = near.state();
        if state.step == plan.step {
            return Ok(());
        }
        state.step = plan.step;
        let mut wanted = state.wanted(plan);
        let turns = turns::are_needed(&wanted, near.n_frames, plan)
            .then(|| Turns::new(wanted.len(), near, kv))
            .filter(|turns| turns.n_frames > near.n_frames);
        if turns.is_some() || state.turns.is_some() {
            let n = turns.as_ref().map_or(near.n_frames, |turns| turns.n_frames);
            state.frames = Frames::new(kv.slots.device, n);
        }
        state.turns = turns;
        if state.turns.is_some() {
            // Pages that follow each other are brought in one go, and those before the last ones matter
            // as much as these.
            wanted.seen.sort_unstable();
        }
        let loads = state.frames.begin(&wanted);
        state.n_loaded += loads.len() as u64;
        near.tell(&self.device, &mut state)?;
        let State { frames, turns, .. } = &mut *state;
        if let Some(turns) = turns {
            let begun = frames.begun(&wanted);
            turns.n_seen = count(loads.len());
            turns.n_pages = count(loads.len() + begun.len());
            let all = loads.iter().chain(&begun).map(|load| [load.slot, load.frame]);
            return self.device.upload(&near.list, 0, &all.collect::<Vec<_>>());
        }
        let tiers = Tiers {
            device: near.pages.address(),
            n_device: near.n_frames,
            host: pages,
            n_host: kv.slots.device,
            page_bytes: kv.page.bytes(),
            n_heads,
        };
        let copy = |load: &frames::Load| PageCopy {
            source: Slot(near.n_frames + load.slot),
            target: Slot(load.frame),
        };
        let copies: Vec<PageCopy> = loads.iter().map(copy).collect();
        copy::copy_between(&self.device, &self.common.copy, tiers, &copies)
    }
}
