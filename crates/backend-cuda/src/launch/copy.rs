//! `copy.cu`: whole pages inside a tier and between tiers.

use std::ops::Range;

use nuthatch_backend::DeviceError;
use nuthatch_types::{PageCopy, Slot};

use super::{Address, count, params};
use crate::device::{Device, Kernel};
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

const THREADS: u32 = 256;

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
        pass_gate(device, kernel, kv, (slot, 0..target.len()), true)?;
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

/// Writes a page, or whole heads of it from the byte `start` on, from bytes of the host, and waits.
pub(crate) fn write_page(
    device: &Device,
    kernel: &Kernel,
    kv: &mut CudaKv,
    slot: Slot,
    (start, source): (usize, &[u8]),
) -> Result<(), DeviceError> {
    let bytes = start..start + source.len();
    assert!(bytes.end <= kv.page_bytes(), "a page's bytes");
    if slot.0 < kv.slots.device {
        // Nothing that uses the gate is queued, because everything that did was waited for.
        kv.gate.write(start, source);
        pass_gate(device, kernel, kv, (slot, bytes), false)?;
        return kv.forget_near(device, std::iter::once(slot));
    }
    device.wait()?;
    let parts = kv.host_parts(slot);
    let host = kv.host.as_mut().expect("a slot of the arena");
    for (part, place) in parts {
        if bytes.start <= part.start && part.end <= bytes.end {
            host.write(place, &source[part.start - start..part.end - start]);
        }
    }
    Ok(())
}

/// Copies the heads of a page of the device that are these bytes to the gate, or from it, and waits.
fn pass_gate(
    device: &Device,
    kernel: &Kernel,
    kv: &CudaKv,
    (slot, bytes): (Slot, Range<usize>),
    is_out: bool,
) -> Result<(), DeviceError> {
    let gate = Slot(kv.slots.device);
    let (source, target) = if is_out { (slot, gate) } else { (gate, slot) };
    let copy = PageCopy { source, target };
    for run in kv.runs() {
        // Of the run's heads, those that are among the bytes.
        let page_bytes = run.page.bytes();
        let head = |byte: usize| (byte.saturating_sub(run.before) / page_bytes).min(run.n);
        let (first, end) = (head(bytes.start), head(bytes.end));
        if first == end {
            continue;
        }
        let n_device = kv.slots.device;
        let tiers = Tiers {
            device: run.address + (first * page_bytes) as u64 * u64::from(n_device),
            n_device,
            host: kv.gate.address() + (run.before + first * page_bytes) as u64,
            n_host: 1,
            page_bytes,
            n_heads: end - first,
        };
        copy_between(device, kernel, tiers, &[copy])?;
    }
    device.wait()
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
