//! One loop, compiled for each instruction set.

/// Defines a function that takes an [`Isa`](crate::isa::Isa) first and calls the generic
/// `inner::<FUSED>` compiled for it. The compiler does the vectorising: loops over arrays of
/// sixteen floats become vector instructions of whatever width the set has.
macro_rules! versions {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $inner:ident;) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $inner::<true>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $inner::<true>($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                #[expect(unsafe_code, reason = "target features")]
                // SAFETY: `Cpu::new` refuses an instruction set that the machine does not have.
                $crate::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                #[expect(unsafe_code, reason = "target features")]
                // SAFETY: as above.
                $crate::isa::Isa::Avx512 | $crate::isa::Isa::Amx => unsafe { avx512($($arg),*) },
                _ => $inner::<false>($($arg),*),
            }
        }
    };
}
pub(crate) use versions;

/// `a * b + c`, fused where the machine can.
#[inline(always)]
pub(crate) fn fma<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts, so that n * ln 2 is exact to more than 24 bits.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 * 2^23: adding it rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;
/// What the powers of the remainder are multiplied by, from the seventh down to the second.
const POWERS: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// Exponentials of less are 0.
const LEAST: f32 = -87.3;

/// `e^x` within two units in the last place; 0 below -87.3, where the result would be subnormal.
#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f32) -> f32 {
    let clamped = if x > 88.0 { 88.0 } else { x };
    exp_to_88::<FUSED>(clamped)
}

/// The same bits for `x` up to 88 or no number, as differences from a maximum are.
#[inline(always)]
pub(crate) fn exp_to_88<const FUSED: bool>(x: f32) -> f32 {
    let rounded = fma::<FUSED>(x, LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma::<FUSED>(n, -LN2_HIGH, x);
    let r = fma::<FUSED>(n, -LN2_LOW, r);
    let mut p = POWERS[0];
    for power in &POWERS[1..] {
        p = fma::<FUSED>(p, r, *power);
    }
    p = fma::<FUSED>(p, r * r, r) + 1.0;
    // The integer n is in the low bits of the rounded sum. A cast would saturate, and a loop with
    // saturating casts is not vectorised.
    let n_bits = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(n_bits.wrapping_add(127) << 23);
    // Far below, what was computed so far means nothing.
    if x < LEAST { 0.0 } else { p * scale }
}

/// The same of `N` vectors, step by step: one after the other they would wait for their own sums, and a
/// processor looks less far ahead than a whole exponential is long.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn exps_to_88<const N: usize>(
    x: [std::arch::x86_64::__m512; N],
) -> [std::arch::x86_64::__m512; N] {
    use std::arch::x86_64::*;
    use std::array::from_fn;
    let all = _mm512_set1_ps;
    let rounded: [__m512; N] = from_fn(|i| _mm512_fmadd_ps(x[i], all(LOG2_E), all(ROUND)));
    let n: [__m512; N] = from_fn(|i| _mm512_sub_ps(rounded[i], all(ROUND)));
    let r: [__m512; N] = from_fn(|i| _mm512_fmadd_ps(n[i], all(-LN2_HIGH), x[i]));
    let r: [__m512; N] = from_fn(|i| _mm512_fmadd_ps(n[i], all(-LN2_LOW), r[i]));
    let mut p = [all(POWERS[0]); N];
    for power in &POWERS[1..] {
        p = from_fn(|i| _mm512_fmadd_ps(p[i], r[i], all(*power)));
    }
    p = from_fn(|i| _mm512_fmadd_ps(p[i], _mm512_mul_ps(r[i], r[i]), r[i]));
    p = from_fn(|i| _mm512_add_ps(p[i], all(1.0)));
    from_fn(|i| {
        let first = _mm512_set1_epi32(ROUND.to_bits().cast_signed() - 127);
        let exponent = _mm512_sub_epi32(_mm512_castps_si512(rounded[i]), first);
        let scale = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent));
        let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x[i], all(LEAST));
        _mm512_maskz_mul_ps(counts, p[i], scale)
    })
}

/// What the powers of what is behind the point are multiplied by, from the fifth down to none.
#[cfg(target_arch = "x86_64")]
const PARTS: [f32; 6] =
    [1.877_576_7e-3, 8.989_341e-3, 5.582_631_8e-2, 2.401_536_1e-1, 6.931_531e-1, 9.999_999_4e-1];

/// `2^x` of `N` vectors within 2e-7 of it, and 0 where that is subnormal or less: half as many instructions as
/// [`exps_to_88`] has, for scores that need not be nearer.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
pub(crate) fn powers_of_two<const N: usize>(
    x: [std::arch::x86_64::__m512; N],
) -> [std::arch::x86_64::__m512; N] {
    use std::arch::x86_64::*;
    use std::array::from_fn;
    let all = _mm512_set1_ps;
    // Less the next whole number below, which is what `scalef` takes of it.
    let r: [__m512; N] = from_fn(|i| _mm512_reduce_ps::<_MM_FROUND_TO_NEG_INF>(x[i]));
    let mut p = [all(PARTS[0]); N];
    for part in &PARTS[1..] {
        p = from_fn(|i| _mm512_fmadd_ps(p[i], r[i], all(*part)));
    }
    // Subnormal numbers would be slow wherever they go.
    let counts = |x| _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, all(-126.0));
    from_fn(|i| _mm512_maskz_scalef_ps(counts(x[i]), p[i], x[i]))
}

/// Sums sixteen lanes in a fixed order.
#[inline(always)]
pub(crate) fn sum16(v: &[f32; 16]) -> f32 {
    let mut v = *v;
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            v[i] += v[i + width];
        }
        width /= 2;
    }
    v[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut x = -100.0f32;
        while x < 88.0 {
            let expected = f64::from(x).exp();
            for got in [exp::<true>(x), exp::<false>(x)] {
                let error = (f64::from(got) - expected).abs();
                assert!(error <= expected * 3e-7 + 2e-38, "{x}: {got} {expected}");
            }
            x += 0.0137;
        }
        assert_eq!(exp::<true>(0.0), 1.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
    }
}
