//! The way of pages from the host to their slots: through places of pinned memory, so that nobody waits.
//!
//! ```text
//!   host     page -> place | page -> place | ...         (waits only if a place is still being read)
//!   branch                 | land_pages    | land_pages  (while a pass runs that needs other layers)
//!   stream   layer ......................... | layer that needs them
//! ```
//!
//! A place takes the same part of many pages, and they go to their slots by one kernel. Outside of a pass
//! that pages come beside, that kernel is queued at once, on the stream, like everything else.

use cudarc::driver::{CudaEvent, CudaStream};
use nuthatch_backend::DeviceError;
use nuthatch_types::Slot;

use crate::branch::Branch;
use crate::device::{Device, Kernel};
use crate::kv::CudaKv;
use crate::launch::copy::{self, Landing};
use crate::pinned::PinnedMemory;

/// Bytes of a place at least: as many as the link takes in 80 us.
const PLACE_BYTES: usize = 4 << 20;
const N_PLACES: usize = 4;
/// Most pages of a place, whose slots stand before them.
const N_PAGES_MAX: usize = 1024;
const SLOTS_BYTES: usize = 4 * N_PAGES_MAX;

/// Pinned places for pages on their way in.
pub(crate) struct Door {
    memory: PinnedMemory,
    /// Of pages in a place.
    bytes_max: usize,
    /// When what was in each place has been read.
    taken: [Option<CudaEvent>; N_PLACES],
    place: usize,
    /// What is in the place and not on its way: which bytes of pages, and of how many.
    start: usize,
    len: usize,
    n: usize,
    /// Beside the stream.
    branch: Branch,
    is_beside: bool,
}

impl Door {
    pub(crate) fn new(device: &Device, page_bytes: usize) -> Result<Self, DeviceError> {
        let bytes_max = page_bytes.max(PLACE_BYTES).next_multiple_of(SLOTS_BYTES);
        let bytes = N_PLACES * (SLOTS_BYTES + bytes_max);
        Ok(Door {
            memory: PinnedMemory::new(device, bytes, "KV pages on their way")?,
            bytes_max,
            taken: Default::default(),
            place: 0,
            start: 0,
            len: 0,
            n: 0,
            branch: Branch::new(device, true)?,
            is_beside: false,
        })
    }

    /// Takes bytes of a page of the device, from the byte `start` of it on, which are whole heads.
    pub(crate) fn write(
        &mut self,
        (device, kernel): (&Device, &Kernel),
        kv: &CudaKv,
        (slot, start): (Slot, usize),
        source: &[u8],
    ) -> Result<(), DeviceError> {
        assert!(slot.0 < kv.slots.device, "a slot of the device");
        let is_alike = (self.start, self.len) == (start, source.len());
        let has_room = self.n < N_PAGES_MAX && (self.n + 1) * self.len <= self.bytes_max;
        if self.n > 0 && !(is_alike && has_room) {
            self.send(device, kernel, kv)?;
        }
        if self.n == 0 {
            if let Some(taken) = self.taken[self.place].take() {
                device.check(taken.synchronize())?;
            }
            (self.start, self.len) = (start, source.len());
        }
        let first = self.first();
        self.memory.write(first + 4 * self.n, &slot.0.to_ne_bytes());
        self.memory.write(first + SLOTS_BYTES + self.n * self.len, source);
        self.n += 1;
        if self.is_beside { Ok(()) } else { self.send(device, kernel, kv) }
    }

    /// What is queued on the stream from now on sees what was written so far. With `beside`, what comes
    /// next is written beside it.
    pub(crate) fn land(
        &mut self,
        (device, kernel): (&Device, &Kernel),
        kv: &CudaKv,
        beside: bool,
    ) -> Result<(), DeviceError> {
        if self.n > 0 {
            self.send(device, kernel, kv)?;
            self.branch.end(device, 0)?;
            self.branch.join(device, 0)?;
        }
        if beside && !self.is_beside {
            // The slots may be in use by what was queued before.
            self.branch.fork(device, 0)?;
        }
        self.is_beside = beside;
        Ok(())
    }

    /// Queues the copy of what is in the place, and goes on to the next.
    fn send(&mut self, device: &Device, kernel: &Kernel, kv: &CudaKv) -> Result<(), DeviceError> {
        let first = self.memory.address() + self.first() as u64;
        let landing = Landing {
            slots: first,
            pages: first + SLOTS_BYTES as u64,
            n_pages: std::mem::take(&mut self.n),
            bytes: self.start..self.start + self.len,
        };
        let stream: &CudaStream = match self.is_beside {
            true => self.branch.stream(0),
            false => device.main_stream(),
        };
        copy::land_pages(device, (kernel, stream), kv, &landing)?;
        self.taken[self.place] = Some(device.check(stream.record_event(None))?);
        self.place = (self.place + 1) % N_PLACES;
        Ok(())
    }

    /// Where the place begins.
    fn first(&self) -> usize {
        self.place * (SLOTS_BYTES + self.bytes_max)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // What was sent beside a pass that failed may still read the places.
        let _ = self.branch.stream(0).synchronize();
    }
}
