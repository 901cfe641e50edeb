//! Weights that nobody trained, for measuring the speed of a shape without its files.

use nuthatch_backend::WeightType;

use crate::files::TensorView;

/// Bytes of random weights that larger matrices repeat.
const PATTERN_BYTES: usize = 64 << 20;

/// bf16 weights of any shape: matrices with small values of both signs, vectors of ones.
///
/// Matrices share their bytes, so that a model needs no more memory here than its largest one; a
/// device copies each of them. Outputs are finite and mean nothing.
pub(crate) struct RandomWeights {
    matrix: Vec<u8>,
    vector: Vec<u8>,
}

impl RandomWeights {
    /// Weights for matrices of up to `matrix_len` and vectors of up to `vector_len` elements.
    pub(crate) fn new(matrix_len: usize, vector_len: usize) -> Self {
        let n = (2 * matrix_len).min(PATTERN_BYTES);
        let mut state = 1u64;
        let mut pattern = Vec::with_capacity(n);
        while pattern.len() < n {
            // SplitMix64: any even spread will do, and the same one in every run.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            for word in (z ^ (z >> 31)).to_le_bytes().as_chunks::<2>().0 {
                // Any sign and fraction, and an exponent of 2^-7 or 2^-6: 0.008 to 0.03.
                let bits = u16::from_le_bytes(*word) & 0x80FF | 0x3C00;
                pattern.extend_from_slice(&bits.to_le_bytes());
            }
        }
        let mut matrix = pattern.repeat((2 * matrix_len).div_ceil(pattern.len().max(1)));
        matrix.truncate(2 * matrix_len);
        RandomWeights { matrix, vector: 0x3F80u16.to_le_bytes().repeat(vector_len) }
    }

    /// A tensor of the shape.
    pub(crate) fn tensor(&self, shape: Vec<usize>) -> TensorView<'_> {
        let n = 2 * shape.iter().product::<usize>();
        let bytes = if shape.len() == 1 { &self.vector[..n] } else { &self.matrix[..n] };
        TensorView { dtype: WeightType::BF16, shape, bytes }
    }
}

impl std::fmt::Debug for RandomWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RandomWeights").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn values_are_small_and_of_both_signs() {
        let weights = RandomWeights::new(1000, 7);
        let view = weights.tensor(vec![10, 100]);
        let values: Vec<f32> = view
            .bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&bytes| bf16::from_le_bytes(bytes).to_f32())
            .collect();
        assert_eq!(values.len(), 1000);
        assert!(values.iter().all(|x| (0.007..0.04).contains(&x.abs())));
        let n_negative = values.iter().filter(|x| **x < 0.0).count();
        assert!((400..600).contains(&n_negative), "{n_negative}");
        let ones = weights.tensor(vec![7]);
        assert!(
            ones.bytes.as_chunks::<2>().0.iter().all(|&b| bf16::from_le_bytes(b).to_f32() == 1.0)
        );
    }
}
