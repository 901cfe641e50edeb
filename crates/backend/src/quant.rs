//! The weight formats of GGUF files, defined by how one block of bytes becomes floats.
//!
//! Readable, scalar and exact: [`dequantize_row`] is the definition that every device is judged
//! by. [`quantize_row`] rounds to nearest with the plainest choice of scales; it makes weights for
//! tests and benches, and is not a tool to quantise models with.
//!
//! A format is a sequence of blocks of [`WeightType::block_len`] weights, little-endian. Two ideas
//! build all of them:
//!
//! ```text
//!   symmetric   w = d * q          d: f16            Q4_0 Q5_0 Q8_0, and Q3_K Q6_K below
//!   offset      w = d * q + m      d, m: f16         Q4_1 Q5_1, and Q2_K Q4_K Q5_K below
//! ```
//!
//! The `_K` formats hold 256 weights in runs of 16 or 32. Each run has its own small integer scale
//! (and offset), which the block's f16 `d` (and `dmin`) multiply.

mod blocks;
mod encode;
mod k_blocks;

use half::{bf16, f16};

use crate::WeightType;

/// Weights of one `_K` block.
const K_LEN: usize = 256;

/// Decodes one row: `out[i]` is the `i`-th weight of `bytes`, exactly as the format defines it.
///
/// Every bit pattern decodes to something, so hostile bytes give strange floats at worst.
///
/// # Panics
///
/// If `bytes` is not `dtype.row_bytes(out.len())` long.
pub fn dequantize_row(dtype: WeightType, bytes: &[u8], out: &mut [f32]) {
    check_row(dtype, bytes.len(), out.len());
    let decode: fn(&[u8], &mut [f32]) = match dtype {
        WeightType::F32 => |b, out| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        WeightType::F16 => |b, out| out[0] = f16_at(b, 0),
        WeightType::BF16 => |b, out| out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        WeightType::Q4_0 => blocks::decode_q4_0,
        WeightType::Q4_1 => blocks::decode_q4_1,
        WeightType::Q5_0 => blocks::decode_q5_0,
        WeightType::Q5_1 => blocks::decode_q5_1,
        WeightType::Q8_0 => blocks::decode_q8_0,
        WeightType::Q2_K => k_blocks::decode_q2_k,
        WeightType::Q3_K => k_blocks::decode_q3_k,
        WeightType::Q4_K => k_blocks::decode_q4_k,
        WeightType::Q5_K => k_blocks::decode_q5_k,
        WeightType::Q6_K => k_blocks::decode_q6_k,
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(dtype.block_len())) {
        decode(block, out);
    }
}

/// Encodes one row by rounding to nearest, and appends its bytes to `out`.
///
/// The weights come back from [`dequantize_row`] within about half a step of the format, the step
/// being set by the range of the block (of the run, in the `_K` formats).
///
/// # Panics
///
/// If `row` is not a whole number of blocks.
pub fn quantize_row(dtype: WeightType, row: &[f32], out: &mut Vec<u8>) {
    assert!(row.len().is_multiple_of(dtype.block_len()), "{} weights of {dtype}", row.len());
    for block in row.chunks_exact(dtype.block_len()) {
        match dtype {
            WeightType::F32 => out.extend_from_slice(&block[0].to_le_bytes()),
            WeightType::F16 => out.extend_from_slice(&f16::from_f32(block[0]).to_le_bytes()),
            WeightType::BF16 => out.extend_from_slice(&bf16::from_f32(block[0]).to_le_bytes()),
            WeightType::Q4_0 => encode::q4_0(block, out),
            WeightType::Q4_1 => encode::q4_1(block, out),
            WeightType::Q5_0 => encode::q5_0(block, out),
            WeightType::Q5_1 => encode::q5_1(block, out),
            WeightType::Q8_0 => encode::q8_0(block, out),
            WeightType::Q2_K => encode::q2_k(block, out),
            WeightType::Q3_K => encode::q3_k(block, out),
            WeightType::Q4_K => encode::q4_k(block, out),
            WeightType::Q5_K => encode::q5_k(block, out),
            WeightType::Q6_K => encode::q6_k(block, out),
        }
    }
}

fn check_row(dtype: WeightType, n_bytes: usize, n_weights: usize) {
    let expected = dtype.row_bytes(n_weights);
    assert_eq!(expected, Some(n_bytes), "bytes of {n_weights} weights of {dtype}");
}

/// The f16 at a byte offset.
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests;
