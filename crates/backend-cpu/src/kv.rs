//! The arena of keys and values: `[layer][kv head][slot]`, and inside a page of one head
//! `K: [D][16 tokens]`, then `V: [16 tokens][D]`.
//!
//! Keys are stored across tokens because a query meets sixteen of them at once: one load gives one
//! element of sixteen keys, and the scores of a page are one register. Values are stored along the
//! head because an output row is a sum of whole values.

use half::{bf16, f16};
use nuthatch_backend::DeviceError;
use nuthatch_types::{KvDtype, KvShape, PageCopy};

use crate::mem::{Region, SharedMut};
use crate::pack::LANES;

/// Tokens of a page: one register of scores.
pub(crate) const PAGE: usize = LANES;

/// The keys and values of all layers.
pub struct CpuKv {
    pub(crate) shape: KvShape,
    pub(crate) n_slots: usize,
    pub(crate) bytes: Region<u8>,
}

impl CpuKv {
    pub(crate) fn new(shape: KvShape, n_slots: u32) -> Result<Self, DeviceError> {
        if shape.page_len as usize != PAGE {
            let fault = format!("pages of {} tokens; this device has 16", shape.page_len);
            return Err(DeviceError::Fault(fault));
        }
        let n_slots = n_slots as usize;
        let bytes = shape.page_bytes().saturating_mul(n_slots);
        Ok(CpuKv { shape, n_slots, bytes: Region::zeroed(bytes, "the KV cache")? })
    }

    /// Bytes of one head's part of a page.
    pub(crate) fn head_page_bytes(&self) -> usize {
        2 * PAGE * self.shape.head_dim as usize * self.shape.dtype.bytes()
    }

    /// Where the pages of one head start; slot `s` is `s * head_page_bytes` further.
    pub(crate) fn head_start(&self, layer: usize, head: usize) -> usize {
        assert!(layer < self.shape.n_layers as usize && head < self.shape.n_kv_heads as usize);
        (layer * self.shape.n_kv_heads as usize + head) * self.n_slots * self.head_page_bytes()
    }

    pub(crate) fn copy_pages(&mut self, copies: &[PageCopy]) {
        let page = self.head_page_bytes();
        for layer in 0..self.shape.n_layers as usize {
            for head in 0..self.shape.n_kv_heads as usize {
                let start = self.head_start(layer, head);
                for copy in copies {
                    let source = start + copy.source.0 as usize * page;
                    let target = start + copy.target.0 as usize * page;
                    assert!((copy.source.0.max(copy.target.0) as usize) < self.n_slots);
                    self.bytes.copy_within(source..source + page, target);
                }
            }
        }
    }
}

/// Writes one token's key and value into a page of one head.
pub(crate) fn write_token(
    bytes: SharedMut<'_, u8>,
    page_start: usize,
    offset: usize,
    dtype: KvDtype,
    k: &[f32],
    v: &[f32],
) {
    let d = k.len();
    let size = dtype.bytes();
    #[expect(unsafe_code, reason = "threads write disjoint heads and tokens")]
    // SAFETY: callers write each (head, token) once per step, but tokens of one page interleave in
    // `K`; a page of one head is therefore written by one thread only (see `Cpu::rope_append`).
    let page = unsafe { bytes.part(page_start, 2 * PAGE * d * size) };
    let (keys, values) = page.split_at_mut(PAGE * d * size);
    let value = &mut values[offset * d * size..(offset + 1) * d * size];
    match dtype {
        KvDtype::F32 => {
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let v = finite(v, f32::MAX);
                keys[(i * PAGE + offset) * 4..][..4].copy_from_slice(&k.to_le_bytes());
                value[i * 4..][..4].copy_from_slice(&v.to_le_bytes());
            }
        }
        KvDtype::F16 => {
            const MAX: f32 = 65504.0;
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let (k, v) = (f16::from_f32(k.clamp(-MAX, MAX)), f16::from_f32(finite(v, MAX)));
                keys[(i * PAGE + offset) * 2..][..2].copy_from_slice(&k.to_le_bytes());
                value[i * 2..][..2].copy_from_slice(&v.to_le_bytes());
            }
        }
        KvDtype::Bf16 => {
            let max = bf16::MAX.to_f32();
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let (k, v) = (bf16::from_f32(k), bf16::from_f32(finite(v, max)));
                keys[(i * PAGE + offset) * 2..][..2].copy_from_slice(&k.to_le_bytes());
                value[i * 2..][..2].copy_from_slice(&v.to_le_bytes());
            }
        }
    }
}

/// The nearest number of at most `max`; 0 for NaN.
///
/// A value that is not finite would spoil rows that must not see it, because a masked key has
/// probability 0, and 0 times infinity is NaN. The sequence it belongs to is lost either way: its
/// own residual stream carries the NaN to its logits.
fn finite(x: f32, max: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-max, max) }
}
