//! Digests beside the pages: where they are, and how they follow the keys.

use nuthatch_backend::{AttnSpec, DeviceError, Digest, DigestKind};
use nuthatch_types::{LayerIdx, PageCopy, PageShift};

use crate::Cuda;
use crate::device::{Device, Memory};
use crate::kv::{CudaKv, PAGE_LEN};
use crate::launch::copy::Tiers;
use crate::launch::sparse::{DigestParams, MAX_WIDTH, digest_keys, kind_number};
use crate::launch::{Address, NearPages, copy, count};
use crate::pinned::PinnedMemory;
use crate::plan::CudaPlan;

/// One digest of all pages.
pub(super) struct DigestArena {
    pub(super) kind: DigestKind,
    pub(super) width: usize,
    /// `[head][D][width]`, or one for all.
    pub(super) frame: Memory,
    pub(super) has_one_frame: bool,
    /// `[head][D]`.
    pub(super) mean: Memory,
    /// `[head][width]`, if queries have weights.
    weights: Option<Memory>,
    /// Of one head's page.
    pub(super) page_bytes: usize,
    pub(super) device: Memory,
    pub(super) host: Option<PinnedMemory>,
}

impl DigestArena {
    pub(super) fn new(device: &Device, kv: &CudaKv, digest: &Digest) -> Result<Self, DeviceError> {
        const WHAT: &str = "digests of the KV cache";
        let (d, heads) = (kv.page.head_dim as usize, kv.n_heads());
        let has_one_frame = digest.has_one_frame(d) && digest.kind != DigestKind::Bounds;
        let n_frames = if has_one_frame { 1 } else { heads };
        assert_eq!(digest.frame.len(), n_frames * digest.width * d, "a frame for each head");
        let (kind, width) = (digest.kind, digest.width);
        let is_signs = kind == DigestKind::Signs;
        assert!(!is_signs || width.is_multiple_of(64), "whole words");
        assert!(!is_signs || digest.mean.len() == heads * d, "a mean each");
        assert!(
            digest.weights.is_empty() || digest.weights.len() == heads * width,
            "weights for each head"
        );
        let is_narrow = matches!(kind, DigestKind::Channels | DigestKind::Nibbles);
        let most = if is_narrow { d } else { MAX_WIDTH };
        if width > most {
            let fault = format!("digests of width {width}; this device has up to {most}");
            return Err(DeviceError::Fault(fault));
        }
        // One element of the key meets all rows of the frame.
        let mut frame = vec![0.0f32; digest.frame.len()];
        for (head, turned) in frame.chunks_exact_mut((width * d).max(1)).enumerate() {
            for (i, &x) in digest.frame_of(head, d).iter().enumerate() {
                turned[i % d * width + i / d] = x;
            }
        }
        let page_bytes = match kind {
            // The matrix instruction takes sixteen channels.
            DigestKind::Channels => PAGE_LEN * (width.next_multiple_of(16) + 2),
            DigestKind::Signs | DigestKind::Nibbles | DigestKind::Bounds => {
                digest.page_bytes(PAGE_LEN, d)
            }
        };
        let bytes = |n: u32| page_bytes.saturating_mul(n as usize).saturating_mul(heads);
        let upload = |floats: &[f32]| {
            let memory = device.alloc(size_of_val(floats), WHAT)?;
            device.upload(&memory, 0, floats).map(|()| memory)
        };
        Ok(DigestArena {
            kind,
            width,
            frame: upload(&frame)?,
            has_one_frame,
            mean: upload(&digest.mean)?,
            weights: match &digest.weights[..] {
                [] => None,
                weights => Some(upload(weights)?),
            },
            page_bytes,
            device: device.alloc(bytes(kv.slots.device), WHAT)?,
            host: match kv.slots.host {
                0 => None,
                n => Some(PinnedMemory::new(device, bytes(n), WHAT)?),
            },
        })
    }

    /// Bytes of all device slots of one head.
    pub(super) fn head_bytes(&self, kv: &CudaKv) -> u64 {
        self.page_bytes as u64 * u64::from(kv.slots.device)
    }

    /// Where the digests of a head are, counting all layers' heads.
    pub(super) fn address(&self, kv: &CudaKv, head: usize) -> Address {
        self.device.address() + head as u64 * self.head_bytes(kv)
    }

    /// Floats from one head's frame to the next.
    pub(super) fn frame_stride(&self, kv: &CudaKv) -> u64 {
        if self.has_one_frame { 0 } else { self.width as u64 * u64::from(kv.page.head_dim) }
    }

    pub(super) fn frame_address(&self, kv: &CudaKv, head: usize) -> Address {
        self.frame.address() + head as u64 * self.frame_stride(kv) * 4
    }

