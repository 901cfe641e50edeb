//! The vector kernels for AVX2: eight outputs to a register, so a group of sixteen is done in two halves.
//!
//! There is no instruction that multiplies bytes into sums of 32 bits. One multiplies them into sums of two
//! in 16 bits, of which as many are added there as fit, and only then widened: all of a block for codes of four bits
//! and fewer.

#![expect(unsafe_code, reason = "vector loads read through raw pointers")]

use std::arch::x86_64::*;

use nuthatch_backend::WeightType;

use super::MAX_TILE;
use crate::acts::Acts;
use crate::pack::{BLOCK, Float, Format, LANES, QUAD_BYTES, QUADS, Scales, with_format};

type Sums = [[f32; LANES]; MAX_TILE];

/// Outputs of a register.
const HALF: usize = LANES / 2;
/// Rows of wide codes at once: they need two registers of sums each.
const WIDE_ROWS: usize = 4;

/// Sums of rows `start..start + n` (a power of two) with one group of quantised weights.
pub(super) fn codes(
    dtype: WeightType,
    bytes: &[u8],
    acts: &Acts,
    start: usize,
    n: usize,
    sums: &mut Sums,
) {
    assert!(start + n <= acts.rows && start % acts.tile + n <= acts.tile, "rows of one tile");
    with_format!(dtype,
        F => {
            assert_eq!(bytes.len(), acts.n_blocks / F::BLOCKS * F::UNIT_BYTES);
            // SAFETY: the machine has the features (`Cpu::new` checked); sizes are asserted above.
            unsafe {
                match n {
                    1 => group_codes::<F, 1>(bytes, acts, start, &mut sums[..1]),
                    2 => group_codes::<F, 2>(bytes, acts, start, &mut sums[..2]),
                    4 => group_codes::<F, 4>(bytes, acts, start, &mut sums[..4]),
                    _ if F::BITS <= 4 => group_codes::<F, 8>(bytes, acts, start, sums),
                    _ => {
                        let (low, high) = sums.split_at_mut(WIDE_ROWS);
                        group_codes::<F, WIDE_ROWS>(bytes, acts, start, low);
                        group_codes::<F, WIDE_ROWS>(bytes, acts, start + WIDE_ROWS, high);
                    }
                }
            }
        },
        float => unreachable!("floats have their own kernel"));
}

/// # Safety
///
/// The machine has the features; `bytes` holds the units of all blocks of `acts`; rows
/// `start..start + M` exist, and `sums` has `M`.
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn group_codes<F: Format, const M: usize>(
    bytes: &[u8],
    acts: &Acts,
    start: usize,
    sums: &mut [[f32; LANES]],
) {
    let mut all = [[_mm256_setzero_ps(); 2]; M];
    let mut unit = bytes.as_ptr();
    let mut block_index = 0;
    while block_index < acts.n_blocks {
        for b in 0..F::BLOCKS {
            let at = acts.index(start, block_index + b);
            for half in 0..2 {
                for sub in 0..F::SUBS {
                    // SAFETY: the caller promises the sizes; `unit` stays inside `bytes`, `at + M` inside
                    // the activations.
                    unsafe {
                        let block = unit.add(F::HEADER_BYTES + b * F::BLOCK_BYTES);
                        let x = acts.codes.as_ptr().add(at * BLOCK);
                        let dots = dots::<F, M>(block.add(half * 32), x, sub);
                        let (scale, min) = scales::<F>(unit, b, sub, half);
                        let sum_at = acts.sum_index(start, block_index + b, (F::SUBS, sub));
                        for (m, (sum, dot)) in all.iter_mut().zip(dots).enumerate() {
                            let offset = F::OFFSET * *acts.sums.get_unchecked(sum_at + m);
                            let dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(offset));
                            let x_scale = _mm256_set1_ps(*acts.scale.get_unchecked(at + m));
                            let both = _mm256_mul_ps(scale, x_scale);
                            let sum = &mut sum[half];
                            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), both, *sum);
                            if F::MINS {
                                let x = _mm256_set1_ps(*acts.scaled_sums.get_unchecked(sum_at + m));
                                *sum = _mm256_fmadd_ps(min, x, *sum);
                            }
                        }
                    }
                }
            }
        }
        block_index += F::BLOCKS;
        // SAFETY: at most one past the last unit.
        unit = unsafe { unit.add(F::UNIT_BYTES) };
    }
    for (target, [low, high]) in sums.iter_mut().zip(all) {
        // SAFETY: 16 floats.
        unsafe {
            _mm256_storeu_ps(target.as_mut_ptr(), low);
            _mm256_storeu_ps(target.as_mut_ptr().add(HALF), high);
        }
    }
}

