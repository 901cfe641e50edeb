//! How similar two queries are, with the same bits on every machine.

/// Lanes of a sum: as many as a GPU's warp has, so that its sums have the same bits.
const LANES: usize = 32;

/// The cosine of the angle between two vectors; 0 if one of them has no direction.
#[inline(always)]
pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    // One after the other: the lanes of three sums are more than any processor has registers.
    let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    if cosine.is_finite() { cosine } else { 0.0 }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    for (lane, (&a, &b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    sum(lanes)
}

/// The sum of all lanes, by halves.
#[inline(always)]
fn sum(mut lanes: [f32; LANES]) -> f32 {
    for half in [16, 8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_without_a_direction_is_like_none() {
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
        assert_eq!(cosine(&[3.0, 4.0], &[3.0, 4.0]), 1.0);
        assert_eq!(cosine(&[3.0, 4.0], &[-4.0, 3.0]), 0.0);
    }
}
