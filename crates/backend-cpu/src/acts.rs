//! Activations as eight-bit integers, the left side of every product with quantised weights.
//!
//! Each row is cut into blocks of 32; a block is scaled so that its largest magnitude is 127. Rows
//! are cut into tiles of 16, and a tile is `[block][row][32]`: a block of it is an AMX tile, and a
//! kernel walks along a tile's blocks through memory in one direction.

use crate::isa::Isa;
use crate::mem::{Region, SharedMut};
use crate::pack::BLOCK;
use crate::pool::Pool;
use crate::versions::versions;

/// Rows of a tile. Rows are padded to whole tiles, so that a tile load never leaves the buffer.
pub(crate) const TILE: usize = 16;
/// Below this many values one thread quantises faster than two can be told to.
const SERIAL_VALUES: usize = 8192;

/// A batch of quantised rows.
pub(crate) struct Acts {
    pub(crate) rows: usize,
    /// Rows of a tile: [`TILE`], or 1 when there is one row.
    pub(crate) tile: usize,
    /// Blocks of a row.
    pub(crate) n_blocks: usize,
    /// `[tiles][n_blocks][tile][32]`.
    pub(crate) codes: Region<i8>,
    /// `[tiles][n_blocks][tile]` value of code 1.
    pub(crate) scale: Region<f32>,
    /// `[tiles][n_blocks][3][tile]` sums of the codes of the first half, the second, the whole
    /// block: what a weight's offset is multiplied with.
    pub(crate) sums: Region<i32>,
    /// The same sums times `scale`: what a weight's minimum is multiplied with.
    pub(crate) scaled_sums: Region<f32>,
}

impl Acts {
    pub(crate) fn empty() -> Self {
        let zero = "nothing is allocated for length zero";
        Acts {
            rows: 0,
            tile: 1,
            n_blocks: 0,
            codes: Region::zeroed(0, "activations").expect(zero),
            scale: Region::zeroed(0, "activations").expect(zero),
            sums: Region::zeroed(0, "activations").expect(zero),
            scaled_sums: Region::zeroed(0, "activations").expect(zero),
        }
    }

    /// Where block `block` of `row` is, counted in blocks. The rows that follow in its tile follow
    /// it.
    #[inline(always)]
    pub(crate) fn index(&self, row: usize, block: usize) -> usize {
        (row / self.tile * self.n_blocks + block) * self.tile + row % self.tile
    }

    /// Where the sum of half `sub`, of `subs` that a format has, of that block is.
    #[inline(always)]
    pub(crate) fn sum_index(&self, row: usize, block: usize, (subs, sub): (usize, usize)) -> usize {
        let kind = if subs == 2 { sub } else { 2 };
        ((row / self.tile * self.n_blocks + block) * 3 + kind) * self.tile + row % self.tile
    }

    /// Quantises `rows` rows of `cols` floats.
    pub(crate) fn quantize(
        &mut self,
        isa: Isa,
        pool: &Pool,
        x: &[f32],
        rows: usize,
        cols: usize,
    ) -> Result<(), nuthatch_backend::DeviceError> {
        assert!(x.len() >= rows * cols && cols.is_multiple_of(BLOCK));
        self.rows = rows;
        self.tile = if rows == 1 { 1 } else { TILE };
        self.n_blocks = cols / BLOCK;
        let n_scales = rows.next_multiple_of(self.tile) * self.n_blocks;
        if self.codes.len() < n_scales * BLOCK {
            self.codes = Region::zeroed(n_scales * BLOCK, "activations")?;
            self.scale = Region::zeroed(n_scales, "activations")?;
            self.sums = Region::zeroed(n_scales * 3, "activations")?;
            self.scaled_sums = Region::zeroed(n_scales * 3, "activations")?;
        }
        let (n_blocks, tile) = (self.n_blocks, self.tile);
        let codes = SharedMut::new(&mut self.codes);
        let scale = SharedMut::new(&mut self.scale);
        let sums = SharedMut::new(&mut self.sums);
        let scaled_sums = SharedMut::new(&mut self.scaled_sums);
        let row = |r: usize| {
            for (b, x) in x[r * cols..(r + 1) * cols].as_chunks::<BLOCK>().0.iter().enumerate() {
                let (tile_block, lane) = (r / tile * n_blocks + b, r % tile);
                let at = tile_block * tile + lane;
                #[expect(unsafe_code, reason = "threads write disjoint rows")]
                // SAFETY: each row is handled once, and `at` differs between rows and blocks.
                let (codes, scale) = unsafe { (codes.part(at * BLOCK, BLOCK), scale.part(at, 1)) };
                let codes = codes.try_into().expect("a part is a block");
                let (step, [low, high]) = quantize_block(isa, x, codes);
                scale[0] = step;
                for (i, sum) in [low, high, low + high].into_iter().enumerate() {
                    let at = (3 * tile_block + i) * tile + lane;
                    #[expect(unsafe_code, reason = "threads write disjoint rows")]
                    // SAFETY: as above.
                    let (sums, scaled) = unsafe { (sums.part(at, 1), scaled_sums.part(at, 1)) };
                    (sums[0], scaled[0]) = (sum, sum as f32 * step);
                }
            }
        };
        if rows * cols <= SERIAL_VALUES {
            (0..rows).for_each(row);
        } else {
            pool.run(rows, &row);
        }
        Ok(())
    }
}

versions! {
    /// Writes the codes of one block, and returns its scale and the sums of its halves. A value
    /// that is not finite makes the scale so, and with it every product: it is not lost.
    fn quantize_block(x: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> (f32, [i32; 2]) = quantize_inner;
}

#[inline(always)]
fn quantize_inner<const FUSED: bool>(x: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> (f32, [i32; 2]) {
    // 1.5 * 2^23: adding it rounds to the nearest integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Magnitudes compare like integers, and NaN is above them all.
    let largest = x.iter().fold(0, |max: u32, v| max.max(v.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
    let mut sums = [0; 2];
    for (half, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        for (code, &value) in codes.iter_mut().zip(x) {
            let bits = (value * inverse + ROUND).to_bits();
            *code = bits.wrapping_sub(ROUND.to_bits()).cast_signed() as i8;
            sums[half] += i32::from(*code);
        }
    }
    (largest / 127.0, sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_within_half_a_step() {
        let pool = Pool::new(2);
        let x: Vec<f32> = (0..3 * 64).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.3).collect();
        let mut acts = Acts::empty();
        acts.quantize(Isa::detect(), &pool, &x, 3, 64).unwrap();
        for r in 0..3 {
            for c in 0..64 {
                let at = c / 32 * acts.tile + r;
                let value = f32::from(acts.codes[at * 32 + c % 32]) * acts.scale[at];
                assert!((value - x[r * 64 + c]).abs() <= acts.scale[at] * 0.5001);
            }
            let sum: i32 = (0..16).map(|c| i32::from(acts.codes[r * 32 + c])).sum();
            assert_eq!(acts.sums[r], sum);
        }
    }

    #[test]
    fn what_is_not_finite_is_not_lost() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 17, 31] {
                let mut x = [1.0; 32];
                x[at] = bad;
                let (scale, _) = quantize_block(Isa::detect(), &x, &mut [0; 32]);
                assert!(!scale.is_finite());
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let mut acts = Acts::empty();
        acts.quantize(Isa::Scalar, &Pool::new(1), &[0.0; 32], 1, 32).unwrap();
        assert!(acts.codes.iter().all(|&c| c == 0));
        assert_eq!(acts.scale[0], 0.0);
    }
}