/// Quads whose products fit the 16 bits that they are added in: 127 twice a code.
const fn quads_in_16_bits(bits: usize) -> usize {
    match bits {
        0..=4 => QUADS,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Exact dot products of eight rows' codes with one block or half block of `M` rows of activations.
///
/// # Safety
///
/// `block` points to the half of the group's lanes, `x` to `M` blocks.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dots<F: Format, const M: usize>(
    block: *const u8,
    x: *const i8,
    sub: usize,
) -> [__m256i; M] {
    let ones = _mm256_set1_epi16(1);
    let mut narrow = [_mm256_setzero_si256(); M];
    let mut wide = [_mm256_setzero_si256(); M];
    for i in 0..QUADS / F::SUBS {
        let q = sub * (QUADS / F::SUBS) + i;
        // SAFETY: promised by the caller.
        let quad = unsafe { quad::<F>(block, q) };
        for m in 0..M {
            // SAFETY: as above.
            let x = unsafe { x.add(m * BLOCK).cast::<i32>().add(q).read_unaligned() };
            let x = _mm256_set1_epi32(x);
            if F::BITS == 8 {
                // 255 would not fit: seven bits, and the eighth by itself.
                let low = _mm256_maddubs_epi16(_mm256_and_si256(quad, _mm256_set1_epi8(127)), x);
                let high = _mm256_and_si256(_mm256_srli_epi16::<7>(quad), _mm256_set1_epi8(1));
                let high = _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(128));
                wide[m] =
                    _mm256_add_epi32(wide[m], _mm256_add_epi32(_mm256_madd_epi16(low, ones), high));
                continue;
            }
            narrow[m] = _mm256_add_epi16(narrow[m], _mm256_maddubs_epi16(quad, x));
            if (i + 1) % quads_in_16_bits(F::BITS) == 0 && F::BITS > 4 {
                wide[m] = _mm256_add_epi32(wide[m], _mm256_madd_epi16(narrow[m], ones));
                narrow[m] = _mm256_setzero_si256();
            }
        }
    }
    if F::BITS > 4 { wide } else { narrow.map(|sums| _mm256_madd_epi16(sums, ones)) }
}

/// One quad of eight rows, one byte a code.
///
/// # Safety
///
/// `block` points to half of the lanes of `F::BLOCK_BYTES` bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn quad<F: Format>(block: *const u8, q: usize) -> __m256i {
    // SAFETY: callers below stay inside the block's planes.
    let load = |i: usize| unsafe { _mm256_loadu_si256(block.add(i * QUAD_BYTES).cast()) };
    let low = match F::BITS {
        8 => load(q),
        2 | 3 => bits(load(q % 2), 2 * (q / 2), 0, 3),
        _ => bits(load(q % 4), q / 4 * 4, 0, 15),
    };
    match F::BITS {
        3 => _mm256_or_si256(low, bits(load(2), q, 2, 1)),
        5 => _mm256_or_si256(low, bits(load(4), q, 4, 1)),
        6 => _mm256_or_si256(low, bits(load(4 + q % 2), 2 * (q / 2), 4, 3)),
        _ => low,
    }
}

/// Moves the bits of `mask` from position `from` of each byte to position `to`.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(v: __m256i, from: usize, to: usize, mask: u8) -> __m256i {
    let mask = _mm256_set1_epi8((mask << to).cast_signed());
    // Bytes have no shift of their own; what crosses a byte's border is masked away.
    let shifted = match from.cmp(&to) {
        std::cmp::Ordering::Equal => v,
        std::cmp::Ordering::Greater => _mm256_srl_epi16(v, _mm_cvtsi64_si128((from - to) as i64)),
        std::cmp::Ordering::Less => _mm256_sll_epi16(v, _mm_cvtsi64_si128((to - from) as i64)),
    };
    _mm256_and_si256(shifted, mask)
}

