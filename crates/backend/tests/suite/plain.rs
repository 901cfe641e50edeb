//! The simplest device: `f32` loops as the trait's formulas say, one row at a time.
//!
//! It proves that the suite can be satisfied, and it is the shortest text to learn the trait from.
//! Nothing in it is fast.

use half::{bf16, f16};
use nuthatch_backend::cold;
use nuthatch_backend::quant::dequantize_row;
use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, DeviceError, HostMatrix, PlanShape, RopeSpec, RopeStyle,
};
use nuthatch_types::{
    ColdDtype, HostReads, KvDtype, KvShape, KvSlots, LayerIdx, PageCopy, PageImage, PageShift, Slot,
};

pub(crate) struct Plain;

/// Decoded weights: all rows of all parts.
pub(crate) struct Weight {
    cols: usize,
    /// `[rows][cols]`
    rows: Vec<Vec<f32>>,
    /// `[rows]`
    bias: Vec<f32>,
}

/// Keys and values as floats that the arena's type can hold.
pub(crate) struct Kv {
    shape: KvShape,
    n_slots: usize,
    /// `[layer][kv head][slot][page_len][K|V][D]`
    data: Vec<f32>,
}

impl Kv {
    /// Where the key of one token begins; its value follows.
    fn at(&self, layer: LayerIdx, head: usize, slot: u32, offset: usize) -> usize {
        let (heads, page_len) = (self.shape.n_kv_heads as usize, self.shape.page_len as usize);
        let page = (layer.0 as usize * heads + head) * self.n_slots + slot as usize;
        (page * page_len + offset) * 2 * self.shape.head_dim as usize
    }

    /// Where a page of each layer and head starts.
    fn page_places(&self, slot: Slot) -> impl Iterator<Item = usize> {
        let heads = self.shape.n_kv_heads as usize;
        let all = (0..self.shape.n_layers).flat_map(move |l| (0..heads).map(move |h| (l, h)));
        all.map(move |(layer, head)| self.at(LayerIdx(layer), head, slot.0, 0))
    }

    /// Floats of one token's keys and values.
    pub(crate) fn token_width(&self) -> usize {
        2 * self.shape.n_kv_heads as usize * self.shape.head_dim as usize
    }

    /// Multiplies all keys of the targets.
    pub(crate) fn scale_keys(&mut self, shifts: &[PageShift], factor: f32) {
        let d = self.shape.head_dim as usize;
        for shift in shifts {
            for layer in (0..self.shape.n_layers).map(LayerIdx) {
                for head in 0..self.shape.n_kv_heads as usize {
                    for offset in 0..self.shape.page_len as usize {
                        let at = self.at(layer, head, shift.target.0, offset);
                        self.data[at..at + d].iter_mut().for_each(|x| *x *= factor);
                    }
                }
            }
        }
    }

    /// What is kept of a key or value of one head.
    fn round(&self, layer: LayerIdx, x: &[f32]) -> Vec<f32> {
        let each = |round: fn(f32) -> f32| x.iter().map(|&x| round(x)).collect();
        match self.shape.dtype.of_layer(layer.0) {
            KvDtype::F32 => x.to_vec(),
            KvDtype::F16 => each(|x| f16::from_f32(x).to_f32()),
            KvDtype::Bf16 => each(|x| bf16::from_f32(x).to_f32()),
            KvDtype::Int8(_) => coded(ColdDtype::Int8, x),
            KvDtype::Fp8(_) => coded(ColdDtype::Fp8, x),
        }
    }

    /// Floats of one head's page.
    fn head_page(&self) -> usize {
        self.shape.page_len as usize * 2 * self.shape.head_dim as usize
    }
}

fn coded(code: ColdDtype, x: &[f32]) -> Vec<f32> {
    let (mut codes, mut back) = (vec![0; cold::vector_bytes(code, x.len())], x.to_vec());
    cold::encode(code, x, &mut codes);
    cold::decode(code, &codes, &mut back);
    back
}

