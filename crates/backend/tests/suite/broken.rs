//! Devices with one mistake each, made of a device that works.

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, DeviceError, HostMatrix, PlanShape, RopeStyle,
};
use nuthatch_types::{HostReads, KvShape, KvSlots, LayerIdx, PageCopy, PageImage, PageShift, Slot};

use crate::plain::{self, Kv, Plain, Plan};

/// What is wrong with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Buffers are not zero at first.
    DirtyBuffers,
    /// A token's embedding is its neighbour's.
    WrongToken,
    /// The first rows are gathered, whichever are wanted.
    GatherFirst,
    /// The norm forgets what is added under the root.
    NoEps,
    /// The activation swaps its two inputs.
    SwappedGate,
    /// Biases are dropped.
    NoBias,
    /// One bit of one quantised weight is lost.
    WrongCode,
    /// Bytes of the wrong size are taken.
    AnySize,
    /// `matmul_add` replaces.
    AddReplaces,
    /// Batches sum in another order than single rows, as a second kernel might.
    BatchSums,
    /// A row of NaN spoils the row after it.
    SpoiledNeighbour,
    /// Activations are rounded to six bits before they meet quantised weights.
    CoarseActivations,
    /// Pairs for halves and the other way round.
    SwappedRope,
    /// Cosine and sine are not scaled.
    NoAttentionFactor,
    /// Positions count from one.
    LatePositions,
    /// Heads are not normalised.
    NoHeadNorm,
    /// The window is one token wider.
    WideWindow,
    /// The window is one token narrower.
    NarrowWindow,
    /// There is no window.
    NoWindow,
    /// The scores' scale is off by one in a thousand.
    Scale,
    /// Keys and values of all layers lie in the first.
    OneLayer,
    /// All layers are stored alike.
    OneDtype,
    /// Tables begin at entry 0, whatever was asked.
    TableStart,
    /// The last slot written to a table is lost.
    LostSlot,
    /// Copies run backwards.
    CopiesReversed,
    /// Nothing is copied.
    NoCopy,
    /// All pages on the host lie in one slot.
    OneHostSlot,
    /// Half of a page's bytes come back.
    HalfImage,
    /// Tables name one slot of the host for all.
    OneHostEntry,
    /// A batch of several sequences reads the first one's pages.
    FirstTable,
    /// A decode step is computed a little differently than a prefill.
    DecodeKernel,
    /// Pages are copied and not turned.
    NoShift,
    /// Pages are turned the other way.
    ShiftBack,
    /// Pages are turned by multiples of 64 positions only.
    CoarseShift,
    /// Turned keys are scaled again.
    ShiftScales,
    /// Shifts run backwards.
    ShiftsReversed,
    /// A row's place is taken from its position.
    PlaceByPosition,
    /// Keys before the window get weight zero instead of being left out.
    TouchesAll,
    /// A layer without keys of its own writes its queries over those of the other.
    SharedWrites,
    /// A layer without keys of its own reads its queries as if it had keys.
    SharedWidth,
    /// Appending and attending at once is computed a little differently than one after the other.
    AtOnce,
}

pub(crate) struct Broken(pub(crate) Mistake);

pub(crate) struct Weight {
    inner: plain::Weight,
    is_quantised: bool,
}

impl Broken {
    fn is(&self, mistake: Mistake) -> bool {
        self.0 == mistake
    }

