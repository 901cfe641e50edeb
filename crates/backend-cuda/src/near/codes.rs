//! Rows in eight bits beside pages that are far, as `kernels/codes.cuh` has them: what is brought over the
//! link then has half the bytes. Pages stay as they are, for prompts and for whoever reads all of one.

use nuthatch_backend::{DeviceError, RowCode};
use nuthatch_types::{KvDtype, Slot};

use crate::Cuda;
use crate::device::{Device, Memory};
use crate::kv::{CudaKv, PAGE_LEN, PageShape};
use crate::launch::CodeRows;
use crate::launch::rope::{CodePagesParams, code_pages};
use crate::pinned::PinnedMemory;

/// The codes of all pages that are far.
pub(crate) struct Codes {
    code: RowCode,
    /// `[head][slot][16 tokens][K|V][width]`, heads from the first one that is far.
    rows: PinnedMemory,
    /// `[head][slot][16 tokens][K|V]`
    scales: Memory,
    n_slots: u32,
    width: usize,
}

/// Bytes of a key's codes, or a value's.
fn code_width(page: PageShape) -> usize {
    (page.head_dim as usize).next_multiple_of(32)
}

/// Bytes beside one head's page: of codes, on the host, and of scales, on the device.
pub fn code_bytes(head_dim: u32) -> (u64, u64) {
    let page = PageShape { dtype: KvDtype::F16, head_dim };
    let vectors = 2 * PAGE_LEN;
    ((vectors * code_width(page)) as u64, vectors as u64)
}

impl Codes {
    pub(crate) fn new(
        device: &Device,
        code: RowCode,
        page: PageShape,
        (n_heads, n_slots): (usize, u32),
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "the KV cache in eight bits on the host";
        let (rows, scales) = code_bytes(page.head_dim);
        let all = |bytes: u64| (bytes as usize).saturating_mul(n_heads * n_slots as usize);
        Ok(Codes {
            code,
            rows: PinnedMemory::new(device, all(rows), WHAT)?,
            scales: device.alloc(all(scales), WHAT)?,
            n_slots,
            width: code_width(page),
        })
    }

    /// From a head on, counting those that are far.
    pub(crate) fn starting_at(&self, head: usize) -> CodeRows {
        let before = (head * self.n_slots as usize * 2 * PAGE_LEN) as u64;
        CodeRows {
            rows: self.rows.address() + before * self.width as u64,
            scales: self.scales.address() + before,
            n_slots: self.n_slots.into(),
            kind: match self.code {
                RowCode::Fp8 => 1,
                RowCode::Int8 => 2,
            },
            padding: 0,
        }
    }

    /// Bytes of a row and its scales.
    pub(crate) fn row_bytes(&self) -> u64 {
        2 * self.width as u64
    }

    /// Where all of them are, and the bytes of a key's.
    pub(crate) fn all(&self, n_heads: usize) -> (std::ops::Range<u64>, usize) {
        let bytes = n_heads * self.n_slots as usize * 2 * PAGE_LEN * self.width;
        (self.rows.address()..self.rows.address() + bytes as u64, self.width)
    }
}

impl Cuda {
    /// Makes the codes of pages that were written otherwise than by appending.
    pub(crate) fn code_pages(
        &self,
        kv: &CudaKv,
        slots: impl Iterator<Item = Slot>,
    ) -> Result<(), DeviceError> {
        let (Some(codes), Some((pages, n_heads)), Some(sparse)) =
            (&kv.codes, kv.far_heads(), &kv.sparse)
        else {
            return Ok(());
        };
        // What waits on the host has none until it comes back.
        let slots: Vec<u32> =
            slots.map(|slot| slot.0).filter(|&slot| slot < kv.slots.device).collect();
        if slots.is_empty() {
            return Ok(());
        }
        let list = self.device.alloc(size_of_val(&slots[..]), "a list of pages")?;
        self.device.upload(&list, 0, &slots)?;
        let params = CodePagesParams {
            layer: pages,
            slots: list.address(),
            head_bytes: kv.head_bytes(),
            codes: codes.starting_at(0),
        };
        code_pages(&self.device, &sparse.attend, &params, (slots.len(), n_heads))
    }
}
