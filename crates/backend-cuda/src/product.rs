//! Products: each part of a weight with the kernel of its type, and activations in the form that it
//! reads.

use std::sync::PoisonError;

use nuthatch_backend::{DeviceError, Norm};

use crate::Cuda;
use crate::buf::CudaBuf;
use crate::device::{Device, Memory};
use crate::launch::matmul::{Rows, Target};
use crate::launch::matmul_one::{self, Normed};
use crate::launch::round::Rounding;
use crate::launch::{matmul, round};
use crate::weight::{CudaWeight, Kernels, Part};

/// Memory of one product at a time; usual products need none of it.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Activations that are padded, or in parts.
    rounded: Room,
    /// Products with parts.
    products: Room,
}

/// Memory that grows and never shrinks.
#[derive(Default)]
struct Room {
    memory: Option<Memory>,
    /// How often it has grown.
    generation: u64,
}

impl Room {
    /// Memory of at least `bytes`.
    fn at_least(&mut self, device: &Device, bytes: usize) -> Result<&Memory, DeviceError> {
        match self.memory.take().filter(|memory| memory.bytes() >= bytes) {
            Some(memory) => Ok(self.memory.insert(memory)),
            None => {
                let memory = device.alloc(bytes.next_power_of_two(), "scratch")?;
                self.generation += 1;
                Ok(self.memory.insert(memory))
            }
        }
    }
}

impl Cuda {
    /// Changes whenever scratch moves.
    pub(crate) fn scratch_generation(&self) -> u64 {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        scratch.rounded.generation + scratch.products.generation
    }

    /// `W x`, into or added to what is there.
    pub(crate) fn product(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        target: &mut Target<'_>,
    ) -> Result<(), DeviceError> {
        assert!(!w.is_gated, "a gated weight gives no plain product");
        target.out.set_stale();
        if rows == 0 {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { rounded, products, .. } = &mut *scratch;
        for part in &w.parts {
            match &part.kernels {
                Kernels::F32(common) => {
                    let part = (part, &common.matmul_f32);
                    matmul::matmul_f32(&self.device, part, (x, rows), target)?;
                }
                Kernels::Packed(kernels) if self.is_exact => {
                    let x = self.exact_rows(x, rows, w.cols, rounded)?;
                    let bytes = x.n * part.rows * 4;
                    let products = products.at_least(&self.device, bytes)?;
                    matmul::matmul_apart(&self.device, (part, kernels), x, products)?;
                    let products = (products, part);
                    round::sum(&self.device, &self.common.sum, products, rows, target)?;
                }
                Kernels::Packed(kernels) => {
                    let x = self.rounded_rows(x, rows, w.cols, rounded)?;
                    matmul::matmul(&self.device, (part, kernels), x, target)?;
                }
            }
        }
        Ok(())
    }

    /// The activation of both halves of `W x`.
    pub(crate) fn gated_product(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        if rows == 0 {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let x = self.rounded_rows(x, rows, w.cols, &mut scratch.rounded)?;
        self.gated_rows(w, x, out)
    }

    /// One row for products with `w` that normalise it on the way, if they can.
    pub(crate) fn normed_row(
        &self,
        w: &CudaWeight,
        norm: &Norm<'_, Cuda>,
        rows: usize,
    ) -> Option<Rows> {
        let can = |part: &Part| match &part.kernels {
            Kernels::F32(_) => false,
            Kernels::Packed(kernels) => kernels.one.is_some() && matmul_one::normalises(part),
        };
        if rows != 1 || self.is_exact || !w.parts.iter().all(can) {
            return None;
        }
        assert!(w.cols <= norm.x.len && w.cols <= norm.weight.len, "the row and its weights");
        let (x, weight) = (norm.x.floats.address(), norm.weight.floats.address());
        let normed = Some(Normed { x, weight, eps: norm.eps });
        Some(Rows { address: 0, stride: w.cols, n: 1, normed })
    }

    /// The first `n` outputs of `W x` of a row that is normalised on the way, or some more.
    pub(crate) fn normed_product(
        &self,
        w: &CudaWeight,
        row: Rows,
        n: usize,
        target: &mut Target<'_>,
    ) -> Result<(), DeviceError> {
        assert!(!w.is_gated, "a gated weight gives no plain product");
        target.out.set_stale();
        for part in w.parts.iter().filter(|part| part.first < n) {
            let Kernels::Packed(kernels) = &part.kernels else { panic!("a part that cannot") };
            matmul::matmul_first(&self.device, (part, kernels), row, n - part.first, target)?;
        }
        Ok(())
    }

    /// The activation of both halves of `W x`, for activations that are ready.
    pub(crate) fn gated_rows(
        &self,
        w: &CudaWeight,
        x: Rows,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let [Part { kernels: Kernels::Packed(kernels), .. }] = &w.parts[..] else {
            panic!("a gated weight is one packed part")
        };
        matmul::matmul_gated(&self.device, (&w.parts[0], kernels), x, out)
    }

    /// Activations rounded to bf16: those that came with the floats, if they are fresh and need no
    /// padding.
    fn rounded_rows(
        &self,
        x: &CudaBuf,
        rows: usize,
        cols: usize,
        scratch: &mut Room,
    ) -> Result<Rows, DeviceError> {
        let rounding = Rounding { rows, cols, stride: cols.next_multiple_of(64), parts: 1 };
        let stride = rounding.stride;
        if stride != cols {
            let target = scratch.at_least(&self.device, rows * stride * 2)?;
            round::round(&self.device, &self.common.round, x, rounding, target)?;
            return Ok(Rows { address: target.address(), stride, n: rows, normed: None });
        }
        if !x.is_fresh(rows * cols) {
            round::round(&self.device, &self.common.round, x, rounding, &x.rounded)?;
            x.set_fresh(rows * cols);
        }
        Ok(Rows { address: x.rounded.address(), stride, n: rows, normed: None })
    }

    /// Activations as rows of bf16 whose sums they are.
    fn exact_rows(
        &self,
        x: &CudaBuf,
        rows: usize,
        cols: usize,
        scratch: &mut Room,
    ) -> Result<Rows, DeviceError> {
        let (stride, parts) = (cols.next_multiple_of(64), round::EXACT_PARTS);
        let target = scratch.at_least(&self.device, rows * parts * stride * 2)?;
        let rounding = Rounding { rows, cols, stride, parts };
        round::round(&self.device, &self.common.round, x, rounding, target)?;
        Ok(Rows { address: target.address(), stride, n: rows * parts, normed: None })
    }
}
