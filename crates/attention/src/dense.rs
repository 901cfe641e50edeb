//! Exact attention: every key that a row may see.

use nuthatch_backend::{AttnSpec, Backend, DeviceError};
use nuthatch_store::KvStore;
use nuthatch_types::LayerIdx;

/// Weights that normalise each head of a layer before it is rotated.
pub struct HeadNorms<B: Backend> {
    /// `[D]`, for query heads.
    pub q: B::Buf,
    /// `[D]`, for key heads.
    pub k: B::Buf,
}

/// One layer's exact attention.
pub struct Dense<B: Backend> {
    /// The layer whose KV is read and written.
    pub layer: LayerIdx,
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
    /// Appends the rows' keys and values to the cache and attends; `qkv` is `[T, (H + 2 G) D]`,
    /// `out` `[T, H D]`.
    pub fn run(
        &self,
        backend: &B,
        plan: &B::Plan,
        store: &mut KvStore<B>,
        qkv: &mut B::Buf,
        out: &mut B::Buf,
    ) -> Result<(), DeviceError> {
        let spec = AttnSpec {
            n_heads: self.n_heads,
            scale: self.scale,
            window: self.window,
            head_norms: self.norms.as_ref().map(|norms| (&norms.q, &norms.k)),
            eps: self.eps,
        };
        backend.rope_append(plan, self.layer, &spec, qkv, store.device_mut())?;
        backend.attend(plan, self.layer, &spec, qkv, store.device(), out)
    }
}
