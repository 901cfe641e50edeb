//! Whole decode steps of a model's shape with random weights, as the forward pass does them.

use std::error::Error;

use nuthatch_backend::{Backend, HostMatrix, Norm, Pass, WeightType};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{Clock as _, KvDtype, KvShape, LayerIdx, SystemClock};

use crate::rig::{Rig, spec};
use crate::{Outcome, Report, number, random, time};

/// What decides the cost of a step.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) n_layers: u32,
    pub(crate) hidden: usize,
    pub(crate) ff: usize,
    pub(crate) vocab: usize,
    pub(crate) n_heads: u32,
    pub(crate) n_kv_heads: u32,
    pub(crate) head_dim: u32,
}

pub(crate) const LLAMA3_8B: Shape = Shape {
    name: "llama3-8b",
    n_layers: 32,
    hidden: 4096,
    ff: 14336,
    vocab: 128_256,
    n_heads: 32,
    n_kv_heads: 8,
    head_dim: 128,
};

/// A model that was made for a million tokens.
const QWEN25_7B: Shape = Shape {
    name: "qwen2.5-7b",
    n_layers: 28,
    hidden: 3584,
    ff: 18_944,
    vocab: 152_064,
    n_heads: 28,
    n_kv_heads: 4,
    head_dim: 128,
};

const QWEN25_14B: Shape = Shape {
    name: "qwen2.5-14b",
    n_layers: 48,
    hidden: 5120,
    ff: 13824,
    vocab: 152_064,
    n_heads: 40,
    n_kv_heads: 8,
    head_dim: 128,
};

const SMOLLM2_135M: Shape = Shape {
    name: "smollm2-135m",
    n_layers: 30,
    hidden: 576,
    ff: 1536,
    vocab: 49_152,
    n_heads: 9,
    n_kv_heads: 3,
    head_dim: 64,
};

type Weight = <Cuda as Backend>::Weight;

pub(crate) struct Layer {
    qkv: Weight,
    /// The same in eight bits, if it is decided about ahead by that.
    deciding: Option<Weight>,
    out: Weight,
    gate_up: Weight,
    down: Weight,
}

pub(crate) struct Model {
    pub(crate) shape: Shape,
    layers: Vec<Layer>,
    table: Weight,
}

/// Times decode steps of models at several depths and batches, or at the depths among the words.
pub(crate) fn steps(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    let llama = [(1, 8192), (1, 32768), (1, 131_072), (8, 8192), (16, 8192), (32, 8192)];
    let runs: [(Shape, &[(usize, usize)]); 4] = [
        (SMOLLM2_135M, &[(1, 1024), (1, 8192)]),
        (LLAMA3_8B, &llama),
        (QWEN25_7B, &[(1, 8192), (1, 32768), (1, 131_072)]),
        (QWEN25_14B, &[(1, 8192), (1, 32768), (1, 131_072)]),
    ];
    let is_named = |(shape, _): &&(Shape, _)| words.iter().any(|word| word == shape.name);
    let has_names = runs.iter().any(|run| is_named(&run));
    let depths = words.iter().filter_map(|word| word.parse().ok());
    let n_seqs = number(words, "batch").unwrap_or(1);
    let asked: Vec<(usize, usize)> = depths.map(|depth| (n_seqs, depth)).collect();
    for (shape, batches) in runs.iter().filter(|run| !has_names || is_named(run)) {
        let batches = if asked.is_empty() { *batches } else { &asked };
        Model::new(cuda, *shape)?.time(cuda, report, batches)?;
    }
    Ok(())
}

/// The shape that is named, or Llama-3-8B's.
pub(crate) fn named(words: &[String]) -> Shape {
    let is_named = |shape: &Shape| words.iter().any(|word| word == shape.name);
    [QWEN25_7B, QWEN25_14B, SMOLLM2_135M].into_iter().find(is_named).unwrap_or(LLAMA3_8B)
}

