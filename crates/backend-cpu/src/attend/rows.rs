//! The products of attention over rows, `[K|V][D]`, each somewhere else.

#![expect(unsafe_code, reason = "rows are addressed by pointers")]

use nuthatch_types::KvDtype;

use super::element::{load, scale_row};
use crate::coded::{code, scale_at};
use crate::isa::Isa;
use crate::kv::PAGE;
use crate::plan::CHUNK;
use crate::versions::{fma, sum16, versions};

/// Rows of one head: where each one's key starts; its value follows.
pub(crate) struct Rows<'a> {
    pub(crate) dtype: KvDtype,
    pub(crate) d: usize,
    pub(crate) at: &'a [*const u8],
}

impl Rows<'_> {
    /// Bytes of a key, or a value, with its scale.
    fn vector_bytes(&self) -> usize {
        self.dtype.scale_bytes() + self.d * self.dtype.bytes()
    }

    /// Multiplies what belongs to the rows, `[group][CHUNK]`, by the scales of their keys or values.
    fn scale(&self, isa: Isa, is_value: bool, group: usize, x: &mut [f32]) {
        let Some(code) = code(self.dtype) else { return };
        let first = if is_value { self.vector_bytes() } else { 0 };
        let mut scales = [0.0; CHUNK];
        for (scale, &row) in scales.iter_mut().zip(self.at) {
            // SAFETY: a row has a key and a value, and each begins with its scale.
            let bytes = unsafe { std::slice::from_raw_parts(row.add(first), size_of::<f32>()) };
            *scale = scale_at(code, bytes);
        }
        for x in x.chunks_exact_mut(CHUNK).take(group) {
            scale_row(isa, &mut x[..self.at.len()], &scales);
        }
    }
}

/// `scores[g][j] = q[g] . k[j]`; `scores` has rows of [`CHUNK`].
pub(crate) fn row_scores(isa: Isa, rows: &Rows<'_>, group: usize, q: &[f32], scores: &mut [f32]) {
    assert!(q.len() >= group * rows.d && scores.len() >= group * CHUNK && rows.at.len() <= CHUNK);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx if rows.d.is_multiple_of(16) => {
            vectors::scores(rows, group, q, scores);
        }
        isa => plain_scores(isa, rows, group, q, scores),
    }
    rows.scale(isa, false, group, scores);
}

/// `out[g] = sum of p[g][j] v[j]`; `p` may be changed.
pub(super) fn row_mix(isa: Isa, rows: &Rows<'_>, group: usize, p: &mut [f32], out: &mut [f32]) {
    assert!(p.len() >= group * CHUNK && out.len() >= group * rows.d && rows.at.len() <= CHUNK);
    rows.scale(isa, true, group, p);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx if rows.d.is_multiple_of(16) => vectors::mix(rows, group, p, out),
        isa => plain_mix(isa, rows, group, p, out),
    }
}

