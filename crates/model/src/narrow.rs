//! Weights in eight bits of the queries by which layers are decided about ahead.

use nuthatch_backend::{Backend, HostMatrix, WeightType, quant};

use crate::files::{ModelFiles, TensorView};
use crate::weights::{Weights, host_matrix, projections};
use crate::{LoadError, ModelError};

const NARROW: WeightType = WeightType::Q8_0;
/// Weights of a layer from which on a copy is worth its memory: fewer are read in two microseconds on an H200.
/// Computed, not measured.
pub const NARROW_LEAST: usize = 4 << 20;

impl<B: Backend> Weights<B> {
    /// Has all layers but the first decided about by narrow weights, where that is worth a copy.
    pub(crate) fn narrow(
        &mut self,
        b: &B,
        files: &ModelFiles,
        least: usize,
    ) -> Result<(), LoadError> {
        for (l, layer) in self.layers.iter_mut().enumerate().skip(1) {
            let views = views(files, l as u32)?;
            if is_worth_it(&views, least) {
                layer.deciding = Some(narrow_layer(b, files, (l as u32, &views))?);
            }
        }
        Ok(())
    }
}

/// Bytes of what [`Weights::narrow`] makes, where a matrix takes `bytes_of` its type, rows and columns.
pub(crate) fn narrow_bytes(
    files: &ModelFiles,
    least: usize,
    bytes_of: impl Fn(WeightType, usize, usize) -> usize,
) -> Result<u64, ModelError> {
    let mut bytes = 0;
    for l in 1..files.config().n_layers {
        let views = views(files, l)?;
        if is_worth_it(&views, least) {
            let rows = views.iter().map(|view| view.shape[0]).sum();
            let bias = if files.config().qkv_bias { size_of::<f32>() * rows } else { 0 };
            bytes += (bytes_of(NARROW, rows, views[0].shape[1]) + bias) as u64;
        }
    }
    Ok(bytes)
}

/// A layer's projections.
fn views(files: &ModelFiles, l: u32) -> Result<Vec<TensorView<'_>>, ModelError> {
    let (names, _, n) = projections(files, l);
    names[..n].iter().map(|&name| files.tensor(name)).collect()
}

