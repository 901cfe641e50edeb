//! The kernels in plain Rust, sixteen lanes at a time: the reference beside the tuned ones, and the
//! code that machines without AVX2 run.

use nuthatch_backend::WeightType;

use super::MAX_TILE;
use crate::acts::Acts;
use crate::pack::{self, BLOCK, Float, Format, LANES, QUADS, f16_to_f32, with_format};

type Sums = [[f32; LANES]; MAX_TILE];

/// Sums of rows `start..start + n` with one group of quantised weights.
pub(super) fn codes(
    dtype: WeightType,
    bytes: &[u8],
    acts: &Acts,
    start: usize,
    n: usize,
    sums: &mut Sums,
) {
    with_format!(dtype,
        F => group_codes::<F>(bytes, acts, start, n, sums),
        float => unreachable!("floats have their own kernel"));
}

fn group_codes<F: Format>(bytes: &[u8], acts: &Acts, start: usize, n: usize, sums: &mut Sums) {
    let half = BLOCK / F::SUBS;
    for (u, unit) in bytes.chunks_exact(F::UNIT_BYTES).enumerate() {
        let (header, blocks) = unit.split_at(F::HEADER_BYTES);
        for (b, block) in blocks.chunks_exact(F::BLOCK_BYTES).enumerate() {
            let mut quads = [[0i32; 4 * LANES]; QUADS];
            for (q, quad) in quads.iter_mut().enumerate() {
                for (x, code) in quad.iter_mut().enumerate() {
                    *code = i32::from(pack::code::<F>(block, q, x)) - F::OFFSET;
                }
            }
            let block_idx = u * F::BLOCKS + b;
            for sub in 0..F::SUBS {
                let scales: [(f32, f32); LANES] =
                    std::array::from_fn(|lane| pack::scale::<F>(header, b, sub, lane));
                for (i, sums) in sums[..n].iter_mut().enumerate() {
                    let at = acts.index(start + i, block_idx);
                    let x = &acts.codes[at * BLOCK + sub * half..][..half];
                    let sum_at = acts.sum_index(start + i, block_idx, (F::SUBS, sub));
                    let x_scale = acts.scale[at];
                    for lane in 0..LANES {
                        let mut dot = 0;
                        for (q, x) in x.chunks_exact(4).enumerate() {
                            let quad = &quads[sub * half / 4 + q][lane * 4..][..4];
                            dot += quad[0] * i32::from(x[0])
                                + quad[1] * i32::from(x[1])
                                + quad[2] * i32::from(x[2])
                                + quad[3] * i32::from(x[3]);
                        }
                        let (scale, min) = scales[lane];
                        sums[lane] += dot as f32 * (scale * x_scale);
                        if F::MINS {
                            sums[lane] += min * acts.scaled_sums[sum_at];
                        }
                    }
                }
            }
        }
    }
}

/// Sums of `n` rows with one group of float weights.
pub(super) fn floats(float: Float, bytes: &[u8], x: &[f32], n: usize, sums: &mut Sums) {
    let cols = x.len() / n;
    for (i, sums) in sums[..n].iter_mut().enumerate() {
        let mut parts = [[0.0; LANES]; 4];
        for (col, &x) in x[i * cols..(i + 1) * cols].iter().enumerate() {
            let part = &mut parts[col % 4];
            for (lane, sum) in part.iter_mut().enumerate() {
                let w = float_at(float, bytes, col * LANES + lane);
                *sum += w * x;
            }
        }
        for lane in 0..LANES {
            sums[lane] = (parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane]);
        }
    }
}

#[inline(always)]
fn float_at(float: Float, bytes: &[u8], i: usize) -> f32 {
    match float {
        Float::F32 => {
            let b = &bytes[i * 4..][..4];
            f32::from_le_bytes([b[0], b[1], b[2], b[3]])
        }
        Float::Bf16 => {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]])) << 16)
        }
        Float::F16 => f16_to_f32(u16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]])),
    }
}
