//! An arena with filled pages, and what is needed to attend to them.

use std::error::Error;

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, Digest, Pass, PlanShape, RopeSpec, RopeStyle,
};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{Clock as _, KvShape, KvSlots, LayerIdx, Slot, SystemClock};

use crate::{Outcome, random, time};

const PAGE_LEN: usize = 16;

/// An arena with filled pages, and what is needed to attend to them.
pub(crate) struct Rig<'a> {
    cuda: &'a Cuda,
    shape: KvShape,
    pub(crate) kv: <Cuda as Backend>::Kv,
    pub(crate) tables: <Cuda as Backend>::Tables,
    pub(crate) plan: <Cuda as Backend>::Plan,
    pub(crate) n_seqs: usize,
    n_heads: u32,
    plan_shape: PlanShape,
    /// Bytes of the device's memory, by what they are for.
    pub(crate) memory: Vec<(&'static str, usize)>,
}

impl<'a> Rig<'a> {
    /// Sequences of `depth` random tokens, on pages in a scattered order.
    pub(crate) fn new(
        cuda: &'a Cuda,
        heads: (KvShape, u32),
        sizes: (usize, usize, usize),
    ) -> Result<Self, Box<dyn Error>> {
        Self::with(cuda, heads, sizes, (false, None))
    }

    /// The same, with the pages of a sequence one after the other if they are to be ordered, and with
    /// digests beside them if there are any.
    pub(crate) fn with(
        cuda: &'a Cuda,
        (shape, n_heads): (KvShape, u32),
        (n_seqs, depth, rows): (usize, usize, usize),
        (is_ordered, digests): (bool, Option<&[Digest]>),
    ) -> Result<Self, Box<dyn Error>> {
        const FILL: usize = 1024;
        let context = (depth + rows).next_multiple_of(PAGE_LEN);
        let pages = context / PAGE_LEN;
        let n_slots = n_seqs * pages;
        let rope = RopeSpec {
            inv_freq: vec![0.01; shape.head_dim as usize / 2],
            attention_factor: 1.0,
            style: RopeStyle::Halves,
        };
        let plan_shape = PlanShape {
            max_rows: rows.max(FILL).max(n_seqs),
            max_seqs: n_seqs,
            max_context: context,
            n_heads: n_heads as usize,
            kv: shape,
            rope,
        };
        let (mut free, _) = cuda.memory()?;
        let mut memory = Vec::new();
        let mut taken = |name| {
            let before = std::mem::replace(&mut free, cuda.memory()?.0);
            memory.push((name, before.saturating_sub(free)));
            Outcome::Ok(())
        };
        let mut tables = cuda.alloc_tables(n_seqs as u32, pages as u32)?;
        // A step that is prime to the number of slots visits each of them once.
        let scattered = [7919, 7907, 7901].into_iter().find(|p| !n_slots.is_multiple_of(*p));
        let step = scattered.filter(|_| !is_ordered && !cuda.has_virtual_kv()).unwrap_or(1);
        for seq in 0..n_seqs {
            let slot = |page: usize| Slot(((seq * pages + page) * step % n_slots) as u32);
            let slots: Vec<Slot> = (0..pages).map(slot).collect();
            cuda.write_table(&mut tables, seq as u32, 0, &slots)?;
        }
        let mut kv = cuda.alloc_kv(shape, KvSlots::on_device(n_slots as u32))?;
        let clock = SystemClock::start();
        let begin = clock.now();
        let backed = cuda.back(&kv, 0..n_slots as u32)?;
        cuda.wait()?;
        if cuda.has_virtual_kv() {
            let (gib, took) = (backed as f64 / f64::from(1 << 30), clock.now() - begin);
            println!("{gib:.2} GiB put behind addresses in {:.1} ms", took.as_secs_f64() * 1e3);
        }
        taken("pages, or copies, heads and layers that stay")?;
        if let Some(digests) = digests {
            cuda.keep_digests(&mut kv, digests)?;
            taken("digests")?;
        }
        let plan = cuda.alloc_plan(&plan_shape)?;
        let mut rig = Rig { cuda, shape, kv, tables, plan, n_seqs, n_heads, plan_shape, memory };
        let width = (n_heads + 2 * shape.n_kv_heads) as usize * shape.head_dim as usize;
        let mut qkv = cuda.alloc(FILL * width)?;
        cuda.write(&mut qkv, &random(FILL * width))?;
        for seq in 0..n_seqs {
            for start in (0..depth).step_by(FILL) {
                let n = FILL.min(depth - start);
                rig.lay_out(&[(seq, start, n)])?;
                for layer in 0..shape.n_layers {
                    let spec = spec(n_heads, shape.head_dim);
                    cuda.rope_append(&rig.plan, LayerIdx(layer), &spec, &mut qkv, &mut rig.kv)?;
                }
            }
        }
        Ok(rig)
    }