fn is_worth_it(views: &[TensorView<'_>], least: usize) -> bool {
    let n_weights: usize = views.iter().map(|view| view.shape.iter().product::<usize>()).sum();
    n_weights >= least && views.iter().all(is_wide)
}

/// Whether eight bits would be fewer.
fn is_wide(view: &TensorView<'_>) -> bool {
    matches!(view.dtype, WeightType::F16 | WeightType::BF16)
        && view.shape[1].is_multiple_of(NARROW.block_len())
}

fn narrow_layer<B: Backend>(
    b: &B,
    files: &ModelFiles,
    (l, views): (u32, &[TensorView<'_>]),
) -> Result<B::Weight, LoadError> {
    let (_, biases, n) = projections(files, l);
    let biases = if files.config().qkv_bias { &biases[..n] } else { &[] };
    let biases = biases.iter().map(|&name| files.vector(name)).collect::<Result<Vec<_>, _>>()?;
    let narrow: Vec<Vec<u8>> = views.iter().map(narrow_matrix).collect();
    let parts: Vec<HostMatrix<'_>> = views
        .iter()
        .zip(&narrow)
        .enumerate()
        .map(|(i, (view, bytes))| HostMatrix {
            dtype: NARROW,
            bytes,
            bias: biases.get(i).map(|bias| &bias[..]),
            ..host_matrix(view)
        })
        .collect();
    Ok(b.load(&parts)?)
}

/// A matrix in eight bits; threads share its rows, because a large model has a billion such weights.
fn narrow_matrix(view: &TensorView<'_>) -> Vec<u8> {
    let (rows, cols) = (view.shape[0], view.shape[1]);
    let row_bytes = view.bytes.len() / rows.max(1);
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let share = rows.div_ceil(n_threads).max(1) * row_bytes.max(1);
    let narrow_rows = |bytes: &[u8]| {
        let (mut row, mut out) = (vec![0.0; cols], Vec::new());
        for bytes in bytes.chunks_exact(row_bytes.max(1)) {
            quant::dequantize_row(view.dtype, bytes, &mut row);
            quant::quantize_row(NARROW, &row, &mut out);
        }
        out
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            view.bytes.chunks(share).map(|bytes| scope.spawn(move || narrow_rows(bytes))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("rows of numbers")).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nuthatch_backend_cpu::{Cpu, CpuConfig};

    use super::*;

    #[test]
    fn rows_in_eight_bits_are_nearly_the_same() {
        let cols = 64;
        let wide: Vec<f32> =
            (0..37 * cols).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
        let mut bytes = Vec::new();
        quant::quantize_row(WeightType::BF16, &wide, &mut bytes);
        let view = TensorView { dtype: WeightType::BF16, shape: vec![37, cols], bytes: &bytes };
        assert!(is_wide(&view));
        let narrow = narrow_matrix(&view);
        assert_eq!(Some(narrow.len()), NARROW.row_bytes(37 * cols));
        let mut back = vec![0.0; 37 * cols];
        quant::dequantize_row(NARROW, &narrow, &mut back);
        // Half a step of 127, and half of one of bf16.
        assert!(wide.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.008), "{wide:?} {back:?}");
        assert!(!is_worth_it(&[view], NARROW_LEAST), "a small one");
        let shape = vec![64, 37];
        assert!(!is_wide(&TensorView { dtype: WeightType::BF16, shape, bytes: &bytes }));
        let shape = vec![37, cols];
        assert!(!is_wide(&TensorView { dtype: WeightType::Q4_1, shape, bytes: &bytes }));
    }

    #[test]
    fn queries_of_narrow_weights_are_nearly_those_of_the_layer() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen2");
        let files = ModelFiles::open(&path).unwrap();
        let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
        let views = views(&files, 1).unwrap();
        assert!(views.iter().all(is_wide), "{views:?}");
        let mut all = Weights::load(&cpu, &files).unwrap();
        all.narrow(&cpu, &files, NARROW_LEAST).unwrap();
        assert!(all.layers.iter().all(|layer| layer.deciding.is_none()), "small ones");
        all.narrow(&cpu, &files, 0).unwrap();
        assert!(all.layers[0].deciding.is_none(), "the first one is decided about in its turn");
        let (cols, rows) = (views[0].shape[1], views.iter().map(|view| view.shape[0]).sum());
        let mut x = cpu.alloc(cols).unwrap();
        let ramp: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).sin()).collect();
        cpu.write(&mut x, &ramp).unwrap();
        let product = |weight| {
            let (mut out, mut values) = (cpu.alloc(rows).unwrap(), vec![0.0; rows]);
            cpu.matmul(weight, &x, 1, &mut out).unwrap();
            cpu.read(&out, &mut values).unwrap();
            values
        };
        let layer = &all.layers[1];
        let (one, other) = (product(&layer.qkv), product(layer.deciding.as_ref().unwrap()));
        let error: f32 = one.iter().zip(&other).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f32 = one.iter().map(|a| a * a).sum();
        assert!(error < 1e-3 * size, "{one:?} {other:?}");
        let bytes_of = |dtype: WeightType, rows, cols| rows * dtype.row_bytes(cols).unwrap();
        let n_narrow = all.layers.len() - 1;
        let expected = n_narrow * rows * (NARROW.row_bytes(cols).unwrap() + 4);
        assert_eq!(narrow_bytes(&files, 0, bytes_of).unwrap(), expected as u64);
        assert_eq!(narrow_bytes(&files, NARROW_LEAST, bytes_of).unwrap(), 0);
    }
}
