//! Rows in eight bits beside pages that are far, as `kernels/codes.cuh` has them: what is brought over the
//! link then has half the bytes, and nothing comes over it for the heads whose rows are on the device. Pages
//! stay as they are, for prompts and for whoever reads all of one.

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
    /// `[head][slot][16 tokens][K|V][width]` of heads whose rows come over the link,
    far: PinnedMemory,
    /// and of the others, on the device.
    _here: Memory,
    /// `[head]` where its rows are, from the first head on that has far pages.
    heads: Memory,
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
        (are_here, n_slots): (&[bool], u32),
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "the KV cache in eight bits";
        let (rows, scales) = code_bytes(page.head_dim);
        let of = |n_heads: usize, bytes: u64| {
            (bytes as usize).saturating_mul(n_heads * n_slots as usize)
        };
        let n_here = are_here.iter().filter(|&&is_here| is_here).count();
        let far = PinnedMemory::new(device, of(are_here.len() - n_here, rows), WHAT)?;
        let here = device.alloc(of(n_here, rows), WHAT)?;
        let mut ends = [far.address(), here.address()];
        let place = |&is_here: &bool| {
            let end = &mut ends[usize::from(is_here)];
            std::mem::replace(end, *end + of(1, rows) as u64)
        };
        let places: Vec<u64> = are_here.iter().map(place).collect();
        let heads = device.alloc(size_of_val(&places[..]), WHAT)?;
        device.upload(&heads, 0, &places)?;
        Ok(Codes {
            code,
            far,
            _here: here,
            heads,
            scales: device.alloc(of(are_here.len(), scales), WHAT)?,
            n_slots,
            width: code_width(page),
        })
    }

    /// From a head on, counting those that are far.
    pub(crate) fn starting_at(&self, head: usize) -> CodeRows {
        CodeRows {
            rows: self.heads.address() + (head * size_of::<u64>()) as u64,
            scales: self.scales.address() + (head * self.n_slots as usize * 2 * PAGE_LEN) as u64,
            n_slots: self.n_slots.into(),
            kind: match self.code {
                RowCode::Fp8 => 1,
                RowCode::Int8 => 2,
            },
            are_kept: 0,
        }
    }

    pub(crate) fn code(&self) -> RowCode {
        self.code
    }

    /// Bytes of a row and its scales.
    pub(crate) fn row_bytes(&self) -> u64 {
        2 * self.width as u64
    }

    /// Where those are that come over the link, of so many heads, and the bytes of a key's.
    pub(crate) fn all(&self, n_heads: usize) -> (std::ops::Range<u64>, usize) {
        let bytes = n_heads * self.n_slots as usize * 2 * PAGE_LEN * self.width;
        (self.far.address()..self.far.address() + bytes as u64, self.width)
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