    /// Weights of queries from one head on; nowhere if there are none.
    pub(super) fn weights_address(&self, head: usize) -> Address {
        let weights = self.weights.as_ref();
        weights.map_or(0, |weights| weights.address() + (head * self.width) as u64 * 4)
    }

    /// What taking digests is told, from one head on; rows are somebody else's.
    pub(super) fn params(&self, kv: &CudaKv, head: usize) -> DigestParams {
        DigestParams {
            arena: kv.head_address(head),
            digests: self.address(kv, head),
            frame: self.frame_address(kv, head),
            mean: self.mean.address() + head as u64 * u64::from(kv.page.head_dim) * 4,
            places: 0,
            table_rows: 0,
            tables: 0,
            slots: 0,
            head_bytes: kv.head_bytes(),
            near: kv.near_pages(head as u32 / kv.shape.n_kv_heads),
            digest_head_bytes: self.head_bytes(kv),
            frame_stride: self.frame_stride(kv),
            rows: 0,
            table_len: 0,
            kind: kind_number(self.kind),
            width: count(self.width),
            page_bytes: count(self.page_bytes),
            padding: 0,
        }
    }
}

/// Of how many of the last places a new token changes the digests, at most.
pub(super) fn changed_by_token(kind: DigestKind) -> u32 {
    match kind {
        // One for all places of a page.
        DigestKind::Bounds => count(PAGE_LEN),
        DigestKind::Signs | DigestKind::Channels | DigestKind::Nibbles => 1,
    }
}

impl Cuda {
    /// Takes the digests of the plan's rows.
    pub(crate) fn digest_rows(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Cuda>,
        kv: &CudaKv,
    ) -> Result<(), DeviceError> {
        let Some(sparse) = kv.sparse.as_ref().filter(|_| spec.owns_kv) else { return Ok(()) };
        let n_heads = kv.shape.n_kv_heads;
        let beside = plan.beside.as_ref().filter(|_| plan.is_decode());
        let branch = beside.map(|branch| branch.fork(&self.device, 0)).transpose()?;
        let (near, n_near) = kv.written_pages(layer.0);
        let heads = [(0, n_near, near), (n_near, n_heads - n_near, NearPages::NONE)];
        let all = sparse.digests.iter().flat_map(|digest| heads.map(|heads| (digest, heads)));
        for (digest, (first, n, near)) in all.filter(|(_, (_, n, _))| *n > 0) {
            let params = DigestParams {
                places: plan.places(),
                table_rows: plan.table_rows(),
                tables: plan.tables,
                rows: count(plan.n_rows()),
                table_len: plan.table_len,
                near,
                ..digest.params(kv, (layer.0 * n_heads + first) as usize)
            };
            digest_keys(&self.device, &sparse.kernels.digest, &params, (n, branch))?;
        }
        beside.map_or(Ok(()), |branch| branch.end(&self.device, 0))
    }

    /// Takes the digests of pages that were written anew, of all layers and heads.
    pub(crate) fn digest_pages(
        &self,
        kv: &CudaKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        let Some(sparse) = kv.sparse.as_ref().filter(|_| !shifts.is_empty()) else {
            return Ok(());
        };
        let slots: Vec<u32> = shifts.iter().map(|shift| shift.target.0).collect();
        let list = self.device.alloc(size_of_val(&slots[..]), "a list of shifts")?;
        self.device.upload(&list, 0, &slots)?;
        let all = sparse.digests.iter().flat_map(|digest| kv.runs().map(move |run| (digest, run)));
        for (digest, run) in all {
            let (slots, rows) = (list.address(), count(slots.len() * PAGE_LEN));
            let params = DigestParams { slots, rows, ..digest.params(kv, run.first) };
            digest_keys(&self.device, &sparse.kernels.digest, &params, (count(run.n), None))?;
        }
        Ok(())
    }

    /// Copies the digests of pages that were copied.
    pub(crate) fn copy_digests(&self, kv: &CudaKv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        for digest in kv.sparse.iter().flat_map(|sparse| &sparse.digests) {
            let host = digest.host.as_ref().map_or(0, PinnedMemory::address);
            let tiers = Tiers {
                device: digest.device.address(),
                n_device: kv.slots.device,
                host,
                n_host: kv.slots.host,
                page_bytes: digest.page_bytes,
                n_heads: kv.n_heads(),
            };
            copy::copy_between(&self.device, &self.common.copy, tiers, copies)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With bounds of pages and fewer recent tokens than a page has, a step chose among places whose bounds another
    /// stream was writing at that time.
    #[test]
    fn a_token_changes_the_bounds_of_its_whole_page() {
        assert_eq!(changed_by_token(DigestKind::Bounds), 16);
        assert_eq!(changed_by_token(DigestKind::Channels), 1);
    }
}
