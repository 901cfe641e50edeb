//! The definitions against GGUF's own Python package, and the encoders against the definitions.

use super::*;

/// Made by `tests/make_quants.py`: `type hex(bytes) hex(floats)`, one line a row.
const FIXTURE: &str = include_str!("../../tests/quants.txt");

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn every_type_decodes_bit_for_bit_as_gguf_defines_it() {
    let mut seen = Vec::new();
    for line in FIXTURE.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split(' ').collect();
        let [name, bytes, floats] = fields[..] else { panic!("bad line: {line}") };
        let dtype = WeightType::ALL.into_iter().find(|t| t.to_string() == name).unwrap();
        let expected: Vec<u32> = unhex(floats)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let mut out = vec![f32::NAN; expected.len()];
        dequantize_row(dtype, &unhex(bytes), &mut out);
        let got: Vec<u32> = out.iter().map(|w| w.to_bits()).collect();
        assert_eq!(got, expected, "{name}");
        seen.push(dtype);
    }
    seen.dedup();
    assert_eq!(seen, WeightType::ALL, "the fixture has every type");
}

/// A row whose blocks differ in size and sign, with outliers, zeros and a constant block.
fn row(n: usize) -> Vec<f32> {
    let mut state = 7u64;
    (0..n)
        .map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match i / 32 {
                0 => 0.0,
                1 => -0.75,
                2 => unit + 3.0,
                3 => unit - 3.0,
                b => unit * (b % 5 + 1) as f32 * if i % 37 == 0 { 8.0 } else { 0.5 },
            }
        })
        .collect()
}

/// Steps from the least to the greatest of weights of both signs, and weights that share a scale.
fn steps_and_run(dtype: WeightType) -> (f32, usize) {
    match dtype {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => (0.0, 1),
        // A symmetric format reaches one step less upwards than downwards.
        WeightType::Q4_0 => (14.0, 32),
        WeightType::Q5_0 => (30.0, 32),
        WeightType::Q8_0 => (254.0, 32),
        WeightType::Q3_K => (6.0, 16),
        WeightType::Q6_K => (62.0, 16),
        WeightType::Q4_1 | WeightType::Q4_K => (15.0, 32),
        WeightType::Q5_1 | WeightType::Q5_K => (31.0, 32),
        WeightType::Q2_K => (3.0, 16),
    }
}

#[test]
fn what_is_encoded_comes_back_within_half_a_step() {
    let row = row(1024);
    for dtype in WeightType::ALL {
        let mut bytes = Vec::new();
        quantize_row(dtype, &row, &mut bytes);
        assert_eq!(Some(bytes.len()), dtype.row_bytes(row.len()), "{dtype}");
        let mut back = vec![0.0; row.len()];
        dequantize_row(dtype, &bytes, &mut back);
        let (steps, run) = steps_and_run(dtype);
        if steps == 0.0 {
            // Half a unit in the last of 11 or 8 significant bits; F32 comes back as it was.
            let significant = [(WeightType::F16, 11), (WeightType::BF16, 8)];
            let relative = significant
                .iter()
                .find(|(of, _)| *of == dtype)
                .map_or(0.0, |(_, bits)| 2f32.powi(-bits));
            for (w, b) in row.iter().zip(&back) {
                assert!((w - b).abs() <= relative * w.abs(), "{dtype}: {w} came back as {b}");
            }
            continue;
        }
        for (i, (w, b)) in row.iter().zip(&back).enumerate() {
            let absmax = |part: &[f32]| part.iter().fold(0.0f32, |a, w| a.max(w.abs()));
            let near = absmax(&row[i / run * run..][..run]);
            // A run's step covers twice its largest weight at most; its scale is itself rounded up
            // by one part in 15 (Q2_K), 31 or 63 of the block's largest, and its offset as well.
            let block = dtype.block_len();
            let far = absmax(&row[i / block * block..][..block]) / 15.0;
            let step = 2.0 * (near + if block > 32 { 2.0 * far } else { 0.0 }) / steps;
            let bound = 0.51 * step + 1e-3 * near;
            assert!((w - b).abs() <= bound, "{dtype} {i}: {w} came back as {b}, bound {bound}");
        }
    }
}
