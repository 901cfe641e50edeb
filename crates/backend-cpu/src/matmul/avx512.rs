//! The vector kernels for AVX-512 with VNNI: codes are unfolded in registers, sixteen outputs to a
//! register, and multiplied with the broadcast codes of the activations.

#![expect(unsafe_code, reason = "vector loads read through raw pointers")]

use std::arch::x86_64::*;

use nuthatch_backend::WeightType;

use super::MAX_TILE;
use crate::acts::Acts;
use crate::mem::fetch_line;
use crate::pack::{BLOCK, Float, Format, LANES, QUAD_BYTES, QUADS, Scales, with_format};

type Sums = [[f32; LANES]; MAX_TILE];

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
                    1 => group_codes::<F, 1>(bytes, acts, start, sums),
                    2 => group_codes::<F, 2>(bytes, acts, start, sums),
                    4 => group_codes::<F, 4>(bytes, acts, start, sums),
                    _ => group_codes::<F, 8>(bytes, acts, start, sums),
                }
            }
        },
        float => unreachable!("floats have their own kernel"));
}

/// Bytes from what is multiplied to what is fetched meanwhile. One row of activations uses weights faster than
/// they come, and what fetches lines by itself stops at the end of each page of memory. Measured: 2 KB is 2 %
/// slower in a step.
const AHEAD: usize = 4096;

/// Lets the first cache fetch some bytes.
#[inline]
fn fetch(start: *const u8, n: usize) {
    for line in (0..n).step_by(64) {
        fetch_line::<true>(start.wrapping_add(line));
    }
}

/// # Safety
///
/// The machine has the features; `bytes` holds the units of all blocks of `acts`; rows
/// `start..start + M` exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn group_codes<F: Format, const M: usize>(
    bytes: &[u8],
    acts: &Acts,
    start: usize,
    sums: &mut Sums,
) {
    let mut sum = [_mm512_setzero_ps(); M];
    let mut unit = bytes.as_ptr();
    let mut block_index = 0;
    while block_index < acts.n_blocks {
        if M == 1 {
            fetch(unit.wrapping_add(AHEAD), F::UNIT_BYTES);
        }
        for b in 0..F::BLOCKS {
            let at = acts.index(start, block_index + b);
            // SAFETY: the caller promises the sizes; `unit` stays inside `bytes`, `at + M` inside
            // the activations.
            unsafe {
                let quads = unfold::<F>(unit.add(F::HEADER_BYTES + b * F::BLOCK_BYTES));
                for sub in 0..F::SUBS {
                    let (scale, min) = scales::<F>(unit, b, sub);
                    let sum_at = acts.sum_index(start, block_index + b, (F::SUBS, sub));
                    for (m, sum) in sum.iter_mut().enumerate() {
                        let x = acts.codes.as_ptr().add((at + m) * BLOCK);
                        let x_sum = *acts.sums.get_unchecked(sum_at + m);
                        let dot = dot::<F>(&quads, x, sub, x_sum);
                        let x_scale = *acts.scale.get_unchecked(at + m);
                        let both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
                        *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, *sum);
                        if F::MINS {
                            let x = _mm512_set1_ps(*acts.scaled_sums.get_unchecked(sum_at + m));
                            *sum = _mm512_fmadd_ps(min, x, *sum);
                        }
                    }
                }
            }
        }
        block_index += F::BLOCKS;
        // SAFETY: at most one past the last unit.
        unit = unsafe { unit.add(F::UNIT_BYTES) };
    }
    for (target, sum) in sums.iter_mut().zip(sum) {
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(target.as_mut_ptr(), sum) };
    }
}