/// Scales and minima of eight rows for half `sub` of block `b`.
///
/// # Safety
///
/// `header` points to `F::HEADER_BYTES` bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales<F: Format>(
    header: *const u8,
    b: usize,
    sub: usize,
    half: usize,
) -> (__m256, __m256) {
    let (lane, zero) = (half * HALF, _mm256_setzero_ps());
    // SAFETY: the offsets are those of `Format::HEADER_BYTES`.
    unsafe {
        let d = halves(header.add(2 * lane));
        let bytes_at = |at: usize| _mm_loadl_epi64(header.add(at + lane).cast());
        let min_d = || halves(header.add(32 + 2 * lane));
        match F::SCALES {
            Scales::Half => (d, zero),
            Scales::HalfMin => (d, min_d()),
            Scales::ByteMin => {
                let float = |at| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_at(at)));
                let min = _mm256_mul_ps(min_d(), float(64 + 128 + b * LANES));
                (_mm256_mul_ps(d, float(64 + b * LANES)), _mm256_sub_ps(zero, min))
            }
            Scales::Signed => {
                let scale = _mm256_cvtepi8_epi32(bytes_at(32 + (2 * b + sub) * LANES));
                (_mm256_mul_ps(d, _mm256_cvtepi32_ps(scale)), zero)
            }
            Scales::Nibbles => {
                let both = _mm256_cvtepu8_epi32(bytes_at(64 + (2 * b + sub) * LANES));
                let scale = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
                let min = _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(both));
                let min = _mm256_mul_ps(min_d(), min);
                (_mm256_mul_ps(d, scale), _mm256_sub_ps(zero, min))
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx,f16c")]
unsafe fn halves(source: *const u8) -> __m256 {
    // SAFETY: the caller promises 16 bytes.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(source.cast()) })
}

/// Sums of `n` rows (a power of two) with one group of float weights.
pub(super) fn floats(float: Float, bytes: &[u8], x: &[f32], n: usize, sums: &mut Sums) {
    let cols = x.len() / n;
    assert_eq!(bytes.len(), cols * LANES * float.bytes());
    let mut two = |first: usize, n: usize| {
        let (x, sums) = (&x[first * cols..][..n * cols], &mut sums[first..first + n]);
        // SAFETY: the machine has the features (`Cpu::new` checked); the size is asserted above, and
        // `x` holds `n` rows of `cols`.
        unsafe {
            match (n, float) {
                (1, Float::F32) => float_group::<1, 0>(bytes, x, cols, sums),
                (1, Float::F16) => float_group::<1, 1>(bytes, x, cols, sums),
                (1, Float::Bf16) => float_group::<1, 2>(bytes, x, cols, sums),
                (_, Float::F32) => float_group::<2, 0>(bytes, x, cols, sums),
                (_, Float::F16) => float_group::<2, 1>(bytes, x, cols, sums),
                (_, Float::Bf16) => float_group::<2, 2>(bytes, x, cols, sums),
            }
        }
    };
    match n {
        1 => two(0, 1),
        _ => (0..n).step_by(2).for_each(|first| two(first, 2)),
    }
}

/// `KIND`: 0 f32, 1 f16, 2 bf16.
///
/// # Safety
///
/// The machine has the features; `bytes` holds `cols` columns of 16 weights and `x` `M` rows of
/// `cols`.
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn float_group<const M: usize, const KIND: usize>(
    bytes: &[u8],
    x: &[f32],
    cols: usize,
    sums: &mut [[f32; LANES]],
) {
    for half in 0..2 {
        let mut parts = [[_mm256_setzero_ps(); 4]; M];
        // SAFETY: `col` is below `cols`, so weights and activations are inside their slices.
        let mut step = |col: usize, p: usize| unsafe {
            let at = col * LANES + half * HALF;
            let w = match KIND {
                0 => _mm256_loadu_ps(bytes.as_ptr().add(at * 4).cast()),
                1 => halves(bytes.as_ptr().add(at * 2)),
                _ => {
                    let bits = _mm_loadu_si128(bytes.as_ptr().add(at * 2).cast());
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
                }
            };
            for (m, parts) in parts.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.get_unchecked(m * cols + col));
                parts[p] = _mm256_fmadd_ps(w, x, parts[p]);
            }
        };
        let mut col = 0;
        while col + 4 <= cols {
            for p in 0..4 {
                step(col + p, p);
            }
            col += 4;
        }
        for p in 0..cols - col {
            step(col + p, p);
        }
        for (target, [a, b, c, d]) in sums.iter_mut().zip(parts) {
            let sum = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
            // SAFETY: eight floats of sixteen.
            unsafe { _mm256_storeu_ps(target.as_mut_ptr().add(half * HALF), sum) };
        }
    }
}
