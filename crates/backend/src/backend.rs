//! What a device does.

use nuthatch_types::{
    HostReads, KvDtype, KvShape, KvSlots, LayerIdx, PageCopy, PageImage, PageShift, Slot,
};

use crate::{
    Ask, AttnSpec, BatchLayout, Bring, Chooser, Decided, DecidedPlaces, Deciding, DeviceError,
    Digest, Draw, HostMatrix, Near, NearCounts, Norm, PageLayout, Pass, Pick, PlanShape, Rules,
};

/// A device that can run the model.
///
/// Operations are ordered on one stream. An operation returns when it is queued, not when it is
/// done; only [`Backend::read`] and [`Backend::wait`] block.
///
/// Shapes are the caller's duty: a buffer that is too small is a programmer error and panics.
///
/// **Rows do not see each other.** What an operation computes for one row is the same, bit for bit,
/// whatever other rows are in the batch and however a sequence was cut into steps. This is what
/// lets a cached, swapped or recomputed page stand for the one it replaces.
pub trait Backend: Chooser + Send + Sync + 'static {
    /// Activations: a flat array of floats, row after row.
    type Buf: Send;
    /// One or more weight matrices, stacked by rows, in the form that this device multiplies with.
    type Weight: Send;
    /// The keys and values of all layers, in both tiers.
    type Kv: Send;
    /// The tables of slots, one row for each running sequence.
    type Tables: Send;
    /// A batch layout in the form that this device's operations read.
    type Plan: Send;

    /// A short name of the device and what it uses, for people.
    fn name(&self) -> String;
    /// The answer of a device that does not have what would take these operands.
    fn lacks<T>(&self, what: &str, _operands: impl Sized) -> Result<T, DeviceError> {
        Err(DeviceError::Fault(format!("{} has no {what}", self.name())))
    }
    /// Whether products with F16 and BF16 weights take the activations rounded to bf16, as tensor
    /// cores do. Products with F32 weights never do; those with quantised weights may round
    /// activations to eight bits in blocks of 32, or to bf16, which is closer. Attention may then take
    /// queries, and the weights of values, rounded to the type of keys and values.
    fn rounds_activations(&self) -> bool {
        false
    }

    /// Says to a device that measures what follows: a part of a layer, or of the whole pass.
    fn begin_stage(&self, _stage: &'static str, _layer: Option<LayerIdx>) {}

    // Memory.
    /// Allocates `len` floats, all zero.
    fn alloc(&self, len: usize) -> Result<Self::Buf, DeviceError>;
    /// Copies host floats to the start of `target`.
    fn write(&self, target: &mut Self::Buf, source: &[f32]) -> Result<(), DeviceError>;
    /// Copies the start of `source` to the host, and waits.
    fn read(&self, source: &Self::Buf, target: &mut [f32]) -> Result<(), DeviceError>;
    /// Waits until everything queued is done.
    fn wait(&self) -> Result<(), DeviceError>;
    /// Takes matrices with equal columns, to be multiplied as one whose rows are stacked.
    /// The bytes may be dropped afterwards. An error if a type is not supported on this device.
    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<Self::Weight, DeviceError>;
    /// Takes the two matrices of a gated feed-forward layer, `[F, d]` each, for
    /// [`Backend::gated_matmul`] alone.
    fn load_gated(
        &self,
        gate: HostMatrix<'_>,
        up: HostMatrix<'_>,
    ) -> Result<Self::Weight, DeviceError> {
        self.load(&[gate, up])
    }
    /// Whether tables may name slots of the host too, which attention then reads and new keys and
    /// values are written to like those of the device, and what that costs.
    fn host_reads(&self) -> HostReads {
        HostReads::Never
    }
    /// Whether single tokens of such keys and values can be chosen, by [`Backend::keep_digests`].
    fn holds_rows(&self, _dtype: KvDtype) -> bool {
        true
    }
    /// Allocates the pages of both tiers.
    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<Self::Kv, DeviceError>;
    /// Allocates `n_rows` tables of `n_pages` entries.
    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<Self::Tables, DeviceError>;
    /// Writes `slots` to the table `row`, from entry `start` on.
    fn write_table(
        &self,
        tables: &mut Self::Tables,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError>;
    /// Copies whole pages inside a tier and between tiers, in order, all layers and heads.
    fn copy_pages(&self, kv: &mut Self::Kv, copies: &[PageCopy]) -> Result<(), DeviceError>;
    /// How a page's bytes lie when they leave the device; `None` where they cannot.
    fn page_image(&self, _kv: &Self::Kv) -> Option<PageImage> {
        None
    }
    /// Where the numbers of such a page are; `None` where pages cannot leave, or are no floats.
    fn page_layout(&self, _kv: &Self::Kv) -> Option<PageLayout> {
        None
    }
    /// Copies the bytes of one page, all layers and heads and what is kept beside them, to the host,
    /// and waits. `target` has the length of [`Backend::page_image`].
    fn read_page(&self, kv: &Self::Kv, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        self.lacks("pages that can leave it", (kv, slot, target))
    }
    /// Writes one page from bytes that [`Backend::read_page`] gave, with the same layout; or, where an
    /// image has layers, some of them, which begin at the byte `start` of it.
    fn write_page(
        &self,
        kv: &mut Self::Kv,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        self.lacks("pages that can leave it", (kv, slot, start, source))
    }
    /// What is queued from now on sees the pages that [`Backend::write_page`] wrote so far. With `beside`,
    /// it may write while that runs, until the next call: not what that reads or writes.
    fn land_pages(&self, _kv: &mut Self::Kv, _beside: bool) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Writes whole pages from others inside the arena, in order, all layers and heads: values as they
    /// are, keys turned by `by` more positions of the plan's rotation. The plan need not be prepared.
    /// Angles are exact for every `by`; a key is turned in `f32`, and not scaled again.
    fn shift_pages(
        &self,
        plan: &Self::Plan,
        kv: &mut Self::Kv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError>;

    // Once per step.
    /// Allocates a plan for batches up to `shape`.
    fn alloc_plan(&self, shape: &PlanShape) -> Result<Self::Plan, DeviceError>;
    /// Prepares `plan` for a batch. Allocates nothing proportional to the context.
    fn plan(
        &self,
        plan: &mut Self::Plan,
        tables: &Self::Tables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError>;
    /// Whether a pass over `kv` may be queued while the one before runs.
    fn queues_behind(&self, kv: &Self::Kv) -> bool {
        let _ = kv;
        true
    }
    /// The same for a batch whose rows are the output rows of the one before, and whose tokens are those
    /// that [`Backend::draw`] chooses there: `layout.tokens` says nothing. Nothing waits for them.
    fn plan_next(
        &self,
        plan: &mut Self::Plan,
        tables: &Self::Tables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        self.lacks("choice of tokens", (plan, tables, layout))
    }
    /// Begins the operations of the planned batch, from [`Backend::embed`] to the last product, or to
    /// [`Backend::draw`] if [`Backend::plan_draws`] came before. If they are [`Pass::Needed`], the caller
    /// queues them and then calls [`Backend::end_pass`]; if they are [`Pass::Queued`], it leaves them out.
    /// All passes of one plan must be the same operations with the same weights and buffers, for as
    /// many rows and outputs as the batch has, over `kv`: then a device may record one and queue it
    /// again for a batch of the same shape.
    fn begin_pass(&self, _plan: &mut Self::Plan, _kv: &Self::Kv) -> Result<Pass, DeviceError> {
        Ok(Pass::Needed)
    }
    /// Ends the operations of a pass that were needed. Until then they may not have begun.
    fn end_pass(&self, _plan: &mut Self::Plan) -> Result<(), DeviceError> {
        Ok(())
    }

    // Once per layer. `rows` is the number of rows of the batch that the operation covers.
    /// `out[t] = table[token[t]]` for each of the plan's tokens; `out` is `[T, d]`.
    fn embed(
        &self,
        table: &Self::Weight,
        plan: &Self::Plan,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[i] = x[plan.output_rows[i]]`, the rows that logits are wanted for; rows of width `d`.
    fn gather_rows(
        &self,
        plan: &Self::Plan,
        x: &Self::Buf,
        d: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight`; all `[rows, d]`, `weight` is `[d]`.
    fn norm(
        &self,
        x: &Self::Buf,
        weight: &Self::Buf,
        eps: f32,
        rows: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[t] = W x[t] + bias`; `x` is `[rows, cols]`, `out` `[rows, all rows of W]`.
    fn matmul(
        &self,
        w: &Self::Weight,
        x: &Self::Buf,
        rows: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[t] += W x[t] + bias`.
    fn matmul_add(
        &self,
        w: &Self::Weight,
        x: &Self::Buf,
        rows: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[t, i] = silu((G x[t])[i]) * (U x[t])[i]` for a weight that [`Backend::load_gated`] gave,
    /// with the bits of [`Backend::matmul`] and [`Backend::swiglu`]; `out` is `[rows, F]`, and
    /// `gate_up`, which may be changed, `[rows, 2 F]`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn gated_matmul(
        &self,
        w: &Self::Weight,
        x: &Self::Buf,
        f: usize,
        rows: usize,
        gate_up: &mut Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.matmul(w, x, rows, gate_up)?;
        self.swiglu(gate_up, f, rows, out)
    }
    /// [`Backend::matmul`] of [`Backend::norm`], with the bits of both; `h`, which may be changed, is as
    /// large as the norm's input.
    fn norm_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &Self::Weight,
        rows: usize,
        h: &mut Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
        self.matmul(w, h, rows, out)
    }
    /// The first `_n` outputs of each row of [`Backend::norm_matmul`]; the others may be computed or not.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn norm_matmul_first(
        &self,
        norm: &Norm<'_, Self>,
        w: &Self::Weight,
        _n: usize,
        rows: usize,
        h: &mut Self::Buf,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.norm_matmul(norm, w, rows, h, out)
    }
    /// [`Backend::gated_matmul`] of [`Backend::norm`], in the same way.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn norm_gated_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &Self::Weight,
        f: usize,
        rows: usize,
        (h, gate_up): (&mut Self::Buf, &mut Self::Buf),
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
        self.gated_matmul(w, h, f, rows, gate_up, out)
    }
    /// Normalises the heads of q and k if the spec has weights for it, rotates them by their
    /// positions, and writes k and v to the pages of their sequences.
    /// `qkv` is `[T, (H + 2 G) D]`; afterwards its q part is ready for [`Backend::attend`], its k and v
    /// parts are undefined. Of a layer that does not own KV it is `[T, H D]`, and nothing is written.
    fn rope_append(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
    ) -> Result<(), DeviceError>;
    /// `out[t, h] = softmax(scale q[t, h] K) V` over the pages of the row's sequence, causal, and not
    /// further back than the window; `out` is `[T, H D]`, `qkv` as [`Backend::rope_append`] left it.
    ///
    /// Pages that lie wholly before the windows of all rows may hold anything, and their entries of
    /// the table may be any slot.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn attend(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// [`Backend::rope_append`], then [`Backend::attend`], with their bits; afterwards `qkv` is undefined.
    ///
    /// A device that reads every page in `attend` can do the rest on the way.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn rope_attend(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.rope_append(plan, layer, spec, qkv, kv)?;
        self.attend(plan, layer, spec, qkv, kv, out)
    }
    /// Whether this device has [`Backend::draw`]; if not, the caller reads the logits and chooses.
    fn draws(&self) -> bool {
        false
    }
    /// Says how a token is chosen for each output row of the planned batch; before
    /// [`Backend::begin_pass`].
    fn plan_draws(&self, plan: &mut Self::Plan, draws: &[Draw]) -> Result<(), DeviceError> {
        self.lacks("choice of tokens", (plan, draws))
    }
    /// Chooses a token for each row of `logits`, `[draws, vocab]`, which it may change, as was planned.
    /// A row that has a NaN, or no largest finite number, has none.
    fn draw(
        &self,
        plan: &Self::Plan,
        logits: &mut Self::Buf,
        vocab: usize,
    ) -> Result<(), DeviceError> {
        self.lacks("choice of tokens", (plan, logits, vocab))
    }
    /// Waits for the first pass with draws that has ended, as [`Backend::end_pass`] means it, and was
    /// not asked for; there are two such at most. Gives its tokens.
    fn drawn(&self, plan: &mut Self::Plan, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        self.lacks("choice of tokens", (plan, tokens))
    }
    /// `out[t, i] = silu(gate_up[t, i]) * gate_up[t, F + i]`; `gate_up` is `[rows, 2 F]`.
    fn swiglu(
        &self,
        gate_up: &Self::Buf,
        f: usize,
        rows: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;

    // Top-k attention, see [`topk`]. A device need not have it.
    /// Keeps these digests beside the pages from now on; nothing was written to `kv` yet. Wherever
    /// keys are written, copied or turned, their digests follow.
    fn keep_digests(&self, kv: &mut Self::Kv, digests: &[Digest]) -> Result<(), DeviceError> {
        self.lacks("top-k attention", (kv, digests))
    }
    /// Keeps rows of running sequences near from now on, see [`Near`]; nothing was written to `kv` yet.
    fn keep_near(&self, kv: &mut Self::Kv, near: &Near) -> Result<(), DeviceError> {
        self.lacks("second memory for KV", (kv, near))
    }
    /// The table is another sequence's now, or its entries are others: what was near is worth nothing.
    fn forget_near(&self, _kv: &mut Self::Kv, _table_row: u32) {}
    /// Brings rows near, for [`Pick::rows`].
    fn bring(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        kv: &Self::Kv,
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        self.lacks("second memory for KV", (plan, layer, kv, brings))
    }
    /// The same, while other layers compute: only [`Backend::attend_picks`] of this layer waits.
    fn bring_ahead(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        kv: &Self::Kv,
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        self.bring(plan, layer, kv, brings)
    }
    /// Rows that came from far so far.
    fn near_counts(&self, _kv: &Self::Kv) -> NearCounts {
        NearCounts::default()
    }
    /// Copies the keys of one head at places `0..n` of a sequence of the batch, `[n][D]`, to the
    /// host, and waits: for calibration, not for steps.
    fn read_keys(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        kv: &Self::Kv,
        (seq, head, n): (u32, u32, u32),
    ) -> Result<Vec<f32>, DeviceError> {
        self.lacks("top-k attention", (plan, layer, kv, seq, head, n))
    }
    /// Answers each question in `scores`, and waits. `qkv` is as [`Backend::rope_append`] left it.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn score(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        asks: &[Ask],
        scores: &mut [u32],
    ) -> Result<(), DeviceError> {
        self.lacks("top-k attention", (plan, layer, spec, qkv, kv, asks, scores))
    }
    /// As [`Backend::attend`], but the row of a sequence that `picks` names sees only what is picked
    /// for each of its heads. Picks of one sequence are there for all its heads, or for none.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn attend_picks(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        picks: &[Pick<'_>],
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.lacks("top-k attention", (plan, layer, spec, qkv, kv, picks, out))
    }

    // Top-k attention that the device decides about by itself, see [`topk::Rules`].
    /// Decides by these rules from now on, about sequences in up to `n_tables` tables; false if this
    /// device cannot. Digests are kept already.
    fn decide_by(
        &self,
        plan: &Self::Plan,
        kv: &mut Self::Kv,
        rules: &[Rules],
        n_tables: u32,
    ) -> Result<bool, DeviceError> {
        let _ = (plan, kv, rules, n_tables);
        Ok(false)
    }
    /// Says about which rows of the planned batch the device decides; before [`Backend::begin_pass`].
    fn begin_deciding(
        &self,
        plan: &mut Self::Plan,
        kv: &Self::Kv,
        rows: &[Deciding],
    ) -> Result<(), DeviceError> {
        self.lacks("decisions of its own", (plan, kv, rows))
    }
    /// As [`Backend::attend`] in the model's layer `idx`, but rows that the device decides about see what
    /// it has decided.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn attend_deciding(
        &self,
        plan: &Self::Plan,
        (idx, layer): (usize, LayerIdx),
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.lacks("decisions of its own", (plan, idx, layer, spec, qkv, kv, out))
    }
    /// Of [`Backend::rope_append`] at least what queries need: the layer itself appends before it reads.
    fn rope_queries(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
    ) -> Result<(), DeviceError> {
        self.rope_append(plan, layer, spec, qkv, kv)
    }
    /// Decides about the model's layer `idx` by queries that were made for it before its turn, and brings
    /// rows while other operations run; [`Backend::attend_deciding`] of that layer then attends to what
    /// was decided. `qkv` is laid out as the layer's own.
    fn decide_ahead(
        &self,
        plan: &Self::Plan,
        (idx, layer): (usize, LayerIdx),
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
    ) -> Result<(), DeviceError> {
        self.lacks("decisions of its own", (plan, idx, layer, spec, qkv, kv))
    }
    /// What was decided about the rows of [`Backend::begin_deciding`], `[row][layer][G]`, in the first pass with such
    /// rows of which nobody has asked; of no more than two. Waits for no pass behind it.
    fn told(&self, kv: &Self::Kv) -> Result<Vec<Decided>, DeviceError> {
        self.lacks("decisions of its own", kv)
    }
    /// What was last decided about the sequence of a table, `[layer][G]`; waits for everything. To look at.
    fn decided(&self, kv: &Self::Kv, table_row: u32) -> Result<Vec<Decided>, DeviceError> {
        self.lacks("decisions of its own", (kv, table_row))
    }
    /// The places of one head, counting all layers', of a table's sequence; waits. To look at.
    fn decided_places(
        &self,
        kv: &Self::Kv,
        (table_row, head): (u32, usize),
    ) -> Result<DecidedPlaces, DeviceError> {
        self.lacks("decisions of its own", (kv, table_row, head))
    }
}
