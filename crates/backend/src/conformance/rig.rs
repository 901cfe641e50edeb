//! An arena, tables and a plan of one shape, and the steps that sequences take on them.

use nuthatch_types::{KvDtype, KvShape, KvSlots, LayerIdx, LayerSet, PageShift, Slot};

use crate::{
    Ask, AttnSpec, Backend, BatchLayout, Choosing, Digest, Pick, PlanShape, RopeSpec, RopeStyle,
};

use super::compare::{download, unwritten, upload};
use super::inputs::Random;

/// Tokens of one page, as the engine has them.
pub(super) const PAGE_LEN: usize = 16;
/// The layer that checks use; the arena has one before and one after it.
pub(super) const LAYER: LayerIdx = LayerIdx(1);
/// Layers of the arena.
pub(super) const N_LAYERS: u32 = 3;
/// Rows of one step while a context is written without being attended.
const APPEND_ROWS: usize = 256;

/// Largest element of queries and keys that the device computes on, against a deviation of one.
const LARGEST: f32 = 6.0;

/// Heads of one attention layer.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) kv: KvShape,
    pub(super) n_heads: usize,
    pub(super) rope: RopeSpec,
    pub(super) window: Option<u32>,
    /// Weights of the query heads' norm and of the key heads'.
    pub(super) norms: Option<(Vec<f32>, Vec<f32>)>,
}

/// Eight bits in all layers.
pub(super) const INT8: KvDtype = KvDtype::Int8(LayerSet::NONE);
pub(super) const FP8: KvDtype = KvDtype::Fp8(LayerSet::NONE);

/// All types of keys and values.
pub(super) const DTYPES: [KvDtype; 5] = [KvDtype::F16, KvDtype::Bf16, KvDtype::F32, INT8, FP8];

/// Added to the mean square of a head.
pub(super) const EPS: f32 = 1e-6;

impl Case {
    /// `group` query heads for each of `n_kv_heads`, no rotation, no norms, no window.
    pub(super) fn new(dtype: KvDtype, group: usize, n_kv_heads: usize, d: usize) -> Self {
        let kv = KvShape {
            n_layers: N_LAYERS,
            n_kv_heads: n_kv_heads as u32,
            head_dim: d as u32,
            page_len: PAGE_LEN as u32,
            dtype,
        };
        let rope = RopeSpec {
            inv_freq: vec![0.0; d / 2],
            attention_factor: 1.0,
            style: RopeStyle::Halves,
        };
        Case { kv, n_heads: group * n_kv_heads, rope, window: None, norms: None }
    }

    /// Rotates the first `width` elements of each head, with frequencies from 1 downwards.
    pub(super) fn rotated(mut self, style: RopeStyle, width: usize) -> Self {
        let pairs = width / 2;
        self.rope.inv_freq = (0..pairs).map(|i| 1e4f32.powf(-(i as f32) / pairs as f32)).collect();
        self.rope.style = style;
        self
    }

    pub(super) fn windowed(mut self, window: u32) -> Self {
        self.window = Some(window);
        self
    }

    /// Normalises heads with weights near one.
    pub(super) fn normed(mut self) -> Self {
        let mut random = Random::new(11);
        let d = self.d();
        let mut weights = || (0..d).map(|_| 1.0 + 0.5 * random.unit()).collect();
        self.norms = Some((weights(), weights()));
        self
    }

    pub(super) fn d(&self) -> usize {
        self.kv.head_dim as usize
    }

    pub(super) fn n_kv_heads(&self) -> usize {
        self.kv.n_kv_heads as usize
    }

    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads()
    }

    /// Floats of a row of q, k and v.
    pub(super) fn qkv_width(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads()) * self.d()
    }

    /// Floats of a row of the output.
    pub(super) fn out_width(&self) -> usize {
        self.n_heads * self.d()
    }

    /// Whether the device computes on queries and keys before it stores them.
    pub(super) fn changes_heads(&self) -> bool {
        let is_rotated = self.rope.inv_freq.iter().any(|&inv_freq| inv_freq != 0.0);
        is_rotated || self.norms.is_some() || self.rope.attention_factor != 1.0
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.d() as f32).sqrt()
    }

    pub(super) fn name(&self) -> String {
        format!(
            "{} heads in groups of {}, width {}, {}, {:?} over {}, window {:?}, norms {}",
            self.n_heads,
            self.group(),
            self.d(),
            self.kv.dtype,
            self.rope.style,
            2 * self.rope.inv_freq.len(),
            self.window,
            self.norms.is_some(),
        )
    }
}

