//! `copy.cu`: whole pages inside a tier and between tiers, pages or heads of them from the host, and one
//! layer's pages from there.

use std::ops::Range;

use cudarc::driver::CudaStream;
use nuthatch_backend::DeviceError;
use nuthatch_types::{PageCopy, Slot};

use super::{Address, count, params};
use crate::branch::LINK_BLOCKS;
use crate::device::{Device, Kernel};
use crate::door::Door;
use crate::kv::CudaKv;
use crate::pinned::PinnedMemory;

params! {
    /// Mirrors `CopyParams`.
    CopyParams {
        device: Address,
        host: Address,
        copies: Address,
        n_device: u32,
        n_host: u32,
        page_bytes: u32,
        n_copies: u32,
    }
}

params! {
    /// Mirrors `LandParams`.
    LandParams {
        device: Address,
        host: Address,
        slots: Address,
        stride: u64,
        n_device: u32,
        page_bytes: u32,
        n_heads: u32,
        n_pages: u32,
    }
}

params! {
    /// Mirrors `FillParams`.
    FillParams {
        near: Address,
        far: Address,
        list: Address,
        near_head_bytes: u64,
        far_head_bytes: u64,
        n_pages: u32,
        page_bytes: u32,
        n_heads: u32,
        padding: u32,
    }
}

const THREADS: u32 = 256;
const FILL_THREADS: u32 = 512;
/// Blocks that bring pages over the link, beside those of a pass: 128 KiB of them are on their way at once.
/// Guessed.
const LAND_BLOCKS: u32 = 32;

/// Pages that lie as those of keys and values do.
#[derive(Clone, Copy)]
pub(crate) struct Tiers {
    pub(crate) device: Address,
    pub(crate) n_device: u32,
    /// Where slots behind the device's are, and how many.
    pub(crate) host: Address,
    pub(crate) n_host: u32,
    /// Of one head's page.
    pub(crate) page_bytes: usize,
    pub(crate) n_heads: usize,
}

impl Tiers {
    /// Keys and values, with so many slots at `host` behind those of the device.
    fn of(kv: &CudaKv, (host, n_host): (Address, u32)) -> impl Iterator<Item = Self> + use<> {
        let n_device = kv.slots.device;
        kv.runs().map(move |run| Tiers {
            device: run.address,
            n_device,
            host: host + run.before as u64 * u64::from(n_host),
            n_host,
            page_bytes: run.page.bytes(),
            n_heads: run.n,
        })
    }
}

/// Copies pages of keys and values in order, all layers and heads.
pub(crate) fn copy_pages(
    device: &Device,
    kernel: &Kernel,
    kv: &mut CudaKv,
    copies: &[PageCopy],
) -> Result<(), DeviceError> {
    let host = (kv.host.as_ref().map_or(0, PinnedMemory::address), kv.slots.host);
    for tiers in Tiers::of(kv, host) {
        copy_between(device, kernel, tiers, copies)?;
    }
    kv.forget_near(device, copies.iter().map(|copy| copy.target))
}

/// Copies a page's bytes to the host, and waits.
pub(crate) fn read_page(
    device: &Device,
    kernel: &Kernel,
    kv: &CudaKv,
    slot: Slot,
    target: &mut [u8],
) -> Result<(), DeviceError> {
    assert_eq!(target.len(), kv.page_bytes(), "a page's bytes");
    if slot.0 < kv.slots.device {
        pass_gate(device, kernel, kv, slot)?;
        kv.gate.read(0, target);
        return Ok(());
    }
    device.wait()?;
    let host = kv.host.as_ref().expect("a slot of the arena");
    for (part, start) in kv.host_parts(slot) {
        host.read(start, &mut target[part]);
    }
    Ok(())
}

/// Copies a page of the device to the gate, and waits.
fn pass_gate(device: &Device, kernel: &Kernel, kv: &CudaKv, slot: Slot) -> Result<(), DeviceError> {
    let copy = PageCopy { source: slot, target: Slot(kv.slots.device) };
    for tiers in Tiers::of(kv, (kv.gate.address(), 1)) {
        copy_between(device, kernel, tiers, &[copy])?;
    }
    device.wait()
}

/// Writes a page from bytes of the host, or whole heads of it, which begin at the byte `start`.
pub(crate) fn write_page(
    (device, kernel): (&Device, &Kernel),
    kv: &mut CudaKv,
    (slot, start): (Slot, usize),
    source: &[u8],
) -> Result<(), DeviceError> {
    let bytes = start..start + source.len();
    assert!(bytes.end <= kv.page_bytes(), "a page's bytes");
    if slot.0 < kv.slots.device {
        let made = kv.door.take().map_or_else(|| Door::new(device, kv.page_bytes()), Ok);
        let mut door = made?;
        let written = door.write((device, kernel), kv, (slot, start), source);
        kv.door = Some(door);
        written?;
        return kv.forget_near(device, std::iter::once(slot));
    }
    device.wait()?;
    let parts = kv.host_parts(slot);
    let host = kv.host.as_mut().expect("a slot of the arena");
    let is_in = |(part, _): &(Range<usize>, usize)| part.start >= start && part.end <= bytes.end;
    for (part, at) in parts.into_iter().filter(is_in) {
        host.write(at, &source[part.start - start..part.end - start]);
    }
    Ok(())
}

