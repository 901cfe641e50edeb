//! Dequantisation against the `gguf` Python package, on random blocks of every type.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic and print")]

mod common;

use common::golden_dir;
use nuthatch_backend::WeightType;
use nuthatch_backend::quant::dequantize_row;

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).unwrap() as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

#[test]
fn blocks_have_the_values_that_the_gguf_package_gives_them() {
    let json = std::fs::read(golden_dir().join("quants.json")).unwrap();
    let types: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let quantised = WeightType::ALL.into_iter().filter(|dtype| dtype.block_len() > 1);
    for dtype in quantised {
        let blocks = types[dtype.to_string()].as_array().expect("every type is there");
        assert!(!blocks.is_empty());
        for block in blocks {
            let bytes = unhex(block["block"].as_str().unwrap());
            let expected: Vec<f32> = unhex(block["values"].as_str().unwrap())
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&word| f32::from_le_bytes(word))
                .collect();
            assert_eq!(bytes.len(), dtype.block_bytes(), "{dtype}");
            let mut found = vec![0.0; dtype.block_len()];
            dequantize_row(dtype, &bytes, &mut found);
            let scale = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
                // The order of the few multiplications is free, so the last bits are.
                assert!((x - y).abs() <= 1e-6 * scale, "{dtype}, weight {i}: {x}, not {y}");
            }
        }
    }
}
