//! The forward pass: tokens in, logits out, the same lines for every architecture.

use std::sync::Arc;

use nuthatch_backend::{Backend, BatchLayout, DeviceError, Pass, PlanShape};
use nuthatch_store::KvStore;
use nuthatch_types::{KvDtype, KvShape, PageShift};

use crate::config::ModelConfig;
use crate::files::ModelFiles;
use crate::weights::Weights;
use crate::{LoadError, PAGE_LEN};

/// The largest batch that a model must hold in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Rows of one step.
    pub max_rows: usize,
    /// Sequences of one step.
    pub max_seqs: usize,
    /// Tokens of one sequence.
    pub max_context: usize,
    /// Rows of one step whose logits are wanted.
    pub max_outputs: usize,
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
}

/// A model on a device: its weights, and the activations of the step that runs.
pub struct Model<B: Backend> {
    backend: Arc<B>,
    config: ModelConfig,
    weights: Weights<B>,
    plan: B::Plan,
    acts: Activations<B>,
}

/// Buffers that every step reuses; `T` rows at most.
struct Activations<B: Backend> {
    /// `[T, d]` the residual stream.
    x: B::Buf,
    /// `[T, d]` its norm.
    h: B::Buf,
    /// `[T, (H + 2 G) D]`, or `[T, H D]` in a layer that owns no KV.
    qkv: B::Buf,
    /// `[T, H D]`.
    attended: B::Buf,
    /// `[T, 2 F]`.
    gate_up: B::Buf,
    /// `[T, F]`.
    gated: B::Buf,
    /// `[outputs, d]`, and its norm.
    last: B::Buf,
    last_h: B::Buf,
    /// `[outputs, V]`.
    logits: B::Buf,
}

impl<B: Backend> Model<B> {
    /// Loads the weights onto the device and allocates the buffers of a step.
    pub fn load(
        backend: Arc<B>,
        files: &ModelFiles,
        limits: &BatchLimits,
    ) -> Result<Self, LoadError> {
        let config = files.config().clone();
        let weights = Weights::load(&*backend, files)?;
        let shape = PlanShape {
            max_rows: limits.max_rows,
            max_seqs: limits.max_seqs,
            max_context: limits.max_context,
            n_heads: config.n_heads as usize,
            kv: kv_shape(&config, limits.kv_dtype),
            rope: config.rope_spec(limits.max_context),
        };
        let plan = backend.alloc_plan(&shape)?;
        let acts = Activations::new(&*backend, &config, limits)?;
        Ok(Model { backend, config, weights, plan, acts })
    }

    /// Writes pages of the store anew with their keys at other positions, in order.
    pub fn shift_pages(
        &self,
        store: &mut KvStore<B>,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        store.shift(&self.backend, &self.plan, shifts)
    }

    /// What the model's files say about it.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The hidden states of the last batch's output rows, after the last norm, `[outputs, D]`.
    pub fn hidden(&self) -> &B::Buf {
        &self.acts.last_h
    }

    /// Computes the batch's rows, appending their keys and values to the store, and returns the
    /// logits of `layout.output_rows`, `[outputs, V]`.
    pub fn forward(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
    ) -> Result<&mut B::Buf, DeviceError> {
        let (b, acts, plan) = (&*self.backend, &mut self.acts, &mut self.plan);
        let (rows, eps) = (layout.n_rows(), self.config.norm_eps);
        let (d, f) = (self.config.hidden as usize, self.config.ff as usize);
        b.plan(plan, tables, layout)?;
        if b.begin_pass(plan, store.device())? == Pass::Queued {
            return Ok(&mut acts.logits);
        }
        b.embed(&self.weights.embedding, plan, &mut acts.x)?;
        for layer in &self.weights.layers {
            b.norm(&acts.x, &layer.attn_norm, eps, rows, &mut acts.h)?;
            b.matmul(&layer.qkv, &acts.h, rows, &mut acts.qkv)?;
            layer.attention.run(b, plan, store, &mut acts.qkv, &mut acts.attended)?;
            b.matmul_add(&layer.out, &acts.attended, rows, &mut acts.x)?;
            b.norm(&acts.x, &layer.ffn_norm, eps, rows, &mut acts.h)?;
            let (gate_up, gated) = (&mut acts.gate_up, &mut acts.gated);
            b.gated_matmul(&layer.gate_up, &acts.h, f, rows, gate_up, gated)?;
            b.matmul_add(&layer.down, &acts.gated, rows, &mut acts.x)?;
        }
        let outputs = layout.output_rows.len();
        if outputs > 0 {
            let head = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
            b.gather_rows(plan, &acts.x, d, &mut acts.last)?;
            b.norm(&acts.last, &self.weights.output_norm, eps, outputs, &mut acts.last_h)?;
            b.matmul(head, &acts.last_h, outputs, &mut acts.logits)?;
        }
        b.end_pass(plan)?;
        Ok(&mut acts.logits)
    }
}

impl<B: Backend> Activations<B> {
    fn new(b: &B, config: &ModelConfig, limits: &BatchLimits) -> Result<Self, DeviceError> {
        let (rows, outputs) = (limits.max_rows, limits.max_outputs);
        let (d, f) = (config.hidden as usize, config.ff as usize);
        Ok(Activations {
            x: b.alloc(rows * d)?,
            h: b.alloc(rows * d)?,
            qkv: b.alloc(rows * (config.q_width() + 2 * config.kv_width()))?,
            attended: b.alloc(rows * config.q_width())?,
            gate_up: b.alloc(rows * 2 * f)?,
            gated: b.alloc(rows * f)?,
            last: b.alloc(outputs * d)?,
            last_h: b.alloc(outputs * d)?,
            logits: b.alloc(outputs * config.vocab as usize)?,
        })
    }
}

/// The shape of a model's KV cache; layers that share another's are not in it.
pub fn kv_shape(config: &ModelConfig, dtype: KvDtype) -> KvShape {
    KvShape {
        n_layers: config.n_kv_layers(),
        n_kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        page_len: PAGE_LEN,
        dtype,
    }
}