/// Times prompts of 8192 tokens at several depths, each in one pass, of the first model that is named.
pub(crate) fn prompts(cuda: &Cuda, report: &mut Report) -> Outcome {
    const ROWS: usize = 8192;
    let model = Model::new(cuda, LLAMA3_8B)?;
    let Shape { n_layers, n_heads, n_kv_heads, head_dim, name, .. } = model.shape;
    let dtype = KvDtype::F16;
    let kv = KvShape { n_layers, n_kv_heads, head_dim, page_len: 16, dtype };
    let mut acts = Acts::new(cuda, &model.shape, ROWS)?;
    acts.outputs = 1;
    for depth in [0, 8192, 16384, 24576] {
        let mut rig = Rig::new(cuda, (kv, n_heads), (1, depth, ROWS))?;
        rig.lay_out(&[(0, depth, ROWS)])?;
        let seconds = time(cuda, |_| model.pass(cuda, &mut rig, &mut acts, None))?;
        let keys = ROWS as f64 * (depth as f64 + ROWS as f64 / 2.0);
        let attention = 4.0 * keys * f64::from(n_layers * n_heads * head_dim);
        let operations = ROWS as f64 * (model.bytes(&kv, 0) - model.head_bytes()) + attention;
        report.add(&format!("prompt {name}, {ROWS} at {depth}"), seconds, 0.0, operations);
    }
    Ok(())
}

impl Model {
    fn head_bytes(&self) -> f64 {
        (2 * self.shape.vocab * self.shape.hidden) as f64
    }