/// The tokens of one sequence.
#[derive(Clone)]
pub(super) struct Sequence {
    /// Place of the first row of `qkv`; what lies before it must be out of every window.
    pub(super) first: usize,
    /// How far positions are beyond places.
    pub(super) turn: usize,
    /// `[rows, qkv_width]` before rotation.
    pub(super) qkv: Vec<f32>,
    pub(super) rows: usize,
}

impl Sequence {
    pub(super) fn new(random: &mut Random, case: &Case, rows: usize) -> Self {
        let mut qkv = random.values(rows * case.qkv_width());
        if case.changes_heads() {
            // A key that is rounded after it was computed may fall on either side of a tie. With
            // outliers in both factors of a score, that alone would excuse a wrong result.
            for row in qkv.chunks_exact_mut(case.qkv_width()) {
                let v_start = row.len() - case.n_kv_heads() * case.d();
                row[..v_start].iter_mut().for_each(|x| *x = x.clamp(-LARGEST, LARGEST));
            }
        }
        Sequence { first: 0, turn: 0, qkv, rows }
    }

    /// The position that a row is rotated to.
    pub(super) fn position(&self, row: usize) -> usize {
        self.first + row + self.turn
    }

    /// Pages of its table.
    pub(super) fn n_pages(&self) -> usize {
        (self.first + self.rows).div_ceil(PAGE_LEN)
    }
}

/// What one sequence does in one step: rows `start..end` of it.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) seq: &'a Sequence,
    pub(super) table: u32,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Slots of the host behind those of the device.
pub(super) const N_HOST_SLOTS: u32 = 3;

/// How large a rig is; `n_slots` are the device's.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) n_slots: usize,
    pub(super) n_tables: usize,
    pub(super) max_rows: usize,
    pub(super) max_context: usize,
}

/// One device with its arena, all slots of the device filled with NaN and infinities.
pub(super) struct Rig<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) case: &'a Case,
    pub(super) kv: B::Kv,
    tables: B::Tables,
    /// A table that no sequence has.
    spare_table: u32,
    plan: B::Plan,
    norms: Option<(B::Buf, B::Buf)>,
}

impl<'a, B: Backend> Rig<'a, B> {
    pub(super) fn new(b: &'a B, case: &'a Case, room: Room) -> Self {
        Self::with_digests(b, case, room, None)
    }

    /// The same with digests beside the pages.
    pub(super) fn with_digests(
        b: &'a B,
        case: &'a Case,
        room: Room,
        digests: Option<&[Digest]>,
    ) -> Self {
        // The last table is for the sequence that fills the arena.
        let n_tables = room.n_tables as u32 + 1;
        let context = room.max_context.max(room.n_slots * PAGE_LEN);
        let plan_shape = PlanShape {
            max_rows: room.max_rows.max(APPEND_ROWS),
            max_seqs: room.n_tables.max(1),
            max_context: context,
            n_heads: case.n_heads,
            kv: case.kv,
            rope: case.rope.clone(),
        };
        let slots = KvSlots { device: room.n_slots as u32, host: N_HOST_SLOTS };
        let mut rig = Rig {
            b,
            case,
            kv: b.alloc_kv(case.kv, slots).expect("a small arena fits"),
            tables: b
                .alloc_tables(n_tables, context.div_ceil(PAGE_LEN) as u32)
                .expect("small tables fit"),
            spare_table: n_tables - 1,
            plan: b.alloc_plan(&plan_shape).expect("a small plan fits"),
            norms: case.norms.as_ref().map(|(q, k)| (upload(b, q), upload(b, k))),
        };
        if let Some(digests) = digests {
            b.keep_digests(&mut rig.kv, digests).expect("small digests fit");
        }
        let slots: Vec<Slot> = (0..room.n_slots as u32).map(Slot).collect();
        rig.poison(&slots);
        rig
    }