    /// A plan that knows no batch.
    pub(crate) fn renew_plan(&mut self) -> Outcome {
        self.plan = self.cuda.alloc_plan(&self.plan_shape)?;
        Ok(())
    }

    /// Plans a batch of sequences, first rows and numbers of rows.
    pub(crate) fn lay_out(&mut self, parts: &[(usize, usize, usize)]) -> Outcome {
        let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
        for &(seq, start, n) in parts {
            layout.tokens.extend(std::iter::repeat_n(0, n));
            layout.positions.extend((start..start + n).map(|position| position as u32));
            layout.query_start.push(layout.tokens.len() as u32);
            layout.kv_len.push((start + n) as u32);
            layout.table_row.push(seq as u32);
            layout.output_rows.push(layout.tokens.len() as u32 - 1);
        }
        Ok(self.cuda.plan(&mut self.plan, &self.tables, &layout)?)
    }

    /// Times attention of the batch that was laid out, so many layers one after the other in one pass: those
    /// of the arena, from the first again after the last.
    pub(crate) fn time_layers(
        &mut self,
        rows: usize,
        n_passed: u32,
    ) -> Result<f64, Box<dyn Error>> {
        let width = (self.n_heads + 2 * self.shape.n_kv_heads) * self.shape.head_dim;
        let mut qkv = self.cuda.alloc(rows * width as usize)?;
        self.cuda.write(&mut qkv, &random(rows * width as usize))?;
        let mut out = self.cuda.alloc(rows * (self.n_heads * self.shape.head_dim) as usize)?;
        let spec = spec(self.n_heads, self.shape.head_dim);
        let seconds = time(self.cuda, |_| {
            if self.cuda.begin_pass(&mut self.plan, &self.kv)? == Pass::Needed {
                for layer in (0..n_passed).map(|i| LayerIdx(i % self.shape.n_layers)) {
                    self.cuda.attend(&self.plan, layer, &spec, &qkv, &self.kv, &mut out)?;
                }
                self.cuda.end_pass(&mut self.plan)?;
            }
            Ok(())
        })?;
        Ok(seconds / f64::from(n_passed))
    }

    /// Times attention of the batch that was laid out, layers taking turns.
    pub(crate) fn time(&self, rows: usize) -> Result<f64, Box<dyn Error>> {
        let width = (self.n_heads + 2 * self.shape.n_kv_heads) * self.shape.head_dim;
        let mut qkv = self.cuda.alloc(rows * width as usize)?;
        self.cuda.write(&mut qkv, &random(rows * width as usize))?;
        let mut out = self.cuda.alloc(rows * (self.n_heads * self.shape.head_dim) as usize)?;
        let spec = spec(self.n_heads, self.shape.head_dim);
        time(self.cuda, |i| {
            let layer = LayerIdx(i as u32 % self.shape.n_layers);
            Ok(self.cuda.attend(&self.plan, layer, &spec, &qkv, &self.kv, &mut out)?)
        })
    }
}

pub(crate) fn spec(n_heads: u32, head_dim: u32) -> AttnSpec<'static, Cuda> {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttnSpec { n_heads, scale, window: None, owns_kv: true, head_norms: None, eps: 1e-6 }
}
