//! What is packed is the matrix that it was made of.

use half::f16;
use nuthatch_backend::quant::dequantize_row;

use super::*;

#[test]
fn packing_loses_nothing() {
    let pool = Pool::new(2);
    let mut state = 1u32;
    for dtype in WeightType::ALL {
        for (rows, cols) in [(1, 256), (16, 512), (37, 256)] {
            let row_bytes = dtype.row_bytes(cols).unwrap();
            let mut bytes: Vec<u8> = (0..rows * row_bytes)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            make_scales_finite(dtype, &mut bytes);
            let matrix = HostMatrix { dtype, rows, cols, bytes: &bytes, bias: None };
            let packed = Packed::new(&pool, &mut Slab::default(), &matrix).unwrap();
            for row in 0..rows {
                let mut expected = vec![0.0; cols];
                dequantize_row(dtype, &bytes[row * row_bytes..][..row_bytes], &mut expected);
                let mut got = vec![0.0; cols];
                packed.row(row, &mut got);
                for (col, (&e, &g)) in expected.iter().zip(&got).enumerate() {
                    let close = (e - g).abs() <= e.abs().max(1.0) * 1e-6;
                    assert!(close || e.to_bits() == g.to_bits(), "{dtype} {row} {col}: {e} {g}");
                }
            }
        }
    }
}

/// Random bytes make infinite scales; a real file has none.
fn make_scales_finite(dtype: WeightType, bytes: &mut [u8]) {
    let block = dtype.block_bytes();
    let offsets: &[usize] = match dtype {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => &[0],
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
        WeightType::Q2_K => &[80, 82],
        WeightType::Q3_K => &[108],
        WeightType::Q6_K => &[208],
    };
    for block in bytes.chunks_exact_mut(block) {
        for &at in offsets {
            let last = if dtype == WeightType::F32 { at + 3 } else { at + 1 };
            block[last] = 0x1c | block[last] & 0x83;
        }
    }
}

#[test]
fn halves_convert_exactly() {
    for bits in 0..=u16::MAX {
        let expected = f16::from_bits(bits).to_f32();
        if expected.is_finite() {
            assert_eq!(f16_to_f32(bits).to_bits(), expected.to_bits());
        }
    }
}

#[test]
fn a_wrong_size_is_an_error() {
    let pool = Pool::new(1);
    for (rows, cols, len) in [(2, 32, 35), (0, 32, 0), (2, 33, 36)] {
        let bytes = vec![0; len];
        let dtype = WeightType::Q4_0;
        let matrix = HostMatrix { dtype, rows, cols, bytes: &bytes, bias: None };
        assert!(Packed::new(&pool, &mut Slab::default(), &matrix).is_err());
    }
}