    /// Writes what must never be read to every token of these slots.
    pub(super) fn poison(&mut self, slots: &[Slot]) {
        const POISON: [f32; 5] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN];
        let table = self.spare_table;
        self.write_table(table, 0, slots);
        let rows = slots.len() * PAGE_LEN;
        let n = rows * self.case.qkv_width();
        let qkv = (0..n).map(|i| POISON[i % POISON.len()]).collect();
        let seq = Sequence { first: 0, turn: 0, qkv, rows };
        for layer in 0..N_LAYERS {
            self.append(&seq, table, rows, LayerIdx(layer));
        }
    }

    /// Turns pages, in order.
    pub(super) fn shift(&mut self, shifts: &[PageShift]) {
        self.b.shift_pages(&self.plan, &mut self.kv, shifts).expect("shift_pages runs");
    }

    pub(super) fn write_table(&mut self, table: u32, start: u32, slots: &[Slot]) {
        self.b.write_table(&mut self.tables, table, start, slots).expect("tables are written");
    }

    /// Writes keys and values of the first `end` rows of a sequence, and attends to nothing.
    pub(super) fn append(&mut self, seq: &Sequence, table: u32, end: usize, layer: LayerIdx) {
        for start in (0..end).step_by(APPEND_ROWS) {
            let end = end.min(start + APPEND_ROWS);
            self.rotate(&[Part { seq, table, start, end }], layer);
        }
    }

    /// Prepares the plan and appends; gives back the buffer of q, k and v.
    pub(super) fn rotate(&mut self, parts: &[Part<'_>], layer: LayerIdx) -> B::Buf {
        self.rotate_as(parts, layer, true)
    }

    fn rotate_as(&mut self, parts: &[Part<'_>], layer: LayerIdx, owns_kv: bool) -> B::Buf {
        let mut qkv = self.plan_rows(parts, owns_kv);
        let spec = spec(self.case, &self.norms, owns_kv);
        self.b
            .rope_append(&self.plan, layer, &spec, &mut qkv, &mut self.kv)
            .expect("rope_append runs");
        qkv
    }

    /// Prepares the plan, and gives the rows as they are before rotation.
    fn plan_rows(&mut self, parts: &[Part<'_>], owns_kv: bool) -> B::Buf {
        let width = self.case.qkv_width();
        let n_used = if owns_kv { width } else { self.case.out_width() };
        let rows = |part: &Part<'_>| {
            let rows = &part.seq.qkv[part.start * width..part.end * width];
            rows.chunks_exact(width).flat_map(|row| row[..n_used].to_vec()).collect::<Vec<_>>()
        };
        let qkv: Vec<f32> = parts.iter().flat_map(rows).collect();
        self.b.plan(&mut self.plan, &self.tables, &layout(parts)).expect("the batch is planned");
        upload(self.b, &qkv)
    }

    /// [`Rig::step`] by the one operation that does all of it.
    pub(super) fn step_at_once(&mut self, parts: &[Part<'_>]) -> Vec<Vec<f32>> {
        let mut qkv = self.plan_rows(parts, true);
        let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
        let mut out = unwritten(self.b, rows * self.case.out_width());
        let spec = spec(self.case, &self.norms, true);
        self.b
            .rope_attend(&self.plan, LAYER, &spec, &mut qkv, &mut self.kv, &mut out)
            .expect("rope_attend runs");
        self.outputs_of(parts, &out)
    }

    /// One whole step of a layer that reads the keys and values of [`LAYER`].
    pub(super) fn step_shared(&mut self, parts: &[Part<'_>]) -> Vec<Vec<f32>> {
        let qkv = self.rotate_as(parts, LAYER, false);
        self.attend_as(parts, &qkv, LAYER, false)
    }

    /// One whole step on [`LAYER`]: each part's outputs, `[rows, out_width]`.
    pub(super) fn step(&mut self, parts: &[Part<'_>]) -> Vec<Vec<f32>> {
        let qkv = self.rotate(parts, LAYER);
        self.attend(parts, &qkv, LAYER)
    }

    /// Attends with the buffer that [`Rig::rotate`] gave for the same parts.
    pub(super) fn attend(
        &self,
        parts: &[Part<'_>],
        qkv: &B::Buf,
        layer: LayerIdx,
    ) -> Vec<Vec<f32>> {
        self.attend_as(parts, qkv, layer, true)
    }

    /// The answers to questions about [`LAYER`], with the buffer that [`Rig::rotate`] gave.
    pub(super) fn score(&self, qkv: &B::Buf, asks: &[Ask], n: usize) -> Vec<u32> {
        let mut scores = vec![u32::MAX; n];
        let spec = spec(self.case, &self.norms, true);
        self.b
            .score(&self.plan, LAYER, &spec, qkv, &self.kv, asks, &mut scores)
            .expect("score runs");
        scores
    }

    /// Attends on [`LAYER`] to what is picked, with the buffer that [`Rig::rotate`] gave.
    pub(super) fn attend_picks(&self, qkv: &B::Buf, picks: &[Pick<'_>], rows: usize) -> Vec<f32> {
        let width = self.case.out_width();
        let mut out = unwritten(self.b, rows * width);
        let spec = spec(self.case, &self.norms, true);
        self.b
            .attend_picks(&self.plan, LAYER, &spec, qkv, &self.kv, picks, &mut out)
            .expect("attend_picks runs");
        download(self.b, &out, rows * width)
    }

    /// The same of heads some of which have yet to choose.
    pub(super) fn attend_choosing<C: Choosing>(
        &self,
        qkv: &B::Buf,
        heads: (&C, &mut [C::Head]),
        rows: usize,
    ) -> Vec<f32> {
        let width = self.case.out_width();
        let mut out = unwritten(self.b, rows * width);
        let spec = spec(self.case, &self.norms, true);
        self.b
            .attend_choosing(&self.plan, LAYER, &spec, qkv, &self.kv, heads, &mut out)
            .expect("attend_choosing runs");
        download(self.b, &out, rows * width)
    }

    fn attend_as(
        &self,
        parts: &[Part<'_>],
        qkv: &B::Buf,
        layer: LayerIdx,
        owns_kv: bool,
    ) -> Vec<Vec<f32>> {
        let width = self.case.out_width();
        let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
        let mut out = unwritten(self.b, rows * width);
        let spec = spec(self.case, &self.norms, owns_kv);
        self.b.attend(&self.plan, layer, &spec, qkv, &self.kv, &mut out).expect("attend runs");
        self.outputs_of(parts, &out)
    }

    /// A batch's outputs, part by part.
    fn outputs_of(&self, parts: &[Part<'_>], out: &B::Buf) -> Vec<Vec<f32>> {
        let width = self.case.out_width();
        let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
        let out = download(self.b, out, rows * width);
        let mut rest = &out[..];
        parts
            .iter()
            .map(|part| {
                let (this, after) = rest.split_at((part.end - part.start) * width);
                rest = after;
                this.to_vec()
            })
            .collect()
    }
}

fn spec<'a, B: Backend>(
    case: &Case,
    norms: &'a Option<(B::Buf, B::Buf)>,
    owns_kv: bool,
) -> AttnSpec<'a, B> {
    AttnSpec {
        n_heads: case.n_heads as u32,
        scale: case.scale(),
        window: case.window,
        owns_kv,
        head_norms: norms.as_ref().map(|(q, k)| (q, k)),
        eps: EPS,
    }
}

/// The layout of a batch of parts; logits are wanted for the last row of each.
pub(super) fn layout(parts: &[Part<'_>]) -> BatchLayout {
    let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
    for part in parts {
        let rows = part.start..part.end;
        layout.tokens.extend(rows.clone().map(|row| (part.seq.first + row) as u32 % 7));
        layout.kv_len.push((part.seq.first + part.end) as u32);
        layout.positions.extend(rows.map(|row| part.seq.position(row) as u32));
        layout.query_start.push(layout.tokens.len() as u32);
        layout.table_row.push(part.table);
        layout.output_rows.push(layout.tokens.len() as u32 - 1);
    }
    layout
}

/// A plan for operations that attend to nothing.
pub(super) fn small_plan<B: Backend>(b: &B, layout: &BatchLayout) -> B::Plan {
    let case = Case::new(KvDtype::F32, 1, 1, 32);
    let shape = PlanShape {
        max_rows: 64,
        max_seqs: 4,
        max_context: 64,
        n_heads: case.n_heads,
        kv: case.kv,
        rope: case.rope,
    };
    let tables = b.alloc_tables(1, 4).expect("a small table fits");
    let mut plan = b.alloc_plan(&shape).expect("a small plan fits");
    b.plan(&mut plan, &tables, layout).expect("the batch is planned");
    plan
}

/// Slots `0..n` in random order.
pub(super) fn shuffled_slots(random: &mut Random, n: usize) -> Vec<Slot> {
    let mut slots: Vec<Slot> = (0..n as u32).map(Slot).collect();
    random.shuffle(&mut slots);
    slots
}