    pub(crate) fn new(cuda: &Cuda, shape: Shape) -> Result<Self, Box<dyn Error>> {
        let qkv = ((shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim) as usize;
        let heads = (shape.n_heads * shape.head_dim) as usize;
        let largest = shape.hidden * shape.vocab.max(2 * shape.ff);
        let some: Vec<u8> = random(1 << 22)
            .iter()
            .flat_map(|x| ((x * 0.03).to_bits() >> 16).to_le_bytes().into_iter().take(2))
            .collect();
        let bytes = some.repeat((largest * 2).div_ceil(some.len()));
        let host = |rows: usize, cols: usize| {
            let bytes = &bytes[..rows * cols * 2];
            HostMatrix { dtype: WeightType::BF16, rows, cols, bytes, bias: None }
        };
        let matrix = |rows: usize, cols: usize| cuda.load(&[host(rows, cols)]);
        let layer = || {
            Ok::<_, Box<dyn Error>>(Layer {
                qkv: matrix(qkv, shape.hidden)?,
                deciding: None,
                out: matrix(shape.hidden, heads)?,
                gate_up: cuda
                    .load_gated(host(shape.ff, shape.hidden), host(shape.ff, shape.hidden))?,
                down: matrix(shape.hidden, shape.ff)?,
            })
        };
        let layers = (0..shape.n_layers).map(|_| layer()).collect::<Result<_, _>>()?;
        Ok(Model { shape, layers, table: matrix(shape.vocab, shape.hidden)? })
    }

    /// Has layers decided about ahead by weights in eight bits, as a model has if they are large.
    pub(crate) fn narrow_deciding(&mut self, cuda: &Cuda) -> Outcome {
        let Shape { hidden, n_heads, n_kv_heads, head_dim, .. } = self.shape;
        let (rows, cols) = (((n_heads + 2 * n_kv_heads) * head_dim) as usize, hidden);
        if rows * cols < 4 << 20 {
            return Ok(());
        }
        // A small unit, and numbers.
        let block = [&[0x80, 0x04][..], &[3, 250, 7, 240].repeat(8)].concat();
        let bytes = block.repeat(rows * cols / 32);
        let host = HostMatrix { dtype: WeightType::Q8_0, rows, cols, bytes: &bytes, bias: None };
        for layer in self.layers.iter_mut().skip(1) {
            layer.deciding = Some(cuda.load(&[host])?);
        }
        Ok(())
    }

    /// Bytes that a step must read: the weights once, and the keys and values.
    pub(crate) fn bytes(&self, kv: &KvShape, tokens: usize) -> f64 {
        let Shape { hidden, ff, vocab, n_heads, n_kv_heads, head_dim, n_layers, .. } = self.shape;
        let heads = ((2 * n_heads + 2 * n_kv_heads) * head_dim) as usize;
        let layer = hidden * (heads + 3 * ff);
        (2 * (n_layers as usize * layer + vocab * hidden) + tokens * kv.token_bytes()) as f64
    }

    /// Times whole steps; and, if asked to, what a step gains without each of its stages.
    fn time(&self, cuda: &Cuda, report: &mut Report, batches: &[(usize, usize)]) -> Outcome {
        let Shape { n_layers, n_heads, n_kv_heads, head_dim, name, .. } = self.shape;
        let dtype = KvDtype::F16;
        let kv = KvShape { n_layers, n_kv_heads, head_dim, page_len: 16, dtype };
        for &(n, depth) in batches {
            let mut rig = Rig::new(cuda, (kv, n_heads), (n, depth, 1))?;
            let parts: Vec<_> = (0..n).map(|seq| (seq, depth - 1, 1)).collect();
            let mut acts = Acts::new(cuda, &self.shape, n)?;
            let mut time_without = |without: Option<Stage>| {
                // What was recorded has all stages.
                rig.renew_plan()?;
                time(cuda, |_| {
                    rig.lay_out(&parts)?;
                    if cuda.begin_pass(&mut rig.plan, &rig.kv)? == Pass::Needed {
                        self.pass(cuda, &mut rig, &mut acts, without)?;
                        cuda.end_pass(&mut rig.plan)?;
                    }
                    Ok(())
                })
            };
            let seconds = time_without(None)?;
            let bytes = self.bytes(&kv, n * depth);
            report.add(&format!("step {name}, {n} x {depth}"), seconds, bytes, 0.0);
            for stage in if report.has_breakdown { &Stage::ALL[..] } else { &[] } {
                let gain = seconds - time_without(Some(*stage))?;
                let name = format!("  {stage:?} of {name}, {n} x {depth}");
                report.add(&name, gain, self.stage_bytes(*stage, &kv, n * depth), 0.0);
            }
        }
        Ok(())
    }

    /// Times a step of one sequence, the median of several, before each of which something else has begun.
    pub(crate) fn time_beside(
        &self,
        cuda: &Cuda,
        (kv, depth): (KvShape, usize),
        begin: &dyn Fn(usize) -> Outcome,
    ) -> Result<f64, Box<dyn Error>> {
        let mut rig = Rig::new(cuda, (kv, self.shape.n_heads), (1, depth, 1))?;
        let mut acts = Acts::new(cuda, &self.shape, 1)?;
        let clock = SystemClock::start();
        let mut seconds = Vec::new();
        for i in 0..44 {
            // Its copies would wait for those of rows.
            rig.lay_out(&[(0, depth - 1, 1)])?;
            cuda.wait()?;
            begin(i)?;
            let start = clock.now();
            if cuda.begin_pass(&mut rig.plan, &rig.kv)? == Pass::Needed {
                self.pass(cuda, &mut rig, &mut acts, None)?;
                cuda.end_pass(&mut rig.plan)?;
            }
            cuda.wait()?;
            seconds.push((clock.now() - start).as_secs_f64());
        }
        seconds.drain(..4);
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    /// Bytes that a stage must read in one step.
    fn stage_bytes(&self, stage: Stage, kv: &KvShape, tokens: usize) -> f64 {
        let Shape { hidden, ff, vocab, n_heads, n_kv_heads, head_dim, n_layers, .. } = self.shape;
        let heads = |n: u32| (n * head_dim) as usize;
        let layer = match stage {
            Stage::Rope => 0,
            Stage::Qkv => hidden * heads(n_heads + 2 * n_kv_heads),
            Stage::Attention => return (tokens * kv.token_bytes()) as f64,
            Stage::Out => hidden * heads(n_heads),
            Stage::GateUp => 2 * hidden * ff,
            Stage::Down => hidden * ff,
            Stage::Head => return (2 * vocab * hidden) as f64,
        };
        (2 * n_layers as usize * layer) as f64
    }

    /// The operations of the forward pass.
    pub(crate) fn pass(
        &self,
        cuda: &Cuda,
        rig: &mut Rig<'_>,
        acts: &mut Acts,
        without: Option<Stage>,
    ) -> Outcome {
        self.pass_with(cuda, rig, acts, (without, None, false))
    }

    /// The same; with queries, of each layer, the device decides what they see, and before a layer's turn if it is to
    /// decide ahead.
    pub(crate) fn pass_with(
        &self,
        cuda: &Cuda,
        rig: &mut Rig<'_>,
        acts: &mut Acts,
        (without, queries, is_ahead): (Option<Stage>, Option<&[Buf]>, bool),
    ) -> Outcome {
        let Shape { hidden, ff, n_heads, head_dim, .. } = self.shape;
        let spec = spec(n_heads, head_dim);
        let Acts { n, outputs, norm, x, h, qkv, ahead, attended, gate_up, gated, last, logits } =
            acts;
        let (n, outputs) = (*n, *outputs);
        let has = |stage: Stage| without != Some(stage);
        cuda.embed(&self.table, &rig.plan, x)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let at = LayerIdx(i as u32);
            if let (Some(queries), Some(next), true) = (queries, self.layers.get(i + 1), is_ahead) {
                let (of, next_at) = (Norm { x, weight: norm, eps: 1e-5 }, LayerIdx(i as u32 + 1));
                let n_queries = (n_heads * head_dim) as usize;
                let weight = next.deciding.as_ref().unwrap_or(&next.qkv);
                cuda.norm_matmul_first(&of, weight, n_queries, n, h, ahead)?;
                cuda.rope_queries(&rig.plan, next_at, &spec, ahead, &mut rig.kv)?;
                let queries = &queries[i + 1];
                cuda.decide_ahead(&rig.plan, (i + 1, next_at), &spec, queries, &rig.kv)?;
            }
            if has(Stage::Qkv) {
                cuda.norm_matmul(&Norm { x, weight: norm, eps: 1e-5 }, &layer.qkv, n, h, qkv)?;
            }
            let is_whole = has(Stage::Rope) && has(Stage::Attention);
            match queries {
                None if is_whole => {
                    cuda.rope_attend(&rig.plan, at, &spec, qkv, &mut rig.kv, attended)?;
                }
                _ if has(Stage::Rope) => {
                    cuda.rope_append(&rig.plan, at, &spec, qkv, &mut rig.kv)?;
                }
                _ => {}
            }
            match queries {
                Some(queries) if has(Stage::Attention) => {
                    let queries = &queries[i];
                    cuda.attend_deciding(&rig.plan, (i, at), &spec, queries, &rig.kv, attended)?;
                }
                None if has(Stage::Attention) && !is_whole => {
                    cuda.attend(&rig.plan, at, &spec, qkv, &rig.kv, attended)?;
                }
                _ => {}
            }
            if has(Stage::Out) {
                cuda.matmul_add(&layer.out, attended, n, x)?;
            }
            if has(Stage::GateUp) {
                let of = Norm { x, weight: norm, eps: 1e-5 };
                cuda.norm_gated_matmul(&of, &layer.gate_up, ff, n, (h, gate_up), gated)?;
            }
            if has(Stage::Down) {
                cuda.matmul_add(&layer.down, gated, n, x)?;
            }
        }
        if has(Stage::Head) {
            cuda.gather_rows(&rig.plan, x, hidden, last)?;
            let of = Norm { x: last, weight: norm, eps: 1e-5 };
            cuda.norm_matmul(&of, &self.table, outputs, h, logits)?;
        }
        Ok(())
    }
}

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Qkv,
    Rope,
    Attention,
    Out,
    GateUp,
    Down,
    Head,
}

