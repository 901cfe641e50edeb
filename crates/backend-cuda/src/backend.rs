//! What a GPU does for the model, handed on to where it is done.

use nuthatch_backend::{
    Ask, AttnSpec, Backend, BatchLayout, Bring, Decided, DecidedPlaces, Deciding, DeviceError,
    Digest, Draw, HostMatrix, Near, NearCounts, Norm, PageLayout, Pass, Pick, PlanShape, Rules,
};
use nuthatch_types::{KvDtype, KvShape, KvSlots, LayerIdx, PageCopy, PageShift, Slot};

use crate::Cuda;
use crate::buf::CudaBuf;
use crate::kv::CudaKv;
use crate::launch::attend::can_append;
use crate::launch::matmul::Target;
use crate::launch::{copy, embed, gather, norm, rope, shift, swiglu};
use crate::plan::{CudaPlan, CudaTables};
use crate::sparse::SparseLayer;
use crate::weight::CudaWeight;

impl nuthatch_backend::Chooser for Cuda {}

impl Backend for Cuda {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type Kv = CudaKv;
    type Tables = CudaTables;
    type Plan = CudaPlan;

    fn name(&self) -> String {
        let (name, (major, minor)) = self.device.describe();
        format!("cuda:{} ({name}, {major}.{minor})", self.ordinal)
    }

    fn rounds_activations(&self) -> bool {
        !self.is_exact
    }

    fn begin_stage(&self, stage: &'static str, layer: Option<LayerIdx>) {
        self.device.timing.begin_stage(stage, layer);
    }

    fn alloc(&self, len: usize) -> Result<CudaBuf, DeviceError> {
        let some = |bytes| self.device.alloc(bytes, "activations");
        Ok(CudaBuf::new(len, some(len * 4)?, some(len * 2)?))
    }

    fn write(&self, target: &mut CudaBuf, source: &[f32]) -> Result<(), DeviceError> {
        assert!(source.len() <= target.len, "the values fit the buffer");
        target.set_stale();
        self.device.upload(&target.floats, 0, source)
    }