versions! {
    fn plain_scores(rows: &Rows<'_>, group: usize, q: &[f32], scores: &mut [f32]) = scores_inner;
}

#[inline(always)]
fn scores_inner<const FUSED: bool>(rows: &Rows<'_>, group: usize, q: &[f32], scores: &mut [f32]) {
    let (d, first) = (rows.d, rows.dtype.scale_bytes());
    for (j, &row) in rows.at.iter().enumerate() {
        for g in 0..group {
            let mut sums = [0.0; 16];
            for (e, &q) in q[g * d..(g + 1) * d].iter().enumerate() {
                // SAFETY: a row has a key of `d` elements.
                let k = unsafe { load(rows.dtype, row.add(first), e) };
                sums[e % 16] = fma::<FUSED>(q, k, sums[e % 16]);
            }
            scores[g * CHUNK + j] = sum16(&sums);
        }
    }
}

versions! {
    fn plain_mix(rows: &Rows<'_>, group: usize, p: &[f32], out: &mut [f32]) = mix_inner;
}

#[inline(always)]
fn mix_inner<const FUSED: bool>(rows: &Rows<'_>, group: usize, p: &[f32], out: &mut [f32]) {
    let (d, first) = (rows.d, rows.vector_bytes() + rows.dtype.scale_bytes());
    for g in 0..group {
        let out = &mut out[g * d..(g + 1) * d];
        out.fill(0.0);
        for (j, &row) in rows.at.iter().enumerate() {
            let p = p[g * CHUNK + j];
            for (e, out) in out.iter_mut().enumerate() {
                // SAFETY: after the key, a row has a value of `d` elements.
                let v = unsafe { load(rows.dtype, row.add(first), e) };
                *out = fma::<FUSED>(p, v, *out);
            }
        }
    }
}

/// Bytes of a key and a value.
fn row_bytes(dtype: KvDtype, d: usize) -> usize {
    2 * (dtype.scale_bytes() + d * dtype.bytes())
}

/// Converts a page of rows to `[D][16]` keys and `[16][D]` values, codes without their scales.
pub(super) fn to_page(isa: Isa, dtype: KvDtype, rows: &[u8], keys: &mut [f32], values: &mut [f32]) {
    let d = keys.len() / PAGE;
    assert!(values.len() == PAGE * d && rows.len() == PAGE * row_bytes(dtype, d));
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx if d.is_multiple_of(16) => {
            vectors::to_page(dtype, rows, keys, values);
        }
        isa => plain_to_page(isa, dtype, rows, keys, values),
    }
}

versions! {
    fn plain_to_page(dtype: KvDtype, rows: &[u8], keys: &mut [f32], values: &mut [f32]) = to_page_inner;
}

#[inline(always)]
fn to_page_inner<const FUSED: bool>(
    dtype: KvDtype,
    rows: &[u8],
    keys: &mut [f32],
    values: &mut [f32],
) {
    let d = keys.len() / PAGE;
    for (token, row) in rows.chunks_exact(row_bytes(dtype, d)).enumerate() {
        let (key, value) = row.split_at(row.len() / 2);
        let [key, value] = [key, value].map(|x| x[dtype.scale_bytes()..].as_ptr());
        for e in 0..d {
            // SAFETY: a key and a value have `d` elements each.
            let (k, v) = unsafe { (load(dtype, key, e), load(dtype, value, e)) };
            keys[e * PAGE + token] = k;
            values[token * d + e] = v;
        }
    }
}

/// The same for AVX-512; widths are multiples of 16.
#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::*;

    use nuthatch_types::KvDtype;

    use super::Rows;
    use crate::attend::avx512::{Bf16, Element, F16, F32, Fp8, Int8, next_block};
    use crate::kv::PAGE;
    use crate::plan::CHUNK;

    /// Rows are fetched this far ahead: a row is a few cache lines that no prefetcher foresees.
    /// Guessed.
    const AHEAD: usize = 12;
    const LINE_BYTES: usize = 64;

    /// Bytes of a key, or a value, with its scale.
    const fn vector_bytes<E: Element>(d: usize) -> usize {
        E::SCALE_BYTES + d * E::BYTES
    }

    pub(super) fn scores(rows: &Rows<'_>, group: usize, q: &[f32], scores: &mut [f32]) {
        match rows.dtype {
            KvDtype::F32 => all_scores::<F32>(rows, group, q, scores),
            KvDtype::F16 => all_scores::<F16>(rows, group, q, scores),
            KvDtype::Bf16 => all_scores::<Bf16>(rows, group, q, scores),
            KvDtype::Int8(_) => all_scores::<Int8>(rows, group, q, scores),
            KvDtype::Fp8(_) => all_scores::<Fp8>(rows, group, q, scores),
        }
    }

    fn all_scores<E: Element>(rows: &Rows<'_>, group: usize, q: &[f32], scores: &mut [f32]) {
        let d = rows.d;
        let mut g = 0;
        while g < group {
            let n = next_block(group - g, &[4, 3, 2, 1]);
            let q = &q[g * d..(g + n) * d];
            let scores = &mut scores[g * CHUNK..(g + n) * CHUNK];
            // SAFETY: the machine has AVX-512; `q` has `n` rows of `d`, `scores` `n` of `CHUNK`,
            // there are at most that many rows, and each has `2 d` elements.
            unsafe {
                match n {
                    4 => block_scores::<E, 4>(rows, q, scores),
                    3 => block_scores::<E, 3>(rows, q, scores),
                    2 => block_scores::<E, 2>(rows, q, scores),
                    _ => block_scores::<E, 1>(rows, q, scores),
                }
            }
            g += n;
        }
    }

    /// # Safety
    ///
    /// See `all_scores`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
    unsafe fn block_scores<E: Element, const R: usize>(
        rows: &Rows<'_>,
        q: &[f32],
        scores: &mut [f32],
    ) {
        let d = rows.d;
        let row_bytes = 2 * vector_bytes::<E>(d);
        let fetch = |row: *const u8| {
            for line in (0..row_bytes).step_by(LINE_BYTES) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(line).cast());
            }
        };
        rows.at.iter().take(AHEAD).for_each(|&row| fetch(row));
        for (j, &row) in rows.at.iter().enumerate() {
            if let Some(&next) = rows.at.get(j + AHEAD) {
                fetch(next);
            }
            let mut sums = [_mm512_setzero_ps(); R];
            for e in (0..d).step_by(16) {
                // SAFETY: elements `e..e + 16` of the key and of each query exist.
                unsafe {
                    let key = E::load(row.add(E::SCALE_BYTES + e * E::BYTES));
                    for (r, sum) in sums.iter_mut().enumerate() {
                        let q = _mm512_loadu_ps(q.as_ptr().add(r * d + e));
                        *sum = _mm512_fmadd_ps(q, key, *sum);
                    }
                }
            }
            for (r, &sum) in sums.iter().enumerate() {
                scores[r * CHUNK + j] = _mm512_reduce_add_ps(sum);
            }
        }
    }

    pub(super) fn mix(rows: &Rows<'_>, group: usize, p: &[f32], out: &mut [f32]) {
        match rows.dtype {
            KvDtype::F32 => mix_all::<F32>(rows, group, p, out),
            KvDtype::F16 => mix_all::<F16>(rows, group, p, out),
            KvDtype::Bf16 => mix_all::<Bf16>(rows, group, p, out),
            KvDtype::Int8(_) => mix_all::<Int8>(rows, group, p, out),
            KvDtype::Fp8(_) => mix_all::<Fp8>(rows, group, p, out),
        }
    }

    fn mix_all<E: Element>(rows: &Rows<'_>, group: usize, p: &[f32], out: &mut [f32]) {
        let d = rows.d;
        let mut g = 0;
        while g < group {
            let n = next_block(group - g, &[4, 3, 2, 1]);
            let p = &p[g * CHUNK..(g + n) * CHUNK];
            let out = &mut out[g * d..(g + n) * d];
            let mut e = 0;
            while e < d {
                let width = if e + 64 <= d { 4 } else { 1 };
                // SAFETY: the machine has AVX-512; `p` has `n` rows of `CHUNK` and there are at most
                // that many rows, `out` has `n` rows of `d`, and elements `e..e + 16 width` of each
                // value exist.
                unsafe {
                    match (n, width) {
                        (4, 4) => block_mix::<E, 4, 4>(rows, e, p, out),
                        (4, _) => block_mix::<E, 4, 1>(rows, e, p, out),
                        (3, 4) => block_mix::<E, 3, 4>(rows, e, p, out),
                        (3, _) => block_mix::<E, 3, 1>(rows, e, p, out),
                        (2, 4) => block_mix::<E, 2, 4>(rows, e, p, out),
                        (2, _) => block_mix::<E, 2, 1>(rows, e, p, out),
                        (_, 4) => block_mix::<E, 1, 4>(rows, e, p, out),
                        (_, _) => block_mix::<E, 1, 1>(rows, e, p, out),
                    }
                }
                e += width * 16;
            }
            g += n;
        }
    }

    /// # Safety
    ///
    /// See `mix_all`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
    unsafe fn block_mix<E: Element, const R: usize, const W: usize>(
        rows: &Rows<'_>,
        e: usize,
        p: &[f32],
        out: &mut [f32],
    ) {
        let d = rows.d;
        let mut sums = [[_mm512_setzero_ps(); W]; R];
        for (j, &row) in rows.at.iter().enumerate() {
            // SAFETY: the value has elements `e..e + 16 W`; `p` has entry `j` in each row.
            unsafe {
                let source = row.add(vector_bytes::<E>(d) + E::SCALE_BYTES + e * E::BYTES);
                let mut value = [_mm512_setzero_ps(); W];
                for (w, value) in value.iter_mut().enumerate() {
                    *value = E::load(source.add(w * 16 * E::BYTES));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let p = _mm512_set1_ps(*p.get_unchecked(r * CHUNK + j));
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum = _mm512_fmadd_ps(p, value, *sum);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (w, &sum) in sums.iter().enumerate() {
                // SAFETY: `out` has `R` rows of `d`.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(r * d + e + w * 16), sum) };
            }
        }
    }

    pub(super) fn to_page(dtype: KvDtype, rows: &[u8], keys: &mut [f32], values: &mut [f32]) {
        // SAFETY: the machine has AVX-512, and `super::to_page` checked the lengths.
        unsafe {
            match dtype {
                KvDtype::F32 => turn_page::<F32>(rows, keys, values),
                KvDtype::F16 => turn_page::<F16>(rows, keys, values),
                KvDtype::Bf16 => turn_page::<Bf16>(rows, keys, values),
                KvDtype::Int8(_) => turn_page::<Int8>(rows, keys, values),
                KvDtype::Fp8(_) => turn_page::<Fp8>(rows, keys, values),
            }
        }
    }

    /// # Safety
    ///
    /// `rows` is `[16][K|V][D]`, `keys` and `values` have `16 D` floats, `D` is a multiple of 16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
    unsafe fn turn_page<E: Element>(rows: &[u8], keys: &mut [f32], values: &mut [f32]) {
        let d = keys.len() / PAGE;
        for e in (0..d).step_by(16) {
            let mut tile = [_mm512_setzero_ps(); PAGE];
            for (token, tile) in tile.iter_mut().enumerate() {
                // SAFETY: the row has key elements `e..e + 16`, and as many of the value.
                unsafe {
                    let row = rows.as_ptr().add(token * 2 * vector_bytes::<E>(d));
                    let key = row.add(E::SCALE_BYTES + e * E::BYTES);
                    *tile = E::load(key);
                    let value = E::load(key.add(vector_bytes::<E>(d)));
                    _mm512_storeu_ps(values.as_mut_ptr().add(token * d + e), value);
                }
            }
            for (i, lane) in transpose(tile).into_iter().enumerate() {
                // SAFETY: element `e + i` of the sixteen keys.
                unsafe { _mm512_storeu_ps(keys.as_mut_ptr().add((e + i) * PAGE), lane) };
            }
        }
    }

    /// Lane `j` of row `i` becomes lane `i` of row `j`.
    #[target_feature(enable = "avx512f,avx512dq")]
    fn transpose(r: [__m512; 16]) -> [__m512; 16] {
        let mut pairs = r;
        for i in (0..16).step_by(2) {
            pairs[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        // Each group of four lanes now becomes one lane of four rows.
        let mut fours = pairs;
        for i in (0..16).step_by(4) {
            let (a, b) = (_mm512_castps_pd(pairs[i]), _mm512_castps_pd(pairs[i + 1]));
            let (c, d) = (_mm512_castps_pd(pairs[i + 2]), _mm512_castps_pd(pairs[i + 3]));
            fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            fours[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            fours[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            fours[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        // `fours[4 b + c]` has, in quarter `q`, column `4 q + c` of rows `4 b..4 b + 4`.
        let mut out = fours;
        for c in 0..4 {
            let [a, b, x, y] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
            let (even_low, odd_low) =
                (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            let (even_high, odd_high) =
                (_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
            out[c] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
            out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
            out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
            out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
        }
        out
    }
}
