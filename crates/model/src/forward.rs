//! The forward pass: tokens in, logits out, the same lines for every architecture.

use std::sync::Arc;

use nuthatch_attention::topk::{TopK, TopKLayer, TopKShape};
use nuthatch_backend::{
    Backend, BatchLayout, Bring, DeviceError, Draw, Norm, Pass, PlanShape, RopeSpec,
};
use nuthatch_store::KvStore;
use nuthatch_types::{KvDtype, KvShape, LayerIdx, PageShift};

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

/// Waits for what comes of a layer, and writes it to the store; false if it does not come.
pub type Arrive<'a, B> = dyn FnMut(&mut KvStore<B>, LayerIdx) -> Result<bool, DeviceError> + 'a;

/// A model on a device: its weights, and the activations of the step that runs.
pub struct Model<B: Backend> {
    backend: Arc<B>,
    config: ModelConfig,
    pub(crate) weights: Weights<B>,
    pub(crate) plan: B::Plan,
    pub(crate) acts: Activations<B>,
    /// Attention to the tokens that a query needs, instead of to all.
    topk: Option<TopK>,
    /// Rows that there is room for.
    max_rows: usize,
    rope: RopeSpec,
}

/// Buffers that every step reuses; `T` rows at most.
pub(crate) struct Activations<B: Backend> {
    /// `[T, d]` the residual stream.
    pub(crate) x: B::Buf,
    /// `[T, d]` its norm.
    h: B::Buf,
    /// `[T, (H + 2 G) D]`, or `[T, H D]` in a layer that owns no KV.
    pub(crate) qkv: B::Buf,
    /// `[T, H D]`.
    pub(crate) attended: B::Buf,
    /// `[T, 2 F]`.
    gate_up: B::Buf,
    /// `[T, F]`.
    gated: B::Buf,
    /// `[outputs, d]`, and its norm.
    last: B::Buf,
    last_h: B::Buf,
    /// `[outputs, V]`.
    pub(crate) logits: B::Buf,
    /// Shaped as `qkv`: queries that decide for the next layer, made from the residual stream that
    /// this one begins with; there if a policy wants them. Two, because a device may decide while the
    /// next one's are made.
    deciding: Option<[B::Buf; 2]>,
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
        let rope = shape.rope;
        let acts = Activations::new(&*backend, &config, limits)?;
        let max_rows = limits.max_rows;
        Ok(Model { backend, config, weights, plan, acts, topk: None, max_rows, rope })
    }

    /// Attends to what queries need from now on. The store keeps the digests.
    pub fn set_topk(&mut self, topk: TopK, store: &mut KvStore<B>) -> Result<(), DeviceError> {
        self.backend.keep_digests(store.device_mut(), topk.digests())?;
        if topk.speculates() {
            let len = self.max_rows * (self.config.q_width() + 2 * self.config.kv_width());
            self.acts.deciding = Some([self.backend.alloc(len)?, self.backend.alloc(len)?]);
        }
        let mut topk = topk;
        topk.decide_on_device(&*self.backend, &self.plan, store)?;
        self.topk = Some(topk);
        Ok(())
    }

    /// Makes the queries that layers are decided about ahead by from weights of eight bits, where a layer has
    /// at least so many of more.
    pub fn narrow_deciding(&mut self, files: &ModelFiles, least: usize) -> Result<(), LoadError> {
        self.weights.narrow(&*self.backend, files, least)
    }

    /// How heads are rotated.
    pub fn rope(&self) -> &RopeSpec {
        &self.rope
    }

    /// Attention to what queries need, if there is such.
    pub fn topk(&self) -> Option<&TopK> {
        self.topk.as_ref()
    }

    /// The same, to tell it about sequences.
    pub fn topk_mut(&mut self) -> Option<&mut TopK> {
        self.topk.as_mut()
    }

    /// Writes pages of the store anew with their keys at other positions, in order.
    pub fn shift_pages(
        &self,
        store: &mut KvStore<B>,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        store.shift(&self.backend, &self.plan, shifts)
    }

    /// Brings the first row of the last batch near, `n` times, as a trial of how long that takes.
    pub fn try_bring(&self, store: &KvStore<B>, n: usize) -> Result<(), DeviceError> {
        let (places, rows) = (vec![0; n], vec![0; n]);
        let brings = [Bring { seq: 0, head: 0, places: &places, rows: &rows }];
        self.backend.bring(&self.plan, LayerIdx(0), store.device(), &brings)
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

    pub(crate) fn shared_backend(&self) -> Arc<B> {
        Arc::clone(&self.backend)
    }

    /// Computes the batch's rows, appending their keys and values to the store, and returns the
    /// logits of `layout.output_rows`, `[outputs, V]`.
    pub fn forward(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
    ) -> Result<&mut B::Buf, DeviceError> {
        self.plan_batch(tables, layout)?;
        self.pass(store, layout, false)?;
        Ok(&mut self.acts.logits)
    }

    /// The same while keys and values of earlier tokens still come, layer by layer: `arrive` waits for
    /// those of a layer. `None` if they do not come, and then nothing was computed.
    pub fn forward_awaiting(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
        arrive: &mut Arrive<'_, B>,
    ) -> Result<Option<&mut B::Buf>, DeviceError> {
        assert!(self.topk.is_none(), "what top-k attention learned cannot be undone");
        self.plan_batch(tables, layout)?;
        self.embed()?;
        for idx in 0..self.weights.layers.len() {
            if !arrive(store, LayerIdx(idx as u32))? {
                return Ok(None);
            }
            self.attend(idx, store, layout)?;
            self.finish_layer(idx, layout)?;
        }
        self.logits(layout)?;
        Ok(Some(&mut self.acts.logits))
    }

    /// The same, and a token is chosen for each of `layout.output_rows`, which [`Model::drawn`] gives. If
    /// the batch `follows`, its rows are the output rows of the one queued before, and its tokens those
    /// that are chosen there.
    pub fn queue(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
        (draws, follows): (&[Draw], bool),
    ) -> Result<(), DeviceError> {
        match follows {
            true => {
                self.begin_topk(layout);
                self.backend.plan_next(&mut self.plan, tables, layout)?;
            }
            false => self.plan_batch(tables, layout)?,
        }
        self.backend.plan_draws(&mut self.plan, draws)?;
        self.pass(store, layout, true)
    }

    /// Waits for the first batch that was queued and not asked for, and gives its tokens.
    pub fn drawn(&mut self, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        self.backend.drawn(&mut self.plan, tokens)
    }

    /// The pass over the batch that was planned, with the choice of tokens if it `draws`.
    fn pass(
        &mut self,
        store: &mut KvStore<B>,
        layout: &BatchLayout,
        draws: bool,
    ) -> Result<(), DeviceError> {
        if let Some(topk) = &mut self.topk {
            topk.begin_on_device(&*self.backend, &mut self.plan, store)?;
        }
        // What the host decides layer by layer cannot be queued before.
        let is_pass = !self.topk.as_ref().is_some_and(TopK::decides_on_host);
        if is_pass && self.backend.begin_pass(&mut self.plan, store.device())? == Pass::Queued {
            return Ok(());
        }
        self.embed()?;
        for idx in 0..self.weights.layers.len() {
            self.speculate(idx, store, layout)?;
            self.attend(idx, store, layout)?;
            self.finish_layer(idx, layout)?;
        }
        self.logits(layout)?;
        if draws {
            let vocab = self.config.vocab as usize;
            self.backend.draw(&self.plan, &mut self.acts.logits, vocab)?;
        }
        self.backend.end_pass(&mut self.plan)
    }

    /// Counts what a device that decides by itself has decided in the first step that has ended and was not counted.
    pub fn count_decisions(&mut self, store: &KvStore<B>) -> Result<(), DeviceError> {
        let Some(topk) = &mut self.topk else { return Ok(()) };
        let layers = &self.weights.layers;
        topk.count_on_device(&*self.backend, store, |idx| layers[idx].attention.window.is_some())
    }

    /// Looks back on the batch that was computed last, of which only `layout.output_rows` are others:
    /// works out their hidden states, and their logits if they are wanted.
    pub fn look_back(
        &mut self,
        tables: &B::Tables,
        layout: &BatchLayout,
        with_logits: bool,
    ) -> Result<&B::Buf, DeviceError> {
        self.backend.plan(&mut self.plan, tables, layout)?;
        if with_logits {
            return self.logits(layout);
        }
        self.output_states(layout)?;
        Ok(&self.acts.logits)
    }

    /// Prepares the plan, and the residual stream by the embedding.
    pub(crate) fn begin(
        &mut self,
        tables: &B::Tables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        self.plan_batch(tables, layout)?;
        self.embed()
    }

    fn plan_batch(&mut self, tables: &B::Tables, layout: &BatchLayout) -> Result<(), DeviceError> {
        self.begin_topk(layout);
        self.backend.plan(&mut self.plan, tables, layout)
    }

    fn begin_topk(&mut self, layout: &BatchLayout) {
        if let Some(topk) = &mut self.topk {
            topk.begin_step(layout);
        }
    }

    fn embed(&mut self) -> Result<(), DeviceError> {
        self.backend.embed(&self.weights.embedding, &self.plan, &mut self.acts.x)
    }

    /// Decides about the next layer by queries that are made from what this one begins with.
    fn speculate(
        &mut self,
        idx: usize,
        store: &mut KvStore<B>,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        let (b, acts, plan) = (&*self.backend, &mut self.acts, &self.plan);
        let topk = self.topk.as_mut().filter(|topk| topk.is_speculating());
        let (Some(pair), Some(layer), Some(topk)) =
            (&mut acts.deciding, self.weights.layers.get(idx + 1), topk)
        else {
            return Ok(());
        };
        let next = &mut pair[idx % 2];
        let (rows, eps) = (layout.n_rows(), self.config.norm_eps);
        let norm = Norm { x: &acts.x, weight: &layer.attn_norm, eps };
        let n_queries = (self.config.n_heads * self.config.head_dim) as usize;
        let weight = layer.deciding.as_ref().unwrap_or(&layer.qkv);
        b.norm_matmul_first(&norm, weight, n_queries, rows, &mut acts.h, next)?;
        layer.attention.prepare_queries(b, plan, store, next)?;
        let layer = TopKLayer { idx: idx + 1, dense: &layer.attention };
        topk.decide_ahead(b, plan, &layer, store, next)
    }

    /// A layer's queries, keys and values; the latter go to the store.
    pub(crate) fn project(
        &mut self,
        idx: usize,
        store: &mut KvStore<B>,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        self.queries_keys_values(idx, layout)?;
        let (b, at) = (&*self.backend, Some(LayerIdx(idx as u32)));
        b.begin_stage("append", at);
        let layer = &self.weights.layers[idx].attention;
        layer.append(b, &self.plan, store, &mut self.acts.qkv)
    }

    fn queries_keys_values(&mut self, idx: usize, layout: &BatchLayout) -> Result<(), DeviceError> {
        let (b, acts, layer) = (&*self.backend, &mut self.acts, &self.weights.layers[idx]);
        let (rows, eps) = (layout.n_rows(), self.config.norm_eps);
        let norm = Norm { x: &acts.x, weight: &layer.attn_norm, eps };
        b.begin_stage("qkv", Some(LayerIdx(idx as u32)));
        b.norm_matmul(&norm, &layer.qkv, rows, &mut acts.h, &mut acts.qkv)
    }

    /// A layer's attention over the store, to which its keys and values go.
    fn attend(
        &mut self,
        idx: usize,
        store: &mut KvStore<B>,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        if self.topk.is_some() {
            self.project(idx, store, layout)?;
        } else {
            self.queries_keys_values(idx, layout)?;
        }
        let (b, acts, plan) = (&*self.backend, &mut self.acts, &self.plan);
        let dense = &self.weights.layers[idx].attention;
        b.begin_stage("attend", Some(LayerIdx(idx as u32)));
        let Some(topk) = &mut self.topk else {
            return dense.run(b, plan, store, &mut acts.qkv, &mut acts.attended);
        };
        let layer = TopKLayer { idx, dense };
        topk.attend(b, plan, &layer, store, (&acts.qkv, &mut acts.attended))
    }

    /// The rest of a layer, after attention.
    pub(crate) fn finish_layer(
        &mut self,
        idx: usize,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        let (b, acts, layer) = (&*self.backend, &mut self.acts, &self.weights.layers[idx]);
        let (rows, eps) = (layout.n_rows(), self.config.norm_eps);
        let at = Some(LayerIdx(idx as u32));
        b.begin_stage("out", at);
        b.matmul_add(&layer.out, &acts.attended, rows, &mut acts.x)?;
        b.begin_stage("gate and up", at);
        let norm = Norm { x: &acts.x, weight: &layer.ffn_norm, eps };
        let (f, scratch) = (self.config.ff as usize, (&mut acts.h, &mut acts.gate_up));
        b.norm_gated_matmul(&norm, &layer.gate_up, f, rows, scratch, &mut acts.gated)?;
        b.begin_stage("down", at);
        b.matmul_add(&layer.down, &acts.gated, rows, &mut acts.x)
    }

    /// The logits of the rows that they are wanted for.
    pub(crate) fn logits(&mut self, layout: &BatchLayout) -> Result<&B::Buf, DeviceError> {
        let outputs = layout.output_rows.len();
        if outputs > 0 {
            self.backend.begin_stage("logits", None);
            // Not in one with the product: [`Model::hidden`] shows the states.
            self.output_states(layout)?;
            let head = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
            self.backend.matmul(head, &self.acts.last_h, outputs, &mut self.acts.logits)?;
        }
        Ok(&self.acts.logits)
    }

    /// The hidden states of the rows that outputs are wanted for, after the last norm.
    fn output_states(&mut self, layout: &BatchLayout) -> Result<(), DeviceError> {
        let (b, acts) = (&*self.backend, &mut self.acts);
        let (outputs, d) = (layout.output_rows.len(), self.config.hidden as usize);
        let (norm, eps) = (&self.weights.output_norm, self.config.norm_eps);
        b.gather_rows(&self.plan, &acts.x, d, &mut acts.last)?;
        b.norm(&acts.last, norm, eps, outputs, &mut acts.last_h)
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
            deciding: None,
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

/// Layers and heads of a model, for top-k attention.
pub fn topk_shape(config: &ModelConfig) -> TopKShape {
    TopKShape {
        n_layers: config.n_layers as usize,
        n_kv_layers: config.n_kv_layers() as usize,
        n_kv_heads: config.n_kv_heads as usize,
        group: (config.n_heads / config.n_kv_heads) as usize,
        head_dim: config.head_dim as usize,
    }
}
