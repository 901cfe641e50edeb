//! Stored elements as floats, and the scales of those that are codes.

#![expect(unsafe_code, reason = "elements are addressed by pointers")]

use nuthatch_types::KvDtype;

use crate::coded::e4m3_as_half;
use crate::pack::f16_to_f32;
use crate::versions::versions;

/// Element `i`; a code is the number that its scale is for.
///
/// # Safety
///
/// Element `i` from `start` exists.
#[inline(always)]
pub(super) unsafe fn load(dtype: KvDtype, start: *const u8, i: usize) -> f32 {
    // SAFETY: the caller promises that element `i` exists.
    unsafe {
        match dtype {
            KvDtype::F32 => start.cast::<f32>().add(i).read_unaligned(),
            KvDtype::F16 => f16_to_f32(start.cast::<u16>().add(i).read_unaligned()),
            KvDtype::Bf16 => {
                f32::from_bits(u32::from(start.cast::<u16>().add(i).read_unaligned()) << 16)
            }
            KvDtype::Int8(_) => f32::from(start.cast::<i8>().add(i).read()),
            KvDtype::Fp8(_) => f16_to_f32(e4m3_as_half(start.add(i).read())),
        }
    }
}

versions! {
    /// Converts stored elements of one or two bytes to floats, codes without their scales.
    pub(crate) fn to_floats(dtype: KvDtype, source: &[u8], target: &mut [f32]) = to_floats_inner;
}

#[inline(always)]
fn to_floats_inner<const FUSED: bool>(dtype: KvDtype, source: &[u8], target: &mut [f32]) {
    let halves = source.as_chunks::<2>().0;
    match dtype {
        KvDtype::F16 => {
            for (target, &half) in target.iter_mut().zip(halves) {
                *target = f16_to_f32(u16::from_le_bytes(half));
            }
        }
        KvDtype::Int8(_) => {
            for (target, &code) in target.iter_mut().zip(source) {
                *target = f32::from(code.cast_signed());
            }
        }
        KvDtype::Fp8(_) => {
            for (target, &code) in target.iter_mut().zip(source) {
                *target = f16_to_f32(e4m3_as_half(code));
            }
        }
        KvDtype::Bf16 | KvDtype::F32 => {
            for (target, &half) in target.iter_mut().zip(halves) {
                *target = f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16);
            }
        }
    }
}

versions! {
    /// Multiplies scores, or weights, by what belongs to their tokens.
    pub(super) fn scale_row(row: &mut [f32], scales: &[f32]) = scale_row_inner;
}

#[inline(always)]
fn scale_row_inner<const FUSED: bool>(row: &mut [f32], scales: &[f32]) {
    for (x, &scale) in row.iter_mut().zip(scales) {
        *x *= scale;
    }
}
