//! `copy.cu`: whole pages inside a tier and between tiers.

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
        pass_gate(device, kernel, kv, slot, true)?;
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

/// Writes a page from bytes of the host, and waits.
pub(crate) fn write_page(
    device: &Device,
    kernel: &Kernel,
    kv: &mut CudaKv,
    slot: Slot,
    source: &[u8],
) -> Result<(), DeviceError> {
    assert_eq!(source.len(), kv.page_bytes(), "a page's bytes");
    if slot.0 < kv.slots.device {
        // Nothing that uses the gate is queued, because everything that did was waited for.
        kv.gate.write(0, source);
        pass_gate(device, kernel, kv, slot, false)?;
        return kv.forget_near(device, std::iter::once(slot));
    }
    device.wait()?;
    let parts = kv.host_parts(slot);
    let host = kv.host.as_mut().expect("a slot of the arena");
    for (part, start) in parts {
        host.write(start, &source[part]);
    }
    Ok(())
}

/// Copies a page of the device to the gate, or from it, and waits.
fn pass_gate(
    device: &Device,
    kernel: &Kernel,
    kv: &CudaKv,
    slot: Slot,
    is_out: bool,
) -> Result<(), DeviceError> {
    let gate = Slot(kv.slots.device);
    let (source, target) = if is_out { (slot, gate) } else { (gate, slot) };
    let copy = PageCopy { source, target };
    for tiers in Tiers::of(kv, (kv.gate.address(), 1)) {
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
