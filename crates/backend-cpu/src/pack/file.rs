//! The blocks of GGUF files, taken apart into unsigned codes and the scales that a header stores.
//!
//! What the bytes mean is defined, and drawn, in `nuthatch_backend::quant`.

use nuthatch_backend::WeightType;

/// One row's unit, taken out of its file format.
pub(super) struct RowUnit {
    pub(super) codes: [u8; 256],
    pub(super) d: [u8; 2],
    pub(super) min: [u8; 2],
    /// For each block or half block: what the header stores.
    pub(super) scales: [u8; 16],
    pub(super) mins: [u8; 16],
}

/// Takes one row's block of a file apart into unsigned codes and scales.
pub(super) fn unpack_file_unit(dtype: WeightType, bytes: &[u8], unit: &mut RowUnit) {
    match dtype {
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 => {
            unpack_simple(dtype, bytes, unit);
        }
        WeightType::Q8_0 => {
            unit.d.copy_from_slice(&bytes[..2]);
            for (code, &byte) in unit.codes.iter_mut().zip(&bytes[2..34]) {
                *code = byte ^ 0x80;
            }
        }
        WeightType::Q2_K => unpack_q2_k(bytes, unit),
        WeightType::Q3_K => unpack_q3_k(bytes, unit),
        WeightType::Q4_K | WeightType::Q5_K => unpack_q45_k(dtype, bytes, unit),
        WeightType::Q6_K => unpack_q6_k(bytes, unit),
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
            unreachable!("floats have no codes")
        }
    }
}

fn unpack_simple(dtype: WeightType, bytes: &[u8], unit: &mut RowUnit) {
    let has_min = matches!(dtype, WeightType::Q4_1 | WeightType::Q5_1);
    let has_high = matches!(dtype, WeightType::Q5_0 | WeightType::Q5_1);
    let (d, mut rest) = bytes.split_at(2);
    unit.d.copy_from_slice(d);
    if has_min {
        unit.min.copy_from_slice(&rest[..2]);
        rest = &rest[2..];
    }
    let mut high = 0;
    if has_high {
        high = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
        rest = &rest[4..];
    }
    let (low_half, high_half) = unit.codes[..32].split_at_mut(16);
    for (i, &byte) in rest[..16].iter().enumerate() {
        low_half[i] = byte & 15;
        high_half[i] = byte >> 4;
    }
    if has_high {
        for (i, code) in unit.codes[..32].iter_mut().enumerate() {
            *code |= ((high >> i & 1) as u8) << 4;
        }
    }
}

fn unpack_q2_k(bytes: &[u8], unit: &mut RowUnit) {
    let (scales, rest) = bytes.split_at(16);
    let (codes, d) = rest.split_at(64);
    unit.scales.copy_from_slice(scales);
    unit.d.copy_from_slice(&d[..2]);
    unit.min.copy_from_slice(&d[2..4]);
    for (i, code) in unit.codes.iter_mut().enumerate() {
        *code = codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
}

fn unpack_q3_k(bytes: &[u8], unit: &mut RowUnit) {
    let (high, rest) = bytes.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(12);
    unit.d.copy_from_slice(d);
    for (s, scale) in unit.scales.iter_mut().enumerate() {
        let low = if s < 8 { scales[s] & 15 } else { scales[s - 8] >> 4 };
        let high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
        *scale = (low | high << 4).wrapping_sub(32);
    }
    for (i, code) in unit.codes.iter_mut().enumerate() {
        let two = low[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        *code = two | (high[i % 32] >> (i / 32) & 1) << 2;
    }
}

fn unpack_q45_k(dtype: WeightType, bytes: &[u8], unit: &mut RowUnit) {
    unit.d.copy_from_slice(&bytes[..2]);
    unit.min.copy_from_slice(&bytes[2..4]);
    let packed = &bytes[4..16];
    for s in 0..4 {
        unit.scales[s] = packed[s] & 63;
        unit.mins[s] = packed[s + 4] & 63;
        unit.scales[s + 4] = (packed[s + 8] & 15) | (packed[s] >> 6) << 4;
        unit.mins[s + 4] = (packed[s + 8] >> 4) | (packed[s + 4] >> 6) << 4;
    }
    let has_high = dtype == WeightType::Q5_K;
    let (high, low) = if has_high { bytes[16..].split_at(32) } else { (&[][..], &bytes[16..]) };
    for (i, code) in unit.codes.iter_mut().enumerate() {
        let byte = low[i / 64 * 32 + i % 32];
        *code = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
        if has_high {
            *code |= (high[i % 32] >> (i / 32) & 1) << 4;
        }
    }
}

fn unpack_q6_k(bytes: &[u8], unit: &mut RowUnit) {
    let (low, rest) = bytes.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    unit.scales.copy_from_slice(scales);
    unit.d.copy_from_slice(d);
    for (i, code) in unit.codes.iter_mut().enumerate() {
        let (half, within) = (i / 128, i % 128);
        let byte = low[half * 64 + within % 64];
        let nibble = if within < 64 { byte & 15 } else { byte >> 4 };
        let two = high[half * 32 + within % 32] >> (within / 32 * 2) & 3;
        *code = nibble | two << 4;
    }
}
