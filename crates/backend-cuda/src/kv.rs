//! The arena of keys and values: `[layer][kv head][slot]`, and inside a page of one head the order
//! that `kernels/kv.cuh` draws.

use std::ops::Range;

use nuthatch_backend::DeviceError;
use nuthatch_types::{KvDtype, KvShape, KvSlots, PageImage, Slot};

use crate::device::{Device, Memory};
use crate::pinned::PinnedMemory;
use crate::sparse::Sparse;

/// Tokens of a page.
pub(crate) const PAGE_LEN: usize = 16;

/// What decides the bytes of one head's page, and the kernels for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageShape {
    pub(crate) dtype: KvDtype,
    pub(crate) head_dim: u32,
}

impl PageShape {
    pub(crate) fn of(shape: &KvShape) -> Self {
        PageShape { dtype: shape.dtype, head_dim: shape.head_dim }
    }

    /// Elements of a head as they are stored: with 16 bits, a multiple of 32.
    pub(crate) fn width(self) -> usize {
        let head_dim = self.head_dim as usize;
        match self.dtype {
            KvDtype::F32 => head_dim,
            KvDtype::F16 | KvDtype::Bf16 => head_dim.next_multiple_of(32),
        }
    }

    /// Bytes of one head's page.
    pub(crate) fn bytes(self) -> usize {
        2 * PAGE_LEN * self.width() * self.dtype.bytes()
    }
}

/// Where the pages of the device tier are.
pub(crate) enum Arena {
    Device(Memory),
    /// In memory of the host, which kernels read and write at the same addresses: for top-k attention,
    /// whose working sets are on the device.
    Host(PinnedMemory),
}

impl Arena {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Arena::Device(memory) => memory.address(),
            Arena::Host(memory) => memory.address(),
        }
    }
}

/// The keys and values of all layers.
pub struct CudaKv {
    pub(crate) shape: KvShape,
    pub(crate) page: PageShape,
    pub(crate) slots: KvSlots,
    pub(crate) arena: Arena,
    /// The pages that wait on the host, in the same order.
    pub(crate) host: Option<PinnedMemory>,
    /// Room for one page on its way out or in: `[layer][kv head]`.
    pub(crate) gate: PinnedMemory,
    /// What top-k attention keeps; its pages are of rows.
    pub(crate) sparse: Option<Sparse>,
}

impl CudaKv {
    pub(crate) fn new(
        device: &Device,
        shape: KvShape,
        slots: KvSlots,
        is_on_host: bool,
    ) -> Result<Self, DeviceError> {
        if shape.page_len as usize != PAGE_LEN {
            let fault = format!("pages of {} tokens; this device has {PAGE_LEN}", shape.page_len);
            return Err(DeviceError::Fault(fault));
        }
        if !shape.head_dim.is_multiple_of(8) {
            let fault =
                format!("heads of width {}; this device needs a multiple of 8", shape.head_dim);
            return Err(DeviceError::Fault(fault));
        }
        let page = PageShape::of(&shape);
        let heads = shape.n_layers as usize * shape.n_kv_heads as usize;
        let bytes =
            |n_slots: u32| page.bytes().saturating_mul(n_slots as usize).saturating_mul(heads);
        let n_bytes = bytes(slots.device);
        let arena = if is_on_host {
            Arena::Host(PinnedMemory::new(device, n_bytes, "the KV cache on the host")?)
        } else {
            Arena::Device(device.alloc_kv(n_bytes)?)
        };
        let host = match slots.host {
            0 => None,
            n => Some(PinnedMemory::new(device, bytes(n), "the host's KV pages")?),
        };
        let gate = PinnedMemory::new(device, bytes(1), "a KV page on its way")?;
        Ok(CudaKv { shape, page, slots, arena, host, gate, sparse: None })
    }

    /// Bytes of a page over all layers, and how they lie; `is_exact` says how they were computed.
    pub(crate) fn page_image(&self, arch: &str, is_exact: bool) -> PageImage {
        let bytes = self.page.bytes() * self.n_heads();
        let layout = format!("cuda 1, {arch}, exact {is_exact}, {:?}", self.shape);
        PageImage { bytes, layout }
    }

    /// Heads of all layers.
    pub(crate) fn n_heads(&self) -> usize {
        self.shape.n_layers as usize * self.shape.n_kv_heads as usize
    }

    /// Where each head's part of a page of the host starts.
    pub(crate) fn host_starts(&self, slot: Slot) -> impl Iterator<Item = usize> + use<> {
        let (n_host, place) = (self.slots.host as usize, (slot.0 - self.slots.device) as usize);
        let page = self.page.bytes();
        (0..self.n_heads()).map(move |head| (head * n_host + place) * page)
    }

    /// Puts memory behind slots, for all heads of all layers, and gives the bytes behind all slots.
    pub(crate) fn back(&self, device: &Device, slots: Range<u32>) -> Result<usize, DeviceError> {
        assert!(slots.end <= self.slots.device, "slots of the arena");
        let (page, per_head) = (self.page.bytes(), self.head_bytes() as usize);
        let Arena::Device(memory) = &self.arena else { return Ok(0) };
        let at = |head: usize, slot: u32| head * per_head + slot as usize * page;
        for head in 0..self.n_heads() {
            device.back(memory, at(head, slots.start)..at(head, slots.end))?;
        }
        Ok(memory.backed_bytes())
    }

    /// Bytes of all device slots of one head.
    pub(crate) fn head_bytes(&self) -> u64 {
        self.page.bytes() as u64 * u64::from(self.slots.device)
    }

    /// Where the heads of a layer start.
    pub(crate) fn layer_address(&self, layer: u32) -> u64 {
        assert!(layer < self.shape.n_layers, "a layer of the model");
        let heads = u64::from(layer) * u64::from(self.shape.n_kv_heads);
        self.arena.address() + heads * self.head_bytes()
    }
}
