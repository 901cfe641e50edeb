//! `copy.cu`: whole pages inside a tier and between tiers.

use nuthatch_backend::DeviceError;
use nuthatch_types::PageCopy;

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

/// Copies pages in order, all layers and heads.
pub(crate) fn copy_pages(
    device: &Device,
    kernel: &Kernel,
    kv: &mut CudaKv,
    copies: &[PageCopy],
) -> Result<(), DeviceError> {
    let arena = (kv.arena.address(), kv.host.as_ref().map_or(0, PinnedMemory::address));
    copy_arena(device, kernel, kv, (arena, kv.page.bytes()), copies)
}

/// Copies pages of anything that lies as the keys and values do: addresses on the device and on the
/// host, and bytes of one head's page.
pub(crate) fn copy_arena(
    device: &Device,
    kernel: &Kernel,
    kv: &CudaKv,
    ((arena, host), page_bytes): ((Address, Address), usize),
    copies: &[PageCopy],
) -> Result<(), DeviceError> {
    if copies.is_empty() {
        return Ok(());
    }
    let list: Vec<[u32; 2]> = copies.iter().map(|copy| [copy.source.0, copy.target.0]).collect();
    assert!(list.as_flattened().iter().all(|&slot| slot < kv.slots.total()), "slots of the arena");
    let on_device = device.alloc(size_of_val(&list[..]), "a list of copies")?;
    device.upload(&on_device, 0, &list)?;
    let params = CopyParams {
        device: arena,
        host,
        copies: on_device.address(),
        n_device: kv.slots.device,
        n_host: kv.slots.host,
        page_bytes: count(page_bytes),
        n_copies: count(list.len()),
    };
    let heads = count(kv.n_heads());
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: block `i` touches the asserted slots of head `i` of both tiers. The list is freed
    // after the kernel has run, because freeing waits.
    unsafe {
        device.launch(kernel, (heads, 1), THREADS, &params)
    }
}