    fn spec<'a>(&self, spec: &AttnSpec<'a, Self>) -> AttnSpec<'a, Plain> {
        let mut window = spec.window;
        if self.is(Mistake::WideWindow) {
            window = window.map(|window| window + 1);
        }
        if self.is(Mistake::NarrowWindow) {
            window = window.map(|window| window.max(2) - 1);
        }
        if self.is(Mistake::NoWindow) {
            window = None;
        }
        AttnSpec {
            n_heads: spec.n_heads,
            scale: if self.is(Mistake::Scale) { spec.scale * 1.001 } else { spec.scale },
            window,
            owns_kv: spec.owns_kv,
            head_norms: spec.head_norms.filter(|_| !self.is(Mistake::NoHeadNorm)),
            eps: spec.eps,
        }
    }

    fn layer(&self, layer: LayerIdx) -> LayerIdx {
        if self.is(Mistake::OneLayer) { LayerIdx(0) } else { layer }
    }

    /// Moves results by about one unit in the last place.
    fn nudge(values: &mut [f32]) {
        values.iter_mut().for_each(|value| *value *= 1.0 + 2.0 * f32::EPSILON);
    }

    /// The batch as this device understands it.
    fn misread(&self, w: &Weight, x: &[f32], rows: usize) -> Vec<f32> {
        let mut x = x.to_vec();
        let cols = x.len() / rows;
        if self.is(Mistake::SpoiledNeighbour) {
            for row in 1..rows {
                if x[row * cols - 1].is_nan() {
                    x[row * cols] = f32::NAN;
                }
            }
        }
        if self.is(Mistake::CoarseActivations) && w.is_quantised {
            for block in x.chunks_mut(32) {
                let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let step = largest / 31.0;
                if step > 0.0 {
                    block.iter_mut().for_each(|x| *x = (*x / step).round() * step);
                }
            }
        }
        x
    }
}

impl nuthatch_backend::Chooser for Broken {}

#[expect(clippy::wildcard_enum_match_arm, reason = "a mistake changes few operations")]
impl Backend for Broken {
    type Buf = Vec<f32>;
    type Weight = Weight;
    type Kv = Kv;
    type Tables = Vec<Vec<u32>>;
    type Plan = Plan;

    fn name(&self) -> String {
        format!("broken: {:?}", self.0)
    }

    fn alloc(&self, len: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(vec![if self.is(Mistake::DirtyBuffers) { 1.0 } else { 0.0 }; len])
    }

    fn write(&self, target: &mut Vec<f32>, source: &[f32]) -> Result<(), DeviceError> {
        Plain.write(target, source)
    }

