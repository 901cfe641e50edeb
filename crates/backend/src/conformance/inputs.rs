//! Inputs that repeat: a small generator of floats with outliers and of weights in every format.

use half::f16;

use crate::{WeightType, quant};

/// One value in this many is an outlier.
const OUTLIER_EVERY: usize = 61;
/// How much larger an outlier is.
const OUTLIER: f32 = 16.0;

/// A sequence of numbers that its seed determines (splitmix64).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A float in `-1.0..1.0`.
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `n` floats, bell-shaped around zero with deviation near one, and outliers.
    pub(super) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let bell = self.unit() + self.unit() + self.unit();
                if self.below(OUTLIER_EVERY) == 0 { bell * OUTLIER } else { bell }
            })
            .collect()
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// A matrix in its file format.
    ///
    /// Even rows are encoded values, as in a file. Odd rows are random bytes around sane scales of
    /// both signs, which reach codes and scales that no encoder would choose.
    pub(super) fn matrix(&mut self, dtype: WeightType, rows: usize, cols: usize) -> Matrix {
        let mut bytes = Vec::new();
        let fields = half_fields(dtype);
        for row in 0..rows {
            if row % 2 == 0 || fields.is_empty() {
                quant::quantize_row(dtype, &self.values(cols), &mut bytes);
                continue;
            }
            for _ in 0..cols / dtype.block_len() {
                let start = bytes.len();
                bytes.extend((0..dtype.block_bytes()).map(|_| self.next() as u8));
                for &(at, largest) in fields {
                    let scale = f16::from_f32((self.unit() + self.unit()) / largest);
                    bytes[start + at..start + at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
        Matrix { dtype, rows, cols, bytes }
    }
}

/// A matrix with the memory it lies in.
pub(super) struct Matrix {
    pub(super) dtype: WeightType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) bytes: Vec<u8>,
}

impl Matrix {
    fn row_bytes(&self, row: usize) -> &[u8] {
        let n = self.bytes.len() / self.rows;
        &self.bytes[row * n..(row + 1) * n]
    }

    /// The weights of one row.
    pub(super) fn row(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        quant::dequantize_row(self.dtype, self.row_bytes(row), &mut out);
        out
    }

    /// What each weight of a row would be if its code were zero, in the formats with offsets; the
    /// other formats have none.
    pub(super) fn offsets(&self, row: usize) -> Vec<f32> {
        let codes = match self.dtype {
            WeightType::Q4_1 | WeightType::Q5_1 => 4..self.dtype.block_bytes(),
            WeightType::Q2_K => 16..80,
            WeightType::Q4_K | WeightType::Q5_K => 16..self.dtype.block_bytes(),
            WeightType::F32
            | WeightType::F16
            | WeightType::BF16
            | WeightType::Q4_0
            | WeightType::Q5_0
            | WeightType::Q8_0
            | WeightType::Q3_K
            | WeightType::Q6_K => return vec![0.0; self.cols],
        };
        let mut bytes = self.row_bytes(row).to_vec();
        for block in bytes.chunks_exact_mut(self.dtype.block_bytes()) {
            block[codes.clone()].fill(0);
        }
        let mut out = vec![0.0; self.cols];
        quant::dequantize_row(self.dtype, &bytes, &mut out);
        out
    }
}

/// Where a block has its f16 fields, and by how much codes and scales can multiply each.
fn half_fields(dtype: WeightType) -> &'static [(usize, f32)] {
    match dtype {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => &[],
        WeightType::Q4_0 => &[(0, 8.0)],
        WeightType::Q4_1 => &[(0, 15.0), (2, 1.0)],
        WeightType::Q5_0 => &[(0, 16.0)],
        WeightType::Q5_1 => &[(0, 31.0), (2, 1.0)],
        WeightType::Q8_0 => &[(0, 128.0)],
        WeightType::Q2_K => &[(80, 45.0), (82, 15.0)],
        WeightType::Q3_K => &[(108, 128.0)],
        WeightType::Q4_K => &[(0, 945.0), (2, 63.0)],
        WeightType::Q5_K => &[(0, 1953.0), (2, 63.0)],
        WeightType::Q6_K => &[(208, 4096.0)],
    }
}