pub(crate) struct Plan {
    rope: RopeSpec,
    page_len: usize,
    layout: BatchLayout,
    /// `[T]` sequence of each row.
    seq: Vec<usize>,
    /// `[B]` slots of each sequence.
    slots: Vec<Vec<u32>>,
}

impl Plan {
    /// What cosine and sine are multiplied by.
    pub(crate) fn attention_factor(&self) -> f32 {
        self.rope.attention_factor
    }

    /// Rows of the batch.
    pub(crate) fn n_rows(&self) -> usize {
        self.seq.len()
    }

    /// Slot and offset of a place of a row's own sequence.
    fn place(&self, row: usize, place: usize) -> (u32, usize) {
        (self.slots[self.seq[row]][place / self.page_len], place % self.page_len)
    }

    /// The place of a row in its own sequence.
    fn own_place(&self, row: usize) -> usize {
        let seq = self.seq[row];
        let n_after = self.layout.query_start[seq + 1] as usize - row;
        self.layout.kv_len[seq] as usize - n_after
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn normalise(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
}

fn rotate(head: &mut [f32], rope: &RopeSpec, position: f64, factor: f32) {
    for (i, &inv_freq) in rope.inv_freq.iter().enumerate() {
        let angle = position * f64::from(inv_freq);
        let (sin, cos) = (angle.sin() as f32 * factor, angle.cos() as f32 * factor);
        let (first, second) = match rope.style {
            RopeStyle::Halves => (i, i + rope.inv_freq.len()),
            RopeStyle::Pairs => (2 * i, 2 * i + 1),
        };
        let (x, y) = (head[first], head[second]);
        head[first] = x * cos - y * sin;
        head[second] = x * sin + y * cos;
    }
}

fn decode(part: &HostMatrix<'_>, weight: &mut Weight) -> Result<(), DeviceError> {
    let HostMatrix { dtype, rows, cols, bytes, bias } = *part;
    let row_bytes = dtype.row_bytes(cols).unwrap_or(0);
    if row_bytes == 0 || bytes.len() != rows * row_bytes {
        let (got, expected) = (bytes.len(), rows * row_bytes);
        return Err(DeviceError::WeightSize { dtype, rows, cols, got, expected });
    }
    for bytes in bytes.chunks_exact(row_bytes) {
        let mut row = vec![0.0; cols];
        dequantize_row(dtype, bytes, &mut row);
        weight.rows.push(row);
    }
    match bias {
        Some(bias) => weight.bias.extend_from_slice(bias),
        None => weight.bias.resize(weight.rows.len(), 0.0),
    }
    Ok(())
}

impl nuthatch_backend::Chooser for Plain {}

impl Backend for Plain {
    type Buf = Vec<f32>;
    type Weight = Weight;
    type Kv = Kv;
    type Tables = Vec<Vec<u32>>;
    type Plan = Plan;

    fn name(&self) -> String {
        "plain loops".into()
    }

    fn alloc(&self, len: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(vec![0.0; len])
    }

    fn write(&self, target: &mut Vec<f32>, source: &[f32]) -> Result<(), DeviceError> {
        target[..source.len()].copy_from_slice(source);
        Ok(())
    }

    fn read(&self, source: &Vec<f32>, target: &mut [f32]) -> Result<(), DeviceError> {
        target.copy_from_slice(&source[..target.len()]);
        Ok(())
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<Weight, DeviceError> {
        let mut weight = Weight { cols: parts[0].cols, rows: Vec::new(), bias: Vec::new() };
        for part in parts {
            decode(part, &mut weight)?;
        }
        Ok(weight)
    }

    fn host_reads(&self) -> HostReads {
        HostReads::Near
    }

    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<Kv, DeviceError> {
        let n_slots = slots.total() as usize;
        let mut kv = Kv { shape, n_slots, data: Vec::new() };
        let heads = shape.n_layers as usize * shape.n_kv_heads as usize;
        kv.data.resize(n_slots * heads * kv.head_page(), 0.0);
        Ok(kv)
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<Vec<Vec<u32>>, DeviceError> {
        Ok(vec![vec![0; n_pages as usize]; n_rows as usize])
    }

    fn write_table(
        &self,
        tables: &mut Vec<Vec<u32>>,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        for (entry, slot) in tables[row as usize][start as usize..].iter_mut().zip(slots) {
            *entry = slot.0;
        }
        Ok(())
    }

    fn copy_pages(&self, kv: &mut Kv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        let page = kv.head_page();
        for copy in copies {
            for layer in (0..kv.shape.n_layers).map(LayerIdx) {
                for head in 0..kv.shape.n_kv_heads as usize {
                    let source = kv.at(layer, head, copy.source.0, 0);
                    let target = kv.at(layer, head, copy.target.0, 0);
                    kv.data.copy_within(source..source + page, target);
                }
            }
        }
        Ok(())
    }

    fn page_image(&self, kv: &Kv) -> Option<PageImage> {
        let bytes = kv.page_places(Slot(0)).count() * kv.head_page() * 4;
        let layer_bytes = Some(bytes / kv.shape.n_layers as usize);
        Some(PageImage { bytes, layer_bytes, layout: format!("plain, {:?}", kv.shape) })
    }

    fn read_page(&self, kv: &Kv, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        let page = kv.head_page();
        let places = kv.page_places(slot).flat_map(|start| start..start + page);
        for (bytes, place) in target.as_chunks_mut().0.iter_mut().zip(places) {
            *bytes = kv.data[place].to_le_bytes();
        }
        Ok(())
    }

    fn write_page(
        &self,
        kv: &mut Kv,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        let page = kv.head_page();
        let places: Vec<usize> =
            kv.page_places(slot).flat_map(|start| start..start + page).skip(start / 4).collect();
        for (&bytes, place) in source.as_chunks().0.iter().zip(places) {
            kv.data[place] = f32::from_le_bytes(bytes);
        }
        Ok(())
    }

    fn shift_pages(
        &self,
        plan: &Plan,
        kv: &mut Kv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        let d = kv.shape.head_dim as usize;
        for &PageShift { source, target, by } in shifts {
            self.copy_pages(kv, &[PageCopy { source, target }])?;
            for layer in (0..kv.shape.n_layers).map(LayerIdx) {
                for head in 0..kv.shape.n_kv_heads as usize {
                    for offset in 0..kv.shape.page_len as usize {
                        let at = kv.at(layer, head, target.0, offset);
                        let mut key = kv.data[at..at + d].to_vec();
                        rotate(&mut key, &plan.rope, f64::from(by), 1.0);
                        if by != 0 {
                            key = kv.round(layer, &key);
                        }
                        kv.data[at..at + d].copy_from_slice(&key);
                    }
                }
            }
        }
        Ok(())
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<Plan, DeviceError> {
        Ok(Plan {
            rope: shape.rope.clone(),
            page_len: shape.kv.page_len as usize,
            layout: BatchLayout::default(),
            seq: Vec::new(),
            slots: Vec::new(),
        })
    }

    fn plan(
        &self,
        plan: &mut Plan,
        tables: &Vec<Vec<u32>>,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        plan.layout = layout.clone();
        plan.seq.clear();
        for (seq, rows) in layout.query_start.windows(2).enumerate() {
            plan.seq.resize(rows[1] as usize, seq);
        }
        plan.slots = layout.table_row.iter().map(|&row| tables[row as usize].clone()).collect();
        Ok(())
    }

    fn embed(&self, table: &Weight, plan: &Plan, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        for (&token, out) in plan.layout.tokens.iter().zip(out.chunks_exact_mut(table.cols)) {
            out.copy_from_slice(&table.rows[token as usize]);
        }
        Ok(())
    }

    fn gather_rows(
        &self,
        plan: &Plan,
        x: &Vec<f32>,
        d: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        for (&row, out) in plan.layout.output_rows.iter().zip(out.chunks_exact_mut(d)) {
            out.copy_from_slice(&x[row as usize * d..(row as usize + 1) * d]);
        }
        Ok(())
    }

    fn norm(
        &self,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        eps: f32,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let len = rows * weight.len();
        out[..len].copy_from_slice(&x[..len]);
        out[..len].chunks_exact_mut(weight.len()).for_each(|row| normalise(row, weight, eps));
        Ok(())
    }

    fn matmul(
        &self,
        w: &Weight,
        x: &Vec<f32>,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        out[..rows * w.rows.len()].fill(0.0);
        self.matmul_add(w, x, rows, out)
    }

    fn matmul_add(
        &self,
        w: &Weight,
        x: &Vec<f32>,
        rows: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let rows = x.chunks_exact(w.cols).zip(out.chunks_exact_mut(w.rows.len())).take(rows);
        for (x, out) in rows {
            for ((out, row), bias) in out.iter_mut().zip(&w.rows).zip(&w.bias) {
                *out += dot(row, x) + bias;
            }
        }
        Ok(())
    }

    fn rope_append(
        &self,
        plan: &Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut Vec<f32>,
        kv: &mut Kv,
    ) -> Result<(), DeviceError> {
        let g = if spec.owns_kv { kv.shape.n_kv_heads as usize } else { 0 };
        let (h, d) = (spec.n_heads as usize, kv.shape.head_dim as usize);
        let rows = qkv.chunks_exact_mut((h + 2 * g) * d);
        for ((row, qkv), &position) in rows.enumerate().zip(&plan.layout.positions) {
            for (i, head) in qkv[..(h + g) * d].chunks_exact_mut(d).enumerate() {
                if let Some((q, k)) = spec.head_norms {
                    normalise(head, if i < h { q } else { k }, spec.eps);
                }
                rotate(head, &plan.rope, f64::from(position), plan.rope.attention_factor);
            }
            let (slot, offset) = plan.place(row, plan.own_place(row));
            for i in 0..g {
                let at = kv.at(layer, i, slot, offset);
                let key = kv.round(layer, &qkv[(h + i) * d..][..d]);
                let value = kv.round(layer, &qkv[(h + g + i) * d..][..d]);
                kv.data[at..at + d].copy_from_slice(&key);
                kv.data[at + d..at + 2 * d].copy_from_slice(&value);
            }
        }
        Ok(())
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
        let (h, g) = (spec.n_heads as usize, kv.shape.n_kv_heads as usize);
        let d = kv.shape.head_dim as usize;
        let width = (if spec.owns_kv { h + 2 * g } else { h }) * d;
        for row in 0..plan.n_rows() {
            let end = plan.own_place(row) + 1;
            let start = spec.window.map_or(0, |window| end.saturating_sub(window as usize));
            for i in 0..h {
                let q = &qkv[row * width + i * d..][..d];
                let places: Vec<usize> = (start..end)
                    .map(|place| {
                        let (slot, offset) = plan.place(row, place);
                        kv.at(layer, i / (h / g), slot, offset)
                    })
                    .collect();
                let scores: Vec<f32> =
                    places.iter().map(|&at| dot(q, &kv.data[at..at + d]) * spec.scale).collect();
                let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|score| (score - top).exp()).collect();
                // One sum of thousands loses more than the suite allows, unless it has more bits.
                let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
                let mut sums = vec![0.0f64; d];
                for (&weight, &at) in weights.iter().zip(&places) {
                    for (sum, &v) in sums.iter_mut().zip(&kv.data[at + d..at + 2 * d]) {
                        *sum += f64::from(weight) * f64::from(v);
                    }
                }
                let out = &mut out[(row * h + i) * d..][..d];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = (sum / total) as f32);
            }
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
        let rows = gate_up.chunks_exact(2 * f).zip(out.chunks_exact_mut(f)).take(rows);
        for (row, out) in rows {
            for (i, out) in out.iter_mut().enumerate() {
                *out = row[i] / (1.0 + (-row[i]).exp()) * row[f + i];
            }
        }
        Ok(())
    }
}