impl Stage {
    const ALL: [Stage; 7] = [
        Stage::Qkv,
        Stage::Rope,
        Stage::Attention,
        Stage::Out,
        Stage::GateUp,
        Stage::Down,
        Stage::Head,
    ];
}

pub(crate) type Buf = <Cuda as Backend>::Buf;

/// The buffers of a step of `n` rows.
pub(crate) struct Acts {
    n: usize,
    /// Rows that logits are computed for.
    pub(crate) outputs: usize,
    norm: Buf,
    x: Buf,
    h: Buf,
    qkv: Buf,
    /// Queries of the layer after.
    ahead: Buf,
    attended: Buf,
    gate_up: Buf,
    gated: Buf,
    last: Buf,
    logits: Buf,
}

impl Acts {
    pub(crate) fn new(cuda: &Cuda, shape: &Shape, n: usize) -> Result<Self, Box<dyn Error>> {
        let &Shape { hidden, ff, vocab, n_heads, n_kv_heads, head_dim, .. } = shape;
        let heads = |n: u32| (n * head_dim) as usize;
        let mut norm = cuda.alloc(hidden)?;
        cuda.write(&mut norm, &vec![1.0; hidden])?;
        Ok(Acts {
            n,
            outputs: n,
            norm,
            x: cuda.alloc(n * hidden)?,
            h: cuda.alloc(n * hidden)?,
            qkv: cuda.alloc(n * heads(n_heads + 2 * n_kv_heads))?,
            ahead: cuda.alloc(n * heads(n_heads + 2 * n_kv_heads))?,
            attended: cuda.alloc(n * heads(n_heads))?,
            gate_up: cuda.alloc(n * 2 * ff)?,
            gated: cuda.alloc(n * ff)?,
            last: cuda.alloc(n * hidden)?,
            logits: cuda.alloc(n * vocab)?,
        })
    }
}
