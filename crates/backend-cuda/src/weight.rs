//! Weights on the device, packed once at load into the order in which the products read them.
//!
//! | file | on the device | bits of a weight |
//! |---|---|---|
//! | BF16, F16 | as they are | 16 |
//! | Q4_0, Q4_1, Q8_0 | as they are | 4.5, 5, 8.5 |
//! | Q5_0, Q5_1 | codes in 8 bits | 8.5, 9 |
//! | Q4_K | codes in 4 bits, scales multiplied out | 6 |
//! | Q5_K, Q3_K, Q6_K, Q2_K | codes in 8 bits, scales multiplied out | 10, 10, 10, 12 |
//! | F32 | as they are, not packed | 32 |
//!
//! Nothing is rounded: a weight decodes to what its file's format says.

use std::sync::Arc;

use nuthatch_backend::{DeviceError, HostMatrix, WeightType};

use crate::Cuda;
use crate::common::Common;
use crate::device::{Device, Kernel, Memory};
use crate::launch::matmul::{Tile, cell_bytes, tiles};
use crate::launch::matmul_wide::Wide;
use crate::launch::pack::{FileMatrix, pack};
use crate::launch::{matmul_one, matmul_wide};

/// One or more matrices, multiplied as one whose rows are stacked.
pub struct CudaWeight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Neighbours of the same type are one part.
    pub(crate) parts: Vec<Part>,
    /// Whether it is one part whose rows are those of two matrices, interleaved by eights.
    pub(crate) is_gated: bool,
}

/// Rows of one type.
pub(crate) struct Part {
    /// First output.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) memory: Memory,
    /// `[rows]`
    pub(crate) bias: Option<Memory>,
    pub(crate) kernels: Kernels,
}

/// What computes with a part.
#[derive(Clone)]
pub(crate) enum Kernels {
    /// The kernels of its type.
    Packed(Arc<WeightKernels>),
    /// The plain ones.
    F32(Arc<Common>),
}

/// The kernels of one weight type.
pub(crate) struct WeightKernels {
    pub(crate) pack: Kernel,
    pub(crate) embed: Kernel,
    /// For few rows of activations first.
    pub(crate) matmul: Vec<(Tile, Kernel)>,
    /// For one row, where it fits the device.
    pub(crate) one: Option<Kernel>,
    /// For many rows, instead of the last of `matmul`.
    pub(crate) wide: Vec<(Wide, Kernel)>,
}

impl WeightKernels {
    pub(crate) fn new(
        device: &Device,
        cubin: Vec<u8>,
        dtype: WeightType,
    ) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        // Where a device has too little shared memory, the next tile does the same, more slowly.
        let fits = |tile: &Tile| tile.shared_bytes(dtype) <= device.shared_bytes_max();
        let matmul = tiles(dtype).into_iter().filter(fits).map(|tile| {
            let kernel = device.kernel(&module, tile.name, tile.shared_bytes(dtype))?;
            Ok((tile, kernel))
        });
        let one = matmul_one::shared_bytes(dtype);
        let one =
            (one <= device.shared_bytes_max()).then(|| device.kernel(&module, "matmul_one", one));
        let wide = matmul_wide::ALL.into_iter().filter(|_| matmul_wide::is_for(device, dtype));
        let wide = wide.map(|wide| {
            let kernel = device.kernel(&module, wide.name, wide.shared_bytes(dtype))?;
            Ok((wide, kernel))
        });
        Ok(WeightKernels {
            matmul: matmul.collect::<Result<_, DeviceError>>()?,
            one: one.transpose()?,
            wide: wide.collect::<Result<_, DeviceError>>()?,
            pack: device.kernel(&module, "pack", 0)?,
            embed: device.kernel(&module, "embed", 0)?,
        })
    }
}

/// Bytes that a matrix takes on the device once it is loaded.
pub fn weight_bytes(dtype: WeightType, rows: usize, cols: usize) -> usize {
    if dtype == WeightType::F32 {
        return rows * cols * 4;
    }
    rows.div_ceil(16) * cols.div_ceil(64) * cell_bytes(dtype)
}

/// Checks that a matrix has the bytes that its shape needs, and gives those of one row.
pub(crate) fn check_size(matrix: &HostMatrix<'_>) -> Result<usize, DeviceError> {
    let HostMatrix { dtype, rows, cols, bytes, .. } = *matrix;
    let row_bytes = dtype.row_bytes(cols);
    let expected = row_bytes.and_then(|n| n.checked_mul(rows)).unwrap_or(0);
    if expected != bytes.len() || expected == 0 {
        return Err(DeviceError::WeightSize { dtype, rows, cols, got: bytes.len(), expected });
    }
    Ok(expected / rows)
}

