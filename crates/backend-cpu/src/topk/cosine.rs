//! How similar queries are to those that a selection was made for.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::isa::Isa;

/// See [`nuthatch_backend::topk::cosine`]: the same bits.
pub(crate) fn cosine(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "target features")]
        // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
        Isa::Avx512 | Isa::Amx => unsafe { avx512(a, b) },
        _ => nuthatch_backend::topk::cosine(a, b),
    }
}

/// Three sums in two vectors each, one for each half of the lanes. Products are rounded before they are added, as
/// everywhere.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let zero = _mm512_setzero_ps();
    let (mut ab, mut aa, mut bb) = ([zero; 2], [zero; 2], [zero; 2]);
    for start in (0..n).step_by(32) {
        for (half, at) in [(0, start), (1, start + 16)] {
            let mask = ((1u32 << n.saturating_sub(at).min(16)) - 1) as __mmask16;
            #[expect(unsafe_code, reason = "vector loads read through raw pointers")]
            // SAFETY: both have as many numbers from here on as the mask has bits.
            let (x, y) = unsafe {
                (
                    _mm512_maskz_loadu_ps(mask, a.as_ptr().wrapping_add(at)),
                    _mm512_maskz_loadu_ps(mask, b.as_ptr().wrapping_add(at)),
                )
            };
            ab[half] = _mm512_add_ps(ab[half], _mm512_mul_ps(x, y));
            aa[half] = _mm512_add_ps(aa[half], _mm512_mul_ps(x, x));
            bb[half] = _mm512_add_ps(bb[half], _mm512_mul_ps(y, y));
        }
    }
    let cosine = sum(ab) / (sum(aa) * sum(bb)).sqrt();
    if cosine.is_finite() { cosine } else { 0.0 }
}

/// The sum of 32 lanes, by halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn sum([low, high]: [__m512; 2]) -> f32 {
    let x = _mm512_add_ps(low, high);
    let upper = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b11_10_11_10>(
        _mm512_castps_pd(x),
        _mm512_castps_pd(x),
    ));
    let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_castps512_ps256(upper));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}
