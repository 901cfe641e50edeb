//! `out = W x + bias`: which kernel multiplies which part, and who gets which rows.
//!
//! Every kernel sums one output in the same order: blocks of 32 columns from left to right, within
//! a block exact integers, then one fused multiply-add into the output's accumulator (floats: four
//! accumulators, columns dealt out in turn). So a row's result does not depend on how many rows
//! came with it, nor on the kernel that a batch size selects.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod order;
mod portable;

use std::ops::Range;

use nuthatch_backend::DeviceError;

use crate::acts::Acts;
use crate::isa::Isa;
use crate::mem::SharedMut;
use crate::pack::{Float, LANES, Packed};
use crate::pool::Pool;
pub(crate) use order::Order;

/// Rows of activations that a vector kernel multiplies at once.
pub(crate) const MAX_TILE: usize = 8;
/// From this many rows on, filling 16-row tiles beats vectors.
#[cfg(target_arch = "x86_64")]
const AMX_MIN_ROWS: usize = 12;

/// One or more matrices with equal columns, multiplied as one.
pub struct CpuWeight {
    /// No other weight of the device has it.
    pub(crate) number: usize,
    pub(crate) parts: Vec<Packed>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// What happens to the old values of `out`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Replace,
    Add,
}

/// One product's operands, shared by all threads.
pub(crate) struct Product<'a> {
    pub(crate) isa: Isa,
    pub(crate) weight: &'a CpuWeight,
    /// `[rows, cols]`.
    pub(crate) x: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) target: Target,
}

impl Product<'_> {
    /// Multiplies into `out`, `[rows, weight.rows]`.
    pub(crate) fn run(
        &self,
        pool: &Pool,
        acts: &mut Acts,
        order: &mut Order,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let weight = self.weight;
        assert!(self.x.len() >= self.rows * weight.cols);
        assert!(out.len() >= self.rows * weight.rows);
        if weight.parts.iter().any(|part| Float::of(part.dtype).is_none()) {
            acts.quantize(self.isa, pool, self.x, self.rows, weight.cols)?;
        }
        let acts = &*acts;
        let n_groups: usize = weight.parts.iter().map(|p| p.rows.div_ceil(LANES)).sum();
        // Pieces small enough to balance, large enough to stream.
        let piece = (n_groups / (pool.n_threads() * 8)).clamp(1, 64);
        let n_pieces = n_groups.div_ceil(piece);
        let shares = pool.shares(n_pieces);
        let first = shares.map(|share| self.read_first(share.start * piece..share.end * piece));
        let ahead = order.begin(weight.number, first);
        let out = SharedMut::new(out);
        pool.run_apart(n_pieces, ahead, &|i| {
            for group in i * piece..((i + 1) * piece).min(n_groups) {
                self.group(acts, group, out);
            }
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Amx {
                amx::release();
            }
        });
        Ok(())
    }

    /// Computes the 16 outputs of one group for all rows.
    fn group(&self, acts: &Acts, group: usize, out: SharedMut<'_, f32>) {
        let (part, group, first) = self.part(group).expect("a group of some part");
        let first = first + group * LANES;
        Tile { product: self, part, group, first, out }.compute(acts);
    }

    /// The part that has a group, its number in it, and the part's first output.
    fn part(&self, mut group: usize) -> Option<(&Packed, usize, usize)> {
        let mut first = 0;
        for part in &self.weight.parts {
            let n_groups = part.rows.div_ceil(LANES);
            if group < n_groups {
                return Some((part, group, first));
            }
            group -= n_groups;
            first += part.rows;
        }
        None
    }

    /// Addresses of the first bytes of some groups, at most to the end of the first one's part.
    fn read_first(&self, groups: Range<usize>) -> Range<usize> {
        let Some((part, group, _)) = self.part(groups.start) else { return 0..0 };
        let n_groups = groups.len().min(part.rows.div_ceil(LANES) - group);
        let bytes = part.group(group);
        let address = bytes.as_ptr().addr();
        address..address + (n_groups * bytes.len()).min(order::AHEAD_BYTES)
    }
}

/// One group of 16 outputs.
pub(crate) struct Tile<'a> {
    product: &'a Product<'a>,
    part: &'a Packed,
    /// Group inside the part.
    group: usize,
    /// First output column.
    first: usize,
    out: SharedMut<'a, f32>,
}

impl Tile<'_> {
    fn compute(&self, acts: &Acts) {
        let rows = self.product.rows;
        #[cfg(target_arch = "x86_64")]
        if self.product.isa == Isa::Amx
            && rows >= AMX_MIN_ROWS
            && Float::of(self.part.dtype).is_none()
        {
            return amx::group(self, acts);
        }
        let mut start = 0;
        while start < rows {
            // Powers of two keep the number of compiled kernels small.
            let n = 1 << (rows - start).min(MAX_TILE).ilog2();
            let mut sums = [[0.0; LANES]; MAX_TILE];
            self.vectors(acts, start, n, &mut sums);
            for (i, sums) in sums[..n].iter().enumerate() {
                self.store(start + i, sums);
            }
            start += n;
        }
    }

    fn vectors(&self, acts: &Acts, start: usize, n: usize, sums: &mut [[f32; LANES]; MAX_TILE]) {
        let bytes = self.part.group(self.group);
        let dtype = self.part.dtype;
        if let Some(float) = Float::of(dtype) {
            let cols = self.part.cols;
            let x = &self.product.x[start * cols..(start + n) * cols];
            match self.product.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512::floats(float, bytes, x, n, sums),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::floats(float, bytes, x, n, sums),
                _ => portable::floats(float, bytes, x, n, sums),
            }
        } else {
            match self.product.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512::codes(dtype, bytes, acts, start, n, sums),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::codes(dtype, bytes, acts, start, n, sums),
                _ => portable::codes(dtype, bytes, acts, start, n, sums),
            }
        }
    }

    /// Writes 16 finished sums of row `row`.
    #[inline(always)]
    fn store(&self, row: usize, sums: &[f32; LANES]) {
        let n = LANES.min(self.part.rows - self.group * LANES);
        let stride = self.product.weight.rows;
        #[expect(unsafe_code, reason = "threads write disjoint columns")]
        // SAFETY: each group is computed once, and groups own disjoint columns of each row.
        let out = unsafe { self.out.part(row * stride + self.first, n) };
        let bias = self.part.bias.as_ref().map(|bias| &bias[self.group * LANES..][..n]);
        for (i, out) in out.iter_mut().enumerate() {
            let value = sums[i] + bias.map_or(0.0, |bias| bias[i]);
            *out = match self.product.target {
                Target::Replace => value,
                Target::Add => *out + value,
            };
        }
    }
}