impl Part {
    /// Takes neighbouring matrices of one type; the first output of the weight that they give is
    /// `first`. Gated ones are two of as many rows each, a multiple of eight.
    pub(crate) fn load(
        device: &Device,
        kernels: Kernels,
        matrices: &[HostMatrix<'_>],
        (first, is_gated): (usize, bool),
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "weights";
        let (dtype, cols) = (matrices[0].dtype, matrices[0].cols);
        let row_bytes = check_size(&matrices[0])?;
        let rows: usize = matrices.iter().map(|matrix| matrix.rows).sum();
        let file = device.alloc(rows * row_bytes, WHAT)?;
        let mut start = 0;
        for matrix in matrices {
            device.upload(&file, start, matrix.bytes)?;
            start += matrix.bytes.len();
        }
        let memory = match &kernels {
            Kernels::F32(_) => file,
            Kernels::Packed(kernels) => {
                let cell = cell_bytes(dtype);
                let packed = device.alloc(weight_bytes(dtype, rows, cols), WHAT)?;
                let matrix = FileMatrix { bytes: &file, rows, cols, row_bytes, is_gated };
                pack(device, &kernels.pack, &matrix, cell, &packed)?;
                packed
            }
        };
        let bias = load_bias(device, matrices, is_gated)?;
        // Kernels that multiply look at weights before the kernels in front of them have ended.
        device.wait()?;
        Ok(Part { first, rows, cols, memory, bias, kernels })
    }
}

/// The biases of stacked matrices; zeros for those that have none.
fn load_bias(
    device: &Device,
    matrices: &[HostMatrix<'_>],
    is_gated: bool,
) -> Result<Option<Memory>, DeviceError> {
    if matrices.iter().all(|matrix| matrix.bias.is_none()) {
        return Ok(None);
    }
    let mut bias = Vec::new();
    for matrix in matrices {
        match matrix.bias {
            None => bias.resize(bias.len() + matrix.rows, 0.0),
            Some(values) => {
                assert_eq!(values.len(), matrix.rows, "a bias for each row");
                bias.extend_from_slice(values);
            }
        }
    }
    if is_gated {
        let (gate, up) = bias.split_at(bias.len() / 2);
        let eights = gate.chunks_exact(8).zip(up.chunks_exact(8));
        bias = eights.flat_map(|(gate, up)| [gate, up].concat()).collect();
    }
    let memory = device.alloc(size_of_val(&bias[..]), "biases")?;
    device.upload(&memory, 0, &bias)?;
    Ok(Some(memory))
}

impl Cuda {
    /// Matrices below each other, each run of one type as one part.
    pub(crate) fn load_parts(&self, parts: &[HostMatrix<'_>]) -> Result<CudaWeight, DeviceError> {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols == parts[0].cols));
        for part in parts {
            check_size(part)?;
        }
        let (cols, is_gated) = (parts[0].cols, false);
        let mut weight = CudaWeight { rows: 0, cols, parts: Vec::new(), is_gated };
        for same in parts.chunk_by(|a, b| a.dtype == b.dtype) {
            let kernels = self.weight_kernels(same[0].dtype)?;
            let part = Part::load(&self.device, kernels, same, (weight.rows, false))?;
            weight.rows += part.rows;
            weight.parts.push(part);
        }
        Ok(weight)
    }

    /// Two matrices whose rows are interleaved, or below each other if they cannot be.
    pub(crate) fn load_pair(
        &self,
        gate: HostMatrix<'_>,
        up: HostMatrix<'_>,
    ) -> Result<CudaWeight, DeviceError> {
        let is_packed = gate.dtype == up.dtype && gate.dtype != WeightType::F32 && !self.is_exact;
        if !is_packed || gate.rows != up.rows || !gate.rows.is_multiple_of(8) {
            return self.load_parts(&[gate, up]);
        }
        assert_eq!(gate.cols, up.cols, "both have the same columns");
        check_size(&gate)?;
        check_size(&up)?;
        let (rows, cols) = (2 * gate.rows, gate.cols);
        let kernels = self.weight_kernels(gate.dtype)?;
        let part = Part::load(&self.device, kernels, &[gate, up], (0, true))?;
        Ok(CudaWeight { rows, cols, parts: vec![part], is_gated: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_table() {
        for (dtype, tenths) in [
            (WeightType::BF16, 160),
            (WeightType::Q8_0, 85),
            (WeightType::Q4_K, 60),
            (WeightType::Q6_K, 100),
            (WeightType::F32, 320),
        ] {
            assert_eq!(weight_bytes(dtype, 64, 256) * 80, 64 * 256 * tenths, "{dtype}");
        }
        assert_eq!(weight_bytes(WeightType::BF16, 17, 65), 32 * 128 * 2);
    }
}
