//! The weights of a model on its device.

use nuthatch_attention::{Dense, HeadNorms};
use nuthatch_backend::{Backend, HostMatrix};
use nuthatch_types::LayerIdx;

use crate::LoadError;
use crate::files::{ModelFiles, TensorView};
use crate::names::TensorName;

/// All weights.
pub(crate) struct Weights<B: Backend> {
    /// `[V, d]`.
    pub(crate) embedding: B::Weight,
    pub(crate) layers: Vec<Layer<B>>,
    /// `[d]`.
    pub(crate) output_norm: B::Buf,
    /// `[V, d]`; none when the embedding serves.
    pub(crate) output: Option<B::Weight>,
}

/// The weights of one layer.
pub(crate) struct Layer<B: Backend> {
    /// `[d]`.
    pub(crate) attn_norm: B::Buf,
    /// `[(H + 2 G) D, d]`, or `[H D, d]` where the layer owns no KV.
    pub(crate) qkv: B::Weight,
    /// The same in eight bits, if queries decide about the layer ahead and it is not as narrow: they only choose
    /// what is attended, and to read their weights is what they cost.
    pub(crate) deciding: Option<B::Weight>,
    pub(crate) attention: Dense<B>,
    /// `[d, H D]`.
    pub(crate) out: B::Weight,
    /// `[d]`.
    pub(crate) ffn_norm: B::Buf,
    /// `[2 F, d]`.
    pub(crate) gate_up: B::Weight,
    /// `[d, F]`.
    pub(crate) down: B::Weight,
}

impl<B: Backend> Weights<B> {
    pub(crate) fn load(b: &B, files: &ModelFiles) -> Result<Self, LoadError> {
        let config = files.config();
        let n_layers = config.n_layers;
        let layers = (0..n_layers).map(|l| Layer::load(b, files, l)).collect::<Result<_, _>>()?;
        let output = match config.tied_embeddings {
            true => None,
            false => Some(matrices(b, files, &[TensorName::Output], &[])?),
        };
        Ok(Weights {
            embedding: matrices(b, files, &[TensorName::Embedding], &[])?,
            layers,
            output_norm: vector(b, files, TensorName::OutputNorm)?,
            output,
        })
    }
}

impl<B: Backend> Layer<B> {
    fn load(b: &B, files: &ModelFiles, l: u32) -> Result<Self, LoadError> {
        use TensorName as Name;
        let config = files.config();
        let owns_kv = config.owns_kv(LayerIdx(l));
        let norms = match config.qk_norm {
            true => Some(HeadNorms {
                q: vector(b, files, Name::QNorm(l))?,
                k: owns_kv.then(|| vector(b, files, Name::KNorm(l))).transpose()?,
            }),
            false => None,
        };
        let (qkv, qkv_bias, n_projections) = projections(files, l);
        let o_bias = [Name::OBias(l)];
        Ok(Layer {
            attn_norm: vector(b, files, Name::AttnNorm(l))?,
            qkv: matrices(
                b,
                files,
                &qkv[..n_projections],
                if config.qkv_bias { &qkv_bias[..n_projections] } else { &[] },
            )?,
            deciding: None,
            attention: Dense {
                layer: config.kv_layer(LayerIdx(l)),
                owns_kv,
                n_heads: config.n_heads,
                scale: 1.0 / (config.head_dim as f32).sqrt(),
                window: config.window(LayerIdx(l)),
                norms,
                eps: config.norm_eps,
            },
            out: matrices(b, files, &[Name::O(l)], if config.o_bias { &o_bias } else { &[] })?,
            ffn_norm: vector(b, files, Name::FfnNorm(l))?,
            gate_up: gated(b, files, Name::Gate(l), Name::Up(l))?,
            down: matrices(b, files, &[Name::Down(l)], &[])?,
        })
    }
}

/// The tensors of a layer's queries, keys and values.
pub(crate) fn projections(files: &ModelFiles, l: u32) -> ([TensorName; 3], [TensorName; 3], usize) {
    use TensorName as Name;
    let n = if files.config().owns_kv(LayerIdx(l)) { 3 } else { 1 };
    let biases = [Name::QBias(l), Name::KBias(l), Name::VBias(l)];
    ([Name::Q(l), Name::K(l), Name::V(l)], biases, n)
}

fn vector<B: Backend>(b: &B, files: &ModelFiles, name: TensorName) -> Result<B::Buf, LoadError> {
    let values = files.vector(name)?;
    let mut buf = b.alloc(values.len())?;
    b.write(&mut buf, &values)?;
    Ok(buf)
}

/// Loads matrices stacked by rows, with a bias for each or for none.
fn matrices<B: Backend>(
    b: &B,
    files: &ModelFiles,
    names: &[TensorName],
    biases: &[TensorName],
) -> Result<B::Weight, LoadError> {
    assert!(biases.is_empty() || biases.len() == names.len());
    let biases = biases.iter().map(|&name| files.vector(name)).collect::<Result<Vec<_>, _>>()?;
    let views = names.iter().map(|&name| files.tensor(name)).collect::<Result<Vec<_>, _>>()?;
    let bias = |i: usize| biases.get(i).map(|bias| &bias[..]);
    let parts: Vec<HostMatrix<'_>> = views
        .iter()
        .enumerate()
        .map(|(i, view)| HostMatrix { bias: bias(i), ..host_matrix(view) })
        .collect();
    Ok(b.load(&parts)?)
}

/// Loads the two matrices of a gated feed-forward layer.
fn gated<B: Backend>(
    b: &B,
    files: &ModelFiles,
    gate: TensorName,
    up: TensorName,
) -> Result<B::Weight, LoadError> {
    let (gate, up) = (files.tensor(gate)?, files.tensor(up)?);
    Ok(b.load_gated(host_matrix(&gate), host_matrix(&up))?)
}

pub(crate) fn host_matrix<'a>(view: &TensorView<'a>) -> HostMatrix<'a> {
    let [rows, cols] = [view.shape[0], view.shape[1]];
    HostMatrix { dtype: view.dtype, rows, cols, bytes: view.bytes, bias: None }
}
