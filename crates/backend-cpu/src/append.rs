//! Writing a step's keys and values, and their digests.

use nuthatch_backend::AttnSpec;
use nuthatch_types::KvDtype;

use crate::Cpu;
use crate::far::PageFile;
use crate::isa::Isa;
use crate::kv::{CpuKv, PAGE, TokenPlace, write_token};
use crate::mem::SharedMut;
use crate::near::NearRows;
use crate::plan::{CpuPlan, PageRun};
use crate::rows::{Prepare, prepare_head};
use crate::topk::{Encoding, PageTokens};

/// One layer's rows on their way to the pages.
pub(crate) struct Append<'a> {
    isa: Isa,
    plan: &'a CpuPlan,
    spec: &'a AttnSpec<'a, Cpu>,
    /// `[T][width]`.
    qkv: SharedMut<'a, f32>,
    pub(crate) width: usize,
    bytes: SharedMut<'a, u8>,
    file: Option<&'a PageFile>,
    near: Option<&'a NearRows>,
    /// First byte of each head's pages, and its number among all heads.
    heads: Vec<(usize, usize)>,
    dtype: KvDtype,
    page_bytes: usize,
    row_bytes: usize,
    by_rows: bool,
    encoding: Encoding<'a>,
}

impl<'a> Append<'a> {
    pub(crate) fn new(
        isa: Isa,
        plan: &'a CpuPlan,
        layer: usize,
        spec: &'a AttnSpec<'a, Cpu>,
        (qkv, kv): (&'a mut [f32], &'a mut CpuKv),
    ) -> Self {
        let (shape, d) = (kv.shape, kv.shape.head_dim as usize);
        let n_kv = if spec.owns_kv { shape.n_kv_heads as usize } else { 0 };
        let numbers = (0..n_kv).map(|head| kv.head_number(layer, head));
        let heads: Vec<(usize, usize)> =
            numbers.map(|head| (kv.page_start(head, 0), head)).collect();
        let row_bytes = shape.row_bytes(layer as u32);
        Append {
            isa,
            plan,
            spec,
            qkv: SharedMut::new(qkv),
            width: (spec.n_heads as usize + 2 * n_kv) * d,
            bytes: SharedMut::new(&mut kv.bytes),
            file: kv.file.as_deref(),
            near: kv.near.as_deref(),
            heads,
            dtype: shape.dtype.of_layer(layer as u32),
            page_bytes: PAGE * row_bytes,
            row_bytes,
            by_rows: kv.by_rows,
            encoding: Encoding::new(isa, shape.dtype, d, &mut kv.digests),
        }
    }

    /// Writes the rows of one run; each run is given to one thread.
    pub(crate) fn run(&self, run: &PageRun) {
        let seq = &self.plan.seqs[run.seq];
        let place = seq.place + run.start;
        let slot = self.plan.slot(seq, place);
        let at = |first: usize| first + slot * self.page_bytes;
        let (start, end) = (place % PAGE, place % PAGE + run.n);
        let mut staged = Vec::new();
        let (bytes, pages): (_, Vec<usize>) = match self.file {
            None => (self.bytes, self.heads.iter().map(|&(first, _)| at(first)).collect()),
            Some(file) => {
                staged.resize(self.heads.len() * self.page_bytes, 0);
                if start > 0 && self.encoding.is_of_pages() {
                    let pages = staged.chunks_exact_mut(self.page_bytes);
                    for (page, &(first, _)) in pages.zip(&self.heads) {
                        file.read(at(first), &mut page[..start * self.row_bytes]);
                    }
                }
                let pages = (0..self.heads.len()).map(|i| i * self.page_bytes).collect();
                (SharedMut::new(&mut staged), pages)
            }
        };
        let mut buffer = Vec::new();
        for i in 0..run.n {
            let row = seq.first_row + run.start + i;
            self.row(row, (bytes, &pages), start + i, &mut buffer);
        }
        if !self.by_rows {
            return;
        }
        for (&page, &(first, head)) in pages.iter().zip(&self.heads) {
            #[expect(unsafe_code, reason = "threads read disjoint pages")]
            // SAFETY: a run's page belongs to this thread, which has just written it.
            let page = unsafe { bytes.part(page, self.page_bytes) };
            self.encoding.run(PageTokens { head, slot, start, end }, page);
            let rows = &page[start * self.row_bytes..end * self.row_bytes];
            if let Some(file) = self.file {
                file.write(at(first) + start * self.row_bytes, rows);
            }
            if let Some(near) = self.near {
                let part = near.part(seq.table_row, head);
                near.keep(part, place..place + run.n, seq.kv_len(), rows);
            }
        }
    }

    /// Prepares one row of the batch and writes its keys and values to the heads' pages; `buffer` is
    /// scratch.
    fn row(
        &self,
        batch_row: usize,
        (bytes, pages): (SharedMut<'_, u8>, &[usize]),
        offset: usize,
        buffer: &mut Vec<u8>,
    ) {
        let (plan, spec, dtype) = (self.plan, self.spec, self.dtype);
        let d = plan.shape.kv.head_dim as usize;
        #[expect(unsafe_code, reason = "threads write disjoint rows")]
        // SAFETY: each row belongs to one run, and each run is handled once.
        let qkv = unsafe { self.qkv.part(batch_row * self.width, self.width) };
        let half = plan.shape.rope.inv_freq.len();
        let angles = batch_row * half..(batch_row + 1) * half;
        let mut prepare = Prepare {
            norm: spec.head_norms.map(|(q, _)| &q[..]),
            eps: spec.eps,
            cos: &plan.cos[angles.clone()],
            sin: &plan.sin[angles],
            halves: plan.halves(),
        };
        let (q, kv) = qkv.split_at_mut(spec.n_heads as usize * d);
        let (k, v) = kv.split_at_mut(self.heads.len() * d);
        for head in q.chunks_exact_mut(d) {
            prepare_head(self.isa, head, &prepare);
        }
        prepare.norm = spec.head_norms.map(|(_, k)| &k[..]);
        let by_rows = self.by_rows;
        let pairs = k.chunks_exact_mut(d).zip(v.chunks_exact(d));
        for (&page, (k, v)) in pages.iter().zip(pairs) {
            prepare_head(self.isa, k, &prepare);
            write_token(bytes, TokenPlace { page, offset, dtype, by_rows }, (k, v), buffer);
        }
    }
}