    fn read(&self, source: &CudaBuf, target: &mut [f32]) -> Result<(), DeviceError> {
        assert!(target.len() <= source.len, "the values are in the buffer");
        self.device.download_from(&source.floats, 0, target)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.device.wait()
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<CudaWeight, DeviceError> {
        self.load_parts(parts)
    }

    fn load_gated(
        &self,
        gate: HostMatrix<'_>,
        up: HostMatrix<'_>,
    ) -> Result<CudaWeight, DeviceError> {
        self.load_pair(gate, up)
    }

    fn holds_rows(&self, dtype: KvDtype) -> bool {
        !dtype.is_coded()
    }

    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<CudaKv, DeviceError> {
        CudaKv::new(&self.device, shape, slots, self.far)
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<CudaTables, DeviceError> {
        CudaTables::new(&self.device, n_rows, n_pages)
    }

    fn write_table(
        &self,
        tables: &mut CudaTables,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        tables.write(&self.device, row, start, slots)
    }

    fn shift_pages(
        &self,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        self.device.check_paged()?;
        shift::shift_pages(&self.device, plan, kv, shifts)?;
        self.code_pages(kv, shifts.iter().map(|shift| shift.target))?;
        self.digest_pages(kv, shifts)
    }

    fn copy_pages(&self, kv: &mut CudaKv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        self.device.check_paged()?;
        copy::copy_pages(&self.device, &self.common.copy, kv, copies)?;
        self.code_pages(kv, copies.iter().map(|copy| copy.target))?;
        self.copy_digests(kv, copies)
    }

    fn page_image(&self, kv: &CudaKv) -> Option<nuthatch_types::PageImage> {
        // Digests would have to be made again, and pages to be found, which nothing asks for yet.
        (kv.sparse.is_none() && !self.has_virtual_kv())
            .then(|| kv.page_image(&self.device.arch(), self.is_exact))
    }

    fn page_layout(&self, kv: &CudaKv) -> Option<PageLayout> {
        kv.page_layout()
    }

    fn read_page(&self, kv: &CudaKv, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        copy::read_page(&self.device, &self.common.copy, kv, slot, target)
    }

    fn write_page(
        &self,
        kv: &mut CudaKv,
        slot: Slot,
        start: usize,
        source: &[u8],
    ) -> Result<(), DeviceError> {
        copy::write_page((&self.device, &self.common.land), kv, (slot, start), source)
    }

    fn land_pages(&self, kv: &mut CudaKv, beside: bool) -> Result<(), DeviceError> {
        copy::land((&self.device, &self.common.land), kv, beside)
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<CudaPlan, DeviceError> {
        CudaPlan::new(&self.device, shape, self.plan_kernels(&shape.kv)?)
    }

    fn plan(
        &self,
        plan: &mut CudaPlan,
        tables: &CudaTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        self.begin_stage("plan", None);
        plan.prepare(&self.device, tables, layout, true)?;
        rope::angles(&self.device, &self.common.angles, plan)
    }

    fn queues_behind(&self, kv: &CudaKv) -> bool {
        // Copies for the next pass would wait for this one, and those that it waits for behind them.
        !kv.has_link()
    }

    fn plan_next(
        &self,
        plan: &mut CudaPlan,
        tables: &CudaTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        plan.prepare(&self.device, tables, layout, false)?;
        rope::angles(&self.device, &self.common.angles, plan)
    }

    fn begin_pass(&self, plan: &mut CudaPlan, kv: &CudaKv) -> Result<Pass, DeviceError> {
        plan.back_tables(&self.device, kv)?;
        self.begin_recording(plan, kv)
    }

    fn end_pass(&self, plan: &mut CudaPlan) -> Result<(), DeviceError> {
        plan.end_beside(&self.device)?;
        plan.recordings.end(&self.device)?;
        plan.tell(&self.device)
    }

    fn embed(
        &self,
        table: &CudaWeight,
        plan: &CudaPlan,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.begin_stage("embed", None);
        embed::embed(&self.device, table, plan, out)
    }

    fn gather_rows(
        &self,
        plan: &CudaPlan,
        x: &CudaBuf,
        d: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        gather::gather_rows(&self.device, &self.common.gather, plan, (x, d), out)
    }

    fn norm(
        &self,
        x: &CudaBuf,
        weight: &CudaBuf,
        eps: f32,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        norm::norm(&self.device, &self.common.norm, (x, weight), (eps, rows), out)
    }

    fn matmul(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: false })
    }

    fn matmul_add(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: true })
    }

    fn gated_matmul(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        f: usize,
        rows: usize,
        gate_up: &mut CudaBuf,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        if w.is_gated {
            assert_eq!(w.rows, 2 * f, "two matrices of this width");
            return self.gated_product(w, x, rows, out);
        }
        self.matmul(w, x, rows, gate_up)?;
        self.swiglu(gate_up, f, rows, out)
    }

    fn norm_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &CudaWeight,
        rows: usize,
        h: &mut CudaBuf,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.norm_matmul_first(norm, w, w.rows, rows, h, out)
    }

    fn norm_matmul_first(
        &self,
        norm: &Norm<'_, Self>,
        w: &CudaWeight,
        n: usize,
        rows: usize,
        h: &mut CudaBuf,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let Some(row) = self.normed_row(w, norm, rows) else {
            self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
            return self.matmul(w, h, rows, out);
        };
        self.normed_product(w, row, n, &mut Target { out, stride: w.rows, is_added: false })
    }

    fn norm_gated_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &CudaWeight,
        f: usize,
        rows: usize,
        (h, gate_up): (&mut CudaBuf, &mut CudaBuf),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        match self.normed_row(w, norm, rows).filter(|_| w.is_gated) {
            Some(row) => self.gated_rows(w, row, out),
            None => {
                self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
                self.gated_matmul(w, h, f, rows, gate_up, out)
            }
        }
    }

    fn rope_append(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut CudaBuf,
        kv: &mut CudaKv,
    ) -> Result<(), DeviceError> {
        self.prepare_near(plan, kv)?;
        self.take_turn(plan, layer, kv)?;
        rope::rope_append(&self.device, plan, layer, spec, (qkv, kv), false)?;
        self.digest_rows(plan, layer, spec, kv)
    }

    fn rope_queries(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut CudaBuf,
        kv: &mut CudaKv,
    ) -> Result<(), DeviceError> {
        self.prepare_near(plan, kv)?;
        rope::rope_append(&self.device, plan, layer, spec, (qkv, kv), true)
    }

    fn attend(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.attention(plan, layer, spec, (qkv, kv)).run(out)
    }

    fn rope_attend(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut CudaBuf,
        kv: &mut CudaKv,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let appends = can_append(plan, spec, kv);
        if !appends {
            self.rope_append(plan, layer, spec, qkv, kv)?;
        }
        self.attention(plan, layer, spec, (qkv, kv)).run_as(appends, out)
    }

    fn draws(&self) -> bool {
        true
    }

    fn plan_draws(&self, plan: &mut CudaPlan, draws: &[Draw]) -> Result<(), DeviceError> {
        plan.draws.plan(&self.device, draws)
    }

    fn draw(&self, plan: &CudaPlan, logits: &mut CudaBuf, vocab: usize) -> Result<(), DeviceError> {
        self.begin_stage("draw", None);
        plan.draws.run(&self.device, &self.common.draw, (logits, vocab))
    }

    fn drawn(&self, plan: &mut CudaPlan, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        plan.draws.drawn(&self.device, tokens)
    }

    fn keep_digests(&self, kv: &mut CudaKv, digests: &[Digest]) -> Result<(), DeviceError> {
        self.keep(kv, digests)
    }

    fn read_keys(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        of: (u32, u32, u32),
    ) -> Result<Vec<f32>, DeviceError> {
        self.keys_of(plan, layer, kv, of)
    }

    fn keep_near(&self, kv: &mut CudaKv, near: &Near) -> Result<(), DeviceError> {
        self.keep_chosen(kv, near)
    }

    fn bring(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        brings: &[Bring<'_>],
    ) -> Result<(), DeviceError> {
        self.bring_chosen((plan, layer, kv), brings)
    }

    fn near_counts(&self, kv: &CudaKv) -> NearCounts {
        kv.near_counts()
    }

    fn score(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        asks: &[Ask],
        scores: &mut [u32],
    ) -> Result<(), DeviceError> {
        self.answer(&SparseLayer { plan, layer, spec, qkv, kv, is_late: false }, asks, scores)
    }

    fn attend_picks(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        picks: &[Pick<'_>],
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.attend_picked(&SparseLayer { plan, layer, spec, qkv, kv, is_late: false }, picks, out)
    }

    fn decide_by(
        &self,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        rules: &[Rules],
        n_tables: u32,
    ) -> Result<bool, DeviceError> {
        self.prepare_deciding(plan, kv, rules, n_tables)
    }

    fn begin_deciding(
        &self,
        plan: &mut CudaPlan,
        kv: &CudaKv,
        rows: &[Deciding],
    ) -> Result<(), DeviceError> {
        self.prepare_rows(plan, kv, rows)
    }

    fn attend_deciding(
        &self,
        plan: &CudaPlan,
        (idx, layer): (usize, LayerIdx),
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.attend_decided(&SparseLayer { plan, layer, spec, qkv, kv, is_late: false }, idx, out)
    }

    fn decide_ahead(
        &self,
        plan: &CudaPlan,
        (idx, layer): (usize, LayerIdx),
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
    ) -> Result<(), DeviceError> {
        self.decide_meanwhile(&SparseLayer { plan, layer, spec, qkv, kv, is_late: false }, idx)
    }

    fn told(&self, kv: &CudaKv) -> Result<Vec<Decided>, DeviceError> {
        self.told_first(kv)
    }

    fn decided(&self, kv: &CudaKv, table_row: u32) -> Result<Vec<Decided>, DeviceError> {
        self.decisions(kv, table_row)
    }

    fn decided_places(&self, kv: &CudaKv, of: (u32, usize)) -> Result<DecidedPlaces, DeviceError> {
        self.places_of(kv, of)
    }

    fn swiglu(
        &self,
        gate_up: &CudaBuf,
        f: usize,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        swiglu::swiglu(&self.device, &self.common.swiglu, gate_up, (f, rows), out)
    }
}
