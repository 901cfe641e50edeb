//! Exact attention: every key that a row may see.

use nuthatch_backend::{AttnSpec, Backend, DeviceError};
use nuthatch_store::KvStore;
use nuthatch_types::LayerIdx;

/// Weights that normalise each head of a layer before it is rotated.
pub struct HeadNorms<B: Backend> {
    /// `[D]`, for query heads.
    pub q: B::Buf,
    /// `[D]`, for key heads; a layer without keys has none.
    pub k: Option<B::Buf>,
}

/// One layer's exact attention.
pub struct Dense<B: Backend> {
    /// The layer of the arena whose KV is read.
    pub layer: LayerIdx,
    /// Whether its KV is also written: whether it is this layer's own.
    pub owns_kv: bool,
    /// Query heads.
    pub n_heads: u32,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Positions that a row sees, itself included.
    pub window: Option<u32>,
    /// Norms of the heads, if the model has them.
    pub norms: Option<HeadNorms<B>>,
    /// The norms' epsilon.
    pub eps: f32,
}

impl<B: Backend> Dense<B> {
    /// Appends the rows' keys and values to the cache and attends; `qkv` is `[T, (H + 2 G) D]`, or
    /// `[T, H D]` in a layer that owns no KV, and undefined afterwards; `out` is `[T, H D]`.
    pub fn run(
        &self,
        backend: &B,
        plan: &B::Plan,
        store: &mut KvStore<B>,
        qkv: &mut B::Buf,
        out: &mut B::Buf,
    ) -> Result<(), DeviceError> {
        backend.rope_attend(plan, self.layer, &self.spec(), qkv, store.device_mut(), out)
    }

    /// Appends the rows' keys and values to the cache, and leaves the queries ready.
    pub fn append(
        &self,
        backend: &B,
        plan: &B::Plan,
        store: &mut KvStore<B>,
        qkv: &mut B::Buf,
    ) -> Result<(), DeviceError> {
        backend.rope_append(plan, self.layer, &self.spec(), qkv, store.device_mut())
    }

    /// Makes queries ready that the layer is only decided about by, before its turn.
    pub fn prepare_queries(
        &self,
        backend: &B,
        plan: &B::Plan,
        store: &mut KvStore<B>,
        qkv: &mut B::Buf,
    ) -> Result<(), DeviceError> {
        backend.rope_queries(plan, self.layer, &self.spec(), qkv, store.device_mut())
    }

    /// The layer as a device sees it.
    pub fn spec(&self) -> AttnSpec<'_, B> {
        AttnSpec {
            n_heads: self.n_heads,
            scale: self.scale,
            window: self.window,
            owns_kv: self.owns_kv,
            // Where there are no keys, the device does not look at their norm.
            head_norms: self.norms.as_ref().map(|n| (&n.q, n.k.as_ref().unwrap_or(&n.q))),
            eps: self.eps,
        }
    }
}