/// What is queued from now on sees pages that were written so far: see `Backend::land_pages`.
pub(crate) fn land(
    (device, kernel): (&Device, &Kernel),
    kv: &mut CudaKv,
    beside: bool,
) -> Result<(), DeviceError> {
    let made = kv.door.take().map_or_else(|| Door::new(device, kv.page_bytes()), Ok);
    let mut door = made?;
    let landed = door.land((device, kernel), kv, beside);
    kv.door = Some(door);
    landed
}

/// The same bytes of some pages, in pinned memory.
pub(crate) struct Landing {
    /// `[n_pages]` where they go, as 32 bits each.
    pub(crate) slots: Address,
    /// `[n_pages][bytes]`
    pub(crate) pages: Address,
    pub(crate) n_pages: usize,
    /// Which bytes of a page: whole heads.
    pub(crate) bytes: Range<usize>,
}

/// Queues the copy of pages to their slots on a stream.
pub(crate) fn land_pages(
    device: &Device,
    (kernel, stream): (&Kernel, &CudaStream),
    kv: &CudaKv,
    landing: &Landing,
) -> Result<(), DeviceError> {
    let Range { start, end } = landing.bytes;
    for run in kv.runs() {
        let page_bytes = run.page.bytes();
        let (first, last) = (start.max(run.before), end.min(run.before + run.n * page_bytes));
        if first >= last {
            continue;
        }
        let n_heads = (last - first) / page_bytes;
        let before = (first - run.before) / page_bytes;
        let is_whole = (first - run.before).is_multiple_of(page_bytes)
            && (last - first).is_multiple_of(page_bytes);
        assert!(is_whole, "whole heads");
        let head_bytes = page_bytes as u64 * u64::from(kv.slots.device);
        let params = LandParams {
            device: run.address + before as u64 * head_bytes,
            host: landing.pages + (first - start) as u64,
            slots: landing.slots,
            stride: (end - start) as u64,
            n_device: kv.slots.device,
            page_bytes: count(page_bytes),
            n_heads: count(n_heads),
            n_pages: count(landing.n_pages),
        };
        let n_blocks = count(n_heads * landing.n_pages).min(LAND_BLOCKS);
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: the kernel reads so many slots and pages of the landing, which is pinned and is not
        // written before this has been done, and writes to heads of the run, in slots that were asserted
        // when they were written down.
        unsafe {
            device.launch_on((stream, false), kernel, ((n_blocks, 1), THREADS), &params)?;
        }
    }
    Ok(())
}

/// Queues the copy of one layer's pages to the frames that they have on a stream.
pub(crate) fn fill_frames(
    device: &Device,
    (kernel, stream): (&Kernel, &CudaStream),
    params: &FillParams,
) -> Result<(), DeviceError> {
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the list has so many pages, slots of the arena and frames that the caller has; the kernel reads these
    // pages of so many heads and writes to these frames.
    unsafe {
        device.launch_on((stream, false), kernel, ((LINK_BLOCKS, 1), FILL_THREADS), params)
    }
}

/// Copies pages in order, all heads of some tiers.
pub(crate) fn copy_between(
    device: &Device,
    kernel: &Kernel,
    tiers: Tiers,
    copies: &[PageCopy],
) -> Result<(), DeviceError> {
    if copies.is_empty() {
        return Ok(());
    }
    let list: Vec<[u32; 2]> = copies.iter().map(|copy| [copy.source.0, copy.target.0]).collect();
    let n_slots = tiers.n_device + tiers.n_host;
    assert!(list.as_flattened().iter().all(|&slot| slot < n_slots), "slots of the arena");
    let on_device = device.alloc(size_of_val(&list[..]), "a list of copies")?;
    device.upload(&on_device, 0, &list)?;
    let params = CopyParams {
        device: tiers.device,
        host: tiers.host,
        copies: on_device.address(),
        n_device: tiers.n_device,
        n_host: tiers.n_host,
        page_bytes: count(tiers.page_bytes),
        n_copies: count(list.len()),
    };
    let heads = count(tiers.n_heads);
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: block `i` touches the asserted slots of head `i` of both memories, which live. The
    // list is freed after the kernel has run, because freeing waits.
    unsafe {
        device.launch(kernel, (heads, 1), THREADS, &params)
    }
}