    fn read(&self, source: &Vec<f32>, target: &mut [f32]) -> Result<(), DeviceError> {
        Plain.read(source, target)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Plain.wait()
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<Weight, DeviceError> {
        let is_quantised = parts.iter().all(|part| part.dtype.block_len() > 1);
        let mut parts = parts.to_vec();
        let mut spoiled: Vec<Vec<u8>> = parts.iter().map(|part| part.bytes.to_vec()).collect();
        for (part, spoiled) in parts.iter_mut().zip(&mut spoiled) {
            if self.is(Mistake::WrongCode) && is_quantised {
                // The last byte of these formats is a code.
                *spoiled.last_mut().expect("a matrix has bytes") ^= 0x10;
                part.bytes = spoiled;
            }
            if self.is(Mistake::NoBias) {
                part.bias = None;
            }
            if self.is(Mistake::AnySize) {
                let row_bytes = part.dtype.row_bytes(part.cols).unwrap_or(1);
                part.rows = part.rows.min(part.bytes.len() / row_bytes);
                part.bytes = &part.bytes[..part.rows * row_bytes];
            }
        }
        Ok(Weight { inner: Plain.load(&parts)?, is_quantised })
    }

    fn host_reads(&self) -> HostReads {
        Plain.host_reads()
    }

    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<Kv, DeviceError> {
        if self.is(Mistake::OneDtype) {
            let dtype = shape.dtype.of_layer(u32::MAX);
            return Plain.alloc_kv(KvShape { dtype, ..shape }, slots);
        }
        Plain.alloc_kv(shape, slots)
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<Vec<Vec<u32>>, DeviceError> {
        Plain.alloc_tables(n_rows, n_pages)
    }

    fn write_table(
        &self,
        tables: &mut Vec<Vec<u32>>,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        match self.0 {
            Mistake::TableStart => Plain.write_table(tables, row, 0, slots),
            Mistake::LostSlot if slots.len() > 1 => {
                Plain.write_table(tables, row, start, &slots[..slots.len() - 1])
            }
            Mistake::OneHostEntry => {
                // The host's slots are behind the twelve of the device.
                let clipped: Vec<Slot> = slots.iter().map(|slot| Slot(slot.0.min(12))).collect();
                Plain.write_table(tables, row, start, &clipped)
            }
            _ => Plain.write_table(tables, row, start, slots),
        }
    }

    fn copy_pages(&self, kv: &mut Kv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        match self.0 {
            Mistake::NoCopy => Ok(()),
            Mistake::CopiesReversed => {
                let copies: Vec<_> = copies.iter().rev().copied().collect();
                Plain.copy_pages(kv, &copies)
            }
            Mistake::OneHostSlot => {
                // The host's slots are behind the twelve of the device.
                let clip = |slot: Slot| Slot(slot.0.min(12));
                let clip = |copy: &PageCopy| PageCopy {
                    source: clip(copy.source),
                    target: clip(copy.target),
                };
                let copies: Vec<_> = copies.iter().map(clip).collect();
                Plain.copy_pages(kv, &copies)
            }
            _ => Plain.copy_pages(kv, copies),
        }
    }

    fn page_image(&self, kv: &Kv) -> Option<PageImage> {
        Plain.page_image(kv)
    }

    fn read_page(&self, kv: &Kv, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        Plain.read_page(kv, slot, target)
    }

    fn write_page(
        &self,
        kv: &mut Kv,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        let n = match self.0 {
            Mistake::HalfImage => source.len() / 2,
            _ => source.len(),
        };
        Plain.write_page(kv, slot, start, &source[..n])
    }

    fn shift_pages(
        &self,
        plan: &Plan,
        kv: &mut Kv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        let mut shifts = shifts.to_vec();
        match self.0 {
            Mistake::NoShift => shifts.iter_mut().for_each(|shift| shift.by = 0),
            Mistake::ShiftBack => shifts.iter_mut().for_each(|shift| shift.by = -shift.by),
            Mistake::CoarseShift => {
                shifts.iter_mut().for_each(|shift| shift.by = shift.by / 64 * 64);
            }
            Mistake::ShiftsReversed => shifts.reverse(),
            _ => {}
        }
        Plain.shift_pages(plan, kv, &shifts)?;
        if self.is(Mistake::ShiftScales) {
            kv.scale_keys(&shifts, plan.attention_factor());
        }
        Ok(())
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<Plan, DeviceError> {
        let mut shape = shape.clone();
        if self.is(Mistake::SwappedRope) {
            shape.rope.style = match shape.rope.style {
                RopeStyle::Halves => RopeStyle::Pairs,
                RopeStyle::Pairs => RopeStyle::Halves,
            };
        }
        if self.is(Mistake::NoAttentionFactor) {
            shape.rope.attention_factor = 1.0;
        }
        Plain.alloc_plan(&shape)
    }

    fn plan(
        &self,
        plan: &mut Plan,
        tables: &Vec<Vec<u32>>,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        let mut layout = layout.clone();
        match self.0 {
            Mistake::WrongToken => layout.tokens.iter_mut().for_each(|token| *token ^= 1),
            Mistake::GatherFirst => {
                layout.output_rows.iter_mut().zip(0..).for_each(|(row, i)| *row = i);
            }
            Mistake::LatePositions => {
                // Wrapped, so that the page stays inside the table.
                layout.positions.iter_mut().for_each(|at| *at = *at / 16 * 16 + (*at + 1) % 16);
            }
            Mistake::PlaceByPosition => {
                // The last row's position, but never beyond the table.
                for (end, rows) in layout.kv_len.iter_mut().zip(layout.query_start.windows(2)) {
                    let room = tables[0].len() as u32 * 16;
                    *end = (layout.positions[rows[1] as usize - 1] + 1).min(room);
                }
            }
            Mistake::FirstTable => {
                let first = layout.table_row[0];
                layout.table_row.fill(first);
            }
            _ => {}
        }
        Plain.plan(plan, tables, &layout)
    }

    fn embed(&self, table: &Weight, plan: &Plan, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        Plain.embed(&table.inner, plan, out)
    }

    fn gather_rows(
        &self,
        plan: &Plan,
        x: &Vec<f32>,
        d: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        Plain.gather_rows(plan, x, d, out)
    }

    fn norm(
        &self,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        eps: f32,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let eps = if self.is(Mistake::NoEps) { f32::MIN_POSITIVE } else { eps };
        Plain.norm(x, weight, eps, rows, out)?;
        if self.is(Mistake::BatchSums) && rows > 1 {
            Broken::nudge(out);
        }
        Ok(())
    }

    fn matmul(
        &self,
        w: &Weight,
        x: &Vec<f32>,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        Plain.matmul(&w.inner, &self.misread(w, x, rows), rows, out)?;
        if self.is(Mistake::BatchSums) && rows > 1 {
            Broken::nudge(out);
        }
        Ok(())
    }

    fn matmul_add(
        &self,
        w: &Weight,
        x: &Vec<f32>,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        match self.0 {
            Mistake::AddReplaces => Plain.matmul(&w.inner, x, rows, out),
            _ => Plain.matmul_add(&w.inner, x, rows, out),
        }
    }

    fn rope_append(
        &self,
        plan: &Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Vec<f32>,
        kv: &mut Kv,
    ) -> Result<(), DeviceError> {
        let inner = self.spec(spec);
        if self.is(Mistake::SharedWrites) && !spec.owns_kv {
            let mut wide = Vec::new();
            let width = qkv.len() / plan.n_rows();
            for row in qkv.chunks_exact(width) {
                wide.extend_from_slice(row);
                wide.extend(row.iter().cycle().take(kv.token_width()));
            }
            let owner = AttnSpec { owns_kv: true, ..inner };
            Plain.rope_append(plan, self.layer(layer), &owner, &mut wide, kv)?;
        }
        Plain.rope_append(plan, self.layer(layer), &self.spec(spec), qkv, kv)
    }

    fn attend(
        &self,
        plan: &Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Vec<f32>,
        kv: &Kv,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        if self.is(Mistake::SharedWidth) && !spec.owns_kv {
            let mut wide = qkv.clone();
            wide.resize(qkv.len() + plan.n_rows() * kv.token_width(), 0.0);
            let owner = AttnSpec { owns_kv: true, ..self.spec(spec) };
            return Plain.attend(plan, self.layer(layer), &owner, &wide, kv, out);
        }
        Plain.attend(plan, self.layer(layer), &self.spec(spec), qkv, kv, out)?;
        if self.is(Mistake::TouchesAll) {
            let mut all = vec![0.0; out.len()];
            let unbounded = AttnSpec { window: None, ..self.spec(spec) };
            Plain.attend(plan, self.layer(layer), &unbounded, qkv, kv, &mut all)?;
            out.iter_mut().zip(all).for_each(|(out, all)| *out += 0.0 * all);
        }
        let one_row = plan.n_rows() == 1;
        if self.is(Mistake::DecodeKernel) && one_row {
            Broken::nudge(out);
        }
        Ok(())
    }

    fn rope_attend(
        &self,
        plan: &Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Vec<f32>,
        kv: &mut Kv,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.rope_append(plan, layer, spec, qkv, kv)?;
        self.attend(plan, layer, spec, qkv, kv, out)?;
        if self.is(Mistake::AtOnce) {
            Broken::nudge(out);
        }
        Ok(())
    }

    fn swiglu(
        &self,
        gate_up: &Vec<f32>,
        f: usize,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let mut gate_up = gate_up.clone();
        if self.is(Mistake::SwappedGate) {
            gate_up.chunks_exact_mut(2 * f).for_each(|row| row.rotate_left(f));
        }
        Plain.swiglu(&gate_up, f, rows, out)?;
        if self.is(Mistake::BatchSums) && rows > 1 {
            Broken::nudge(out);
        }
        Ok(())
    }
}
