//! Whole decode steps of a model's shape with random weights, as the forward pass does them.

use std::error::Error;

use nuthatch_backend::{Backend, HostMatrix, WeightType};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{KvDtype, KvShape, LayerIdx};

use crate::rig::{Rig, spec};
use crate::{Outcome, Report, random, time};

/// What decides the cost of a step.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    n_layers: u32,
    hidden: usize,
    ff: usize,
    vocab: usize,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
}

const LLAMA3_8B: Shape = Shape {
    name: "llama3-8b",
    n_layers: 32,
    hidden: 4096,
    ff: 14336,
    vocab: 128_256,
    n_heads: 32,
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

struct Layer {
    qkv: Weight,
    out: Weight,
    gate_up: Weight,
    down: Weight,
}

struct Model {
    shape: Shape,
    layers: Vec<Layer>,
    table: Weight,
}

/// Times decode steps of two models at several depths and batches.
pub(crate) fn steps(cuda: &Cuda, report: &mut Report) -> Outcome {
    let model = Model::new(cuda, SMOLLM2_135M)?;
    model.time(cuda, report, &[(1, 1024), (1, 8192)])?;
    let model = Model::new(cuda, LLAMA3_8B)?;
    model.time(cuda, report, &[(1, 8192), (1, 32768), (1, 131_072), (8, 8192), (16, 8192)])?;
    model.time(cuda, report, &[(32, 8192)])
}

impl Model {
    fn new(cuda: &Cuda, shape: Shape) -> Result<Self, Box<dyn Error>> {
        let qkv = ((shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim) as usize;
        let heads = (shape.n_heads * shape.head_dim) as usize;
        let largest = shape.hidden * shape.vocab.max(2 * shape.ff);
        let some: Vec<u8> = random(1 << 22)
            .iter()
            .flat_map(|x| ((x * 0.03).to_bits() >> 16).to_le_bytes().into_iter().take(2))
            .collect();
        let bytes = some.repeat((largest * 2).div_ceil(some.len()));
        let matrix = |rows: usize, cols: usize| {
            let bytes = &bytes[..rows * cols * 2];
            cuda.load(&[HostMatrix { dtype: WeightType::BF16, rows, cols, bytes, bias: None }])
        };
        let layer = || {
            Ok::<_, Box<dyn Error>>(Layer {
                qkv: matrix(qkv, shape.hidden)?,
                out: matrix(shape.hidden, heads)?,
                gate_up: matrix(2 * shape.ff, shape.hidden)?,
                down: matrix(shape.hidden, shape.ff)?,
            })
        };
        let layers = (0..shape.n_layers).map(|_| layer()).collect::<Result<_, _>>()?;
        Ok(Model { shape, layers, table: matrix(shape.vocab, shape.hidden)? })
    }

    /// Bytes that a step must read: the weights once, and the keys and values.
    fn bytes(&self, kv: &KvShape, tokens: usize) -> f64 {
        let Shape { hidden, ff, vocab, n_heads, n_kv_heads, head_dim, n_layers, .. } = self.shape;
        let heads = ((2 * n_heads + 2 * n_kv_heads) * head_dim) as usize;
        let layer = hidden * (heads + 3 * ff);
        (2 * (n_layers as usize * layer + vocab * hidden) + tokens * kv.token_bytes()) as f64
    }

    fn time(&self, cuda: &Cuda, report: &mut Report, batches: &[(usize, usize)]) -> Outcome {
        let Shape { n_layers, hidden, ff, vocab, n_heads, n_kv_heads, head_dim, name } = self.shape;
        let dtype = KvDtype::F16;
        let kv = KvShape { n_layers, n_kv_heads, head_dim, page_len: 16, dtype };
        let heads = (n_heads * head_dim) as usize;
        let qkv_width = ((n_heads + 2 * n_kv_heads) * head_dim) as usize;
        for &(n, depth) in batches {
            let mut rig = Rig::new(cuda, (kv, n_heads), (n, depth, 1))?;
            let parts: Vec<_> = (0..n).map(|seq| (seq, depth - 1, 1)).collect();
            rig.lay_out(&parts)?;
            let (mut x, mut h) = (cuda.alloc(n * hidden)?, cuda.alloc(n * hidden)?);
            let mut norm = cuda.alloc(hidden)?;
            cuda.write(&mut norm, &vec![1.0; hidden])?;
            let (mut qkv, mut attended) = (cuda.alloc(n * qkv_width)?, cuda.alloc(n * heads)?);
            let (mut gate_up, mut gated) = (cuda.alloc(n * 2 * ff)?, cuda.alloc(n * ff)?);
            let mut logits = cuda.alloc(n * vocab)?;
            let spec = spec(n_heads, head_dim);
            let seconds = time(cuda, |_| {
                cuda.embed(&self.table, &rig.plan, &mut x)?;
                for (i, layer) in self.layers.iter().enumerate() {
                    let at = LayerIdx(i as u32);
                    cuda.norm(&x, &norm, 1e-5, n, &mut h)?;
                    cuda.matmul(&layer.qkv, &h, n, &mut qkv)?;
                    cuda.rope_append(&rig.plan, at, &spec, &mut qkv, &mut rig.kv)?;
                    cuda.attend(&rig.plan, at, &spec, &qkv, &rig.kv, &mut attended)?;
                    cuda.matmul_add(&layer.out, &attended, n, &mut x)?;
                    cuda.norm(&x, &norm, 1e-5, n, &mut h)?;
                    cuda.matmul(&layer.gate_up, &h, n, &mut gate_up)?;
                    cuda.swiglu(&gate_up, ff, n, &mut gated)?;
                    cuda.matmul_add(&layer.down, &gated, n, &mut x)?;
                }
                cuda.norm(&x, &norm, 1e-5, n, &mut h)?;
                Ok(cuda.matmul(&self.table, &h, n, &mut logits)?)
            })?;
            let bytes = self.bytes(&kv, n * depth);
            report.add(&format!("step {name}, {n} x {depth}"), seconds, bytes, 0.0);
        }
        Ok(())
    }
}