/// Exact dot products of 16 rows' codes, less their offset, with one block or half block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot<F: Format>(
    quads: &[__m512i; QUADS],
    x: *const i8,
    sub: usize,
    x_sum: i32,
) -> __m512i {
    let n = QUADS / F::SUBS;
    // Two chains, because one would wait for the latency of each step.
    let mut even = _mm512_set1_epi32(-F::OFFSET * x_sum);
    let mut odd = _mm512_setzero_si512();
    for q in (0..n).step_by(2) {
        let q = sub * n + q;
        // SAFETY: the caller promises 32 codes at `x`.
        unsafe {
            let x = x.cast::<i32>().add(q);
            even = _mm512_dpbusd_epi32(even, quads[q], _mm512_set1_epi32(x.read_unaligned()));
            let next = x.add(1).read_unaligned();
            odd = _mm512_dpbusd_epi32(odd, quads[q + 1], _mm512_set1_epi32(next));
        }
    }
    _mm512_add_epi32(even, odd)
}

/// The eight quads of a block, one byte a code.
///
/// # Safety
///
/// `block` points to `F::BLOCK_BYTES` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn unfold<F: Format>(block: *const u8) -> [__m512i; QUADS] {
    // SAFETY: callers below stay inside the block's planes.
    let load = |i: usize| unsafe { _mm512_loadu_si512(block.add(i * QUAD_BYTES).cast()) };
    let mut quads = [_mm512_setzero_si512(); QUADS];
    match F::BITS {
        8 => {
            for (q, quad) in quads.iter_mut().enumerate() {
                *quad = load(q);
            }
        }
        2 | 3 => {
            for (q, quad) in quads.iter_mut().enumerate() {
                *quad = bits(load(q % 2), 2 * (q / 2), 0, 3);
            }
        }
        _ => {
            for i in 0..4 {
                let both = load(i);
                quads[i] = bits(both, 0, 0, 15);
                quads[i + 4] = bits(both, 4, 0, 15);
            }
        }
    }
    for (q, quad) in quads.iter_mut().enumerate() {
        match F::BITS {
            3 => *quad = _mm512_or_si512(*quad, bits(load(2), q, 2, 1)),
            5 => *quad = _mm512_or_si512(*quad, bits(load(4), q, 4, 1)),
            6 => *quad = _mm512_or_si512(*quad, bits(load(4 + q % 2), 2 * (q / 2), 4, 3)),
            _ => {}
        }
    }
    quads
}

/// Moves the bits of `mask` from position `from` of each byte to position `to`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bits(v: __m512i, from: usize, to: usize, mask: u8) -> __m512i {
    let mask = _mm512_set1_epi8((mask << to).cast_signed());
    // Bytes have no shift of their own; what crosses a byte's border is masked away.
    let shifted = match from as isize - to as isize {
        0 => v,
        1 => _mm512_srli_epi16::<1>(v),
        2 => _mm512_srli_epi16::<2>(v),
        3 => _mm512_srli_epi16::<3>(v),
        4 => _mm512_srli_epi16::<4>(v),
        5 => _mm512_srli_epi16::<5>(v),
        6 => _mm512_srli_epi16::<6>(v),
        -1 => _mm512_slli_epi16::<1>(v),
        -2 => _mm512_slli_epi16::<2>(v),
        -3 => _mm512_slli_epi16::<3>(v),
        -4 => _mm512_slli_epi16::<4>(v),
        _ => unreachable!("planes are at most 8 bits"),
    };
    _mm512_and_si512(shifted, mask)
}

