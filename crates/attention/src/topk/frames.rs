//! What digests project keys on.

/// A random frame of `n_rows` rows of width `d`: stacked orthonormal bases, the last one cut off.
/// The same seed gives the same frame.
pub fn orthonormal_frame(n_rows: usize, d: usize, seed: u64) -> Vec<f32> {
    let mut random = Bell::new(seed);
    let mut frame: Vec<f32> = Vec::with_capacity(n_rows * d);
    while frame.len() < n_rows * d {
        let basis = frame.len() / d / d * d;
        let mut row: Vec<f64> = (0..d).map(|_| random.next()).collect();
        // Twice, because once leaves what rounding left.
        for _ in 0..2 {
            for other in frame[basis * d..].chunks_exact(d) {
                let product: f64 = row.iter().zip(other).map(|(a, &b)| a * f64::from(b)).sum();
                row.iter_mut().zip(other).for_each(|(a, &b)| *a -= product * f64::from(b));
            }
        }
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        // A row that happens to lie in the others' span is drawn again.
        if norm > 1e-6 {
            frame.extend(row.iter().map(|x| (x / norm) as f32));
        }
    }
    frame
}

/// The `n_rows` directions of width `d` in which vectors with these second moments, `[D][D]`, are
/// longest, orthonormal, longest first, and the moments along them.
pub fn principal_frame(moments: &[f64], d: usize, n_rows: usize) -> (Vec<f32>, Vec<f64>) {
    let (values, vectors) = eigen(moments.to_vec(), d);
    let mut order: Vec<usize> = (0..d).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(n_rows);
    let elements = order.iter().flat_map(|&i| (0..d).map(move |e| (i, e)));
    let rows = elements.map(|(i, e)| vectors[e * d + i] as f32).collect();
    // What rounding makes negative is nothing.
    (rows, order.iter().map(|&i| values[i].max(0.0)).collect())
}

/// Eigenvalues and eigenvectors (columns) of a symmetric matrix, by Jacobi's rotations.
fn eigen(mut a: Vec<f64>, d: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors = vec![0.0; d * d];
    for i in 0..d {
        vectors[i * d + i] = 1.0;
    }
    let total: f64 = a.iter().map(|x| x * x).sum();
    for _ in 0..60 {
        let off: f64 = (0..d * d).filter(|i| i / d != i % d).map(|i| a[i] * a[i]).sum();
        if off <= total * 1e-20 {
            break;
        }
        for p in 0..d {
            for q in p + 1..d {
                rotate(&mut a, &mut vectors, d, (p, q));
            }
        }
    }
    ((0..d).map(|i| a[i * d + i]).collect(), vectors)
}

/// Turns `a[p][q]` to zero.
fn rotate(a: &mut [f64], vectors: &mut [f64], d: usize, (p, q): (usize, usize)) {
    let apq = a[p * d + q];
    if apq == 0.0 {
        return;
    }
    let theta = (a[q * d + q] - a[p * d + p]) / (2.0 * apq);
    let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let t = if theta == 0.0 { 1.0 } else { t };
    let c = 1.0 / (t * t + 1.0).sqrt();
    let s = t * c;
    for i in 0..d {
        let (x, y) = (a[i * d + p], a[i * d + q]);
        (a[i * d + p], a[i * d + q]) = (c * x - s * y, s * x + c * y);
    }
    for i in 0..d {
        let (x, y) = (a[p * d + i], a[q * d + i]);
        (a[p * d + i], a[q * d + i]) = (c * x - s * y, s * x + c * y);
        let (x, y) = (vectors[i * d + p], vectors[i * d + q]);
        (vectors[i * d + p], vectors[i * d + q]) = (c * x - s * y, s * x + c * y);
    }
}

/// Bell-shaped numbers that their seed determines (splitmix64, sums of twelve).
pub(super) struct Bell(u64);

impl Bell {
    pub(super) fn new(seed: u64) -> Self {
        Bell(seed)
    }

    pub(super) fn next(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Evenly from 0 to 1.
    pub(super) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn frames_are_stacked_orthonormal_bases() {
        let (d, n_rows) = (16, 40);
        let frame = orthonormal_frame(n_rows, d, 5);
        let rows: Vec<&[f32]> = frame.chunks_exact(d).collect();
        assert_eq!(rows.len(), n_rows);
        for i in 0..n_rows {
            for j in 0..i {
                let expected = 0.0;
                let is_same_basis = i / d == j / d;
                assert!(!is_same_basis || (dot(rows[i], rows[j]) - expected).abs() < 1e-5);
            }
            assert!((dot(rows[i], rows[i]) - 1.0).abs() < 1e-5);
        }
        assert!(dot(rows[0], rows[16]).abs() < 0.99, "bases differ");
        assert_eq!(frame, orthonormal_frame(n_rows, d, 5));
        assert_ne!(frame, orthonormal_frame(n_rows, d, 6));
    }

    #[test]
    fn principal_directions_come_longest_first() {
        // Moments of a turned box: 9, 4 and 1 along known axes.
        let axes = orthonormal_frame(3, 3, 9);
        let mut moments = vec![0.0; 9];
        for (axis, length) in axes.chunks_exact(3).zip([4.0, 1.0, 9.0]) {
            for i in 0..3 {
                for j in 0..3 {
                    moments[i * 3 + j] += length * f64::from(axis[i]) * f64::from(axis[j]);
                }
            }
        }
        let (found, lengths) = principal_frame(&moments, 3, 2);
        assert!(dot(&found[..3], &axes[6..]).abs() > 0.9999);
        assert!(dot(&found[3..], &axes[..3]).abs() > 0.9999);
        assert!((lengths[0] - 9.0).abs() < 1e-4 && (lengths[1] - 4.0).abs() < 1e-4, "{lengths:?}");
        assert_eq!(principal_frame(&[0.0; 9], 3, 3).0.len(), 9);
    }
}