/// Scales and minima of 16 rows for half `sub` of block `b`.
///
/// # Safety
///
/// `header` points to `F::HEADER_BYTES` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn scales<F: Format>(
    header: *const u8,
    b: usize,
    sub: usize,
) -> (__m512, __m512) {
    // SAFETY: the offsets are those of `Format::HEADER_BYTES`.
    unsafe {
        let d = halves(header);
        let zero = _mm512_setzero_ps();
        match F::SCALES {
            Scales::Half => (d, zero),
            Scales::HalfMin => (d, halves(header.add(32))),
            Scales::ByteMin => {
                let scale = bytes(header.add(64 + b * LANES));
                let min = bytes(header.add(64 + 128 + b * LANES));
                let min = _mm512_mul_ps(halves(header.add(32)), min);
                (_mm512_mul_ps(d, scale), _mm512_sub_ps(zero, min))
            }
            Scales::Signed => {
                let scale = _mm_loadu_si128(header.add(32 + (2 * b + sub) * LANES).cast());
                (_mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scale))), zero)
            }
            Scales::Nibbles => {
                let both = _mm_loadu_si128(header.add(64 + (2 * b + sub) * LANES).cast());
                let both = _mm512_cvtepu8_epi32(both);
                let scale = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
                let min = _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(both));
                let min = _mm512_mul_ps(halves(header.add(32)), min);
                (_mm512_mul_ps(d, scale), _mm512_sub_ps(zero, min))
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves(source: *const u8) -> __m512 {
    // SAFETY: the caller promises 32 bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(source.cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bytes(source: *const u8) -> __m512 {
    // SAFETY: the caller promises 16 bytes.
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(source.cast()) }))
}

/// Sums of `n` rows (a power of two) with one group of float weights.
pub(super) fn floats(float: Float, bytes: &[u8], x: &[f32], n: usize, sums: &mut Sums) {
    let cols = x.len() / n;
    assert_eq!(bytes.len(), cols * LANES * float.bytes());
    // SAFETY: the machine has the features (`Cpu::new` checked); the size is asserted above, and
    // `x` holds `n` rows of `cols`.
    unsafe {
        match n {
            1 => group_floats::<1>(float, bytes, x, cols, &mut sums[..1]),
            2 => group_floats::<2>(float, bytes, x, cols, &mut sums[..2]),
            4 => group_floats::<4>(float, bytes, x, cols, &mut sums[..4]),
            _ => {
                let (low, high) = x.split_at(4 * cols);
                group_floats::<4>(float, bytes, low, cols, &mut sums[..4]);
                group_floats::<4>(float, bytes, high, cols, &mut sums[4..8]);
            }
        }
    }
}

#[inline(always)]
unsafe fn group_floats<const M: usize>(
    float: Float,
    bytes: &[u8],
    x: &[f32],
    cols: usize,
    sums: &mut [[f32; LANES]],
) {
    // SAFETY: promised by the caller.
    unsafe {
        match float {
            Float::F32 => float_group::<M, 0>(bytes, x, cols, sums),
            Float::F16 => float_group::<M, 1>(bytes, x, cols, sums),
            Float::Bf16 => float_group::<M, 2>(bytes, x, cols, sums),
        }
    }
}

/// `KIND`: 0 f32, 1 f16, 2 bf16.
///
/// # Safety
///
/// The machine has the features; `bytes` holds `cols` columns of 16 weights and `x` `M` rows of
/// `cols`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
unsafe fn float_group<const M: usize, const KIND: usize>(
    bytes: &[u8],
    x: &[f32],
    cols: usize,
    sums: &mut [[f32; LANES]],
) {
    let mut parts = [[_mm512_setzero_ps(); 4]; M];
    let mut col = 0;
    // SAFETY: `col` is below `cols`, so weights and activations are inside their slices.
    let mut step = |col: usize, p: usize| unsafe {
        let w = if KIND == 0 {
            _mm512_loadu_ps(bytes.as_ptr().add(col * LANES * 4).cast())
        } else {
            let half = _mm256_loadu_si256(bytes.as_ptr().add(col * LANES * 2).cast());
            if KIND == 1 {
                _mm512_cvtph_ps(half)
            } else {
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
            }
        };
        for (m, parts) in parts.iter_mut().enumerate() {
            let x = _mm512_set1_ps(*x.get_unchecked(m * cols + col));
            parts[p] = _mm512_fmadd_ps(w, x, parts[p]);
        }
    };
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
        let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(target.as_mut_ptr(), sum) };
    }
}
